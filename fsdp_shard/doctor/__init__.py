"""A dry run of `finetune`: the problems that it would hit, found before it starts."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
