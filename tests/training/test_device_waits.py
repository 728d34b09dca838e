"""A step waits for the device once, when it reads its figures."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Any

import pytest
import torch

from fsdp_shard.distributed import DistributedContext
from fsdp_shard.training.config import TrainConfig
from fsdp_shard.training.loop import train
from fsdp_shard.training.loss.linear_cross_entropy import use_loss_head
from fsdp_shard.training.optim.torch_optim import SgdConfig
from fsdp_shard.utils import TorchDispatchMode
from tests.support.ranks import on_ranks
from tests.support.sharded import WRAPPERS, sharded
from tests.training.tiny_run import Run

# Operators whose results the CPU needs, so that on a GPU it waits for all that was launched before.
_WAITS = {
    "aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::is_nonzero", "aten::equal",
    "aten::_unique2", "aten::unique_dim", "aten::repeat_interleave.Tensor", "aten::bincount",
}  # fmt: skip


def is_caller(frame: traceback.FrameSummary) -> bool:
    """Whether the frame is not one of torch's own."""
    return "/torch/" not in frame.filename


class CountWaits(TorchDispatchMode):
    """Collects the functions that call `_WAITS`, or index by a mask, which finds its nonzero elements."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name()
        masks = args[1] if name.startswith("aten::index") and isinstance(args[1], list | tuple) else ()
        if name in _WAITS or any(isinstance(i, torch.Tensor) and i.dtype in (torch.bool, torch.uint8) for i in masks):
            self.found.append(next(frame.name for frame in traceback.extract_stack()[-2::-1] if is_caller(frame)))
        return func(*args, **(kwargs or {}))


def waits(context: DistributedContext, wrapper: str, chunked: bool) -> list[str]:
    """The functions that wait in the third of three steps of two micro-batches."""
    prepare: Callable[[Any], object] = (lambda model: use_loss_head(model, True)) if chunked else lambda model: None
    run = Run(context, sharded(WRAPPERS[wrapper](), context, prepare=prepare))
    parameters = dict(run.model.module.named_parameters())
    # The step count of AdamW is a tensor in CPU memory, which it reads without waiting for a GPU.
    run.optimizer = SgdConfig(lr=0.1).build(parameters, {name: tuple(p.shape) for name, p in parameters.items()})
    steps = train(run.of(TrainConfig(steps=3, global_batch_size=8, micro_batch_size=2)))
    next(steps), next(steps)
    with CountWaits() as mode:
        next(steps)
    return mode.found


@pytest.mark.parametrize("chunked", [False, True], ids=["logits", "chunked"])
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_nothing_of_ours_waits_for_the_device_within_a_step(wrapper: str, chunked: bool) -> None:
    # Reading the figures is one `tolist`, which has no operator. transformers asks once a forward pass whether the
    # positions are those of packed documents, before it launches anything.
    assert on_ranks(2, waits, wrapper, chunked) == [["find_packed_sequence_indices"] * 2] * 2
