"""Compares runs: the tables and curves of a report."""

from __future__ import annotations

import os
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from fsdp_shard.evaluation.report.evaluation_table import evaluation_tables
from fsdp_shard.evaluation.report.report_data import (
    Cell,
    PromptSamples,
    Report,
    Table,
    digest,
    loss_unit,
    number,
    size,
    text,
)
from fsdp_shard.evaluation.report.run_charts import metric_tables, run_charts
from fsdp_shard.evaluation.report.run_files import (
    COMPLETED,
    METRIC,
    RUNNING,
    Run,
    as_map,
    as_number,
    best_held_out,
    find_runs,
    last_of,
    loss_before,
    peak_memory,
    read_run,
    tokens_per_second,
    values_of,
)
from fsdp_shard.evaluation.report.same_weights import WeightDigests
from fsdp_shard.evaluation.report.setting_changes import courses
from fsdp_shard.evaluation.report.stored_steps import shard_map
from fsdp_shard.evaluation.report.sweep_charts import sweep_charts, sweep_table, sweeps_of
from fsdp_shard.utils import format_count

_MAX_SAMPLES = 8  # completions of one prompt by one run
_MAX_COMPLETION = 4000  # characters
_MAX_RANKS = 16  # columns of the shard map, and of memory
_ALL_SAME = "All settings but run_dir are the same."
_APART = ("run_dir",)  # settings that differ between any two runs


def build_report(paths: Sequence[str], digests: WeightDigests) -> Report:
    """Read the runs at `paths` and compare them.

    Args:
        paths: Directories of runs, or directories with runs in them.
        digests: Known weight digests from an earlier comparison.

    Raises:
        InputError: There is no run at one of the paths.
    """
    found = find_runs(paths)
    return compare([read_run(path, name) for path, name in zip(found, _names(found), strict=True)], digests)


def compare(runs: Sequence[Run], digests: WeightDigests) -> Report:
    """Compare runs that were already read; the arguments are those of `build_report`."""
    trained = [run for run in runs if run.command in ("finetune", "") or run.steps]
    evaluated = [run for run in runs if run.command == "evaluate"]
    others = [run for run in runs if run not in trained and run not in evaluated]
    sweeps = sweeps_of(trained)
    tables = [
        *([_runs_table(trained)] if trained else []),
        *(sweep_table(name, inside) for name, inside in sweeps.items()),
        *_settings_tables(trained),
        *_held_out_tables(trained),
        *metric_tables(trained),
        *([_speed_table(trained)] if trained else []),
        *_memory_tables(trained),
        *_checkpoint_tables(trained),
        *_shard_maps(trained),
        *evaluation_tables(evaluated, trained, digests),
        *([_other_table(others)] if others else []),
    ]
    return Report(
        runs=[run.name for run in trained],
        num_all=len(runs),
        num_running=sum(run.status == RUNNING for run in runs),
        num_completed=sum(run.status == COMPLETED for run in runs),
        tables=tables,
        charts=[chart for chart in run_charts(trained) if chart.curves],
        sweeps=[chart for name, inside in sweeps.items() for chart in sweep_charts(name, inside)],
        samples=_samples(trained),
        failures=[f"{run.name}: {run.error}" for run in runs if run.error],
        problems=[*(problem for run in runs for problem in run.problems), *_absent(trained), *digests.problems],
    )


def _names(paths: Sequence[Path]) -> list[str]:
    """The names of runs: their paths without the common part."""
    if len(paths) == 1:
        return [paths[0].resolve().name]
    absolute = [os.path.abspath(path) for path in paths]
    common = os.path.commonpath([os.path.dirname(path) for path in absolute])
    return [os.path.relpath(path, common) for path in absolute]


def _absent(runs: Iterable[Run]) -> list[str]:
    """Lines on what runs lack that others have, to explain gaps in tables."""
    no_steps = [run.name for run in runs if not run.steps]
    late = [f"{run.name} (begins at step {first:,.0f})" for run in runs if (first := _first_step(run)) > 1]
    no_held_out = [run.name for run in runs if run.steps and not run.held_out]
    said = [(no_steps, "no finished steps"), (late, "no metrics of its first steps, which another directory had")]
    said += [(no_held_out, "no held-out evaluations (train.eval_every)")]
    return [f"{format_count(len(names), 'run')} with {what}: {', '.join(names)}." for names, what in said if names]


