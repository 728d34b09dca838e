"""task=generation: answers are those of transformers' `generate`, one prompt at a time, and rows are counted."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    T5Config,
    T5ForConditionalGeneration,
)

from fsdp_shard.checkpoint import convert
from fsdp_shard.evaluation.config import EvaluateSettings
from fsdp_shard.evaluation.evaluation_base import EvaluationBase
from fsdp_shard.evaluation.model_card.card_figures import figures_of
from fsdp_shard.evaluation.provenance import provenance
from fsdp_shard.evaluation.report.comparison import build_report
from fsdp_shard.evaluation.report.run_files import read_run
from fsdp_shard.evaluation.report.same_weights import WeightDigests
from fsdp_shard.evaluation.scored_rows.answer_metrics import exact_match, word_f1
from tests.support.runs import run_recipe
from tests.support.tiny import byte_tokenizer, save_model

TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def _livelier(directory: Path) -> Path:
    """Make the weights of a random model larger, which else repeats one token."""
    tensors = load_file(directory / "model.safetensors")
    save_file({name: 3 * value for name, value in tensors.items()}, directory / "model.safetensors", {"format": "pt"})
    return directory


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a random Llama and a tokenizer of bytes."""
    return _livelier(save_model(tmp_path_factory.mktemp("llama") / "model", tied=False))


@pytest.fixture(scope="module")
def t5(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a random T5 and a tokenizer of bytes."""
    directory = tmp_path_factory.mktemp("t5") / "model"
    sizes: dict[str, Any] = {"vocab_size": 257, "d_model": 24, "d_kv": 6, "d_ff": 45, "num_layers": 2, "num_heads": 4}
    tokens: dict[str, Any] = {"decoder_start_token_id": 256, "pad_token_id": 256, "eos_token_id": 10}
    torch.manual_seed(1)
    T5ForConditionalGeneration(T5Config(**sizes, **tokens)).save_pretrained(directory)
    byte_tokenizer().save_pretrained(directory)
    return _livelier(directory)


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Nine rows, of which one has no source, one no target, and one is beyond a context of 128 tokens."""
    path = tmp_path_factory.mktemp("pairs") / "pairs.jsonl"
    made: list[dict[str, Any]] = [
        {"name": f"p{number}", "source": "once upon a time " * number + str(number), "target": f"the {number}"}
        for number in range(7)
    ]
    made[2]["source"], made[5]["target"] = "", None
    made += [
        {"name": "p7", "source": "y" * 125, "target": "long"},
        {"name": "p8", "source": "end", "target": "The end."},
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in made))
    return path


def evaluate(run_dir: Path, *settings: str) -> tuple[Any, list[dict[str, Any]]]:
    ended = run_recipe("evaluate", run_dir, "task=generation", "scoring.max_new_tokens=8", *settings)
    assert ended.status == 0, ended.err
    return ended, [json.loads(line) for line in (run_dir / "predictions.jsonl").read_text().splitlines()]


def answers(model: Path, prompts: list[str], auto: Any = AutoModelForCausalLM) -> list[str]:
    """By transformers, alone and greedily."""
    plain, found = auto.from_pretrained(model).eval(), list[str]()
    tokenizer: Any = AutoTokenizer.from_pretrained(model)
    for prompt in prompts:
        ids = torch.tensor([tokenizer(prompt)["input_ids"]])
        with torch.no_grad():
            output = plain.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False)
        start = 1 if plain.config.is_encoder_decoder else ids.shape[1]
        found.append(tokenizer.decode(output[0, start:], skip_special_tokens=True))
    return found


@pytest.mark.parametrize("task", ["generation", "lm_eval"])
def test_what_ends_an_answer_is_part_of_what_it_comes_from(task: str, tiny_model: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny_model, tmp_path / "model")
    file = tmp_path / "model" / "generation_config.json"

    def known() -> Any:
        settings = EvaluateSettings(checkpoint=str(tmp_path / "model"), task=task)
        return provenance(EvaluationBase(settings, tmp_path, 0, byte_tokenizer()), {})["generation_config"]

    first = known()
    file.write_text(json.dumps(json.loads(file.read_text()) | {"transformers_version": "5.17.0"}))
    assert known() == first
    file.write_text(json.dumps(json.loads(file.read_text()) | {"eos_token_id": [2, 3]}))
    assert known() != first
    file.unlink()
    assert known() is None


