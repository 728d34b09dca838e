"""fsdp-shard: fine-tune Hugging Face models under FSDP, keep their checkpoints, run inference from them.

`__init__.pyi` lists the Python interface. Each name is imported when it is first used, so that `import fsdp_shard`
alone loads neither torch nor transformers.
"""

import lazy_loader

__version__ = "0.1.0"

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
