"""task=reward: against a plain loop over the pairs, from every form of a checkpoint, on ranks, and after a kill."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSequenceClassification, AutoTokenizer, LlamaForSequenceClassification

from fsdp_shard.checkpoint import convert
from fsdp_shard.evaluation.batch_log import BatchLog, BatchValues
from tests.support.runs import run_recipe
from tests.support.tiny import byte_tokenizer, llama_config

# Of 25 rows: the chosen and the rejected answer are equal in one, in another once cut; one has an empty answer, and
# one a prompt that is too long; those with a ranked list have two pairs each, of which one has equal answers.
LEFT_OUT = {
    "pair with equal answers": 2,
    "pair with an empty answer": 1,
    "pair whose prompt fills the first 64 tokens": 1,
    "pair whose answers are equal in the first 64 tokens": 1,
}


@pytest.fixture(scope="module")
def reward_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a random Llama that has one output."""
    directory = tmp_path_factory.mktemp("reward") / "model"
    config = llama_config()
    config.architectures, config.pad_token_id = ["LlamaForSequenceClassification"], 256
    config.id2label, config.label2id = {0: "reward"}, {"reward": 0}
    torch.manual_seed(5)
    model = LlamaForSequenceClassification(config)
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(3)
    model.save_pretrained(directory)
    byte_tokenizer().save_pretrained(directory)
    return directory


def _text(random: np.random.Generator, longest: int) -> str:
    return "".join(random.choice(list("abcdefg "), random.integers(2, longest))) + "."


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path, random = tmp_path_factory.mktemp("rows") / "pairs.jsonl", np.random.default_rng(2)
    made: list[dict[str, Any]] = [
        {
            "id": f"p{number}",
            "prompt": _text(random, 20),
            "chosen": _text(random, 30),
            "rejected": _text(random, 30),
            "gap": number / 10,
        }
        for number in range(24)
    ]
    made[3]["rejected"], made[8]["chosen"], made[11]["prompt"] = made[3]["chosen"], "  ", "x" * 80
    made[12]["chosen"] = "y" * 90
    for number in (15, 16):
        row = made[number]
        row["completions"] = [row.pop("chosen"), row.pop("rejected"), "other"]
    made[15]["completions"][1] = made[15]["completions"][0]
    made.append({"id": "p24", "prompt": "a", "chosen": "y" * 90 + "good", "rejected": "y" * 90 + "bad", "gap": 1})
    path.write_text("".join(json.dumps(row) + "\n" for row in made))
    return path


def _ids(tokenizer: Any, text: str) -> list[int]:
    """The tokens of a prompt, or of an answer without the token that ends it."""
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def plain_loop(model: Path, rows: Path) -> np.ndarray[Any, Any]:
    """The rewards of the pairs [num_pairs, 2], one text at a time by transformers."""
    scorer = AutoModelForSequenceClassification.from_pretrained(model).eval()
    tokenizer, found = AutoTokenizer.from_pretrained(model), []
    for row in map(json.loads, rows.read_text().splitlines()):
        best, *others = row.get("completions") or (row["chosen"], row["rejected"])
        for other in others:
            prompt = _ids(tokenizer, row["prompt"])
            if best[:90] == other[:90] or not (best.strip() and other.strip()) or len(prompt) >= 64:
                continue
            rewards = []
            for answer in (best, other):
                ids = [*prompt, *_ids(tokenizer, answer), tokenizer.eos_token_id][:64]
                with torch.no_grad():
                    given = torch.tensor([ids])
                    logits = scorer(input_ids=given, attention_mask=torch.ones_like(given)).logits
                rewards.append(float(logits[0, 0]))
            found.append(rewards)
    return np.array(found)


def given(model: Path, rows: Path, tmp_path: Path) -> list[str]:
    return [
        f"checkpoint={model}", "task=reward", f"data.path={rows}", "data.kind=preference", "data.sequence_length=64",
        f"data.cache_dir={tmp_path}/cache", "batch_size=4",
    ]  # fmt: skip


