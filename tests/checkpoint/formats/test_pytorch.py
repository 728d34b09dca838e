"""State dicts of torch.save, as accelerate, Lightning and recipes of torch nest and split them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator

from fsdp_shard.checkpoint.conversion import convert
from fsdp_shard.checkpoint.location import open_checkpoint
from fsdp_shard.checkpoint.tensor_entry import Extra
from fsdp_shard.distributed import DistributedContext
from fsdp_shard.errors import CheckpointError
from tests.checkpoint.files import assert_same, random_tensor, write_huggingface
from tests.support.ranks import on_ranks
from tests.support.tiny import llama

TENSORS = {"embed.weight": random_tensor((7, 3), torch.bfloat16), "norm.weight": random_tensor((3,), torch.float32)}


def weights() -> dict[str, torch.Tensor]:
    return {name: tensor.detach() for name, tensor in llama().state_dict().items()}


def _save_by_accelerate(context: DistributedContext, path: Path, max_shard_size: str) -> None:
    Accelerator(cpu=True).save_model(llama(), path, max_shard_size=max_shard_size, safe_serialization=False)


@pytest.mark.parametrize("max_shard_size", ["10GB", "40KB"])
def test_what_accelerate_writes(tmp_path: Path, max_shard_size: str) -> None:
    # In a process of its own: accelerate keeps a state, which ranks that are forked later would take for theirs.
    on_ranks(1, _save_by_accelerate, tmp_path, max_shard_size)
    assert (tmp_path / "pytorch_model.bin.index.json").exists() == (max_shard_size == "40KB")
    with open_checkpoint(tmp_path) as index:
        assert index.format == "pytorch"
        stored = {name: tensor for name, tensor in weights().items() if name not in index.aliases}
        assert_same(index, {name: tensor for name, tensor in stored.items() if name in index.names})
        assert set(stored) - set(index.names) <= {"lm_head.weight"}  # accelerate leaves tied weights out of shards


def test_tied_weights_are_kept_once(tmp_path: Path) -> None:
    model = llama()
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    with open_checkpoint(tmp_path) as index:
        assert index.aliases == {"lm_head.weight": "model.embed_tokens.weight"}
        expected = {name: tensor for name, tensor in weights().items() if name != "lm_head.weight"}
        assert_same(index, expected)
    converted = convert(tmp_path, tmp_path / "out")
    assert converted.num_tensors == len(expected)
    with open_checkpoint(tmp_path / "out") as index:
        assert_same(index, expected)


@pytest.mark.parametrize("name", ["pytorch_model_fsdp.bin", "model.pt", "last.ckpt", "consolidated.00.pth"])
@pytest.mark.parametrize("is_zip", [True, False])
def test_a_single_file_of_any_name(tmp_path: Path, name: str, is_zip: bool) -> None:
    torch.save(TENSORS, tmp_path / name, _use_new_zipfile_serialization=is_zip)
    torch.save({"state": {}}, tmp_path / "optimizer.bin")
    torch.save({"last_epoch": 1}, tmp_path / "scheduler.bin")
    for path in (tmp_path, tmp_path / name):
        with open_checkpoint(path) as index:
            assert_same(index, TENSORS)


def nested() -> dict[str, Any]:
    optimizer = {"state": {0: {"exp_avg": torch.zeros(7, 3), "step": torch.tensor(1.0)}}, "param_groups": [{"lr": 0.1}]}
    return {
        "torch": {"model": TENSORS, "optimizer": optimizer, "epoch": 3, "rng_state": torch.get_rng_state()},
        "lightning": {"state_dict": TENSORS, "optimizer_states": [optimizer], "pytorch-lightning_version": "2.5"},
        "wrapped": {f"module._orig_mod.{name}": tensor for name, tensor in TENSORS.items()},
    }


@pytest.mark.parametrize("kind", list(nested()))
def test_nested_states(tmp_path: Path, kind: str) -> None:
    torch.save(nested()[kind], tmp_path / "x.pt")
    with open_checkpoint(tmp_path / "x.pt") as index:
        assert_same(index, TENSORS)
        if kind != "wrapped":
            assert index.extras["optimizer"].num_tensors == 2
            assert index.extras["optimizer"].num_bytes == 7 * 3 * 4 + 4


@pytest.mark.parametrize("protocol", [2, 5])
def test_arrays_of_numpy_are_counted(tmp_path: Path, protocol: int) -> None:
    """They are no tensors, and are not converted."""
    state = {"model": TENSORS, "rng_state": torch.get_rng_state(), "ema": {"decay": np.float64(0.9)}}
    torch.save(
        state | {"mean": np.ones(3), "more": [np.ones((2, 5), np.float32), {"texts": np.array(["a", None])}]},
        tmp_path / "x.pt",
        pickle_protocol=protocol,
    )
    with open_checkpoint(tmp_path / "x.pt") as index:
        assert_same(index, TENSORS)
        assert index.extras == {"other": Extra(4, torch.get_rng_state().numel() + 3 * 8 + 2 * 5 * 4)}
    assert convert(tmp_path / "x.pt", tmp_path / "target").left_out == {"other": 4}


def test_shards_of_torchtune_without_an_index(tmp_path: Path) -> None:
    for number, (name, tensor) in enumerate(TENSORS.items(), start=1):
        torch.save({name: tensor}, tmp_path / f"hf_model_{number:04d}_0.pt")
    torch.save({"seed": 1}, tmp_path / "recipe_state.pt")
    torch.save({"a.lora_A.weight": torch.zeros(2)}, tmp_path / "adapter_0.pt")
    with open_checkpoint(tmp_path) as index:
        assert_same(index, TENSORS)


@pytest.mark.parametrize("missing", [1, 2])
def test_a_shard_of_torchtune_that_is_missing(tmp_path: Path, missing: int) -> None:
    for number in {1, 2, 3} - {missing}:
        torch.save({f"{number}.weight": torch.zeros(2)}, tmp_path / f"hf_model_{number:04d}_0.pt")
    with pytest.raises(CheckpointError, match="numbered with gaps: shards of a model are missing"):
        open_checkpoint(tmp_path)


def test_safetensors_come_first(tmp_path: Path) -> None:
    write_huggingface(tmp_path, {"a": torch.ones(2)})
    torch.save(TENSORS, tmp_path / "pytorch_model.bin")
    with open_checkpoint(tmp_path) as index:
        assert index.format == "huggingface"


def test_views_of_one_storage_are_read_as_what_they_are(tmp_path: Path) -> None:
    fused = random_tensor((6, 4), torch.float32)
    tensors = {"q": fused[:2], "k": fused[2:4], "v": fused[4:], "t": fused.t(), "again": fused[2:4]}
    torch.save(tensors, tmp_path / "x.pt")
    with open_checkpoint(tmp_path / "x.pt") as index:
        assert index.aliases == {"again": "k"}
        assert_same(index, {name: tensor for name, tensor in tensors.items() if name != "again"})
    convert(tmp_path / "x.pt", tmp_path / "out")
    with open_checkpoint(tmp_path / "out") as index:
        assert torch.equal(index.read("t").view(torch.int32), fused.t().contiguous().view(torch.int32))


def test_one_rank_alone_is_refused(tmp_path: Path) -> None:
    torch.save({"optimizer": {"state": {0: {"exp_avg": torch.zeros(2)}}}}, tmp_path / "x.pt")
    with pytest.raises(CheckpointError, match="1 optimizer tensor, and no weights"):
        open_checkpoint(tmp_path / "x.pt")


def test_an_index_beside_shards(tmp_path: Path) -> None:
    names = {}
    for number, (name, tensor) in enumerate(TENSORS.items(), start=1):
        names[name] = f"pytorch_model-{number:05d}-of-00002.bin"
        torch.save({name: tensor}, tmp_path / names[name])
    with open_checkpoint(tmp_path) as index:  # all shards are there, so it is clear what they are
        assert_same(index, TENSORS)
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": names}))
    with open_checkpoint(tmp_path) as index:
        assert_same(index, TENSORS)
    with pytest.raises(CheckpointError, match="is one of 2 files of a model; give their directory"):
        convert(tmp_path / names["norm.weight"], tmp_path / "part")
    (tmp_path / "pytorch_model.bin.index.json").unlink()
    (tmp_path / names["norm.weight"]).unlink()
    with pytest.raises(CheckpointError, match="1 of the 2 shards"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    "state", [{"a.b": torch.zeros(1), "a": {"b": torch.ones(1)}}, {0: torch.zeros(1), "0": torch.ones(1)}]
)
def test_two_tensors_under_one_name_are_refused(tmp_path: Path, state: Any) -> None:
    torch.save(state, tmp_path / "x.pt")
    with pytest.raises(CheckpointError, match="two tensors under the name"):
        open_checkpoint(tmp_path)


def test_a_file_of_torch_needs_no_suffix(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2)}, tmp_path / "weights")
    with open_checkpoint(tmp_path / "weights") as index:
        assert index.names == ["w"]
        assert index.path == tmp_path / "weights"


def test_an_optimizer_is_no_model(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    torch.save(optimizer.state_dict(), tmp_path / "x.pt")
    with pytest.raises(CheckpointError, match="6 optimizer tensors, and no weights"):
        open_checkpoint(tmp_path / "x.pt")
