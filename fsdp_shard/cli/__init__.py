"""The command line: recipes, the commands for checkpoints, and how commands end."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
