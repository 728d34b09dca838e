"""Reads a run directory. Damaged data is skipped and reported in `Run.problems`."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import yaml  # type: ignore[import-untyped]  # its stubs are a package of their own

from fsdp_shard.checkpoint import (
    CHECKPOINTS,
    CONFIG_FILE,
    RUN_CONFIG,
    TRAINER,
    has_file,
    member,
    parse_step,
    recorded_command,
)
from fsdp_shard.errors import CheckpointError, FsdpShardError, InputError, one_line
from fsdp_shard.evaluation.report.setting_changes import SettingChange, changes_in
from fsdp_shard.evaluation.report.stored_steps import ReportedStep, read_steps
from fsdp_shard.training import EVALUATIONS, LOCK, METRICS, SAMPLES, holder, of_last_held_out, read_lines
from fsdp_shard.utils import (
    ERROR,
    RESULT,
    chosen_options,
    flatten,
    format_count,
    in_yaml,
    read_bounded,
    read_json,
    redact,
    run_limited,
)

COMPLETED, RUNNING, FAILED, STOPPED = "completed", "running", "failed", "stopped"
_MAX_DEPTH = 4  # directories below one that is not a run, such as outputs/finetune/DATE
_MAX_RUNS = 500

Row = Mapping[str, float | None]


@dataclass(frozen=True)
class PromptSample:
    """The model's completion of a prompt after `step`."""

    step: int
    prompt: str
    completion: str


class HarnessMeasure(NamedTuple):
    """A figure of an lm-evaluation-harness task, and its standard error."""

    task: str
    label: str
    value: float
    error: float | None


@dataclass(frozen=True)
class Run:
    """A run, as far as its files are readable.

    Attributes:
        path: Its directory, as given or found.
        name: Its name in the report.
        command: The command that created it, such as `finetune`; empty if no file records it.
        status: `completed`, `running` (locked by another process), `failed` (it left an error) or `stopped`.
        settings: The settings of its newest or requested step, by dotted name, in YAML notation.
        changes: Settings with other values in earlier steps; None if unknown.
        state: The progress recorded in this step's trainer.json.
        result: The figures of result.json.
        steps: The rows of metrics.jsonl, ascending; non-finite values are None.
        held_out: The rows of evaluations.jsonl since the held-out data last changed, up to the requested step; figures
            of a named held-out set are at SET/NAME.
        samples: The rows of samples.jsonl.
        checkpoints: Its committed steps, ascending.
        error: The cause of its failure, if it failed.
        problems: Unreadable data, a sentence each.
    """

    path: Path
    name: str
    command: str
    status: str
    settings: Mapping[str, str] = field(default_factory=dict)
    changes: Sequence[SettingChange] | None = ()
    state: Mapping[str, Any] = field(default_factory=dict)
    result: Mapping[str, Any] = field(default_factory=dict)
    steps: Sequence[Row] = ()
    held_out: Sequence[Row] = ()
    samples: Sequence[PromptSample] = ()
    checkpoints: Sequence[ReportedStep] = ()
    error: str = ""
    problems: Sequence[str] = ()

    @property
    def sweep(self) -> Path | None:
        """The directory of its sweep, which numbers its runs; None for a run outside a sweep."""
        path = self.path.absolute()
        return path.parent if path.name.isdecimal() else None

    def figure(self, name: str) -> float | None:
        """A number in result.json; None if there is none with this name."""
        return as_number(self.result.get(name))


METRIC = "metrics:"  # prefix of metric names in a row, which also contains figures and held-out sets
_OF_HELD_OUT = ("best_loss", "best_step", "loss_before")  # in a state, for the held-out data named there


def find_runs(paths: Sequence[str]) -> list[Path]:
    """Find runs: the given directories themselves, or runs inside them, as in sweeps.

    Raises:
        InputError: A path neither is nor contains a run, or there are too many.
    """
    found: dict[Path, Path] = {}  # by its path without links: a run that is given twice is one
    for given in paths:
        path = Path(given).expanduser()
        if not path.is_dir():
            raise InputError(f"{given} is not a directory; give the directory of a run, or one with runs in it.")
        inside = [path] if is_run(path) else list(_runs_below(path, _MAX_DEPTH))
        if not inside:
            raise InputError(
                f"{given} is not a run, and has none in it: there is no {CONFIG_FILE} of fsdp-shard, {RESULT} or "
                f"{METRICS}. Give the run_dir of a run, or the directory of a sweep."
            )
        for run in inside:
            found.setdefault(run.resolve(), run)
    if len(found) > _MAX_RUNS:
        raise InputError(f"The given directories contain {len(found):,} runs; a report shows up to {_MAX_RUNS}.")
    return list(found.values())


