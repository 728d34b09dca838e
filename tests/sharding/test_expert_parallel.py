"""Experts divided over ranks, by transformers' own plan: trained, saved and resumed like any other run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers
from transformers import AutoModelForCausalLM, LlamaConfig

from fsdp_shard.checkpoint import StepContent, StepStore, locate, open_checkpoint, save_step, verify
from fsdp_shard.data import ShuffledDataset, WindowDataset
from fsdp_shard.distributed import DistributedContext
from fsdp_shard.errors import ConfigError
from fsdp_shard.models import ModelConfig, build_on_meta, follows_plans_by_fqn
from fsdp_shard.sharding import check_ranks, check_shardable
from fsdp_shard.sharding.registry import DdpConfig, Fsdp1Config, Fsdp2Config
from fsdp_shard.training import (
    LoraConfig,
    MuonConfig,
    SgdConfig,
    TrainConfig,
    TrainerState,
    TrainingRun,
    build_optimizer,
    evaluate_loss,
    load_sharded,
    train,
)
from fsdp_shard.utils import check
from tests.support.mixtures import FAMILIES, config
from tests.support.ranks import on_ranks
from tests.support.runs import Ended, run_recipe
from tests.support.tiny import byte_tokenizer

pytestmark = pytest.mark.skipif(
    not follows_plans_by_fqn(), reason="transformers before 5.23 has no expert parallelism with a batch per rank"
)

SEED, STEPS, BATCH, LR, MAX_NORM = 4, 5, 8, 0.2, 0.5
# Ranks, replicas, families and what else is set; the experts are always on two neighbors.
MESHES: dict[str, tuple[int, int, tuple[str, ...], dict[str, Any]]] = {
    "pairs": (2, 1, tuple(FAMILIES), {"sync_every_micro_batch": False}),
    # A shared expert is computed after the others, which on two ranks are a unit that marks more when it is recomputed.
    "recomputed pairs": (2, 1, ("qwen2_moe",), {"activation_checkpointing": "selective"}),
    "shards of pairs": (4, 1, ("mixtral",), {"activation_checkpointing": "selective"}),
    "replicas of pairs": (
        4,
        2,
        ("qwen3_moe",),
        {"activation_checkpointing": True, "reshard_after_forward": False},
    ),
}


def fresh(family: str) -> Any:
    """A random model; in its last layer no token goes to the second half of eight experts, so one rank gets none."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config(family))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
        gate = model.model.layers[-1].mlp.gate.weight
        if len(gate) == 8:
            gate.copy_(torch.tensor([30.0, 20, -30, -20, 1, 1, -1, -1])[:, None] * torch.randn(gate.shape[1]))
    return model


def data() -> ShuffledDataset:
    return ShuffledDataset(WindowDataset(np.random.default_rng(1).integers(3, 257, 500), 12, "random"), SEED)


def trained_plain(family: str) -> dict[str, Any]:
    """Losses, norms and weights of a loop in one process."""
    model, windows = fresh(family).train(), data()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    losses, norms = [], []
    for step in range(STEPS):
        batch = windows.batch(range(step * BATCH, (step + 1) * BATCH))
        logits = model(**{key: torch.from_numpy(value) for key, value in batch.inputs.items()}).logits
        loss = F.cross_entropy(logits.flatten(0, -2), torch.from_numpy(batch.labels).flatten())
        optimizer.zero_grad()
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)))
        optimizer.step()
        losses.append(loss.item())
    return {"losses": losses, "norms": norms, "weights": {n: p.detach() for n, p in model.named_parameters()}}


