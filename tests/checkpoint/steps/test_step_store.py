from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest

from fsdp_shard.checkpoint.formats.trainer_layouts import latest_step_directory
from fsdp_shard.checkpoint.io import atomicity
from fsdp_shard.checkpoint.steps.manifest import FileRecord, Manifest, TensorRecord, read_manifest
from fsdp_shard.checkpoint.steps.step_store import StepStore
from fsdp_shard.errors import CheckpointError, SaveError, StorageError

MANIFEST = Manifest(
    layout="sharded",
    step=5,
    world_size=2,
    mesh={"shard": 2},
    files={"shard-00000-of-00002.safetensors": FileRecord(10, None, "ab"), "config.json": FileRecord(2, "cd")},
    tensors={"w": TensorRecord("F32", (2, 3), "00", ("11", "22"))},
    aliases={"head": "w"},
)


def save(store: StepStore, step: int, content: str = "x") -> Path:
    temporary = store.begin(step)
    (temporary / "data").write_text(content)
    return store.commit(temporary, step, Manifest("gathered", step, files={"data": FileRecord(len(content))}))


def test_a_step_is_there_only_once_committed(tmp_path: Path) -> None:
    store = StepStore(tmp_path / "checkpoints")
    assert store.steps() == []
    assert store.latest() is None
    temporary = store.begin(3)
    (temporary / "half").write_text("")
    assert store.steps() == []
    assert list(store.begin(3).iterdir()) == [], "a second attempt begins afresh"
    assert save(store, 3).name == "step-00000003"
    save(store, 20)
    (store.root / "step-00000030").mkdir()  # no manifest: not ours, or damaged
    assert store.steps() == [3, 20]


def test_a_committed_step_is_never_written_over(tmp_path: Path) -> None:
    store = StepStore(tmp_path)
    path = save(store, 3, "old")
    with pytest.raises(SaveError, match="step-00000003 exists already"):
        save(store, 3, "new")
    assert (path / "data").read_text() == "old"


def test_pointers_and_what_they_mean(tmp_path: Path) -> None:
    store = StepStore(tmp_path)
    for step in (1, 2, 3):
        save(store, step)
    assert store.latest() == 3
    assert store.best() is None
    store.set_latest(2)
    store.set_best(1)
    assert (store.latest(), store.best()) == (3, 1), "a crash before the pointer was set hides no step"
    assert (tmp_path / "latest").read_text() == "step-00000002\n"
    (tmp_path / "best").write_bytes(b"\xff nonsense")
    assert store.best() is None


def test_prune_keeps_the_last_each_nth_and_what_pointers_name(tmp_path: Path) -> None:
    store = StepStore(tmp_path)
    for step in range(1, 8):
        save(store, step)
    store.set_latest(7)
    store.set_best(2)
    assert store.prune(2, keep_every=4) == [1, 3, 5]
    assert store.steps() == [2, 4, 6, 7]
    assert store.prune(1) == [4, 6]


def test_leftovers_of_crashes_are_cleaned(tmp_path: Path) -> None:
    store = StepStore(tmp_path)
    save(store, 1, "old")
    store.begin(2)
    (tmp_path / ".step-00000009.deleted").mkdir()
    (tmp_path / "step-00000001").rename(tmp_path / ".step-00000001.replaced")  # died between two renames
    store.clean_leftovers()
    assert store.steps() == [1]
    assert not [entry for entry in tmp_path.iterdir() if entry.name.startswith(".")]


def test_links_with_the_names_of_leftovers_are_kept(tmp_path: Path) -> None:
    store = StepStore(tmp_path / "checkpoints")
    save(store, 1)
    (elsewhere := tmp_path / "elsewhere").mkdir()
    (elsewhere / "mine").touch()
    for end in ("partial", "deleted", "replaced"):
        (store.root / f".step-00000002.{end}").symlink_to(elsewhere)
    store.clean_leftovers()
    assert (elsewhere / "mine").exists()
    assert store.steps() == [1]


@pytest.mark.parametrize("can_exchange", [True, False])
def test_directories_are_replaced_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, can_exchange: bool) -> None:
    if not can_exchange:
        monkeypatch.setattr(atomicity, "_exchange", lambda one, other: False)
    new, target = tmp_path / "new", tmp_path / "target"
    for path in (new, target):
        path.mkdir()
        (path / path.name).write_text("")
    atomicity.move_directory(new, target, replace=True)
    assert [entry.name for entry in target.iterdir()] == ["new"]
    assert [entry.name for entry in tmp_path.iterdir()] == ["target"]


