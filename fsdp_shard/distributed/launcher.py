"""Runs a function on every rank of a run: in this process, in ranks started here, or as a rank that others started.

Also sets the environment variables of torch and NCCL for ranks. torch is imported only when ranks are actually started
or joined.
"""

import json
import os
import re
import socket
import sys
from collections.abc import Callable, Mapping
from datetime import timedelta
from functools import partial
from threading import Event
from typing import TYPE_CHECKING, Protocol, TypeVar

from fsdp_shard.distributed.agreement import common_settings, describe_other_setting
from fsdp_shard.distributed.config import Launchable, LaunchConfig
from fsdp_shard.distributed.hardware import can_bind_to_numa_nodes, count_gpus, num_cores
from fsdp_shard.distributed.started_ranks import is_allocation_only, joins, number_in, refuse_mpi, slurm_variables
from fsdp_shard.errors import ConfigError, RunError
from fsdp_shard.utils import first_line, format_count, refuse_changed, set_environment

if TYPE_CHECKING:
    from torch.distributed import Store

_SETTINGS = "fsdp-shard/settings"
_CHECKED = "fsdp-shard/checked"
_TIME_TO_CHECK = timedelta(days=1)  # a check may download a model; launchers notice the death of a rank
_SECONDS_TO_LEAVE = 10.0  # for other ranks, before the rank that serves their store exits
# For torch, unless the user has set them. gloo then connects two ranks only when they first communicate: few do, for
# any number of ranks.
_VARIABLES = {"TORCH_GLOO_LAZY_INIT": "1"}
# Expandable segments lose less memory to fragmentation. The flight recorder keeps each rank's last operations, and NCCL
# writes them when a collective exceeds launch.timeout_seconds.
_GPU_VARIABLES = {
    "PYTORCH_ALLOC_CONF": "expandable_segments:True",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
    "TORCH_FR_BUFFER_SIZE": "2000",
}
# For a process that is the only rank, instead of values that schedulers set for machines or another program left.
_ONE_RANK = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
_has_computed = Event()  # this process was the only rank of a run


C = TypeVar("C", bound=Launchable)
D = TypeVar("D", contravariant=True)


class Check(Protocol[D]):
    """A check of a config, done by one rank of each machine for all."""

    def check(self, config: D) -> str:
        """Check `config` and settle its open values; return the settled ones."""

    def accept(self, config: D, settled: str) -> None:
        """Set the settled values in `config` on another rank of the machine."""


def launch(
    work: Callable[[C], None],
    config: C,
    *,
    check: Check[C] | None = None,
    begin: Callable[[C], None] = lambda config: None,
    may_fork: bool = True,
) -> None:
    """Call `work(config)` on every rank of the run that `config.launch` and the environment describe.

    Ranks that others started (torchrun, srun, or this launcher on several machines) have each composed a config. They
    compare its settings, and all use rank 0's run_dir, because a run_dir named after the time differs.

    Args:
        work: What each rank does; must be picklable if ranks are spawned.
        config: Argument of `work`.
        check: Checks `config` first if others started the ranks: on the first rank of each machine, while the others
            wait. If the ranks start here, the caller has checked it.
        begin: Called with `config` once per run, before any rank works: in this process if it starts all ranks, else
            on rank 0. Must be picklable for several machines.
        may_fork: Whether CPU ranks may be forked from this process: not if other code has computed in it.

    Raises:
        FsdpShardError: What a rank raised; RankError if that is not an error of this package, Interrupted after a
            signal.
        ConfigError: This process is a rank that imports the program which starts the ranks.
    """
    _refuse_import_by_rank()
    settings = config.launch
    with set_environment(variables_for_torch(settings)):
        if joins(settings, os.environ):
            with set_environment(slurm_variables(os.environ)):
                _join_ranks(work, begin, config, check)
        elif settings.max_nodes > 1:
            _start_ranks(partial(_join_ranks, work, begin), config, may_fork=may_fork)
        elif settings.ranks > 1 or settings.max_restarts:
            begin(config)
            _start_ranks(work, config, may_fork=may_fork)
        else:
            begin(config)
            _has_computed.set()
            with set_environment({name: value for name, value in _ONE_RANK.items() if name in os.environ}):
                work(config)


