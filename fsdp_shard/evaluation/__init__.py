"""Metrics of a model: perplexity, and the tasks of lm-evaluation-harness."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
