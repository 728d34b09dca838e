"""Preference tuning as a user runs it: references, ranks, resume, evaluations, reward models, mistakes."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors import safe_open
from transformers import AutoModelForSequenceClassification, LlamaForCausalLM

from tests.support.runs import Ended, run_arguments, run_recipe
from tests.support.tiny import byte_tokenizer, llama_config


@pytest.fixture(scope="module")
def settings(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    draw = random.Random(1)

    def text(longest: int) -> str:
        return "".join(draw.choice("abcdefgh ") for _ in range(draw.randint(2, longest)))

    root = tmp_path_factory.mktemp("preferences")
    rows = [{"prompt": text(12), "chosen": text(12), "rejected": text(12)} for _ in range(20)]
    (root / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [
        f"model.path={tiny_model}",
        f"data.path={root}/pairs.jsonl",
        f"data.cache_dir={root}/tokens",
        "data.kind=preference",
        "data.sequence_length=32",
        "data.eval_fraction=0.2",
        "train.steps=4",
        "train.eval_every=2",
        "train.global_batch_size=4",
        "train.micro_batch_size=2",
        "shard.param_dtype=float32",
        "optim.lr=1e-2",
        "launch.device=cpu",
    ]


def _rows(run_dir: Path, name: str = "metrics.jsonl") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / name).read_text().splitlines()]


def _figures(run_dir: Path) -> list[float]:
    return [figure for row in _rows(run_dir) for figure in (row["loss"], row["metrics"]["rewards/margins"])]


def _done(run_dir: Path, *settings: str) -> Ended:
    ended = run_recipe("finetune", run_dir, *settings)
    assert ended.status == 0, ended.err
    return ended


@pytest.mark.long
def test_references_agree_and_are_computed_once(settings: list[str], tmp_path: Path) -> None:
    given = [*settings, "objective=dpo"]
    first = _done(tmp_path / "first", *given)
    assert first.err.count("computed, and kept in") == 2  # of training and held-out samples
    assert _rows(tmp_path / "first")[0]["loss"] == pytest.approx(0.693147, abs=1e-5), "it equals its reference"
    again = _done(tmp_path / "again", *given)
    assert "computed" not in again.err
    assert again.err.count("reference log-probabilities of") == 2
    assert _figures(tmp_path / "again") == _figures(tmp_path / "first"), "bit by bit"
    _done(tmp_path / "sharded", *given, "objective.reference=sharded", "launch.ranks=2")
    assert _figures(tmp_path / "sharded") == pytest.approx(_figures(tmp_path / "first"), rel=1e-4, abs=1e-5)
    result = json.loads((tmp_path / "first/result.json").read_text())
    assert result["metrics_before"]["rewards/accuracies"] == 0
    assert result["metrics"] == _rows(tmp_path / "first", "evaluations.jsonl")[-1]["metrics"]
    assert result["perplexity"] is None


@pytest.mark.long
def test_an_adapter_needs_no_second_model(settings: list[str], tmp_path: Path) -> None:
    given = [*settings, "objective=dpo", "adapter=lora"]
    ended = _done(tmp_path / "adapter", *given, "launch.ranks=2")
    assert "reference log-probabilities" not in ended.err
    _done(tmp_path / "precomputed", *given, "objective.reference=precomputed")
    assert _figures(tmp_path / "adapter") == pytest.approx(_figures(tmp_path / "precomputed"), rel=1e-4, abs=1e-5)
    assert _rows(tmp_path / "adapter")[-1]["metrics"]["rewards/margins"] != 0


@pytest.mark.long
@pytest.mark.parametrize("overrides", [
    ("shard.replicas=2", "launch.ranks=4", "train.micro_batch_size=1"),
    ("shard.tensor_parallel=2", "launch.ranks=2"),
    ("shard.tensor_parallel=2", "launch.ranks=2", "objective.reference=sharded"),
    ("shard.activation_checkpointing=true", "shard.sync_every_micro_batch=false", "train.micro_batch_size=1"),
])  # fmt: skip
def test_the_same_under_every_parallelism(overrides: tuple[str, ...], settings: list[str], tmp_path: Path) -> None:
    model = llama_config()
    model.num_attention_heads, model.num_key_value_heads = 6, 2  # two ranks can share them
    torch.manual_seed(0)
    LlamaForCausalLM(model).save_pretrained(tmp_path / "model")
    byte_tokenizer().save_pretrained(tmp_path / "model")
    given = [*settings, f"model.path={tmp_path}/model", "objective=kto"]
    _done(tmp_path / "alone", *given)
    _done(tmp_path / "divided", *given, *overrides)
    alone, divided = (
        [row[key] for row in _rows(tmp_path / run) for key in ("loss", "grad_norm")] for run in ("alone", "divided")
    )
    assert divided == pytest.approx(alone, rel=2e-4)


@pytest.mark.long
def test_a_quantized_base_is_its_own_reference(settings: list[str], tmp_path: Path) -> None:
    given = [*settings, "objective=dpo", "adapter=lora", "adapter.quantize=nf4"]
    _done(tmp_path / "adapter", *given, "launch.ranks=2")
    _done(tmp_path / "precomputed", *given, "objective.reference=precomputed")
    assert _rows(tmp_path / "adapter")[0]["loss"] == pytest.approx(0.693147, abs=1e-5)
    assert _figures(tmp_path / "adapter") == pytest.approx(_figures(tmp_path / "precomputed"), rel=1e-4, abs=1e-5)


@pytest.mark.long
@pytest.mark.parametrize("objective", ["dpo", "kto"])
def test_resumes_bit_for_bit_against_the_model_of_the_start(
    objective: str, settings: list[str], tmp_path: Path
) -> None:
    """The reference of a resumed run is that of its beginning, not the step that it resumes from."""
    given = [*settings, f"objective={objective}", "objective.reference=sharded"]
    _done(tmp_path / "whole", *given)
    _done(tmp_path / "parts", *given, "train.steps=2", "train.schedule=constant", "checkpoint.every=2")
    _done(tmp_path / "all", *given, "train.schedule=constant")
    _done(tmp_path / "parts", *given, "train.schedule=constant")
    assert [row["loss"] for row in _rows(tmp_path / "parts")] == [row["loss"] for row in _rows(tmp_path / "all")]


@pytest.mark.long
def test_a_reward_model_with_a_new_head(settings: list[str], tmp_path: Path) -> None:
    given = [*settings, "objective=reward", "model.task=sequence_classification", "model.labels=[reward]"]
    ended = _done(tmp_path / "run", *given)
    assert "new head, drawn from the seed: score.weight [1, " in ended.err
    assert 0 <= _rows(tmp_path / "run")[-1]["metrics"]["rewards/accuracies"] <= 1
    two = _done(tmp_path / "two", *given, "launch.ranks=2")
    assert _figures(tmp_path / "two") == pytest.approx(_figures(tmp_path / "run"), rel=1e-4, abs=1e-5)
    assert two.status == 0
    assert run_recipe("convert", tmp_path / "c", f"source={tmp_path}/two", f"target={tmp_path}/model").status == 0
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "model")
    assert (model.config.num_labels, model.config.id2label) == (1, {0: "reward"})
    assert 0.01 < float(model.score.weight.detach().std()) < 0.05
    other = _done(tmp_path / "seed", *given, "seed=1")
    assert other.losses[0] != ended.losses[0], "the head is drawn from the seed"
    more = _done(tmp_path / "run", *given, "train.steps=6")
    assert "new head" not in more.err, "that of the step is read"


def _rewards(model: Any, rows: Path) -> list[float]:
    """The reward of each chosen answer, one text at a time."""
    found = []
    for row in map(json.loads, rows.read_text().splitlines()):
        ids = torch.tensor([list((row["prompt"] + row["chosen"]).encode())])
        with torch.no_grad():
            found.append(float(model.eval()(input_ids=ids, attention_mask=torch.ones_like(ids)).logits[0, 0]))
    return found


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # in peft
def test_a_reward_model_as_an_adapter_with_its_new_head(settings: list[str], tiny_model: Path, tmp_path: Path) -> None:
    rows = Path(settings[1].partition("=")[2])
    given = [*settings, "objective=reward", "model.task=sequence_classification", "model.labels=[reward]"]
    given += ["adapter=lora", "adapter.rank=4", "train.schedule=constant"]
    _done(tmp_path / "run", *given, "launch.ranks=2")
    _done(tmp_path / "one", *given)
    assert _figures(tmp_path / "one") == pytest.approx(_figures(tmp_path / "run"), rel=1e-4, abs=1e-5)
    _done(tmp_path / "parts", *given, "train.steps=2", "checkpoint.every=2")
    _done(tmp_path / "parts", *given)
    assert _figures(tmp_path / "parts") == _figures(tmp_path / "one"), "resumes bit for bit"
    step = next((tmp_path / "run/checkpoints").glob("step-*"))
    with safe_open(step / "adapter_model.safetensors", "pt") as file:
        assert "base_model.model.score.weight" in file.keys()  # noqa: SIM118  # it is no dict

    converted = run_recipe("convert", tmp_path / "c", f"source={tmp_path}/run", f"target={tmp_path}/model")
    assert converted.status == 0, converted.err
    with safe_open(tmp_path / "model/model.safetensors", "pt") as file:
        assert not [name for name in file.keys() if "lm_head" in name]  # noqa: SIM118
    merged, info = AutoModelForSequenceClassification.from_pretrained(tmp_path / "model", output_loading_info=True)
    assert not any(info[name] for name in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert (merged.config.num_labels, merged.config.id2label) == (1, {0: "reward"})
    assert type(merged).__name__ == "LlamaForSequenceClassification"
    assert merged.config.pad_token_id is not None

    base = AutoModelForSequenceClassification.from_pretrained(tiny_model, num_labels=1)
    loaded = PeftModel.from_pretrained(base, step)
    rewards = _rewards(merged, rows)
    assert _rewards(loaded, rows) == pytest.approx(rewards, rel=1e-4, abs=1e-6)
    assert len(set(rewards)) > 10, "the head is no constant"
    direct = AutoModelForSequenceClassification.from_pretrained(step, num_labels=1)
    assert _rewards(direct, rows) == pytest.approx(rewards, rel=1e-4, abs=1e-6)
    asked = ["task=reward", f"data.path={rows}", "data.kind=preference", "data.sequence_length=32"]
    judged = [
        run_recipe("evaluate", tmp_path / f"judged-{name}", f"checkpoint={tmp_path}/{name}", *asked).result
        for name in ("run", "model")
    ]
    assert judged[0]["mean_margin"] == pytest.approx(judged[1]["mean_margin"], rel=1e-5)
    assert judged[0]["mean_margin"] != 0
    verified = run_arguments(["verify", str(step)])
    assert verified.status == 0, verified.err + verified.out

    copied = tmp_path / "copied"  # as an adapter that was copied out of its run
    copied.mkdir()
    for name in ("adapter_config.json", "adapter_model.safetensors", "adapter_base.json"):
        (copied / name).write_bytes((step / name).read_bytes())
    moved = run_recipe("convert", tmp_path / "c", f"source={copied}", f"target={tmp_path}/again")
    assert moved.status == 0, moved.err
    assert (tmp_path / "again/config.json").read_bytes() == (tmp_path / "model/config.json").read_bytes()
    recorded = json.loads((copied / "adapter_base.json").read_text())
    for head in ({}, {"replaced": [1], "config": {}}, {"replaced": [], "config": {"auto_map": {}}}, 1):
        (copied / "adapter_base.json").write_text(json.dumps(recorded | {"head": head}))
        refused = run_recipe("convert", tmp_path / "c", f"source={copied}", f"target={tmp_path}/none")
        assert refused.status != 0
        assert "adapter_base.json is damaged: head must have" in refused.err


@pytest.mark.long
def test_a_classifier_with_a_new_head_is_planned(settings: list[str], tmp_path: Path) -> None:
    given = [settings[0], "model.task=sequence_classification", "model.labels=[a,b,c]", "adapter=lora"]
    ended = run_recipe("plan", tmp_path / "plan", *given, "data.sequence_length=32")
    assert ended.status == 0, ended.err
    trained = run_recipe("plan", tmp_path / "one", *given, "model.labels=[a]", "data.sequence_length=32")
    more = [run.result["per_rank"][0]["gradients_bytes"] for run in (ended, trained)]
    assert more[0] > more[1], "the head is trained"


@pytest.fixture(scope="module")
def packable(settings: list[str], tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """16 pairs that take half a window each, and 4 that are held out: so a step of any run has all of them."""
    draw, root = random.Random(2), tmp_path_factory.mktemp("packable")

    def pair() -> dict[str, str]:
        prompt, chosen = draw.randint(12, 20), draw.randint(2, 8)
        sizes = {"prompt": prompt, "chosen": chosen, "rejected": 29 - prompt - chosen}
        return {name: "".join(draw.choices("abcdefgh", k=size)) for name, size in sizes.items()}

    for name, count in (("pairs", 16), ("held", 5)):
        (root / f"{name}.jsonl").write_text("".join(json.dumps(pair()) + "\n" for _ in range(count)))
    others = [one for one in settings if not one.startswith(("data.eval", "data.path", "data.seq", "train.global"))]
    return [
        *others, f"data.path={root}/pairs.jsonl", f"data.eval_path={root}/held.jsonl", "data.sequence_length=64",
        "train.schedule=constant", "train.global_batch_size=16", "train.steps=2", "optim.lr=1e-3",
    ]  # fmt: skip


PACKED = ("data.packing=true", "train.global_batch_size=8")


def _all_figures(run_dir: Path) -> list[dict[str, float]]:
    """Losses, norms, tokens and metrics of each step and evaluation."""
    rows = [*_rows(run_dir), *_rows(run_dir, "evaluations.jsonl")]
    return [{name: row.get(name) or 0 for name in ("loss", "grad_norm", "tokens")} | row["metrics"] for row in rows]


REWARD = ("objective=reward", "model.task=sequence_classification", "model.labels=[reward]", "adapter=lora")


@pytest.mark.long
@pytest.mark.parametrize(("first", "others"), [
    (("objective=dpo", "adapter=lora"), [("launch.ranks=2",)]),
    pytest.param(("objective=dpo", "objective.beta=0.3"), [
        ("launch.ranks=2",), ("objective.reference=sharded", "shard=ddp"),
        ("objective.reference=sharded", "data.streaming=true", "launch.ranks=2"),
    ], marks=pytest.mark.slow),
    pytest.param(("objective=ipo", "adapter=lora"), [
        ("objective.reference=precomputed",), ("shard.activation_checkpointing=true",),
    ], marks=pytest.mark.slow),
    pytest.param(REWARD, [("launch.ranks=2",), ("shard=fsdp1", "launch.ranks=2")], marks=pytest.mark.slow),
    pytest.param(("objective=orpo", "objective.learn_prompts=true"), [
        ("model.attention=eager",), ("shard=fsdp1", "launch.ranks=2"),
    ], marks=pytest.mark.slow),
])  # fmt: skip
def test_packed_pairs_train_as_rows_do(
    first: tuple[str, ...], others: list[tuple[str, ...]], packable: list[str], tmp_path: Path
) -> None:
    given = [*packable, *first]
    _done(tmp_path / "rows", *given)
    expected = _all_figures(tmp_path / "rows")
    for number, overrides in enumerate(others):
        ended = _done(tmp_path / f"{number}", *given, *PACKED, *overrides)
        assert "16 pairs packed into 8 windows of 64" in ended.err or "streamed" in ended.err, ended.err
        for step, (found, wanted) in enumerate(zip(_all_figures(tmp_path / f"{number}"), expected, strict=True)):
            if first == REWARD:  # whose prompts are read once
                assert found.pop("tokens") <= 0.7 * wanted["tokens"]
            close = {name: wanted[name] for name in found}
            # AdamW makes more of rounding, step by step.
            assert found == pytest.approx(close, rel=1e-5 if step == 0 else 1e-4, abs=1e-5), overrides
    if len(others) > 1:
        _done(tmp_path / "parts", *given, *PACKED, *others[0], "train.steps=1", "checkpoint.every=1")
        _done(tmp_path / "parts", *given, *PACKED, *others[0])
        assert [row["loss"] for row in _rows(tmp_path / "parts")] == [row["loss"] for row in _rows(tmp_path / "0")]


@pytest.mark.long
@pytest.mark.parametrize(("first", "others"), [
    ((), [("launch.ranks=2",)]),
    pytest.param((), [
        ("shard.context_parallel=2", "launch.ranks=2"),
        ("objective.reference=sharded", "shard=ddp"),
        ("objective.reference=dispatched", "shard=fsdp1"),
    ], marks=pytest.mark.slow),
    pytest.param(("adapter=lora",), [("model.attention=eager",)], marks=pytest.mark.slow),
])  # fmt: skip
def test_packed_answers_train_as_rows_do(
    first: tuple[str, ...], others: list[tuple[str, ...]], packable: list[str], tmp_path: Path
) -> None:
    draw = random.Random(4)

    def answer(number: int) -> dict[str, Any]:  # of which two fill a window
        texts = {name: "".join(draw.choices("abcdefgh", k=size)) for name, size in (("prompt", 12), ("completion", 19))}
        return {**texts, "label": number % 3 > 0}

    for name, count in (("answers", 16), ("held", 5)):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(answer(number)) + "\n" for number in range(count)))
    paths = [f"data.path={tmp_path}/answers.jsonl", f"data.eval_path={tmp_path}/held.jsonl"]
    given = [*packable, "objective=kto", "objective.undesirable_weight=0.7", *paths, *first]
    _done(tmp_path / "rows", *given)
    expected = _all_figures(tmp_path / "rows")
    for number, overrides in enumerate(others):
        ended = _done(tmp_path / f"{number}", *given, *PACKED, *overrides)
        assert "16 answers packed into 8 windows of 64 (96.9% full)" in ended.err
        for step, (found, wanted) in enumerate(zip(_all_figures(tmp_path / f"{number}"), expected, strict=True)):
            assert found == pytest.approx(wanted, rel=1e-5 if step == 0 else 1e-4, abs=1e-5), overrides
    if len(others) > 1:
        _done(tmp_path / "parts", *given, *PACKED, *others[0], "train.steps=1", "checkpoint.every=1")
        _done(tmp_path / "parts", *given, *PACKED, *others[0])
        assert [row["loss"] for row in _rows(tmp_path / "parts")] == [row["loss"] for row in _rows(tmp_path / "0")]


@pytest.mark.long
@pytest.mark.parametrize(("overrides", "said"), [
    (("objective=dpo", "data.kind=pairs"), "data.kind=pairs"),
    ((), "objective=dpo"),
    (("objective=dpo", "model.task=sequence_classification"), "objective=dpo trains model.task=causal_lm"),
    (("objective=reward",), "objective=reward trains model.task=sequence_classification"),
    (("objective=dpo", "objective.reference=adapter"), "objective.reference=adapter is the model without its adapter"),
    (("objective=dpo", "objective.label_smoothing=0.5"), "must be less than 0.5"),
    (("objective=dpo", "loss=a:b"), "loss=a:b replaces the cross-entropy"),
    (("objective=dpo", "objective.gamma=1"), "objective.gamma"),
    (("objective=simpo", "model.labels=[good]"), "model.labels=['good'] is for model.task=sequence_classification"),
    (("objective=reward", "model.task=sequence_classification"), "set model.labels for a new head"),
    (("objective=reward", "model.task=sequence_classification", "model.labels=[a,b]"), "model.labels=[reward]"),
    (("objective=dpo", "data.packing=true", "shard.context_parallel=2", "launch.ranks=2"), "packed pairs have masks"),
])  # fmt: skip
def test_mistakes(overrides: tuple[str, ...], said: str, settings: list[str], tmp_path: Path) -> None:
    ended = run_recipe("finetune", tmp_path / "run", *settings, *overrides)
    assert (ended.status, ended.err.count("error: ")) == (2, 1), ended.err
    assert said in ended.err


@pytest.mark.long
def test_a_damaged_cache_is_named(settings: list[str], tmp_path: Path) -> None:
    given = [*settings, "objective=ipo", f"data.cache_dir={tmp_path}/cache"]
    _done(tmp_path / "first", *given)
    file = next((tmp_path / "cache").glob("reference-*.safetensors"))
    file.write_bytes(file.read_bytes()[:-3])
    ended = run_recipe("finetune", tmp_path / "second", *given)
    assert ended.status != 0
    assert f"{file} is damaged" in ended.err


def test_steps_that_contradict_the_data_are_refused_before_the_pass(settings: list[str], tmp_path: Path) -> None:
    epochs = ["train.steps=null", "train.epochs=1", "train.patience=2", "train.eval_every=1000"]
    cache = tmp_path / "cache"
    ended = run_recipe("finetune", tmp_path / "run", *settings, "objective=dpo", *epochs, f"data.cache_dir={cache}")
    assert ended.status == 2
    assert "there are none before the last of" in ended.err
    assert not list(cache.glob("reference-*")), "the reference was not computed"


def test_another_objective_is_another_run(settings: list[str], tmp_path: Path) -> None:
    _done(tmp_path / "run", *settings, "objective=simpo", "train.steps=2")
    ended = run_recipe("finetune", tmp_path / "run", *settings, "objective=orpo")
    assert ended.status == 2
    assert "was trained with objective=simpo, so a run with objective=orpo cannot resume from it" in ended.err


@pytest.mark.long
def test_the_reference_of_an_adapter_is_that_of_its_scale_and_base(settings: list[str], tmp_path: Path) -> None:
    """An adapter as model.path is merged; one with the same tensors and another scale is another model."""
    _done(tmp_path / "tuned", *settings, "objective=simpo", "adapter=lora")
    adapter = tmp_path / "adapter"
    shutil.copytree(tmp_path / "tuned/checkpoints/step-00000004", adapter)
    given = [*settings, f"model.path={adapter}", "objective=dpo", f"data.cache_dir={tmp_path}/cache", "train.steps=1"]
    _done(tmp_path / "one", *given)
    stored = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps(stored | {"lora_alpha": 20 * stored["lora_alpha"]}))
    ended = _done(tmp_path / "two", *given)
    assert "computed, and kept in" in ended.err
    assert _rows(tmp_path / "two")[0]["loss"] == pytest.approx(0.693147, abs=1e-5)


@pytest.mark.long
def test_the_classes_of_a_head_stay_in_their_order(settings: list[str], tmp_path: Path) -> None:
    given = [*settings, "objective=reward", "model.task=sequence_classification"]
    for adapter in ("none", "lora"):
        run = tmp_path / adapter
        _done(run, *given, f"adapter={adapter}", "model.labels=[reward]", "train.steps=2")
        ended = run_recipe("finetune", run, *given, f"adapter={adapter}", "model.labels=[score]")
        assert ended.status == 2, ended.err
        assert "has a head with the classes [reward], but model.labels=[score]; set model.labels=[reward]" in ended.err


def test_other_samples_are_another_run_and_the_setting_is_named(settings: list[str], tmp_path: Path) -> None:
    _done(tmp_path / "run", *settings, "objective=simpo", "train.steps=2")
    ended = run_recipe(
        "finetune", tmp_path / "run", *settings, "objective=simpo", "data.packing=true", "data.workers=2"
    )
    assert ended.status == 2
    assert "; changed: data.packing false -> true), so its position in the data is not valid" in ended.err


@pytest.mark.long
def test_a_loss_with_other_settings_is_another_run(settings: list[str], tmp_path: Path) -> None:
    _done(tmp_path / "run", *settings, "objective=dpo", "train.steps=2")
    ended = run_recipe("finetune", tmp_path / "run", *settings, "objective=dpo", "objective.beta=0.5")
    assert ended.status == 2
    assert "was trained with objective.beta=0.1, so a run with objective.beta=0.5 cannot resume from it" in ended.err
    _done(tmp_path / "run", *settings, "objective=dpo", "objective.reference=sharded")


@pytest.mark.long
def test_doctor_and_plan_know_pairs(settings: list[str], tmp_path: Path) -> None:
    given = [*(one for one in settings if not one.startswith("train.steps")), "objective=dpo", "train.epochs=1"]
    ended = run_recipe("doctor", tmp_path / "doctor", *given)
    assert "4 steps with 16 samples of 16" in ended.out, ended.out  # of 20 pairs 4 are held out
    model = next(one for one in settings if one.startswith("model.path"))
    planned = run_recipe("plan", tmp_path / "plan", model, "objective=dpo", "data.sequence_length=32")
    assert "objective=dpo: a sample is two sequences, no second model while it trains" in planned.out
