"""Checkpoints of any format, as lists of tensors with byte ranges: open, convert, verify, save and restore steps.

From a path to tensors:
    location          RUN@best, a directory, an address or a hub id -> a `Location`
    formats/          recognizes a format, and reads its headers -> a `TensorIndex` (`index`), read by `piece_reader`
    keys/, adapters/  names, ties and dtypes; LoRA weights that are merged as they are read
    torch_pickle/     reads pickles without running their code
From tensors to files:
    conversion        plans a conversion; `transfer` moves the bytes
    sharded_state/    a rank's part of a step, on top of `steps/`, a run's steps on disk, and `io/`
For both:
    integrity/        verify, diff and inspect
    remote/           remote stores and the hub
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
