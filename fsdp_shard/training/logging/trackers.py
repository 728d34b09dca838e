"""The figures of a run in the trackers that people look at: TensorBoard, Weights & Biases, MLflow, trackio.

They are accelerate's tracker classes; a new one is one more line in `TRACKERS`. Only rank 0 has any. One that cannot
start ends the run before its first step; one that fails later is left out from then on, as training matters more.
Where a tracker sends things to, and who is logged in there, is its own (WANDB_MODE=offline, MLFLOW_TRACKING_URI, ...).
Knows nothing of the run but its figures and its settings, of which what looks like a secret is never passed on.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import is_dataclass
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Any

from fsdp_shard.errors import ConfigError
from fsdp_shard.utils import nearest, walk

_SECRET_NAME = re.compile(
    r"(^|_)(tokens?|passwords?|passwd|secrets?|credentials?|api_?key|access_?key)$", re.IGNORECASE
)
_LOGIN_IN_URL = re.compile(r"(?<=://)[^/\s@]+@")
_HUB_TOKEN = re.compile(r"\bhf_[A-Za-z0-9]{20,}\b")
_HIDDEN = "(not shown)"

# Made from (project, name of the run, its directory).
_Make = Callable[[str, str, Path], Any]


def _tensorboard(project: str, run: str, run_dir: Path) -> Any:
    from accelerate.tracking import TensorBoardTracker

    return TensorBoardTracker("tensorboard", logging_dir=str(run_dir))


def _wandb(project: str, run: str, run_dir: Path) -> Any:
    from accelerate.tracking import WandBTracker

    return WandBTracker(project, name=run, dir=str(run_dir))


def _mlflow(project: str, run: str, run_dir: Path) -> Any:
    from accelerate.tracking import MLflowTracker

    return MLflowTracker(experiment_name=project, run_name=run)


def _trackio(project: str, run: str, run_dir: Path) -> Any:
    from accelerate.tracking import TrackioTracker

    return TrackioTracker(project, name=run)


# Name, which is also the module that it needs -> how it is made.
TRACKERS: Mapping[str, _Make] = {
    "tensorboard": _tensorboard,
    "wandb": _wandb,
    "mlflow": _mlflow,
    "trackio": _trackio,
}


def check_trackers(names: Sequence[str]) -> None:
    """Raise ConfigError when one of `names` is no tracker that we know, or is not installed."""
    for name in names:
        if name not in TRACKERS:
            close = nearest(name, list(TRACKERS))
            raise ConfigError(f"train.trackers={list(names)}: {name} is not one of {', '.join(TRACKERS)}{close}.")
        if find_spec(name) is None:
            raise ConfigError(
                f"train.trackers={list(names)} needs {name}, which is not installed. Install it with pip install "
                f"'fsdp-shard[{name}]', or leave it out."
            )


def public_settings(config: Any) -> dict[str, bool | int | float | str | None]:
    """Every setting of a config by its dotted name, as trackers take them: without secrets, lists as text."""
    assert is_dataclass(config)
    return {name: _public(name, value) for name, _, value in walk(config)}


def _public(name: str, value: Any) -> bool | int | float | str | None:
    if value is not None and _SECRET_NAME.search(name.rpartition(".")[2]):
        return _HIDDEN
    if value is None or isinstance(value, (bool, int, float)):
        return value
    return _HUB_TOKEN.sub(_HIDDEN, _LOGIN_IN_URL.sub("", str(value)))


class Trackers:
    """The trackers `names` of the run in `run_dir`, open from `__enter__` to `__exit__`; with no names, nothing.

    `note` tells people of one that has failed.
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

    def __enter__(self) -> Trackers:
        if self._names:
            self._exit.enter_context(_accelerate_state())
        for name in self._names:
            try:
                self._open[name] = self._start(name)
            except Exception as error:
                self._exit.close()
                raise ConfigError(
                    f"train.trackers={list(self._names)}: {name} could not be started: {_words(error)} Set it up, or "
                    f"leave it out."
                ) from error
        return self

    def _start(self, name: str) -> Any:
        tracker = TRACKERS[name](self._project, self._run_dir.name, self._run_dir)
        tracker.main_process_only = False  # we are on rank 0; accelerate would look for itself
        tracker.start()
        self._exit.callback(lambda: self._try(name, lambda: tracker.finish()))
        tracker.store_init_configuration(dict(self._settings))
        return tracker

    def _try(self, name: str, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:
            self._open.pop(name, None)
            self._note(f"{name} has failed and gets no more figures, which are in run_dir as ever: {_words(error)}")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._exit.close()

    def log(self, group: str, row: Mapping[str, Any]) -> None:
        """The figures of a row as GROUP/NAME at its step, those within a figure as GROUP/NAME/NAME; what has no finite
        value in it is left out.
        """
        figures = {name: value for name, value in _flat(row, f"{group}/") if name != f"{group}/step"}
        for name, tracker in list(self._open.items()):
            self._try(name, lambda tracker=tracker: tracker.log(figures, step=row["step"]))  # type: ignore[misc]


def _flat(row: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for name, value in row.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}/")
        elif value is not None:
            yield f"{prefix}{name}", value


def _words(error: Exception) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:300].rstrip('.')}."


@contextmanager
def _accelerate_state() -> Iterator[None]:
    """accelerate's trackers write debug messages, for which its state must be there; here it must change nothing.

    Told that it is on the CPU, it neither chooses a GPU nor starts a process group, but may change the threads.
    """
    import torch
    from accelerate import PartialState

    num_threads, was_there = torch.get_num_threads(), PartialState._shared_state != {}
    PartialState(cpu=True)
    torch.set_num_threads(num_threads)
    try:
        yield
    finally:
        if not was_there:
            PartialState._reset_state()
