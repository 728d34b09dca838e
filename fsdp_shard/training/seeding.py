"""Random state as a function of the position in the run.

Dropout and whatever else draws random numbers is seeded anew from (seed, step, rank) before every step. So a resumed
step draws what it would have drawn, whatever ran in between (an evaluation, a save), and no random state is saved: the
seed and the step in trainer.json are all of it. On another number of ranks the draws differ, the samples do not.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager

from fsdp_shard.utils import set_environment


def step_seed(seed: int, step: int, rank: int) -> int:
    """A 63-bit seed that is unrelated for neighboring steps, ranks and seeds."""
    digest = hashlib.blake2b(f"fsdp-shard {seed} {step} {rank}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def seed_all(seed: int) -> None:
    """Seed the generators that models draw from: torch's on every device, numpy's and Python's."""
    import random

    import numpy
    import torch

    torch.manual_seed(seed)
    numpy.random.seed(seed & 0xFFFFFFFF)
    random.seed(seed)


@contextmanager
def deterministic_algorithms(enabled: bool) -> Iterator[None]:
    """With `enabled`, let torch use only operations that give the same bits each time, and refuse those that cannot.

    To be entered before anything is computed: cuBLAS reads its setting once. As it was before, on leaving.
    """
    if not enabled:
        yield
        return
    import torch

    cudnn, variable = torch.backends.cudnn, "CUBLAS_WORKSPACE_CONFIG"
    before = torch.are_deterministic_algorithms_enabled(), cudnn.deterministic, cudnn.benchmark
    torch.use_deterministic_algorithms(True)
    cudnn.deterministic, cudnn.benchmark = True, False
    try:
        with set_environment({variable: os.environ.get(variable, ":4096:8")}):
            yield
    finally:
        torch.use_deterministic_algorithms(before[0])
        cudnn.deterministic, cudnn.benchmark = before[1:]
