"""Adapters with trained rows of embeddings (peft's `trainable_token_indices`): merged as peft merges them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from fsdp_shard.checkpoint import convert, diff, verify
from fsdp_shard.checkpoint.location import locate
from fsdp_shard.errors import CheckpointError, ConfigError
from fsdp_shard.inference import load_dispatched
from tests.checkpoint.keys.peft_adapters import assert_same, by_peft, edit, save
from tests.support.runs import run_recipe
from tests.support.tiny import llama_config, save_model

_ROWS = [259, 3]  # a token that the tokenizer was extended by comes first
_EMBEDDING = "model.embed_tokens.weight"


@pytest.fixture
def base(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A model, tied or not, with a vocabulary that was extended."""
    model = AutoModelForCausalLM.from_pretrained(save_model(tmp_path / "original", tied=request.param))
    model.resize_token_embeddings(llama_config().vocab_size + 3, mean_resizing=False)
    save_model(tmp_path / "base", tied=request.param)
    model.save_pretrained(tmp_path / "base")
    return tmp_path / "base"


def adapter_of(base: Path, tokens: Any, *, embeddings: bool = False, **settings: Any) -> Path:
    model, adapter = AutoModelForCausalLM.from_pretrained(base), base.parent / "adapter"
    settings = {"target_modules": ["q_proj"], "trainable_token_indices": tokens, **settings}
    save(model, settings, adapter, save_embedding_layers=embeddings)
    return adapter


@pytest.mark.parametrize("base", [True, False], indirect=True, ids=["tied", "untied"])
@pytest.mark.parametrize("embeddings", [True, False])
@pytest.mark.parametrize("tokens", [_ROWS, {"embed_tokens": _ROWS}], ids=["list", "dict"])
def test_rows_are_replaced_as_by_peft(base: Path, tokens: Any, embeddings: bool, tmp_path: Path) -> None:
    adapter = adapter_of(base, tokens, embeddings=embeddings)
    theirs = by_peft(adapter, base)
    before = load_file(base / "model.safetensors")[_EMBEDDING]
    assert (theirs[_EMBEDDING] != before).any(dim=1).nonzero().flatten().tolist() == sorted(_ROWS)
    convert(adapter, tmp_path / "target")
    assert_same(AutoModelForCausalLM.from_pretrained(tmp_path / "target").state_dict(), theirs)
    assert verify(adapter).is_sound
    location = locate(adapter)
    with location.model_index as index:
        assert not index.notes
        assert torch.equal(index.read(_EMBEDDING, (slice(2, 5), slice(7, 9))), theirs[_EMBEDDING][2:5, 7:9])


@pytest.mark.parametrize("base", [False], indirect=True)
@pytest.mark.parametrize("embeddings", [True, False])
@pytest.mark.parametrize(
    ("tokens", "saved"),
    [({"embed_tokens": _ROWS, "lm_head": [5]}, None), ({"embed_tokens": _ROWS}, ["lm_head"])],
    ids=["rows of the head", "the whole head"],
)
def test_a_head_of_its_own(base: Path, tokens: Any, saved: list[str] | None, embeddings: bool) -> None:
    adapter = adapter_of(base, tokens, embeddings=embeddings, modules_to_save=saved)
    with locate(adapter).model_index as index:
        assert_same({name: index.read(name) for name in index.names}, by_peft(adapter, base))
        assert not index.notes


@pytest.mark.parametrize("base", [True], indirect=True)
@pytest.mark.parametrize("stores_both", [True, False])
@pytest.mark.parametrize("tokens", [_ROWS, {"embed_tokens": _ROWS, "lm_head": _ROWS}], ids=["list", "the same rows"])
def test_tied_tensors_that_the_base_stores_both(base: Path, tokens: Any, stores_both: bool, tmp_path: Path) -> None:
    adapter = adapter_of(base, tokens)
    if stores_both:
        tensors = load_file(base / "model.safetensors")
        save_file({**tensors, "lm_head.weight": tensors[_EMBEDDING].clone()}, base / "model.safetensors")
    theirs = by_peft(adapter, base)
    assert torch.equal(theirs["lm_head.weight"], theirs[_EMBEDDING])
    convert(adapter, tmp_path / "target")
    assert_same(AutoModelForCausalLM.from_pretrained(tmp_path / "target").state_dict(), theirs)
    assert verify(tmp_path / "target").is_sound
    load_dispatched(adapter)


