"""Reads and writes torch.save files without torch and without running a pickle; the door of this folder.

Containers (`torch_zip`, `legacy_stream`), the pickles in them (`unpickler` with `allow_list`), tensors as byte ranges.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
