"""Adapters whose settings and tensors contradict each other: what peft makes of the same files, or one clear error."""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    GemmaConfig,
    GPT2Config,
    VisionEncoderDecoderConfig,
    VisionEncoderDecoderModel,
    ViTConfig,
)

from fsdp_shard.checkpoint import convert, diff, verify
from fsdp_shard.checkpoint.location import locate
from fsdp_shard.errors import CheckpointError
from tests.checkpoint.keys.peft_adapters import Change, Tensors, assert_same, by_peft, edit, save
from tests.support.tiny import save_model

_P = "base_model.model."
_Q = f"{_P}model.layers.0.self_attn.q_proj."
_K = f"{_P}model.layers.0.self_attn.k_proj."
_NORM = f"{_P}model.norm."


def renamed(old: str, new: str) -> Change:
    return lambda tensors: {name.replace(old, new): tensor for name, tensor in tensors.items()}


def without(*parts: str) -> Change:
    return lambda tensors: {name: t for name, t in tensors.items() if not all(part in name for part in parts)}


def plus(**more: torch.Tensor) -> Change:
    return lambda tensors: {**tensors, **more}


def factors(change: Callable[[torch.Tensor], torch.Tensor], which: str = "lora_A") -> Change:
    return lambda tensors: {name: change(t) if which in name else t for name, t in tensors.items()}


def other_names(tensors: Tensors) -> Tensors:
    swap = {"lora_A": "lora_B", "lora_B": "lora_A"}
    return {re.sub("lora_[AB]", lambda found: swap[found[0]], name): t.T for name, t in tensors.items()}


_ERRORS_OF_PEFT = (TypeError, ValueError, KeyError, AttributeError, RuntimeError, ArithmeticError, re.error)

# (adapter to start from, changed settings, change of the tensors). None removes a setting.
Case = tuple[str, dict[str, Any], Change | None]

