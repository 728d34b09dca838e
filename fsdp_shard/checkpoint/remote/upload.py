"""Uploads a committed step with all ranks: each uploads some of the files, and the manifest comes last.

The local step stays: uploads read the run directory, and a run resumes from it first.
"""

from pathlib import Path

from fsdp_shard.checkpoint.io import fault_point
from fsdp_shard.checkpoint.remote.same_run import check_same_run
from fsdp_shard.checkpoint.remote.store import RemoteStore
from fsdp_shard.checkpoint.steps.manifest import MANIFEST, parse_manifest
from fsdp_shard.checkpoint.steps.step_store import StepStore, steps_to_delete
from fsdp_shard.distributed import Communicator, run_on_all, run_on_main
from fsdp_shard.utils import balanced_partition


def upload_step(ranks: Communicator, remote: RemoteStore, step: int, directory: Path) -> None:
    """Upload a committed step; a collective.

    Args:
        ranks: The ranks.
        remote: The store.
        step: The step.
        directory: Its local directory.

    Raises:
        RemoteError: The store fails, on any rank.
        SaveError: The store has another step of this number.
    """
    content = run_on_all(ranks, (directory / MANIFEST).read_bytes)
    manifest = parse_manifest(content, str(directory / MANIFEST))
    sizes = {name: record.size for name, record in manifest.files.items()}
    if not run_on_main(ranks, lambda: remote.begin(step, content)):
        return
    files = balanced_partition(sorted(sizes), ranks.world_size, sizes.__getitem__)[ranks.rank]
    fault_point("uploading")
    run_on_all(ranks, lambda: remote.put(step, directory, files))
    fault_point("uploaded")
    run_on_main(ranks, lambda: remote.commit(step, content, sizes))
    fault_point("remote-committed")


def catch_up(ranks: Communicator, remote: RemoteStore, store: StepStore) -> int | None:
    """Upload the latest step of a run if its upload was interrupted, and mark it if it is the best; a collective.

    Returns:
        The step that was uploaded, if any.

    Raises:
        ConfigError: On all ranks: the remote store has steps of another run.
    """

    def missing_step() -> int | None:
        check_same_run(remote, store)
        local, uploaded = store.latest(), remote.latest()
        return local if local is not None and (uploaded is None or uploaded < local) else None

    step = run_on_main(ranks, missing_step)
    if step is not None:
        upload_step(ranks, remote, step, store.path(step))
        run_on_main(ranks, lambda: remote.set_best(step) if store.best() == step else None)
    return step


def prune_remote(remote: RemoteStore, newest: int, keep_last: int | None, keep_every: int | None) -> list[int]:
    """Delete remains of interrupted uploads, and the steps that retention does not keep; return those steps."""
    remote.clean(newest)
    if keep_last is None:
        return []
    deleted = steps_to_delete(remote.steps(), keep_last, keep_every, {newest, remote.best()})
    for step in deleted:
        remote.delete(step)
    return deleted
