"""Models without attention under both wrappers: a ResNet by its residual blocks, an LSTM by its cell."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import ResNetConfig, ResNetForImageClassification
from transformers.modeling_outputs import CausalLMOutput

from fsdp_shard.data import ShuffledDataset, WindowDataset
from fsdp_shard.distributed import DistributedContext
from fsdp_shard.models import build_on_meta
from fsdp_shard.sharding.config import ShardedModel
from fsdp_shard.sharding.registry import Fsdp2Config
from fsdp_shard.sharding.wrap_policy import plan_units
from fsdp_shard.training import TrainConfig, TrainerState, TrainingRun, train
from tests.support.ranks import on_ranks, update
from tests.support.sharded import WRAPPERS, assembled

SEED, STEPS, BATCH, LR = 4, 3, 4, 0.2


class Recurrent(nn.Module):
    """A language model of an embedding, an LSTM of two layers, a norm and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(61, 21)
        self.lstm = nn.LSTM(21, 18, num_layers=2, batch_first=True)
        self.norm = nn.LayerNorm(18)
        self.head = nn.Linear(18, 61)

    def forward(self, input_ids: torch.Tensor, use_cache: bool = False) -> CausalLMOutput:
        hidden, _ = self.lstm(self.embed(input_ids))
        return CausalLMOutput(logits=self.head(self.norm(hidden)))


def resnet_config() -> ResNetConfig:
    sizes: dict[str, Any] = {
        "embedding_size": 8,
        "hidden_sizes": [8, 13],
        "depths": [2, 2],
        "layer_type": "basic",
        "num_labels": 3,
    }
    return ResNetConfig(architectures=["ResNetForImageClassification"], **sizes)


def plain_model(name: str) -> nn.Module:
    torch.manual_seed(1)
    return Recurrent() if name == "lstm" else ResNetForImageClassification(resnet_config())


def on_meta(name: str) -> nn.Module:
    with torch.device("meta"):
        return Recurrent() if name == "lstm" else build_on_meta(resnet_config(), "float32")


def tokens() -> ShuffledDataset:
    return ShuffledDataset(WindowDataset(np.random.default_rng(1).integers(0, 61, 200), 9, "random"), SEED)


def images(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(BATCH, 3, 32, 32, generator=generator), torch.randint(0, 3, (BATCH,), generator=generator)


def image_losses(module: nn.Module, rank: int, num_ranks: int, steps: range) -> Any:
    """The loss of this rank's images of each step. Each rank's norms see its own images, as they do under FSDP."""
    for step in steps:
        pixels, labels = (part.chunk(num_ranks)[rank] for part in images(step))
        yield F.cross_entropy(module(pixel_values=pixels).logits, labels)


def train_sharded(context: DistributedContext, model: ShardedModel, name: str) -> list[float]:
    optimizer = torch.optim.SGD(model.module.parameters(), lr=LR)
    if name == "lstm":  # through the loop itself
        data = tokens()
        config = TrainConfig(
            steps=STEPS, global_batch_size=BATCH, micro_batch_size=1, max_grad_norm=None, schedule="constant"
        )
        state = TrainerState(SEED, data.identity)
        return [report.loss for report in train(TrainingRun(model, optimizer, data, config, context, state))]
    losses = []
    model.module.train()
    for loss in image_losses(model.module, context.rank, context.world_size, range(STEPS)):
        losses.append(update(optimizer, loss, context))
    return losses


def train_plain(name: str, num_ranks: int) -> tuple[list[float], nn.Module]:
    model = plain_model(name).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    losses = []
    for step in range(STEPS):
        if name == "lstm":
            batch = tokens().batch(range(step * BATCH, (step + 1) * BATCH))
            logits = model(torch.from_numpy(batch.input_ids)).logits
            loss = F.cross_entropy(logits.flatten(0, 1), torch.from_numpy(batch.labels).flatten())
        else:
            each = [next(image_losses(model, rank, num_ranks, range(step, step + 1))) for rank in range(num_ranks)]
            loss = torch.stack(each).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, model


CASES = [(name, wrapper) for name in ("resnet", "lstm") for wrapper in WRAPPERS]


def run_cases(context: DistributedContext) -> dict[tuple[str, str], dict[str, Any]]:
    results: dict[tuple[str, str], dict[str, Any]] = {}
    for name, wrapper in CASES:
        model = WRAPPERS[wrapper](param_dtype="float32").shard(on_meta(name), context)
        source = plain_model(name).state_dict()
        shards = model.local_shards()
        assert shards.keys() == source.keys(), "parameters and buffers"
        for fqn, shard in shards.items():
            shard.data.copy_(source[fqn].reshape(-1)[shard.start : shard.start + len(shard.data)])
        losses = train_sharded(context, model, name)
        held = {fqn: (s.start, s.data.clone(), s.writes) for fqn, s in model.local_shards().items()}
        results[name, wrapper] = {"losses": losses, "shards": held}
    return results


@pytest.fixture(scope="module")
def results() -> list[dict[tuple[str, str], dict[str, Any]]]:
    return on_ranks(2, run_cases)


@pytest.mark.parametrize(("name", "wrapper"), CASES)
def test_training_equals_a_plain_model(results: list[Any], name: str, wrapper: str) -> None:
    ranks = [result[name, wrapper] for result in results]
    losses, model = train_plain(name, 2)
    for rank in ranks:
        assert rank["losses"] == pytest.approx(losses, rel=1e-5)
    assert abs(losses[-1] - losses[0]) > 1e-3, "the weights moved"
    weights = dict(model.named_parameters())
    whole = assembled(ranks, {fqn: weight.shape for fqn, weight in weights.items()})
    for fqn, weight in weights.items():
        torch.testing.assert_close(whole[fqn], weight.detach(), rtol=1e-4, atol=1e-5)


def test_units_are_residual_blocks_and_recurrent_cells() -> None:
    stages = [f"resnet.encoder.stages.{stage}.layers.{layer}" for stage in (0, 1) for layer in (0, 1)]
    units = {name: [unit.fqn for unit in plan_units(on_meta(name), Fsdp2Config())] for name in ("resnet", "lstm")}
    assert units == {"resnet": ["resnet.embedder.embedder", *stages, ""], "lstm": ["lstm", ""]}