# peft merges these, some with a warning; the result is the same here.
SAME: dict[str, Case] = {
    "nothing": ("plain", {}, None),
    "initial values in capital letters": ("plain", {"init_lora_weights": "Gaussian"}, None),
    "an empty layers_pattern": ("plain", {"layers_to_transform": [0, 1], "layers_pattern": ""}, None),
    "alpha 0": ("plain", {"lora_alpha": 0}, None),
    "alpha below 0": ("plain", {"lora_alpha": -7}, None),
    "no alpha": ("plain", {"lora_alpha": None}, None),
    "rslora": ("plain", {"use_rslora": True}, None),
    "fan_in_fan_out": ("plain", {"fan_in_fan_out": True}, None),
    "rank_pattern of all": ("plain", {"r": 5, "rank_pattern": {"q_proj": 2, "down_proj": 2}}, None),
    "rank_pattern of none": ("plain", {"rank_pattern": {"zzz": 4}}, None),
    "alpha_pattern": ("plain", {"alpha_pattern": {"0.self_attn.q_proj": 70, "q_proj": 3}}, None),
    "alpha_pattern from the start": ("plain", {"alpha_pattern": {"^model.layers.0.self_attn.q_proj": 70}}, None),
    "alpha_pattern with peft's prefix": (
        "plain",
        {"alpha_pattern": {f"{_P}model.layers.0.self_attn.q_proj": 70}},
        None,
    ),
    "one target less": ("plain", {"target_modules": ["q_proj"]}, None),
    "one target more": ("plain", {"target_modules": ["q_proj", "down_proj", "k_proj"]}, None),
    "an unknown target": ("plain", {"target_modules": ["q_proj", "down_proj", "zzz"]}, None),
    "all-linear": ("plain", {"target_modules": "All-Linear"}, None),
    "all-linear and a norm": (
        "plain",
        {"target_modules": "all-linear"},
        plus(**{f"{_NORM}weight": torch.ones(36) * 2}),
    ),
    "targets by a pattern": ("plain", {"target_modules": r".*0.*\.(q_proj|down_proj)"}, None),
    "targets by full names": ("plain", {"target_modules": ["model.layers.0.self_attn.q_proj"]}, None),
    "excluded by name": ("plain", {"exclude_modules": ["q_proj"]}, None),
    "excluded by pattern": ("plain", {"exclude_modules": r".*layers\.0.*"}, None),
    "one layer": ("plain", {"layers_to_transform": 0}, None),
    "some layers": ("plain", {"layers_to_transform": [1]}, None),
    "no layers": ("plain", {"layers_to_transform": []}, None),
    "layers of a list": ("plain", {"layers_to_transform": [0], "layers_pattern": ["h", "layers"]}, None),
    "full names whatever the layer": (
        "plain",
        {"layers_to_transform": [1], "target_modules": ["model.layers.0.self_attn.q_proj", "down_proj"]},
        None,
    ),
    "a parameter of none": ("plain", {"target_parameters": ["zzz"]}, None),
    "an unknown module to save": ("plain", {"modules_to_save": ["zzz"]}, None),
    "biases that are not there": ("plain", {"bias": "all"}, None),
    "an unknown setting": ("plain", {"of_a_later_version": 1}, None),
    "tensors with the adapter's name": ("plain", {}, renamed(".weight", ".default.weight")),
    "one layer's tensors": ("plain", {}, without("layers.1.")),
    "no tensors of a module": ("plain", {}, without("layers.0.self_attn.q_proj")),
    "tensors of a module more": (
        "plain",
        {},
        plus(**{f"{_K}lora_A.weight": torch.ones(2, 36), f"{_K}lora_B.weight": torch.ones(12, 2)}),
    ),
    "a norm": ("plain", {}, plus(**{f"{_NORM}weight": torch.ones(36) * 2})),
    "a norm in the way of a state dict": (
        "plain",
        {},
        plus(**{f"{_NORM}modules_to_save.default.weight": torch.ones(36) * 2}),
    ),
    "an adapted weight": ("plain", {}, plus(**{f"{_Q}weight": torch.ones(36, 36)})),
    "an adapted weight's base": ("plain", {}, plus(**{f"{_Q}base_layer.weight": torch.ones(36, 36)})),
    "a base of what is not adapted": ("plain", {}, plus(**{f"{_K}base_layer.weight": torch.ones(12, 36)})),
    "float16 factors": ("plain", {}, factors(torch.Tensor.half)),
    "float64 factors": ("plain", {}, factors(torch.Tensor.double)),
    "float8 factors": ("plain", {}, factors(lambda t: t.to(torch.float8_e4m3fn))),
    "an embedding": ("embedding", {}, None),
    "an embedding without its base": ("embedding", {}, without("base_layer")),
    "a head": ("head", {}, None),
    "a head that is not named": ("head", {"modules_to_save": None}, None),
    "a head that is adapted too": ("head", {"target_modules": ["q_proj", "lm_head"]}, None),
    "a head, and one layer": ("head", {"layers_to_transform": [0]}, None),
    "DoRA of layers and an embedding": ("dora", {}, None),
    "DoRA of layers and an embedding, rslora": ("dora", {"use_rslora": True}, None),
    "DoRA in one layer": ("dora", {"layers_to_transform": [1]}, None),
    "DoRA without tensors of a module": ("dora", {}, without("layers.0.self_attn.q_proj")),
    "DoRA in the way of a state dict": ("dora", {}, renamed("magnitude_vector", "magnitude_vector.default.weight")),
    "DoRA of bfloat16": ("dora", {}, factors(torch.Tensor.bfloat16, "lora_")),
}

