"""Whether the steps of a remote store are those of the run in a run directory: else one would delete the other's."""

from typing import Any

from fsdp_shard.checkpoint.remote.store import RemoteStore
from fsdp_shard.checkpoint.steps import MANIFEST, TRAINER, Store, parse_manifest, read_manifest
from fsdp_shard.errors import ConfigError
from fsdp_shard.utils import parse_json, read_bounded

_MOST_BYTES = 1 << 20  # of a trainer.json


def check_same_run(remote: RemoteStore, store: Store) -> None:
    """Raise ConfigError if both have steps, which are of different runs.

    A step that both have has the same weights in both. Without such a step, as where each keeps other ones, what
    trainer.json says of them is compared: the seed and the data, with which a run cannot be resumed otherwise.

    Args:
        remote: The remote store.
        store: The checkpoints of the run.
    """
    local, uploaded = store.steps(), remote.steps()
    if not local or not uploaded:
        return
    if common := set(local) & set(uploaded):
        step = max(common)
        other, own = (
            parse_manifest(remote.manifest(step), remote.address(step, MANIFEST)),
            read_manifest(store.path(step)),
        )
        if own is not None and own.tensors != other.tensors:
            raise _another_run(remote, step, store, step, "their weights differ")
        return
    one, other_one = max(local), max(uploaded)
    has = (
        read_manifest(store.path(one)),
        parse_manifest(remote.manifest(other_one), remote.address(other_one, MANIFEST)),
    )
    if any(manifest is None or TRAINER not in manifest.files for manifest in has):
        return
    if has[1] is not None and has[1].files[TRAINER].size > _MOST_BYTES:
        return
    path = store.path(one) / TRAINER
    own_state = _described(read_bounded(path, "config_bytes"), str(path))
    for name, value in _described(remote.read(other_one, TRAINER), remote.address(other_one, TRAINER)).items():
        if value != own_state[name]:
            raise _another_run(remote, other_one, store, one, f"their {name} differs")


def _described(content: bytes, where: str) -> dict[str, Any]:
    state = parse_json(content, where)
    return {name: state.get(name) if isinstance(state, dict) else None for name in ("seed", "data")}


def _another_run(remote: RemoteStore, uploaded: int, store: Store, step: int, why: str) -> ConfigError:
    return ConfigError(
        f"{remote.address(uploaded)} is of another run than {store.path(step)}: {why}. Give another checkpoint.remote, "
        f"or the run_dir of that run."
    )
