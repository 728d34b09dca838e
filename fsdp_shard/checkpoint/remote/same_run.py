"""Checks that a remote store and a run directory belong to one run: else one would delete the other's steps."""

from typing import Any

from fsdp_shard.checkpoint.remote.store import RemoteStore
from fsdp_shard.checkpoint.steps.manifest import MANIFEST, parse_manifest, read_manifest
from fsdp_shard.checkpoint.steps.step_store import TRAINER, Store
from fsdp_shard.errors import ConfigError
from fsdp_shard.utils import parse_json, read_bounded


def check_same_run(remote: RemoteStore, store: Store) -> None:
    """Raise ConfigError if both have steps, of different runs.

    A common step must have the same weights in both. Without one, as when each keeps different steps, the seed and the
    data in trainer.json are compared: a run cannot be resumed with others.

    Args:
        remote: The remote store.
        store: The checkpoints of the run.
    """
    local, uploaded = store.steps(), remote.steps()
    if not local or not uploaded:
        return
    common = set(local) & set(uploaded)
    own_step, other_step = (max(common), max(common)) if common else (max(local), max(uploaded))
    own = read_manifest(store.path(own_step))
    other = parse_manifest(remote.manifest(other_step), remote.address(other_step, MANIFEST))
    if own is None:
        return
    if common and own.tensors != other.tensors:
        raise _another_run(remote, other_step, store, own_step, "their weights differ")
    if common or TRAINER not in own.files or TRAINER not in other.files:
        return
    path, address = store.path(own_step) / TRAINER, remote.address(other_step, TRAINER)
    own_state, other_state = (
        _described(read_bounded(path, "config_bytes"), str(path)),
        _described(remote.read(other_step, TRAINER), address),
    )
    for name, value in own_state.items():
        if value != other_state[name]:
            raise _another_run(remote, other_step, store, own_step, f"their {name} differs")


def _described(content: bytes, where: str) -> dict[str, Any]:
    state = parse_json(content, where)
    return {name: state.get(name) if isinstance(state, dict) else None for name in ("seed", "data")}


def _another_run(remote: RemoteStore, uploaded: int, store: Store, step: int, why: str) -> ConfigError:
    return ConfigError(
        f"{remote.address(uploaded)} is of another run than {store.path(step)}: {why}. Give another checkpoint.remote, "
        f"or the run_dir of that run."
    )