# peft raises an exception.
REFUSED: dict[str, Case] = {
    "a module, and its weight as a parameter": ("plain", {"target_parameters": ["q_proj.weight"]}, None),
    "a parameter with dora": ("dora", {"target_parameters": ["k_proj.weight"]}, None),
    "alpha as text": ("plain", {"lora_alpha": "7"}, None),
    "alpha of 400 digits": ("plain", {"lora_alpha": 10**400}, None),
    "rank 3": ("plain", {"r": 3}, None),
    "rank 0": ("plain", {"r": 0}, None),
    "rank as text": ("plain", {"r": "2"}, None),
    "rank 2.0": ("plain", {"r": 2.0}, None),
    "no rank": ("plain", {"r": None}, None),
    "rank_pattern": ("plain", {"rank_pattern": {"q_proj": 4}}, None),
    "rank_pattern as a list": ("plain", {"rank_pattern": ["q_proj"]}, None),
    "a pattern that is none": ("plain", {"alpha_pattern": {"q_proj(": 1}}, None),
    "no target is there": ("plain", {"target_modules": ["zzz"]}, None),
    "no targets": ("plain", {"target_modules": []}, None),
    "a pattern of a part": ("plain", {"target_modules": "q_proj"}, None),
    "a norm as a target": ("plain", {"target_modules": ["q_proj", "input_layernorm"]}, None),
    "a block as a target": ("plain", {"target_modules": ["q_proj", "self_attn"]}, None),
    "a number as a target": ("plain", {"target_modules": 5}, None),
    "all excluded": ("plain", {"exclude_modules": ["q_proj", "down_proj"]}, None),
    "a layer too far": ("plain", {"layers_to_transform": [7]}, None),
    "layers as text": ("plain", {"layers_to_transform": "0"}, None),
    "layers and a pattern": ("plain", {"layers_to_transform": [0], "target_modules": ".*q_proj"}, None),
    "another list of layers": ("plain", {"layers_to_transform": [0], "layers_pattern": "h"}, None),
    "a list of layers alone": ("plain", {"layers_pattern": "layers"}, None),
    "a head that is not there": ("plain", {"modules_to_save": ["lm_head"]}, None),
    "an adapted module to save": ("plain", {"modules_to_save": ["q_proj"]}, None),
    "another bias": ("plain", {"bias": "some"}, None),
    "another type": ("plain", {"peft_type": "lora"}, None),
    "a norm of another model": ("plain", {}, plus(**{f"{_NORM}weight": torch.ones(35)})),
    "A for B": ("plain", {}, other_names),
    "factors of 3 dimensions": ("plain", {}, factors(lambda t: t[None], "lora_")),
    "magnitudes of other layers": ("dora", {}, factors(lambda t: t[:-1], "magnitude")),
}

