"""Finds the weights, config and tokenizer in the directories that training stacks write.

It knows the names that these writers give:

    accelerate, Trainer     checkpoint-500/ or checkpoints/checkpoint_3/, with pytorch_model_fsdp_0/ or .bin inside
    torchtitan              checkpoint/step-500/, after consolidation with sharded/ inside
    torchtune               epoch_0/, step_100/
    verl                    global_step_200/actor/, with config and tokenizer in actor/huggingface/

The caller decides what is a checkpoint (`is_checkpoint`); this module only looks at names and opens no file.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import islice
from pathlib import Path

from fsdp_shard.checkpoint.io import has_file
from fsdp_shard.checkpoint.steps.manifest import MANIFEST
from fsdp_shard.checkpoint.steps.step_store import CHECKPOINTS, StepStore, parse_step
from fsdp_shard.errors import CheckpointError

IsCheckpoint = Callable[[Path], bool]

# Directories of one step or epoch; the highest number is the newest.
_FAMILIES = ("step-", "step_", "checkpoint-", "checkpoint_", "global_step_", "epoch_")
_NUMBERED = re.compile(rf"({'|'.join(_FAMILIES)})(\d+)")
_FSDP = re.compile(r"pytorch_model_fsdp(_\d+)?(\.bin)?")  # accelerate.utils.constants.FSDP_MODEL_NAME
_INNER = ("actor", "huggingface", "sharded")
_OUTER = ("checkpoint", "checkpoints")
_SIDE_DIRECTORY = "huggingface"  # verl
_SIDE_FILES = ("config.json", "tokenizer_config.json", "tokenizer.json")
# Limits of the search: no layout nests so deeply, and no run keeps so many steps without weights.
_MAX_DEPTH, _MAX_DIRECTORIES = 16, 400


def find_checkpoint(path: Path, is_checkpoint: IsCheckpoint) -> tuple[Path, Path | None, int | None]:
    """Follow the known layouts from `path` down to a checkpoint.

    The newest numbered directory with a checkpoint wins: an interrupted save leaves a later one without.

    Args:
        path: The path from the user.
        is_checkpoint: Whether a path is a checkpoint itself.

    Returns:
        (weights, side, step). The path of the weights, a directory or a file, is `path` itself if no layout leads to a
        checkpoint. The directory with config and tokenizer is None if it is that of the weights, or there is no config.

    Raises:
        CheckpointError: There are several candidates, which the message lists, or a link leads out of `path`.
    """
    trail = _lead(path, is_checkpoint, set())
    if trail is None:
        others = _other_checkpoints(path, is_checkpoint)
        if others:
            raise _ambiguous(path, others)
        trail = [path]
    real = trail[-1].resolve()
    if not real.is_relative_to(path.resolve()):
        raise CheckpointError(
            f"{trail[-1]} is a link to {real}, outside {path}; it is not followed. Give that path itself."
        )
    return trail[-1], _side(path, trail), _step(path, trail)


def is_numbered(name: str) -> bool:
    """Return whether a directory of this name is one step or epoch of some training stack."""
    return _NUMBERED.fullmatch(name) is not None


def holds_models(path: Path) -> bool:
    """Return whether a directory has entries that training stacks name as models, steps or epochs."""
    names = [entry.name for entry in path.iterdir()]
    return any(_FSDP.fullmatch(name) or name == "actor" or is_numbered(name) for name in names)


def _lead(path: Path, is_checkpoint: IsCheckpoint, seen: set[Path], depth: int = 0) -> list[Path] | None:
    """Return the directories from `path` down to a checkpoint, or None. `seen` stops at links that form a cycle."""
    real = path.resolve()
    if real not in seen and is_checkpoint(path):
        return [path]
    if real in seen or not path.is_dir():
        return None
    if depth > _MAX_DEPTH or len(seen) > _MAX_DIRECTORIES:
        raise CheckpointError(
            f"{path} is nested deeply, or one of hundreds of directories, none of which is a checkpoint; give the "
            "path of the checkpoint itself."
        )
    seen.add(real)
    for rule in (_fsdp_models, partial(_subdirectories, _INNER), _newest_first, partial(_subdirectories, _OUTER)):
        for child in rule(path):
            below = _lead(child, is_checkpoint, seen, depth + 1)
            if below is not None:
                return [path, *below]
    return None


def _fsdp_models(path: Path) -> list[Path]:
    """Return accelerate's model; CheckpointError if there are several, as it numbers those prepared together."""
    found = sorted(entry for entry in path.iterdir() if _FSDP.fullmatch(entry.name))
    if len(found) > 1:
        raise _ambiguous(path, found)
    return found


