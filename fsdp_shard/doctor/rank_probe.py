"""Whether the ranks of a run find each other, agree on what they are, and how fast they talk: by starting them.

Each rank tells what it sees (`Facts`); what that means is worked out from all of them together (`judge`).
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from fsdp_shard.distributed import launch, uses_gpus, world_sizes
from fsdp_shard.doctor.findings import Finding, ok, problem
from fsdp_shard.doctor.machine import versions
from fsdp_shard.doctor.storage import there
from fsdp_shard.utils import format_size

if TYPE_CHECKING:
    from fsdp_shard.config import FinetuneConfig
    from fsdp_shard.distributed import DistributedContext

_REDUCED_BYTES = 16 << 20
_ROUNDS = 3


@dataclass(frozen=True)
class Facts:
    """What one rank is, and whether it `sees` the mark that rank 0 has left in each of some places."""

    host: str
    device: str
    versions: dict[str, str]
    sees: dict[str, bool]


def ranks(config: FinetuneConfig) -> Iterator[Finding]:
    """Start all ranks as finetune would, have them meet, and end them; on several machines, on each."""
    for num_ranks in world_sizes(config.launch):
        config.shard.check_ranks(num_ranks, on_gpu=uses_gpus(config.launch))
    if world_sizes(config.launch) == [1]:
        yield ok("one rank, which has nobody to meet")
        return
    with TemporaryDirectory() as scratch:
        told = Path(scratch) / "findings.json"
        launch(partial(_meet, str(told)), config)
        if not told.exists():
            yield ok("the ranks have met; the machine of rank 0 tells more")
            return
        for verdict, text in json.loads(told.read_text(encoding="utf-8")):
            yield Finding(verdict, text)


def judge(facts: Sequence[Facts], seconds: float, bytes_a_second: float) -> Iterator[Finding]:
    """What the facts of all ranks, in rank order, come to. Pure.

    `seconds`: until they had met; `bytes_a_second`: summing a tensor over all of them.
    """
    hosts = list(dict.fromkeys(fact.host for fact in facts))
    for fact in facts[1:]:
        differing = [
            f"{name} {fact.versions.get(name, 'none')} instead of {version}"
            for name, version in facts[0].versions.items()
            if fact.versions.get(name) != version
        ]
        if differing:
            yield problem(f"{fact.host} has {', '.join(differing)} of {facts[0].host}; install the same on all.")
            break
    for mark in facts[0].sees:
        if blind := [fact.host for fact in facts if not fact.sees[mark]]:
            yield problem(
                f"{blind[0]} does not see what {facts[0].host} writes to {mark}; give a directory that all machines "
                f"share."
            )
    placed = [(fact.host, fact.device) for fact in facts if fact.device != "cpu"]
    if twice := next((place for place in placed if placed.count(place) > 1), None):
        yield problem(f"two ranks drive {twice[1]} of {twice[0]}; each needs a GPU of its own.")
    machines = f"on {len(hosts)} machines " if len(hosts) > 1 else ""
    yield ok(
        f"{len(facts)} ranks {machines}({', '.join(dict.fromkeys(fact.device for fact in facts))}) met in "
        f"{seconds:.1f} s and sum {format_size(_REDUCED_BYTES)} at {format_size(bytes_a_second)}/s"
    )


def _meet(told: str, config: FinetuneConfig) -> None:
    """The work of one rank; rank 0 writes the findings to `told`."""
    from fsdp_shard.data import cache_directory
    from fsdp_shard.distributed import distributed

    settings, shard, begin = config.launch, config.shard, time.perf_counter()
    with distributed(
        settings.device,
        shard.replicas,
        settings.timeout_seconds,
        tensor_parallel=shard.tensor_parallel,
        expert_parallel=shard.expert_parallel,
    ) as context:
        context.beside(settings.timeout_seconds).barrier()  # saves have a group of their own
        seconds = time.perf_counter() - begin
        rate = _rate(context)
        with ExitStack() as marked:
            marks = context.decide(lambda: _mark(marked, [Path(config.run_dir), cache_directory(config.data)]))
            facts = context.all_gather_object(_facts(context, marks))
    if context.is_main:
        Path(told).write_text(json.dumps(list(judge(facts, seconds, rate))), encoding="utf-8")


def _facts(context: DistributedContext, marks: dict[str, str]) -> Facts:
    device = context.device
    return Facts(
        host=platform.node(),
        device=device.type if device.type == "cpu" else f"GPU {_identity(context)}",
        versions=versions(),
        sees={place: os.path.exists(mark) for place, mark in marks.items()},
    )


def _identity(context: DistributedContext) -> str:
    import torch

    return f"{context.local_rank} ({torch.cuda.get_device_properties(context.device).name})"


def _rate(context: DistributedContext) -> float:
    """Bytes a second of a sum over all ranks, the median of a few after one that is not counted."""
    import torch
    import torch.distributed as dist

    tensor = torch.ones(_REDUCED_BYTES // 4, device=context.device)
    took = []
    for _ in range(1 + _ROUNDS):
        begin = time.perf_counter()
        dist.all_reduce(tensor)
        if context.device.type == "cuda":
            torch.cuda.synchronize()
        took.append(time.perf_counter() - begin)
        tensor.fill_(1)
    return _REDUCED_BYTES / statistics.median(took[1:])


def _mark(marked: ExitStack, places: Sequence[Path]) -> dict[str, str]:
    """Make a directory in each of `places`, or the nearest one above that is there: {that: what was made in it}."""
    return {
        str(place): marked.enter_context(TemporaryDirectory(prefix=".fsdp-shard-doctor-", dir=place))
        for place in dict.fromkeys(map(there, places))
    }