@pytest.mark.long
@pytest.mark.parametrize("way", ["directory", "2 rank files on disk", "2 ranks"])
def test_answers_of_a_causal_model(way: str, llama: Path, pairs: Path, tmp_path: Path) -> None:
    settings = ["data.kind=pairs", f"data.path={pairs}", "batch_size=2", "scoring.metrics=[exact_match,f1]"]
    if way == "2 rank files on disk":
        convert(llama, tmp_path / "converted", format="sharded", ranks=2)
        settings += [f"checkpoint={tmp_path / 'converted'}", "dispatch.device_map=disk"]
    else:
        settings += [f"checkpoint={llama}", *(["launch.ranks=2"] if way == "2 ranks" else [])]
    ended, rows = evaluate(tmp_path / "run", *settings)
    used = [row for row in rows if "left_out" not in row]
    assert [row["name"] for row in used] == ["p0", "p1", "p3", "p4", "p6", "p8"]
    assert used[1]["prompt"] == "once upon a time 1\n", "as in training"
    assert [row["answer"] for row in used] == answers(llama, [row["prompt"] for row in used])
    assert len({row["answer"] for row in used}) > 1
    for name, metric in (("exact_match", exact_match), ("f1", word_f1)):
        scores = [metric(row["answer"], row["reference"]) for row in used]
        assert [row[name] for row in used] == scores
        assert ended.result[name] == pytest.approx(sum(scores) / len(scores))
    beyond = "beyond the model's context of 128 tokens with 8 new tokens"
    assert ended.result["left_out"] == {"without prompt or answer": 2, beyond: 1}
    assert [row["left_out"] for row in rows if "left_out" in row] == [*["without prompt or answer"] * 2, beyond]
    assert f"left out: 1 row {beyond} (" in ended.out
    assert ended.result["num_prompts"] == 6
    assert ended.result["num_at_limit"] == sum(row["num_new_tokens"] == 8 for row in used)
    assert {"exact_match", "f1"} < set(ended.result["confidence_interval"])


@pytest.mark.long
def test_answers_of_an_encoder_decoder(t5: Path, pairs: Path, tmp_path: Path) -> None:
    given = [f"checkpoint={t5}", "data.kind=pairs", f"data.path={pairs}", "data.source_format=write: {source}"]
    ended, rows = evaluate(tmp_path / "run", *given, "batch_size=3", "dispatch.device_map=disk")
    used = [row for row in rows if "left_out" not in row]
    assert used[0]["prompt"] == "write: 0"
    assert [row["answer"] for row in used] == answers(t5, [row["prompt"] for row in used], AutoModelForSeq2SeqLM)
    assert len({row["answer"] for row in used}) > 1
    assert ended.result["left_out"] == {"without prompt or answer": 2}, "T5 has no limit to its context"


def test_answers_in_chats(llama: Path, tmp_path: Path) -> None:
    (tmp_path / "template.jinja").write_text(TEMPLATE)
    turns = [("user", "hello"), ("assistant", "hi"), ("user", "how are you"), ("assistant", "well"), ("user", "bye")]
    chats = [turns, turns[:2], [("assistant", "alone")], turns[:1]]
    rows = [{"messages": [{"role": role, "content": text} for role, text in chat]} for chat in chats]
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = [f"checkpoint={llama}", "data.kind=chat", f"data.path={tmp_path / 'chats.jsonl'}"]
    ended, found = evaluate(tmp_path / "run", *given, f"data.chat_template={tmp_path / 'template.jinja'}")
    first = "<user>hello\n<assistant>"
    prompts = [f"{first}hi\n<user>how are you\n<assistant>", first]
    assert [row["prompt"] for row in found[:2]] == prompts
    assert [row["reference"] for row in found[:2]] == ["well", "hi"]
    assert [row["answer"] for row in found[:2]] == answers(llama, prompts)
    assert ended.result["left_out"] == {"without prompt or answer": 2}


@pytest.mark.long
def test_guided_answers_are_scored(llama: Path, pairs: Path, tmp_path: Path) -> None:
    guided = Path(shutil.copytree(llama, tmp_path / "model"))
    file = guided / "generation_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"guidance_scale": 1.5}))
    _, found = evaluate(tmp_path / "run", f"checkpoint={guided}", "data.kind=pairs", f"data.path={pairs}")
    used = [row for row in found if "answer" in row]
    assert [row["answer"] for row in used] == answers(guided, [row["prompt"] for row in used])


