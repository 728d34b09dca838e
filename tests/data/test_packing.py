"""Packing: every token in exactly one window, few windows, and the same logits as without it in every model."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given, strategies as st
from transformers import AutoConfig, AutoModelForCausalLM

from fsdp_shard.data.config import DataConfig
from fsdp_shard.data.pipeline import prepare_held_out
from fsdp_shard.data.samples.batch import IGNORE_INDEX, NO_WINDOW
from fsdp_shard.data.samples.packing import PackedRows, best_fit
from fsdp_shard.data.samples.rows import CausalRows
from fsdp_shard.errors import ModelError
from fsdp_shard.models import check_packing
from tests.data.conftest import END, byte_tokenizer
from tests.data.data_files import write
from tests.support.prepared_data import in_order, prepare_data
from tests.support.tiny import causal_class

WORDS = ["the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "and", "then", "some", "more", "of", "it"]


@given(lengths=st.lists(st.integers(1, 20), max_size=60))
def test_best_fit(lengths: list[int]) -> None:
    windows = best_fit(np.asarray(lengths, np.int64), 20)
    assert sorted(place for window in windows for place in window) == list(range(len(lengths)))
    sums = [sum(lengths[place] for place in window) for window in windows]
    assert all(0 < total <= 20 for total in sums)
    assert len(windows) <= 11 / 9 * max(1, -(-sum(lengths) // 20)) + 6 / 9 or not lengths or max(lengths) > 6


def test_best_fit_takes_the_tightest_window() -> None:
    windows = best_fit(np.asarray([6, 7, 3, 4, 10, 9]), 10)
    assert sorted(sorted(window) for window in windows) == [[0, 3], [1, 2], [4], [5]]


def documents(path: Path, num_documents: int = 40) -> str:
    lines = [" ".join(WORDS[: 1 + n % 14]) + f" {n}" for n in range(num_documents)]
    return write(path, "\n".join(lines) + "\n")


def config_of(tmp_path: Path, packing: bool, length: int = 64) -> DataConfig:
    path = documents(tmp_path / "a.txt")
    return DataConfig(path=path, sample_by="line", packing=packing, sequence_length=length)


def test_every_token_is_predicted_once_and_documents_are_apart(tmp_path: Path) -> None:
    samples = prepare_data(config_of(tmp_path, True, 32), byte_tokenizer(), tmp_path / "cache")
    packed = in_order(samples.train)
    assert isinstance(packed, PackedRows)
    batch = packed.batch(range(len(packed)))
    seen = []
    for ids, labels, positions in zip(batch.input_ids, batch.labels, batch.inputs["position_ids"], strict=True):
        for piece in np.split(np.arange(32), np.flatnonzero(positions == 0)[1:]):
            if (labels[piece] != IGNORE_INDEX).any():
                assert positions[piece].tolist() == list(range(len(piece)))
                assert labels[piece][:-1].tolist() == ids[piece][1:].tolist()
                seen.append(bytes(ids[piece].tolist()) + bytes([labels[piece][-1] % 256]))
    text = (tmp_path / "a.txt").read_bytes().splitlines()
    pieces = [(line + b"\0")[at : at + 33] for line in text for at in range(0, len(line), 32)]  # END is 256
    assert sorted(seen) == sorted(pieces)
    full = (batch.labels != IGNORE_INDEX).mean()
    assert f"packed into {len(packed)} windows of 32 ({full:.1%} full)" in samples.notes[0]
    assert len(packed) * 32 < packed.num_predictions / 0.8
    (empty,) = packed.batch([NO_WINDOW]).labels
    assert (empty == IGNORE_INDEX).all()
    assert END in batch.labels


def test_any_windows_are_like_the_others(tmp_path: Path) -> None:
    """What is held out is the last or the first ones, and best fit makes those of long rows first."""
    lines = [f"{n:0{1 + n * 31 // 400}d}" for n in range(400)]
    path = write(tmp_path / "a.txt", "\n".join(lines) + "\n")
    config = DataConfig(path=path, sample_by="line", packing=True, sequence_length=32)
    packed = in_order(prepare_data(config, byte_tokenizer(), tmp_path / "cache").train)
    assert isinstance(packed, PackedRows)
    rows = np.diff(packed.starts)
    half = len(rows) // 2
    assert rows.max() > 1.5 * rows.min()
    assert 0.8 < rows[:half].mean() / rows[half:].mean() < 1.25
    again = in_order(prepare_data(config, byte_tokenizer(), tmp_path / "cache").train)
    assert isinstance(again, PackedRows)
    assert packed.kept.tolist() == again.kept.tolist()


def test_no_document_is_both_trained_and_held_out(tmp_path: Path) -> None:
    """A document of several windows would be, if windows were divided after packing, which shuffles them."""
    letters = "abcdefghijklmnopqrst"
    rows = "".join(json.dumps({"text": letter * (20 + 9 * place)}) + "\n" for place, letter in enumerate(letters))
    config = DataConfig(path=write(tmp_path / "a.jsonl", rows), packing=True, sequence_length=32, eval_fraction=0.2)
    samples = prepare_data(config, byte_tokenizer(), tmp_path / "cache")
    assert samples.held_out is not None
    trained, held_out = (
        {chr(label) for label in np.unique(data.batch(range(len(data))).labels) if 0 <= label < END}
        for data in (in_order(samples.train), samples.held_out)
    )
    assert trained | held_out == set(letters)
    assert held_out == set("rst"), "the last ones, of about a fifth of the tokens"
    assert not trained & held_out
    assert samples.notes[1].startswith(f"held out: the last 3 documents, packed into {len(samples.held_out)} windows")
    whole = prepare_data(replace(config, eval_fraction=0.0), byte_tokenizer(), tmp_path / "cache").train
    divided = [samples.train.identity, *(source.identity for source in samples.held_out.sources)]
    assert len({whole.identity, *divided}) == 3
    assert whole.identity.startswith(f"packed-1:{whole.num_samples}:CausalRows:"), "as that of steps saved before"


def test_tokens_of_documents_that_are_cut_are_counted_once(tmp_path: Path) -> None:
    """Neighboring pieces share a token; with its end token, each document has one more than its bytes."""
    rows = "".join(json.dumps({"text": "a" * length}) + "\n" for length in (5, 80, 200))
    config = DataConfig(path=write(tmp_path / "a.jsonl", rows), packing=True, sequence_length=32)
    note = prepare_data(config, byte_tokenizer(), tmp_path / "cache").notes[0]
    assert "3 documents, 288 tokens" in note


def test_an_evaluation_says_what_it_holds_out(tmp_path: Path) -> None:
    """Not what a run with the same settings trains on."""
    config = replace(config_of(tmp_path, True, 32), eval_fraction=0.2, cache_dir=str(tmp_path / "cache"))
    packed, note = prepare_held_out(config, byte_tokenizer())
    assert f"packed into {len(packed)} windows of 32" in note
    unpacked, note = prepare_held_out(replace(config, packing=False), byte_tokenizer())
    assert note.endswith(f"; the last {len(unpacked)} of these windows")


@pytest.mark.parametrize(("lengths", "warned"), [((5, 500), True), ((500, 5), False), ((5, 20), False)])
def test_far_more_held_out_than_asked_is_told(tmp_path: Path, lengths: tuple[int, ...], warned: bool) -> None:
    rows = "".join(json.dumps({"text": "a" * length}) + "\n" for length in lengths)
    path = write(tmp_path / "a.jsonl", rows)
    config = DataConfig(path=path, packing=True, sequence_length=32, eval_fraction=0.01)
    notes = prepare_data(config, byte_tokenizer(), tmp_path / "cache").notes
    found = [note for note in notes if note.startswith("warning: ")]
    assert len(found) == warned
    if warned:
        assert f"data.path={path}: 94% are held out, 16 windows of 17" in found[0]
        assert "data.eval_fraction=0.01 asks for less" in found[0]


def test_a_single_document_is_divided_itself(tmp_path: Path) -> None:
    config = DataConfig(
        path=write(tmp_path / "a.txt", "abc " * 100), packing=True, sequence_length=32, eval_fraction=0.25
    )
    samples = prepare_data(config, byte_tokenizer(), tmp_path / "cache")
    assert samples.held_out is not None
    assert (samples.train.num_samples, len(samples.held_out)) == (10, 3)
    assert samples.notes[1].startswith("held out: the end of the document, packed into 3 windows of 32")


SMALL = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 259,
    "intermediate_size": 48,
}
GPT = {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 259, "n_positions": 64, "rotary_dim": 4}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": SMALL | {"num_key_value_heads": 2},
    "mistral": SMALL | {"num_key_value_heads": 2, "sliding_window": 9},
    "qwen3": SMALL | {"num_key_value_heads": 2, "head_dim": 8},
    "gemma3_text": SMALL | {"num_key_value_heads": 2, "head_dim": 8, "sliding_window": 9, "layer_types": None},
    "gpt2": GPT,
    "gptj": GPT,
    "gpt_neox": SMALL,
    "mixtral": SMALL | {"num_key_value_heads": 2, "num_local_experts": 4},
}


def tiny(family: str, attention: str) -> Any:
    values = {key: value for key, value in FAMILIES[family].items() if value is not None}
    config = AutoConfig.for_model(family, **values)
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, attn_implementation=attention).eval()


@pytest.mark.parametrize(
    ("family", "attention"),
    [
        *((family, "sdpa") for family in FAMILIES if family != "gptj"),  # which has no sdpa
        *((family, "eager") for family in ("llama", "gemma3_text", "gpt2", "gptj")),
    ],
)
def test_logits_are_those_of_each_document_alone(tmp_path: Path, family: str, attention: str) -> None:
    model = tiny(family, attention)
    config = model.config
    config.architectures = [type(model).__name__]
    check_packing(config)
    packed = in_order(prepare_data(config_of(tmp_path, True), byte_tokenizer(), tmp_path / "cache").train)
    assert isinstance(packed, PackedRows)
    apart = CausalRows(packed.examples, np.arange(len(packed.examples)), 64)
    windows = sorted(range(len(packed)), key=lambda window: -len(packed.examples_of(window)))[:3]
    batch = packed.batch(windows)
    inputs = {name: torch.from_numpy(value) for name, value in batch.inputs.items()}
    with torch.no_grad():
        together = model(**inputs, use_cache=False).logits
        compared = 0
        for row, window in enumerate(windows):
            at = 0
            for place in packed.examples_of(window):
                alone = apart.batch([int(place)])
                length = int((alone.labels != IGNORE_INDEX).sum())
                ids = torch.from_numpy(alone.input_ids[:, :length])
                torch.testing.assert_close(
                    together[row : row + 1, at : at + length], model(input_ids=ids, use_cache=False).logits,
                    rtol=2e-5, atol=2e-6,
                )  # fmt: skip
                at += length
                compared += 1
        assert compared > 5


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (transformers.BloomConfig(architectures=["BloomForCausalLM"]), "BloomForCausalLM.*takes no position_ids"),
        (transformers.OPTConfig(architectures=["OPTForCausalLM"]), "OPTForCausalLM.*does not depend on positions"),
        (transformers.MambaConfig(architectures=["MambaForCausalLM"]), "MambaForCausalLM.*position_ids|no attention"),
        (transformers.Qwen3NextConfig(architectures=["Qwen3NextForCausalLM"]), "without attention"),
        (
            transformers.Lfm2Config(
                architectures=["Lfm2ForCausalLM"], num_hidden_layers=2, layer_types=["conv", "full_attention"]
            ),
            r"without attention \(conv\)",
        ),
    ],
    ids=["bloom", "opt", "mamba", "qwen3_next", "lfm2"],
)
def test_models_that_cannot_are_refused_by_name(config: Any, words: str) -> None:
    with pytest.raises(ModelError, match=words):
        check_packing(config)


def test_the_vocabulary_may_be_small() -> None:
    check_packing(transformers.Qwen3Config(architectures=["Qwen3ForCausalLM"], vocab_size=31, num_hidden_layers=2))
    check_packing(transformers.GPT2Config(architectures=["GPT2LMHeadModel"], vocab_size=31, n_layer=2))


def default_config(family: str) -> Any:
    config = AutoConfig.for_model(family)
    config.architectures = [causal_class(config)]
    return config


@pytest.mark.parametrize("family", ["gpt_oss", "afmoe"])
def test_masks_that_are_made_without_positions_are_found(family: str) -> None:
    """Both take positions, and hand them on to their layers, but not to transformers' functions that make masks."""
    with pytest.raises(ModelError, match="does not depend on positions"):
        check_packing(default_config(family))


