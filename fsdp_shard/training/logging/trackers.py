"""Experiment trackers: TensorBoard, Weights & Biases, MLflow, trackio, through accelerate's tracker classes.

Only rank 0 runs trackers. A tracker that cannot start ends the run before its first step. A tracker that fails later is
dropped, as training matters more. Each is configured by its own environment variables (WANDB_MODE, MLFLOW_TRACKING_URI,
...).
"""

import json
import re
import sys
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from importlib import import_module
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

from fsdp_shard.errors import ConfigError, FsdpShardError, Interrupted
from fsdp_shard.training.config import TRACKERS
from fsdp_shard.training.logging.accelerate_private import temporary_cpu_state
from fsdp_shard.utils import (
    flatten,
    nearest,
    read_json,
    redact,
    redact_setting,
    require_package,
    walk,
    write_atomically,
)

IDS = "trackers.json"
"""In the run directory: its path, and name of a tracker -> its id of the run, which a resumed run continues."""
_PLACE = "run_dir"


class _Earlier(NamedTuple):
    """What a resumed run continues.

    Attributes:
        run_id: The tracker's id of the run; None in a new run.
        first_step: The first step to come. Figures of it and of later steps, from a run that ended in this directory
            after its last checkpoint, or without one, are not shown.
    """

    run_id: str | None = None
    first_step: int = 0


class _Kind(NamedTuple):
    """How to use a tracker of accelerate.

    Attributes:
        make: Makes it from `accelerate.tracking`, the project, the run directory, and what it continues.
        begin: Called once it has started.
        log: Logs figures at a step.
        run_id: Returns the id that it has given to the run; "" if it has none.
        fail: Ends it for a run that failed, or that was asked to stop.
        forbidden: Pattern of the characters that names of figures may not have.
        takes_text: Whether it shows text, such as samples.
        takes_changed_settings: Whether the settings of a run may be stored again.
    """

    make: Callable[[Any, str, Path, _Earlier], Any]
    begin: Callable[[Any], object] = lambda tracker: None
    log: Callable[[Any, dict[str, Any], int], object] = lambda tracker, figures, step: tracker.log(figures, step=step)
    run_id: Callable[[Any], str] = lambda tracker: ""
    fail: Callable[[Any, bool], None] = lambda tracker, is_stopped: tracker.finish()
    forbidden: str = ""
    takes_text: bool = True
    takes_changed_settings: bool = True


def _end_mlflow(tracker: Any, is_stopped: bool) -> None:
    import_module("mlflow").end_run(status="KILLED" if is_stopped else "FAILED")


def _resume(earlier: _Earlier, **by_id: str) -> dict[str, Any]:
    return {} if earlier.run_id is None else {"resume": "allow", **by_id}


def _wandb_settings() -> dict[str, Any]:
    """Settings of wandb: its metadata has the command line, with which an address's signature would be uploaded."""
    command = " ".join(sys.argv)
    return {} if redact(command) == command else {"settings": {"x_disable_meta": True}}


# A new tracker is an entry here and one in `TRACKERS` of `training/config.py`.
_KINDS: Mapping[str, _Kind] = {
    "tensorboard": _Kind(
        lambda library, project, run_dir, earlier: library.TensorBoardTracker(
            "tensorboard", str(run_dir), purge_step=earlier.first_step
        )
    ),
    "wandb": _Kind(
        lambda library, project, run_dir, earlier: library.WandBTracker(
            project,
            name=run_dir.name,
            dir=str(run_dir),
            **_resume(earlier, id=earlier.run_id or ""),
            **_wandb_settings(),
        ),
        # Its own steps only ascend: figures of steps that a resumed run trains again would be dropped.
        begin=lambda tracker: tracker.run.define_metric("*", step_metric="step"),
        log=lambda tracker, figures, step: tracker.log({**figures, "step": step}),
        run_id=lambda tracker: str(tracker.run.id),
        fail=lambda tracker, is_stopped: tracker.run.finish(exit_code=1),
    ),
    "mlflow": _Kind(
        lambda library, project, run_dir, earlier: library.MLflowTracker(
            project, run_name=run_dir.name, run_id=earlier.run_id
        ),
        run_id=lambda tracker: str(tracker.active_run.info.run_id),
        fail=_end_mlflow,
        forbidden=r"[^\w\-. :/]",
        takes_text=False,
        takes_changed_settings=False,
    ),
    "trackio": _Kind(
        lambda library, project, run_dir, earlier: library.TrackioTracker(
            # It resumes by name, and run directories of one name may be of several runs, such as 0 of each sweep.
            project,
            name=earlier.run_id or f"{run_dir.name}-{uuid.uuid4().hex[:8]}",
            **_resume(earlier),
        ),
        run_id=lambda tracker: str(tracker.run.name),
    ),
}
assert _KINDS.keys() == TRACKERS.keys()


