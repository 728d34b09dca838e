"""Formats the cost and time of a step, as text and as figures of result.json."""

from dataclasses import asdict
from typing import Any

from fsdp_shard.planning.costs.step_cost import StepCost
from fsdp_shard.planning.costs.step_time import missing_figures, step_time
from fsdp_shard.planning.devices import Hardware
from fsdp_shard.utils import format_number, format_size, format_table

_PREFIXES = ((1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "K"))
_DURATIONS = ((2 * 86_400.0, 86_400.0, "days"), (2 * 3_600.0, 3_600.0, "h"), (120.0, 60.0, "min"))
_BOUND = (
    "This is a bound, not a forecast: everything at its peak and at the same time. Elementwise work, the optimizer's "
    "arithmetic, loading data, evaluations and saves are not counted."
)


def step_figures(cost: StepCost, hardware: Hardware) -> dict[str, Any]:
    """The figures of a step in result.json; `time` is None if unknown."""
    time = step_time(cost, hardware)
    return {
        "tokens": cost.tokens,
        "flops": cost.flops,
        "model_flops": cost.model_flops,
        "sent": [asdict(traffic) | {"sent_bytes": traffic.sent_bytes} for traffic in cost.traffic],
        "sent_bytes": cost.sent_bytes,
        "memory_bytes": cost.memory_bytes,
        "to_host_bytes": cost.to_host_bytes,
        "to_device_bytes": cost.to_device_bytes,
        "checkpoint": asdict(cost.checkpoint) | {"total_bytes": cost.checkpoint.total_bytes},
        "time": None if time is None else asdict(time) | {"tokens_per_day": time.tokens_per_day},
    }


def step_report(cost: StepCost, hardware: Hardware) -> str:
    """The section of a plan about a step: FLOPs, bytes, checkpoints, and the minimum time if known."""
    flops = f"FLOPs could not be counted ({cost.problem})"
    if cost.flops is not None:
        flops = f"{_with_prefix(cost.flops)}FLOPs on each rank"
        if cost.is_packed:
            flops = f"at least {flops}, as attention keeps to documents of unknown lengths"
    lines = [f"A step of {cost.tokens:,} tokens: {flops}.", ""]
    if cost.traffic:
        rows = [["collective", "over", "ranks", "sent by each rank"]]
        for each in cost.traffic:
            rows.append([each.collective, each.over, str(each.num_ranks), format_size(each.sent_bytes)])
        lines += [*format_table(rows), ""]
    if cost.to_host_bytes or cost.to_device_bytes:
        lines.append(
            f"Offload copies {format_size(cost.to_host_bytes)} to host memory in a step, and "
            f"{format_size(cost.to_device_bytes)} from there."
        )
    lines.append(_checkpoint_line(cost))
    return "\n".join([*lines, *_time_lines(cost, hardware)])


def _checkpoint_line(cost: StepCost) -> str:
    sizes = cost.checkpoint
    parts = [f"{format_size(sizes.weights_bytes)} of weights", f"{format_size(sizes.optimizer_bytes)} of optimizer"]
    parts += [f"{format_size(sizes.average_bytes)} of averages"] if sizes.average_bytes else []
    return f"A checkpoint takes {format_size(sizes.total_bytes)}: {', '.join(parts)}."


def _time_lines(cost: StepCost, hardware: Hardware) -> list[str]:
    time = step_time(cost, hardware)
    if time is None:
        if cost.flops is None:
            return []
        missing = ", ".join(f"device.{name}" for name in missing_figures(cost, hardware))
        return [
            f"No time of a step, because too little is known of the device ({missing}). Set a preset, such as "
            f"device=h100, for a lower bound."
        ]
    parts = ", ".join(f"{name} {_duration(seconds)}" for name, seconds in time.parts.items() if seconds)
    name = f" on {hardware.name}" if hardware.name else ""
    rate = f"{format_number(round(time.tokens_per_second))} tokens/s, {_tokens(time.tokens_per_day)} tokens a day"
    lines = [
        f"A step takes at least {_duration(time.seconds)}{name}, bound by {time.bound_by} ({parts}): at most {rate}, "
        f"MFU {time.model_flops_utilization:.0%}, HFU {time.hardware_flops_utilization:.0%}."
    ]
    if time.run_days is not None:
        lines.append(f"{_steps(cost.num_steps)} at least {_duration(time.run_days * 86_400.0)}. {_BOUND}")
    else:
        lines.append(_BOUND)
    if time.write_seconds is not None and time.resume_seconds is not None:
        lines.append(
            f"At the speed of the disks, a checkpoint is written in {_duration(time.write_seconds)} and read in "
            f"{_duration(time.resume_seconds)}."
        )
    return lines


def _steps(num_steps: int | None) -> str:
    return "The step takes" if num_steps == 1 else f"The {num_steps:,} steps take"


def _with_prefix(value: float) -> str:
    for size, prefix in _PREFIXES:
        if value >= size:
            return f"{value / size:.3g} {prefix}"
    return f"{value:.3g} "


def _tokens(count: float) -> str:
    return f"{count / 1e12:.3g} T" if count >= 1e12 else format_number(round(count))


def _duration(seconds: float) -> str:
    """A duration with three significant digits, in days, hours, minutes, seconds or milliseconds."""
    for least, size, unit in _DURATIONS:
        if seconds >= least:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds:.3g} s" if seconds >= 1.0 else f"{1_000.0 * seconds:.3g} ms"
