"""Formats the figures of `task=speed` as a text table."""

from collections.abc import Sequence

from fsdp_shard.evaluation.speed_task.speed_passes import SizeFigures, Spread
from fsdp_shard.utils import format_size, format_table


def speed_table(figures: Sequence[SizeFigures], *, cpu_memory_is_peak: bool) -> list[str]:
    """Return a header, a line per size, and an explanation of the columns.

    Args:
        figures: The figures of each size, all for the same devices.
        cpu_memory_is_peak: Whether the process memory is its peak; otherwise it is the memory after the passes.
    """
    devices = list(figures[0].peak_bytes)
    rates = ("prefill tokens/s", "decode tokens/s", "per text")
    rows = [["batch", "context", "first token s", *rates, *(f"{device} memory" for device in devices)]]
    for one in figures:
        spreads = (one.first_token, one.prefill, one.decoded, one.decoded_per_text)
        memory = [format_size(one.peak_bytes[device]) for device in devices]
        rows.append([f"{one.size.batch_size:,}", f"{one.size.context_length:,}", *map(_cell, spreads), *memory])
    repeats = len(figures[0].first_token.values)
    spread = f"median of {repeats} passes (lowest-highest)" if repeats > 1 else "one pass"
    cpu = "peak of the process" if cpu_memory_is_peak else "of the process after the passes"
    return [*format_table(rows), f"{spread}; memory of cpu: {cpu}"]


def _cell(spread: Spread) -> str:
    """The median, with the lowest and highest value if there are several."""
    if len(spread.values) == 1:
        return _number(spread.median)
    return f"{_number(spread.median)} ({_number(min(spread.values))}-{_number(max(spread.values))})"


def _number(value: float) -> str:
    """The value with three significant digits, or all digits before the decimal point."""
    return f"{value:,.0f}" if value >= 100 else f"{value:#.3g}"