def test_what_is_left_of_a_replaced_directory_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """NFS has no exchange of names and keeps the files of a deleted directory that are still open."""
    monkeypatch.setattr(atomicity, "_exchange", lambda one, other: False)
    target, rmdir = tmp_path / "target", os.rmdir

    def busy(path: Path, **options: Any) -> None:
        if path.name == ".target.replaced":
            raise OSError(errno.ENOTEMPTY, "Directory not empty", str(path))
        rmdir(path, **options)

    def write(number: int) -> None:
        atomicity.recover(target)
        with atomicity.new_directory(target, 0, replace=True) as new:
            (new / f"file-{number}").write_text("")

    with monkeypatch.context() as patch:
        patch.setattr(os, "rmdir", busy)
        write(0)
        write(1)
    assert [entry.name for entry in target.iterdir()] == ["file-1"], "it is there, and no error says otherwise"
    with pytest.raises(SaveError, match=r"\.target\.replaced is left of an earlier replacement; delete it"):
        write(2)
    assert [entry.name for entry in target.iterdir()] == ["file-1"]
    (tmp_path / ".target.replaced").rmdir()
    write(2)
    assert os.listdir(tmp_path) == ["target"]


def test_a_step_that_does_not_fit_is_not_begun(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="free, but step 1 takes"):
        StepStore(tmp_path).begin(1, 1 << 60)
    assert not list(tmp_path.iterdir())


def test_steps_that_lack_something_do_not_count(tmp_path: Path) -> None:
    store = StepStore(tmp_path)
    for step in range(1, 5):
        save(store, step)
    (store.path(4) / "data").unlink()
    store.set_latest(3)
    assert store.prune(1) == [1, 2]
    assert store.steps() == [3, 4], "the last sound one stays, and what is left of the damaged one"


def test_commit_to_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("a file")
    with pytest.raises(SaveError, match="nothing was saved"):
        StepStore(tmp_path / "checkpoints").begin(1)


def test_resolve_leads_to_the_weights(tmp_path: Path) -> None:
    store = StepStore(tmp_path / "checkpoints")
    step = save(store, 4)
    for path in (tmp_path, store.root, step):
        assert latest_step_directory(path) == step
    other = tmp_path / "other"
    other.mkdir()
    assert latest_step_directory(other) == other
    (other / "checkpoints").mkdir()
    with pytest.raises(CheckpointError, match="no finished checkpoint"):
        latest_step_directory(other)


def test_manifest_comes_back_as_written(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text(MANIFEST.to_json())
    assert read_manifest(tmp_path) == MANIFEST
    (tmp_path / "manifest.json").write_text('{"name": "a web app"}')
    assert read_manifest(tmp_path) is None


CHANGES: list[tuple[str, Any, str]] = [
    ("format_version", 99, "format version 99"),
    ("layout", "round", "layout must be"),
    ("step", -1, "step must be"),
    ("step", True, "step must be"),
    ("world_size", 0, "world_size must be"),
    ("mesh", {"shard": "2"}, r"mesh\['shard'\]"),
    ("files", [], "files must be"),
    ("files", {"a": {"size": 1}}, r"files\['a'\] must be a map with"),
    ("files", {"a": {"size": 1, "digest": 3, "header_digest": None}}, "digest or null"),
    ("tensors", {"w": {"dtype": "F33", "shape": [], "digest": "", "chunks": []}}, "known dtype"),
    ("tensors", {"w": {"dtype": "F32", "shape": [-1], "digest": "", "chunks": []}}, "list of counts"),
    ("tensors", {"w": {"dtype": "F32", "shape": [1], "digest": "", "chunks": [1]}}, "list of digests"),
    ("aliases", {"head": "nowhere"}, "names of its tensors"),
    ("surprise", 1, "surprise"),
]


@pytest.mark.parametrize(("key", "value", "message"), CHANGES)
def test_a_manifest_that_is_wrong_says_where(tmp_path: Path, key: str, value: Any, message: str) -> None:
    document = {**json.loads(MANIFEST.to_json()), key: value}
    (tmp_path / "manifest.json").write_text(json.dumps(document))
    with pytest.raises(CheckpointError, match=message) as caught:
        read_manifest(tmp_path)
    assert str(tmp_path / "manifest.json") in str(caught.value)
