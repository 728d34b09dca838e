"""task=lm_eval: against the harness's own way from a directory to figures. Questions are files: no hub is asked."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from fsdp_shard.config import EvaluateConfig, compose_jobs
from fsdp_shard.errors import ConfigError
from fsdp_shard.utils import install_command
from tests.evaluation.harness_tasks import CAPITALS, CHOICE, GROUP, PROSE, SHUFFLE, SHUFFLED, WORDS, needs_harness
from tests.support.runs import run_recipe


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory of three tasks and a group, and their questions."""
    directory = tmp_path_factory.mktemp("tasks")
    names = [capital for _, capital in CAPITALS]
    rows = [{"country": country, "choices": names, "label": label} for label, (country, _) in enumerate(CAPITALS)]
    (directory / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (directory / "shuffle.py").write_text(SHUFFLE)
    for name, text in {"capitals": CHOICE, "countries": PROSE, "shuffled": SHUFFLED, "words": WORDS}.items():
        (directory / f"{name}.yaml").write_text(text.format(rows=directory / "rows.jsonl"))
    (directory / "geography.yaml").write_text(GROUP)
    return directory


def by_the_harness(model: Path, tasks: Path, names: list[str], **settings: Any) -> dict[str, Any]:
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    found: dict[str, Any] = simple_evaluate(
        "hf",
        model_args={"pretrained": str(model), "device": "cpu", "dtype": "float32"},
        tasks=names,
        batch_size=8,
        task_manager=TaskManager(include_path=str(tasks)),
        **settings,
    )
    return found


@needs_harness
@pytest.mark.filterwarnings("default")  # the harness's own, and its libraries'
def test_figures_are_those_of_the_harness(tiny_model: Path, tasks: Path, tmp_path: Path) -> None:
    settings = ("task=lm_eval", f"lm_eval.include_path={tasks}", f"checkpoint={tiny_model}")
    ended = run_recipe("evaluate", tmp_path / "run", *settings, "lm_eval.tasks=geography", "dispatch.device_map=disk")
    assert ended.status == 0, ended.err
    expected = by_the_harness(tiny_model, tasks, ["geography"])
    assert ended.result["results"] == json.loads(json.dumps(expected["results"], default=float))
    assert ended.result["num_samples"] == {"capitals": 5, "countries": 5}
    assert ended.result["versions"]["countries"] == 2.0
    assert "10 questions of 2 tasks" in ended.out
    assert "|capitals" in ended.out.replace(" ", "").replace("-", "")

    few = ("lm_eval.tasks=[capitals,words]", "lm_eval.num_fewshot=2", "lm_eval.limit=3", "lm_eval.save_samples=true")
    ended = run_recipe("evaluate", tmp_path / "few", *settings, *few)
    assert ended.status == 0, ended.err
    expected = by_the_harness(tiny_model, tasks, ["capitals", "words"], num_fewshot=2, limit=3)
    rows = [json.loads(line) for line in (tmp_path / "few" / "samples" / "words.jsonl").read_text().splitlines()]
    assert [row["resps"] for row in rows] == [row["resps"] for row in expected["samples"]["words"]]
    assert ended.result["results"]["capitals"]["acc,none"] == expected["results"]["capitals"]["acc,none"]
    assert ended.result["num_fewshot"] == {"capitals": 2, "words": 2}
    assert len(rows) == 3


@needs_harness
@pytest.mark.filterwarnings("default")
def test_a_task_that_shuffles_its_answers(tiny_model: Path, tasks: Path, tmp_path: Path) -> None:
    settings = ("task=lm_eval", f"lm_eval.include_path={tasks}", f"checkpoint={tiny_model}", "lm_eval.tasks=shuffled")
    ended = run_recipe("evaluate", tmp_path / "run", *settings, "lm_eval.save_samples=true")
    assert ended.status == 0, ended.err
    found = [json.loads(line) for line in (tmp_path / "run" / "samples" / "shuffled.jsonl").read_text().splitlines()]
    expected = by_the_harness(tiny_model, tasks, ["shuffled"])["samples"]["shuffled"]
    assert [row["doc"] for row in found] == [row["doc"] for row in sorted(expected, key=lambda row: row["doc_id"])]


@needs_harness
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["lm_eval.tasks=capitels"], "there is no task capitels (did you mean capitals?)"),
        (["lm_eval.tasks=capitals", "lm_eval.chat_template=true"], "tokenizer has no chat template"),
        (["lm_eval.tasks=shuffled", "lm_eval.num_fewshot=5"], "lm_eval.num_fewshot=5 has no effect on shuffled"),
        (
            ["lm_eval.tasks=capitals", "lm_eval.include_path=/nowhere"],
            "lm_eval.include_path=/nowhere is not a directory",
        ),
        (["lm_eval.tasks=astray"], "the questions cannot be read"),
    ],
)
def test_tasks_that_cannot_be_asked(
    tiny_model: Path, tasks: Path, tmp_path: Path, overrides: list[str], said: str
) -> None:
    (tasks / "astray.yaml").write_text(PROSE.replace("countries", "astray").format(rows=tasks / "not_there.jsonl"))
    settings = ("task=lm_eval", f"checkpoint={tiny_model}", f"lm_eval.include_path={tasks}", *overrides)
    ended = run_recipe("evaluate", tmp_path / "run", *settings)
    assert ended.status == 2
    assert said in ended.err
    assert ended.err.count("error: ") == 1
    assert not (tmp_path / "run" / "result.json").exists()


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["task=lm_eval"], r"task=lm_eval needs the names of tasks: add lm_eval\.tasks=\[hellaswag\]"),
        (["task=lm_eval", "lm_eval.tasks={a: 1}"], r"lm_eval\.tasks=\{'a': 1\} is not a list of names"),
        (["task=lm_eval", "lm_eval.tasks=[[a]]"], r"lm_eval\.tasks=\[\['a'\]\] is not a list of names"),
        (["task=lm_eval", "lm_eval.tasks=a", "data.text_column="], r"data\.text_column= is for task=perplexity"),
        (["data.path=b.txt", "lm_eval.include_path="], r"lm_eval\.include_path= is for task=lm_eval"),
        (["task=lm_eval", "lm_eval.tasks=a", "data.path=b.txt"], r"data\.path=b\.txt is for task=perplexity"),
        (["task=lm_eval", "lm_eval.tasks=a", "data.sequence_length=9"], r"data\.sequence_length=9 is for task=perpl"),
        (["data.path=b.txt", "lm_eval.limit=3"], r"lm_eval\.limit=3 is for task=lm_eval, not perplexity"),
        (["lm_eval.tasks=a"], r"data\.path is not set"),
        (["task=lm_eval", "lm_eval.tasks=a", "lm_eval.limit=0"], r"lm_eval\.limit=0 is out of range"),
    ],
)
def test_settings_of_the_other_task_are_refused(overrides: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        compose_jobs(EvaluateConfig, ["checkpoint=x", *overrides], "fsdp-shard evaluate")


@pytest.mark.parametrize(
    ("given", "names"), [("a", ["a"]), ("5", ["5"]), ("[a,b]", ["a", "b"]), ("'mmlu_*'", ["mmlu_*"])]
)
def test_one_name_is_a_list_too(given: str, names: list[str]) -> None:
    (job,) = compose_jobs(
        EvaluateConfig, ["checkpoint=x", "task=lm_eval", f"lm_eval.tasks={given}"], "fsdp-shard evaluate"
    )
    assert job.config.lm_eval.names == names


@pytest.mark.skipif(find_spec("lm_eval") is not None, reason="lm_eval is installed")
def test_without_the_harness(tiny_model: Path, tmp_path: Path) -> None:
    ended = run_recipe(
        "evaluate", tmp_path / "run", "task=lm_eval", "lm_eval.tasks=hellaswag", f"checkpoint={tiny_model}"
    )
    assert ended.status == 2
    assert f"task=lm_eval needs lm-eval, which is not installed. Install it with {install_command('eval')}" in ended.err
