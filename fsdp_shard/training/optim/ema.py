"""An exponential moving average of the trained weights: `train.ema_decay`, saved with each step in a folder `ema`.

The average begins with the weights at the start of the run. After each update, each rank computes average = decay *
average + (1 - decay) * weights for its own shards, in float32 (Polyak & Juditsky, 1992). This is roughly the average of
the last 1 / (1 - decay) updates.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from fsdp_shard import checkpoint
from fsdp_shard.distributed import DistributedContext, LocalShard, run_on_all
from fsdp_shard.errors import CheckpointError, ConfigError


class WeightAverage:
    """The average of the weights of one model.

    Args:
        decay: The weight of the previous average in each update.
        shards: This rank's shards of all parameters and buffers; their memory must not move.
    """

    def __init__(self, decay: float, shards: Mapping[str, LocalShard]) -> None:
        self._decay, self._shards = decay, shards
        self._averages = {
            name: shard.data.detach().to(torch.float32, copy=True)
            for name, shard in shards.items()
            if isinstance(shard.tensor, nn.Parameter) and shard.tensor.requires_grad
        }

    @torch.no_grad()
    def update(self) -> None:
        """Update the average with the current weights."""
        for name, average in self._averages.items():
            average.mul_(self._decay).add_(self._shards[name].data, alpha=1.0 - self._decay)

    def trained(self) -> dict[str, LocalShard]:
        """This rank's shards of the average, of the trained parameters only."""
        return {name: replace(self._shards[name], data=average) for name, average in self._averages.items()}

    def weights(self) -> dict[str, LocalShard]:
        """The averaged shards with those of all untrained parameters and buffers, which together form a model."""
        # A background save identifies tensors by identity, so each needs a separate tensor.
        frozen = {name: replace(shard, data=shard.data.view(-1)) for name, shard in self._shards.items()}
        return frozen | self.trained()


def open_average(
    decay: float | None,
    shards: Mapping[str, LocalShard],
    names: Mapping[str, str],
    step_directory: Path | None,
    context: DistributedContext,
) -> WeightAverage | None:
    """Begin the average of a run, or restore it from a step of any wrapper and number of ranks; a collective.

    Args:
        decay: `train.ema_decay`; None for no average.
        shards: This rank's shards of all parameters and buffers, with the initial weights.
        names: FQN -> stored name, for parameters whose stored name differs.
        step_directory: The step that the run resumes from, if any.
        context: The ranks.

    Raises:
        CheckpointError: On all ranks: the average in the step is for other parameters.
    """
    if decay is None:
        return None
    average = WeightAverage(decay, shards)
    if step_directory is not None:
        stored = {names.get(name, name): shard for name, shard in average.trained().items()}
        run_on_all(context, lambda: _restore(stored, step_directory / checkpoint.AVERAGE))
    return average


def _restore(stored: Mapping[str, LocalShard], directory: Path) -> None:
    with checkpoint.open_checkpoint(directory) as index:
        shapes = index.shapes
        for name, shard in stored.items():
            if shapes.get(name) != shard.shape:
                raise CheckpointError(
                    f"{directory} holds no average of {name} with shape {list(shard.shape)}, but this run trains it; "
                    f"freeze and adapt what that run did, or start a new run."
                )
        checkpoint.load_shards(index, stored)


def check_average(decay: float | None, step_directory: Path | None) -> None:
    """Raise ConfigError if a run with an average would resume without one, or vice versa."""
    if step_directory is None:
        return
    is_there = checkpoint.has_file(step_directory / checkpoint.AVERAGE, checkpoint.SHARD_INDEX)
    if is_there != (decay is not None):
        was, remedy = ("with", "set train.ema_decay") if is_there else ("without", "remove train.ema_decay")
        raise ConfigError(
            f"{step_directory} was saved {was} an average of the weights (ema/), so this run cannot resume from it; "
            f"{remedy}, or start a new run from its weights with model.path and another run_dir."
        )


def average_files(model_files: Mapping[str, bytes]) -> dict[str, bytes]:
    """The files of a step that turn its float32 averages into a model, placed in the folder of the averages."""
    files = dict(model_files)
    if checkpoint.CONFIG in files:
        document = checkpoint.with_dtype(json.loads(files[checkpoint.CONFIG]), "float32")
        files[checkpoint.CONFIG] = (json.dumps(document, indent=2) + "\n").encode()
    return {f"{checkpoint.AVERAGE}/{name}": content for name, content in files.items()}