@pytest.mark.parametrize("base", [False], indirect=True)
def test_in_another_dtype_and_from_a_dispatched_model(base: Path) -> None:
    adapter = adapter_of(base, _ROWS)
    AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16).save_pretrained(base)
    tokens = torch.tensor([[3, 259, 7]])
    theirs = AutoModelForCausalLM.from_pretrained(base)
    theirs.load_state_dict(by_peft(adapter, base))
    ours = load_dispatched(adapter, "disk")
    assert ours.dtype == torch.bfloat16
    with torch.inference_mode():
        assert torch.equal(ours(input_ids=tokens).logits, theirs(input_ids=tokens).logits)


@pytest.mark.parametrize("base", [True], indirect=True)
@pytest.mark.parametrize("embeddings", [True, False])
def test_rows_of_only_a_tied_head_are_refused(base: Path, embeddings: bool) -> None:
    adapter = adapter_of(base, {"embed_tokens": _ROWS, "lm_head": [5]}, embeddings=embeddings)
    with pytest.raises(CheckpointError, match=r"changes lm_head\.weight, which .*base ties to another tensor"):
        convert(adapter, base.parent / "target")


@pytest.mark.parametrize("base", [False], indirect=True)
def test_what_does_not_fit_is_refused(base: Path) -> None:
    adapter = adapter_of(base, _ROWS)

    def refused(words: str, tokens: Any = _ROWS, model: Path = base) -> None:
        edit(adapter, {"trainable_token_indices": tokens, "base_model_name_or_path": str(model)}, None)
        with pytest.raises(CheckpointError, match=words):
            locate(adapter).model_index.close()

    refused(
        r"changes row 259 of .*embed_tokens\.weight, and its base has 257\. If the voc", model=base.parent / "original"
    )
    refused(r"trainable_tokens_delta has shape \[2, 36\], but .*embed_tokens\.weight", [1, 2, 3])
    refused("trainable_token_indices has lm_head, but the adapter has no rows of it", {"": _ROWS, "lm_head": [5]})
    for wrong in ([3, 3], [-1, 3], "3", {"embed_tokens": 3}, [True, 3]):
        refused("trainable_token_indices is .* expected different numbers of tokens", wrong)
    edit(adapter, {"trainable_token_indices": _ROWS, "base_model_name_or_path": str(base)}, lambda tensors: {
        name: tensor * 1e9 for name, tensor in tensors.items()
    })  # fmt: skip
    AutoModelForCausalLM.from_pretrained(base, dtype=torch.float16).save_pretrained(base)
    with locate(adapter).model_index as index, pytest.raises(CheckpointError, match="too large for F16"):
        index.read(_EMBEDDING)


@pytest.mark.parametrize("base", [False], indirect=True)
def test_adapters_that_differ_in_the_rows_are_different(base: Path) -> None:
    adapter = adapter_of(base, _ROWS)
    other = adapter.rename(base.parent / "other")
    adapter_of(base, _ROWS)
    assert diff(adapter, other).is_equal
    edit(other, {"trainable_token_indices": [*reversed(_ROWS)]}, None)
    assert not diff(adapter, other).is_equal


@pytest.mark.parametrize("base", [False], indirect=True)
def test_it_can_be_neither_switched_nor_trained_on(base: Path, tmp_path: Path) -> None:
    adapter = adapter_of(base, _ROWS)
    with pytest.raises((CheckpointError, ConfigError), match="trainable_tokens_delta, and only adapters that are prod"):
        load_dispatched(base, adapters={"one": adapter})
    (tmp_path / "text.txt").write_text("The quick brown fox. " * 99)
    settings = [f"model.path={base}", f"data.path={tmp_path / 'text.txt'}", "data.sequence_length=16", "train.steps=1"]
    ended = run_recipe("finetune", tmp_path / "run", *settings, "adapter=lora", f"adapter.path={adapter}")
    assert ended.status == 2
    assert "has rows of embeddings, and only an adapter of layers with one matrix can be trained on" in ended.err