@pytest.mark.long
@pytest.mark.parametrize("ranks", [1, 2])
def test_logits_that_are_not_finite_are_an_error(ranks: int, llama: Path, pairs: Path, tmp_path: Path) -> None:
    broken = tmp_path / "model"
    broken.mkdir()
    for file in llama.iterdir():
        (broken / file.name).write_bytes(file.read_bytes())
    tensors = load_file(broken / "model.safetensors")
    tensors["model.norm.weight"][0] = float("nan")
    save_file(tensors, broken / "model.safetensors", {"format": "pt"})
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    for name in ("predictions.jsonl", "result.json"):
        (run_dir / name).write_text("{}\n")
    given = ["task=generation", "data.kind=pairs", f"data.path={pairs}", f"launch.ranks={ranks}"]
    ended = run_recipe("evaluate", run_dir, f"checkpoint={broken}", *given)
    assert ended.status != 0
    assert f"The logits of {broken} are not finite" in ended.err
    assert not (run_dir / "predictions.jsonl").exists()
    assert not (run_dir / "result.json").exists()


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (["data.kind=text"], "task=generation needs prompts with answers: set data.kind=pairs, instruction or chat"),
        (["data.sequence_length=9"], "data.sequence_length=9 has no effect with task=generation"),
        (["data.workers=2"], "data.workers=2 has no effect with task=generation"),
        (["scoring.metrics=[bleu]"], "scoring.metrics: there is no metric bleu"),
        (["scoring.max_new_tokens=128"], "scoring.max_new_tokens=128 leaves no room in the model's context of 128"),
        (["scoring.max_new_tokens=127"], "has no prompt to answer: left out:"),
        (["data.kind=instruction"], "has no column 'instruction'"),
        (["lm_eval.limit=3"], "lm_eval.limit=3 is for task=lm_eval, not generation"),
        (
            ["task=speed", "scoring.max_new_tokens=3"],
            "scoring.max_new_tokens=3 is for task=classification, reward or generation",
        ),
    ],
)
def test_bad_input(settings: list[str], said: str, tiny_model: Path, pairs: Path, tmp_path: Path) -> None:
    given = [f"checkpoint={tiny_model}", "task=generation", f"data.path={pairs}"]
    kind = [] if any(one.startswith(("data.kind", "task")) for one in settings) else ["data.kind=pairs"]
    data = [one for one in given if not (settings[0] == "task=speed" and one.startswith(("data", "task")))]
    ended = run_recipe("evaluate", tmp_path / "run", *data, *kind, *settings)
    assert ended.status != 0
    assert said in ended.err


def test_chats_are_for_causal_models(t5: Path, tmp_path: Path) -> None:
    (tmp_path / "chats.jsonl").write_text('{"messages": [{"role": "assistant", "content": "a"}]}\n')
    given = [f"checkpoint={t5}", "task=generation", "data.kind=chat", f"data.path={tmp_path / 'chats.jsonl'}"]
    ended = run_recipe("evaluate", tmp_path / "run", *given)
    assert ended.status != 0
    assert "data.kind=chat does not fit model.task=seq2seq" in ended.err


def test_reports_have_the_measures(llama: Path, pairs: Path, tmp_path: Path) -> None:
    given = [f"checkpoint={llama}", "data.kind=pairs", f"data.path={pairs}", "scoring.metrics=[f1]"]
    ended, _ = evaluate(tmp_path / "run", *given)
    report = build_report([str(ended.run_dir)], WeightDigests())
    (table,) = [table for table in report.tables if table.key == "tasks"]
    ((run, _, _, task, measure, value, interval, _),) = [[cell.text for cell in row] for row in table.rows]
    assert (run, task, measure) == ("run", f"generation: {pairs}", "f1")
    assert float(value) == pytest.approx(ended.result["f1"], rel=1e-3)
    assert " to " in interval
    subject: Any = SimpleNamespace(
        evaluations=[read_run(ended.run_dir, "run")], run=None, is_average=False, num_steps=None
    )
    (figure,) = figures_of(subject)  # of a model card
    assert (figure.measure, figure.value, figure.data) == ("f1", ended.result["f1"], "pairs.jsonl")
    assert figure.interval == tuple(ended.result["confidence_interval"]["f1"])
    assert "evaluations" not in {table.key for table in report.tables}, "there is no perplexity"