def _first_step(run: Run) -> float:
    return (run.steps[0]["step"] or 1) if run.steps else 1


def _runs_table(runs: Sequence[Run]) -> Table:
    held_out = ("held-out loss", "at step 0", "best", "after step", "perplexity")
    skipped = [run.figure("skipped_steps") or last_of(run.steps, "skipped") for run in runs]
    columns = ("run", "status", "step", "loss", *held_out, "tokens", *(["skipped"] if any(skipped) else []))
    rows = []
    for run in runs:
        best, at = best_held_out(run)
        tokens = run.figure("tokens") or last_of(run.steps, "total_tokens")
        most = run.settings.get("train.steps", "")
        done = int(run.steps[-1]["step"] or 0) if run.steps else None
        progress = f"{done or 0:,} of {int(most):,}" if most.isdecimal() and run.status != COMPLETED else None
        step = number(done) if progress is None else Cell(done, progress)
        losses = [last_of(run.steps, "loss"), last_of(run.held_out, "loss"), loss_before(run), best]
        rest = [number(at), number(last_of(run.held_out, "perplexity")), number(tokens)]
        rows.append([text(run.name), text(run.status), step, *map(number, losses), *rest])
    note = (
        f"Losses in {loss_unit(run.settings for run in runs)}: of the last step, and of held-out evaluations: the "
        "last, that before training and the best after a step, which may be higher. The perplexity is that of the last."
    )
    if any(skipped):
        rows = [[*row, number(count)] for row, count in zip(rows, skipped, strict=True)]
        note += (
            " Skipped: steps that changed no weights, as their loss or gradients were not finite; the loss is that of "
            "the last step where it was."
        )
    return Table("runs", "Runs", columns, rows, note)


def _settings_tables(runs: Sequence[Run]) -> list[Table]:
    """Tables of differing settings, and of all settings. Values that differ from the first run's are marked."""
    known = [run for run in runs if run.settings]
    of_runs = [courses(run.settings, run.changes) for run in known]
    names = [name for name in dict.fromkeys(name for course in of_runs for name in course) if name not in _APART]
    values_of_setting = {name: [course.get(name) for course in of_runs] for name in names}
    rows = {
        name: [text(name), *(Cell(text(value).value, text(value).text, value != values[0]) for value in values)]
        for name, values in values_of_setting.items()
    }
    # Settings that exist for only one option of a group, such as adapter.rank, follow from the group unless they
    # differ.
    changed = {change.name for run in known for change in run.changes or ()}
    differing = [rows[name] for name, values in values_of_setting.items() if _differ(values) or name in changed]
    columns = ["setting", *(run.name for run in known)]
    note = "Marked: what is not as in the first run. A dash: the run has no such setting." if len(known) > 1 else ""
    doubt = ""
    if unknown := [run.name for run in known if run.changes is None]:
        doubt = f" Of {', '.join(unknown)}, those of the newest step: whether earlier ones had others is not recorded."
    title = "Settings that differ" if len(known) > 1 else "Settings that changed"
    differ = Table("settings", title, columns, differing, ((note if differing else _ALL_SAME) + doubt).strip())
    all_of_them = Table("all-settings", "All settings", columns, list(rows.values()), (note + doubt).strip())
    return [*([differ] if len(known) > 1 or changed else []), *([all_of_them] if known else [])]


def _differ(values: Sequence[str | None]) -> bool:
    return len({*values} - {None}) > 1