def is_run(path: Path) -> bool:
    """Whether a directory contains a run's first files: fsdp-shard's settings or metrics, or figures."""
    if (path / METRICS).is_file() or (path / RESULT).is_file():
        return True
    return bool(_command_of(path))


def _runs_below(path: Path, depth: int) -> Iterator[Path]:
    try:
        with os.scandir(path) as entries:
            names = [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}.") from error
    for name in sorted(names, key=_natural):
        inner = path / name
        if is_run(inner):
            yield inner
        elif depth > 1 and name != CHECKPOINTS and not name.startswith("."):
            yield from _runs_below(inner, depth - 1)


def _natural(name: str) -> tuple[int, str]:
    """A sort key for the numbered runs of a sweep."""
    return (int(name), "") if name.isdecimal() and len(name) < 10 else (1 << 40, name)


def read_run(path: Path, name: str, step: Path | None = None) -> Run:
    """Read the run in a directory.

    Args:
        path: The directory.
        name: The run's name in the report.
        step: The directory of the step to read settings from; None for the newest one.
    """
    problems: list[str] = []
    result = _read_result(path, problems)
    is_locked = _is_locked(path, problems)
    status = RUNNING if is_locked else COMPLETED if result.get("status") == COMPLETED else STOPPED
    error = _read_error(path, problems) if status == STOPPED else ""
    steps = _numbers(_lines(path / METRICS, is_locked, problems), path / METRICS, problems)
    evaluated = _held_out(path / EVALUATIONS, is_locked, step, problems)
    held_out = _numbers(evaluated, path / EVALUATIONS, problems)
    samples = _samples(_lines(path / SAMPLES, is_locked, problems), path / SAMPLES, problems)
    # Steps of older versions do not store settings.
    file = path / CONFIG_FILE if step is None or not has_file(step, RUN_CONFIG) else step / RUN_CONFIG
    settings = _read_settings(file, problems)
    checkpoints = read_steps(path / CHECKPOINTS, settings, problems)
    recording = step or (checkpoints[-1].path if checkpoints else None)
    state = {} if recording is None else _read_state(recording)
    if evaluated and state.get("held_out", "") not in ("", evaluated[-1].get("held_out", "")):
        state = {name: value for name, value in state.items() if name not in _OF_HELD_OUT}
    return Run(
        path=path,
        name=one_line(name),
        command=_command_of(path) or ("finetune" if steps else ""),
        status=FAILED if error else status,
        settings=settings,
        changes=changes_in(state),
        state=state,
        result=result,
        steps=steps,
        held_out=held_out,
        samples=samples,
        checkpoints=checkpoints,
        error=error,
        problems=problems,
    )


