"""Per-rank safetensors by torch's and transformers' own writers: read bit for bit, and refused where files lack."""

from __future__ import annotations

import json
import shutil
import struct
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import HuggingFaceStorageWriter
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from transformers import AutoModelForCausalLM

from fsdp_shard.checkpoint.conversion import convert
from fsdp_shard.checkpoint.formats.dcp.dcp_safetensors import INFO_KEY, parse_name
from fsdp_shard.checkpoint.location import open_checkpoint
from fsdp_shard.distributed import DistributedContext
from fsdp_shard.errors import CheckpointError
from tests.checkpoint.files import assert_refused, assert_same, edit_header
from tests.checkpoint.tensors import distributed, plain, tensors
from tests.support.ranks import on_ranks
from tests.support.tiny import llama, save_model


def save(context: DistributedContext, root: Path, dims: tuple[int, ...], **settings: Any) -> None:
    """`tensors` through torch's writer, on a mesh of `dims`: a 2-D one cuts along its last dim, or along both."""
    state = distributed(dims)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state, storage_writer=HuggingFaceStorageWriter(str(root), save_distributed=True, **settings))


@pytest.mark.parametrize("dims", [(1,), (2,), (3,), (2, 2)], ids=str)
def test_every_tensor_of_every_mesh(tmp_path: Path, dims: tuple[int, ...]) -> None:
    world_size = torch.Size(dims).numel()
    on_ranks(world_size, save, tmp_path / "saved", dims)
    with open_checkpoint(tmp_path / "saved") as index:
        assert_same(index, plain())
        assert (index.format, index.world_size) == ("torch_huggingface", world_size)
    convert(tmp_path / "saved", tmp_path / "one")
    with open_checkpoint(tmp_path / "one") as index:
        assert_same(index, plain())


def test_parts_by_a_mapping(tmp_path: Path) -> None:
    mapping = {name: number % 3 + 1 for number, name in enumerate(tensors())}
    on_ranks(2, partial(save, fqn_to_index_mapping=mapping), tmp_path, (2,))
    assert {parsed.part for file in tmp_path.iterdir() if (parsed := parse_name(file.name))} == {1, 2, 3}
    with open_checkpoint(tmp_path) as index:
        assert_same(index, plain())
    for file in tmp_path.glob("*-model-00002-*"):
        file.unlink()
    with pytest.raises(CheckpointError, match="no file of part 2 of 3"):
        open_checkpoint(tmp_path)


def save_floats(context: DistributedContext, root: Path, mapping: dict[str, int] | None, **settings: Any) -> None:
    mesh = init_device_mesh("cpu", (context.world_size,))
    state = {
        "a": distribute_tensor(torch.arange(15.0).reshape(5, 3), mesh, [Shard(0)]),
        "b": distribute_tensor(torch.arange(12.0).reshape(3, 4), mesh, [Shard(1)]),
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state, storage_writer=HuggingFaceStorageWriter(str(root), mapping, **settings))


FLOATS = {"a": torch.arange(15.0).reshape(5, 3), "b": torch.arange(12.0).reshape(3, 4)}


@pytest.mark.parametrize("mapping", [None, {"a": 1, "b": 2}])
def test_what_torch_consolidates_is_a_plain_directory(tmp_path: Path, mapping: dict[str, int] | None) -> None:
    on_ranks(2, partial(save_floats, save_distributed=True, enable_consolidation=True), tmp_path, mapping)
    for path, name in ((tmp_path, "huggingface"), (tmp_path / "sharded", "torch_huggingface")):
        with open_checkpoint(path) as index:
            assert_same(index, FLOATS)
            assert index.format == name


