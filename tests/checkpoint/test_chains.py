"""Property: whatever is in a checkpoint, whoever wrote it, three conversions later it is the same, bit for bit."""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from huggingface_hub import save_torch_state_dict
from hypothesis import HealthCheck, given, settings, strategies as st
from safetensors.torch import save_file

from fsdp_shard.checkpoint.config import ConvertSettings
from fsdp_shard.checkpoint.conversion import convert
from fsdp_shard.checkpoint.io import safetensors_format
from fsdp_shard.checkpoint.location import open_checkpoint
from tests.checkpoint.files import assert_same, random_tensor, write_ranks
from tests.support.digests import tensor_digests
from tests.support.sampled import sampled

Tensors = dict[str, torch.Tensor]
Writer = Callable[[Path, Tensors, Mapping[str, str], Any], Path]

NUM_CHECKPOINTS = 1000  # of all writers together
_MEMORY = Path("/dev/shm")  # so that the disk is not what takes the time
DTYPES = [safetensors_format.to_torch(name) for name in safetensors_format._DTYPES]
FORMATS = next(field.metadata["choices"] for field in fields(ConvertSettings) if field.name == "format")


def one_file(root: Path, tensors: Tensors, aliases: Mapping[str, str], data: Any) -> Path:
    save_file(tensors, root / "model.safetensors", metadata={"format": "pt", **aliases})
    return root


def indexed(root: Path, tensors: Tensors, aliases: Mapping[str, str], data: Any) -> Path:
    size = data.draw(st.integers(1, 4000), label="bytes of a file")
    save_torch_state_dict(tensors, root, max_shard_size=size, metadata=dict(aliases))
    return root


def ranks(root: Path, tensors: Tensors, aliases: Mapping[str, str], data: Any) -> Path:
    world_size = data.draw(st.integers(1, 5), label="ranks")
    edges = {}
    for name, tensor in tensors.items():
        cuts = st.lists(st.integers(0, tensor.numel()), min_size=world_size - 1, max_size=world_size - 1)
        edges[name] = [0, *sorted(data.draw(cuts, label=f"cuts of {name}")), tensor.numel()]
    return write_ranks(root, tensors, edges, aliases=aliases)


def torch_file(root: Path, tensors: Tensors, aliases: Mapping[str, str], data: Any) -> Path:
    torch.save(tensors, root / "pytorch_model.bin")
    return root


def torch_dcp(root: Path, tensors: Tensors, aliases: Mapping[str, str], data: Any) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(tensors, checkpoint_id=root, no_dist=True)
    return root


WRITERS: list[Writer] = [one_file, indexed, ranks, torch_file, torch_dcp]
# Of these a reader is told of tied names; the others' ties are tensors twice over.
TYING = (one_file, ranks)


@st.composite
def trees(draw: st.DrawFn) -> Tensors:
    """Up to five tensors of any dtype: scalars, empty ones, sizes that nothing divides; names as modules have them."""
    found: Tensors = {}
    for number in range(draw(st.integers(1, 5))):
        shape = draw(st.lists(st.integers(0, 9), max_size=3))
        name = draw(st.sampled_from(["layers.{}.weight", "w{}", "größe.{}", "a b.{}.c"])).format(number)
        found[name] = random_tensor(shape, draw(st.sampled_from(DTYPES)), seed=draw(st.integers(0, 99)))
    return found


def settings_of(name: str, data: st.DataObject) -> dict[str, Any]:
    """Random settings of a target format."""
    if name == "huggingface":
        return {"max_shard_size": data.draw(st.integers(1, 3000), label="max_shard_size")}
    return {"ranks": data.draw(st.integers(1, 5), label="ranks")}


def content(path: Path) -> tuple[dict[str, str], dict[str, str]]:
    """({name: digest}, {tied name: kept name})."""
    with open_checkpoint(path) as index:
        return tensor_digests(index), index.aliases


@pytest.mark.long
@pytest.mark.parametrize("writer", sampled(WRITERS, 3, lambda writer: writer.__name__))
@settings(max_examples=NUM_CHECKPOINTS // len(WRITERS), deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_three_conversions_keep_every_bit(writer: Writer, data: st.DataObject) -> None:
    tensors = data.draw(trees(), label="tensors")
    kept = data.draw(st.sampled_from([None, *tensors]), label="tied to") if writer in TYING else None
    aliases = {"head": kept} if kept else {}
    with tempfile.TemporaryDirectory(dir=_MEMORY if _MEMORY.is_dir() else None) as directory:
        here = Path(directory) / "0"
        here.mkdir()
        writer(here, tensors, aliases, data)
        before = content(here)
        assert before[1] == aliases
        for number in range(1, 4):
            target = Path(directory) / str(number)
            name = data.draw(st.sampled_from(FORMATS), label="format")
            verify = data.draw(st.booleans(), label="verify")
            convert(here, target, format=name, verify=verify, **settings_of(name, data))
            here = target
        with open_checkpoint(here) as index:
            assert_same(index, tensors)
        assert content(here) == before
