"""Models dispatched over GPU, CPU and disk, block by block, straight from a checkpoint; text generation with them."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
