"""Run one function on every rank of a run: in this process, in ranks started here, or as a rank that others started.

Knows how processes are started, signaled and heard, and no recipe: `launch(work, config)` takes any config that has
a `launch: LaunchConfig`. Imports torch only when ranks are really started or joined.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol, TypeVar

from fsdp_shard.errors import ConfigError
from fsdp_shard.utils import set_environment, setting

_SECONDS_TO_LEAVE = 10.0  # for other ranks, before the one that serves their store is gone
_computed: list[str] = []  # the runs of which this process has been the only rank


@dataclass
class LaunchConfig:
    """How many processes a run has, and where. Inside torchrun or srun, their numbers count instead."""

    ranks: int = setting(1, "Processes on this machine; each drives one GPU, or its part of the cores.", minimum=1)
    nodes: str = setting(
        "1",
        "Machines; start the same command on each, with the same launch.rendezvous. 2:4 goes on with any number from "
        "2 to 4 as they come and go.",
    )
    rendezvous: str | None = setting(None, "host:port where the machines meet, on one of them; for launch.nodes > 1.")
    device: str = setting("auto", "auto takes GPUs when there are any.", choices=("auto", "cpu", "cuda"))
    timeout_seconds: float = setting(600.0, "A rank that waits longer than this for the others fails.", above=0.0)
    max_restarts: int = setting(0, "Start all ranks again at most this often after one has failed.", minimum=0)
    grace_seconds: int = setting(120, "Time to save after Ctrl-C or SIGTERM, before ranks are killed.", minimum=0)

    def check(self, prefix: str) -> None:
        """Refuse machines that cannot find each other."""
        if not re.fullmatch(r"[1-9]\d{0,4}(:[1-9]\d{0,4})?", str(self.nodes)) or self.min_nodes > self.max_nodes:
            raise ConfigError(f"{prefix}nodes={self.nodes} is neither a number of machines nor a range such as 2:4.")
        if self.max_nodes > 1 and self.rendezvous is None:
            raise ConfigError(
                f"{prefix}nodes={self.nodes} needs {prefix}rendezvous=host:port, where the machines meet; "
                f"take the name of one of them and a free port, such as node1:29400."
            )
        if self.rendezvous is not None and not re.fullmatch(r"(\[[0-9a-fA-F:]+\]|[^:\s]+):\d{1,5}", self.rendezvous):
            raise ConfigError(f"{prefix}rendezvous={self.rendezvous} is not host:port, such as node1:29400.")
        if self.max_nodes == 1 and self.rendezvous is not None:
            raise ConfigError(
                f"{prefix}rendezvous={self.rendezvous} would do nothing with {prefix}nodes=1, which is to be the "
                f"number of machines that meet there."
            )

    @property
    def min_nodes(self) -> int:
        return int(str(self.nodes).partition(":")[0])

    @property
    def max_nodes(self) -> int:
        return int(str(self.nodes).rpartition(":")[2])

    @property
    def is_elastic(self) -> bool:
        """Whether machines may come while the run is under way."""
        return self.min_nodes < self.max_nodes

    @property
    def num_ranks(self) -> int:
        """The fewest ranks that the run may have: most of it falls to each then."""
        return self.ranks * self.min_nodes


class Launchable(Protocol):
    """A config of a run that may have several ranks."""

    run_dir: str
    launch: LaunchConfig
    debug: bool


C = TypeVar("C", bound=Launchable)


def launch(work: Callable[[C], None], config: C, *, begin: Callable[[C], None] | None = None) -> None:
    """Call `work(config)` on every rank of the run that `config.launch` and the environment describe.

    `begin(config)` is called once in the whole run, before any rank works: in this process when it starts the ranks
    itself, else on rank 0. Ranks that others started (torchrun, srun, or ours on several machines) have each
    composed the same config, but for a run_dir that is named by the time: they all get rank 0's.

    Raises what a rank raised if that is one of our errors, RankError for anything else, and Interrupted after a signal.
    """
    begin = begin or _nothing
    settings = config.launch
    if joins(settings, os.environ):
        with set_environment(slurm_variables(os.environ)):
            work_together(work, config, begin)
    elif settings.ranks == settings.max_nodes == 1 and not settings.max_restarts:
        begin(config)
        _computed.append(config.run_dir)
        work(config)
    else:
        alone = settings.max_nodes == 1
        if alone:
            begin(config)
        _start_ranks(work if alone else _Together(work, begin), config)


def _start_ranks(work: Callable[[C], None], config: C) -> None:
    from fsdp_shard.distributed.local_workers import run_ranks

    settings = config.launch

    def prepare(share: Callable[[str, str], str]) -> None:
        # Named by the time, it would be another one on each machine, and after a restart.
        config.run_dir = share("run_dir", config.run_dir)

    run_ranks(
        work,
        config,
        ranks=settings.ranks,
        nodes=(settings.min_nodes, settings.max_nodes),
        rendezvous=settings.rendezvous if settings.max_nodes > 1 else None,
        max_restarts=settings.max_restarts,
        grace_seconds=settings.grace_seconds,
        timeout_seconds=settings.timeout_seconds,
        prepare=prepare,
        # A CUDA context does not survive a fork, nor do OpenMP's threads, which a sweep's earlier job of one rank has
        # left here; without them, forked ranks share what is imported already and are there in a tenth of the time.
        start_method="fork" if shares_memory(settings) and not _computed else "spawn",
        num_threads=_num_threads(settings),
        log=config.debug,
    )


def _num_threads(settings: LaunchConfig) -> int:
    """Of a rank: what OMP_NUM_THREADS says, else its part of the cores."""
    told = re.match(r"[1-9]\d*", os.environ.get("OMP_NUM_THREADS", ""))
    return int(told[0]) if told else max(1, num_cores() // settings.ranks)


def _nothing(config: object) -> None:
    """There is nothing to begin with."""


@dataclass(frozen=True)
class _Together:
    """`work_together` as one picklable function of the config."""

    work: Callable[..., None]
    begin: Callable[..., None]

    def __call__(self, config: Launchable) -> None:
        work_together(self.work, config, self.begin)


def work_together(work: Callable[[C], None], config: C, begin: Callable[[C], None]) -> None:
    """As one of several ranks described by the environment: take rank 0's run_dir, begin once, and work."""
    from fsdp_shard.distributed.process_group import join_store, leave_store

    # The store is kept until the work is done on all ranks: rank 0 may be serving it.
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = join_store(timeout_seconds=config.launch.timeout_seconds)
    key = "run_dir"
    try:
        if rank == 0:
            try:
                begin(config)
            except BaseException:
                store.set(key, "")
                raise
            store.set(key, config.run_dir)
        elif not (received := store.get(key)):
            sys.exit(1)  # rank 0 says why
        else:
            config.run_dir = received.decode()
        work(config)
    finally:
        leave_store(store, world_size, serves=rank == 0, seconds=_SECONDS_TO_LEAVE)


