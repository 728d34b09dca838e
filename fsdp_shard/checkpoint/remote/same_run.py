"""Checks that a remote store and a run directory belong to the same run, as one would delete the other's steps."""

import json
import uuid
from typing import Any

from fsdp_shard.checkpoint.io import has_file, member
from fsdp_shard.checkpoint.remote.store import RemoteStore
from fsdp_shard.checkpoint.steps.manifest import MANIFEST, parse_manifest, read_manifest
from fsdp_shard.checkpoint.steps.step_store import TRAINER, StepStore
from fsdp_shard.errors import ConfigError
from fsdp_shard.utils import parse_json, read_bounded

RUN_ID = "run_id.json"  # in each step of a run; steps of earlier versions have none


def check_same_run(remote: RemoteStore, store: StepStore) -> None:
    """Raise ConfigError if both have steps, of different runs.

    A common step must have the same weights in both. Without one, as when each keeps different steps, the ids of the
    runs are compared. If either has no id, the seed and the data in trainer.json are compared: a run cannot be resumed
    with others.

    Args:
        remote: The remote store.
        store: The checkpoints of the run.
    """
    local, uploaded = store.steps(), remote.steps()
    if not local or not uploaded:
        return
    common = set(local) & set(uploaded)
    own_step, other_step = (max(common), max(common)) if common else (max(local), max(uploaded))
    if (own := read_manifest(store.path(own_step))) is None:
        return
    other = parse_manifest(remote.manifest(other_step), remote.address(other_step, MANIFEST))
    if common and own.tensors != other.tensors:
        raise _another_run(remote, other_step, store, own_step, "their weights differ")
    if common:
        return
    if RUN_ID in own.files and RUN_ID in other.files:
        if read_bounded(store.path(own_step) / RUN_ID, "config_bytes") != remote.read(other_step, RUN_ID):
            raise _another_run(remote, other_step, store, own_step, f"their {RUN_ID} differs")
        return
    if TRAINER not in own.files or TRAINER not in other.files:
        return
    path, address = store.path(own_step) / TRAINER, remote.address(other_step, TRAINER)
    own_state, other_state = (
        _described(read_bounded(path, "config_bytes"), str(path)),
        _described(remote.read(other_step, TRAINER), address),
    )
    for name, value in own_state.items():
        if value != other_state[name]:
            raise _another_run(remote, other_step, store, own_step, f"their {name} differs")


def new_run_id() -> bytes:
    """Content of `run_id.json` for the steps of a new run."""
    return f"{json.dumps({'run_id': uuid.uuid4().hex})}\n".encode()


def run_id_of(store: StepStore) -> bytes | None:
    """Content of `run_id.json` in the latest step of a run; None if there is none."""
    latest = store.latest()
    if latest is None or not has_file(store.path(latest), RUN_ID):
        return None
    return read_bounded(member(store.path(latest), RUN_ID), "config_bytes")


def remote_run_id(remote: RemoteStore, step: int) -> bytes | None:
    """Content of `run_id.json` in a step of a remote store; None if there is none."""
    manifest = parse_manifest(remote.manifest(step), remote.address(step, MANIFEST))
    return remote.read(step, RUN_ID) if RUN_ID in manifest.files else None


def _described(content: bytes, where: str) -> dict[str, Any]:
    state = parse_json(content, where)
    return {name: state.get(name) if isinstance(state, dict) else None for name in ("seed", "data")}


def _another_run(remote: RemoteStore, uploaded: int, store: StepStore, step: int, why: str) -> ConfigError:
    return ConfigError(
        f"{remote.address(uploaded)} is of another run than {store.path(step)}: {why}. Give another checkpoint.remote, "
        f"or the run_dir of that run."
    )
