"""The runs of a sweep: a table of the varied settings and their results, and a chart per setting."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from fsdp_shard.errors import one_line
from fsdp_shard.evaluation.report.report_data import Chart, Curve, Table, loss_unit, number, size, text
from fsdp_shard.evaluation.report.run_files import Run, best_held_out, last_of, peak_memory, tokens_per_second
from fsdp_shard.evaluation.report.setting_changes import courses
from fsdp_shard.utils import format_count

_MAX_PICTURES = 6  # settings with a chart
_MAX_SERIES = 12  # per chart


def sweeps_of(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """The runs of each sweep with at least two, by the name of its directory."""
    found: dict[Path, list[Run]] = {}
    for run in runs:
        if run.sweep is not None:
            found.setdefault(run.sweep, []).append(run)
    several = {path: inside for path, inside in found.items() if len(inside) > 1}
    is_one_each = len({path.name for path in several}) == len(several)
    return {one_line(path.name if is_one_each else str(path)): inside for path, inside in several.items()}


def sweep_table(name: str, runs: Sequence[Run]) -> Table:
    """The table of a sweep's runs: the varied settings and their results."""
    varied = varied_settings(runs)
    columns = ("run", *varied, "loss", "best held-out loss", "tokens/s", "peak memory", "status")
    rows = [
        [
            text(run.name),
            *(text(_settings(run)[setting]) for setting in varied),
            number(last_of(run.steps, "loss")),
            number(best_held_out(run)[0]),
            number(tokens_per_second(run)),
            size(peak_memory(run)),
            text(run.status),
        ]
        for run in runs
    ]
    return Table(f"sweep-{name}", f"Sweep {name}", columns, rows)


def sweep_charts(name: str, runs: Sequence[Run]) -> list[Chart]:
    """For each varied setting, its values and the resulting losses."""
    scored, label = [(run, best_held_out(run)[0]) for run in runs], "best held-out loss"
    if all(loss is None for _, loss in scored):
        scored, label = [(run, last_of(run.steps, "loss")) for run in runs], "training loss"
    found = [(run, loss) for run, loss in scored if loss is not None]
    varied = varied_settings(runs)
    note = "Values in order, not to scale."
    if len(found) < len(runs):
        note += f" {format_count(len(runs) - len(found), 'run')} without a loss left out."
    if len(varied) > _MAX_PICTURES:
        note += f" {len(varied) - _MAX_PICTURES} more settings were varied, which the table has."
    charts, unit = [], loss_unit(run.settings for run in runs)
    for setting in varied[:_MAX_PICTURES] if len(found) > 1 else []:
        values = sorted({_settings(run)[setting] for run, _ in found}, key=_order)
        series = _series(found, setting, [other for other in varied if other != setting], values)
        curves = [Curve(at, points, is_dotted=True) for at, points in enumerate(series.values())]
        title, key = f"{label.capitalize()} by {setting}", f"sweep-{name}-{setting}"
        shown = [one_line(value) for value in values]
        names = [one_line(alike) for alike in series]
        charts.append(Chart(key, title, setting, unit, curves, note, shown, names))
    return charts


def varied_settings(runs: Sequence[Run]) -> list[str]:
    """The settings that all runs have and that differ; settings of one option of a group follow from the group."""
    first, *others = [_settings(run) for run in runs]
    shared = [name for name in first if name != "run_dir" and all(name in other for other in others)]
    return [name for name in shared if any(other[name] != first[name] for other in others)]


def _settings(run: Run) -> Mapping[str, str]:
    """The settings by name, with all values of a setting that a resume changed."""
    return courses(run.settings, run.changes)


def _series(
    found: Sequence[tuple[Run, float]], name: str, others: Sequence[str], values: Sequence[str]
) -> Mapping[str, list[tuple[float, float]]]:
    """The points (index of the value of `name`, loss) of runs that agree in all `others`, by these values."""
    series: dict[str, list[tuple[float, float]]] = {}
    for run, loss in found:
        settings = _settings(run)
        alike = ", ".join(f"{other}={settings[other]}" for other in others) or "all runs"
        series.setdefault(alike, []).append((values.index(settings[name]), loss))
    if len(series) > _MAX_SERIES:
        return {"mean of all others": _means([point for points in series.values() for point in points])}
    return {alike: sorted(points) for alike, points in series.items()}


def _means(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    losses: dict[float, list[float]] = {}
    for x, y in points:
        losses.setdefault(x, []).append(y)
    return [(x, sum(ys) / len(ys)) for x, ys in sorted(losses.items())]


def _order(value: str) -> tuple[float, str]:
    try:
        return float(value), ""
    except ValueError:
        return float("inf"), value