def trained_divided(context: DistributedContext, root: Path, mesh: str) -> dict[str, Any]:
    """Losses, norms and held-out losses of each family; its weights are saved under `root`."""
    settings = TrainConfig(
        steps=STEPS, global_batch_size=BATCH, micro_batch_size=2, max_grad_norm=MAX_NORM, schedule="constant"
    )
    _, replicas, families, others = MESHES[mesh]
    shard = Fsdp2Config(param_dtype="float32", expert_parallel=2, replicas=replicas, **others)
    check(shard)
    check_ranks(shard, context.world_size, on_gpu=False)
    found = {}
    for family in families:
        model = ModelConfig(path=str(root / family))
        loaded = load_sharded(model, shard, locate(model.path), context)
        before = evaluate_loss(loaded.model, data().dataset.head(8), 2, context).loss
        optimizer = build_optimizer(SgdConfig(lr=LR, momentum=0.0, weight_decay=0.0), loaded.model, context)
        with pytest.raises(ConfigError, match=r"adapter=lora cannot be combined with shard\.expert_parallel=2"):
            load_sharded(model, shard, locate(model.path), context, LoraConfig())
        with pytest.raises(ConfigError, match=r"cannot gather with shard\.expert_parallel=2"):
            build_optimizer(MuonConfig(), loaded.model, context)
        run = TrainingRun(
            loaded.model,
            optimizer,
            data(),
            settings,
            context,
            TrainerState(SEED, data().identity),
            sync_every_micro_batch=shard.sync_every_micro_batch,
        )
        reports = list(train(run))
        shards = loaded.model.local_shards()
        save_step(context, StepStore(root / mesh / family), 1, StepContent(shards, {}), layout="sharded")
        held = sum(part.data.numel() for name, part in shards.items() if "experts" in name)
        found[family] = {
            "before": before,
            "losses": [report.loss for report in reports],
            "norms": [report.grad_norm for report in reports],
            "held": held,
        }
    return found


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("experts")
    for family in FAMILIES:
        fresh(family).save_pretrained(root / family)
    byte_tokenizer().save_pretrained(root / "mixtral")
    return root


@pytest.fixture(scope="module")
def plain() -> dict[str, dict[str, Any]]:
    return {family: trained_plain(family) for family in FAMILIES}


@pytest.mark.long
@pytest.mark.parametrize("mesh", MESHES)
def test_divided_experts_train_like_whole_ones(plain: dict[str, dict[str, Any]], root: Path, mesh: str) -> None:
    ranks, replicas, families, _ = MESHES[mesh]
    results = on_ranks(ranks, trained_divided, root, mesh, replicas=replicas, expert_parallel=2)
    for family in families:
        wanted = plain[family]
        of_experts = sum(weight.numel() for name, weight in wanted["weights"].items() if "experts" in name)
        assert sum(result[family]["held"] for result in results) == replicas * of_experts
        for result in results:
            found = result[family]
            assert found["losses"] == pytest.approx(wanted["losses"], rel=1e-5)
            assert found["norms"] == pytest.approx(wanted["norms"], rel=1e-4)
            assert found["before"] == pytest.approx(results[0][family]["before"])
        report = verify(StepStore(root / mesh / family).path(1))
        assert report.is_sound, report.problems
        assert report.content_checked
        before = dict(fresh(family).named_parameters())
        with open_checkpoint(StepStore(root / mesh / family).path(1)) as index:
            for name, weight in wanted["weights"].items():
                torch.testing.assert_close(index.read(name), weight, rtol=0, atol=7e-6)
                assert not torch.allclose(weight, before[name], rtol=0, atol=1e-5), "it was trained"


SETTINGS = [
    "train.steps=4",
    "train.global_batch_size=4",
    "train.micro_batch_size=2",
    "optim.lr=3e-3",
    "shard.param_dtype=float32",
    "data.sequence_length=32",
    "launch.device=cpu",
    "checkpoint.every=1",
    "seed=7",
]


def run(target: Path, settings: list[str], *overrides: str) -> Ended:
    ended = run_recipe("finetune", target, *settings, *overrides)
    assert ended.status == 0, ended.err
    return ended


