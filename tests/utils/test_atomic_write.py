"""Files and directories are replaced completely or not at all, and nothing temporary stays behind."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from fsdp_shard.utils import atomic_directory, write_atomically


def test_a_file_is_replaced(tmp_path: Path) -> None:
    write_atomically(tmp_path / "a", "old")
    write_atomically(tmp_path / "a", "new", sync=True)
    assert (tmp_path / "a").read_text() == "new"
    assert os.listdir(tmp_path) == ["a"]


def test_a_disk_that_fails_leaves_the_old_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_atomically(tmp_path / "a", "old")

    def fail(*arguments: object) -> None:
        raise OSError(5, "Input/output error")

    for name in ("replace", "fsync"):
        with monkeypatch.context() as patch:
            patch.setattr(os, name, fail)
            with pytest.raises(OSError, match="Input/output error"):
                write_atomically(tmp_path / "a", "new", sync=True)
        assert (tmp_path / "a").read_text() == "old"
        assert os.listdir(tmp_path) == ["a"]


def test_text_that_cannot_be_encoded_leaves_the_old_content(tmp_path: Path) -> None:
    write_atomically(tmp_path / "a", "old")
    with pytest.raises(UnicodeEncodeError):
        write_atomically(tmp_path / "a", "\ud800")
    assert (tmp_path / "a").read_text() == "old"
    assert os.listdir(tmp_path) == ["a"]


def test_a_directory_appears_complete_or_not_at_all(tmp_path: Path) -> None:
    target = tmp_path / "made" / "target"

    def fail() -> None:
        with atomic_directory(target) as temporary:
            (temporary / "file").write_text("half")
            raise ValueError("stop")

    with pytest.raises(ValueError, match="stop"):
        fail()
    assert os.listdir(target.parent) == []
    with atomic_directory(target) as temporary:
        (temporary / "file").write_text("done")
        assert not target.exists()
    assert (target / "file").read_text() == "done"


def test_of_two_directories_the_first_one_stays(tmp_path: Path) -> None:
    target = tmp_path / "target"
    with atomic_directory(target) as temporary:
        (temporary / "file").write_text("second")
        target.mkdir()
        (target / "file").write_text("first")
    assert (target / "file").read_text() == "first"
    assert os.listdir(tmp_path) == ["target"]
