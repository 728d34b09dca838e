"""Shards a model over ranks along its no-split blocks: FSDP2, FSDP1, DDP, tensor and expert parallelism."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
