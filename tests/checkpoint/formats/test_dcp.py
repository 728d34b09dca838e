"""DCP directories: what torch wrote is read bit for bit, and what we write torch loads."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import DefaultSavePlanner, SavePlan
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from transformers import AutoModelForCausalLM

from fsdp_shard.checkpoint.conversion import convert
from fsdp_shard.checkpoint.integrity.verify import verify
from fsdp_shard.checkpoint.location import open_checkpoint
from fsdp_shard.distributed import DistributedContext
from fsdp_shard.errors import CheckpointError, ConfigError
from tests.checkpoint.files import assert_refused, assert_same, write_huggingface
from tests.checkpoint.formats.damaged_dcp import CASES, edit, quietly, saved
from tests.checkpoint.tensors import distributed, plain
from tests.support.ranks import on_ranks
from tests.support.tiny import llama, save_model


def save_tensors(context: DistributedContext, root: Path, dims: tuple[int, ...]) -> None:
    """Tensors of every dtype and placement, nested as trainers nest them."""
    quietly(lambda: dcp.save({"model": distributed(dims), "step": 7}, checkpoint_id=root))


@pytest.mark.parametrize("dims", [(1,), (2,), (3,), (2, 2)], ids=str)
def test_every_tensor_of_every_mesh(tmp_path: Path, dims: tuple[int, ...]) -> None:
    on_ranks(torch.Size(dims).numel(), save_tensors, tmp_path / "saved", dims)
    with open_checkpoint(tmp_path / "saved") as index:
        assert_same(index, plain())
        assert index.format == "dcp"
    convert(tmp_path / "saved", tmp_path / "one")
    with open_checkpoint(tmp_path / "one") as index:
        assert_same(index, plain())


class _KeepsPlans(DefaultSavePlanner):
    """Keeps the plans of all ranks in the metadata, as Megatron-core does."""

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        plans, metadata = super().create_global_plan(all_plans)
        metadata.all_local_plans = plans  # type: ignore[attr-defined]  # pickled with it
        return plans, metadata


def _save_with_plans(context: DistributedContext, root: Path) -> None:
    state = {"model": distributed((2,)), "step": 7}
    quietly(lambda: dcp.save(state, checkpoint_id=root, planner=_KeepsPlans()))


def test_metadata_with_the_plans_of_ranks_is_read(tmp_path: Path) -> None:
    on_ranks(2, _save_with_plans, tmp_path / "saved")
    assert b"WriteItem" in (tmp_path / "saved" / ".metadata").read_bytes()
    with open_checkpoint(tmp_path / "saved") as index:
        assert_same(index, plain())


class Mlp(nn.Module):
    """Sizes that ranks do not divide; tensor parallelism on two needs an even one in the middle."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.up, self.down = nn.Linear(7, 10), nn.Linear(10, 5, bias=False)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down(self.up(rows).relu()).clone()
        return out


