"""task=classification: against a plain loop over the texts, from every form of a checkpoint and on ranks."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSequenceClassification, AutoTokenizer, LlamaForSequenceClassification

from fsdp_shard.checkpoint import convert
from fsdp_shard.evaluation.scored_rows.class_figures import ClassFigures
from tests.support.runs import run_recipe
from tests.support.tiny import byte_tokenizer, llama_config

NAMES = ["bug", "feature", "question"]


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a random Llama that has three named classes."""
    directory = tmp_path_factory.mktemp("classifier") / "model"
    config = llama_config()
    config.architectures, config.pad_token_id = ["LlamaForSequenceClassification"], 256
    config.id2label, config.label2id = dict(enumerate(NAMES)), {name: number for number, name in enumerate(NAMES)}
    torch.manual_seed(5)
    model = LlamaForSequenceClassification(config)
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(3)  # so that every class is predicted, by more than rounding
    model.save_pretrained(directory)
    byte_tokenizer().save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """21 rows, of which one is too long, one has no text, one an empty one and one no label."""
    path, random = tmp_path_factory.mktemp("rows") / "rows.jsonl", np.random.default_rng(2)
    made: list[dict[str, Any]] = [
        {
            "id": f"t{number}",
            "text": "".join(random.choice(list("abcdefg "), 1 + 5 * number)),
            "label": NAMES[number % 3],
        }
        for number in range(21)
    ]
    made[3]["text"], made[8]["text"], made[11]["label"], made[15]["text"] = None, "  ", None, "x" * 200
    made[14]["label"] = 1  # by number
    path.write_text("".join(json.dumps(row) + "\n" for row in made))
    return path


def plain_loop(model: Path, rows: Path) -> tuple[list[int], np.ndarray[Any, Any]]:
    """The class of each text, and the log probabilities of all, one text at a time by transformers."""
    classifier = AutoModelForSequenceClassification.from_pretrained(model).eval()
    tokenizer, labels, found = AutoTokenizer.from_pretrained(model), [], []
    for row in map(json.loads, rows.read_text().splitlines()):
        if (row["text"] or "").strip() and row["label"] is not None:
            ids = torch.tensor([tokenizer(row["text"])["input_ids"][:128]])
            with torch.no_grad():
                found.append(classifier(input_ids=ids, attention_mask=torch.ones_like(ids)).logits[0].double())
            labels.append(NAMES.index(row["label"]) if isinstance(row["label"], str) else row["label"])
    return labels, torch.stack(found).log_softmax(-1).numpy()


def figures(labels: list[int], likely: np.ndarray[Any, Any]) -> dict[str, Any]:
    """The figures by counting."""
    predicted = likely.argmax(-1).tolist()
    pairs, scores = Counter(zip(labels, predicted, strict=True)), []
    for number in range(3):
        hits, support, named = pairs[number, number], labels.count(number), predicted.count(number)
        precision, recall = hits / named if named else 0.0, hits / support if support else 0.0
        scores.append((precision, recall, 2 * precision * recall / (precision + recall) if hits else 0.0, support))
    return {
        "accuracy": sum(one == other for one, other in zip(labels, predicted, strict=True)) / len(labels),
        "f1_macro": sum(f1 for _, _, f1, _ in scores) / 3,
        "f1_weighted": sum(f1 * support for _, _, f1, support in scores) / len(labels),
        "cross_entropy": -sum(row[label] for row, label in zip(likely, labels, strict=True)) / len(labels),
        "confusion_matrix": [[pairs[label, other] for other in range(3)] for label in range(3)],
        "classes": [
            {"name": name, "precision": precision, "recall": recall, "f1": f1, "support": support}
            for name, (precision, recall, f1, support) in zip(NAMES, scores, strict=True)
        ],
    }


