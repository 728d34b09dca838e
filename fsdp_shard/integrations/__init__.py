"""Checkpoints of fsdp-shard in the trainers of other libraries, one file each; the library of each is imported with it.

What they share is in resumption.py.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
