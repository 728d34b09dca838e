"""Model cards: figures of evaluations with their settings, and paths without directories."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import ModelCard, ModelCardData
from transformers import (
    BertConfig,
    BertModel,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedModel,
    T5Config,
    T5ForConditionalGeneration,
)

from fsdp_shard.checkpoint import HubTarget, locate
from fsdp_shard.cli.push_command import default_settings
from fsdp_shard.errors import InputError
from fsdp_shard.evaluation import ReportFiles, make_card, read_subject, report_runs, shown_setting
from tests.support.runs import run_recipe


def _card(trained: Path, directory: Path) -> tuple[ModelCard, list[str]]:
    source = locate(f"{trained / 'run'}@best")
    subject, problems = read_subject(HubTarget("org/name"), source, None, default_settings, [str(directory)])
    (directory / "README.md").write_text(make_card(subject))
    return ModelCard.load(directory / "README.md"), problems


def _data(card: ModelCard) -> ModelCardData:
    assert isinstance(card.data, ModelCardData)
    return card.data


def _settings(source: str) -> list[str]:
    subject, _ = read_subject(HubTarget("org/name"), locate(source), None, default_settings, [])
    return make_card(subject).partition("## Settings")[2].partition("## ")[0].strip().splitlines()


@pytest.mark.long
def test_a_setting_that_a_resume_changed_has_both_values(
    trained: Path, tiny_model: Path, texts: Path, tmp_path: Path
) -> None:
    run = Path(shutil.copytree(trained / "run", tmp_path / "run"))
    common = [f"model.path={tiny_model}", f"data.path={texts / 'train.txt'}", "data.sequence_length=32"]
    common += [f"data.eval_path={texts / 'held_out.txt'}", "train.eval_every=2", "checkpoint.every=2"]
    for num_steps, rate in ((5, "0.001"), (6, "1e-6")):
        ended = run_recipe("finetune", run, *common, f"train.steps={num_steps}", f"optim.lr={rate}")
        assert ended.status == 0, ended.err
    note, *rows = _settings(str(run))
    assert note == "Those that are not the defaults of fsdp-shard, or that have changed."
    assert "| optim.lr | 0.0123 until step 4, 0.001 until step 5, then 1e-06 |" in rows
    assert "| train.steps | 4 until step 4, 5 until step 5, then 6 |" in rows
    assert "| optim.lr | 0.0123 |" in _settings(f"{run}@step-4"), "which was made before"
    page = tmp_path / "report.md"
    report_runs([str(run)], ReportFiles(md=str(page)))
    assert "## Settings that changed" in page.read_text()
    assert "| optim.lr | 0.0123 until step 4, 0.001 until step 5, then 1e-06 |" in page.read_text()

    trainer = run / "checkpoints" / "step-00000006" / "trainer.json"
    older = {name: value for name, value in json.loads(trainer.read_text()).items() if name != "changed_settings"}
    trainer.write_text(json.dumps(older))
    note, *rows = _settings(str(run))
    assert note.endswith("They are those of this step: whether earlier ones had others is not recorded.")
    assert "| optim.lr | 1e-06 |" in rows


def test_held_out_metrics_of_preferences(trained: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(trained / "run", tmp_path / "run"))
    rows = [json.loads(line) for line in (run / "evaluations.jsonl").read_text().splitlines()]
    for row in rows:
        row |= {"loss": 0.5, "perplexity": None}
        row["metrics"] = {"rewards/margins": row["step"] / 8, "rewards/accuracies": 0.75, "lengths/chosen": 9.5}
    (run / "evaluations.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    recorded = run / "checkpoints" / "step-00000002" / "run_config.yaml"
    recorded.write_text(recorded.read_text().replace("- objective: sft\n", "- objective: dpo\n"))
    subject, problems = read_subject(HubTarget("org/name"), locate(f"{run}@step-2"), None, default_settings, [])
    assert problems == []
    section = make_card(subject).partition("## Evaluation")[2].partition("## ")[0]
    assert "Losses in units of the objective per sample." in section
    found = {row.split(" | ")[1]: row.split(" | ")[2] for row in section.splitlines() if row.startswith("| held-out")}
    assert found == {"loss": "0.5000", "rewards/margins": "0.2500", "rewards/accuracies": "0.7500"}


def _card_of(source: str, adapter_base: str | None = None) -> str:
    return make_card(read_subject(HubTarget("org/name"), locate(source), adapter_base, default_settings, [])[0])


def _section(card: str, title: str) -> str:
    return card.partition(f"## {title}")[2].partition("## ")[0]


@pytest.mark.parametrize(
    ("made", "loader", "tag"),
    [
        (GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=8, n_head=2)), "AutoModelForCausalLM", "text-generation"),
        (
            T5ForConditionalGeneration(T5Config(num_layers=1, d_model=8, d_kv=4, d_ff=8, num_heads=2)),
            "AutoModelForSeq2SeqLM",
            "text2text-generation",
        ),
        (BertModel(BertConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=2)), "BertModel", None),
    ],
    ids=["gpt2", "t5", "bert"],
)
def test_the_card_loads_a_model_with_its_head(
    made: PreTrainedModel, loader: str, tag: str | None, tmp_path: Path
) -> None:
    made.save_pretrained(tmp_path / "model")
    card = _card_of(str(tmp_path / "model"))
    assert _data(ModelCard(card)).pipeline_tag == tag
    code = _section(card, "How to load it").partition("```python")[2].partition("```")[0]
    assert f"{loader}.from_pretrained(" in code
    found: dict[str, Any] = {}
    exec(code.replace("org/name", str(tmp_path / "model")), found)
    assert type(found["model"]) is type(made)
    assert ("fsdp-shard generate checkpoint=org/name" in card) == (tag == "text-generation")


def test_skipped_steps_are_told_and_their_held_out_losses_stay(trained: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(trained / "run", tmp_path / "run"))
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    rows[2:] = [{**row, "loss": None, "skipped": count + 1} for count, row in enumerate(rows[2:])]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    evaluations = [json.loads(line) for line in (run / "evaluations.jsonl").read_text().splitlines()]
    card = _card_of(f"{run}@step-4")
    curve = _section(card, "Loss")
    assert curve.strip().splitlines()[-2:] == ["| 3 | - | - |", f"| 4 | - | {evaluations[-1]['loss']:#.4g} |"]
    assert "Steps whose loss was not finite are left out of it." in curve
    assert "| skipped steps (loss or gradients not finite) | 2 |" in card
    assert "skipped" not in _card_of(str(trained / "run"))


def test_the_curve_has_no_evaluations_of_other_held_out_data(trained: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(trained / "run", tmp_path / "run"))
    rows = [json.loads(line) for line in (run / "evaluations.jsonl").read_text().splitlines()]
    for row in rows:
        row["held_out"] = "first" if row["step"] < 4 else "second"
    (run / "evaluations.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for step, expected in (("step-2", ["0", "2"]), ("step-4", ["4"])):
        lines = [line.split(" | ") for line in _section(_card_of(f"{run}@{step}"), "Loss").splitlines()]
        found = [cells[0].removeprefix("| ") for cells in lines if len(cells) == 3 and not cells[2].startswith("-")]
        assert found == ["step", *expected], "those that have a held-out loss"


@pytest.mark.parametrize(
    ("setting", "unit"),
    [
        ("task: sequence_classification", "nats per text"),
        ("loss: mine.py:f", "the unit of a loss of one's own"),
        ("task: causal_lm", "nats per token"),
    ],
)
def test_losses_have_the_unit_of_what_was_trained(trained: Path, tmp_path: Path, setting: str, unit: str) -> None:
    run = Path(shutil.copytree(trained / "run", tmp_path / "run"))
    recorded = run / "checkpoints" / "step-00000002" / "run_config.yaml"
    name = setting.partition(":")[0]
    recorded.write_text(re.sub(rf"^( *){name}: .*", rf"\1{setting}", recorded.read_text(), flags=re.MULTILINE))
    card = _card_of(f"{run}@step-2")
    assert f"Losses in {unit}." in _section(card, "Evaluation")
    assert _section(card, "Loss").replace("\\", "").strip().startswith(f"In {unit}.")


def test_how_machines_are_set_up_is_not_in_the_card(trained: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(trained / "run", tmp_path / "run"))
    step = run / "checkpoints" / "step-00000002"
    recorded = (step / "run_config.yaml").read_text()
    recorded = recorded.replace("  rendezvous: null\n", "  rendezvous: node7.corp:29400\n")
    (step / "run_config.yaml").write_text(recorded.replace("  cache_dir: null\n", "  cache_dir: /scratch/mine\n"))
    trainer = json.loads((step / "trainer.json").read_text())
    trainer["changed_settings"] = [[1, "launch.rendezvous", "node6.corp:1", "node7.corp:29400"]]
    (step / "trainer.json").write_text(json.dumps(trainer))
    settings = _section(_card_of(f"{run}@step-2"), "Settings")
    assert "| optim.lr | 0.0123 |" in settings
    assert not [name for name in ("rendezvous", "cache", "corp", "mine") if name in settings]


def _keep_rows(file: Path, first: int) -> None:
    rows = file.read_text().splitlines(keepends=True)
    file.write_text("".join(row for row in rows if json.loads(row)["step"] >= first))


def test_the_card_of_a_step_knows_nothing_of_later_ones(trained: Path) -> None:
    curve = _section(_card_of(f"{trained / 'run'}@step-2"), "Loss")
    assert [line.split(" | ")[0] for line in curve.strip().splitlines()[-3:]] == ["| 0", "| 1", "| 2"]


def test_a_run_that_went_on_in_another_directory_counts_all_of_its_steps(trained: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(trained / "run", tmp_path / "run"))
    whole = json.loads((run / "result.json").read_text())
    for name in ("metrics.jsonl", "evaluations.jsonl"):
        _keep_rows(run / name, 3)
    card = _card_of(str(run))
    assert f"| tokens | {whole['tokens']:,} |" in card
    assert "| seconds of training after step 2 |" in card
    assert "The losses up to step 2 are not known: they are in no file of the run's directory." in card

    page = tmp_path / "report.md"
    best = {"best_loss": 1.25, "best_step": 2}
    (run / "result.json").write_text(json.dumps(whole | best))
    for is_completed in (True, False):
        report_runs([str(run)], ReportFiles(md=str(page)))
        _, row = [line.split(" | ") for line in page.read_text().splitlines() if line.startswith("| run |")][:2]
        assert row[5:8] == [f"{whole['loss_before']:#.4g}", "1.250", "2"], "at step 0, best, after step"
        assert "1 run with no metrics of its first steps, which another directory had: run" in page.read_text()
        if is_completed:
            (run / "result.json").unlink()
            trainer = run / "checkpoints" / "step-00000004" / "trainer.json"
            trainer.write_text(json.dumps(json.loads(trainer.read_text()) | best))


@pytest.mark.long
def test_adapters_say_what_they_are_and_began_with(tiny_model: Path, texts: Path, tmp_path: Path) -> None:
    common = [f"model.path={tiny_model}", f"data.path={texts / 'train.txt'}", "data.sequence_length=32"]
    common += ["train.steps=2", "adapter=lora"]
    first, second = tmp_path / "first", tmp_path / "second"
    assert run_recipe("finetune", first, *common, "adapter.dora=true").status == 0
    earlier = ["adapter.dora=true", f"adapter.path={first}"]
    assert run_recipe("finetune", second, *common, *earlier).status == 0
    card = _card_of(str(second), "org/base")
    named = "first/checkpoints/step-00000002"
    assert "An adapter (DoRA), fine-tuned from [org/base]" in card
    assert f"It is step 2 of the run second. Its training began with the adapter {named}, whose" in card
    assert f"| earlier adapter | {named} |" in card
    assert "| base model | org/base |" in card
    assert f"| adapter.path | {named} |" in card
    assert str(tmp_path) not in card
    assert "earlier adapter" not in _card_of(str(first), "org/base")

    held_out = [f"data.eval_path={texts / 'held_out.txt'}", "adapter.quantize=int8"]
    held_out += ["train.sample_prompts=[a]", "train.sample_tokens=6"]
    assert run_recipe("finetune", tmp_path / "quantized", *common, *held_out).status == 0
    (tmp_path / "README.md").write_text(_card_of(str(tmp_path / "quantized")))
    pushed = ModelCard.load(tmp_path / "README.md")
    (row,) = [line for line in pushed.text.splitlines() if line.startswith("| held-out data") and "| loss |" in line]
    assert "| quantize int8 |" in row
    assert "| train.sample\\_tokens | 6 |" in pushed.text, "which is no secret"
    assert not pushed.data.eval_results, "the merged model is not the quantized one that was evaluated"


@pytest.mark.long
def test_an_average_of_the_weights_says_so(trained: Path, tiny_model: Path, texts: Path, tmp_path: Path) -> None:
    common = [f"model.path={tiny_model}", f"data.path={texts / 'train.txt'}", "data.sequence_length=32"]
    common += [f"data.eval_path={texts / 'held_out.txt'}", "train.steps=2", "train.ema_decay=0.875"]
    assert run_recipe("finetune", tmp_path / "run", *common).status == 0
    cards = {}
    for name in ("", "ema"):
        source = locate(str(tmp_path / "run" / "checkpoints" / "step-00000002" / name))
        subject, problems = read_subject(HubTarget("org/name"), source, None, default_settings, [])
        assert problems == []
        cards[name] = make_card(subject)
    average = (
        "It is the exponential moving average of the weights (`train.ema_decay` 0.875) up to step 2 of the run run."
    )
    assert average in cards["ema"]
    assert "It is step 2 of the run run." in cards[""]
    assert "Of the weights themselves, not of their average." in cards["ema"]
    assert "held-out data of the training run" in cards[""]
    assert "held-out data of the training run" not in cards["ema"], "whose loss is not known"
    same = ("| fingerprint of the base model |", "| fingerprint of the data |", "| train.ema\\_decay | 0.875 |")
    assert all(row in card for row in same for card in cards.values())


def _change(trained: Path, directory: Path, settings: dict[str, Any], **figures: Any) -> None:
    """Copy the evaluation, with other settings in its result.json, and these figures."""
    shutil.copytree(trained / "evaluated", directory)
    result = json.loads((directory / "result.json").read_text())
    result["provenance"]["settings"] |= settings
    (directory / "result.json").write_text(json.dumps(result | figures))


def test_figures_of_other_weights_than_those_stored_say_so(trained: Path, tmp_path: Path) -> None:
    for name, dispatch in {"q": {"dtype": "keep", "quantize": "int8"}, "d": {"dtype": "bfloat16"}}.items():
        _change(trained, tmp_path / "all" / name, {"dispatch": dispatch}, perplexity={"q": 77.25, "d": 78.25}[name])
    card, problems = _card(trained, tmp_path / "all")
    assert problems == []
    (quantized,) = [line for line in card.text.splitlines() if "77.25" in line]
    (cast,) = [line for line in card.text.splitlines() if "78.25" in line]
    assert "quantize int8" in quantized
    assert "dtype bfloat16" in cast
    published = {one.metric_value: one for one in _data(card).eval_results or []}
    assert 77.25 not in published
    assert (published[78.25].metric_args or {})["dtype"] == "bfloat16"


def test_figures_of_answers_say_how_long_these_may_be(trained: Path, tmp_path: Path) -> None:
    settings = {"task": "generation", "max_new_tokens": 45, "by": None, "sequence_length": None}
    _change(trained, tmp_path / "all" / "answers", settings, exact_match=0.8125)
    card, problems = _card(trained, tmp_path / "all")
    assert problems == []
    (row,) = [line for line in card.text.splitlines() if "0.8125" in line]
    assert "| max\\_new\\_tokens 45 |" in row
    (published,) = [one for one in _data(card).eval_results or [] if one.metric_value == 0.8125]
    assert (published.metric_args or {})["max_new_tokens"] == 45


def test_evaluations_with_another_config_or_tokenizer_are_left_out(trained: Path, tmp_path: Path) -> None:
    changes = {"own": {}, "config": {"weights": "config"}, "tokenizer": {"tokenizer": "digest"}}
    for name, changed in changes.items():
        _change(trained, tmp_path / "all" / name, {}, perplexity={"own": 77.25}.get(name, 66.5))
        file = tmp_path / "all" / name / "result.json"
        result = json.loads(file.read_text())
        for part, digest in changed.items():
            result["provenance"][part][digest] = "0" * 32
        file.write_text(json.dumps(result))
    card, problems = _card(trained, tmp_path / "all")
    assert problems == ["2 runs, evaluated with another config or tokenizer: config (config), tokenizer (tokenizer)."]
    results = _data(card).eval_results or []
    assert [one.metric_value for one in results if one.metric_type == "perplexity"][:1] == [77.25]
    assert "66.5" not in card.text
    shutil.rmtree(tmp_path / "all" / "own")
    with pytest.raises(InputError, match=r"with another config or tokenizer than theirs: config \(config\), tokenizer"):
        _card(trained, tmp_path / "all")


def test_figures_of_the_harness(trained: Path, tmp_path: Path) -> None:
    results = {
        "capitals": {
            "alias": "capitals",
            "name": 1.5,
            "sample_len": 5,
            "acc,none": 0.25,
            "acc_stderr,none": 0.125,
        }
    }
    for name, limit, value in (("all", None, 0.25), ("part", 3, 0.75)):
        results["capitals"]["acc,none"] = value
        asked = {"limit": limit, "num_fewshot": 2, "chat_template": True}
        _change(trained, tmp_path / "runs" / name, {"lm_eval": asked}, results=results, num_fewshot={"capitals": 2})
    _change(trained, tmp_path / "runs" / "timed", {"task": "speed"})
    card, problems = _card(trained, tmp_path / "runs")
    assert problems == [
        "1 run of a part of the questions (lm_eval.limit): part.",
        "1 run of the speed, which depends on the machine: timed.",
    ]
    (published,) = [one for one in _data(card).eval_results or [] if one.dataset_name == "capitals"]
    assert (published.metric_type, published.metric_value) == ("acc", 0.25)
    assert published.metric_args == {"num_fewshot": 2, "chat_template": True, "standard_error": 0.125}
    assert "num\\_fewshot 2, chat\\_template true" in card.text


@pytest.mark.parametrize(
    ("name", "value", "shown"),
    [
        ("data.eval_path", "private/held out/a b.txt", "a b.txt"),
        ("data.eval_path", "file:///home/me/it's/a.txt", "a.txt"),
        ("data.chat_template", "~/mine/x.jinja", "x.jinja"),
        ("data.mixture.code.path", "'/home/o''brien/c.jsonl'", "c.jsonl"),
        ("loss", "private/losses.py:mine", "losses.py:mine"),
        ("data.files", str(["/a/private, place/x.txt", "private/y.txt"]), "['x.txt', 'y.txt']"),
        ("some.setting", str([{"path": "private/x.txt", "text": "and/or"}]), "[{'path': 'x.txt', 'text': 'and/or'}]"),
        ("some.setting", "/home/my private files/x", "x"),
        ("some.setting", "see ~/my private/x, and s3://bucket/data", "see .../x, and s3://bucket/data"),
        ("adapter.path", "/home/me/a1/checkpoints/step-00000002", "a1/checkpoints/step-00000002"),
        ("model.path", "a1/checkpoints/step-00000002/ema/", "a1/checkpoints/step-00000002/ema"),
        ("data.path", "s3://bucket/data/x.jsonl", "s3://bucket/data/x.jsonl"),
        ("data.path", "https://host/a/x.jsonl?X-Amz-Signature=ab&sv=1", "https://host/a/x.jsonl"),
        ("objective.teacher", "s3://bucket/run?access=ab", "s3://bucket/run"),
        ("some.setting", str([{"path": "zip://a::gs://b/c?x=y"}]), "[{'path': 'c'}]"),
        ("some.setting", "['/home/private/x', <hidden>]", "['x', <hidden>]"),
    ],
)
def test_of_paths_the_last_part_is_shown(name: str, value: str, shown: str) -> None:
    assert shown_setting(name, value) == shown
