"""fsdp-shard checkpoints in the trainers of other libraries, one file per library, imported on demand.

resumption.py contains the code that they share.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