def figures(result: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in result.items() if name not in ("seconds", "provenance")}


@pytest.mark.long
@pytest.mark.parametrize("way", ["directory", "2 rank files on disk", "dcp in less", "2 ranks"])
def test_figures_are_those_of_a_plain_loop(way: str, reward_model: Path, rows: Path, tmp_path: Path) -> None:
    checkpoint, settings = reward_model, list[str]()
    if way in ("2 rank files on disk", "dcp in less"):
        checkpoint = tmp_path / "converted"
        convert(reward_model, checkpoint, format={"2": "sharded", "d": "dcp"}[way[0]], ranks=2)
        settings = ["dispatch.device_map=disk"] if way[0] == "2" else ["dispatch.max_memory={cpu: 400KB}"]
    elif way == "2 ranks":
        settings = ["launch.ranks=2"]
    ended = run_recipe("evaluate", tmp_path / "run", *given(checkpoint, rows, tmp_path), *settings)
    assert ended.status == 0, ended.err
    rewards, result = plain_loop(reward_model, rows), ended.result
    margins = rewards[:, 0] - rewards[:, 1]
    expected = {
        "accuracy": np.mean(margins > 0),
        "mean_margin": margins.mean(),
        "mean_reward_chosen": rewards[:, 0].mean(),
        "mean_reward_rejected": rewards[:, 1].mean(),
        "preference_loss": -torch.nn.functional.logsigmoid(torch.tensor(margins)).mean().item(),
    }
    assert 0.2 < expected["accuracy"] < 0.8
    for name, value in expected.items():
        assert result[name] == pytest.approx(value, rel=1e-4, abs=1e-6), name
    assert (result["num_pairs"], result["num_ties"], result["num_truncated"]) == (22, 0, 1)
    assert result["left_out"] == LEFT_OUT
    assert "left out: 2 pairs with equal answers (" in ended.out
    intervals = result["confidence_interval"]
    for name in ("accuracy", "mean_margin", "preference_loss"):
        assert intervals[name][0] < result[name] < intervals[name][1], name
    assert f"accuracy {result['accuracy']:.4f} (95 % interval: " in ended.out
    written = [json.loads(line) for line in (tmp_path / "run" / "predictions.jsonl").read_text().splitlines()]
    assert [row["name"] for row in written] == [f"p{number}" for number in sorted([*range(25), 15, 16])]
    used = [row for row in written if "left_out" not in row]
    found = [[row["reward_chosen"], row["reward_rejected"]] for row in used]
    assert found == [pytest.approx(pair, rel=1e-4, abs=1e-5) for pair in rewards.tolist()]
    assert [row["margin"] for row in used] == pytest.approx(margins.tolist(), rel=1e-3, abs=1e-5)
    assert [row["truncated"] for row in used].count(True) == 1
    ranked = [(row["rejected"], "left_out" in row) for row in written if row["name"] == "p15"]
    assert [is_left_out for _, is_left_out in ranked] == [True, False], "each with its own texts"
    assert ranked[1][0] == "other"
    assert written[0]["prompt"] == json.loads(rows.read_text().splitlines()[0])["prompt"]
    settled = result["provenance"]["settings"]
    assert (settled["task"], settled["sequence_length"]) == ("reward", 64)