def as_number(value: Any) -> float | None:
    """Return a finite number unchanged, integer or not; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return value if math.isfinite(value) else None
    except OverflowError:  # an integer too large for a float
        return None


def as_map(value: Any) -> Mapping[str, Any]:
    """Return a map unchanged; an empty one for anything else."""
    return value if isinstance(value, dict) else {}


def as_interval(value: Any) -> tuple[float, float] | None:
    """Return the ends of an interval if both are finite numbers; None for anything else."""
    ends = [as_number(end) for end in value] if isinstance(value, list) else []
    low, high = ends if len(ends) == 2 else (None, None)
    return None if low is None or high is None else (low, high)


def harness_measures(results: Any) -> Iterator[HarnessMeasure]:
    """Yield the measures: `acc,none` with its error `acc_stderr,none`; other entries are none (`sample_len`)."""
    for task, measures in as_map(results).items():
        for name, value in as_map(measures).items():
            measure, comma, filtered = name.partition(",")
            found = as_number(value)
            if not comma or measure.endswith("_stderr") or found is None:
                continue
            error = as_number(measures.get(f"{measure}_stderr,{filtered}"))
            label = measure if filtered in ("", "none") else f"{measure} ({filtered})"
            yield HarnessMeasure(task, label, found, error)


def values_of(rows: Sequence[Row], name: str) -> list[float]:
    """The finite values of a figure."""
    return [value for row in rows if (value := row.get(name)) is not None]


def last_of(rows: Sequence[Row], name: str) -> float | None:
    """The last finite value of a figure."""
    return next(iter(values_of(rows, name)[::-1]), None)


def tokens_per_second(run: Run) -> float | None:
    """Tokens per second over all steps of a run, including those before a resume, which result.json omits."""
    seconds = sum(values_of(run.steps, "step_seconds"))
    return sum(values_of(run.steps, "tokens")) / seconds if seconds else None


def peak_memory(run: Run) -> float | None:
    """Peak bytes of any rank in a run, including before a resume, which result.json omits."""
    of_result = run.figure("peak_memory_bytes")
    return max([*values_of(run.steps, "memory_bytes"), *([] if of_result is None else [of_result])], default=None)


def best_held_out(run: Run) -> tuple[float | None, int | None]:
    """The lowest held-out loss after training began, and its step.

    result.json contains it, and so does the newest step. evaluations.jsonl may lack it: a run that continued in another
    directory has no earlier rows there.
    """
    of_rows = [(row["loss"], int(row["step"])) for row in run.held_out if row["step"] and row["loss"] is not None]
    of_result, of_state = _best_in(run.result), _best_in(run.state)
    if of_result:
        return of_result
    newest = as_number(run.state.get("step")) or 0
    later = [(loss, step) for loss, step in of_rows if step > newest] if of_state else of_rows
    return min([*later, *([of_state] if of_state else [])], default=(None, None))


def _best_in(figures: Mapping[str, Any]) -> tuple[float, int] | None:
    loss, step = as_number(figures.get("best_loss")), as_number(figures.get("best_step"))
    return None if loss is None or step is None else (loss, int(step))


def loss_before(run: Run) -> float | None:
    """The held-out loss before the first step, which may be lower than the best one."""
    rows = [row["loss"] for row in run.held_out[:1] if not row["step"]]
    known = [as_number(known.get("loss_before")) for known in (run.result, run.state)]
    return next((loss for loss in (*rows, *known) if loss is not None), None)


def _command_of(path: Path) -> str:
    """The command in the first line of a config.yaml of fsdp-shard; empty if there is none."""
    words = recorded_command(path)
    # A user's recipe is `run FILE.py`; its files show what it does.
    is_own = words[:1] == ["run"]
    return ("finetune" if (path / METRICS).is_file() else "run") if is_own else words[0] if words else ""


def _is_locked(path: Path, problems: list[str]) -> bool:
    """Whether another process holds the lock of a run, as a live run does."""
    try:
        return holder(path) is not None
    except OSError as error:
        problems.append(f"{path / LOCK} cannot be read ({error.strerror}), so the run is taken for one that has ended.")
        return False


def _read_result(path: Path, problems: list[str]) -> dict[str, Any]:
    file = path / RESULT
    if not os.path.lexists(file):
        return {}
    try:
        result = read_json(file)
    except CheckpointError as error:
        problems.append(str(error))
        return {}
    if not isinstance(result, dict):
        problems.append(f"{file} is not a map of figures, so none are shown.")
        return {}
    return result


def _read_error(path: Path, problems: list[str]) -> str:
    """The message of the error that ended a run; empty if there is none."""
    file = path / ERROR
    if not os.path.lexists(file):
        return ""
    try:
        return one_line(read_bounded(file, "settings_bytes").decode(errors="replace").partition("\n")[0])
    except (CheckpointError, OSError) as error:
        problems.append(str(error))
        return ""


def _read_state(step_directory: Path) -> dict[str, Any]:
    """The content of a step's trainer.json; empty if there is no readable one."""
    try:
        state = read_json(member(step_directory, TRAINER)) if has_file(step_directory, TRAINER) else {}
    except (FsdpShardError, OSError):  # such as a step that a running run has just deleted
        return {}
    return state if isinstance(state, dict) else {}


