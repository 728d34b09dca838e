"""DeepSpeed's less usual saves: parameters that are not trained, other master weights, and those that are refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fsdp_shard.checkpoint.conversion import convert
from fsdp_shard.checkpoint.location import open_checkpoint
from tests.checkpoint.files import assert_refused, assert_same
from tests.support.deepspeed_layout import STEP, optimizer_file, save_universal, save_zero

MODEL = "mp_rank_00_model_states.pt"
FROZEN = ("embed.weight", "a.weight")


def weights() -> dict[str, torch.Tensor]:
    """Sizes that two ranks do not divide."""
    torch.manual_seed(0)
    shapes = {"embed.weight": (7, 5), "a.weight": (9, 5), "a.bias": (9,), "b.weight": (3, 9), "scale": (1,)}
    return {name: torch.randn(shape) for name, shape in shapes.items()}


def halves(names: tuple[str, ...] = FROZEN) -> dict[str, torch.Tensor]:
    """The weights, of which those of these names are in bfloat16."""
    return {name: tensor.bfloat16() if name in names else tensor for name, tensor in weights().items()}


def changed(file: Path, change: Callable[[dict[str, Any]], object]) -> None:
    state = torch.load(file)
    change(state)
    torch.save(state, file)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_parameters_that_are_not_trained_are_read(stage: int, tmp_path: Path) -> None:
    save_zero(tmp_path / "run", weights(), stage, frozen=FROZEN)
    with open_checkpoint(tmp_path / "run") as index:
        assert (index.format, index.metadata["stage"]) == ("deepspeed", stage)
        assert_same(index, halves())
    convert(tmp_path / "run", tmp_path / "out")
    with open_checkpoint(tmp_path / "out") as index:
        assert_same(index, halves())


@pytest.mark.parametrize("frozen", [(), FROZEN], ids=["trained", "frozen"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_tied_parameters_are_read_once(stage: int, frozen: tuple[str, ...], tmp_path: Path) -> None:
    save_zero(tmp_path / "run", weights(), stage, frozen=frozen, ties={"head.weight": "embed.weight"})
    with open_checkpoint(tmp_path / "run") as index:
        assert_same(index, halves(frozen))
        assert index.aliases == {"head.weight": "embed.weight"}


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_master_weights_may_be_bfloat16(stage: int, tmp_path: Path) -> None:
    save_zero(tmp_path / "run", weights(), stage, masters=torch.bfloat16)
    with open_checkpoint(tmp_path / "run") as index:
        assert_same(index, halves(tuple(weights())))


def test_master_weights_of_two_dtypes_are_of_different_saves(tmp_path: Path) -> None:
    inner = save_zero(tmp_path / "run", weights(), 1)
    other = save_zero(tmp_path / "other", weights(), 1, masters=torch.bfloat16)
    (other / optimizer_file(1)).rename(inner / optimizer_file(1))
    assert_refused(inner, "groups of BF16, but .* groups of F32 in .*: these are files of different saves")


def test_the_optimizer_that_accumulates_in_float32_records_no_stage(tmp_path: Path) -> None:
    """BF16_Optimizer.state_dict has neither `zero_stage` nor `param_alignment_paddings`."""
    inner = save_zero(tmp_path / "run", weights(), 1, frozen=FROZEN)
    keys = ("zero_stage", "dynamic_loss_scale", "overflow", "param_alignment_paddings")
    for rank in range(2):
        changed(inner / optimizer_file(rank), lambda s: [s["optimizer_state_dict"].pop(key) for key in keys])
    with open_checkpoint(tmp_path / "run") as index:
        assert_same(index, halves())


@pytest.mark.parametrize("ranks", [1, 2])
def test_placeholders_are_not_weights(ranks: int, tmp_path: Path) -> None:
    """Model states of stage 3 whose optimizer files are gone, and one of them given as a file."""
    inner = save_zero(tmp_path / "run", weights(), 3, ranks=ranks)
    file = f"zero_pp_rank_{ranks - 1}_{MODEL}"
    gone = rf"zero_pp_rank_{ranks - 1}_mp_rank_00_optim_states\.pt"
    assert_refused(inner / file, rf"embed.weight has the shape \[0\] instead of \[7, 5\]. The weights are in .*{gone}")
    for rank in range(ranks):
        (inner / optimizer_file(rank)).unlink()
    assert_refused(inner, r"no \*zero_pp_rank_0_.*optim_states\.pt, from which|optimizer files, \*zero_pp_rank_0_")
    assert_refused(tmp_path / "run", "no .*optim_states.pt, from which" if ranks > 1 else f"{STEP} in it is; give")


@pytest.mark.parametrize("stage", [1, 3])
def test_universal_checkpoints_are_refused(stage: int, tmp_path: Path) -> None:
    universal = save_universal(save_zero(tmp_path / "run", weights(), stage), weights())
    for path in (universal, universal.parent):
        assert_refused(path, "_universal is a universal checkpoint of DeepSpeed .* give the directory of the save")
    torch.save(weights(), universal.parent / "pytorch_model.bin")
    with open_checkpoint(universal.parent) as index:  # what zero_to_fp32 writes there
        assert_same(index, weights())


def test_parallelism_within_a_model_is_named(tmp_path: Path) -> None:
    inner = save_zero(tmp_path / "run", weights(), 1)
    changed(inner / MODEL, lambda s: s.update(module=None))
    assert_refused(inner, "of a PipelineModule")
    name = optimizer_file(0)
    (inner / name).rename(inner / name.replace("mp_rank_00", "mp_rank_01"))
    assert_refused(inner, r"tensor or pipeline parallelism, .*; save the whole model from the program")


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_expert_parallelism_is_named(stage: int, tmp_path: Path) -> None:
    """Experts over fewer ranks: a group of its own, in stage 3 with `ds_zero_partition_groups` (of 0.19)."""
    inner = save_zero(tmp_path / "run", weights(), stage)
    groups = [{"sub_group": number, "partition_count": count} for number, count in enumerate((2, 1))]
    divided = {"partition_count": [2, 1]} if stage <= 2 else {"ds_zero_partition_groups": groups}
    for rank in range(2):
        changed(inner / optimizer_file(rank), lambda s: s["optimizer_state_dict"].update(divided))
    assert_refused(inner, "expert parallelism .*over 2 ranks, others over 1")


def test_models_without_their_experts_are_refused(tmp_path: Path) -> None:
    """DeepSpeed takes experts out of `module`; only a whole save of ZeRO has them elsewhere, too."""
    inner = save_zero(tmp_path / "run", weights(), 1)
    experts = {"experts.0.weight": weights()["a.weight"]}
    torch.save(experts, inner / f"layer_0_expert_0_{MODEL}")
    changed(inner / MODEL, lambda s: (s["module"].pop("a.weight"), s.update(num_experts=[1])))
    with open_checkpoint(inner) as index:
        assert_same(index, weights())
    assert_refused(inner / MODEL, "holds a model without its experts")
    for rank in range(2):
        (inner / optimizer_file(rank)).unlink()
    for path in (inner, tmp_path / "run"):
        assert_refused(path, "experts in files of their own are not supported")


def test_a_file_with_names_like_those_of_deepspeed_is_read(tmp_path: Path) -> None:
    torch.save({"module": {"a.weight": torch.ones(2)}, "num_experts": 8, "epoch": 3}, tmp_path / "last.pt")
    with open_checkpoint(tmp_path / "last.pt") as index:
        assert list(index.names) == ["a.weight"]
