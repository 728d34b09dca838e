"""Checkpoints of any format, as lists of tensors with byte ranges: open, convert, verify, save and restore steps."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
