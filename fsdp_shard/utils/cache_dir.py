"""Where what can be made again is kept for this user's later commands. Knows nothing of what is kept."""

from __future__ import annotations

import os
from pathlib import Path


def user_cache(name: str) -> Path:
    """The place for `name`: below XDG_CACHE_HOME, else below ~/.cache. It need not be there."""
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "fsdp-shard" / name