# peft goes on with what is not the adapter that was trained.
REFUSED_HERE: dict[str, Case] = {
    "alpha NaN": ("plain", {"lora_alpha": math.nan}, None),
    "alpha infinite": ("plain", {"lora_alpha": math.inf}, None),
    "alpha too large": ("plain", {"lora_alpha": 1e308}, None),
    "alpha_pattern NaN": ("plain", {"alpha_pattern": {"q_proj": math.nan}}, None),
    "a factor NaN": ("plain", {}, factors(lambda t: t * math.nan)),
    "factors too large": ("plain", {}, factors(lambda t: t * 1e30, "lora_")),
    "no target_modules": ("plain", {"target_modules": None}, None),
    "DoRA without magnitudes": ("plain", {"use_dora": True}, None),
    "DoRA without magnitudes of a module": ("dora", {}, without("layers.0.self_attn.q_proj", "magnitude")),
    "DoRA with a magnitude NaN": ("dora", {}, factors(lambda t: t * math.nan, "magnitude")),
    "DoRA that is not named": ("plain", {}, plus(**{f"{_Q}lora_magnitude_vector": torch.ones(36)})),
    "a bias of a factor": ("plain", {}, plus(**{f"{_Q}lora_B.bias": torch.ones(36)})),
    "random where tensors lack": ("plain", {"init_lora_weights": False}, without("layers.0.self_attn.q_proj")),
    "integers": ("plain", {}, factors(lambda t: (t * 100).int())),
    "an integer norm": ("plain", {}, plus(**{f"{_NORM}weight": torch.ones(36).int()})),
    "names of another adapter": ("plain", {}, renamed(".weight", ".other.weight")),
    "two names of a factor": ("plain", {}, plus(**{f"{_Q}lora_A.default.weight": torch.ones(2, 36)})),
    "two adapters": ("plain", {}, plus(**{f"{_Q}lora_A.other.weight": torch.ones(2, 36)})),
    "no prefix": ("plain", {}, renamed(_P, "")),
    "A alone": ("plain", {}, without("layers.0.self_attn.q_proj", "lora_B")),
    "B alone": ("plain", {}, without("layers.0.self_attn.q_proj", "lora_A")),
    "a layer too many": ("plain", {}, lambda tensors: {**tensors, **renamed("layers.1", "layers.7")(tensors)}),
    "a tensor of no module": ("plain", {}, plus(**{f"{_P}model.zzz.weight": torch.ones(2)})),
    "names of an embedding": (
        "plain",
        {},
        lambda tensors: {re.sub(r"lora_([AB])\.weight", r"lora_embedding_\1", name): t for name, t in tensors.items()},
    ),
    "an embedding by the names of others": (
        "embedding",
        {},
        lambda tensors: {re.sub(r"lora_embedding_([AB])$", r"lora_\1.weight", name): t for name, t in tensors.items()},
    ),
}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model `base`, and adapters of it with tensors that are all trained."""
    root = tmp_path_factory.mktemp("adapters")
    save_model(root / "base", tied=False)
    kinds: dict[str, dict[str, Any]] = {
        "plain": {"target_modules": ["q_proj", "down_proj"]},
        "embedding": {"target_modules": ["q_proj", "embed_tokens"]},
        "head": {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
        "dora": {"target_modules": ["q_proj", "down_proj", "embed_tokens"], "use_dora": True},
    }
    for name, settings in kinds.items():
        save(AutoModelForCausalLM.from_pretrained(root / "base"), settings, root / name)
    return root


def made(root: Path, tmp_path: Path, case: Case) -> Path:
    start, settings, change = case
    adapter = Path(shutil.copytree(root / start, tmp_path / "adapter"))
    edit(adapter, settings, change)
    return adapter


def by_us(adapter: Path) -> Tensors:
    with locate(adapter).model_index as index:
        return {name: index.read(name) for name in index.names}


@pytest.mark.parametrize("name", SAME)
def test_is_what_peft_makes_of_it(name: str, root: Path, tmp_path: Path) -> None:
    adapter = made(root, tmp_path, SAME[name])
    assert_same(by_us(adapter), by_peft(adapter, root / "base"))


@pytest.mark.parametrize("name", REFUSED)
def test_is_refused_as_by_peft(name: str, root: Path, tmp_path: Path) -> None:
    adapter = made(root, tmp_path, REFUSED[name])
    with pytest.raises(_ERRORS_OF_PEFT):
        by_peft(adapter, root / "base")
    assert_refused(adapter)


@pytest.mark.parametrize("name", REFUSED_HERE)
def test_is_refused_where_peft_goes_on(name: str, root: Path, tmp_path: Path) -> None:
    adapter = made(root, tmp_path, REFUSED_HERE[name])
    by_peft(adapter, root / "base")
    assert_refused(adapter)


def assert_refused(adapter: Path) -> None:
    """One line that names the adapter, from reading and from verify."""
    with pytest.raises(CheckpointError) as caught:
        by_us(adapter)
    message = str(caught.value)
    assert str(adapter) in message
    assert "\n" not in message
    assert message in [problem.message for problem in verify(adapter).problems]


@pytest.mark.parametrize(
    "settings",
    [
        {"target_modules": "(.*.*)*.*(.*.*)*q_projx"},
        {"exclude_modules": "(.*.*)*.*(.*.*)*q_projx"},
        {"rank_pattern": {"(.*.*)*.*(.*.*)*q_projx": 4}},
    ],
    ids=lambda settings: next(iter(settings)),
)
def test_a_pattern_that_never_ends_is_refused(
    settings: dict[str, Any], root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FSDP_SHARD_LIMITS", "build_seconds=0.3")
    adapter = made(root, tmp_path, ("plain", settings, None))
    with pytest.raises(CheckpointError, match=r"patterns .*FSDP_SHARD_LIMITS=build_seconds=VALUE"):
        by_us(adapter)


def test_what_is_left_out_is_said(root: Path, tmp_path: Path) -> None:
    adapter = made(root, tmp_path, ("plain", {"target_modules": ["q_proj", "k_proj"]}, None))
    absent, left_out = locate(adapter).model_index.notes
    assert "without tensors for model.layers.0.self_attn.k_proj, model.layers.1.self_attn.k_proj, which stay" in absent
    assert f"left out {_P}model.layers.0.mlp.down_proj.lora_A.weight" in left_out
    assert [problem.message for problem in verify(adapter).problems] == [absent, left_out]


@pytest.mark.parametrize("dora", [True, False])
@pytest.mark.parametrize("says", [True, False])
def test_transposed_layers_are_known_by_their_class(says: bool, dora: bool, tmp_path: Path) -> None:
    """GPT-2's square weights are stored transposed, whatever the adapter says; peft asks the module."""
    base = AutoModelForCausalLM.from_config(GPT2Config(n_embd=12, n_layer=1, n_head=2, n_positions=16))
    base.save_pretrained(tmp_path / "base")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    settings = {"target_modules": ["c_attn", "attn.c_proj"], "fan_in_fan_out": True, "use_dora": dora}
    save(model, settings, tmp_path / "adapter")
    edit(tmp_path / "adapter", {"fan_in_fan_out": says}, None)
    theirs = by_peft(tmp_path / "adapter", tmp_path / "base")
    theirs.pop("lm_head.weight")
    assert_same(by_us(tmp_path / "adapter"), theirs)
    (tmp_path / "base" / "config.json").unlink()
    if says:  # without a class, only the shape tells
        with pytest.raises(CheckpointError, match=r"fan_in_fan_out is set, but .*attn\.c_proj is stored"):
            by_us(tmp_path / "adapter")


