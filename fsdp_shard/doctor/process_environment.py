"""Checks the environment of a run's processes: variables with unnoticed effects, directories, limits."""

import os
import resource
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from fsdp_shard.distributed import LaunchConfig, num_cores, uses_gpus
from fsdp_shard.doctor.findings import Finding, local_ranks, warning
from fsdp_shard.errors import ConfigError
from fsdp_shard.utils import check_writable, format_count, format_size

_FEWEST_FILES = 1024  # checkpoints of many ranks, data workers and sockets are open at the same time


class Variable(NamedTuple):
    """An environment variable that is set for a purpose other than training.

    Attributes:
        name: Its name.
        harms: Whether one of its values does harm.
        text: Its effect and what to do, to print after its name and value.
        only_gpus: Whether it affects GPUs only.
    """

    name: str
    harms: Callable[[str], bool]
    text: str
    only_gpus: bool = False


def _is_on(value: str) -> bool:
    return value.strip().lower() not in ("", "0", "false", "off", "no")


_VARIABLES = (
    Variable("TRANSFORMERS_CACHE", bool, "is no longer read by transformers; set HF_HOME or HF_HUB_CACHE instead"),
    Variable("PYTORCH_TRANSFORMERS_CACHE", bool, "is no longer read by transformers; set HF_HOME or HF_HUB_CACHE"),
    Variable(
        "CUDA_LAUNCH_BLOCKING", _is_on, "is slow: it waits for each kernel, which is for debugging; unset it", True
    ),
    Variable(
        "TORCH_DISTRIBUTED_DEBUG",
        lambda value: value.upper() == "DETAIL",
        "is slow: ranks compare each collective before they begin it, which is for debugging; unset it",
    ),
    Variable(
        "PYTORCH_NO_CUDA_MEMORY_CACHING", _is_on, "is slow: each tensor is allocated by the driver; unset it", True
    ),
    Variable("NCCL_P2P_DISABLE", _is_on, "is slow: GPUs of a machine exchange data through its memory; unset it", True),
    Variable("NCCL_SHM_DISABLE", _is_on, "is slow: GPUs of a machine may communicate by its network; unset it", True),
    Variable("NCCL_IB_DISABLE", _is_on, "is slow: machines communicate over TCP, not InfiniBand; unset it", True),
    Variable(
        "NCCL_DEBUG",
        lambda value: value.upper() == "TRACE",
        "is slow: NCCL logs every call, which is for debugging; use WARN",
        True,
    ),
)


def check_environment(settings: LaunchConfig) -> Iterator[Finding]:
    """Find variables, directories and limits that would slow a run down, or end it later.

    Args:
        settings: The ranks of the run.

    Yields:
        Warnings only.
    """
    on_gpu = uses_gpus(settings)
    for name, harms, text, only_gpus in _VARIABLES:
        value = os.environ.get(name)
        if value is not None and harms(value) and (on_gpu or not only_gpus):
            yield warning(f"{name}={value} {text}.")
    yield from _threads(settings)
    yield from _directories()
    yield from _limits()


def _threads(settings: LaunchConfig) -> Iterator[Finding]:
    given, cores = os.environ.get("OMP_NUM_THREADS", ""), num_cores()
    num_ranks, named = local_ranks(settings)
    if given.isdecimal() and int(given) * num_ranks > max(cores, num_ranks):
        yield warning(
            f"OMP_NUM_THREADS={given} with {named} asks for {int(given) * num_ranks} "
            f"threads on {format_count(cores, 'core')}, which then wait for each other; unset it, and each rank takes "
            f"its part."
        )


def _directories() -> Iterator[Finding]:
    """Check the directories that libraries write to."""
    for name, instead in {
        "TMPDIR": f"temporary files go to {tempfile.gettempdir()} instead",
        "HF_HOME": "nothing can be fetched from the hub",
        "HF_HUB_CACHE": "nothing can be fetched from the hub",
        "HF_DATASETS_CACHE": "no dataset of the hub can be prepared",
    }.items():
        if not (path := os.environ.get(name)):
            continue
        try:
            check_writable(path, f"{name}={path}")
        except ConfigError as error:
            yield warning(f"{error} Until then, {instead}.")
        else:
            if name == "TMPDIR" and not Path(path).is_dir():
                yield warning(f"{name}={path} does not exist, so {instead}; make the directory, or unset it.")


def _limits() -> Iterator[Finding]:
    """Find process limits (`ulimit`), which are independent of the machine."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files < _FEWEST_FILES:
        yield warning(f"a process may open only {files} files; `ulimit -n 65536` allows more.")
    for kind, letter in {resource.RLIMIT_AS: "v", resource.RLIMIT_DATA: "d"}.items():
        if (limit := resource.getrlimit(kind)[0]) != resource.RLIM_INFINITY:
            yield warning(
                f"a process may have only {format_size(limit)} of addresses (ulimit -{letter}), of which torch and "
                f"CUDA take far more than they use: allocations may fail while memory is free. `ulimit -{letter} "
                f"unlimited` removes the limit."
            )
    if (limit := resource.getrlimit(resource.RLIMIT_CPU)[0]) != resource.RLIM_INFINITY:
        yield warning(
            f"a process is killed after it has computed for {limit} seconds (ulimit -t), and a rank has several "
            f"threads; `ulimit -t unlimited` removes the limit."
        )