def test_a_model_that_cannot_be_tried_is_refused() -> None:
    config = default_config("llama")
    config.hidden_act = "unknown"
    with pytest.raises(ModelError, match=r"LlamaForCausalLM.*a tiny model of this architecture.*does not run.*unknown"):
        check_packing(config)


@pytest.mark.parametrize("attention", ["sdpa", "flash_attention_2"])
def test_trying_a_model_leaves_all_as_it_was(attention: str) -> None:
    config = default_config("gemma3_text")
    before, state, threads = config.to_dict(), torch.get_rng_state(), torch.get_num_threads()
    check_packing(config, attention)
    assert torch.get_num_threads() == threads
    assert config.to_dict() == before
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("family", ["gpt_neo", "gptj", "gpt_bigcode", "persimmon", "llama4_text"])
def test_flash_attention_has_to_be_told_of_positions(family: str) -> None:
    config = default_config(family)
    check_packing(config, "sdpa")
    with pytest.raises(ModelError, match=r"do not pass positions to flash attention\. Set model\.attention=sdpa"):
        check_packing(config, "flash_attention_2")


@pytest.mark.parametrize("family", [*(family for family in FAMILIES if family != "gptj"), "gemma4_text"])
def test_flash_attention_is_told_of_positions(family: str) -> None:
    check_packing(default_config(family), "flash_attention_2")