def _speed_table(runs: Sequence[Run]) -> Table:
    columns = (
        "run",
        "ranks",
        "tokens/s",
        "median s/step",
        "waiting for data",
        "peak memory",
        "while loading",
        "shard",
    )
    rows = []
    for run in runs:
        seconds, waited = values_of(run.steps, "step_seconds"), values_of(run.steps, "data_seconds")
        total = sum(seconds)
        loaded = as_map(run.result.get("load"))
        share = sum(waited) / total if total and waited else None
        rows.append(
            [
                text(run.name),
                _ranks(run),
                number(tokens_per_second(run)),
                number(statistics.median(seconds) if seconds else None),
                Cell(share, "-" if share is None else f"{share:.1%}"),
                size(peak_memory(run)),
                size(as_number(loaded.get("peak_memory_bytes"))),
                size(as_number(loaded.get("shard_bytes"))),
            ]
        )
    note = (
        "Tokens/s over all steps, slow ones included, the median of their durations, and the most memory of any rank, "
        "in all and while the model was loaded; shard: the weights that a rank holds."
    )
    return Table("speed", "Throughput and memory", columns, rows, note)


def _held_out_tables(runs: Sequence[Run]) -> list[Table]:
    """The last losses of runs with several held-out sets; see `Run.held_out`."""
    columns = ("run", "set", "loss", "perplexity", "tokens", "loss at first")
    rows = []
    for run in runs:
        if not run.held_out:
            continue
        first, last = run.held_out[0], run.held_out[-1]
        for name in (key.removesuffix("/loss") for key in last if key.endswith("/loss") and not key.startswith(METRIC)):
            figures = [last.get(f"{name}/{key}") for key in ("loss", "perplexity", "num_tokens")]
            rows.append([text(run.name), text(name), *map(number, figures), number(first.get(f"{name}/loss"))])
    note = "Of the last held-out evaluation, and the loss of the first one."
    return [Table("held-out-sets", "Held-out sets", columns, rows, note)] if rows else []


def _memory_tables(runs: Sequence[Run]) -> list[Table]:
    """Peak memory of each rank, for runs that have ended."""
    found = {run.name: _peaks(run) for run in runs}
    most = max(map(len, found.values()), default=0)
    shown = min(most, _MAX_RANKS)
    columns = ("run", "ranks", "least", "median", "most", "of rank", *(f"rank {rank}" for rank in range(shown)))
    rows: list[list[Cell]] = []
    for name, peaks in found.items():
        if len(peaks) > 1:
            figures = [size(min(peaks)), size(statistics.median(peaks)), size(max(peaks))]
            own = [size(peaks[rank]) if rank < len(peaks) else size(None) for rank in range(shown)]
            rows.append([text(name), number(len(peaks)), *figures, number(peaks.index(max(peaks))), *own])
    note = "The peak of each rank, of runs that have ended" + (f"; the first {shown} ranks." if most > shown else ".")
    return [Table("memory-by-rank", "Memory by rank", columns, rows, note)] if rows else []


def _peaks(run: Run) -> list[float]:
    """Peak bytes of each rank; empty if result.json does not contain them."""
    given = run.result.get("peak_memory_bytes_by_rank")
    peaks = [as_number(value) for value in given] if isinstance(given, list) else []
    return [peak for peak in peaks if peak is not None] if None not in peaks else []


def _ranks(run: Run) -> Cell:
    """Number of ranks that wrote the newest checkpoint; otherwise, the number in the settings."""
    if run.checkpoints and run.checkpoints[-1].layout == "sharded":
        return number(run.checkpoints[-1].num_ranks)
    given = run.settings.get("launch.ranks", "")
    return number(int(given)) if given.isdecimal() else text(given or None)


def _checkpoint_tables(runs: Sequence[Run]) -> list[Table]:
    steps = [(run, stored) for run in runs for stored in run.checkpoints]
    if not steps:
        return []
    columns = ("run", "step", "layout", "ranks", "size", "optimizer", "kept as", "files", "digest")
    rows = [
        [
            text(run.name),
            number(stored.step),
            text(stored.layout),
            number(None if stored.layout == "gathered" else stored.num_ranks),  # its manifest records 1
            size(stored.num_bytes),
            size(stored.optimizer_bytes),
            text(", ".join(stored.kept) or None),
            text("complete" if stored.is_complete else "damaged"),
            digest(stored.digest),
        ]
        for run, stored in steps
    ]
    note = (
        "Size of all files and of those of the optimizer, and the digest that the manifest ends with; "
        "fsdp-shard verify compares every byte with what is in it."
    )
    return [Table("checkpoints", "Checkpoints", columns, rows, note), *_balance_tables(runs)]


