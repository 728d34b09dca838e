"""Completions of batched prompts are those of each prompt alone, and are counted as what they are."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, BertConfig, PreTrainedModel, T5Config

from fsdp_shard.errors import DataError, ModelError
from fsdp_shard.inference.base import GenerationSettings
from fsdp_shard.inference.decode import Figures, complete, encode, generation_config
from fsdp_shard.inference.dispatch import load_dispatched
from fsdp_shard.inference.prompts import Completion, Prompt
from fsdp_shard.models import check_causal
from tests.tiny import byte_tokenizer, llama_config

TOKENIZER = byte_tokenizer()
PROMPTS = [Prompt(text, f"line {number}") for number, text in enumerate(["abc", "a longer prompt", "x", "yes", "no"])]


@pytest.fixture(scope="module")
def model(tiny_model: Path) -> PreTrainedModel:
    return load_dispatched(tiny_model, device_map="disk")


def run(model: PreTrainedModel, settings: GenerationSettings, prompts: list[Prompt] = PROMPTS) -> list[Completion]:
    encoded = encode(TOKENIZER, prompts, model.config, settings.max_new_tokens)
    return list(complete(model, TOKENIZER, prompts, encoded, settings, Figures()))


def greedy(path: Path, text: str, max_new_tokens: int) -> list[int]:
    """What plain transformers says, one prompt at a time."""
    model = AutoModelForCausalLM.from_pretrained(path)
    ids = torch.tensor([TOKENIZER(text)["input_ids"]])
    out = model.generate(ids, max_new_tokens=max_new_tokens, do_sample=False, eos_token_id=256, pad_token_id=256)
    return [int(token) for token in out[0, ids.shape[1] :]]


@pytest.mark.parametrize("batch_size", [1, 2, 8])
def test_completions_are_those_of_each_prompt_alone_in_input_order(
    tiny_model: Path, model: PreTrainedModel, batch_size: int
) -> None:
    completions = run(model, GenerationSettings(max_new_tokens=6, batch_size=batch_size))
    assert [completion.prompt for completion in completions] == [prompt.text for prompt in PROMPTS]
    for completion in completions:
        tokens = greedy(tiny_model, completion.prompt, 6)
        assert completion.completion == TOKENIZER.decode(tokens, skip_special_tokens=True)
        assert completion.num_new_tokens == len(tokens)


def test_what_follows_the_end_is_neither_shown_nor_counted(tiny_model: Path, model: PreTrainedModel) -> None:
    tokens = greedy(tiny_model, "abc", 6)
    end = tokens[3]
    config = model.generation_config
    try:
        config.eos_token_id = end
        (first, *_) = run(model, GenerationSettings(max_new_tokens=6))
        until = tokens.index(end) + 1
        assert first.num_new_tokens == until
        assert first.completion == TOKENIZER.decode(tokens[:until], skip_special_tokens=True)
    finally:
        config.eos_token_id = None


def test_figures_count_all_batches(model: PreTrainedModel) -> None:
    figures, settings = Figures(), GenerationSettings(max_new_tokens=4, batch_size=2)
    encoded = encode(TOKENIZER, PROMPTS, model.config, 4)
    completions = list(complete(model, TOKENIZER, PROMPTS, encoded, settings, figures))
    assert figures.num_new_tokens == sum(completion.num_new_tokens for completion in completions) > 0
    assert figures.first_token_seconds is not None
    assert 0 < figures.first_token_seconds < figures.seconds
    assert figures.tokens_per_second == figures.num_new_tokens / figures.seconds


def test_sampling_follows_the_seed_and_the_settings(model: PreTrainedModel) -> None:
    settings = GenerationSettings(max_new_tokens=8, do_sample=True, temperature=3.0)
    runs = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        runs.append(run(model, settings))
    assert runs[0] == runs[1] != runs[2]
    cold = GenerationSettings(max_new_tokens=8, do_sample=True, top_k=1)
    assert run(model, cold) == run(model, GenerationSettings(max_new_tokens=8))


def test_settings_reach_the_generation_config(model: PreTrainedModel) -> None:
    model.generation_config.update(temperature=0.3, top_p=0.5, do_sample=True)
    try:
        greedily = generation_config(model, TOKENIZER, GenerationSettings(repetition_penalty=1.3))
        assert (greedily.do_sample, greedily.temperature, greedily.top_p) == (False, None, None)
        assert greedily.repetition_penalty == 1.3
        drawn = generation_config(model, TOKENIZER, GenerationSettings(do_sample=True, top_p=0.9))
        assert (drawn.do_sample, drawn.temperature, drawn.top_p) == (True, 0.3, 0.9)
    finally:
        model.generation_config.update(temperature=None, top_p=None, do_sample=None)


def test_a_chat_goes_through_the_template() -> None:
    tokenizer = byte_tokenizer()
    with pytest.raises(ModelError, match="chat template"):
        encode(tokenizer, PROMPTS, llama_config(), 4, chat=True)
    tokenizer.chat_template = (
        "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    (ids, *_) = encode(tokenizer, PROMPTS, llama_config(), 4, chat=True)
    assert tokenizer.decode(ids) == "[user]abc[assistant]"


def test_prompts_that_leave_no_room_are_refused() -> None:
    long = [Prompt("x" * 100, "file.txt, line 7,")]
    encode(TOKENIZER, long, llama_config(), 28)
    with pytest.raises(DataError, match=r"line 7, has 100 tokens.*context of 128; shorten it, or generate at most 28"):
        encode(TOKENIZER, long, llama_config(), 29)


def test_models_that_do_not_predict_the_next_token_are_refused() -> None:
    with pytest.raises(ModelError, match="a BertForSequenceClassification, which does not predict the next token"):
        check_causal(BertConfig(architectures=["BertForSequenceClassification"]))
    with pytest.raises(ModelError, match="t5 is an encoder-decoder model"):
        encode(TOKENIZER, PROMPTS, T5Config(), 4)
