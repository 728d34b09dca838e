"""The named points of the save protocol, at which tests kill, freeze or fail a rank.

A save passes `POINTS` in this order, some of them only on rank 0. In production, `FAULTS.hook` is None and
`fault_point` does nothing. A test sets the hook in the process that forks the ranks. It is called with the name of the
point in the saving thread: the main thread with `checkpoint.asynchronous=false`, else a separate one. The rank is in
the environment (RANK). An OSError raised by the hook simulates a failing disk.
"""

from collections.abc import Callable

POINTS = (
    "staged",  # the state is in host memory (asynchronous only)
    "begun",  # rank 0: the temporary directory exists
    "created",  # this rank's files have their headers and sizes
    "weights-written",  # this rank's weights are in the files, not yet synced
    "optimizer-written",  # and its optimizer state, and the small files
    "synced",  # all files that this rank wrote are on the disk
    "hashed",  # the chunks that several ranks wrote are read back and hashed
    "manifest-written",  # rank 0: the manifest is written and on the disk
    "directory-synced",  # rank 0: all names in the temporary directory are on the disk
    "renamed",  # rank 0: the step has its name
    "committed",  # rank 0: and its name is on the disk
    "pointed",  # rank 0: `latest` points to it
    "verified",  # read back (checkpoint.verify=true only)
    "hidden",  # rank 0: what retention deletes is renamed
    "deleted",  # rank 0: and is gone
    "slimmed",  # rank 0: an older step's manifest lists no optimizer state any more (checkpoint.keep_optimizer_last)
)
# With `checkpoint.remote`, after a step is committed and verified.
REMOTE_POINTS = (
    "uploading",  # what an earlier upload left of the step is gone
    "uploaded",  # this rank's files are on the remote store
    "remote-committed",  # rank 0: and the manifest
    "remote-hidden",  # rank 0: the manifest of what retention deletes is gone
    "remote-deleted",  # rank 0: and the rest
)


class FaultInjection:
    """Set by tests; `hook` is called with the name of each fault point that this process passes."""

    hook: Callable[[str], None] | None = None


FAULTS = FaultInjection()


def fault_point(point: str) -> None:
    """Mark that this rank's save passes `point`."""
    assert point in POINTS or point in REMOTE_POINTS, point
    if FAULTS.hook is not None:
        FAULTS.hook(point)
