"""Random state as a function of the position in the run.

Dropout and whatever else draws random numbers is seeded anew from (seed, step, rank) before every step. So a resumed
step draws what it would have drawn, whatever ran in between (an evaluation, a save), and no random state is saved: the
seed and the step in trainer.json are all of it. On another number of ranks the draws differ, the samples do not.
"""

from __future__ import annotations

import hashlib


def step_seed(seed: int, step: int, rank: int) -> int:
    """A 63-bit seed that is unrelated for neighbouring steps, ranks and seeds."""
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
