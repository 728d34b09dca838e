"""Random state as a function of the progress of the run.

Every source of random numbers, such as dropout, is seeded from (seed, step, rank) before each step. A resumed step
therefore draws the same numbers regardless of evaluations and saves in between, and no random state is saved. On
another number of ranks, the random numbers differ, but the samples do not.
"""

import hashlib
import os
import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy
import torch

from fsdp_shard.utils import set_environment


def derived_seed(*parts: int | str) -> int:
    """Return a 63-bit seed derived from `parts`; seeds of neighboring numbers are unrelated."""
    digest = hashlib.blake2b(" ".join(["fsdp-shard", *map(str, parts)]).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def seed_all(seed: int) -> None:
    """Seed the generators of torch (on every device), numpy and Python."""
    torch.manual_seed(seed)
    numpy.random.seed(seed & 0xFFFFFFFF)
    random.seed(seed)


@contextmanager
def tf32_products(enabled: bool) -> Iterator[None]:
    """With `enabled`, multiply float32 matrices in TF32 on GPUs. On exit, the previous setting is restored."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if enabled else before)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


@contextmanager
def deterministic_algorithms(enabled: bool) -> Iterator[None]:
    """With `enabled`, use only torch's deterministic algorithms, and raise for operations without one.

    Enter it before the first computation, as cuBLAS reads its setting once. On exit, the previous settings are
    restored.
    """
    if not enabled:
        yield
        return
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
