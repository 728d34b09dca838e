from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    BertConfig,
    BitConfig,
    BitModel,
    BloomConfig,
    GPT2Config,
    ResNetConfig,
    ResNetForImageClassification,
    T5Config,
    ViltConfig,
    ViltModel,
)

from fsdp_shard.errors import ConfigError, ModelError
from fsdp_shard.models import no_split_blocks, tied_names
from tests.support.tiny import llama, llama_config


def families() -> dict[str, nn.Module]:
    with torch.device("meta"):
        return {
            "llama": AutoModelForCausalLM.from_config(llama_config()),
            "gpt2": AutoModelForCausalLM.from_config(GPT2Config(n_layer=2, n_embd=64, n_head=4)),
            "bloom": AutoModelForCausalLM.from_config(BloomConfig(n_layer=2)),
            "bert": AutoModelForCausalLM.from_config(BertConfig(num_hidden_layers=2, is_decoder=True)),
            "t5": AutoModelForSeq2SeqLM.from_config(T5Config(num_layers=2)),
        }


@pytest.mark.parametrize(("name", "model"), families().items())
def test_every_parameter_is_in_exactly_one_block(name: str, model: nn.Module) -> None:
    blocks = no_split_blocks(model)
    assert sum(block.num_params for block in blocks) == sum(p.numel() for p in model.parameters())
    layers = [block for block in blocks if block.repeated]
    assert len(layers) >= (4 if name == "t5" else 2)
    for one in layers:
        assert not any(other.fqn.startswith(one.fqn + ".") for other in blocks), "blocks must not nest"


def test_blocks_of_a_llama_in_module_order() -> None:
    found = [(block.fqn, block.cls, block.repeated) for block in no_split_blocks(llama())]
    assert found == [
        ("model.embed_tokens", "Embedding", False),
        ("model.layers.0", "LlamaDecoderLayer", True),
        ("model.layers.1", "LlamaDecoderLayer", True),
        ("model.norm", "LlamaRMSNorm", False),
        ("lm_head", "Linear", False),
    ]


def test_a_tied_head_counts_once() -> None:
    head = no_split_blocks(llama(tied=True))[-1]
    assert (head.fqn, head.num_params) == ("lm_head", 0)
    assert no_split_blocks(llama(tied=False))[-1].num_params == 257 * 36
    assert tied_names(llama()) == {"lm_head.weight": "model.embed_tokens.weight"}


def test_blocks_named_by_the_user_win() -> None:
    repeated = [b.fqn for b in no_split_blocks(llama(), ["LlamaMLP", "LlamaAttention"]) if b.repeated]
    assert repeated[:2] == ["model.layers.0.self_attn", "model.layers.0.mlp"]


def test_an_unknown_class_names_the_nearest() -> None:
    with pytest.raises(ModelError, match=r"no module of class LlamaDecodeLayer \(did you mean LlamaDecoderLayer\?\)"):
        no_split_blocks(llama(), ["LlamaDecodeLayer"])


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4))
        self.shortcut = nn.Conv2d(4, 4, 1)


def test_names_of_blocks_are_a_list() -> None:
    for names in ("Linear", [nn.Linear]):
        with pytest.raises(ConfigError, match="Blocks are a list of class names"):
            no_split_blocks(nn.Sequential(nn.Linear(2, 2)), names)  # type: ignore[arg-type]  # the mistake under test


def test_structure_keeps_residual_blocks_and_recurrent_cells_whole() -> None:
    stages = nn.Sequential(nn.Sequential(Residual(), Residual()), nn.Sequential(Residual(), Residual()))
    model = nn.ModuleDict(
        {"stem": nn.Conv2d(3, 4, 3), "stages": stages, "lstm": nn.LSTM(4, 8, 2), "fc": nn.Linear(8, 2)}
    )
    found = [(block.fqn, block.cls) for block in no_split_blocks(model) if block.repeated]
    assert found == [*((f"stages.{s}.{b}", "Residual") for s in (0, 1) for b in (0, 1)), ("lstm", "LSTM")]


class Unit(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4)


