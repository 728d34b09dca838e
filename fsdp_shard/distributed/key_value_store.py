"""torch's key-value store through which the ranks of a run, and the launchers of its machines, find each other."""

import itertools
import os
import time
from datetime import timedelta

from torch.distributed import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous as torch_rendezvous

from fsdp_shard.errors import ConfigError

ATTEMPT = "FSDP_SHARD_ATTEMPT"  # set for its ranks by our launcher
ATTEMPT_KEY = "fsdp-shard/attempt"  # the same, in the store through which the launchers meet
_calls = itertools.count()  # of `join_store` in this process
# The first store of rank 0 at each address, as (MASTER_ADDR, MASTER_PORT). A rank may connect for its next call before
# rank 0 has ended the previous one, and torch serves all stores of an address as one while any of them exists.
_kept: dict[tuple[str, str], Store] = {}


def join_store(rendezvous: str, timeout_seconds: float) -> Store:
    """Connect to the store of the ranks that the environment describes.

    Each attempt has its own prefix, so that it never sees the keys of a dead one. So has each call in a process: the
    store of torchrun outlives a run, and the same ranks may start another one. All ranks make the same calls.

    Args:
        rendezvous: Init method, such as `env://` or `file:///path`.
        timeout_seconds: How long to wait for the store.

    Returns:
        The store of this attempt.

    Raises:
        ConfigError: The environment does not say at which address the ranks meet.
    """
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not os.environ.get(name)]
    if rendezvous == "env://" and missing:
        raise ConfigError(
            f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} not set, so the ranks cannot find each "
            f"other; start them with torchrun, or set both to an address and a free port of the machine of rank 0."
        )
    # A method such as file:// may bring both numbers itself; otherwise torch raises an error without them.
    rank, world_size = (int(os.environ.get(name, -1)) for name in ("RANK", "WORLD_SIZE"))
    timeout = timedelta(seconds=timeout_seconds)
    store, _, _ = next(torch_rendezvous(rendezvous, rank, world_size, timeout=timeout))
    if rendezvous == "env://" and rank == 0:
        _kept.setdefault((os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]), store)
    return PrefixStore(f"fsdp-shard/attempt-{attempt()}/{next(_calls)}", store)


def attempt() -> str:
    """Return which attempt of the run this is, the same on all its ranks: 1, 2, ... under our own launcher.

    torchrun counts restarts on each machine separately, so on several machines its number is unreliable.
    """
    if ATTEMPT in os.environ:
        return os.environ[ATTEMPT]
    one_machine = os.environ.get("LOCAL_WORLD_SIZE") == os.environ.get("WORLD_SIZE")
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") if one_machine else "0"


def is_restarted() -> bool:
    """Return whether the ranks of this run were started before, and failed or changed in number."""
    return int(attempt()) > (1 if ATTEMPT in os.environ else 0)


def leave_store(store: Store, num_members: int, *, serves: bool, seconds: float) -> None:
    """Announce that this member no longer uses `store`; the member that serves it waits for the others.

    A store that is already gone is not an error: nobody is left to wait for.

    Args:
        store: Store that all members use.
        num_members: Number of members.
        serves: Whether this member serves the store.
        seconds: How long the serving member waits at most.
    """
    try:
        wait_for_members(store, "fsdp-shard/left", num_members if serves else 1, seconds)
    except (RuntimeError, ValueError):
        return


def wait_for_members(store: Store, key: str, num_members: int, seconds: float) -> None:
    """Count this member under `key`, and wait until `num_members` have been counted, for at most `seconds`."""
    deadline = time.monotonic() + seconds
    num_arrived = store.add(key, 1)
    while num_arrived < num_members and time.monotonic() < deadline:
        time.sleep(0.02)
        num_arrived = store.add(key, 0)
