"""Batches: every prompt once, those of like length together, the same for a run that goes on."""

from __future__ import annotations

import time
from dataclasses import replace
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, strategies as st
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GenerationConfig,
    GenerationMixin,
    PretrainedConfig,
    PreTrainedModel,
)

from fsdp_shard.distributed import DistributedContext
from fsdp_shard.errors import LossError
from fsdp_shard.inference.config import GenerationSettings
from fsdp_shard.inference.generation.batching import complete, windows
from fsdp_shard.inference.generation.decoder import Answer, Decoder
from fsdp_shard.inference.generation.padding_trial import reads_padding
from fsdp_shard.inference.generation.prompts import Prompt
from tests.support.ranks import on_ranks
from tests.support.tiny import byte_tokenizer


@given(st.lists(st.integers(1, 50), max_size=200), st.integers(1, 5))
def test_every_prompt_is_in_one_batch(lengths: list[int], batch_size: int) -> None:
    found = list(windows(lengths, batch_size))
    assert sorted(place for window in found for batch in window for place in batch) == list(range(len(lengths)))
    first = 0
    for window in found:
        flat = [place for batch in window for place in batch]
        assert sorted(flat) == list(range(first, first + len(flat)))
        assert [lengths[place] for place in flat] == sorted((lengths[place] for place in flat), reverse=True)
        assert all(0 < len(batch) <= batch_size for batch in window)
        first += len(flat)


@given(st.lists(st.integers(1, 5), max_size=200), st.integers(1, 5))
def test_batches_of_one_length(lengths: list[int], batch_size: int) -> None:
    found = [batch for window in windows(lengths, batch_size, equal=True) for batch in window]
    assert sorted(place for batch in found for place in batch) == list(range(len(lengths)))
    assert all(len({lengths[place] for place in batch}) == 1 and len(batch) <= batch_size for batch in found)


@pytest.mark.parametrize(
    ("family", "reads"),
    [("llama", False), ("gpt2", False), ("bart", True), ("xlnet", True), ("minimax", True), ("phi3", False)],
)
def test_answers_do_not_depend_on_the_other_prompts_of_a_batch(family: str, reads: bool) -> None:
    sizes = {"vocab_size": 257, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    of_family: dict[str, dict[str, Any]] = {
        "gpt2": {**sizes, "bos_token_id": 256, "eos_token_id": 256},
        "bart": {
            **sizes,
            "decoder_layers": 2,
            "is_decoder": True,
            "is_encoder_decoder": False,
            "forced_eos_token_id": None,
        },
        "phi3": {  # frequencies of texts beyond 32 tokens, which one of the prompts has
            **sizes,
            "pad_token_id": 0,
            "max_position_embeddings": 256,
            "original_max_position_embeddings": 32,
            "rope_parameters": {"rope_type": "longrope", "long_factor": [3.0] * 8, "short_factor": [1.0] * 8},
        },
        "xlnet": {"vocab_size": 257, "d_model": 32, "n_layer": 2, "n_head": 2, "d_inner": 48},
        "minimax": {
            **sizes,
            "layer_types": ["linear_attention", "full_attention"],
            "num_key_value_heads": 2,
            "num_local_experts": 2,
        },
    }
    config = AutoConfig.for_model(family, **of_family.get(family, sizes))
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval().requires_grad_(False)
    for param in model.parameters():
        param += 0.1 * torch.randn_like(param)
    tokenizer = byte_tokenizer()
    decoder = Decoder(model, tokenizer, GenerationSettings(max_new_tokens=5, output_scores=True))
    decoder.config.eos_token_id = None
    decoder.config.pad_token_id = 256
    texts = ["abc", "a much longer prompt, with many more bytes in it than the others", "x", "no"]
    encoded = [list(tokenizer(text)["input_ids"]) for text in texts]
    found = list(complete(decoder, [Prompt(text, "line") for text in texts], encoded))
    for ids, completion in zip(encoded, found, strict=True):
        alone = decoder.run([ids])[0]
        assert completion.completion == decoder.text(alone, ids)
        assert completion.log_probabilities == pytest.approx(alone.log_probabilities, abs=1e-3)
    assert reads_padding(model, GenerationConfig(), 256, [[3, 4]]) is reads
    assert not reads_padding(model, GenerationConfig(), 256, [[3, 3], [4]]), "there is no padding"


class _OwnNames(PretrainedConfig):
    """A config whose sizes have names of its own, so that no tiny model of it can be made."""

    model_type = "own_names"
    width: int = 4096
    depth: int = 16


class _Own(PreTrainedModel, GenerationMixin):
    config_class = _OwnNames

    def __init__(self, config: _OwnNames) -> None:
        super().__init__(config)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(config.width, config.width) for _ in range(config.depth))


