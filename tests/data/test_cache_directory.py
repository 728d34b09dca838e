"""The token cache's directories: here, what is left there by a run that was killed while it wrote one."""

from __future__ import annotations

import os
import time
from pathlib import Path

from fsdp_shard.data.tokenized.cache_directory import cached
from fsdp_shard.data.tokenized.token_file import TokenFile

TWO_DAYS = 2 * 24 * 3600


def write(directory: Path) -> TokenFile:
    (directory / "tokens").write_text("made")
    return TokenFile(str(directory), {"tokens": 4}, 1, 0, 2, "digest", 1)


def never(directory: Path) -> TokenFile:
    raise AssertionError("it is known")


def left(directory: Path, *, file_age: float, age: float = TWO_DAYS) -> Path:
    directory.mkdir(parents=True)
    (directory / "part").write_text("half")
    now = time.time()
    os.utime(directory / "part", (now - file_age, now - file_age))
    os.utime(directory, (now - age, now - age))
    return directory


def test_what_a_killed_run_has_left_goes_with_the_next_one_that_writes(tmp_path: Path) -> None:
    old = left(tmp_path / ".old.partial", file_age=TWO_DAYS)
    in_use = left(tmp_path / ".in-use.partial", file_age=5)
    new = left(tmp_path / ".new.partial", file_age=5, age=5)
    other = left(tmp_path / "of-somebody-else", file_age=TWO_DAYS)
    elsewhere = left(tmp_path / "elsewhere" / "kept", file_age=TWO_DAYS)
    (tmp_path / ".link.partial").symlink_to(elsewhere)
    os.utime(tmp_path / ".link.partial", (0, 0), follow_symlinks=False)
    made = cached(tmp_path / "key", write)
    assert (Path(made.directory) / "tokens").read_text() == "made"
    assert not old.exists()
    assert all(kept.exists() for kept in (in_use, new, other)), "another machine may be writing it"
    assert (elsewhere / "part").exists()
    assert cached(tmp_path / "key", never) == made