@pytest.mark.long
@pytest.mark.parametrize("way", ["directory", "2 rank files on disk", "dcp in less", "2 ranks"])
def test_figures_are_those_of_a_plain_loop(way: str, classifier: Path, rows: Path, tmp_path: Path) -> None:
    given, settings = classifier, ["batch_size=4"]
    if way in ("2 rank files on disk", "dcp in less"):
        given = tmp_path / "converted"
        convert(classifier, given, format={"2": "sharded", "d": "dcp"}[way[0]], ranks=2)
        settings += ["dispatch.device_map=disk"] if way[0] == "2" else ["dispatch.max_memory={cpu: 400KB}"]
    elif way == "2 ranks":
        settings += ["launch.ranks=2"]
    ended = run_recipe(
        "evaluate", tmp_path / "run", f"checkpoint={given}", "task=classification", f"data.path={rows}", *settings
    )
    assert ended.status == 0, ended.err
    labels, likely = plain_loop(classifier, rows)
    expected, result = figures(labels, likely), ended.result
    assert len({*likely.argmax(-1)}) == 3, "each class is predicted"
    for name, value in expected.items():
        if name == "classes":
            assert result[name] == [pytest.approx(row) for row in value]
        else:
            assert result[name] == (value if name == "confusion_matrix" else pytest.approx(value, rel=1e-5)), name
    assert result["num_texts"] == 18
    assert result["left_out"] == {"without text or label": 3}
    assert "left out: 3 rows without text or label" in ended.out
    assert result["num_truncated"] == 1
    low, high = result["confidence_interval"]["accuracy"]
    assert low < result["accuracy"] < high
    assert f"accuracy {result['accuracy']:.4f} (95 % interval: {low:.4f} to {high:.4f}) of 18 texts" in ended.out
    written = [json.loads(line) for line in (tmp_path / "run" / "predictions.jsonl").read_text().splitlines()]
    assert [row["name"] for row in written] == [f"t{number}" for number in range(21)]
    used = [row for row in written if "left_out" not in row]
    assert [row["label"] for row in used] == [NAMES[label] for label in labels]
    assert [row["prediction"] for row in used] == [NAMES[number] for number in likely.argmax(-1)]
    assert [row["probability"] for row in used] == pytest.approx(np.exp(likely.max(-1)).tolist(), rel=1e-4)
    assert [row["truncated"] for row in used].count(True) == 1
    assert result["provenance"]["settings"]["task"] == "classification"


@pytest.mark.long
def test_of_a_run_that_trained_it(classifier: Path, rows: Path, tmp_path: Path) -> None:
    settings = [f"model.path={classifier}", f"data.path={rows}", "model.task=sequence_classification", "train.steps=2"]
    settings += ["train.global_batch_size=4", "optim.lr=0.01", f"data.eval_path={rows}", "train.eval_every=2"]
    trained = run_recipe("finetune", tmp_path / "run", *settings)
    assert trained.status == 0, trained.err
    evaluations = [json.loads(line) for line in (tmp_path / "run" / "evaluations.jsonl").read_text().splitlines()]
    assert [row["perplexity"] for row in evaluations] == [None, None], "the loss is that of classes, not of tokens"
    assert trained.result["perplexity"] is None
    assert "held out after step 2: loss " in trained.err
    assert "perplexity" not in trained.out + trained.err
    given = [f"checkpoint={tmp_path / 'run'}", "task=classification", f"data.path={rows}"]
    ended = run_recipe("evaluate", tmp_path / "evaluated", *given)
    assert ended.status == 0, ended.err
    before = figures(*plain_loop(classifier, rows))
    assert ended.result["cross_entropy"] != pytest.approx(before["cross_entropy"], rel=1e-3)
    assert ended.result["num_texts"] == 18


@pytest.mark.long
def test_an_adapter_does_not_follow_other_classes_or_padding_of_its_base(
    classifier: Path, rows: Path, tmp_path: Path
) -> None:
    """The head of the base is the adapter's own: its scores would get other names, or be read elsewhere."""
    base = shutil.copytree(classifier, tmp_path / "base")
    settings = [f"model.path={base}", f"data.path={rows}", "model.task=sequence_classification", "adapter=lora"]
    settings += ["adapter.modules_to_save=[score]", "train.global_batch_size=4"]
    trained = run_recipe("finetune", tmp_path / "run", *settings, "train.steps=1")
    assert trained.status == 0, trained.err
    config = json.loads((base / "config.json").read_text())
    names = config["id2label"]
    given = [f"checkpoint={tmp_path / 'run'}", "task=classification", f"data.path={rows}"]
    for name, value, change in (
        ("id2label", {**names, "0": names["1"], "1": names["0"]}, 'id2label.0 "bug" -> "feature"'),
        ("pad_token_id", 97, "pad_token_id 256 -> 97"),
    ):
        (base / "config.json").write_text(json.dumps(config | {name: value}))
        ended = run_recipe("evaluate", tmp_path / name, *given)
        assert (ended.status, f"differs from its config.json: {change}" in ended.err) == (2, True), ended.err
        resumed = run_recipe("finetune", tmp_path / "run", *settings, "train.steps=2")
        assert (resumed.status, f"differs from its config.json: {change}" in resumed.err) == (2, True), resumed.err