def test_a_model_that_cannot_be_tried_gets_batches_of_one_length() -> None:
    said: list[str] = []
    with torch.device("meta"):
        model = _Own(_OwnNames())
    assert reads_padding(model, GenerationConfig(), 0, [[3, 4]], said.append)
    (warning,) = said
    assert warning.startswith("warning: _Own generates in batches of prompts of equal length, because it is unknown")
    assert not reads_padding(model, GenerationConfig(), 0, [[3, 3], [4]], said.append)
    assert len(said) == 1


@pytest.mark.parametrize(
    "options",
    [
        {"min_length": 18},
        {"no_repeat_ngram_size": 1},
        {"repetition_penalty": 1.5},
        {"encoder_repetition_penalty": 0.5},
        {"encoder_no_repeat_ngram_size": 1},
    ],
)
def test_options_of_the_model_do_not_count_padding(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 44, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", vocab_size=257, **sizes)).eval()
    for param in model.parameters():
        param.data += 0.1 * torch.randn_like(param)
    tokenizer, texts = byte_tokenizer(), ["abc", "a much longer prompt, with many more bytes in it", "x", "no"]
    encoded = [list(tokenizer(text)["input_ids"]) for text in texts]
    model.generation_config = GenerationConfig(**options)
    settings = GenerationSettings(max_new_tokens=24)
    end = Decoder(model, tokenizer, settings).run(encoded[2:3])[0].tokens[5]  # a short prompt's, which pads it, too
    model.generation_config = GenerationConfig(eos_token_id=end, pad_token_id=end, **options)
    decoder = Decoder(model, tokenizer, settings)
    found = list(complete(decoder, [Prompt(text, "line") for text in texts], encoded))
    alone = [decoder.run([ids])[0] for ids in encoded]
    assert [one.num_new_tokens for one in found] == [len(answer.tokens) for answer in alone]


@pytest.mark.parametrize(("end", "depends"), [(256, False), (37, True)])
def test_padding_that_may_be_generated_counts_as_repeated(end: int, depends: bool) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 44, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", vocab_size=257, **sizes))
    config = GenerationConfig(no_repeat_ngram_size=2, eos_token_id=[3, end])
    assert reads_padding(model, config, 256, [[3, 4]]) is depends


def _completions(context: DistributedContext, fails: bool) -> list[str]:
    """Those of two prompts, of which that of rank 1 takes longer than a collective may, or fails."""
    impatient = replace(context, group=dist.new_group(backend="gloo", timeout=timedelta(seconds=4)))

    def run(ids: list[list[int]], on_text: object) -> list[Answer]:
        if fails and context.rank == 1:
            raise LossError("The logits are not finite.")
        time.sleep(6 * context.rank)
        return [Answer(list(own)) for own in ids]

    decoder: Any = SimpleNamespace(
        model=torch.nn.Linear(1, 1),
        settings=SimpleNamespace(batch_size=1),
        config=GenerationConfig(),
        pad_token=0,
        run=run,
        text=lambda answer, prompt: str(answer),
    )
    prompts, encoded = [Prompt("a", "prompt"), Prompt("b", "prompt")], [[1], [2]]
    try:
        return [found.prompt for found in complete(decoder, prompts, encoded, seed=0, context=impatient)]
    except LossError as error:
        return [str(error)]


@pytest.mark.long
def test_ranks_wait_for_one_with_long_answers() -> None:
    assert on_ranks(2, _completions, False) == [["a", "b"], []]


def test_ranks_do_not_wait_for_one_that_failed() -> None:
    assert on_ranks(2, _completions, True) == [["The logits are not finite."]] * 2
