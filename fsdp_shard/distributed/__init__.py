"""The processes of a run: launching ranks, their rendezvous and process group, and signals."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