def _read_settings(file: Path, problems: list[str]) -> dict[str, str]:
    if not os.path.lexists(file):
        problems.append(f"{file.parent} has no {CONFIG_FILE}, so its settings are not shown.")
        return {}
    try:
        content = read_bounded(file, "settings_bytes")
        # YAML allows any repetition and nesting, which its reader processes in quadratic time.
        return run_limited(lambda: _parse_settings(content), f"reading the settings in {file}", error=CheckpointError)
    except CheckpointError as error:
        problems.append(str(error))
        return {}


def _parse_settings(content: bytes) -> dict[str, str]:
    document = yaml.safe_load(content.decode())
    if not isinstance(document, dict):
        raise CheckpointError(f"a {CONFIG_FILE} is not a map of settings, so they are not shown.")
    defaults = document.pop("defaults", None)
    chosen = chosen_options(defaults) if isinstance(defaults, list) else {}
    flat = {str(group): in_yaml(option) for group, option in chosen.items()}
    for name, value in flatten(document):
        flat[name] = redact(in_yaml(value))  # runs of older versions recorded the signatures of addresses
    return flat


def _lines(file: Path, is_locked: bool, problems: list[str]) -> list[dict[str, Any]]:
    """The rows of a file; damaged lines are counted. The last line of a running run may be incomplete."""
    try:
        lines = read_lines(file)
    except CheckpointError as error:
        problems.append(str(error))
        return []
    if is_locked and lines[-1:] == [None]:
        lines.pop()
    rows = [row for row in lines if row is not None]
    if num_damaged := len(lines) - len(rows):
        problems.append(f"{file}: {format_count(num_damaged, 'damaged line')} left out of {len(lines):,}.")
    return rows


def _numbers(rows: Sequence[Mapping[str, Any]], file: Path, problems: list[str]) -> list[Row]:
    """The numbers of each row by step; for a repeated step, the later row counts."""
    found: dict[int, Row] = {}
    num_wrong = 0
    for row in rows:
        # null stands for a non-finite loss.
        values = {name: as_number(value) for name, value in row.items() if not isinstance(value, dict | str | list)}
        if "loss" not in values or (values["loss"] is None and row["loss"] is not None):
            num_wrong += 1
            continue
        found[row["step"]] = {**values, **_of_sets(row), **_of_metrics(row)}
    if num_wrong:
        problems.append(f"{file}: {format_count(num_wrong, 'line')} left out that have no number as their loss.")
    if num_repeated := len(rows) - num_wrong - len(found):
        problems.append(f"{file}: {format_count(num_repeated, 'line')} left out whose step has a later line.")
    return [found[step] for step in sorted(found)]


def _held_out(file: Path, is_locked: bool, step: Path | None, problems: list[str]) -> list[dict[str, Any]]:
    """The rows of evaluations.jsonl, up to a step if given, with the same held-out data as the last one."""
    last = None if step is None else parse_step(step.name)
    rows = [row for row in _lines(file, is_locked, problems) if last is None or row["step"] <= last]
    same = of_last_held_out(rows)
    if num_others := len(rows) - len(same):
        problems.append(
            f"{file}: {format_count(num_others, 'line')} left out that are of other held-out data than later."
        )
    return same


def _of_sets(row: Mapping[str, Any]) -> Row:
    """The figures of each held-out set as SET/NAME."""
    return {
        f"{name}/{key}": as_number(value)
        for name, figures in as_map(row.get("sets")).items()
        for key, value in as_map(figures).items()
    }


def _of_metrics(row: Mapping[str, Any]) -> Row:
    """The objective's and custom metrics as METRIC NAME."""
    return {f"{METRIC}{name}": as_number(value) for name, value in as_map(row.get("metrics")).items()}


def _samples(rows: Sequence[Mapping[str, Any]], file: Path, problems: list[str]) -> list[PromptSample]:
    found = [
        PromptSample(row["step"], row["prompt"], row["completion"])
        for row in rows
        if isinstance(row.get("prompt"), str) and isinstance(row.get("completion"), str)
    ]
    if num_wrong := len(rows) - len(found):
        problems.append(f"{file}: {format_count(num_wrong, 'line')} left out without prompt or completion.")
    return sorted(found, key=lambda sample: sample.step)