def train_and_save(context: DistributedContext, root: Path, two_dims: bool) -> dict[str, torch.Tensor]:
    """FSDP2, with tensor parallelism underneath or not, one step, model and optimizer in one DCP directory."""
    model = Mlp()
    if two_dims:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        fully_shard(model, mesh=mesh["dp"])
    else:
        fully_shard(model, mesh=init_device_mesh("cpu", (context.world_size,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.ones(2, 7)).sum().backward()
    optimizer.step()
    weights: dict[str, Any] = get_model_state_dict(model)  # DTensors
    state = {"model": weights, "optim": get_optimizer_state_dict(model, optimizer)}
    quietly(lambda: dcp.save({"app": state}, checkpoint_id=root))
    return {name: tensor.full_tensor() for name, tensor in weights.items()}


@pytest.mark.parametrize(("world_size", "two_dims"), [(2, False), (3, False), (4, True)])
def test_a_model_is_told_from_its_optimizer(tmp_path: Path, world_size: int, two_dims: bool) -> None:
    held = on_ranks(world_size, train_and_save, tmp_path, two_dims)
    with open_checkpoint(tmp_path) as index:
        assert_same(index, held[0])
        assert set(index.extras) == {"optimizer"}
        assert index.extras["optimizer"].num_tensors == 9
        assert index.world_size == world_size
    assert "not read: optimizer tensors" in str(verify(tmp_path))


def test_a_state_dict_without_nesting(tmp_path: Path) -> None:
    weights = {"layers.0.weight": torch.randn(3, 2), "norm.bias": torch.randn(3)}
    moments = {f"state.{name}.exp_avg": torch.zeros_like(tensor) for name, tensor in weights.items()}
    quietly(
        lambda: dcp.save(
            {**weights, "optimizer": moments, "train_state": {"step": torch.tensor(3)}}, checkpoint_id=tmp_path
        )
    )
    with open_checkpoint(tmp_path) as index:
        assert_same(index, weights)
        assert {kind: extra.num_tensors for kind, extra in index.extras.items()} == {"optimizer": 2, "other": 1}


@pytest.mark.parametrize(("ranks", "nest"), [(None, None), (3, "model"), (2, "app.model")])
def test_torch_loads_what_we_write(tmp_path: Path, ranks: int | None, nest: str | None) -> None:
    write_huggingface(tmp_path / "source", plain())
    convert(tmp_path / "source", tmp_path / "dcp", format="dcp", ranks=ranks, nest=nest)
    found = {name: torch.empty_like(tensor) for name, tensor in plain().items()}
    state: dict[str, Any] = found
    for key in reversed(nest.split(".") if nest else []):
        state = {key: state}
    quietly(lambda: dcp.load(state, checkpoint_id=tmp_path / "dcp"))
    for name, tensor in plain().items():
        assert torch.equal(
            found[name].view(torch.uint8) if tensor.dim() else found[name],
            tensor.view(torch.uint8) if tensor.dim() else tensor,
        ), name
    report = verify(tmp_path / "dcp")
    assert report.is_sound, report.problems
    assert report.content_checked
    with open_checkpoint(tmp_path / "dcp") as index:
        assert_same(index, plain())
        assert index.world_size == (ranks or 1)


def test_the_nesting_is_that_of_the_keys(tmp_path: Path) -> None:
    """torch's own converter makes nested dictionaries of what `.metadata` says of the keys."""
    weights = Mlp().state_dict()
    write_huggingface(tmp_path / "source", weights)
    convert(tmp_path / "source", tmp_path / "dcp", format="dcp", nest="app.model")
    quietly(lambda: dcp_to_torch_save(tmp_path / "dcp", tmp_path / "file.pt"))
    found = torch.load(tmp_path / "file.pt", weights_only=True)
    assert found.keys() == {"app"}
    assert found["app"].keys() == {"model"}
    assert all(torch.equal(found["app"]["model"][name], tensor) for name, tensor in weights.items())


def load_on_ranks(context: DistributedContext, root: Path) -> dict[str, torch.Tensor]:
    model = Mlp()
    fully_shard(model, mesh=init_device_mesh("cpu", (context.world_size,)))
    state: dict[str, Any] = get_model_state_dict(model)  # DTensors
    for tensor in state.values():
        tensor.to_local().zero_()
    quietly(lambda: dcp.load(state, checkpoint_id=root))
    return {name: tensor.full_tensor() for name, tensor in state.items()}


def test_ranks_load_their_parts_of_what_we_write(tmp_path: Path) -> None:
    weights = Mlp().state_dict()
    write_huggingface(tmp_path / "source", weights)
    convert(tmp_path / "source", tmp_path / "dcp", format="dcp", ranks=3)
    for found in on_ranks(2, load_on_ranks, tmp_path / "dcp"):
        assert all(torch.equal(found[name], tensor) for name, tensor in weights.items())


def test_tied_weights_are_written_once_and_listed_twice(tmp_path: Path) -> None:
    save_model(tmp_path / "source")
    convert(tmp_path / "source", tmp_path / "dcp", format="dcp")
    state = {name: torch.zeros_like(tensor) for name, tensor in llama().state_dict().items()}
    assert "lm_head.weight" in state
    quietly(lambda: dcp.load(state, checkpoint_id=tmp_path / "dcp"))
    assert all(torch.equal(state[name], tensor) for name, tensor in llama().state_dict().items())
    with open_checkpoint(tmp_path / "dcp") as index:
        assert index.aliases == {"lm_head.weight": "model.embed_tokens.weight"}
    convert(tmp_path / "dcp", tmp_path / "back")
    assert (tmp_path / "back" / "model.safetensors").stat().st_size < (
        tmp_path / "source" / "model.safetensors"
    ).stat().st_size + 2000
    AutoModelForCausalLM.from_pretrained(tmp_path / "back")


def test_a_tied_head_that_torch_wrote_twice_is_written_once(tmp_path: Path) -> None:
    save_model(tmp_path / "saved")
    (tmp_path / "saved" / "model.safetensors").unlink()
    state = {name: tensor.clone() for name, tensor in llama().state_dict().items()}
    quietly(lambda: dcp.save({"model": state}, checkpoint_id=tmp_path / "saved"))
    with open_checkpoint(tmp_path / "saved") as index:
        assert "lm_head.weight" in index.names
    convert(tmp_path / "saved", tmp_path / "one")
    with open_checkpoint(tmp_path / "one") as index:
        assert index.aliases == {"lm_head.weight": "model.embed_tokens.weight"}
        assert "lm_head.weight" not in index.names
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "one")
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())


