"""Scalar parameters, as CLIP has one: each rank has them whole, and training and checkpoints equal one process."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from transformers import CLIPConfig, CLIPModel

import fsdp_shard as fs
from fsdp_shard.checkpoint import (
    CheckpointConfig,
    StepStore,
    create_state,
    load_shards,
    open_checkpoint,
    optimizer_shards,
    verify,
)
from fsdp_shard.distributed import DistributedContext, LocalShard
from fsdp_shard.errors import ConfigError
from fsdp_shard.models import build_on_meta, rebuild_buffers
from fsdp_shard.sharding import (
    WRAPPERS,
    Fsdp1Config,
    Fsdp2Config,
    ShardedModel,
    check_shardable,
    plan_units,
)
from fsdp_shard.training import (
    OPTIMIZERS,
    FinetuneSaver,
    LoadedModel,
    LoadFigures,
    OptimConfig,
    RunContent,
    RunLock,
    TrainerState,
    build_optimizer,
)
from tests.support.ranks import on_ranks
from tests.support.sharded import assembled

STEPS, NUM_PARTS = 3, 4
TOWER = {"hidden_size": 24, "intermediate_size": 28, "num_hidden_layers": 2, "num_attention_heads": 3}
TEXT = TOWER | {
    "vocab_size": 101,
    "bos_token_id": 99,
    "eos_token_id": 100,
    "pad_token_id": 1,
    "max_position_embeddings": 16,
}
IMAGES = TOWER | {"image_size": 16, "patch_size": 8}


def config() -> CLIPConfig:
    sizes: dict[str, Any] = {"text_config": dict(TEXT), "vision_config": dict(IMAGES), "projection_dim": 12}
    return CLIPConfig(**sizes, architectures=["CLIPModel"], dtype="float32")


def plain_model() -> CLIPModel:
    torch.manual_seed(0)
    return CLIPModel(config()).train()


def losses(model: nn.Module, step: int, parts: range) -> Iterator[torch.Tensor]:
    """The contrastive loss of each of some of the `NUM_PARTS` parts of a step."""
    for part in parts:
        generator = torch.Generator().manual_seed(NUM_PARTS * step + part)
        tokens = torch.randint(0, 100, (3, 8), generator=generator)
        pixels = torch.randn(3, 3, 16, 16, generator=generator)
        yield model(input_ids=tokens, pixel_values=pixels, return_loss=True).loss


def optim_of(name: str) -> OptimConfig:
    return OPTIMIZERS[name](lr=3e-2 if name == "sgd" else 1e-2)


def train_plain(name: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    model = plain_model()
    params = dict(model.named_parameters())
    optimizer = optim_of(name).build(params, {fqn: tuple(param.shape) for fqn, param in params.items()})
    norms = []
    for step in range(STEPS):
        (sum(losses(model, step, range(NUM_PARTS))) / NUM_PARTS).backward()  # type: ignore[union-attr]  # a sum of tensors
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
        optimizer.step()
        optimizer.zero_grad()
    return norms, {fqn: param.detach() for fqn, param in params.items()}


def fill(model: ShardedModel) -> None:
    source = plain_model().state_dict()
    for fqn, shard in model.local_shards().items():
        shard.data.copy_(source[fqn].reshape(-1)[shard.start : shard.start + len(shard.data)])


def sharded_model(context: DistributedContext, wrapper: str = "fsdp2") -> ShardedModel:
    model = build_on_meta(config(), "float32")
    rebuild_buffers(model, context.device)
    sharded = WRAPPERS[wrapper](param_dtype="float32").shard(model, context)
    fill(sharded)
    sharded.module.train()
    return sharded


def train_sharded(context: DistributedContext, wrapper: str, name: str, *, is_synced: bool = True) -> dict[str, Any]:
    sharded = sharded_model(context, wrapper)
    optimizer = build_optimizer(optim_of(name), sharded, context)
    per_rank = NUM_PARTS // context.world_size
    norms = []
    for step in range(STEPS):
        parts = range(per_rank * context.rank, per_rank * (context.rank + 1))
        for number, part in enumerate(parts):
            (loss,) = losses(sharded.module, step, range(part, part + 1))
            if is_synced or number == len(parts) - 1:
                (loss / per_rank).backward()
            else:
                with sharded.no_sync():
                    (loss / per_rank).backward()
        norms.append(float(sharded.clip_grad_norm_(0.5)))
        optimizer.step()
        optimizer.zero_grad()
    shards = sharded.local_shards()
    return {
        "norms": norms,
        "shards": {fqn: (shard.start, shard.data.clone(), shard.writes) for fqn, shard in shards.items()},
        "scale": float(shards["logit_scale"].data),
    }


CASES = [("fsdp2", "sgd", True), ("fsdp2", "sgd", False), ("fsdp2", "adamw", True), ("fsdp2", "muon", True)]
CASES += [("ddp", "sgd", True)]


def run_cases(context: DistributedContext) -> list[dict[str, Any]]:
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor", UserWarning)
    return [train_sharded(context, wrapper, name, is_synced=synced) for wrapper, name, synced in CASES]


@pytest.fixture(scope="module")
def results() -> list[list[dict[str, Any]]]:
    return on_ranks(2, run_cases)


@pytest.mark.long
@pytest.mark.parametrize("number", range(len(CASES)), ids=[f"{w} {o} {s}" for w, o, s in CASES])
def test_training_equals_one_process(results: list[Any], number: int) -> None:
    ranks = [result[number] for result in results]
    norms, weights = train_plain(CASES[number][1])
    for rank in ranks:
        assert rank["norms"] == pytest.approx(norms, rel=1e-3)
    whole = assembled(ranks, {fqn: weight.shape for fqn, weight in weights.items()})
    assert abs(float(whole["logit_scale"]) - float(plain_model().logit_scale.detach())) > 1e-3, "it was trained"
    # AdamW and Muon turn gradients that are zero but for rounding (those of the keys' biases) into whole steps.
    exact = weights if CASES[number][1] == "sgd" else {"logit_scale": weights["logit_scale"]}
    for fqn, weight in exact.items():
        torch.testing.assert_close(whole[fqn], weight, rtol=1e-4, atol=1e-5)
    assert ranks[0]["scale"] == ranks[1]["scale"], "each rank has it"


class Quiet:
    """A log of saves that says nothing."""

    def note(self, lines: str) -> None: ...

    def warn(self, lines: str) -> None: ...

    def saved(self, directory: Path) -> None: ...


def save(context: DistributedContext, run_dir: Path, layout: str) -> dict[str, float]:
    """A step of AdamW, saved; the values of the scalar and of its state."""
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor", UserWarning)
    model = sharded_model(context)
    optimizer = build_optimizer(optim_of("adamw"), model, context)
    next(losses(model.module, 0, range(context.rank, context.rank + 1))).backward()
    optimizer.step()
    loaded = LoadedModel(model=model, num_params=0, num_blocks=0, aliases={}, figures=LoadFigures(0, 0, 0, 0))
    settings = CheckpointConfig(layout=layout, asynchronous=False)
    content = RunContent(loaded, optimizer, None, {"config.json": b"{}"})
    with FinetuneSaver(str(run_dir), settings, context, content, Quiet(), RunLock()) as saver:
        state = TrainerState(0, "none")
        state.advance(1, 1, {}, skipped=False)
        saver.save(state)
    return held(model, optimizer)


def held(model: ShardedModel, optimizer: torch.optim.Optimizer) -> dict[str, float]:
    shards = model.local_shards()
    found = {**shards, **optimizer_shards(optimizer, shards)}
    return {name: float(shard.data) for name, shard in found.items() if name.startswith("logit_scale")}


def load(context: DistributedContext, run_dir: Path) -> dict[str, float]:
    model = sharded_model(context)
    optimizer = build_optimizer(optim_of("adamw"), model, context)
    create_state(optimizer)
    step = StepStore(run_dir / "checkpoints").path(1)
    shards = model.local_shards()
    with open_checkpoint(step) as weights, open_checkpoint(step / "optimizer") as states:
        load_shards(weights, shards)
        load_shards(states, optimizer_shards(optimizer, shards))
    return held(model, optimizer)


@pytest.mark.long
@pytest.mark.parametrize("layout", ["gathered", "sharded"])
def test_saved_and_resumed_on_other_ranks(layout: str, tmp_path: Path) -> None:
    saved = on_ranks(2, save, tmp_path, layout)
    assert saved[0] == saved[1]
    assert {name.partition(".")[2] for name in saved[0]} == {"", "exp_avg", "exp_avg_sq", "step"}
    assert verify(tmp_path).is_sound
    assert [*on_ranks(1, load, tmp_path), *on_ranks(3, load, tmp_path)] == [saved[0]] * 4


def local_sizes(context: DistributedContext) -> dict[str, int]:
    return {name: shard.data.numel() for name, shard in sharded_model(context).local_shards().items()}


def test_planned_as_it_is_sharded() -> None:
    model = build_on_meta(config(), "float32")
    shapes = {name: tuple(param.shape) for name, param in model.named_parameters()}
    planned = Fsdp2Config().local_shapes(shapes, plan_units(model, Fsdp2Config()), 2)
    assert [{name: prod(shape) for name, shape in local.items()} for local in planned] == on_ranks(2, local_sizes)


@dataclass(frozen=True)
class ScalarsOnGpu:
    """A model under FSDP2 with CPU offload: its scalars are on another device, for which meta stands in."""

    inner: ShardedModel
    shard_mesh_dim = "shard"

    def local_shards(self) -> dict[str, LocalShard]:
        on_gpu = nn.Parameter(torch.empty((), device="meta"))
        moved: dict[str, Any] = {"tensor": on_gpu, "data": on_gpu.detach().view(-1)}
        shards = self.inner.local_shards().items()
        return {name: shard if shard.shape else replace(shard, **moved) for name, shard in shards}


def build_offloaded(context: DistributedContext, name: str) -> str:
    model: Any = ScalarsOnGpu(sharded_model(context))
    try:
        build_optimizer(optim_of(name), model, context)
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.long
def test_offloaded_with_an_optimizer_that_needs_full_parameters_they_are_refused() -> None:
    for said in on_ranks(2, build_offloaded, "adafactor"):
        assert "the scalar parameter logit_scale stays on the GPU; use optim=adamw or optim=sgd, or shard.cpu" in said
    assert on_ranks(2, build_offloaded, "sgd") == ["", ""]
    assert on_ranks(1, build_offloaded, "adafactor") == [""]


def test_fsdp1_refuses_them() -> None:
    model = build_on_meta(config(), "float32")
    with pytest.raises(ConfigError, match="shard=fsdp1 cannot shard the scalar parameter logit_scale of CLIPModel"):
        check_shardable(model, Fsdp1Config())


class ScaledExpert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.layer(x) * self.scale)


class ScaledExperts(nn.Module):
    """Some experts run, in an order that the caller chooses."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(ScaledExpert() for _ in range(3))

    def forward(self, x: torch.Tensor, chosen: list[int]) -> torch.Tensor:
        for number in chosen:
            x = x + self.experts[number](x) * (number + 1)
        return x


class ScaledModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(4, 6)
        self.blocks = nn.ModuleList(ScaledExperts() for _ in range(2))

    def forward(self, x: torch.Tensor, chosen: list[int]) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x, chosen)
        return x.square().mean()


def _gradients_of_scales(model: nn.Module) -> list[float]:
    scales = [param for name, param in model.named_parameters() if name.endswith("scale")]
    return [0.0 if scale.grad is None else float(scale.grad) for scale in scales]


# The experts that each of two ranks uses, in each micro-batch.
_USED = {
    "one is not used in the last micro-batch": [[[0, 1, 2], [0, 1, 2]], [[0, 2], [0, 2]]],
    "other ones": [[[0], [1]]],
    "in another order": [[[0, 1], [1, 0]]],
    "fewer": [[[0, 1, 2], [0]]],
}


def _rows(micro_batch: int, rank: int) -> torch.Tensor:
    return torch.randn(4, 4, generator=torch.Generator().manual_seed(10 * micro_batch + rank))


def _scalar_gradients(context: DistributedContext) -> dict[str, list[float]]:
    found = {}
    for case, used in _USED.items():
        model = fs.shard(ScaledModel(), context, param_dtype="float32", blocks=["ScaledExperts"])
        for number, chosen in enumerate(used):
            is_last = number == len(used) - 1
            with nullcontext() if is_last else fs.no_sync(model):
                model.module(_rows(number, context.rank), chosen[context.rank]).backward()
        found[case] = _gradients_of_scales(model.module)
    return found


@pytest.mark.skipif(not hasattr(FSDPModule, "set_reduce_scatter_unused_params"), reason="torch before 2.13")
def test_ranks_that_use_other_scalars_or_none_have_the_same_gradients() -> None:
    results = on_ranks(2, _scalar_gradients)
    for case, used in _USED.items():
        plain = ScaledModel()
        for number, chosen in enumerate(used):
            for rank in range(2):
                (plain(_rows(number, rank), chosen[rank]) / 2).backward()
        expected = pytest.approx(_gradients_of_scales(plain), abs=1e-6)
        assert [result[case] for result in results] == [expected] * 2, case
