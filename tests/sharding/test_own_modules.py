"""`fsdp_shard.shard` on modules that people bring: on meta, without blocks, with batch norms."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel
from transformers import (
    MixtralConfig,
    MixtralForCausalLM,
    SwitchTransformersConfig,
    SwitchTransformersForConditionalGeneration,
)

import fsdp_shard as fs
from fsdp_shard.distributed import DistributedContext
from fsdp_shard.errors import ConfigError, ModelError
from fsdp_shard.sharding.routed_lists import is_within, skippable_modules
from tests.support.ranks import on_ranks
from tests.support.tiny import llama, save_model, token_batch


def test_a_model_on_meta_computes_as_the_one_that_is_loaded(tmp_path: Path) -> None:
    source = save_model(tmp_path / "model", seed=3)

    def logits(context: DistributedContext) -> torch.Tensor:
        with torch.device("meta"):
            model = llama()
        sharded = fs.shard(model, context, param_dtype="float32")
        fs.load_weights(sharded.module, source)
        with torch.no_grad():
            return sharded.module(token_batch(0, 2, 5)).logits

    assert torch.equal(on_ranks(2, logits)[0], llama(3)(token_batch(0, 2, 5)).logits)


def test_a_model_without_blocks() -> None:
    def shard(context: DistributedContext) -> None:
        layers = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        with pytest.raises(ModelError, match=r"no module repeats.* shard.min_params=40: .* a unit of Linear"):
            fs.shard(layers, context, param_dtype="float32")
        with pytest.raises(ModelError, match="It has no parameters"):
            fs.shard(nn.Sequential(nn.ReLU()), context, param_dtype="float32")
        sharded = fs.shard(layers, context, param_dtype="float32", min_params=40)
        assert sharded.module(torch.ones(1, 4)).shape == (1, 2)

    on_ranks(2, shard)


def test_statistics_of_each_rank_are_told() -> None:
    def shard(context: DistributedContext) -> None:
        model = nn.Sequential(nn.Conv2d(1, 2, 1), nn.BatchNorm2d(2))
        with pytest.warns(UserWarning, match="BatchNorm2d of Sequential keep the statistics of each rank's own"):
            fs.shard(model, context, param_dtype="float32", min_params=1)

    on_ranks(2, shard)


class Expert(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.down(torch.tanh(self.up(hidden)))
        return result


class Layer(nn.Module):
    """Of its experts only those that have tokens run."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.experts = nn.LayerNorm(width), nn.ModuleList(Expert(width) for _ in range(4))

    def forward(self, hidden: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        normed = self.norm(hidden)
        output = torch.zeros_like(normed)
        for number, expert in enumerate(self.experts):
            if (chosen := ids % 4 == number).any():
                output[chosen] = expert(normed[chosen])
        return hidden + output


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(32, 8), nn.Linear(8, 32)
        self.layers = nn.ModuleList(Layer(8) for _ in range(2))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(ids)
        for layer in self.layers:
            hidden = layer(hidden, ids)
        logits: torch.Tensor = self.head(hidden)
        return logits


def train_mixture(model: nn.Module, rank: int, num_ranks: int) -> list[float]:
    """Losses of some steps; rank 0 of two has tokens of the first two experts, rank 1 those of the others."""
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=0.01), []
    for step in range(4):
        first = torch.randint(0, 8, (4, 6), generator=torch.Generator().manual_seed(step)) * 4
        ids = (first + torch.arange(4)[:, None]).chunk(num_ranks)[rank]
        loss = nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.roll(1, 1).flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.skipif(not hasattr(FSDPModule, "set_reduce_scatter_unused_params"), reason="torch before 2.13")