def test_logits_that_are_not_finite_are_an_error(classifier: Path, rows: Path, tmp_path: Path) -> None:
    broken = tmp_path / "model"
    broken.mkdir()
    for file in classifier.iterdir():
        (broken / file.name).write_bytes(file.read_bytes())
    tensors = load_file(broken / "model.safetensors")
    tensors["score.weight"][0, 0] = float("nan")
    save_file(tensors, broken / "model.safetensors", {"format": "pt"})
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    (run_dir / "predictions.jsonl").write_text("{}\n")
    ended = run_recipe("evaluate", run_dir, f"checkpoint={broken}", "task=classification", f"data.path={rows}")
    assert ended.status != 0
    assert "The logits of 8 texts are not finite, the first at" in ended.err
    assert not (run_dir / "predictions.jsonl").exists()
    assert not (run_dir / "result.json").exists()


@pytest.mark.parametrize(
    ("row", "settings", "said"),
    [
        ({"text": "a", "label": "other"}, [], "The data has a class 'other', but the model has 3 classes"),
        ({"text": "a", "label": -1}, [], "The data has a class -1"),
        ({"text": "a", "label": 0.5}, [], "holds float, expected the number or name of one class"),
        ({"text": "a", "label": [0, 1]}, [], "regression and several classes for one text are not supported."),
        ({"words": "a", "label": 0}, [], "has no column 'text'"),
        ({"text": "", "label": 0}, [], "none with anything to learn"),
        (
            {"text": "a", "label": 0},
            ["scoring.metrics=f1"],
            "scoring.metrics=f1 has no effect with task=classification",
        ),
        ({"text": "a", "label": 0}, ["data.eval_fraction=0.5"], "data.eval_fraction=0.5 holds out rows in training"),
        ({"text": "a", "label": 0}, ["stride=3"], "stride=3 is for task=perplexity"),
        ({"text": "a", "label": 0}, ["data.packing=true"], "data.packing=true is for model.task=causal_lm"),
    ],
)
def test_bad_input(row: dict[str, Any], settings: list[str], said: str, classifier: Path, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    given = [f"checkpoint={classifier}", "task=classification", f"data.path={tmp_path / 'rows.jsonl'}"]
    ended = run_recipe("evaluate", tmp_path / "run", *given, *settings)
    assert ended.status != 0
    assert said in ended.err


def test_a_model_without_classes_is_refused(tiny_model: Path, rows: Path, tmp_path: Path) -> None:
    given = [f"checkpoint={tiny_model}", "task=classification", f"data.path={rows}"]
    ended = run_recipe("evaluate", tmp_path / "run", *given)
    assert ended.status != 0
    assert "needs a sequence classifier, and" in ended.err
    assert "is of a LlamaForCausalLM" in ended.err


def test_classes_that_never_occur_do_not_count() -> None:
    """As in scikit-learn: a class neither in the data nor predicted has no part in the macro F1."""
    labels, predictions = np.array([0, 0, 1]), np.array([0, 1, 1])
    found = ClassFigures(["a", "b", "c", "d"], labels, predictions, np.zeros(3)).row
    assert found["f1_macro"] == pytest.approx(2 / 3)
    assert found["classes"][3] == {"name": "d", "precision": 0.0, "recall": 0.0, "f1": 0.0, "support": 0}
    many = ClassFigures([str(number) for number in range(300)], labels, predictions, np.zeros(3))
    assert many.row["confusion_matrix"] is None
    assert "more than 200 classes" in many.row["confusion_matrix_note"]
    assert many.lines()[0].split() == ["class", "precision", "recall", "F1", "texts", "most", "often", "taken", "for"]
