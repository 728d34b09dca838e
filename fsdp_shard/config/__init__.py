"""The complete config of each command, built from the config dataclasses of the rooms and composed with Hydra."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