@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view tensor")  # the head's, which nobody changes
@pytest.mark.parametrize("min_params", [None, 100])
def test_experts_that_run_on_some_ranks_only(min_params: int | None) -> None:
    def losses(context: DistributedContext) -> list[float]:
        sharded = fs.shard(Mixture(), context, param_dtype="float32", min_params=min_params)
        return train_mixture(sharded.module, context.rank, 2)

    of_ranks = on_ranks(2, losses)
    expected = train_mixture(Mixture(), 0, 1)
    assert [sum(pair) / 2 for pair in zip(*of_ranks, strict=True)] == pytest.approx(expected, rel=1e-5)


def test_fsdp1_trains_no_lists_of_which_some_modules_run() -> None:
    sizes: dict[str, Any] = {
        "d_model": 16,
        "d_kv": 4,
        "d_ff": 20,
        "num_layers": 2,
        "num_heads": 4,
        "vocab_size": 64,
        "num_experts": 4,
    }
    sparse: dict[str, Any] = {"num_sparse_encoder_layers": 2, "num_sparse_decoder_layers": 2}

    def shard(context: DistributedContext) -> None:
        model = SwitchTransformersForConditionalGeneration(SwitchTransformersConfig(**sizes, **sparse))
        with pytest.raises(ConfigError, match=r"cannot train .*experts of Switch.* use shard=fsdp2"):
            fs.shard(model, context, wrapper="fsdp1", param_dtype="float32")

    on_ranks(1, shard)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")  # peft reads it
def test_fsdp1_shards_no_parameters_that_peft_adapts_one_by_one() -> None:
    def shard(context: DistributedContext) -> None:
        config = MixtralConfig(
            hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
            num_local_experts=2, vocab_size=30,
        )  # fmt: skip
        adapter = peft.LoraConfig(target_parameters=["mlp.experts.down_proj"])
        model = peft.get_peft_model(MixtralForCausalLM(config), adapter)
        with pytest.raises(ConfigError, match=r"cannot shard .*experts of PeftModel.*LoRA of single.* use shard=fsdp2"):
            fs.shard(model, context, wrapper="fsdp1", param_dtype="float32")

    on_ranks(1, shard)


def test_experts_in_plain_lists_are_skippable() -> None:
    found = set(skippable_modules(Mixture()))
    layers = {"layers.0", "layers.1"}
    assert found == layers | {f"{layer}.experts.{number}" for layer in layers for number in range(4)}
    assert is_within("layers.1.experts.3.up.weight", found)
    assert not is_within("layers.10.norm.weight", found)
    assert not is_within("head.weight", found)


def _steps(model: Any, parameters: list[nn.Parameter], clip: Any, rows: Any, between: Any) -> list[float]:
    """The gradient norms of three steps, with a pass between the backward pass and the update."""
    optimizer, norms = torch.optim.SGD(parameters, lr=0.5), []
    for step in range(3):
        tokens = rows(token_batch(step, 4, 5))
        model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
        between(tokens)
        norms.append(float(clip()))
        optimizer.step()
        optimizer.zero_grad()
    return norms


@pytest.mark.parametrize("wrapper", ["fsdp2", "fsdp1"])
@pytest.mark.parametrize("has_graph", [False, True])
def test_a_pass_between_backward_and_update_changes_nothing(wrapper: str, has_graph: bool) -> None:
    """torch keeps the root gathered after it: the next pass would use its old values, and `clip` find no gradients."""

    def norms(context: DistributedContext) -> list[float]:
        sharded = fs.shard(llama(), context, wrapper=wrapper, param_dtype="float32")
        with torch.no_grad():
            sharded.module(input_ids=token_batch(9, 2, 5))  # before the optimizer exists

        def between(tokens: torch.Tensor) -> None:
            with torch.set_grad_enabled(has_graph):
                sharded.module(input_ids=tokens, use_cache=False).logits.detach()

        parameters = list(sharded.module.parameters())

        def rows(tokens: torch.Tensor) -> torch.Tensor:
            return tokens.chunk(2)[context.rank]

        return _steps(sharded.module, parameters, lambda: fs.clip_grad_norm_(sharded, 1.0), rows, between)

    plain = llama()
    parameters = list(plain.parameters())
    expected = _steps(
        plain, parameters, lambda: nn.utils.clip_grad_norm_(parameters, 1.0), lambda tokens: tokens, lambda tokens: None
    )
    assert on_ranks(2, norms)[0] == pytest.approx(expected, rel=1e-4)


