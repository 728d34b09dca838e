"""Parses references to steps: RUN@latest, RUN@best, RUN@step-400, RUN@400, or the pointer RUN/checkpoints/best."""

import os
import re
from collections.abc import Sequence
from pathlib import Path

from fsdp_shard.checkpoint.steps.manifest import MANIFEST
from fsdp_shard.checkpoint.steps.step_store import BEST, LATEST, StepStore
from fsdp_shard.errors import CheckpointError

_NUMBER = re.compile(r"(?:step-)?(\d+)")
_NUM_LISTED = 8


def split_reference(path: str) -> tuple[str, str | None]:
    """Split a step reference into its run and the part after the @; return (`path`, None) if it is not a reference.

    An existing path is used as is, even with an @ in its name; only a pointer stands for the step to which it points.
    """
    local = Path(path).expanduser()
    if local.name in (LATEST, BEST) and StepStore(local.parent).pointer(local.name) is not None:
        return str(local.parent), local.name
    run, _, wanted = path.rpartition("@")
    if not run or os.path.lexists(local):
        return path, None
    is_step = wanted in (LATEST, BEST) or _NUMBER.fullmatch(wanted) is not None
    return (run, wanted) if is_step or Path(run).expanduser().is_dir() else (path, None)


def choose_step(wanted: str, steps: Sequence[int], best: int | None, run: str) -> int:
    """Return the `wanted` step of a run.

    Args:
        wanted: The part after the @.
        steps: The committed steps of the run, ascending.
        best: The step named by the run's pointer `best`.
        run: The run, for messages.

    Raises:
        CheckpointError: The step does not exist; the message lists the existing steps.
    """
    if not steps:
        raise CheckpointError(
            f"{run} has no finished checkpoint: no step directory in it has a {MANIFEST}. Of checkpoints that other "
            f"programs wrote, give the directory itself."
        )
    number = _NUMBER.fullmatch(wanted)
    found = {LATEST: steps[-1], BEST: best}.get(wanted, int(number[1]) if number else None)
    if found is None or found not in steps:
        listed = ", ".join(map(str, steps[-_NUM_LISTED:]))
        earlier = f", and {len(steps) - _NUM_LISTED} earlier ones" if len(steps) > _NUM_LISTED else ""
        raise CheckpointError(
            f"{run} has no {f'step {number[1]}' if number else f'{wanted} step'}: its steps are {listed}{earlier}"
            f"{'' if best is None else f', the best is {best}'}. Give one of them, such as {run}@step-{steps[-1]}."
        )
    return found
