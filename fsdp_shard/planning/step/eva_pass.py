"""Memory of `adapter.init=eva` before training, measured by steps as in `fill_eva` on fake tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from fsdp_shard.planning.step.micro_batch import BatchSize, planned_batch
from fsdp_shard.planning.step.recording.events import Event
from fsdp_shard.planning.step.recording.recorder import Recorder
from fsdp_shard.training import ObjectiveConfig, adapters_disabled, new_pca, run_watching
from fsdp_shard.utils import FakeTensorMode, one_thread, storage_bytes, tensors_in

_STEP = "step of the directions"  # the kind of an event
_A = ".lora_A.default.weight"


@dataclass(frozen=True)
class EvaPass:
    """A micro-batch whose layer inputs determine the layers' directions.

    The rank that runs the steps of a layer holds its inputs from one rank at a time; the plan is for that rank.

    Attributes:
        size: The size of the micro-batch.
        num_ranks: Number of ranks that divide the layers.
    """

    size: BatchSize
    num_ranks: int

    @property
    def rows(self) -> str:
        """Kind of the rows: FULL, PADDED or PACKED."""
        return self.size.rows

    @property
    def num_tokens(self) -> int:
        """Number of tokens of the micro-batch, all assumed to count."""
        return self.size.num_rows * self.size.length

    def setting(self, model: nn.Module) -> AbstractContextManager[None]:
        """Run the base model alone. Steps are measured first, because the recorder would count their tensors."""
        for _, param in _matrices(model):
            _pca_bytes(*param.shape, self.num_tokens)
        return adapters_disabled(model)

    def run(self, model: PreTrainedModel, recorder: Recorder) -> None:
        """Run the model; the recording has an event for each layer with an input that no earlier layer had."""
        layers = {name.removesuffix(_A): len(param) for name, param in _matrices(model)}
        batch = planned_batch(model, ObjectiveConfig(), None, self.size, recorder).batch
        label_positions = torch.zeros(self.num_tokens, dtype=torch.long)
        recorder.ignore([label_positions])
        last: list[torch.Tensor] = []

        def seen(fqn: str, inputs: torch.Tensor) -> None:
            if last and inputs is last[0]:
                return
            last[:] = [inputs]
            inputs = inputs.flatten(0, -2)
            rows = inputs[label_positions].float()
            torch.empty(_pca_bytes(layers[fqn], *reversed(rows.shape))[1], dtype=torch.uint8)
            del rows
            recorder.mark(_STEP, fqn)

        run_watching(model, batch, list(layers), seen)

    def parts(self, recording: Sequence[Event]) -> Sequence[Sequence[Event]]:
        """All of the recording."""
        return [recording]

    def state_bytes(self, recording: Sequence[Event], params: Mapping[str, nn.Parameter]) -> list[int]:
        """Bytes of the directions found so far on each rank, which stay until all layers have converged."""
        leaders = [event.module for event in recording if event.kind == _STEP]
        sizes = [_pca_bytes(*params[f"{fqn}{_A}"].shape, self.num_tokens)[0] for fqn in leaders]
        return [sum(sizes[rank :: self.num_ranks]) for rank in range(self.num_ranks)]


def _matrices(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return [(name, param) for name, param in model.named_parameters() if name.endswith(_A)]


@cache
def _pca_bytes(num_directions: int, num_features: int, num_rows: int) -> tuple[int, int]:
    """Bytes of a layer's PCA state, and the maximum temporary bytes of a step besides the state and its rows."""
    with one_thread(), FakeTensorMode():
        pca: Any = new_pca(num_directions)
        for _ in range(2):  # in float64 from the second one on
            pca.partial_fit(torch.empty(num_rows, num_features))
        rows, state = torch.empty(num_rows, num_features), [*tensors_in(vars(pca))]
        recorder = Recorder()
        recorder.ignore([rows, state])
        with recorder:
            pca.partial_fit(rows)
        recorder.mark("", "")
        return storage_bytes(state), recorder.events[0].rise
