"""Experiment trackers: TensorBoard, Weights & Biases, MLflow, trackio, through accelerate's tracker classes.

Only rank 0 runs trackers. A tracker that cannot start ends the run before its first step. A tracker that fails later is
dropped, as training matters more. Each is configured by its own environment variables (WANDB_MODE, MLFLOW_TRACKING_URI,
...).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, Self

from fsdp_shard.errors import ConfigError
from fsdp_shard.training.config import TRACKERS
from fsdp_shard.training.logging.accelerate_private import temporary_cpu_state
from fsdp_shard.utils import nearest, redact, redact_setting, require_package, walk

# Name of a tracker and its package -> its factory, called with `accelerate.tracking`, the project and the run
# directory. A new tracker is a line here and one in `TRACKERS` of `training/config.py`.
_FACTORIES: Mapping[str, Callable[[Any, str, Path], Any]] = {
    "tensorboard": lambda library, project, run_dir: library.TensorBoardTracker("tensorboard", str(run_dir)),
    "wandb": lambda library, project, run_dir: library.WandBTracker(project, name=run_dir.name, dir=str(run_dir)),
    "mlflow": lambda library, project, run_dir: library.MLflowTracker(project, run_name=run_dir.name),
    "trackio": lambda library, project, run_dir: library.TrackioTracker(project, name=run_dir.name),
}
assert _FACTORIES.keys() == TRACKERS.keys()


def check_trackers(names: Sequence[str]) -> None:
    """Raise ConfigError if one of `names` is not a tracker, or is not installed."""
    for name in names:
        if name not in TRACKERS:
            close = nearest(name, list(TRACKERS))
            raise ConfigError(f"train.trackers={list(names)}: {name} is not one of {', '.join(TRACKERS)}{close}.")
        require_package(name, name, f"train.trackers={list(names)}", "leave it out")


def public_settings(config: Any) -> dict[str, bool | int | float | str | None]:
    """Return every setting of a config dataclass by its dotted name, with lists as text and secrets redacted."""
    return {
        name: value if value is None or isinstance(value, (bool, int, float)) else redact_setting(name, str(value))
        for name, _, value in walk(config)
    }


class Trackers:
    """The trackers of a run, a context manager.

    Args:
        names: Names of trackers, possibly none.
        project: Name of the project.
        run_dir: Directory of the run; its name becomes the run's name.
        settings: The settings of the run, shown on its page.
        note: Reports a tracker that failed.
    """

    def __init__(
        self,
        names: Sequence[str],
        project: str,
        run_dir: Path,
        settings: Mapping[str, Any],
        note: Callable[[str], None] = print,
    ) -> None:
        self._names, self._project, self._run_dir, self._settings = names, project, run_dir, settings
        self._open: dict[str, Any] = {}
        self._note, self._exit = note, ExitStack()

    def __enter__(self) -> Self:
        if self._names:
            self._exit.enter_context(temporary_cpu_state())
        for name in self._names:
            try:
                from accelerate import tracking

                tracker = _FACTORIES[name](tracking, self._project, self._run_dir)
                tracker.main_process_only = False  # this is rank 0; accelerate would find out for itself
                tracker.start()
                self._exit.callback(self._try, name, tracker.finish)
                tracker.store_init_configuration(dict(self._settings))
                self._open[name] = tracker
            except Exception as error:
                self._exit.close()
                raise ConfigError(
                    f"train.trackers={list(self._names)}: {name} could not be started: {_describe(error)} Set it up, "
                    f"or leave it out."
                ) from error
        return self

    def _try(self, name: str, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:
            self._open.pop(name, None)
            self._note(f"{name} has failed and gets no more figures; run_dir still has them all: {_describe(error)}")

    def __exit__(self, *exception: object) -> None:
        self._exit.close()

    def log(self, group: str, row: Mapping[str, Any]) -> None:
        """Log the figures of a row at its step as GROUP/NAME, or GROUP/NAME/NAME if nested. None is omitted."""
        figures = {name: value for name, value in _flatten(row, f"{group}/") if name != f"{group}/step"}
        for name, tracker in list(self._open.items()):
            self._try(name, partial(tracker.log, figures, step=row["step"]))


def _flatten(row: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for name, value in row.items():
        if isinstance(value, Mapping):
            yield from _flatten(value, f"{prefix}{name}/")
        elif value is not None:
            yield f"{prefix}{name}", value


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {redact(' '.join(str(error).split()))[:300].rstrip('.')}."
