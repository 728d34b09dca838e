"""The whole config of each command, made of the config dataclasses of the rooms, and composed through Hydra."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
