"""DeepSpeed: states that lie about stage, partitions, shapes and buffers, files of other ranks and saves."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from typing import Any

import torch

from tests.faults.corpus import edits
from tests.faults.corpus.bases import damaged
from tests.faults.corpus.case import Case
from tests.faults.corpus.edits import Damage

_STEP = "global_step1"
_MODEL = f"{_STEP}/mp_rank_00_model_states.pt"


def _zero(rank: int) -> str:
    return f"{_STEP}/bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"


def _model(**values: Any) -> Damage:
    return edits.unpickled(_MODEL, lambda state: state.update(values))


def _shapes(change: Callable[[dict[Any, Any]], object]) -> Damage:
    return edits.unpickled(_MODEL, lambda state: change(state["param_shapes"][0]) and None)


def _optimizer(rank: int = 1, **values: Any) -> Damage:
    return edits.unpickled(_zero(rank), lambda state: state["optimizer_state_dict"].update(values))


def _renamed(old: str, new: str) -> Damage:
    return lambda root: (root / old).rename(root / new)


def _first(shapes: dict[str, Any]) -> str:
    return next(iter(shapes))


_REFUSED: dict[str, Damage] = {
    "latest: up and out": edits.content("latest", "../secret"),
    "latest: absolute": edits.content("latest", "/etc"),
    "latest: nothing": edits.content("latest", "global_step9"),
    "latest: binary": edits.content("latest", b"\xff\x00\xfe"),
    "latest: empty": edits.content("latest", b""),
    "latest: long": edits.content("latest", "a" * 100_000),
    "latest: a FIFO": edits.fifo("latest"),
    "a rank gone": edits.gone(_zero(1)),
    "the first rank gone": edits.gone(_zero(0)),
    "a rank too many": lambda root: shutil.copy(root / _zero(1), root / _zero(2)),
    "ranks swapped": lambda root: (
        (root / _zero(0)).rename(root / "x"),
        (root / _zero(1)).rename(root / _zero(0)),
        (root / "x").rename(root / _zero(1)),
        _optimizer(0, single_partition_of_fp32_groups=[torch.zeros(5)])(root),
    ),
    "a rank of 20 digits": _renamed(_zero(1), _zero(10**20)),
    "a rank of 5,000 digits": _renamed(_zero(1), f"{_STEP}/zero_pp_rank_{'1' * 200}_mp_rank_00_optim_states.pt"),
    "the model gone": edits.gone(_MODEL),
    "the model cut short": edits.cut(_MODEL, 3000),
    "the model a list": lambda root: torch.save([1], root / _MODEL),
    "a rank a tensor": lambda root: torch.save(torch.zeros(3), root / _zero(1)),
    "no optimizer": edits.unpickled(_zero(1), lambda state: state.pop("optimizer_state_dict") and None),
    "an optimizer that is a text": edits.unpickled(_zero(1), lambda state: state.update(optimizer_state_dict="x")),
    "stage 0": _optimizer(zero_stage=0),
    "stage 3": _optimizer(zero_stage=3),
    "stage a text": _optimizer(zero_stage="two"),
    "stage a list": _optimizer(zero_stage=[2]),
    "stage null": _optimizer(zero_stage=None),
    "3 ranks": _optimizer(partition_count=[3]),
    "no ranks": _optimizer(partition_count=[]),
    "ranks a text": _optimizer(partition_count="2"),
    "negative ranks": _optimizer(partition_count=-2),
    "no groups": _optimizer(single_partition_of_fp32_groups=[]),
    "groups a tensor": _optimizer(single_partition_of_fp32_groups=torch.zeros(5)),
    "groups of texts": _optimizer(single_partition_of_fp32_groups=["x"]),
    "groups null": _optimizer(single_partition_of_fp32_groups=None),
    "a shorter partition": _optimizer(single_partition_of_fp32_groups=[torch.zeros(100)]),
    "a partition of halves": edits.unpickled(
        _zero(1),
        lambda state: state["optimizer_state_dict"].update(
            single_partition_of_fp32_groups=[
                part.half() for part in state["optimizer_state_dict"]["single_partition_of_fp32_groups"]
            ]
        ),
    ),
    "a partition with gaps": _optimizer(single_partition_of_fp32_groups=[torch.zeros(40_000)[::2]]),
    "paddings of texts": _optimizer(0, param_alignment_paddings=[["x"]]),
    "paddings a number": _optimizer(0, param_alignment_paddings=5),
    "negative paddings": _optimizer(0, param_alignment_paddings=[[-1] * 20]),
    "paddings of another number": _optimizer(0, param_alignment_paddings=[[0]]),
    "no shapes": edits.unpickled(_MODEL, lambda state: state.pop("param_shapes") and None),
    "shapes a map": edits.unpickled(_MODEL, lambda state: state.update(param_shapes=state["param_shapes"][0])),
    "shapes of a list": _model(param_shapes=[[1]]),
    "a shape of texts": _shapes(lambda shapes: shapes.update({_first(shapes): ["a"]})),
    "a negative shape": _shapes(lambda shapes: shapes.update({_first(shapes): [-257, 36]})),
    "a shape of 2^70": _shapes(lambda shapes: shapes.update({_first(shapes): [2**70, 2]})),
    "a larger shape": _shapes(lambda shapes: shapes.update({_first(shapes): torch.Size([600, 36])})),
    "a parameter more": _shapes(lambda shapes: shapes.update(more=torch.Size([4000]))),
    "a parameter less": _shapes(lambda shapes: shapes.pop(_first(shapes))),
    "a name that is a number": _shapes(lambda shapes: shapes.update({7: shapes.pop(_first(shapes))})),
    "no module": edits.unpickled(_MODEL, lambda state: state.pop("module") and None),
    "a module that is a list": _model(module=[1]),
    "buffers a text": _model(buffer_names=5),
    "frozen shapes a text": _model(frozen_param_shapes="x"),
    "frozen shapes without fragments": _model(frozen_param_shapes={"frozen": torch.Size([3])}),
    "fragments that are a list": _model(frozen_param_shapes={"frozen": torch.Size([3])}, frozen_param_fragments=[1]),
}
_EITHER: dict[str, Damage] = {
    "shared parameters a list": _model(shared_params=[1]),
    "shared parameters of nothing": _model(shared_params={"lm_head.weight": "nothing"}),
    "shared parameters in a circle": _model(shared_params={"a": "b", "b": "a"}),
    "shared parameters of numbers": _model(shared_params={1: 2}),
    "a step that is a text": _model(global_steps="one"),
    "a negative step": _model(global_steps=-5),
    "a step of 2^80": _model(global_steps=2**80),
    "a version that is a list": _model(ds_version=["x"]),
    "buffers of no name": _model(buffer_names=["nothing", 7, None]),
    "a buffer that is a weight": _model(buffer_names=["model.norm.weight"]),
    "moments that are texts": _optimizer(base_optimizer_state="x"),
}

CASES = [
    *(Case(name, damaged("deepspeed", damage)) for name, damage in _REFUSED.items()),
    *(Case(name, damaged("deepspeed", damage), expect="any") for name, damage in _EITHER.items()),
]