@pytest.mark.parametrize("saved", [["c_fc"], ["mlp"], ["c_attn", "mlp"]])
def test_biases_of_modules_that_are_saved_whole(saved: list[str], tmp_path: Path) -> None:
    """With bias=all, peft stores them three times, under names of its own modules, too."""
    base = AutoModelForCausalLM.from_config(GPT2Config(n_embd=12, n_layer=1, n_head=2, n_positions=16))
    base.save_pretrained(tmp_path / "base")
    settings = {"target_modules": ["attn.c_proj"], "modules_to_save": saved, "bias": "all"}
    save(AutoModelForCausalLM.from_pretrained(tmp_path / "base"), settings, tmp_path / "adapter")
    stored = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert any(".modules_to_save." in name for name in stored)
    assert any(".original_module." in name for name in stored)
    theirs = by_peft(tmp_path / "adapter", tmp_path / "base")
    theirs.pop("lm_head.weight")
    assert_same(by_us(tmp_path / "adapter"), theirs)
    assert verify(tmp_path / "adapter").is_sound
    assert not locate(tmp_path / "adapter").model_index.notes


def test_transposed_layers_of_a_part_are_known_by_its_class(tmp_path: Path) -> None:
    vision = ViTConfig(
        hidden_size=12, num_hidden_layers=1, num_attention_heads=2, intermediate_size=20, image_size=8, patch_size=4
    )
    text = GPT2Config(n_embd=12, n_layer=1, n_head=2, n_positions=16, vocab_size=31, add_cross_attention=True)
    config = VisionEncoderDecoderConfig.from_encoder_decoder_configs(vision, text)
    VisionEncoderDecoderModel(config).save_pretrained(tmp_path / "base")
    model = VisionEncoderDecoderModel.from_pretrained(tmp_path / "base")
    settings = {"target_modules": ["attn.c_proj", "q_attn", "q_proj", "query"], "fan_in_fan_out": True}
    save(model, settings, tmp_path / "adapter")
    theirs = by_peft(tmp_path / "adapter", tmp_path / "base", VisionEncoderDecoderModel)
    convert(tmp_path / "adapter", tmp_path / "target")
    assert_same(VisionEncoderDecoderModel.from_pretrained(tmp_path / "target").state_dict(), theirs)