def test_nothing_of_torch_is_imported(tmp_path: Path) -> None:
    quietly(lambda: dcp.save({"a": torch.ones(3, 2)}, checkpoint_id=tmp_path / "dcp"))
    code = (
        "import sys; from fsdp_shard.checkpoint import convert\n"
        f"convert({str(tmp_path / 'dcp')!r}, {str(tmp_path / 'one')!r}, format='sharded', ranks=2)\n"
        f"convert({str(tmp_path / 'one')!r}, {str(tmp_path / 'two')!r}, format='dcp')\n"
        "assert not {'torch', 'numpy', 'transformers'} & set(sys.modules)"
    )
    assert os.spawnv(os.P_WAIT, sys.executable, [sys.executable, "-c", code]) == 0


def test_settings_of_other_formats_are_refused(tmp_path: Path) -> None:
    write_huggingface(tmp_path / "source", {"a": torch.ones(2)})
    with pytest.raises(ConfigError, match="nest='model' needs format=dcp"):
        convert(tmp_path / "source", tmp_path / "x", nest="model")
    for nest in ("", "app.", ".model", "app..model"):
        with pytest.raises(ConfigError, match="needs format=dcp and keys"):
            convert(tmp_path / "source", tmp_path / "x", format="dcp", nest=nest)
    with pytest.raises(ConfigError, match="max_shard_size is for format=huggingface"):
        convert(tmp_path / "source", tmp_path / "x", format="dcp", max_shard_size="1MB")


@pytest.mark.timeout(30)
@pytest.mark.parametrize("name", CASES)
def test_damage_is_refused(tmp_path: Path, name: str) -> None:
    damage, message = CASES[name]
    root = saved(tmp_path / "dcp")
    open_checkpoint(root).close()
    damage(root)
    assert_refused(root, message)
    assert not (tmp_path / "canary").exists()


def keyed(name: str, *keys: str) -> Callable[[Path], None]:
    """Planner data that has the tensor `name` under other keys, or none."""

    def apply(metadata: Metadata) -> None:
        assert isinstance(metadata.planner_data, dict)
        assert ".".join(map(str, metadata.planner_data.pop(name))) == name
        if keys:
            metadata.planner_data[name] = keys

    return edit(apply)


_STATE = "optimizer.state.a.weight.exp_avg"
_LIES = {
    "a weight called state": keyed("model.a.weight", "optimizer", "state", "a.weight", "exp_avg_sq"),
    "state called a weight": keyed(_STATE, "model", "c.weight"),
    "state by its name in the model": keyed(_STATE, "model", "a.weight"),
    "a weight without keys": keyed("model.a.weight"),
}


@pytest.mark.parametrize("name", _LIES)
def test_weights_are_not_told_from_states_by_keys_that_lie(name: str, tmp_path: Path) -> None:
    weights = {"a.weight": torch.ones(3, 3), "b.weight": torch.ones(3)}
    state = {"model": weights, "optimizer": {"state": {"a.weight": {"exp_avg": torch.zeros(3, 3)}}}}
    quietly(lambda: dcp.save(state, checkpoint_id=tmp_path))
    with open_checkpoint(tmp_path) as index:
        assert_same(index, weights)
        assert index.extras["optimizer"].num_tensors == 1
    _LIES[name](tmp_path)
    assert_refused(tmp_path, "but its planner data has it under the keys")


def test_an_optimizer_alone_is_no_model(tmp_path: Path) -> None:
    state = {"optimizer": {"state": {"a": {"exp_avg": torch.ones(2)}}}}
    quietly(lambda: dcp.save(state, checkpoint_id=tmp_path))
    with pytest.raises(CheckpointError, match="1 optimizer tensor, and no weights"):
        open_checkpoint(tmp_path)
