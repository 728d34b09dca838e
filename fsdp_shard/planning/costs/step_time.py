"""A lower bound on the time of a step, from a rank's work and the hardware.

A roofline (Williams et al., 2009): compute, links, network, device memory and host memory all run at their peak and
concurrently, so the slowest determines the bound. A real step is slower: kernels do not reach peaks, elementwise work
and optimizer arithmetic take time, and communication is not fully overlapped. Switches may do reductions, so an
all-reduce counts once here; `Traffic.sent_bytes` counts the bytes of a ring.
"""

from dataclasses import dataclass

from fsdp_shard.planning.costs.step_cost import StepCost
from fsdp_shard.planning.costs.step_traffic import Traffic
from fsdp_shard.planning.devices import Hardware

SECONDS_PER_DAY = 86_400


@dataclass(frozen=True)
class StepTime:
    """Minimum time of a step, and figures derived from it.

    Attributes:
        seconds: The bound.
        bound_by: The slowest resource: a key of `parts`.
        parts: Seconds of `compute`, `links` inside a machine, `network` between machines, device `memory`, and `host`
            memory.
        tokens_per_second: Upper bound over all ranks.
        hardware_flops_utilization: Fraction of the peak that all computed FLOPs reach at the bound.
        model_flops_utilization: The same for `StepCost.model_flops`.
        run_days: Minimum days for all steps; None if their number depends on the data.
        write_seconds: Time to write a checkpoint at disk speed; None if that is unknown.
        resume_seconds: Time to read a checkpoint and an adapter's base; None if disk speed is unknown.
    """

    seconds: float
    bound_by: str
    parts: dict[str, float]
    tokens_per_second: float
    hardware_flops_utilization: float
    model_flops_utilization: float
    run_days: float | None
    write_seconds: float | None
    resume_seconds: float | None

    @property
    def tokens_per_day(self) -> float:
        """Upper bound on tokens per day over all ranks."""
        return self.tokens_per_second * SECONDS_PER_DAY


def missing_figures(cost: StepCost, hardware: Hardware) -> list[str]:
    """The `device.*` settings that are missing to compute the time of `cost`, in their order."""
    needed = {
        f"{cost.precision}_flops": hardware.flops.get(cost.precision),
        "memory_bandwidth": hardware.memory_bandwidth,
    }
    if cost.num_ranks > 1:
        needed |= {"link_bandwidth": hardware.link_bandwidth, "num_per_machine": hardware.num_per_machine}
    if hardware.num_per_machine is not None and cost.num_ranks > hardware.num_per_machine:
        needed["network_bandwidth"] = hardware.network_bandwidth
    if cost.to_host_bytes or cost.to_device_bytes:
        needed["host_bandwidth"] = hardware.host_bandwidth
    return [name for name, value in needed.items() if value is None]


def step_time(cost: StepCost, hardware: Hardware) -> StepTime | None:
    """Compute the minimum time of a step.

    Args:
        cost: The work of a rank in a step.
        hardware: The hardware it runs on.

    Returns:
        The time; None if FLOPs or a hardware figure are unknown (`missing_figures`).
    """
    if cost.flops is None or cost.model_flops is None or missing_figures(cost, hardware):
        return None
    peak = hardware.flops[cost.precision]
    per_machine = hardware.num_per_machine or cost.num_ranks
    parts = {
        "compute": cost.flops / peak,
        "links": _seconds(sum(link_bytes(each, per_machine) for each in cost.traffic), hardware.link_bytes_per_second),
        "network": _seconds(
            sum(network_bytes(each, per_machine) for each in cost.traffic), hardware.network_bytes_per_second
        ),
        "memory": _seconds(cost.memory_bytes, hardware.memory_bytes_per_second),
        "host": _seconds(
            max(cost.to_host_bytes, cost.to_device_bytes), hardware.host_bytes_per_second
        ),  # both directions at once
    }
    bound_by = max(parts, key=lambda name: parts[name])
    seconds = parts[bound_by]
    num_steps, checkpoint = cost.num_steps, cost.checkpoint
    read_bytes = checkpoint.total_bytes + checkpoint.base_bytes
    return StepTime(
        seconds=seconds,
        bound_by=bound_by,
        parts=parts,
        tokens_per_second=cost.tokens / seconds,
        hardware_flops_utilization=cost.flops / (seconds * peak),
        model_flops_utilization=cost.model_flops / (seconds * peak),
        run_days=None if num_steps is None else num_steps * seconds / SECONDS_PER_DAY,
        write_seconds=_disk_seconds(
            checkpoint.total_bytes, checkpoint.num_writers, per_machine, hardware.disk_write_bytes_per_second
        ),
        resume_seconds=_disk_seconds(
            read_bytes, checkpoint.num_readers, per_machine, hardware.disk_read_bytes_per_second
        ),
    )


def link_bytes(traffic: Traffic, num_per_machine: int) -> float:
    """Bytes that a device must send or receive over its machine's links, if machines do all they can internally.

    With M of the N ranks on a machine, the share (M-1)/N of an all-to-all stays inside. Of a gathered or reduced
    tensor, each of the M ranks fetches its part from outside once and passes it on: the share (M-1)/M.
    """
    members = _members(traffic, num_per_machine)
    if members == 1:
        return 0.0
    if traffic.collective == "all-to-all":
        return traffic.payload_bytes * (members - 1) / traffic.num_ranks
    if traffic.collective in ("send", "all-reduce"):
        return traffic.payload_bytes
    return traffic.payload_bytes * (members - 1) / members


def network_bytes(traffic: Traffic, num_per_machine: int) -> float:
    """Bytes that a device must send or receive between machines.

    With M of the N ranks on a machine, N-M parts come from other machines, divided among the M devices.
    """
    members, num_ranks = _members(traffic, num_per_machine), traffic.num_ranks
    if members == num_ranks:
        return 0.0
    if traffic.collective == "all-to-all":
        return traffic.payload_bytes * (num_ranks - members) / num_ranks
    if traffic.collective == "send":  # by the last device of a machine
        return traffic.payload_bytes
    if traffic.collective == "all-reduce":
        return traffic.payload_bytes / members
    return traffic.payload_bytes * (num_ranks - members) / (num_ranks * members)


def _members(traffic: Traffic, num_per_machine: int) -> int:
    """Number of participating ranks on one machine."""
    return max(1, min(traffic.num_ranks, num_per_machine // traffic.stride))


def _seconds(num_bytes: float, bandwidth: int | None) -> float:
    return 0.0 if bandwidth is None else num_bytes / bandwidth


def _disk_seconds(num_bytes: int, num_parts: int, num_per_machine: int, bandwidth: int | None) -> float | None:
    """Time of the machine with most of the ranks that have a part each."""
    share = min(num_per_machine, num_parts) / num_parts
    return None if bandwidth is None else num_bytes * share / bandwidth
