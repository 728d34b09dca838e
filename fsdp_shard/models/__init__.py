"""Building models and tokenizers from their configs, their no-split blocks, their quantized layers."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
