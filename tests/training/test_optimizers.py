"""Every optimizer, sharded, against the library's own in one process; and its state saved and read again."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar, cast

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from fsdp_shard.checkpoint import (
    StepContent,
    StepStore,
    check_slots,
    create_state,
    load_shards,
    open_checkpoint,
    optimizer_shards,
    optimizer_values,
    save_step,
)
from fsdp_shard.config import OPTIONS, FinetuneConfig, compose_jobs
from fsdp_shard.distributed import DistributedContext
from fsdp_shard.errors import ConfigError
from fsdp_shard.models import build_on_meta, rebuild_buffers
from fsdp_shard.sharding import DdpConfig, ShardConfig, ShardedModel
from fsdp_shard.training.finetune_checks import check_finetune
from fsdp_shard.training.optim.adamw8bit import AdamW8bitConfig
from fsdp_shard.training.optim.build import build_optimizer
from fsdp_shard.training.optim.config import OptimConfig
from fsdp_shard.training.optim.muon import MuonConfig
from fsdp_shard.training.optim.torch_optim import AdafactorConfig, AdamWConfig, SgdConfig
from tests.support.ranks import on_ranks, update
from tests.support.sharded import WRAPPERS
from tests.support.tiny import token_batch

STEPS, HALF = 6, 3

ALL: dict[str, OptimConfig] = {
    "adamw": AdamWConfig(lr=1e-2, weight_decay=0.1),
    "adamw8bit": AdamW8bitConfig(lr=1e-2, weight_decay=0.1),
    "adafactor": AdafactorConfig(lr=3e-2, weight_decay=0.1),
    "muon": MuonConfig(lr=1e-2, weight_decay=0.1),
    "sgd": SgdConfig(lr=1e-1, momentum=0.8, nesterov=True, weight_decay=0.1),
}
# The 8-bit one is compared where torchao is installed.
CONFIGS = {name: config for name, config in ALL.items() if name != "adamw8bit" or find_spec("torchao")}


def model_config() -> LlamaConfig:
    """Matrices of whole and of broken blocks of 256, rows that 2 ranks divide and rows that they do not."""
    return LlamaConfig(
        architectures=["LlamaForCausalLM"],
        hidden_size=64,
        intermediate_size=101,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=257,
        tie_word_embeddings=True,
        dtype="float32",
    )


def whole_model() -> PreTrainedModel:
    torch.manual_seed(0)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(model_config())
    return model.train()


def theirs(name: str, model: nn.Module) -> list[torch.optim.Optimizer]:
    """The library's own optimizers of a model in one process, as its documentation says to build them."""
    params = dict(model.named_parameters())
    matrices = [param for param in params.values() if param.ndim == 2]
    groups: list[dict[str, Any]] = [
        {"params": matrices, "weight_decay": 0.1},
        {"params": [param for param in params.values() if param.ndim == 1], "weight_decay": 0.0},
    ]
    if name == "adamw":
        return [torch.optim.AdamW(groups, lr=1e-2)]
    if name == "adamw8bit":
        from torchao.optim import AdamW8bit

        return [AdamW8bit(groups, lr=1e-2)]
    if name == "adafactor":
        return [torch.optim.Adafactor(groups, lr=3e-2)]
    if name == "sgd":
        return [torch.optim.SGD(groups, lr=1e-1, momentum=0.8, nesterov=True)]
    embedding = params["model.embed_tokens.weight"]
    hidden = [param for param in matrices if param is not embedding]
    rest = [{"params": [embedding], "weight_decay": 0.1}, groups[1]]
    muon = torch.optim.Muon(hidden, lr=1e-2, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    return [muon, torch.optim.AdamW(rest, lr=1e-2)]


def plain_losses(name: str) -> list[float]:
    model = whole_model()
    optimizers = theirs(name, model)
    losses = []
    for step in range(STEPS):
        rows = token_batch(step)
        loss = model(input_ids=rows, labels=rows, use_cache=False).loss
        loss.backward()
        with torch.compiler.set_stance("force_eager"):
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def fresh(context: DistributedContext, shard: ShardConfig) -> ShardedModel:
    model = build_on_meta(model_config(), "float32")
    rebuild_buffers(model, context.device)
    sharded = shard.shard(model, context)
    values = dict(whole_model().named_parameters())
    for name, part in sharded.local_shards().items():
        part.data.copy_(values[name].detach().view(-1)[part.start : part.start + len(part.data)])
    sharded.module.train()
    return sharded


def go(context: DistributedContext, model: ShardedModel, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
    losses = []
    for step in steps:
        rows = token_batch(step).chunk(context.world_size)[context.rank]
        loss = model.module(input_ids=rows, labels=rows, use_cache=False).loss
        losses.append(update(optimizer, loss, context))
    return losses


def train_and_resume(context: DistributedContext, shard: ShardConfig, root: Path) -> dict[str, dict[str, list[float]]]:
    """With each optimizer: the losses of a run, and those of its second half, resumed from what was saved."""
    found = {}
    for name, config in CONFIGS.items():
        model = fresh(context, shard)
        optimizer = build_optimizer(config, model, context)
        losses = go(context, model, optimizer, range(HALF))
        shards = model.local_shards()
        state = StepContent(
            shards, {"lm_head.weight": "model.embed_tokens.weight"}, optimizer_shards(optimizer, shards)
        )
        step = save_step(context, StepStore(root / name), HALF, state, layout="sharded")
        losses += go(context, model, optimizer, range(HALF, STEPS))
        found[name] = {"losses": losses, "resumed": resume(context, shard, config, step)}
    return found


def resume(context: DistributedContext, shard: ShardConfig, config: OptimConfig, step: Path) -> list[float]:
    step = Path(context.broadcast_object(str(step)))
    model = fresh(context, shard)
    optimizer = build_optimizer(config, model, context)
    create_state(optimizer)
    states = optimizer_shards(optimizer, model.local_shards())
    names = set().union(*context.all_gather_object(set(states)))
    with open_checkpoint(step) as weights, open_checkpoint(step / "optimizer") as index:
        load_shards(weights, model.local_shards())
        check_slots(index, states, [name for name in index.names if name not in names])
        load_shards(index, states)
    return go(context, model, optimizer, range(HALF, STEPS))


def resume_all(context: DistributedContext, shard: ShardConfig, root: Path) -> dict[str, list[float]]:
    return {name: resume(context, shard, config, StepStore(root / name).path(HALF)) for name, config in CONFIGS.items()}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, list[dict[str, Any]]]]:
    known: dict[str, tuple[Path, list[dict[str, Any]]]] = {}

    def run(wrapper: str) -> tuple[Path, list[dict[str, Any]]]:
        if wrapper not in known:
            root = tmp_path_factory.mktemp(wrapper)
            known[wrapper] = root, on_ranks(2, train_and_resume, WRAPPERS[wrapper](param_dtype="float32"), root)
        return known[wrapper]

    return run


