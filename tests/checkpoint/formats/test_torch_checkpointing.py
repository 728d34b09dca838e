"""What torch_checkpointing writes is read bit for bit: files that it wrote once, and new ones where it is installed."""

from __future__ import annotations

import importlib.util
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fsdp_shard.checkpoint.conversion import convert
from fsdp_shard.checkpoint.integrity.verify import verify
from fsdp_shard.checkpoint.location import open_checkpoint
from tests.checkpoint.files import assert_refused, assert_same
from tests.support import torch_checkpointing_writer as writer
from tests.support.torch_checkpointing_writer import weights
from tests.support.torchrun import start_script

State = dict[str, Any]

SAVED = Path(__file__).parent / "by_torch_checkpointing"


def check(root: Path, world_size: int, work: Path) -> None:
    """What is in the checkpoint is what its writer had, also after a conversion."""
    with open_checkpoint(root) as index:
        assert (index.format, index.world_size) == ("torch_checkpointing", world_size)
        assert_same(index, weights())
        assert {kind: extra.num_tensors for kind, extra in index.extras.items()} == {"optimizer": 2 * world_size}
    report = verify(root)
    assert report.is_sound, report.problems
    convert(root, work / "one")
    with open_checkpoint(work / "one") as index:
        assert_same(index, weights())


@pytest.mark.parametrize(("name", "world_size"), [("default", 2), ("described", 2), ("one-rank", 1)])
def test_files_that_it_wrote_are_read(tmp_path: Path, name: str, world_size: int) -> None:
    check(SAVED / name, world_size, tmp_path)


@pytest.mark.skipif(importlib.util.find_spec("torch_checkpointing") is None, reason="it is not installed")
@pytest.mark.parametrize(("kind", "world_size"), [("default", 1), ("default", 3), ("described", 2)])
def test_files_that_it_writes_now_are_read(tmp_path: Path, kind: str, world_size: int) -> None:
    script = Path(writer.__file__)
    process = start_script(script, tmp_path / "saved", kind, cwd=tmp_path, ranks=world_size)
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output
    check(tmp_path / "saved", world_size, tmp_path)


def metadata(change: Callable[[State], object]) -> Callable[[Path], None]:
    def apply(root: Path) -> None:
        document = pickle.loads((root / "metadata.pkl").read_bytes())
        change(document)
        (root / "metadata.pkl").write_bytes(pickle.dumps(document))

    return apply


def model(change: Callable[[State], object]) -> Callable[[Path], None]:
    """The item `model` in the metadata, changed."""
    return metadata(lambda document: change(document["metadata"]["model"]))


def tensors(change: Callable[[State], object]) -> Callable[[Path], None]:
    """What it says of the tensors of that item by their paths, changed."""
    return model(lambda item: change(item["nested_path_to_metadata"]))


def tensor(change: Callable[[State], object]) -> Callable[[Path], None]:
    """How it says that `up.weight` is sharded, changed."""
    return tensors(lambda found: change(found['["up.weight"]'][0]["sharding_metadata"]))


def swap(one: str, two: str) -> Callable[[Path], None]:
    def apply(root: Path) -> None:
        (root / one).rename(root / "x")
        (root / two).rename(root / one)
        (root / "x").rename(root / two)

    return apply