def test_ddp_begins_with_the_weights_of_rank_0() -> None:
    def first(context: DistributedContext) -> float:
        sharded = fs.shard(llama(context.rank), context, wrapper="ddp")
        return float(next(sharded.module.parameters()).detach().flatten()[0])

    one, other = on_ranks(2, first)
    assert one == other


def test_settings_that_contradict_the_process_group_or_the_model() -> None:
    def shard(context: DistributedContext) -> None:
        with pytest.raises(ConfigError, match="replicas=2, but the process group was initialized with replicas=1"):
            fs.shard(llama(), context, replicas=2)
        mixed = llama().bfloat16()
        mixed.get_submodule("model.norm").float()
        with pytest.raises(ConfigError, match=r"cannot shard the root .* parameters of bfloat16 and float32"):
            fs.shard(mixed, context)

    on_ranks(2, shard)


def test_a_model_under_a_wrapper_is_refused() -> None:
    """Under a second one, its replicas would have diverged."""

    def shard(context: DistributedContext) -> None:
        settings: dict[str, Any] = {"param_dtype": "float32"}
        wrappers = ("fsdp2", "fsdp1", "ddp")
        made: dict[str, Any] = {name: fs.shard(llama(), context, name, **settings) for name in wrappers}
        fsdp1, ddp = "FullyShardedDataParallel", "DistributedDataParallel"
        said = {"fsdp2": "fully_shard", "fsdp1": fsdp1, "ddp": ddp}
        for wrapper in made:
            for name, one in made.items():
                with pytest.raises(ConfigError, match=rf"The model \(.*\) is already under torch's {said[name]}, and"):
                    fs.shard(one.module, context, wrapper, **settings)
            inside = nn.ModuleDict({"policy": DistributedDataParallel(llama()), "value": nn.Linear(2, 2)})
            with pytest.raises(ConfigError, match=r"policy \(DistributedDataParallel\) is already under torch's"):
                fs.shard(inside, context, wrapper, **settings)
            with pytest.raises(ConfigError, match=r"The model is \w+Model, a model that is sharded already; pass the"):
                fs.shard(made[wrapper], context, wrapper, **settings)

    on_ranks(1, shard)


def test_a_wrapper_or_ranks_that_are_none() -> None:
    def shard(context: DistributedContext) -> None:
        given: Any
        for given in (None, ["ddp"], "fsdp3"):
            with pytest.raises(ConfigError, match="is not one of fsdp2, fsdp1, ddp"):
                fs.shard(llama(), context, given)
        for given in (None, "cpu", context.mesh):
            with pytest.raises(ConfigError, match=r"context is \w+, not the ranks that .* yields"):
                fs.shard(llama(), given)
        for given in (llama, None):
            with pytest.raises(ConfigError, match=r"The model is \w+, no module; pass the torch\.nn\.Module"):
                fs.shard(given, context)

    on_ranks(1, shard)
    with fs.init_distributed("cpu") as context:
        pass
    with pytest.raises(ConfigError, match="The process group of context has ended; shard and train the model within"):
        fs.shard(llama(), context)


def test_names_inside_a_compiled_wrapper(tmp_path: Path) -> None:
    source = save_model(tmp_path / "model", seed=3)

    def load(context: DistributedContext) -> bool:
        model = llama()
        compiled: Any = torch.compile(DistributedDataParallel(model), backend="eager")  # a module of its own
        fs.load_weights(compiled, source)
        return all(torch.equal(*pair) for pair in zip(model.parameters(), llama(3).parameters(), strict=True))

    assert on_ranks(1, load) == [True]
