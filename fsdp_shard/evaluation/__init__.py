"""Evaluates models: perplexity, classification, rewards, generated answers, speed, and lm-evaluation-harness tasks."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