@pytest.mark.long
def test_divided_runs_resume_bit_equal_and_as_others(root: Path, texts: Path, tmp_path: Path) -> None:
    settings = [*SETTINGS, f"model.path={root}/mixtral", f"data.path={texts}/train.txt", f"data.cache_dir={tmp_path}/c"]
    two = ["shard.expert_parallel=2", "launch.ranks=2"]
    divided = run(tmp_path / "divided", settings, *two)
    assert "(experts divided over 2)" in divided.err
    half = f"resume={divided.run_dir}/checkpoints/step-00000002"
    again = run(tmp_path / "again", settings, half, *two, "checkpoint.layout=gathered")
    assert again.losses == divided.losses[2:]
    whole = run(tmp_path / "whole", settings, half)
    assert whole.losses == pytest.approx(divided.losses[2:], abs=1e-5)
    back = run(tmp_path / "back", settings, f"resume={whole.run_dir}/checkpoints/step-00000003", *two)
    assert back.losses == pytest.approx(divided.losses[3:], abs=1e-5)
    model = transformers.AutoModelForCausalLM.from_pretrained(again.checkpoint)
    with open_checkpoint(divided.checkpoint) as index:
        for name, parameter in model.named_parameters():
            assert torch.equal(parameter, index.read(name)), "one run stopped, the other did not; and in two layouts"


def test_what_cannot_be_divided_is_named() -> None:
    two = Fsdp2Config(expert_parallel=2)
    mixtral = config("mixtral")
    for given, ranks, said in (
        (
            LlamaConfig(num_hidden_layers=1, hidden_size=32, vocab_size=9),
            2,
            "no expert-parallel plan for LlamaForCausal",
        ),
        (mixtral, 4, "expert_parallel=4 does not divide the 6 experts of MixtralForCausalLM"),
    ):
        with pytest.raises(ConfigError, match=said):
            check_shardable(build_on_meta(given, "float32"), Fsdp2Config(expert_parallel=ranks))
    check_shardable(build_on_meta(mixtral, "float32"), two)
    model: Any = build_on_meta(mixtral, "float32")
    model.ep_plan = {"model.layers.*.mlp.experts": "ep_dispatch_experts"}
    with pytest.raises(ConfigError, match=r"does not say of model\.layers\.0\.mlp\.experts\.down_proj both"):
        check_shardable(model, two)
    model.ep_plan = {"model.layers.*.mlp.experts": "moe_tp_experts"}
    with pytest.raises(ConfigError, match="asks for moe_tp_experts, which fsdp-shard cannot"):
        check_shardable(model, two)
    for wrong, said in (
        (Fsdp1Config(expert_parallel=2), "shard=fsdp1 cannot divide experts"),
        (DdpConfig(expert_parallel=2), "expert_parallel=2 has no effect with shard=ddp"),
        (replace(two, compile=True), "compile=true cannot be combined with expert_parallel=2"),
        (replace(two, tensor_parallel=2), "tensor_parallel=2 cannot be combined with expert_parallel=2"),
        (replace(two, activation_offload=True), "activation_offload=true cannot be combined with expert_parallel=2"),
        (replace(two, reshard_after_forward=2), "reshard_after_forward=2 cannot be combined with expert_parallel=2"),
    ):
        with pytest.raises(ConfigError, match=said):
            check(wrong)
    with pytest.raises(ConfigError, match=r"shard\.replicas=2 times shard\.expert_parallel=2 does not divide the 6"):
        check_ranks(replace(two, replicas=2), 6, on_gpu=False)


@pytest.mark.long
def test_a_loss_that_is_not_trained_is_told(root: Path, texts: Path, tmp_path: Path) -> None:
    """Of a model in a wrapper that hides its config, too."""
    asks = AutoModelForCausalLM.from_config(config("mixtral", output_router_logits=True))
    asks.save_pretrained(tmp_path / "model")
    byte_tokenizer().save_pretrained(tmp_path / "model")
    given = [
        f"data.path={texts}/train.txt",
        f"data.cache_dir={tmp_path}/c",
        "train.steps=1",
        "shard=ddp",
        "launch.ranks=2",
    ]
    for model, count in ((root / "mixtral", 0), (tmp_path / "model", 1)):
        ended = run(tmp_path / str(count), SETTINGS, f"model.path={model}", *given)
        assert ended.err.count("config.json has output_router_logits") == count