def test_all_are_here() -> None:
    assert {name: type(config) for name, config in ALL.items()} == OPTIONS["optim"]


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_losses_are_those_of_one_process(wrapper: str, saved: Any) -> None:
    _, (first, second) = saved(wrapper)
    assert first == second, "all ranks report the same"
    for name in CONFIGS:
        plain = plain_losses(name)
        assert abs(plain[1] - plain[0]) > 0.005, name
        # Muon computes in bfloat16: one rounding of a gradient moves an update by 2^-9.
        assert first[name]["losses"] == pytest.approx(plain, rel=1e-3 if name == "muon" else 2e-5), name


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_resume_on_the_same_ranks_is_bit_equal(wrapper: str, saved: Any) -> None:
    _, (first, _) = saved(wrapper)
    for name in CONFIGS:
        assert first[name]["resumed"] == first[name]["losses"][HALF:], name


@pytest.mark.long
@pytest.mark.parametrize(("wrapper", "other", "ranks"), [("fsdp1", "fsdp2", 3), ("fsdp2", "fsdp1", 1)])
def test_resume_under_the_other_wrapper_on_other_ranks(wrapper: str, other: str, ranks: int, saved: Any) -> None:
    root, (first, _) = saved(wrapper)
    held = on_ranks(ranks, resume_all, WRAPPERS[other](param_dtype="float32"), root)
    for name in CONFIGS:
        close = 2e-3 if name == "muon" else 1e-4 if name == "adamw8bit" else 1e-5
        assert held[0][name] == pytest.approx(first[name]["losses"][HALF:], abs=close), name


