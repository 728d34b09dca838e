"""Finds from the environment whether torchrun or srun has started this process as a rank, and which one it is."""

import os
import re
from collections.abc import Mapping

from fsdp_shard.distributed.config import LaunchConfig
from fsdp_shard.errors import ConfigError
from fsdp_shard.utils import refuse_changed


def is_allocation_only(environment: Mapping[str, str]) -> bool:
    """Return whether Slurm gives the number of tasks of an allocation, but srun has not started them."""
    return "SLURM_PROCID" in environment and not {"SLURM_STEP_NUM_TASKS", "TORCHELASTIC_RUN_ID"} & environment.keys()


def joins(settings: LaunchConfig, environment: Mapping[str, str]) -> bool:
    """Return whether this process is a rank that others started: torchrun, or srun with several tasks."""
    return _inside_torchrun(environment) or _inside_srun(settings, environment)


def _inside_torchrun(environment: Mapping[str, str]) -> bool:
    # All four: some schedulers set only WORLD_SIZE, to the number of machines.
    return all(name in environment for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"))


def _inside_srun(settings: LaunchConfig, environment: Mapping[str, str]) -> bool:
    """Return whether this process is one of several srun tasks.

    A batch script has SLURM_PROCID, too; it starts the ranks itself with launch.ranks or launch.nodes.
    """
    if "SLURM_PROCID" not in environment:
        return False
    if "SLURM_STEP_NUM_TASKS" in environment:
        return number_in(environment, "SLURM_STEP_NUM_TASKS") > 1
    return number_in(environment, "SLURM_NTASKS", "1") > 1 and settings.ranks == settings.max_nodes == 1


def may_restart(settings: LaunchConfig) -> bool:
    """Return whether torchrun has started this process as a rank, and starts failed ranks again (--max-restarts)."""
    return joins(settings, os.environ) and number_in(os.environ, "TORCHELASTIC_MAX_RESTARTS") > 0


def refuse_mpi(settings: LaunchConfig) -> None:
    """Raise ConfigError in one of several processes of mpirun, each of which would be a run of its own.

    With `launch.nodes`, each of them starts the ranks of its machine.
    """
    for name in ("OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE", "PMI_SIZE"):
        num_processes = number_in(os.environ, name, "1")
        # srun sets PMI_SIZE for its own tasks; in a batch script, and in daemons of mpirun that srun has started, each
        # process would take Slurm's variables for its own.
        are_ranks = _inside_torchrun(os.environ) or os.environ.get("SLURM_STEP_NUM_TASKS") == str(num_processes)
        if num_processes > 1 and settings.max_nodes == 1 and not are_ranks:
            raise ConfigError(
                f"mpirun has started {num_processes} processes ({name}), and each would begin a run of its own; start "
                f"ranks by launch.ranks={num_processes}, torchrun or srun, or set RANK, LOCAL_RANK, WORLD_SIZE, "
                f"MASTER_ADDR and MASTER_PORT in each process."
            )


def check_started(settings: LaunchConfig, world_size: int) -> None:
    """Check that a rank runs among as many as its settings name; a recipe starts them, the stages of one do not.

    Args:
        settings: Ranks of the run.
        world_size: Number of ranks that have been joined.

    Raises:
        ConfigError: There are others, or none although this process is to start some.
    """
    if world_size == 1 and "RANK" not in os.environ:
        why = (
            "has no effect: this process is the only rank, and a program that calls the stages starts no others. "
            "Start it with torchrun, or make its function a recipe (`@fs.recipe`)."
        )
        names = ["ranks", "max_restarts", *(["nodes"] if settings.max_nodes > 1 else [])]  # nodes=1:1 is one machine
        refuse_changed(settings, names, "launch.", why)
    on_this_machine = number_in(os.environ, "LOCAL_WORLD_SIZE", str(world_size))
    if settings.ranks not in (1, world_size, on_this_machine):
        raise ConfigError(
            f"launch.ranks={settings.ranks}, but {world_size} ranks have been started, {on_this_machine} of them on "
            f"this machine, and their number counts; remove launch.ranks."
        )


def number_in(environment: Mapping[str, str], name: str, default: str = "0") -> int:
    """Return the number in an environment variable.

    Raises:
        ConfigError: It is not a number of zero or more.
    """
    text = environment.get(name, default)
    if not text.isdecimal():
        raise ConfigError(f"{name}={text} is not a number, as torchrun or srun sets it; correct it, or unset it.")
    return int(text)


def slurm_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that torchrun would set, derived from srun's; none if torchrun has set them.

    Raises:
        ConfigError: RANK or WORLD_SIZE contradicts srun, which would leave tasks out of the run.
    """
    if (contradiction := contradiction_of_srun(environment)) is not None:
        raise ConfigError(contradiction)
    if _inside_torchrun(environment):
        return {}
    num_tasks = environment.get("SLURM_STEP_NUM_TASKS") or environment["SLURM_NTASKS"]
    nodes = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST") or "localhost"
    # Jobs on one machine must not meet at the same port, nor steps of one job that run at the same time.
    job, step = (number_in(environment, name) for name in ("SLURM_JOB_ID", "SLURM_STEP_ID"))
    port = 20000 + (job + 101 * step) % 10000
    variables = {
        "RANK": environment["SLURM_PROCID"],
        "WORLD_SIZE": num_tasks,
        "LOCAL_RANK": environment.get("SLURM_LOCALID", "0"),
        "MASTER_ADDR": first_node(nodes),
        "MASTER_PORT": str(port),
    }
    if (num_local := _num_local_tasks(environment)) is not None:
        variables["LOCAL_WORLD_SIZE"] = str(num_local)
    # What the user has set takes precedence.
    return {name: environment.get(name, value) for name, value in variables.items()}


def contradiction_of_srun(environment: Mapping[str, str]) -> str | None:
    """Describe a RANK or WORLD_SIZE that would leave tasks of srun out of the run; None without one."""
    num_tasks, task = environment.get("SLURM_STEP_NUM_TASKS", "1"), environment.get("SLURM_PROCID", "0")
    if num_tasks == "1" or "TORCHELASTIC_RUN_ID" in environment:
        return None
    rank, world_size = environment.get("RANK", task), environment.get("WORLD_SIZE", num_tasks)
    if _inside_torchrun(environment):  # a launcher in each task may have started several ranks
        wrong = "WORLD_SIZE" if world_size.isdecimal() and int(world_size) < int(num_tasks) else None
    else:
        wrong = "WORLD_SIZE" if world_size != num_tasks else "RANK" if rank != task else None
    if wrong is None:
        return None
    return (
        f"{wrong}={environment[wrong]}, but srun started SLURM_STEP_NUM_TASKS={num_tasks} tasks, and this is task "
        f"{task}; unset {wrong}."
    )


def _num_local_tasks(environment: Mapping[str, str]) -> int | None:
    """Return the number of tasks of this step on this machine, as Slurm writes it: `8(x2),4` means 8, 8 and 4."""
    counts: list[int] = []
    for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", environment.get("SLURM_STEP_TASKS_PER_NODE", "")):
        counts += [int(count)] * int(times or 1)
    node = environment.get("SLURM_NODEID", "0" if len(counts) == 1 else "")
    return counts[int(node)] if node.isdecimal() and int(node) < len(counts) else None


def first_node(nodes: str) -> str:
    """Return the first name of a Slurm node list: gpu007 of `gpu[007-011,42],cpu3`, r1n04 of `r[1-2]n[04-08]`."""
    first = re.match(r"(?:\[[^\]]*\]|[^,\[])*", nodes)
    return re.sub(r"\[(\d+)[^\]]*\]", r"\1", first[0]) if first else nodes
