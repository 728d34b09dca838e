from __future__ import annotations

import json

import pytest
import torch
from hypothesis import given, strategies as st

from fsdp_shard.checkpoint.io.safetensors_format import TensorSpec
from fsdp_shard.checkpoint.steps import file_plan

SPECS = [TensorSpec("a", "F32", (10, 4)), TensorSpec("b", "BF16", (7,)), TensorSpec("c", "F32", (3, 4))]


def test_one_file_needs_no_index() -> None:
    plans, index = file_plan.plan_gathered(SPECS, None)
    assert [plan.name for plan in plans] == ["model.safetensors"]
    assert index is None
    (plan,) = plans
    assert len(plan.header) % 8 == 0
    assert plan.num_bytes == len(plan.header) + 160 + 14 + 48
    # Wide types first, so that each tensor is aligned to its element.
    assert plan.tensors == {"a": len(plan.header), "c": len(plan.header) + 160, "b": len(plan.header) + 208}


def test_files_stay_within_their_size_where_tensors_allow() -> None:
    specs = [TensorSpec(f"layer.{number}", "F32", (100,)) for number in range(10)]
    plans, index = file_plan.plan_gathered(specs, 2000)
    assert index is not None
    assert all(plan.num_bytes <= 2000 for plan in plans)
    assert plans[0].name == f"model-00001-of-{len(plans):05d}.safetensors"
    document = json.loads(index)
    assert document["metadata"] == {"total_size": 4000}
    assert document["weight_map"] == {name: plan.name for plan in plans for name in plan.tensors}
    alone, _ = file_plan.plan_gathered(specs, 1)
    assert [list(plan.tensors) for plan in alone] == [[spec.name] for spec in specs]


def test_aliases_are_noted_in_the_file_that_holds_the_kept_tensor() -> None:
    plans, _ = file_plan.plan_gathered(SPECS, 200, {"head": "c"})
    noted = [b'"head":"c"' in plan.header for plan in plans]
    assert noted == [list(plan.tensors) == ["c"] for plan in plans]


def test_rank_files_keep_rows_where_ranges_are_rows() -> None:
    assert file_plan.stored_shape((10, 4), 8, 12) == (3, 4)
    assert file_plan.stored_shape((10, 4), 7, 12) == (12,)
    assert file_plan.stored_shape((), 0, 1) == ()
    assert file_plan.stored_shape((0, 4), 0, 0) == (0, 4)
    plan = file_plan.plan_sharded([(SPECS[0], 0, 0), (SPECS[2], 4, 8)], 1, 2, step=None, save_id="", aliases={})
    assert plan.name == "shard-00001-of-00002.safetensors"
    assert list(plan.tensors) == ["c"], "an empty range is not stored"


@given(rows=st.integers(0, 20), row=st.integers(0, 3), ranks=st.integers(1, 9))
def test_rows_are_dealt_as_torch_chunk_does(rows: int, row: int, ranks: int) -> None:
    spec = TensorSpec("w", "F32", (rows, row))
    found = file_plan.chunk_rows(spec, ranks)
    assert len(found) == ranks
    chunks = [chunk.numel() for chunk in torch.zeros(rows, row).chunk(ranks)]
    if rows:
        assert [count for _, count in found] == chunks + [0] * (ranks - len(chunks))
    assert sum(count for _, count in found) == rows * row


def test_scalars_go_to_rank_0() -> None:
    assert file_plan.chunk_rows(TensorSpec("s", "F32", ()), 3) == [(0, 1), (1, 0), (1, 0)]


@pytest.mark.parametrize("name", ["shard-1-of-00002.safetensors", "shard-00001-of-00002.bin", "model.safetensors"])
def test_other_names_are_no_rank_files(name: str) -> None:
    assert file_plan.parse_shard_name(name) is None
    assert file_plan.parse_shard_name(file_plan.shard_name(3, 12)) == (3, 12)
