"""Packed pairs against the same pairs in rows of their own: losses, metrics and gradients, and which models refuse."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, PreTrainedModel

from fsdp_shard.data import (
    NO_WINDOW,
    PAIRS,
    DataConfig,
    PackedPairs,
    SourceDataset,
    Task,
    open_samples,
    tokenize_all,
    with_extras,
)
from fsdp_shard.distributed import DistributedContext
from fsdp_shard.errors import ModelError
from fsdp_shard.models import SEQUENCE_CLASSIFICATION, check_shared_prompts
from fsdp_shard.training.batch_loader import to_device
from fsdp_shard.training.held_out.evaluator import evaluate_loss
from fsdp_shard.training.loss.custom_functions import CustomFunctions, StepSums
from fsdp_shard.training.loss.linear_cross_entropy import use_loss_head
from fsdp_shard.training.objectives.objective import ForwardPass, ObjectiveConfig
from fsdp_shard.training.objectives.reference_model import EXTRA, ModelReference, PrecomputedReference
from fsdp_shard.training.objectives.registry import OBJECTIVES
from fsdp_shard.training.objectives.reward import RewardConfig
from tests.support.tiny import byte_tokenizer, causal_class
from tests.training.conftest import Plain

LENGTH, END = 64, 256
SMALL: dict[str, Any] = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "vocab_size": 257, "intermediate_size": 48, "pad_token_id": END, "bos_token_id": 0, "eos_token_id": END,
}  # fmt: skip
OF_GPT = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
WINDOW = {"head_dim": 8, "sliding_window": 7}  # shorter than prompts
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": SMALL,
    "gemma3_text": SMALL | WINDOW | {"layer_types": ["sliding_attention", "full_attention"]},
    "gpt2": SMALL | OF_GPT,
    "qwen3": SMALL | {"head_dim": 8},
    "qwen2": SMALL,
    "mistral": SMALL | WINDOW,
    "mixtral": SMALL | {"num_local_experts": 4},
    "gemma": SMALL | {"head_dim": 8},
    "gemma2": SMALL | WINDOW,
    "gpt_oss": SMALL | WINDOW | {"num_local_experts": 4, "num_experts_per_tok": 2, "layer_types": None},
    "gpt_neox": SMALL,
    "phi3": SMALL,
    "opt": SMALL | {"ffn_dim": 48, "word_embed_proj_dim": 32, "max_position_embeddings": 64},
}
CASES = [
    *((family, "sdpa") for family in ("llama", "gemma3_text", "gpt2")),
    ("gemma3_text", "eager"),
    *(
        pytest.param(family, "sdpa", marks=pytest.mark.slow)
        for family in list(FAMILIES)[3:]
        if family not in ("gpt_oss", "gemma2")
    ),
    *(pytest.param(family, "eager", marks=pytest.mark.slow) for family in ("gpt_oss", "gemma2", "gpt2", "mixtral")),
]


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    draw = random.Random(0)

    def text(fewest: int, most: int) -> str:
        return "".join(draw.choice("abcdefgh ") for _ in range(draw.randint(fewest, most)))

    path = tmp_path_factory.mktemp("pairs") / "pairs.jsonl"
    given = [
        {"prompt": text(1, 24), "chosen": text(1, 12), "rejected": text(1, 20), "gap": number / 8}
        for number in range(12)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in given))
    return path


def _samples(path: Path, *, packs: bool, scored: bool = False) -> SourceDataset:
    """The pairs, for which a reward model reads what its own rule says: the padding token ends each text."""
    margin = {"margin_column": "gap"} if scored else {}
    name = SEQUENCE_CLASSIFICATION if scored else "causal_lm"
    given: dict[str, Any] = {"kind": "preference", "cache_dir": str(path.parent / name), **margin}
    config = DataConfig(path=str(path), sequence_length=LENGTH, packing=packs, **given)
    tokens = tokenize_all(config, byte_tokenizer(), name)
    (source,) = open_samples(config, tokens, Task(name, samples=PAIRS, padding=END)).train.sources
    return source


def _model(family: str, attention: str, seed: int, *, scored: bool) -> PreTrainedModel:
    values = {name: value for name, value in FAMILIES[family].items() if value is not None}
    config = AutoConfig.for_model(family, **values | ({"num_labels": 1} if scored else {}))
    cls = AutoModelForSequenceClassification if scored else AutoModelForCausalLM
    torch.manual_seed(seed)
    model: PreTrainedModel = cls.from_config(config, attn_implementation=attention)
    with torch.no_grad():  # as initialized, many models hardly attend
        for param in model.parameters():
            param.add_(0.2 * torch.randn(param.shape))
    config.architectures = [type(model).__name__]
    return model.eval()


def _results(
    objective: ObjectiveConfig, model: PreTrainedModel, reference: Any, data: SourceDataset, size: int, alone: Any
) -> tuple[float, dict[str, float], dict[str, torch.Tensor]]:
    """The loss of all pairs in micro-batches of `size`, the last one filled up, the metrics, and the gradients."""
    indices = [*range(len(data)), *[NO_WINDOW] * (-len(data) % size + size)]
    batches = [data.batch(indices[first : first + size]) for first in range(0, len(indices), size)]
    divisors = torch.tensor([sum(counts) for counts in zip(*map(objective.counts, batches), strict=True)])
    plain, total, sums = Plain(model), 0.0, StepSums(CustomFunctions(), alone)
    for batch in batches:
        step = ForwardPass(plain, to_device(batch, alone.device), divisors, sums, reference)
        loss = objective.terms(step).sum()
        loss.backward()
        total += loss.item()
    gradients = {name: param.grad.clone() for name, param in model.named_parameters() if param.grad is not None}
    model.zero_grad()
    return total, sums.means(sums.metrics().tolist()), gradients


def _close(one: Any, other: Any) -> None:
    assert one[0] == pytest.approx(other[0], rel=1e-5)
    assert one[1] == pytest.approx(other[1], rel=1e-5, abs=1e-5)
    assert one[2].keys() == other[2].keys()
    largest = max(float(gradient.abs().max()) for gradient in other[2].values())
    assert largest > 1e-4
    for name, gradient in one[2].items():
        torch.testing.assert_close(gradient, other[2][name], rtol=1e-4, atol=1e-5 * largest, msg=name)


OBJECTIVE_SETTINGS: dict[str, dict[str, Any]] = {
    "dpo": {"beta": 0.3, "label_smoothing": 0.1},
    "ipo": {},
    "orpo": {"beta": 0.7},
    "orpo with prompts": {"learn_prompts": True},
    "simpo": {},
}


@pytest.mark.parametrize(("family", "attention"), CASES)
def test_losses_metrics_and_gradients_are_those_of_rows(
    family: str, attention: str, rows: Path, alone: DistributedContext
) -> None:
    model, frozen = (_model(family, attention, seed, scored=False) for seed in (0, 1))
    check_shared_prompts(model.config, attention, LENGTH)
    use_loss_head(model, "auto", any_vocabulary=True)
    apart, packed = _samples(rows, packs=False), _samples(rows, packs=True)
    assert isinstance(packed, PackedPairs)
    assert 1 < len(packed) < 8
    reference = ModelReference(Plain(frozen), leaves_adapter_out=False)
    for name, settings in OBJECTIVE_SETTINGS.items():
        objective: Any = OBJECTIVES[name.split()[0]](**settings)
        expected = _results(objective, model, reference, apart, 5, alone)
        for size in (1, 3):
            _close(_results(objective, model, reference, packed, size, alone), expected)


SCORED = [case for case in CASES if case not in (("gemma3_text", "sdpa"), ("gemma3_text", "eager"))]


@pytest.mark.parametrize(("family", "attention"), SCORED)
def test_rewards_are_read_at_the_last_token_of_each_answer(
    family: str, attention: str, rows: Path, alone: DistributedContext
) -> None:
    model = _model(family, attention, 0, scored=True)
    check_shared_prompts(model.config, attention, LENGTH)
    objective = RewardConfig(center=0.1)
    expected = _results(objective, model, None, _samples(rows, packs=False, scored=True), 5, alone)
    assert expected[1]["rewards/margins"] != 0
    for size in (1, 3):
        _close(_results(objective, model, None, _samples(rows, packs=True, scored=True), size, alone), expected)


def test_what_was_computed_before_goes_with_its_pair(rows: Path, alone: DistributedContext) -> None:
    """Values of a reference, by the tokens of the chosen answer, whose order packing changes."""
    objective, model = OBJECTIVES["dpo"](), _model("llama", "sdpa", 0, scored=False)
    figures = []
    for packs in (False, True):
        data: Any = _samples(rows, packs=packs)
        values = -torch.as_tensor(data.kept).float()
        data = with_extras(data, EXTRA, values.numpy())
        report = evaluate_loss(model=Plain(model), dataset=data, micro_batch_size=2, context=alone,
                               objective=objective, reference=PrecomputedReference())  # fmt: skip
        figures.append({"loss": report.loss, "tokens": report.num_tokens, **report.metrics})
    assert figures[1] == pytest.approx(figures[0], rel=1e-5)


def _config(family: str, **values: Any) -> Any:
    config = AutoConfig.for_model(family, **values)
    config.architectures = [causal_class(config)]
    return config


@pytest.mark.parametrize(
    ("family", "attention", "words"),
    [
        ("bloom", "auto", "BloomForCausalLM cannot compute the prompt of two answers once: it takes no position_ids"),
        ("mamba", "auto", "MambaForCausalLM.*it takes no position_ids"),
        ("qwen3_next", "auto", r"Qwen3NextForCausalLM.*layers without attention \(linear_attention\)"),
        ("gpt_neo", "auto", "GPTNeoForCausalLM.*gives other results than each answer alone.*data.packing=false"),
        ("bert", "auto", "BertLMHeadModel.*gives other results than each answer alone"),
        ("llama", "flash_attention_2", "flash attention takes no masks. Set model.attention=sdpa"),
    ],
)
def test_models_that_cannot_are_refused_by_name(family: str, attention: str, words: str) -> None:
    with pytest.raises(ModelError, match=words):
        check_shared_prompts(_config(family), attention, 4096)


def test_a_window_that_no_row_exceeds_does_not_matter() -> None:
    check_shared_prompts(_config("gpt_neo"), "auto", 256)
