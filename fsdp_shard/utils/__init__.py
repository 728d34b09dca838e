"""General helpers; nothing here knows models or checkpoints.

By purpose:
    settings, secrets             declaring settings of configs; redacting secrets
    text, printing, work_progress formatting values; printing them; progress of long work
    atomic_write                  files that appear complete or not at all
    bounded_read, file_limits, limited_process   files that may be hostile
    process_memory, environment   this process: memory, environment variables, optional packages
    tensors, partitioning         tensors of modules and of nested values; dividing work
    package_data                  the recipes and configs that ship
    torch_private                 all private names of torch
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
