"""Starts the ranks of a run to check that they meet and agree, and to measure their communication speed."""

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

import torch

from fsdp_shard import data, sharding
from fsdp_shard.config import FinetuneConfig
from fsdp_shard.distributed import DistributedContext, init_distributed, launch, run_on_main, uses_gpus, world_sizes
from fsdp_shard.doctor.disk import scratch_directory
from fsdp_shard.doctor.findings import PROBLEM, Finding, ok, problem
from fsdp_shard.doctor.machine import versions
from fsdp_shard.doctor.network import check_network
from fsdp_shard.utils import format_count, format_size, nearest_existing

_REDUCED_BYTES = 16 << 20
_ROUNDS = 3


@dataclass(frozen=True)
class RankFacts:
    """The facts that one rank reports.

    Attributes:
        host: Name of its machine.
        device: Its device: cpu, or the number and name of the GPU.
        versions: Versions of libraries on its machine.
        visible: For each directory that the run writes to, whether this rank sees what rank 0 wrote there.
        gpu_id: UUID of its GPU. If each rank sees only its own GPU, they all have number 0.
    """

    host: str
    device: str
    versions: dict[str, str]
    visible: dict[str, bool]
    gpu_id: str = ""


def check_ranks(config: FinetuneConfig) -> Iterator[Finding]:
    """Start all ranks as finetune would, let them meet, and end them; on several machines, run this on each."""
    for num_ranks in world_sizes(config.launch):
        sharding.check_ranks(config.shard, num_ranks, on_gpu=uses_gpus(config.launch))
    findings_before = list(check_network(config.launch))
    yield from findings_before
    if any(finding.mark == PROBLEM for finding in findings_before):
        return  # otherwise ranks would wait until their timeout
    if world_sizes(config.launch) == [1]:
        yield ok("one rank, which communicates with no other")
        return
    with TemporaryDirectory() as scratch:
        findings = Path(scratch) / "findings.json"
        launch(partial(_probe, str(findings)), config)
        if not findings.exists():
            yield ok("the ranks have met; the machine of rank 0 reports the details")
            return
        yield from (Finding(*found) for found in json.loads(findings.read_text(encoding="utf-8")))


def judge(facts: Sequence[RankFacts], seconds: float, bytes_per_second: float) -> Iterator[Finding]:
    """Find anything that keeps ranks from working together.

    Args:
        facts: The facts of all ranks, in rank order.
        seconds: Time until they met.
        bytes_per_second: Rate of an all-reduce over all ranks.

    Yields:
        The problems, followed by a summary.
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
    for directory in facts[0].visible:
        if blind := [fact.host for fact in facts if not fact.visible[directory]]:
            yield problem(
                f"{blind[0]} does not see what {facts[0].host} writes to {directory}; give a directory that all "
                f"machines share."
            )
    gpus = [(fact.host, fact.device, fact.gpu_id) for fact in facts if fact.device != "cpu"]
    if shared := next((gpu for gpu in gpus if gpus.count(gpu) > 1), None):
        yield problem(f"two ranks use {shared[1]} of {shared[0]}; each needs a GPU of its own.")
    machines = f"on {len(hosts)} machines " if len(hosts) > 1 else ""
    yield ok(
        f"{format_count(len(facts), 'rank')} {machines}({', '.join(dict.fromkeys(fact.device for fact in facts))}) met "
        f"in {seconds:.1f} s; all-reduce of {format_size(_REDUCED_BYTES)} at {format_size(bytes_per_second)}/s"
    )


def _probe(findings: str, config: FinetuneConfig) -> None:
    """Do the work of one rank; rank 0 writes the findings to the file `findings`."""
    settings, shard, begin = config.launch, config.shard, time.perf_counter()
    with init_distributed(
        settings.device,
        shard.replicas,
        settings.timeout_seconds,
        tensor_parallel=shard.tensor_parallel,
        expert_parallel=shard.expert_parallel,
        context_parallel=shard.context_parallel,
    ) as context:
        context.with_new_group(settings.timeout_seconds).barrier()  # saves use a separate group
        seconds = time.perf_counter() - begin
        rate = _all_reduce_rate(context)
        with ExitStack() as scratch:
            directories = [Path(config.run_dir), data.cache_directory(config.data)]
            written = run_on_main(context, lambda: _write_marks(scratch, directories))
            facts = context.all_gather_object(_facts(context, written))
    if context.is_main:
        Path(findings).write_text(json.dumps(list(judge(facts, seconds, rate))), encoding="utf-8")


def _facts(context: DistributedContext, written: dict[str, str]) -> RankFacts:
    device, gpu_id = context.device.type, ""
    if device == "cuda":
        properties = torch.cuda.get_device_properties(context.device)
        device, gpu_id = f"GPU {context.device.index} ({properties.name})", str(properties.uuid)
    visible = {directory: os.path.exists(mark) for directory, mark in written.items()}
    return RankFacts(platform.node(), device, versions(), visible, gpu_id)


def _all_reduce_rate(context: DistributedContext) -> float:
    """Bytes per second of an all-reduce: the median of several, after an uncounted one."""
    tensor = torch.ones(_REDUCED_BYTES // 4, device=context.device)
    seconds = []
    for _ in range(1 + _ROUNDS):
        begin = time.perf_counter()
        torch.distributed.all_reduce(tensor)
        if context.device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begin)
        tensor.fill_(1)
    return _REDUCED_BYTES / statistics.median(seconds[1:])


def _write_marks(scratch: ExitStack, directories: Sequence[Path]) -> dict[str, str]:
    """Make a directory in each of `directories`, or its nearest existing parent; return the new ones by directory."""
    existing = dict.fromkeys(map(nearest_existing, directories))
    return {str(directory): scratch.enter_context(scratch_directory(directory)) for directory in existing}