def _subdirectories(names: Sequence[str], path: Path) -> list[Path]:
    return [path / name for name in names if (path / name).is_dir()]


def _newest_first(path: Path) -> list[Path]:
    numbers: dict[str, list[tuple[int, Path]]] = {}
    for entry in path.iterdir():
        match = _NUMBERED.fullmatch(entry.name)
        if match and entry.is_dir():
            numbers.setdefault(match[1], []).append((int(match[2]), entry))
    if len(numbers) > 1:  # steps and epochs cannot be compared
        raise _ambiguous(path, [max(found)[1] for found in numbers.values()])
    return [entry for found in numbers.values() for _, entry in sorted(found, reverse=True)]


def _other_checkpoints(path: Path, is_checkpoint: IsCheckpoint) -> list[Path]:
    """List checkpoints directly below that no rule leads to; optimizer states do not count."""
    if not path.is_dir():
        return []
    children = (entry for entry in path.iterdir() if entry.is_dir() and not entry.name.startswith("optim"))
    return sorted(entry for entry in islice(children, _MAX_DIRECTORIES) if is_checkpoint(entry))


def _ambiguous(path: Path, found: list[Path]) -> CheckpointError:
    some = ", ".join(map(str, sorted(found)[:8])) + (", ..." if len(found) > 8 else "")
    if len(found) == 1:
        return CheckpointError(f"{path} is not itself a checkpoint, but {some} in it is; give that path.")
    return CheckpointError(
        f"{path} holds several checkpoints, and it is not clear which one is meant: give one of {some}."
    )


def _step(path: Path, trail: list[Path]) -> int | None:
    for name in reversed([path.resolve().name, *(directory.name for directory in trail)]):
        match = _NUMBERED.fullmatch(name)
        if match and match[1] != "epoch_":
            return int(match[2])
    return None


def _side(path: Path, trail: list[Path]) -> Path | None:
    """Return the nearest directory with a config (else a tokenizer), from the weights outwards; None for their own."""
    home = trail[-1] if trail[-1].is_dir() else trail[-1].parent
    directories = list(_side_directories(path, trail))
    for name in _SIDE_FILES:
        for directory in directories:
            if has_file(directory, name):
                return None if directory == home else directory
    return None


def _side_directories(path: Path, trail: list[Path]) -> Iterator[Path]:
    """Yield directories inside `path`, and its parent if `path` is an inner directory of a known layout."""
    base = path.resolve()
    for directory in reversed([entry for entry in trail if entry.is_dir()]):
        yield directory
        side = directory / _SIDE_DIRECTORY
        if side.is_dir() and side.resolve().is_relative_to(base):
            yield side
    if path.is_dir() and (base.name in _INNER or _FSDP.fullmatch(base.name) or is_numbered(base.name)):
        yield base.parent


def latest_step_directory(path: Path) -> Path:
    """Return the latest committed step of a run directory or of its checkpoints/; any other path is returned as it is.

    Raises:
        CheckpointError: The run has no committed step yet.
    """
    given = path
    if not path.is_dir() or has_file(path, MANIFEST):
        return path
    if (path / CHECKPOINTS).is_dir():
        path = path / CHECKPOINTS
    elif not any(parse_step(entry.name) is not None for entry in path.iterdir()):
        return path
    store = StepStore(path)
    latest = store.latest()
    if latest is None and any(is_numbered(entry.name) for entry in path.iterdir()):
        return given  # steps of another training stack: ours get their manifest before their name
    if latest is None:
        raise CheckpointError(f"{path} has no finished checkpoint yet: no step directory in it has a {MANIFEST}.")
    return store.path(latest)
