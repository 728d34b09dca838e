"""Formats settings that fit, as text and as figures of result.json."""

from collections.abc import Sequence
from typing import Any

from fsdp_shard.planning.search.advice import Fitting
from fsdp_shard.utils import format_size, format_table

_SAME = "Would fit, training the same, the least cost in speed first:"
_OTHER = "Would fit, but changes what is trained:"
_NOTHING = "No other settings were found with which it fits."


def advice_lines(found: Sequence[Fitting]) -> list[str]:
    """A line to type per candidate; it replaces settings of the same name and adds the others."""
    if not found:
        return [_NOTHING]
    lines = []
    for title, rows in (
        (_SAME, [fits for fits in found if not fits.candidate.trains]),
        (_OTHER, [fits for fits in found if fits.candidate.trains]),
    ):
        if rows:
            lines += [title, *(f"  {line}" for line in format_table([_row(fits) for fits in rows]))]
    return lines


def advice_figures(found: Sequence[Fitting]) -> list[dict[str, Any]]:
    """The figures of `advice` in result.json."""
    return [
        {
            "overrides": list(fits.candidate.overrides),
            "peak_bytes": fits.peak_bytes,
            "seconds": fits.seconds,
            "num_ranks": fits.candidate.run.num_ranks,
            "changes": list(fits.candidate.trains),
            "replaces": list(fits.candidate.replaced),
        }
        for fits in found
    ]


def what_changes(fits: Fitting) -> str:
    """The changes to training and the replaced user settings, in brackets; empty if there are none."""
    candidate = fits.candidate
    parts = [*candidate.trains, *([f"replaces {', '.join(candidate.replaced)}"] if candidate.replaced else ())]
    return f"({'; '.join(parts)})" if parts else ""


def _row(fits: Fitting) -> list[str]:
    seconds = [] if fits.seconds is None else [f"{fits.seconds:.3g} s a step"]
    return [format_size(fits.peak_bytes), *seconds, " ".join(fits.candidate.overrides), what_changes(fits)]
