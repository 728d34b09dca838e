"""The steps of a run on disk: their files, manifest and retention. Door of this folder for its room."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