def check_trackers(names: Sequence[str]) -> None:
    """Raise ConfigError if one of `names` is not a tracker, or is not installed."""
    for name in names:
        if name not in TRACKERS:
            close = nearest(name, list(TRACKERS))
            raise ConfigError(f"train.trackers={list(names)}: {name} is not one of {', '.join(TRACKERS)}{close}.")
        require_package(name, name, f"train.trackers={list(names)}", "remove it")


def public_settings(config: Any) -> dict[str, bool | int | float | str | None]:
    """Return every setting of a config dataclass by its dotted name, with lists as text and secrets redacted."""
    return {
        name: value if value is None or isinstance(value, (bool, int, float)) else redact_setting(name, str(value))
        for name, _, value in walk(config)
    }


class Trackers:
    """The trackers of a run, a context manager.

    A resumed run continues the runs that its trackers know; a failed or stopped one is marked so.

    Args:
        names: Names of trackers, possibly none.
        project: Name of the project.
        run_dir: Directory of the run; its name becomes the run's name.
        settings: The settings of the run, shown on its page.
        note: Reports a tracker that failed.
        resumed_step: The step from which the run of this directory continues; None for a new run.
    """

    def __init__(
        self,
        names: Sequence[str],
        project: str,
        run_dir: Path,
        settings: Mapping[str, Any],
        note: Callable[[str], None] = print,
        resumed_step: int | None = None,
    ) -> None:
        self._names, self._project, self._run_dir, self._settings = names, project, run_dir, settings
        self._resumed_step = resumed_step
        self._open: dict[str, Any] = {}
        self._failed: set[str] = set()
        self._note, self._exit = note, ExitStack()

    def __enter__(self) -> Self:
        if not self._names:
            return self
        self._exit.enter_context(temporary_cpu_state())
        known = {} if self._resumed_step is None else _read_ids(self._run_dir)
        for name in self._names:
            try:
                self._start(name, known.get(name))
            except Exception as error:
                self.__exit__(type(error), error, None)
                raise ConfigError(
                    f"train.trackers={list(self._names)}: {name} could not be started: {_describe(error)} Set it up, "
                    f"or remove it."
                ) from error
        if ids := {name: found for name, one in self._open.items() if (found := _KINDS[name].run_id(one))}:
            place = {_PLACE: str(self._run_dir.absolute())}
            write_atomically(self._run_dir / IDS, json.dumps(place | known | ids, indent=2) + "\n")
        return self

    def _start(self, name: str, run_id: str | None) -> None:
        from accelerate import tracking

        first_step = 0 if self._resumed_step is None else self._resumed_step + 1
        tracker = _KINDS[name].make(tracking, self._project, self._run_dir, _Earlier(run_id, first_step))
        tracker.main_process_only = False  # this is rank 0; accelerate would find out for itself
        tracker.start()
        self._open[name] = tracker
        _KINDS[name].begin(tracker)
        if run_id is None or _KINDS[name].takes_changed_settings:
            tracker.store_init_configuration(dict(self._settings))

    def _try(self, name: str, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:
            self._failed.add(name)
            self._note(f"{name} failed and is no longer updated; run_dir has all figures: {_describe(error)}")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for name, tracker in self._open.items():
            is_stopped = isinstance(error, Interrupted)
            self._try(name, tracker.finish if error is None else partial(_KINDS[name].fail, tracker, is_stopped))
        self._exit.close()

    def log(self, group: str, row: Mapping[str, Any]) -> None:
        """Log the figures of a row at its step as GROUP/NAME, or GROUP/NAME/NAME if nested. None is omitted."""
        named = flatten({group: row}, "/")
        figures = {name: value for name, value in named if value is not None and name != f"{group}/step"}
        for name, tracker in self._open.items():
            if name not in self._failed:
                self._try(name, partial(self._log, name, tracker, figures, row["step"]))

    def _log(self, name: str, tracker: Any, figures: Mapping[str, Any], step: int) -> None:
        kind = _KINDS[name]
        kind.log(tracker, _accepted_figures(kind, figures), step)


def _accepted_figures(kind: _Kind, figures: Mapping[str, Any]) -> dict[str, Any]:
    """The figures that a tracker takes, under names that it takes."""
    return {
        re.sub(kind.forbidden, "_", name) if kind.forbidden else name: value
        for name, value in figures.items()
        if kind.takes_text or isinstance(value, (int, float))
    }


def _read_ids(run_dir: Path) -> dict[str, str]:
    """The trackers' ids of the run; none if the directory is a copy, which is another run, or the file is damaged."""
    with suppress(FsdpShardError, OSError):
        found = read_json(run_dir / IDS)
        if isinstance(found, dict) and found.pop(_PLACE, None) == str(run_dir.absolute()):
            return {name: run_id for name, run_id in found.items() if isinstance(run_id, str) and run_id}
    return {}


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {redact(' '.join(str(error).split()))[:300].rstrip('.')}."