def _refuse_import_by_rank() -> None:
    """Raise ConfigError if multiprocessing imports the program to start a rank, and the program starts ranks again."""
    # While it does, `__main__` is still the program of multiprocessing itself, which has no file. Elsewhere both are
    # the same, or runpy runs a file as `__main__`.
    imported, main = sys.modules.get("__mp_main__"), sys.modules["__main__"]
    if imported not in (None, main) and getattr(main, "__file__", None) is None:
        raise ConfigError(
            f"A rank imports {getattr(imported, '__file__', 'the program')}, which starts ranks as soon as it is "
            f'imported; put the call under `if __name__ == "__main__":`.'
        )


def variables_for_torch(settings: LaunchConfig) -> dict[str, str]:
    """Return the variables to set, without those already set; both names of the allocator's settings count."""
    wanted = _VARIABLES if settings.device == "cpu" else _VARIABLES | _GPU_VARIABLES
    is_set = {"PYTORCH_ALLOC_CONF"} if "PYTORCH_CUDA_ALLOC_CONF" in os.environ else set()
    return {name: value for name, value in wanted.items() if name not in {*os.environ, *is_set}}


def _start_ranks(work: Callable[[C], None], config: C, *, may_fork: bool) -> None:
    from fsdp_shard.distributed.local_workers import run_ranks

    settings = config.launch
    run_ranks(
        work,
        config,
        # A CUDA context does not survive a fork, nor do OpenMP threads that an earlier one-rank job of a sweep left in
        # this process. Otherwise forked ranks share the imported modules, and start ten times faster.
        start_method="fork" if may_fork and shares_memory(settings) and not _has_computed.is_set() else "spawn",
        num_threads=_num_threads(settings),
    )


