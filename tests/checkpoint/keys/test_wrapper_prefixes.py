"""Names of weights as the model has them, whatever wrapped it and whoever nested its state dict."""

from __future__ import annotations

import time

import pytest

from fsdp_shard.checkpoint.keys.wrapper_prefixes import plain_names, split_state
from fsdp_shard.errors import CheckpointError

NAMES = ["model.embed_tokens.weight", "model.layers.0.mlp.up_proj.weight", "lm_head.weight"]


def wrapped(*parts: str) -> list[str]:
    return [".".join([*parts, name]) for name in NAMES]


@pytest.mark.parametrize(
    "stored",
    [
        NAMES,
        wrapped("module"),
        wrapped("module", "module"),
        wrapped("_orig_mod"),
        wrapped("_fsdp_wrapped_module"),
        wrapped("module", "_orig_mod"),
        wrapped("_fsdp_wrapped_module", "_orig_mod", "_checkpoint_wrapped_module"),
        wrapped("model"),
        wrapped("base_model", "model"),
        wrapped("module", "base_model", "model"),
        [NAMES[0], "model.layers.0._fsdp_wrapped_module._checkpoint_wrapped_module.mlp.up_proj.weight", NAMES[2]],
    ],
)
def test_wrappers_leave_no_trace(stored: list[str]) -> None:
    assert list(plain_names(stored).names.values()) == NAMES


@pytest.mark.parametrize(
    "stored",
    [
        ["model.layers.0.weight", "model.norm.weight"],  # a causal model with a tied head
        ["module.weight", "head.weight"],  # a module that is called module
        ["vision.model.weight", "model.weight"],
        ["base_model.model.layers.0.q_proj.lora_A.weight", "base_model.model.layers.0.q_proj.lora_B.weight"],
    ],
)
def test_other_names_stay(stored: list[str]) -> None:
    assert plain_names(stored).names == {name: name for name in stored}


def test_the_time_grows_with_the_number_of_names() -> None:
    layers = [f"base_model.model.layers.{number}.q_proj" for number in range(20_000)]
    stored = [f"{layer}.{end}" for layer in layers for end in ("base_layer.weight", "lora_A.weight", "lora_B.weight")]
    before = time.process_time()
    assert len(plain_names(stored).names) == len(layers)
    assert time.process_time() - before < 5


def test_adapters_stand_beside_the_weights_that_they_adapt() -> None:
    prefix = "base_model.model.model.layers.0.q_proj"
    stored = [
        f"{prefix}.base_layer.weight",
        f"{prefix}.lora_A.default.weight",
        f"{prefix}.lora_B.default.weight",
        "base_model.model.lm_head.original_module.weight",
        "base_model.model.lm_head.modules_to_save.default.weight",
    ]
    found = plain_names(stored)
    assert found.names == {stored[0]: "model.layers.0.q_proj.weight", stored[4]: "lm_head.weight"}
    assert found.extras == {"adapter": stored[1:4]}


def test_two_tensors_of_one_name_are_refused() -> None:
    with pytest.raises(CheckpointError, match=r"a\._orig_mod\.weight and a\.weight both mean the tensor a\.weight"):
        plain_names(["a._orig_mod.weight", "a.weight"])


def flat(*paths: tuple[object, ...]) -> dict[str, tuple[object, ...]]:
    return {".".join(map(str, path)): path for path in paths}


WEIGHT = "layers.0.weight"


@pytest.mark.parametrize(
    ("paths", "kinds"),
    [
        (flat((WEIGHT,), ("norm.bias",)), {}),
        (flat(("model", WEIGHT), ("optimizer", "state", WEIGHT, "exp_avg")), {"optimizer": 1}),
        (flat(("app", "model", WEIGHT), ("app", "optim", "state", WEIGHT, "step")), {"optimizer": 1}),
        # torchtitan: the model at the top, a flat optimizer, and its own counters
        (
            flat((WEIGHT,), ("optimizer", f"state.{WEIGHT}.exp_avg"), ("train_state", "step")),
            {"optimizer": 1, "other": 1},
        ),
        # torch's flatten_optimizer_state_dict, both dicts in one
        (flat((WEIGHT,), (f"state.{WEIGHT}.exp_avg",), (f"state.{WEIGHT}.step",)), {"optimizer": 2}),
        # no record of the nesting: the name alone
        (
            {WEIGHT: (WEIGHT,), f"optimizer.state.{WEIGHT}.exp_avg": (f"optimizer.state.{WEIGHT}.exp_avg",)},
            {"optimizer": 1},
        ),
        # Lightning
        (
            flat(("state_dict", WEIGHT), ("optimizer_states", 0, "state", 0, "exp_avg"), ("epoch",)),
            {"optimizer": 1, "other": 1},
        ),
        (flat(("model", WEIGHT), ("ema", WEIGHT), ("rng",)), {"other": 2}),
        (flat(("module", WEIGHT), ("buffer_names", 0)), {"other": 1}),
    ],
)
def test_weights_are_told_from_the_rest(paths: dict[str, tuple[object, ...]], kinds: dict[str, int]) -> None:
    found = split_state(paths)
    assert WEIGHT in found.names.values()
    assert {kind: len(names) for kind, names in found.extras.items()} == kinds
    assert len(found.names) + sum(kinds.values()) == len(paths)


def test_an_optimizer_alone_has_no_weights() -> None:
    found = split_state(flat(("state", 0, "exp_avg"), ("state", 0, "step")))
    assert (found.names, list(found.extras)) == ({}, ["optimizer"])


def test_a_model_may_be_nested_by_itself() -> None:
    names = ["model.model.vision_tower.weight", "model.lm_head.weight"]  # ShieldGemma2ForImageClassification
    assert list(plain_names(names, is_nested=False).names.values()) == names


def test_all_below_the_key_of_the_model_is_the_model() -> None:
    found = split_state(flat(("model", "scale"), ("model", "enc", "w"), ("optim", "state", 0, "exp_avg")))
    assert set(found.names.values()) == {"scale", "enc.w"}


def test_which_of_several_models_is_a_question() -> None:
    with pytest.raises(CheckpointError, match=r"it has several models, actor\.model, critic\.model"):
        split_state(flat(("actor", "model", "w"), ("critic", "model", "w")))


def test_two_paths_to_one_name_are_refused() -> None:
    with pytest.raises(CheckpointError, match="both mean the tensor w"):
        split_state({"model.w": ("model", "w"), "m2.w": ("model", "w")})


@pytest.mark.parametrize("is_nested", [True, False])
def test_modules_with_names_of_peft_are_no_adapters(is_nested: bool) -> None:
    names = ["base_layer.0.weight", "level0.0.weight", "fc.weight"]
    assert list(plain_names(names, is_nested=is_nested).names.values()) == names


def test_several_models_keep_their_paths() -> None:
    found = split_state(flat(("encoder", "weight"), ("decoder", "weight")))
    assert set(found.names.values()) == {"encoder.weight", "decoder.weight"}