@pytest.mark.parametrize(
    ("settings", "tied"),
    [
        ({"target_modules": ["q_proj", "embed_tokens"]}, "model.embed_tokens"),
        ({"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]}, "model.embed_tokens"),
        ({"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}, "lm_head"),
    ],
)
def test_what_only_the_class_of_the_base_ties_is_not_changed(
    settings: dict[str, Any], tied: str, tmp_path: Path
) -> None:
    """The config.json of Gemma has no tie_word_embeddings: the class ties its embedding and its head."""
    save_tied(tmp_path / "base", records_ties=False)
    save(AutoModelForCausalLM.from_pretrained(tmp_path / "base"), settings, tmp_path / "adapter")
    with pytest.raises(CheckpointError, match=rf"changes {tied}\.weight, which .*base ties to another tensor"):
        by_us(tmp_path / "adapter")


@pytest.mark.parametrize("records_ties", [True, False])
def test_both_copies_of_a_tied_embedding_are_one_tensor(records_ties: bool, tmp_path: Path) -> None:
    """With `ensure_weight_tying`, peft trains one tensor and stores it under both names."""
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    save_tied(base, records_ties=records_ties)
    settings = {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"], "ensure_weight_tying": True}
    save(AutoModelForCausalLM.from_pretrained(base), settings, adapter)
    names = [f"{_P}{name}.weight" for name in ("model.embed_tokens", "lm_head")]
    embedding, head = (load_file(adapter / "adapter_model.safetensors")[name] for name in names)
    assert torch.equal(embedding, head)
    convert(adapter, tmp_path / "target")
    assert_same(AutoModelForCausalLM.from_pretrained(tmp_path / "target").state_dict(), by_peft(adapter, base))
    assert verify(adapter).is_sound
    edit(adapter, {}, plus(**{names[1]: head + 1}))
    with pytest.raises(CheckpointError, match=r"lm_head\.weight, which .*base ties to another tensor"):
        by_us(adapter)


@pytest.mark.parametrize(("is_tied", "saved"), [(True, None), (False, None), (False, ["embed_tokens", "lm_head"])])
def test_an_extended_vocabulary(is_tied: bool, saved: list[str] | None, tmp_path: Path) -> None:
    """Then peft stores the embeddings, and those of modules_to_save under names of its own modules, too."""
    adapter, base, resized = (tmp_path / name for name in ("adapter", "base", "resized"))
    save_model(base, tied=is_tied)
    model = AutoModelForCausalLM.from_pretrained(base)
    model.resize_token_embeddings(model.config.vocab_size + 3, mean_resizing=False)
    model.save_pretrained(resized)
    settings = {"target_modules": ["q_proj"], "modules_to_save": saved}
    save(model, settings, adapter, save_embedding_layers=True)
    names = load_file(adapter / "adapter_model.safetensors")
    assert any(".original_module." in name for name in names) == bool(saved)
    edit(adapter, {"base_model_name_or_path": str(base)}, None)
    with pytest.raises(CheckpointError, match=r"has \[\d+, \d+\]: it is .* resize the base likewise"):
        by_us(adapter)
    edit(adapter, {"base_model_name_or_path": str(resized)}, None)
    convert(adapter, tmp_path / "target")
    assert_same(AutoModelForCausalLM.from_pretrained(tmp_path / "target").state_dict(), by_peft(adapter, resized))
    assert verify(adapter).is_sound
    assert not locate(adapter).model_index.notes


def bare_gpt2(directory: Path) -> Path:
    """A causal GPT-2 whose tensors have no prefix, as those on the hub."""
    config = GPT2Config(n_embd=12, n_layer=2, n_head=2, n_positions=16, vocab_size=31, bos_token_id=0, eos_token_id=0)
    AutoModelForCausalLM.from_config(config).transformer.save_pretrained(directory)
    entries = json.loads((directory / "config.json").read_text()) | {"architectures": ["GPT2LMHeadModel"]}
    (directory / "config.json").write_text(json.dumps(entries))
    return directory


@pytest.mark.parametrize("settings", [{"modules_to_save": ["wte"]}, {"target_modules": ["c_attn", "wte"]}])
def test_ties_of_a_base_whose_names_have_no_prefix(settings: dict[str, Any], tmp_path: Path) -> None:
    base = bare_gpt2(tmp_path / "base")
    save(AutoModelForCausalLM.from_pretrained(base), {"target_modules": ["c_attn"], **settings}, tmp_path / "adapter")
    with pytest.raises(CheckpointError, match=r"changes transformer\.wte\.weight, which .*base ties to another"):
        by_us(tmp_path / "adapter")


def test_missing_tensors_on_a_base_whose_names_have_no_prefix(tmp_path: Path) -> None:
    base, adapter = bare_gpt2(tmp_path / "base"), tmp_path / "adapter"
    save(
        AutoModelForCausalLM.from_pretrained(base), {"target_modules": ["c_attn"], "modules_to_save": ["ln_f"]}, adapter
    )
    theirs = by_peft(adapter, base)
    convert(adapter, tmp_path / "target")
    assert_same(AutoModelForCausalLM.from_pretrained(tmp_path / "target").state_dict(), theirs)
    edit(adapter, {}, without("transformer.h.1."))
    assert "without tensors for transformer.h.1.attn.c_attn" in " ".join(locate(adapter).model_index.notes)
    edit(adapter, {}, without("ln_f.weight"))
    with pytest.raises(CheckpointError, match=r"modules_to_save has transformer\.ln_f, but the adapter does not hold"):
        by_us(adapter)


@pytest.mark.parametrize("saved", ["embed_tokens", "lm_head"])
def test_a_base_that_stores_both_tied_tensors(saved: str, tmp_path: Path) -> None:
    base = save_model(tmp_path / "base", tied=True)
    tensors = load_file(base / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, base / "model.safetensors", {"format": "pt"})
    settings = {"target_modules": ["q_proj"], "modules_to_save": [saved]}
    save(AutoModelForCausalLM.from_pretrained(base), settings, tmp_path / "adapter")
    with pytest.raises(CheckpointError, match=rf"changes .*{saved}\.weight, which .*base ties to another tensor"):
        by_us(tmp_path / "adapter")


@pytest.mark.parametrize(
    "less", [{"target_modules": ["q_proj"]}, {"exclude_modules": ["v_proj"]}, {"layers_to_transform": [1]}]
)
def test_adapters_that_adapt_other_modules_are_different(less: dict[str, Any], root: Path, tmp_path: Path) -> None:
    settings = {"target_modules": ["q_proj", "v_proj"]}
    save(AutoModelForCausalLM.from_pretrained(root / "base"), settings, tmp_path / "one")
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    assert diff(tmp_path / "one", tmp_path / "two").is_equal
    edit(tmp_path / "two", less, None)
    report = diff(tmp_path / "one", tmp_path / "two")
    assert not report.is_equal
    assert "only one of them adapts model.layers.0.self_attn." in report.to_text()


def test_adapters_of_which_one_ignores_a_whole_tensor_are_different(root: Path, tmp_path: Path) -> None:
    settings = {"target_modules": ["q_proj"], "modules_to_save": ["norm"]}
    save(AutoModelForCausalLM.from_pretrained(root / "base"), settings, tmp_path / "one")
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    edit(tmp_path / "two", {"modules_to_save": None, "target_modules": ["q_proj", "norm"]}, None)
    assert not diff(tmp_path / "one", tmp_path / "two").is_equal


def save_tied(directory: Path, *, records_ties: bool) -> None:
    """Save a model with a tied embedding, which without `records_ties` only its class says."""
    config = GemmaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, max_position_embeddings=64, tie_word_embeddings=True,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    entries = json.loads((directory / "config.json").read_text())
    if not records_ties:
        entries.pop("tie_word_embeddings", None)
    (directory / "config.json").write_text(json.dumps(entries))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_what_overflows_when_it_is_rounded_is_refused(dtype: str, root: Path, tmp_path: Path) -> None:
    """The sum is finite in float32, and peft adds the product in the base's dtype."""
    wide = torch.finfo(getattr(torch, dtype)).max
    base = AutoModelForCausalLM.from_pretrained(root / "base", dtype=getattr(torch, dtype))
    base.save_pretrained(tmp_path / "base")
    adapter = made(root, tmp_path, ("plain", {}, factors(lambda t: torch.full_like(t, wide**0.5), "lora_")))
    edit(adapter, {"base_model_name_or_path": str(tmp_path / "base")}, None)
    theirs = by_peft(adapter, tmp_path / "base")
    assert not all(bool(tensor.isfinite().all()) for tensor in theirs.values())
    with pytest.raises(CheckpointError, match=rf"too large for {dtype}; its factors or its scale \(3\.5\)"):
        by_us(adapter)


def test_a_base_that_is_not_finite_itself_is_not_blamed_on_the_adapter(root: Path, tmp_path: Path) -> None:
    shutil.copytree(root / "base", tmp_path / "base")
    tensors = load_file(tmp_path / "base" / "model.safetensors")
    tensors["model.layers.0.self_attn.q_proj.weight"][3, 4] = math.inf
    save_file(tensors, tmp_path / "base" / "model.safetensors", {"format": "pt"})
    adapter = made(root, tmp_path, ("plain", {"base_model_name_or_path": str(tmp_path / "base")}, None))
    assert by_us(adapter)["model.layers.0.self_attn.q_proj.weight"].isinf().sum() == 1
