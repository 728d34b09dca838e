"""Training a sharded model: the loop, optimizers, losses, LoRA, logging, and the checkpoints of a run."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
