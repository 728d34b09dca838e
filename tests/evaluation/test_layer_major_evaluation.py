"""`dispatch.schedule=layer_major` through the command: the same figures, told, and continued after a kill."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fsdp_shard.evaluation.batch_log import BatchValues
from tests.support.runs import Ended, run_recipe


def settings(tiny_model: Path, texts: Path, tmp_path: Path) -> list[str]:
    return [
        f"checkpoint={tiny_model}", f"data.path={texts}/held_out.txt", "data.sequence_length=64", "batch_size=4",
        f"data.cache_dir={tmp_path}/cache", "dispatch.device_map=disk",
    ]  # fmt: skip


def figures(ended: Ended) -> dict[str, Any]:
    assert ended.status == 0, ended.err
    return {name: value for name, value in ended.result.items() if name not in ("seconds", "schedule")}


def lines(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "losses.jsonl").read_text().splitlines()]


def losses(run_dir: Path) -> list[tuple[list[int], list[float]]]:
    return [(line["windows"], line["losses"]) for line in lines(run_dir)[1:]]


@pytest.mark.long
def test_the_figures_are_equal_and_the_order_is_told(tiny_model: Path, texts: Path, tmp_path: Path) -> None:
    given = settings(tiny_model, texts, tmp_path)
    rows = run_recipe("evaluate", tmp_path / "rows", *given, "dispatch.schedule=batch_major")
    chosen = run_recipe("evaluate", tmp_path / "chosen", *given)
    asked = run_recipe("evaluate", tmp_path / "asked", *given, "dispatch.schedule=layer_major")
    assert figures(rows) == figures(chosen) == figures(asked)
    assert losses(tmp_path / "rows") == losses(tmp_path / "chosen") == losses(tmp_path / "asked"), "every bit of them"
    num_batches = len(losses(tmp_path / "rows"))
    assert num_batches > 8
    assert rows.result["schedule"] == "batch_major"
    assert f"read for each of {num_batches} batches" in rows.out
    for ended in (chosen, asked):
        assert ended.result["schedule"] == "layer_major"
        assert f"read once for {num_batches} batches, whose hidden states are in memory" in ended.out


@pytest.mark.long
def test_what_was_killed_goes_on_in_either_order(tiny_model: Path, texts: Path, tmp_path: Path) -> None:
    given, run_dir = settings(tiny_model, texts, tmp_path), tmp_path / "run"
    whole = run_recipe("evaluate", run_dir, *given)
    first, expected, result = figures(whole), losses(run_dir), whole.result
    again = run_recipe("evaluate", run_dir, *given)
    assert again.result == result  # of which nothing was computed
    kept = (run_dir / "losses.jsonl").read_bytes().splitlines(keepends=True)[:4]
    (run_dir / "losses.jsonl").write_bytes(b"".join(kept) + b'{"windows": [')
    ended = run_recipe("evaluate", run_dir, *given, "dispatch.schedule=batch_major")
    assert "continuing after 3 of" in ended.out
    assert figures(ended) == first
    assert losses(run_dir) == expected
    assert ended.result["schedule"] == "batch_major, layer_major"


def test_finished_batches_are_kept_when_a_later_one_fails(tiny_model: Path, texts: Path, tmp_path: Path) -> None:
    """A model whose weights for one token are not finite: the losses of the batches before it are in the log."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    text = (texts / "held_out.txt").read_text()
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    ids = tokenizer(text)["input_ids"]
    late = next(token for token in dict.fromkeys(reversed(ids)) if ids.index(token) > 1000)
    with torch.no_grad():
        model.get_parameter("model.embed_tokens.weight")[late] = float("nan")
    model.config.tie_word_embeddings = False
    model.lm_head.weight = torch.nn.Parameter(torch.zeros_like(model.lm_head.weight))
    model.save_pretrained(tmp_path / "broken")
    tokenizer.save_pretrained(tmp_path / "broken")
    given = settings(tmp_path / "broken", texts, tmp_path)
    ended = run_recipe("evaluate", tmp_path / "run", *given)
    assert ended.status == 1
    assert "not finite" in ended.err
    assert 3 <= len(losses(tmp_path / "run")) == ids.index(late) // (4 * 64)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["dispatch.device_map=cpu"], "no block is streamed"),
        (["dispatch.device_map=auto"], "all blocks of {model} stay in memory"),
    ],
)
def test_it_is_an_error_where_it_has_no_effect(
    tiny_model: Path, texts: Path, tmp_path: Path, given: list[str], said: str
) -> None:
    given = [*settings(tiny_model, texts, tmp_path)[:-1], "dispatch.schedule=layer_major", *given]
    ended = run_recipe("evaluate", tmp_path / "run", *given)
    assert ended.status != 0
    assert said.format(model=tiny_model) in ended.err


def test_other_commands_do_not_have_it(tiny_model: Path, tmp_path: Path) -> None:
    for command, given in (
        ("generate", [f"checkpoint={tiny_model}", "prompt=a"]),
        ("plan", [f"model.path={tiny_model}", "dispatch.device_map=disk"]),
    ):
        ended = run_recipe(command, tmp_path / command, *given, "dispatch.schedule=layer_major")
        assert ended.status == 2
        assert "dispatch.schedule=layer_major" in ended.err
    tasks = [f"checkpoint={tiny_model}", "task=lm_eval", "lm_eval.tasks=[a]", "dispatch.schedule=layer_major"]
    ended = run_recipe("evaluate", tmp_path / "evaluate", *tasks)
    assert ended.status == 2
    assert "is for task=perplexity, not lm_eval" in ended.err


def test_a_line_of_an_unknown_order_is_not_taken(tmp_path: Path) -> None:
    from fsdp_shard.evaluation.batch_log import BatchLog

    batches = [[0], [1]]
    with BatchLog(tmp_path / "losses.jsonl", {}, batches) as log:
        log.append(BatchValues([0], [0.5], 0.1, "layer_major"))
        log.append(BatchValues([1], [0.5], 0.1, "sideways"))
    with BatchLog(tmp_path / "losses.jsonl", {}, batches) as log:
        assert log.finished == [BatchValues([0], [0.5], 0.1, "layer_major")]