def joins(settings: LaunchConfig, environment: Mapping[str, str]) -> bool:
    """Whether this process is a rank that something else started: torchrun, or srun with several tasks."""
    return _inside_torchrun(environment) or _inside_srun(settings, environment)


def _inside_torchrun(environment: Mapping[str, str]) -> bool:
    # All four: some schedulers set WORLD_SIZE alone, and mean the number of machines.
    return all(name in environment for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"))


def _inside_srun(settings: LaunchConfig, environment: Mapping[str, str]) -> bool:
    """A batch script has SLURM_PROCID too; there, launch.ranks or launch.nodes say that the ranks are started here."""
    if "SLURM_PROCID" not in environment:
        return False
    if (of_step := environment.get("SLURM_STEP_NUM_TASKS")) is not None:
        return int(of_step) > 1
    return int(environment.get("SLURM_NTASKS", 1)) > 1 and settings.num_ranks == 1


def slurm_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """What torchrun would have set, worked out from srun's variables; nothing where torchrun has already."""
    if _inside_torchrun(environment):
        return {}
    num_tasks = environment.get("SLURM_STEP_NUM_TASKS") or environment["SLURM_NTASKS"]
    nodes = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST") or "localhost"
    # Jobs on one machine must not meet at the same port.
    port = 20000 + int(environment.get("SLURM_JOB_ID", 0)) % 10000
    variables = {
        "RANK": environment["SLURM_PROCID"],
        "WORLD_SIZE": num_tasks,
        "LOCAL_RANK": environment.get("SLURM_LOCALID", "0"),
        "MASTER_ADDR": first_node(nodes),
        "MASTER_PORT": str(port),
    }
    # What the user has set counts.
    return {name: environment.get(name, value) for name, value in variables.items()}


def first_node(nodes: str) -> str:
    """The first name of a Slurm node list: `gpu[007-011,42],cpu3` begins with gpu007."""
    match = re.match(r"([^\[,]+)(?:\[(\d+)[^\]]*\]([^,\[]*))?", nodes)
    return "".join(part or "" for part in match.groups()) if match else nodes


def is_joined_rank() -> bool:
    """Whether this process is one of several ranks that something else started."""
    return joins(LaunchConfig(), os.environ)


def joined_rank() -> int:
    """This process' rank among those; 0 when it is alone."""
    return int(os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0"))) if is_joined_rank() else 0


def world_sizes(settings: LaunchConfig) -> list[int]:
    """How many ranks the run may have in all: what torchrun or srun says, else launch.ranks on each of launch.nodes."""
    if not joins(settings, os.environ):
        return [settings.ranks * nodes for nodes in range(settings.min_nodes, settings.max_nodes + 1)]
    return [int((dict(os.environ) | slurm_variables(os.environ))["WORLD_SIZE"])]


def check_machine(settings: LaunchConfig, prefix: str = "launch.") -> None:
    """Raise ConfigError when this machine has no place for the ranks: fewer GPUs than ranks, or none at all.

    Imports torch unless `launch.device=cpu` or one rank takes what there is.
    """
    if joins(settings, os.environ):
        return
    if settings.device == "cpu" or (settings.device == "auto" and settings.ranks == 1):
        return
    num_gpus = count_gpus()
    if settings.device == "cuda" and num_gpus == 0:
        raise ConfigError(f"{prefix}device=cuda, but torch finds no GPU here; use {prefix}device=auto or cpu.")
    if 0 < num_gpus < settings.ranks:
        raise ConfigError(
            f"{prefix}ranks={settings.ranks} is more than the {num_gpus} GPU(s) of this machine, and each rank drives "
            f"one; use {prefix}ranks={num_gpus}, or {prefix}device=cpu to run on the CPU."
        )


def uses_gpus(settings: LaunchConfig) -> bool:
    """Whether ranks drive GPUs."""
    return settings.device == "cuda" or (settings.device == "auto" and count_gpus() > 0)


def shares_memory(settings: LaunchConfig) -> bool:
    """Whether ranks begin with what the process that was called has in memory: those that it forks."""
    return not joins(settings, os.environ) and not uses_gpus(settings)


def count_gpus() -> int:
    """GPUs that torch can use here."""
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def num_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0))