PART = "weights/part-{}.safetensors"
DAMAGES: dict[str, tuple[str, Callable[[Path], object], str]] = {
    "the last rank": ("default", lambda p: (p / "model_1.pt").unlink(), "sharded with rank 1, which 1 files cannot be"),
    "the first rank": ("default", lambda p: (p / "model_0.pt").unlink(), "file of item model of rank 0 is missing"),
    "ranks swapped": ("default", swap("model_0.pt", "model_1.pt"), "renamed or mixed up"),
    "a rank too many": ("default", lambda p: shutil.copy(p / "model_1.pt", p / "model_2.pt"), "written by rank 2"),
    "another world": (
        "default",
        lambda p: shutil.copy(SAVED / "one-rank" / "model_0.pt", p / "model_0.pt"),
        "these are files of different saves",
    ),
    "a described file": ("described", lambda p: (p / PART.format(1)).unlink(), "part-1.safetensors is missing"),
    "described files swapped": (
        "described",
        swap(PART.format(0), PART.format(1)),
        r"has a part of shape \[2, 2\], but rank 0 of its mesh \[2\] should hold \[2, 3\]",
    ),
    "another version": ("described", metadata(lambda m: m.update(version="3.0")), "version 3.0; version 2.0 is read"),
    "a sharding of another kind": ("described", tensor(lambda t: t.update(type="default_tensor_v1")), "than a DTensor"),
    "another dtype": ("described", tensor(lambda t: t["data"].update(dtype="torch.int32")), "is F32, but I32 in"),
    "another shape": ("described", tensor(lambda t: t["data"].update(global_shape=[9, 3])), "should hold"),
    "a placement more": (
        "described",
        tensor(lambda t: t["data"]["placements"].append({"type": "Replicate"})),
        "2 placements on a mesh of 1",
    ),
    "a partial placement": (
        "described",
        tensor(lambda t: t["data"].update(placements=[{"type": "Partial"}])),
        "Partial as a placement",
    ),
    "ranks twice": (
        "described",
        tensor(lambda t: t["data"]["mesh_spec"].update(mesh_data=(0, 0))),
        r"a mesh of shape \[2\] with the ranks \[0, 0\]",
    ),
    "a tensor that is not described": (
        "described",
        tensors(lambda found: found.pop('["up.bias"]')),
        "holds tensor up.bias, which metadata.pkl does not have for rank 0",
    ),
    "a tensor that is not there": (
        "described",
        model(
            lambda item: item["nested_path_to_metadata"].update({'["x"]': item["nested_path_to_metadata"]['["scale"]']})
        ),
        "holds 4 tensors, but metadata.pkl says 5 of item model",
    ),
    "a path that is no list": ("described", tensors(lambda found: found.update(x=[])), "JSON"),
    "a file outside": (
        "described",
        model(lambda item: item["rank_to_layout_info"][0].update(file_path="../x.safetensors")),
        "would lie outside the directory",
    ),
    "one file of two ranks": (
        "described",
        model(lambda item: item["rank_to_layout_info"].update({1: item["rank_to_layout_info"][0]})),
        "one file for several ranks of item model",
    ),
    "an unknown serialization": (
        "described",
        model(lambda item: item["rank_to_layout_info"][0]["serialization_format"].update(type="Other")),
        "holds tensors as Other, which is not read",
    ),
    "described of another save": (
        "default",
        lambda p: shutil.copy(SAVED / "described" / "metadata.pkl", p / "metadata.pkl"),
        "part-0.safetensors is missing",
    ),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_what_does_not_belong_together_is_refused(tmp_path: Path, name: str) -> None:
    source, damage, message = DAMAGES[name]
    shutil.copytree(SAVED / source, tmp_path / "saved")
    damage(tmp_path / "saved")
    assert_refused(tmp_path / "saved", message)


def test_what_the_metadata_says_of_torch_files_is_compared(tmp_path: Path) -> None:
    """They describe themselves, and a loader with resharding believes the metadata."""
    shutil.copytree(SAVED / "default", tmp_path / "saved")
    document = pickle.loads((SAVED / "described" / "metadata.pkl").read_bytes())
    document["metadata"]["model"]["rank_to_layout_info"] = {0: None, 1: None}
    (tmp_path / "saved" / "metadata.pkl").write_bytes(pickle.dumps(document))
    check(tmp_path / "saved", 2, tmp_path)
    tensor(lambda t: t["data"].update(placements=[{"type": "Shard", "dim": 1}]))(tmp_path / "saved")
    assert_refused(tmp_path / "saved", r"\['2'\], \['shard\(0\)'\], but .*\['shard\(1\)'\] in metadata.pkl")


class Runs:
    def __reduce__(self) -> Any:
        return os.mkdir, ("it-ran",)


def test_a_pickle_that_would_run_something_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(SAVED / "described", tmp_path / "saved")
    metadata(lambda document: document.update(version=Runs()))(tmp_path / "saved")
    assert_refused(tmp_path / "saved", "mkdir")
    assert not Path("it-ran").exists()


def test_states_that_cannot_be_read_do_not_prevent_reading_the_weights(tmp_path: Path) -> None:
    """Classes of one's own, as torch.save pickles them, and a file that is gone; in item `model` they are errors."""
    shutil.copytree(SAVED / "default", tmp_path / "saved")
    torch.save({"state": Runs}, tmp_path / "saved" / "step_0.pt")
    (tmp_path / "saved" / "optimizer_1.pt").unlink()
    with open_checkpoint(tmp_path / "saved") as index:
        assert_same(index, weights())
        assert index.extras["other"].num_tensors == 0
    torch.save({"state": Runs}, tmp_path / "saved" / "model_0.pt")
    assert_refused(tmp_path / "saved", "Runs")


def test_copies_on_all_ranks_must_be_the_same(tmp_path: Path) -> None:
    """What DDP has: whole tensors. Files of epochs, which look the same, are no such copies."""
    for rank in range(2):
        torch.save(weights(), tmp_path / f"model_{rank}.pt")
    with open_checkpoint(tmp_path) as index:
        assert_same(index, weights())
        assert len(index.replicas) == len(weights())
    torch.save({**weights(), "scale": torch.zeros(1)}, tmp_path / "model_1.pt")
    assert_refused(tmp_path, "hold different values of tensor scale")


def test_other_files_with_such_names_stay_what_they_are(tmp_path: Path) -> None:
    """torchtune's shards; a single file; a `metadata.pkl` of some other program beside a model."""
    first, *rest = ({name: value} for name, value in weights().items())
    for number, part in enumerate((first, *rest), start=1):
        (tmp_path / "tune").mkdir(exist_ok=True)
        torch.save(part, tmp_path / "tune" / f"hf_model_{number:04}_0.pt")
    (tmp_path / "single").mkdir()
    torch.save(weights(), tmp_path / "single" / "model_0.pt")
    (tmp_path / "other").mkdir()
    torch.save(weights(), tmp_path / "other" / "model.pt")
    (tmp_path / "other" / "metadata.pkl").write_bytes(pickle.dumps({"labels": [1, 2]}))
    for name in ("tune", "single", "other"):
        with open_checkpoint(tmp_path / name) as index:
            assert index.format == "pytorch"
            assert_same(index, weights())
