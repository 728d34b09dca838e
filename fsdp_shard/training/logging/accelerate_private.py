"""All private names of accelerate that the package uses; CONTRIBUTING.md lists where each would break."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def temporary_cpu_state() -> Iterator[None]:
    """Initialize accelerate's state, which its trackers need to log debug messages, and reset it afterwards.

    Without `_reset_state`, an Accelerator made later in the same process would run on the CPU. accelerate neither
    selects a GPU nor starts a process group here, but it may change the number of threads.
    """
    from accelerate import PartialState

    num_threads, existed = torch.get_num_threads(), PartialState._shared_state != {}
    PartialState(cpu=True)
    torch.set_num_threads(num_threads)
    try:
        yield
    finally:
        if not existed:
            PartialState._reset_state()
