"""The command line: what makes a function a recipe, the commands on checkpoints, and how a command ends."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
