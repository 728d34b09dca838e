"""Families of models, tiny and random, on two ranks against a plain loop in one process."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers
from transformers import AutoConfig

from fsdp_shard.checkpoint import locate
from fsdp_shard.data import (
    Dataset,
    Examples,
    LabeledRows,
    MaskedWindows,
    Seq2SeqRows,
    ShuffledDataset,
    SourceDataset,
    SpecialTokens,
    WindowDataset,
)
from fsdp_shard.distributed import DistributedContext
from fsdp_shard.models import ModelConfig
from fsdp_shard.sharding.registry import WRAPPERS
from fsdp_shard.training import TrainConfig, TrainerState, TrainingRun, load_sharded, train
from tests.support.ranks import on_ranks

SEED, STEPS, BATCH, LR = 4, 3, 4, 0.2
SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 131}
SMALL |= {"intermediate_size": 44, "max_position_embeddings": 64}
GQA = SMALL | {"num_key_value_heads": 2, "head_dim": 8}
GPT: dict[str, Any] = {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 131, "n_positions": 64, "rotary_dim": 4}
GPT |= {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
T5 = {"d_model": 32, "d_kv": 8, "d_ff": 45, "num_layers": 2, "num_heads": 4, "vocab_size": 131, "dropout_rate": 0.0}
SWITCH = T5 | {"num_sparse_encoder_layers": 2, "num_sparse_decoder_layers": 2, "num_experts": 8}
SWITCH |= {"router_jitter_noise": 0.0}  # of its experts, some run on one rank only
M2M: dict[str, Any] = {
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_ffn_dim": 45,
    "decoder_ffn_dim": 45,
}
M2M |= {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "vocab_size": 131, "max_position_embeddings": 64}
M2M |= {"dropout": 0.0, "attention_dropout": 0.0, "encoder_layerdrop": 0.0, "decoder_layerdrop": 0.0}
BERT = SMALL | {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
# No dimensions are left for a part of its output head: a parameter without elements.
MOBILEBERT = BERT | {"embedding_size": 32, "intra_bottleneck_size": 16}
EMPTY = "Initializing zero-element tensors"
# Name -> class of the model, type and values of its config.
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", "llama", GQA),
    "mistral": ("MistralForCausalLM", "mistral", GQA | {"sliding_window": 5}),
    "qwen3": ("Qwen3ForCausalLM", "qwen3", GQA),
    "gemma3": ("Gemma3ForCausalLM", "gemma3_text", GQA | {"sliding_window": 5}),
    "gpt2": ("GPT2LMHeadModel", "gpt2", GPT),
    "gptj": ("GPTJForCausalLM", "gptj", GPT),
    "gpt_neox": ("GPTNeoXForCausalLM", "gpt_neox", SMALL),
    "opt": ("OPTForCausalLM", "opt", SMALL | {"ffn_dim": 45, "word_embed_proj_dim": 32, "dropout": 0.0}),
    "gemma2": ("Gemma2ForCausalLM", "gemma2", GQA | {"sliding_window": 5}),
    "gpt_oss": ("GptOssForCausalLM", "gpt_oss", GQA | {"num_local_experts": 4, "sliding_window": 5}),
    "mamba": ("MambaForCausalLM", "mamba", {"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 131}),
    "rwkv": ("RwkvForCausalLM", "rwkv", {"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 131}),
    "bloom": ("BloomForCausalLM", "bloom", SMALL | {"n_layer": 2, "n_head": 4}),
    "mixtral": ("MixtralForCausalLM", "mixtral", GQA | {"num_local_experts": 4}),
    "t5": ("T5ForConditionalGeneration", "t5", T5),
    "t5 with a head": ("T5ForConditionalGeneration", "t5", T5 | {"tie_word_embeddings": False}),
    "switch": ("SwitchTransformersForConditionalGeneration", "switch_transformers", SWITCH),
    "m2m_100": ("M2M100ForConditionalGeneration", "m2m_100", M2M),
    "bert": ("BertForMaskedLM", "bert", BERT),
    "mobilebert": ("MobileBertForMaskedLM", "mobilebert", MOBILEBERT),
    "bert classifier": ("BertForSequenceClassification", "bert", BERT | {"num_labels": 3}),
}
UNDER_FSDP1 = ("gpt2", "mixtral", "t5", "bert", "mobilebert")
MASKED = ("bert", "mobilebert")
SEQ2SEQ = ("t5", "t5 with a head", "switch", "m2m_100")
CASES = [*((name, "fsdp2") for name in FAMILIES), *((name, "fsdp1") for name in UNDER_FSDP1)]


def samples_of(name: str) -> SourceDataset:
    """Random samples of the kind that the model is trained on."""
    tokens = np.random.default_rng(1).integers(3, 131, 360)
    if name in MASKED:
        return MaskedWindows(tokens, 16, "random", SpecialTokens(2, (0,), (1,), 131), 0.3, SEED)
    if name in SEQ2SEQ or name == "bert classifier":
        lengths = np.random.default_rng(2).integers(6, 15, 30)
        ends = np.cumsum(lengths)
        examples = Examples(tokens, np.ones(len(tokens)), ends, np.full(30, 4), np.arange(30) % 3, "random")
        if name in SEQ2SEQ:
            return Seq2SeqRows(examples, np.arange(30), 16, "", 8, 0)
        return LabeledRows(examples, np.arange(30), 16, "", (2, 0, 1))
    return WindowDataset(tokens, 12, "random")


def fresh(name: str) -> Any:
    cls, kind, values = FAMILIES[name]
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **values)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", EMPTY)
        model = getattr(transformers, cls)._from_config(config)
    with torch.no_grad():
        if values.get("tie_word_embeddings") is False:  # which the class does not obey
            model.lm_head.weight = torch.nn.Parameter(torch.randn_like(model.lm_head.weight) * 0.1)
            model.all_tied_weights_keys.pop("lm_head.weight")
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)  # so that norms and biases are not all alike
    return model


def data_of(name: str) -> Dataset:
    return ShuffledDataset(samples_of(name), SEED)


def plain_losses(model: Any, data: Dataset) -> list[float]:
    optimizer = torch.optim.SGD(model.train().parameters(), lr=LR)
    losses = []
    for step in range(STEPS):
        batch = data.batch(range(step * BATCH, (step + 1) * BATCH))
        logits = model(**{key: torch.from_numpy(value) for key, value in batch.inputs.items()}).logits
        loss = F.cross_entropy(logits.flatten(0, -2), torch.from_numpy(batch.labels).flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def _sharded_losses(context: DistributedContext, root: Path) -> dict[tuple[str, str], list[float] | str]:
    warnings.filterwarnings("ignore", EMPTY)
    results: dict[tuple[str, str], Any] = {}
    config = TrainConfig(
        steps=STEPS, global_batch_size=BATCH, micro_batch_size=1, max_grad_norm=None, schedule="constant"
    )
    for name, wrapper in CASES:
        results[name, wrapper] = _one(context, root, name, wrapper, config)
    return results


def _one(context: DistributedContext, root: Path, name: str, wrapper: str, config: TrainConfig) -> Any:
    try:
        settings = ModelConfig(path=str(root / name))
        loaded = load_sharded(settings, WRAPPERS[wrapper](param_dtype="float32"), locate(settings.path), context)
        data = data_of(name)
        optimizer = torch.optim.SGD(loaded.model.module.parameters(), lr=LR)
        run = TrainingRun(loaded.model, optimizer, data, config, context, TrainerState(SEED, data.identity))
        return [report.loss for report in train(run)]
    except Exception as error:  # all ranks fail alike, and the other families are to be seen too
        return f"{type(error).__name__}: {error}"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[tuple[str, str], list[float]]]:
    root = tmp_path_factory.mktemp("families")
    for name in FAMILIES:
        fresh(name).save_pretrained(root / name)
    file = root / "m2m_100" / "config.json"  # as published: ranks would drop different layers
    file.write_text(file.read_text().replace('layerdrop": 0.0', 'layerdrop": 0.5'))
    sharded = on_ranks(2, _sharded_losses, root)[0]
    return {"sharded": sharded, "plain": {case: plain_losses(fresh(case[0]), data_of(case[0])) for case in CASES}}


@pytest.mark.long
@pytest.mark.parametrize("case", CASES, ids=" ".join)
def test_losses_are_those_of_one_process(runs: dict[str, Any], case: tuple[str, str]) -> None:
    plain = runs["plain"][case]
    assert runs["sharded"][case] == pytest.approx(plain, rel=2e-5)
    assert abs(plain[-1] - plain[0]) > 1e-3, "the weights moved"