def test_margins_of_the_data_are_in_the_loss_only(reward_model: Path, rows: Path, tmp_path: Path) -> None:
    lines = [json.loads(line) for line in rows.read_text().splitlines()]
    pairs = tmp_path / "pairs.jsonl"
    pairs.write_text("".join(json.dumps(row) + "\n" for row in lines if "chosen" in row))
    settings = given(reward_model, pairs, tmp_path)
    plain = run_recipe("evaluate", tmp_path / "plain", *settings).result
    ended = run_recipe("evaluate", tmp_path / "run", *settings, "data.margin_column=gap")
    assert ended.status == 0, ended.err
    rewards = plain_loop(reward_model, pairs)
    gaps = np.array([row["gap"] for number, row in enumerate(lines) if number not in (3, 8, 11, 15, 16, 24)])
    beyond = torch.tensor(rewards[:, 0] - rewards[:, 1] - gaps)
    expected = -torch.nn.functional.logsigmoid(beyond).mean().item()
    assert ended.result["preference_loss"] == pytest.approx(expected, rel=1e-4)
    assert ended.result["preference_loss"] != pytest.approx(plain["preference_loss"], rel=1e-2)
    assert (ended.result["accuracy"], ended.result["mean_margin"]) == (plain["accuracy"], plain["mean_margin"])


def test_ties_are_wrong_and_counted(reward_model: Path, rows: Path, tmp_path: Path) -> None:
    model = changed(reward_model, tmp_path, 0.0)
    ended = run_recipe("evaluate", tmp_path / "run", *given(model, rows, tmp_path))
    assert ended.status == 0, ended.err
    assert (ended.result["accuracy"], ended.result["num_ties"]) == (0.0, 22)
    assert ended.result["preference_loss"] == pytest.approx(np.log(2))
    assert "22 ties counted as wrong" in ended.out


def changed(model: Path, tmp_path: Path, weight: float) -> Path:
    """The model with all weights of the head set to `weight`."""
    directory = tmp_path / "changed"
    directory.mkdir()
    for file in model.iterdir():
        (directory / file.name).write_bytes(file.read_bytes())
    tensors = load_file(directory / "model.safetensors")
    tensors["score.weight"].fill_(weight)
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    return directory


def _append_and_die(log: BatchLog, batch: BatchValues, append: Callable[..., None] = BatchLog.append) -> None:
    append(log, batch)
    if len(log.finished) == 3:
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.long
def test_an_evaluation_that_is_killed_goes_on(
    reward_model: Path, rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = [*given(reward_model, rows, tmp_path), "batch_size=1"]
    whole = run_recipe("evaluate", tmp_path / "whole", *settings)
    run_dir, file = tmp_path / "killed", tmp_path / "killed" / "rewards.jsonl"
    run_dir.mkdir()
    (run_dir / "predictions.jsonl").write_text("{}\n")
    with monkeypatch.context() as patch:  # the run is a fork of this process
        patch.setattr(BatchLog, "append", _append_and_die)
        assert run_recipe("evaluate", run_dir, *settings).status == -signal.SIGKILL
    assert not (run_dir / "predictions.jsonl").exists()
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join(lines[:3]) + lines[3][:-9])  # as if it had been killed in the third batch
    ended = run_recipe("evaluate", run_dir, *settings, "launch.ranks=2")
    assert ended.status == 0, ended.err
    assert "continuing after 2 of 22 batches, whose rewards are in" in ended.out
    assert figures(ended.result) == figures(whole.result), "every bit of them"
    again = run_recipe("evaluate", run_dir, *settings)
    assert (again.status, again.result) == (0, ended.result), again.err
    assert "3 blocks" not in again.out, "no model was loaded"
    other = run_recipe("evaluate", run_dir, *settings, "data.sequence_length=48")
    assert "starting again, as" in other.out
    assert "settings.sequence_length" in other.out