def _num_threads(settings: LaunchConfig) -> int:
    """Return the threads of a rank: OMP_NUM_THREADS if set, else its share of the cores."""
    given = re.match(r"[1-9]\d*", os.environ.get("OMP_NUM_THREADS", ""))
    return int(given[0]) if given else max(1, num_cores() // settings.ranks)


def _join_ranks(
    work: Callable[[C], None], begin: Callable[[C], None], config: C, check: Check[C] | None = None
) -> None:
    """Join the ranks that the environment describes: check, use rank 0's run_dir, begin once, and work."""
    from torch.distributed import DistNetworkError, DistStoreError

    from fsdp_shard.distributed.key_value_store import join_store, leave_store

    # All are checked here: an error after the ranks have met would come as late as the last of them.
    rank, world_size, _ = (number_in(os.environ, name) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    try:  # the store is kept until the work is done on all ranks: rank 0 may be serving it
        store = join_store("env://", config.launch.timeout_seconds)
    except DistNetworkError as error:
        raise RunError(
            f"Rank {rank} of {world_size} has not reached rank 0 at {_address_text(config.launch, error)} Check that "
            f"the name is that of the machine of rank 0, that rank 0 runs, and that no firewall closes the port."
        ) from error
    except DistStoreError as error:
        raise RunError(
            f"Not all of the {world_size} ranks connected to {_address_text(config.launch, error)} "
            f"{_why_alone(world_size)}"
        ) from error
    try:
        try:
            _refuse_other_settings(config, store, rank, world_size)
            if check is not None:
                _check_once_per_machine(check, config, store, world_size)
            _agree_on_run_dir(begin, config, store, rank)
        except DistNetworkError as error:
            raise RunError(
                f"Rank {rank} of {world_size} lost rank 0 before the run began ({first_line(error).rstrip('.')}); see "
                f"why rank 0 ended."
            ) from error
        work(config)
    finally:
        leave_store(store, world_size, serves=rank == 0, seconds=_SECONDS_TO_LEAVE)


def _agree_on_run_dir(begin: Callable[[C], None], config: C, store: "Store", rank: int) -> None:
    """Begin the run on rank 0, and set `run_dir` to rank 0's on the others."""
    if rank == 0:
        try:
            begin(config)
        except BaseException:
            store.set("run_dir", "")
            raise
        store.set("run_dir", config.run_dir)
    elif not (received := store.get("run_dir")):
        sys.exit(1)  # rank 0 reports why
    else:
        config.run_dir = received.decode()


def _address_text(settings: LaunchConfig, error: Exception) -> str:
    """Describe where the ranks should have met, by when, and what prevented it, as the end of a sentence."""
    address = ":".join(os.environ[name] for name in ("MASTER_ADDR", "MASTER_PORT"))
    return (
        f"MASTER_ADDR:MASTER_PORT={address} within launch.timeout_seconds={settings.timeout_seconds:g} "
        f"({first_line(error).rstrip('.')})."
    )


def _why_alone(world_size: int) -> str:
    if is_allocation_only(os.environ):
        return (
            f"SLURM_NTASKS={world_size} are the tasks of the allocation, and srun has not started this process as one "
            f"of them: start it with srun, or set launch.ranks to start ranks from here."
        )
    return "Check that all of them were started, and that none has failed."


def _refuse_other_settings(config: Launchable, store: "Store", rank: int, world_size: int) -> None:
    """Raise ConfigError on all ranks if one has other settings than rank 0: each would train with its own."""
    if rank == 0:
        store.set(_SETTINGS, json.dumps(common_settings(config)))
    if error := describe_other_setting(config, json.loads(_wait_for(store, _SETTINGS)), rank):
        store.set(f"{_SETTINGS}/error", error)
    if store.add(f"{_SETTINGS}/ranks", 1) == world_size:
        has_error = store.check([f"{_SETTINGS}/error"])
        store.set(f"{_SETTINGS}/result", store.get(f"{_SETTINGS}/error").decode() if has_error else "")
    if error := _wait_for(store, f"{_SETTINGS}/result"):
        raise ConfigError(error)


def _check_once_per_machine(check: Check[C], config: C, store: "Store", world_size: int) -> None:
    """Check on each machine's first rank, and continue when all are done: one may have to download the model.

    A rank without a local number checks for itself.
    """
    machine = os.environ.get("GROUP_RANK", os.environ.get("SLURM_NODEID", socket.gethostname()))
    here = f"{_CHECKED}/{machine}"
    if os.environ.get("LOCAL_RANK", "0") == "0":
        try:
            settled = check.check(config)
        except BaseException:
            for key in (here, _CHECKED):
                store.set(key, "")
            raise
        store.set(here, settled)
    elif settled := _wait_for(store, here):
        check.accept(config, settled)
    if settled and store.add(f"{_CHECKED}/ranks", 1) == world_size:
        store.set(_CHECKED, "all")
    if not _wait_for(store, _CHECKED):
        sys.exit(1)  # the failed rank reports why


def _wait_for(store: "Store", key: str) -> str:
    store.wait([key], _TIME_TO_CHECK)
    return str(store.get(key).decode())


def rendezvous_endpoint(settings: LaunchConfig, environment: Mapping[str, str]) -> tuple[str, str] | None:
    """Return where the processes of a run meet, as setting names and host:port; None if they need not meet."""
    if joins(settings, environment):
        variables = {**environment, **slurm_variables(environment)}
        return "MASTER_ADDR:MASTER_PORT", f"{variables['MASTER_ADDR']}:{variables['MASTER_PORT']}"
    if settings.max_nodes > 1 and settings.rendezvous is not None:
        return "launch.rendezvous", settings.rendezvous
    return None


def is_joined_rank(settings: LaunchConfig | None = None) -> bool:
    """Return whether this process is one of several ranks that others started.

    Args:
        settings: The run's settings, if known: a Slurm batch script may start the ranks itself.
    """
    return joins(settings or LaunchConfig(), os.environ)


def joined_rank() -> int:
    """Return the rank of this process among those that others started; 0 if there are none."""
    text = os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0"))
    return int(text) if is_joined_rank() and text.isdecimal() else 0  # `_join_ranks` reports other text


def world_sizes(settings: LaunchConfig) -> list[int]:
    """Return the possible world sizes of the run: that of torchrun or srun, else launch.ranks times launch.nodes."""
    if not joins(settings, os.environ):
        return [settings.ranks * nodes for nodes in range(settings.min_nodes, settings.max_nodes + 1)]
    return [int((dict(os.environ) | slurm_variables(os.environ))["WORLD_SIZE"])]


def num_local_ranks(settings: LaunchConfig) -> int:
    """Return the number of ranks on this machine; all ranks, if whoever started them does not say."""
    if not joins(settings, os.environ):
        return settings.ranks
    variables = dict(os.environ) | slurm_variables(os.environ)
    return int(variables.get("LOCAL_WORLD_SIZE", variables["WORLD_SIZE"]))


def check_machine(settings: LaunchConfig) -> None:
    """Check that this machine has a GPU for each rank, where the ranks use GPUs, and what has started this process.

    Args:
        settings: Ranks and device of the run.

    Raises:
        ConfigError: If there are fewer GPUs than ranks, or none at all, or a setting has no effect: one for GPUs only,
            or for ranks that are started here; or if a program is missing that one needs.
    """
    if settings.numa_binding == "node" and not uses_gpus(settings):
        raise ConfigError(
            "launch.numa_binding=node has no effect without GPUs, to which processors are near; remove it."
        )
    refuse_mpi(settings)
    _refuse_settings_of_others(settings)
    if settings.numa_binding == "node" and not can_bind_to_numa_nodes():
        raise ConfigError(
            "launch.numa_binding=node needs the program numactl, which is not in a directory of PATH; install it "
            "(apt-get install numactl), or set launch.numa_binding=none."
        )
    needs_none = settings.device == "cpu" or (settings.device == "auto" and settings.ranks == 1)
    if needs_none or joins(settings, os.environ):
        return
    num_gpus = count_gpus()
    if settings.device == "cuda" and num_gpus == 0:
        raise ConfigError("launch.device=cuda, but torch finds no GPU; use launch.device=auto or cpu.")
    if 0 < num_gpus < settings.ranks:
        raise ConfigError(
            f"launch.ranks={settings.ranks} is more than the {format_count(num_gpus, 'GPU')} of this machine, and "
            f"each rank needs one; use launch.ranks={num_gpus}, or launch.device=cpu to run on the CPU."
        )


def _refuse_settings_of_others(settings: LaunchConfig) -> None:
    """Raise ConfigError for settings of our launcher where it starts no ranks."""
    if is_joined := joins(settings, os.environ):
        started = "has no effect on ranks that torchrun or srun has started"
        refuse_changed(settings, ("max_restarts",), "launch.", f"{started}; give it to torchrun as --max-restarts.")
        why = f"{started}; remove it (torchrun has --rdzv-endpoint, and srun starts a task for each rank)."
        refuse_changed(settings, ("rendezvous",), "launch.", why)
        found = world_sizes(settings)[0], num_local_ranks(settings)
        if settings.ranks not in (1, *found):
            raise ConfigError(
                f"launch.ranks={settings.ranks}, but torchrun or srun has started {found[0]}, {found[1]} of them on "
                f"this machine, and their number counts; remove launch.ranks, or have fsdp-shard start all."
            )
    if is_joined or settings.ranks == settings.max_nodes == 1 > settings.max_restarts:
        why = "has no effect: it is for ranks that fsdp-shard starts (launch.ranks), and it starts none; remove it."
        names = ["grace_seconds"] + ["numa_binding"] * (settings.numa_binding == "node")
        refuse_changed(settings, names, "launch.", why)


def uses_gpus(settings: LaunchConfig) -> bool:
    """Return whether the ranks use GPUs."""
    return settings.device == "cuda" or (settings.device == "auto" and count_gpus() > 0)


def shares_memory(settings: LaunchConfig) -> bool:
    """Return whether ranks may be forked, and so start with the memory of this process."""
    return not joins(settings, os.environ) and not uses_gpus(settings)
