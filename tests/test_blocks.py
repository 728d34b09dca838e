from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, BertConfig, BloomConfig, GPT2Config, T5Config

from fsdp_shard.blocks import no_split_blocks, tied_names
from fsdp_shard.errors import ModelError
from tests.tiny import llama, llama_config


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


def test_structure_keeps_residual_blocks_and_recurrent_cells_whole() -> None:
    stages = nn.Sequential(nn.Sequential(Residual(), Residual()), nn.Sequential(Residual(), Residual()))
    model = nn.ModuleDict(
        {"stem": nn.Conv2d(3, 4, 3), "stages": stages, "lstm": nn.LSTM(4, 8, 2), "fc": nn.Linear(8, 2)}
    )
    found = [(block.fqn, block.cls) for block in no_split_blocks(model) if block.repeated]
    assert found == [*((f"stages.{s}.{b}", "Residual") for s in (0, 1) for b in (0, 1)), ("lstm", "LSTM")]


def test_a_model_without_blocks_lists_what_could_be_one() -> None:
    with pytest.raises(ModelError, match=r"shard\.blocks"):
        no_split_blocks(nn.Linear(2, 2))
