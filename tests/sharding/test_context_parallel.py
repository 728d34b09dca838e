"""Each sequence divided over 2 and 4 ranks, by both methods, against one rank: losses and gradients of families."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import nn
from transformers import AutoConfig
from transformers.masking_utils import causal_mask_function, sliding_window_causal_mask_function

from fsdp_shard.distributed import DistributedContext
from fsdp_shard.sharding import ContextRanks, attention_over
from fsdp_shard.sharding.context_parallel.attention import use_context_parallel
from fsdp_shard.sharding.context_parallel.masks import SequenceMask
from fsdp_shard.sharding.context_parallel.sequence_parts import WholeSequence, zigzag_chunks
from tests.support.ranks import on_ranks

BATCH, LENGTH, VOCABULARY, IGNORE_INDEX = 2, 22, 131, -100  # 22 is padded to 24 for 8 chunks
SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": VOCABULARY}
SMALL |= {"intermediate_size": 44, "max_position_embeddings": LENGTH, "pad_token_id": 0}
GQA = SMALL | {"num_key_value_heads": 2, "head_dim": 8}
WINDOW = GQA | {"sliding_window": 5}
MIXTURE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 20, "num_dense_layers": 1}
GPT: dict[str, Any] = {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": VOCABULARY, "n_positions": LENGTH}
GPT |= {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", GQA),
    "llama of 3 heads": ("llama", GQA | {"hidden_size": 36, "num_attention_heads": 3, "num_key_value_heads": 1}),
    "mistral": ("mistral", WINDOW),
    "qwen2": ("qwen2", GQA),
    "qwen3": ("qwen3", GQA),
    "gemma2": ("gemma2", WINDOW),  # caps its scores
    "gemma3": ("gemma3_text", WINDOW),
    "phi3": ("phi3", WINDOW),
    "gpt_neox": ("gpt_neox", SMALL),
    "gpt_oss": ("gpt_oss", WINDOW | {"num_local_experts": 4}),  # has sinks
    "gpt2": ("gpt2", GPT),  # positions from a table as long as a sequence
    "olmo2": ("olmo2", GQA),
    "starcoder2": ("starcoder2", GQA | {"attention_dropout": 0.0, "residual_dropout": 0.0, "embedding_dropout": 0.0}),
    "granite": ("granite", GQA),
    "cohere2": ("cohere2", WINDOW),
    "afmoe": ("afmoe", WINDOW | MIXTURE),  # views the output of its attention
    "jetmoe": ("jetmoe", GQA | MIXTURE | {"kv_channels": 8, "num_local_experts": 4}),
}
UNPACKED = ("gpt_oss", "afmoe")  # transformers' own masks of them do not keep documents apart, so packing is refused
METHODS = ("ulysses", "ring")
FAST = ("llama", "llama of 3 heads", "gemma2", "gpt_oss", "afmoe")
CASES = [pytest.param(name, marks=() if name in FAST else pytest.mark.slow) for name in FAMILIES]


def model_of(name: str) -> Any:
    kind, values = FAMILIES[name]
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **values))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)  # so that norms and biases are not all alike
    return model.train()


def batch_of(*, packed: bool) -> tuple[dict[str, Any], Any]:
    """Inputs and labels of two windows; packed documents begin elsewhere in each."""
    tokens = np.random.default_rng(1).integers(3, VOCABULARY, (BATCH, LENGTH + 1))
    inputs, labels = {"input_ids": tokens[:, :-1]}, tokens[:, 1:].copy()
    labels[0, :7] = IGNORE_INDEX
    if packed:
        lengths = ((4, 11, LENGTH - 15), (13, 1, LENGTH - 14))
        inputs["position_ids"] = np.stack([np.concatenate([np.arange(n) for n in row]) for row in lengths])
    return inputs, labels


def loss_of(model: Any, inputs: dict[str, Any], labels: Any) -> torch.Tensor:
    """The sum over the labels, by the number of those of the whole batch."""
    arguments = {name: torch.from_numpy(array) for name, array in inputs.items()}
    logits = model(**arguments, use_cache=False).logits.flatten(0, 1)
    count = BATCH * LENGTH - 7
    return (
        F.cross_entropy(logits, torch.from_numpy(labels).flatten(), reduction="sum", ignore_index=IGNORE_INDEX) / count
    )


def gradients_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: param.grad for name, param in model.named_parameters() if param.grad is not None}


def in_parts(context: DistributedContext, model: Any, method: str, *, packed: bool) -> tuple[float, dict[str, Any]]:
    """The loss and the gradients of all ranks together; each rank computes its part of the sequences."""
    divided = copy.deepcopy(model)
    use_context_parallel(divided, method)
    part = ContextRanks.of(context, method).own_part(*batch_of(packed=packed), ignore_index=IGNORE_INDEX)
    with attention_over(part.sequence):
        loss = loss_of(divided, part.inputs, part.labels)
    loss.backward()
    total = loss.detach().double()
    context.all_reduce_(total)
    grads = gradients_of(divided)
    for grad in grads.values():
        context.all_reduce_(grad)
    return float(total), grads


def compare(context: DistributedContext, name: str) -> dict[str, Any]:
    """For each method and batch, the differences of loss and gradients from those of the whole sequences."""
    found = {}
    model = model_of(name)
    methods = METHODS if model.config.num_attention_heads % context.world_size == 0 else METHODS[1:]
    for packed in (False, True)[: 1 if name in UNPACKED else 2]:
        whole = copy.deepcopy(model)
        expected = loss_of(whole, *batch_of(packed=packed))
        expected.backward()
        for method in methods:
            loss, grads = in_parts(context, model, method, packed=packed)
            by_name = gradients_of(whole)
            assert set(grads) == set(by_name)
            distance = max(float((grads[name] - by_name[name]).abs().max()) for name in grads)
            largest = max(float(grad.abs().max()) for grad in by_name.values())
            found[f"{method} {packed=}"] = abs(loss - float(expected.detach())), distance, largest
    return found


@pytest.mark.long
@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("name", CASES)
def test_losses_and_gradients_are_those_of_one_rank(name: str, num_ranks: int) -> None:
    """In float32: within 1e-5 and 1e-4."""
    found = on_ranks(num_ranks, compare, name, context_parallel=num_ranks)[0]
    assert len(found) == (2 if name in (*UNPACKED, "llama of 3 heads") else 4)
    for case, (of_loss, of_gradients, largest) in found.items():
        assert of_loss < 1e-5, case
        assert of_gradients < 1e-4, case
        assert largest > 0.01, case


@pytest.mark.parametrize("window", [None, 3, 9])
@pytest.mark.parametrize("lengths", [(48,), (5, 20, 23), (24, 24)])
def test_pairs_of_chunks_are_skipped_where_no_token_attends(window: int | None, lengths: tuple[int, ...]) -> None:
    positions = np.concatenate([np.arange(length) for length in lengths])[None]
    ranks = ContextRanks(zigzag_chunks(4))
    function = causal_mask_function if window is None else sliding_window_causal_mask_function(window)
    mask = SequenceMask(WholeSequence.of(ranks, positions), function, window)
    whole = mask.rectangle(slice(0, 48), slice(0, 48))[0, 0]
    num_skipped = 0
    for query in range(8):
        for key in range(8):
            block = whole[6 * query : 6 * query + 6, 6 * key : 6 * key + 6]
            assert mask.is_empty(query, key) == (not bool(block.any())), (query, key)
            assert not mask.is_full(query, key) or bool(block.all()), (query, key)
            num_skipped += mask.is_empty(query, key)
    assert mask.is_causal == (window is None and len(lengths) == 1)
    assert num_skipped > 28 or mask.is_causal


def test_every_rank_of_a_ring_has_as_many_pairs_of_tokens() -> None:
    for num_ranks in (1, 2, 3, 8):
        chunks = zigzag_chunks(num_ranks)
        assert sorted(sum(chunks, ())) == list(range(2 * num_ranks))
        assert len({sum(2 * chunk + 1 for chunk in own) for own in chunks}) == 1