@pytest.mark.long
def test_with_ddp_every_rank_has_all_of_an_update(saved: Any, tmp_path: Path) -> None:
    root, (first, _) = saved("fsdp2")
    ddp = on_ranks(2, train_and_resume, DdpConfig(), tmp_path)[0]
    resumed = on_ranks(2, resume_all, WRAPPERS["fsdp2"](param_dtype="float32"), tmp_path)[0]
    from_sharded = on_ranks(2, resume_all, DdpConfig(), root)[0]
    for name in CONFIGS:
        close = 2e-3 if name == "muon" else 1e-4 if name == "adamw8bit" else 1e-5
        assert ddp[name]["losses"] == pytest.approx(first[name]["losses"], abs=close), name
        assert ddp[name]["resumed"] == ddp[name]["losses"][HALF:], name
        assert resumed[name] == pytest.approx(first[name]["losses"][HALF:], abs=close), name
        assert from_sharded[name] == pytest.approx(first[name]["losses"][HALF:], abs=close), name


def test_8_bit_state_is_kept_in_8_bits(saved: Any) -> None:
    pytest.importorskip("torchao")
    root, _ = saved("fsdp2")
    with open_checkpoint(StepStore(root / "adamw8bit").path(HALF) / "optimizer") as index:
        query = "model.layers.0.self_attn.q_proj.weight"
        assert index.dtypes[f"{query}.exp_avg.codes"] == "U8"
        assert index.shapes[f"{query}.exp_avg.scale"] == (64 * 64 // 256,)
        assert index.dtypes["model.norm.weight.exp_avg"] == "F32"


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [])
    monkeypatch.delitem(sys.modules, "torchao", raising=False)
    with pytest.raises(ConfigError, match=r"optim=adamw8bit needs torchao.*\[quantize\]"):
        AdamW8bitConfig().check_installed()


@pytest.mark.parametrize(
    ("name", "hidden"),
    [
        ("model.layers.0.mlp.shared_expert.gate_proj.weight", True),
        ("shared.weight", False),
        ("model.embed_tokens.weight", False),
        ("bert.embeddings.word_embeddings.weight", False),
        ("lm_head.weight", False),
        ("model.layers.0.mlp.experts.gate_up_proj_bias", False),
        ("encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight", False),
    ],
)
def test_matrices_that_muon_updates(name: str, hidden: bool) -> None:
    assert MuonConfig()._is_hidden(name, (4, 4)) is hidden


@pytest.mark.parametrize("divided", ["tensor_parallel", "expert_parallel"])
def test_whole_parameters_are_refused_before_anything_is_read(divided: str, tmp_path: Path) -> None:
    typed = [f"model.path={tmp_path}", f"data.path={tmp_path}", f"run_dir={tmp_path / 'run'}", "launch.ranks=2"]
    (job,) = compose_jobs(FinetuneConfig, [*typed, "optim=adafactor", f"shard.{divided}=2"], "finetune")
    with pytest.raises(ConfigError, match=rf"cannot gather with shard\.{divided}=2; use optim=adamw"):
        check_finetune(job.config)


def test_what_muon_leaves_out_is_there_unless_it_is_so_by_default() -> None:
    names = ["model.embed_tokens.weight", "model.layers.0.q_proj.weight"]
    MuonConfig().check_parameters(names)
    MuonConfig(not_muon=["*embed*", "wte", "q_*"]).check_parameters(names)
    with pytest.raises(ConfigError, match=r"optim\.not_muon has o_proj, and no module"):
        MuonConfig(not_muon=["*embed*", "o_proj"]).check_parameters(names)


@dataclass
class _Own(OptimConfig):
    """An optimizer of one's own that needs whole parameters."""

    needs_full_params: ClassVar[bool] = True
    kind: Any = None

    def create(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        return cast("torch.optim.Optimizer", self.kind(groups, lr=1e-3))


class _CountsSteps(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        self.param_groups[0]["count"] = self.param_groups[0].get("count", 0) + 1
        return super().step(closure)


class _KeepsNumbers(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self.state[param]["step"] = self.state[param].get("step", 0) + 1
        return super().step(closure)


def own(context: DistributedContext) -> dict[str, Any]:
    model = fresh(context, WRAPPERS["fsdp2"](param_dtype="float32"))
    with pytest.raises(ConfigError) as raised:
        go(context, model, build_optimizer(_Own(kind=_CountsSteps), model, context), range(2))
    assert "_CountsSteps changes its parameter groups in step() (count=" in str(raised.value)
    optimizer = build_optimizer(_Own(kind=_KeepsNumbers), model, context)
    go(context, model, optimizer, range(2))
    return optimizer_values(optimizer, model.local_shards())


def test_what_an_optimizer_of_whole_parameters_counts() -> None:
    """Counts in groups depended on the number of ranks, and numbers in states were not saved, without a word."""
    values = [value for found in on_ranks(2, own) for value in found.values()]
    assert values == [2] * len(dict(whole_model().named_parameters()))
