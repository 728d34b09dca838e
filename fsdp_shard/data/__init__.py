"""Turns rows of text into batches of token ids, in one global order determined by the seed."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