class Shortened(nn.Module):
    """A residual block that is nothing but a list where its shortcut is the identity."""

    def __init__(self, shortcut: bool) -> None:
        super().__init__()
        self.shortcut = nn.Conv2d(4, 4, 1) if shortcut else nn.Identity()
        self.body = nn.Sequential(Unit(), Unit())


def test_structure_keeps_residual_blocks_whole_whose_shortcut_is_the_identity() -> None:
    stages = [nn.Sequential(Shortened(True), Shortened(False), Shortened(False)), nn.Sequential(Shortened(False))]
    model = nn.Sequential(Unit(), nn.MaxPool2d(2), nn.ModuleList(stages), nn.LSTMCell(4, 4), nn.BatchNorm2d(4))
    found = [(block.fqn, block.repeated) for block in no_split_blocks(model)]
    layers = ["2.0.0", "2.0.1", "2.0.2", "2.1", "3"]  # 2.1 holds one block and nothing beside it
    assert found == [("0", True), *((fqn, True) for fqn in layers), ("4", False)]


def resnet(depths: list[int], kind: str = "basic") -> nn.Module:
    config = AutoConfig.for_model(
        "resnet", embedding_size=8, hidden_sizes=[8, 12], depths=depths, layer_type=kind, num_labels=3
    )
    assert isinstance(config, ResNetConfig)
    with torch.device("meta"):
        return ResNetForImageClassification(config)


@pytest.mark.parametrize(("kind", "name"), [("basic", "ResNetBasicLayer"), ("bottleneck", "ResNetBottleNeckLayer")])
def test_residual_blocks_of_a_resnet_are_whole(kind: str, name: str) -> None:
    """Its own list has their shortcuts and layers each for itself; the first stage of this one has no shortcut."""
    model = resnet([2, 1], kind)
    found = [(block.fqn, block.cls) for block in no_split_blocks(model)]
    assert found == [
        ("resnet.embedder.embedder", "ResNetConvLayer"),
        *((f"resnet.encoder.stages.{fqn}", name) for fqn in ("0.layers.0", "0.layers.1", "1.layers.0")),
        ("classifier", "Sequential"),
    ]
    assert {id(p) for p in model.parameters()} == {
        id(p) for fqn, _ in found for p in model.get_submodule(fqn).parameters()
    }
    # Stages of one block each are as good: nothing is beside the block.
    alone = [block.fqn for block in no_split_blocks(resnet([1, 1], kind)) if "encoder" in block.fqn]
    assert alone == ["resnet.encoder.stages.0", "resnet.encoder.stages.1"]


def test_layers_are_whole_where_a_model_lists_their_attention_only() -> None:
    config = ViltConfig(hidden_size=8, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16, vocab_size=11)
    with torch.device("meta"):
        model = ViltModel(config)
    found = [(block.fqn, block.cls) for block in no_split_blocks(model) if block.repeated]
    assert found == [
        ("embeddings", "ViltEmbeddings"),
        ("encoder.layer.0", "ViltLayer"),
        ("encoder.layer.1", "ViltLayer"),
    ]


def test_layers_are_found_where_a_model_lists_what_stands_beside_them() -> None:
    config = BitConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[2, 2], num_groups=2)
    with torch.device("meta"):
        found = [(block.fqn, block.cls) for block in no_split_blocks(BitModel(config)) if block.repeated]
    assert found == [
        ("embedder", "BitEmbeddings"),
        *(
            (f"encoder.stages.{stage}.layers.{layer}", "BitPreActivationBottleneckLayer")
            for stage in (0, 1)
            for layer in (0, 1)
        ),
    ]


class Holder(nn.Module):
    """A module with another one in it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)


def test_a_model_without_blocks_lists_what_could_be_one() -> None:
    with pytest.raises(ModelError, match=r"shard\.min_params=6: that makes a unit of Linear"):
        no_split_blocks(nn.Linear(2, 2))
    with pytest.raises(ModelError, match=r"shard\.blocks=\[CLASS\]; candidates are Holder"):
        no_split_blocks(nn.Sequential(Holder()))
