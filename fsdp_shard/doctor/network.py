"""Checks whether ranks could find each other: their environment variables, the interfaces, the rendezvous host and
port.

It waits only for name resolution, and a few seconds for whoever already holds the port.
"""

import errno
import ipaddress
import multiprocessing
import os
import socket
from collections.abc import Iterator, Mapping
from contextlib import closing, suppress
from datetime import timedelta

from fsdp_shard.distributed import (
    LaunchConfig,
    contradiction_of_srun,
    is_allocation_only,
    is_joined_rank,
    is_this_machine,
    rendezvous_endpoint,
    uses_gpus,
    world_sizes,
)
from fsdp_shard.doctor.findings import Finding, problem, warning

_TORCHRUN = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_SECONDS_TO_ANSWER = 5.0


def check_network(settings: LaunchConfig) -> Iterator[Finding]:
    """Find anything that would keep the ranks of a run from finding each other, without starting them.

    Args:
        settings: The launch settings.

    Yields:
        Problems and warnings only.
    """
    contradictions = [*_wrong_numbers(os.environ)]
    yield from contradictions
    if contradictions:
        return
    yield from _ignored_variables(settings, os.environ)
    if is_joined_rank(settings) and is_allocation_only(os.environ):
        yield warning(
            f"the allocation has SLURM_NTASKS={os.environ.get('SLURM_NTASKS')} tasks, for which this run waits, but "
            f"srun has not started this process as one of them (SLURM_STEP_NUM_TASKS is not set). Start it with srun, "
            f"or set launch.ranks to start ranks from here."
        )
    if max(world_sizes(settings)) > 1:
        yield from _missing_interfaces(settings, os.environ)
    if (point := rendezvous_endpoint(settings, os.environ)) is not None:
        yield from _meeting_point(*point, settings, os.environ)


def _wrong_numbers(environment: Mapping[str, str]) -> Iterator[Finding]:
    """Find variables that cannot belong to one rank."""
    below = [
        ("RANK", "WORLD_SIZE"),
        ("LOCAL_RANK", "LOCAL_WORLD_SIZE"),
        ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
    ]
    for names in below:
        given = {name: environment[name] for name in names if name in environment}
        wrong = next((name for name, value in given.items() if not value.isdecimal()), None)
        if wrong is not None:
            yield problem(
                f"{wrong}={given[wrong]} is not a number; unset it, or start the ranks with torchrun or srun."
            )
        elif len(given) == 2 and int(given[names[0]]) >= int(given[names[1]]):
            yield problem(
                f"{names[0]}={given[names[0]]} is not below {names[1]}={given[names[1]]}, so this cannot be one of the "
                f"ranks: one of the two is of another job. Unset it, or start the ranks anew."
            )
    if (contradiction := contradiction_of_srun(environment)) is not None:
        yield problem(contradiction)


def _ignored_variables(settings: LaunchConfig, environment: Mapping[str, str]) -> Iterator[Finding]:
    """Find variables that request ranks unknown to this process."""
    if len(world_sizes(settings)) > 1 or rendezvous_endpoint(settings, environment) is not None:
        return
    missing = [name for name in _TORCHRUN if name not in environment]
    if "RANK" in environment and environment.get("WORLD_SIZE", "1") != "1":
        yield warning(
            f"RANK={environment['RANK']} and WORLD_SIZE={environment['WORLD_SIZE']} have no effect, as "
            f"{' and '.join(missing)} are not set; the run has launch.ranks={settings.ranks}. Set all four, or none."
        )
    tasks = environment.get("SLURM_NTASKS", "1")
    if "SLURM_PROCID" in environment and tasks.isdecimal() and int(tasks) > settings.ranks:
        yield warning(
            f"the allocation has SLURM_NTASKS={tasks}, but this process was not started by srun, and the run has "
            f"launch.ranks={settings.ranks}. Start it with srun, or set launch.ranks."
        )


def _missing_interfaces(settings: LaunchConfig, environment: Mapping[str, str]) -> Iterator[Finding]:
    """Find names of network interfaces that this machine does not have."""
    known = [name for _, name in socket.if_nameindex()]
    for variable in ("GLOO_SOCKET_IFNAME", *(("NCCL_SOCKET_IFNAME",) if uses_gpus(settings) else ())):
        given = environment.get(variable, "")
        if not given or given.startswith("^"):  # NCCL: all except these
            continue
        by_prefix = variable.startswith("NCCL") and not given.startswith("=")
        found = [
            name
            for name in given.removeprefix("=").split(",")
            if any(other.startswith(name) if by_prefix else other == name for other in known)
        ]
        if not found:
            yield problem(
                f"{variable}={given}: this machine has no such interface, but {', '.join(known)}. Set one of these, or "
                f"unset it."
            )


def _meeting_point(
    setting: str, endpoint: str, settings: LaunchConfig, environment: Mapping[str, str]
) -> Iterator[Finding]:
    host, _, port = endpoint.rpartition(":")
    named = f"{setting}={endpoint}"
    if not (port.isdecimal() and 0 < int(port) < 1 << 16):
        yield problem(f"{named}: {port} is not a port; give a number from 1 to 65535.")
        return
    try:
        found = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
    except OSError as error:
        yield problem(
            f"{named}: the name {host} does not resolve on {socket.gethostname()} ({error.strerror}). Give the address "
            f"of the machine, or a name that all machines know."
        )
        return
    is_joined = setting != "launch.rendezvous"
    on_others = not is_joined or int(environment.get("LOCAL_WORLD_SIZE", "0")) not in (0, *world_sizes(settings))
    if on_others and all(ipaddress.ip_address(str(address[4][0]).partition("%")[0]).is_loopback for address in found):
        yield warning(
            f"{named} is this machine for every machine, so that others cannot find it; give the name or the address "
            f"by which they know it."
        )
    # torchrun's agent serves the store of its ranks, and ranks other than the first do not serve it.
    serves = environment.get("TORCHELASTIC_USE_AGENT_STORE") != "True" and environment.get("RANK", "0") == "0"
    is_served_here = serves if is_joined else is_this_machine(endpoint)
    if is_served_here and _is_taken(int(port)) and not _answers(host.strip("[]"), int(port)):
        yield problem(
            f"{named}: another program of this machine has the port {port}, and is not the rendezvous of a run. Give "
            f"another port."
        )


def _is_taken(port: int) -> bool:
    """Whether no further process can listen on a port of this machine."""
    try:
        with closing(socket.create_server(("", port))):
            return False
    except OSError as error:
        return error.errno == errno.EADDRINUSE


def _answers(host: str, port: int) -> bool:
    """Whether a torch store answers there; runs in a process, because torch waits minutes for a silent one."""
    process = multiprocessing.get_context("fork").Process(target=_ask_store, args=(host, port), daemon=True)
    process.start()
    process.join(_SECONDS_TO_ANSWER)
    is_mute = process.is_alive()
    if is_mute:
        process.kill()
        process.join()
    return not is_mute and process.exitcode == 0


def _ask_store(host: str, port: int) -> None:
    from torch.distributed import TCPStore

    with suppress(OSError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # torch's messages about each attempt
    seconds = timedelta(seconds=_SECONDS_TO_ANSWER)
    try:
        TCPStore(host, port, is_master=False, timeout=seconds, wait_for_workers=False)
    except RuntimeError:
        os._exit(1)
    os._exit(0)
