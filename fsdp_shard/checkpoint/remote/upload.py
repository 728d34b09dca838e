"""Uploading a committed step, all ranks together: who puts which files is planned, the manifest comes last.

The step stays where it is; the run directory is what an upload starts from, and what a run goes on from first.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from fsdp_shard.checkpoint.io.fault_points import fault_point
from fsdp_shard.checkpoint.remote.store import RemoteStore
from fsdp_shard.checkpoint.steps.manifest import MANIFEST, parse_manifest
from fsdp_shard.checkpoint.steps.step_store import Store, retired

if TYPE_CHECKING:
    from fsdp_shard.distributed import DistributedContext


def plan_uploads(sizes: Mapping[str, int], num_ranks: int) -> list[list[str]]:
    """The files that each rank puts, largest first, so that all put about as much; the same on every rank."""
    found: list[list[str]] = [[] for _ in range(num_ranks)]
    totals = [0] * num_ranks
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        rank = totals.index(min(totals))
        found[rank].append(name)
        totals[rank] += sizes[name]
    return found


def upload_step(context: DistributedContext, remote: RemoteStore, step: int, directory: Path) -> None:
    """Put the committed step in `directory` on the remote store; a collective.

    Raises on all ranks: RemoteError when the store fails, SaveError when it has another step of this number.
    """
    content = context.together((directory / MANIFEST).read_bytes)
    manifest = parse_manifest(content, str(directory / MANIFEST))
    sizes = {name: record.size for name, record in manifest.files.items()}
    if not context.decide(lambda: remote.begin(step, content)):
        return
    fault_point("uploading")
    context.together(lambda: remote.put(step, directory, plan_uploads(sizes, context.world_size)[context.rank]))
    fault_point("uploaded")
    context.together(lambda: remote.commit(step, content, sizes) if context.is_main else None)
    fault_point("remote-committed")


def catch_up(context: DistributedContext, remote: RemoteStore, store: Store) -> int | None:
    """Upload the latest step of a run where that was kept from happening, as the best one if it is; returns it.

    A collective.
    """

    def behind() -> int | None:
        local, there = store.latest(), remote.latest()
        return local if local is not None and (there is None or there < local) else None

    step: int | None = context.decide(behind)
    if step is not None:
        upload_step(context, remote, step, store.path(step))
        context.together(lambda: remote.set_best(step) if context.is_main and store.best() == step else None)
    return step


def prune_remote(remote: RemoteStore, newest: int, keep_last: int | None, keep_every: int | None) -> list[int]:
    """Delete what interrupted uploads left, and the steps that `checkpoint.keep_*` no longer keep; returns those."""
    remote.clean(newest)
    if keep_last is None:
        return []
    doomed = retired(remote.steps(), keep_last, keep_every, {newest, remote.best()})
    for step in doomed:
        remote.delete(step)
    return doomed