def _balance_tables(runs: Sequence[Run]) -> list[Table]:
    """How evenly the newest checkpoint's files are divided among ranks."""
    rows = []
    for run in runs:
        if not run.checkpoints or len(sizes := run.checkpoints[-1].rank_bytes) < 2:
            continue
        states = run.checkpoints[-1].rank_optimizer_bytes
        cells: list[Cell] = [text(run.name), number(run.checkpoints[-1].step), number(len(sizes))]
        for one in (sizes, states):
            mean = sum(one) / len(one) if one else 0
            cells += [size(max(one, default=None)), number(max(one) / mean if mean else None)]
        rows.append(cells)
    largest = [f"{what}, {of}" for what in ("weights", "optimizer") for of in ("most", "most/mean")]
    columns = ("run", "step", "ranks", *largest)
    note = "The largest file of a rank in the newest checkpoint, and how many times the mean it is: 1 if all are even."
    return [Table("balance", "Balance of ranks", columns, rows, note)] if rows else []


def _shard_maps(runs: Sequence[Run]) -> list[Table]:
    """Bytes of each block by rank, for one run per way of dividing the model."""
    found: dict[tuple[Any, ...], Table] = {}
    for run in runs:
        blocks = shard_map(run.checkpoints[-1]) if run.checkpoints else {}
        if not blocks:
            continue
        shape = tuple((name, *held) for name, held in blocks.items())
        known = found.get(shape)
        names = run.name if known is None else f"{known.title.removeprefix('Shard map of ')}, {run.name}"
        found[shape] = _shard_map(f"map-{len(found)}" if known is None else known.key, names, blocks)
    return list(found.values())


def _shard_map(key: str, names: str, blocks: dict[str, list[int]]) -> Table:
    num_ranks = len(next(iter(blocks.values())))
    columns = [f"rank {rank}" for rank in range(num_ranks)] if num_ranks <= _MAX_RANKS else ["least", "mean", "most"]
    totals = [sum(held[rank] for held in blocks.values()) for rank in range(num_ranks)]
    rows = [
        [text(name), size(sum(held)), *map(size, held if num_ranks <= _MAX_RANKS else _spread_of(held))]
        for name, held in [*blocks.items(), ("all blocks", totals)]
    ]
    note = f"Bytes of weights by block, in the newest checkpoint of {format_count(num_ranks, 'rank')}."
    return Table(key, f"Shard map of {names}", ["block", "all ranks", *columns], rows, note)


def _spread_of(values: Sequence[float]) -> list[float]:
    return [min(values), statistics.fmean(values), max(values)]


def _other_table(runs: Sequence[Run]) -> Table:
    rows = []
    for run in runs:
        figures = {name: as_number(value) for name, value in run.result.items()}
        shown = [
            f"{name} {(size if name.endswith('_bytes') else number)(value).text}"
            for name, value in figures.items()
            if value is not None
        ]
        rows.append([text(run.name), text(run.command), text(run.status), text(", ".join(shown) or None)])
    return Table("others", "Other runs", ("run", "command", "status", "figures"), rows)


def _samples(runs: Sequence[Run]) -> list[PromptSamples]:
    prompts = dict.fromkeys(sample.prompt for run in runs for sample in run.samples)
    found = []
    for prompt in prompts:
        rows, num_left_out = [], 0
        for at, run in enumerate(runs):
            of_run = [sample for sample in run.samples if sample.prompt == prompt]
            shown = _spread(of_run, _MAX_SAMPLES)
            num_left_out += len(of_run) - len(shown)
            rows += [(at, sample.step, _cut(sample.completion)) for sample in shown]
        found.append(PromptSamples(_cut(prompt), rows, num_left_out))
    return found


def _spread(items: Sequence[Any], most: int) -> list[Any]:
    """Up to `most` items, evenly spread, including the first and the last."""
    if len(items) <= most:
        return list(items)
    return [items[round(at * (len(items) - 1) / (most - 1))] for at in range(most)]


def _cut(long: str) -> str:
    if len(long) <= _MAX_COMPLETION:
        return long
    return f"{long[:_MAX_COMPLETION]} ... ({len(long) - _MAX_COMPLETION:,} more characters)"
