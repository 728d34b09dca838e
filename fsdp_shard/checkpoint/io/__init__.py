"""Files and bytes: reading, writing, syncing, safetensors headers, element types. The folder's door within the room."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