def test_a_run_that_trained_it_has_the_held_out_figures(tiny_model: Path, rows: Path, tmp_path: Path) -> None:
    data = [f"data.path={rows}", "data.kind=preference", "data.sequence_length=64", f"data.cache_dir={tmp_path}/cache"]
    trained = run_recipe(
        "finetune", tmp_path / "run", f"model.path={tiny_model}", *data, f"data.eval_path={rows}", "train.steps=2",
        "train.global_batch_size=4", "optim.lr=0.01", "objective=reward", "model.task=sequence_classification",
        "model.labels=[reward]", "train.eval_every=2", "shard.param_dtype=float32", "launch.device=cpu",
    )  # fmt: skip
    assert trained.status == 0, trained.err
    ended = run_recipe("evaluate", tmp_path / "evaluated", f"checkpoint={tmp_path}/run", "task=reward", *data)
    assert ended.status == 0, ended.err
    held_out = json.loads((tmp_path / "run/evaluations.jsonl").read_text().splitlines()[-1])
    assert ended.result["preference_loss"] == pytest.approx(held_out["loss"], rel=1e-4)
    assert ended.result["accuracy"] == pytest.approx(held_out["metrics"]["rewards/accuracies"])
    assert ended.result["mean_margin"] == pytest.approx(held_out["metrics"]["rewards/margins"], rel=1e-3, abs=1e-5)


def test_rewards_that_are_not_finite_are_an_error(reward_model: Path, rows: Path, tmp_path: Path) -> None:
    model, run_dir = changed(reward_model, tmp_path, float("nan")), tmp_path / "run"
    run_dir.mkdir()
    (run_dir / "predictions.jsonl").write_text("{}\n")
    ended = run_recipe("evaluate", run_dir, *given(model, rows, tmp_path), "launch.ranks=2")
    assert ended.status != 0
    assert "The rewards of 4 pairs are not finite, the first at" in ended.err
    assert not (run_dir / "predictions.jsonl").exists()
    assert not (run_dir / "result.json").exists()


PAIR = {"prompt": "a", "chosen": "b", "rejected": "c"}


@pytest.mark.parametrize(
    ("row", "settings", "said"),
    [
        ({"prompt": "a", "chosen": "b"}, [], "has no column 'rejected'"),
        ({"prompt": "a", "completion": "b", "label": True}, [], "1 answer of the data has a label, and pairs of a"),
        ({"prompt": "a", "chosen": "b", "rejected": "b"}, [], "1 pair with equal answers left out, nothing is left"),
        (PAIR, ["data.kind=text"], "data.kind=text has none; set data.kind=preference"),
        (PAIR, ["data.kind=chat"], "data.kind=chat has none; set data.kind=preference"),
        (PAIR, ["scoring.metrics=f1"], "scoring.metrics=f1 has no effect with task=reward"),
        (PAIR, ["data.eval_fraction=0.5"], "data.eval_fraction=0.5 holds out rows in training"),
        (PAIR, ["stride=3"], "stride=3 is for task=perplexity"),
        (PAIR, ["against=x"], "against=x is for task=perplexity"),
        (PAIR, ["data.packing=true"], "data.packing=true"),
        (PAIR, ["task=classification"], "evaluate task=reward"),
    ],
)
def test_bad_input(row: dict[str, Any], settings: list[str], said: str, reward_model: Path, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    ended = run_recipe("evaluate", tmp_path / "run", *given(reward_model, tmp_path / "rows.jsonl", tmp_path), *settings)
    assert (ended.status, ended.err.count("error: ")) == (2, 1), ended.err
    assert said in ended.err


def test_other_models_are_refused(tiny_model: Path, reward_model: Path, rows: Path, tmp_path: Path) -> None:
    ended = run_recipe("evaluate", tmp_path / "run", *given(tiny_model, rows, tmp_path))
    assert ended.status == 2
    assert "task=reward needs a reward model, which is a sequence classifier with one output, and" in ended.err
    assert "is of a LlamaForCausalLM" in ended.err
    model = changed(reward_model, tmp_path, 1.0)
    config = json.loads((model / "config.json").read_text())
    config |= {"id2label": {"0": "bad", "1": "good"}, "label2id": {"bad": 0, "good": 1}}
    (model / "config.json").write_text(json.dumps(config))
    ended = run_recipe("evaluate", tmp_path / "run", *given(model, rows, tmp_path))
    assert ended.status == 2
    assert "has num_labels=2; give a checkpoint that was trained with objective=reward" in ended.err