def test_whole_tensors_of_one_process(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        writer = HuggingFaceStorageWriter(str(tmp_path), {name: n % 2 + 1 for n, name in enumerate(plain())})
        dcp.save(plain(), storage_writer=writer, no_dist=True)
    with open_checkpoint(tmp_path) as index:
        assert_same(index, plain())
        assert index.format == "huggingface"


def test_ranks_that_wrote_over_each_other_are_refused(tmp_path: Path) -> None:
    """Without save_distributed=True every rank writes the same file, and torch says nothing."""
    on_ranks(2, save_floats, tmp_path / "saved", None)
    with pytest.raises(CheckpointError, match=r"the ranks wrote over each other's files|appended|cut short"):
        open_checkpoint(tmp_path / "saved")  # who is last, and with how many bytes, is chance
    # The same with the file of the first rank, which begins where a whole tensor does.
    on_ranks(2, partial(save_floats, save_distributed=True), tmp_path / "ranks", None)
    shutil.copy(
        tmp_path / "ranks" / "shard-00001-model-00001-of-00001.safetensors",
        tmp_path / "saved" / "model-00001-of-00001.safetensors",
    )
    with pytest.raises(CheckpointError, match=r"the ranks wrote over each other's files"):
        open_checkpoint(tmp_path / "saved")


def save_transformers(context: DistributedContext, source: Path, root: Path, sizes: dict[str, Any]) -> None:
    from transformers.distributed import DistributedConfig
    from transformers.utils import logging

    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(source, distributed_config=DistributedConfig(**sizes))
    model.save_pretrained(root, distributed_checkpoint=True)


@pytest.mark.parametrize(
    ("sizes", "tied"),
    [
        ({"fsdp_size": 2}, True),
        ({"tp_size": 2}, False),
        ({"fsdp_size": 2, "tp_size": 2}, False),
        ({"fsdp_size": 2, "dp_replicate_size": 2}, False),
    ],
    ids=str,
)
def test_what_transformers_saves(tmp_path: Path, sizes: dict[str, int], tied: bool) -> None:
    source = save_model(tmp_path / "source", tied=tied)
    on_ranks(2 ** len(sizes), save_transformers, source, tmp_path / "saved", sizes)
    with open_checkpoint(tmp_path / "saved") as index:
        assert_same(index, llama(tied=tied).state_dict())
        assert index.format == "torch_huggingface"
    convert(tmp_path / "saved", tmp_path / "one")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "one").state_dict()
    assert all(torch.equal(loaded[name], value) for name, value in llama(tied=tied).state_dict().items())


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three ranks of two tensors: `a` cut in rows (2, 2, 1), `b` in columns (2, 2, 0)."""
    root = tmp_path_factory.mktemp("sound")
    on_ranks(3, partial(save_floats, save_distributed=True), root, None)
    return root


def shard(rank: int, parts: int = 1) -> str:
    return f"shard-{rank:05d}-model-00001-of-{parts:05d}.safetensors"


def info(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    def apply(document: dict[str, Any]) -> None:
        offsets = json.loads(document["__metadata__"][INFO_KEY])
        replaced = change(offsets)
        text = json.dumps(offsets) if not isinstance(replaced, str) else replaced
        document["__metadata__"][INFO_KEY] = text

    return lambda path: edit_header(path / shard(2), apply)


CASES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "a rank in the middle is missing": (lambda p: (p / shard(2)).unlink(), r"shard-00002-.* is missing"),
    "the first rank is missing": (lambda p: (p / shard(1)).unlink(), r"shard-00001-.* is missing"),
    "a rank stands there twice": (lambda p: shutil.copy(p / shard(1), p / shard(4)), "pieces at .* overlap"),
    "a rank of another number of parts": (lambda p: (p / shard(2)).rename(p / shard(2, 2)), "mixes rank files"),
    "rank 0": (lambda p: shutil.copy(p / shard(1), p / shard(0)), "counts ranks and parts from 1"),
    "part beyond the last": (
        lambda p: (p / shard(3)).rename(p / shard(3).replace("model-00001", "model-00002")),
        "counts ranks and parts from 1",
    ),
    "no offsets": (
        lambda p: edit_header(p / shard(2), lambda d: d["__metadata__"].pop(INFO_KEY) and None),
        "has no DCP_SHARDING_INFO",
    ),
    "offsets are no JSON": (info(lambda o: "{"), "not valid JSON"),
    "offsets are a list": (info(lambda o: "[]"), "not a map from tensor names"),
    "an offset is negative": (info(lambda o: o["a"].update(saved_offsets=[-2, 0])), "not a map from tensor names"),
    "an offset is a float": (info(lambda o: o["a"].update(saved_offsets=[2.0, 0])), "not a map from tensor names"),
    "an offset too few": (info(lambda o: o["a"].update(saved_offsets=[2])), "2 dimensions, but 1 offsets"),
    "offsets of a tensor that is not there": (info(lambda o: o.update(z={"saved_offsets": [0]})), "only in one of"),
    "a tensor without offsets": (info(lambda o: o.pop("a") and None), "only in one of"),
    "overlapping pieces": (info(lambda o: o["a"].update(saved_offsets=[1, 0])), "overlap"),
    "a gap": (info(lambda o: o["b"].update(saved_offsets=[0, 9])), "its pieces hold"),
    "an offset far away": (info(lambda o: o["a"].update(saved_offsets=[10**15, 0])), "its pieces hold"),
    "another dtype": (
        lambda p: edit_header(p / shard(2), lambda d: d["a"].update(dtype="I32")),
        "shard-00002-.* tensor a is I32, but F32 in shard-00001-",
    ),
    "another number of dimensions": (
        lambda p: (
            edit_header(p / shard(2), lambda d: d["a"].update(shape=[6])),
            info(lambda o: o["a"].update(saved_offsets=[6]))(p),
        ),
        "pieces of 1 and 2 dimensions",
    ),
    "truncated": (
        lambda p: (p / shard(2)).write_bytes((p / shard(2)).read_bytes()[:-4]),
        "is truncated",
    ),
    "a link that leaves": (
        lambda p: (
            (p / shard(2)).rename(p.parent / "outside"),
            (p / shard(2)).symlink_to(p.parent / "outside"),
        ),
        "outside the directory",
    ),
    "a pickled entry": (
        lambda p: (p / shard(2)).write_bytes(b"PK\x03\x04" + (p / shard(2)).read_bytes()),
        "begins with a pickled entry",
    ),
    "empty files": (
        lambda p: [edit_file(p / shard(rank)) for rank in (1, 2, 3)],
        "no tensors in them",
    ),
}


def edit_file(path: Path) -> None:
    text = json.dumps({"__metadata__": {INFO_KEY: "{}"}}).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text)


@pytest.mark.parametrize("name", CASES)
def test_is_refused(tmp_path: Path, sound: Path, name: str) -> None:
    damage, message = CASES[name]
    root = tmp_path / "saved"
    shutil.copytree(sound, root)
    damage(root)
    assert_refused(root, message)


def test_one_rank_alone_is_refused(sound: Path) -> None:
    with pytest.raises(CheckpointError, match="one rank's part of the weights only; give its directory"):
        open_checkpoint(sound / shard(1))


def test_a_lost_last_rank_shows_in_the_vocabulary_only(tmp_path: Path) -> None:
    """The writer notes no number of ranks and no full shape: without config.json nothing tells of the lost file."""
    source = save_model(tmp_path / "source", tied=False)
    on_ranks(2, save_transformers, source, tmp_path / "saved", {"fsdp_size": 2})
    (tmp_path / "saved" / shard(2)).unlink()
    with pytest.raises(CheckpointError, match=r"has 129 rows, but config.json says vocab_size 257: the files of"):
        open_checkpoint(tmp_path / "saved")
    (tmp_path / "saved" / "config.json").unlink()
    with open_checkpoint(tmp_path / "saved") as index:
        assert index.shapes["lm_head.weight"] == (129, 36)


def save_a_number(context: DistributedContext, root: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        writer = HuggingFaceStorageWriter(str(root), save_distributed=True)
        dcp.save({"a": torch.ones(2), "step": 3}, storage_writer=writer)


def test_a_state_dict_with_a_number_makes_a_file_that_is_refused(tmp_path: Path) -> None:
    on_ranks(1, save_a_number, tmp_path)
    with pytest.raises(CheckpointError, match="begins with a pickled entry"):
        open_checkpoint(tmp_path)
