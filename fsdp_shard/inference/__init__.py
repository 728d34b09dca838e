"""Runs models spread over GPU, CPU and disk, block by block, straight from a checkpoint, and generates text."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
