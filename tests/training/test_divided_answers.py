"""Objectives that compare whole sequences, where ranks divide the sequences: the figures of one rank."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from fsdp_shard.training.loss.distillation import StudentTerms
from fsdp_shard.training.loss.log_probs import LabelLogProbs
from fsdp_shard.training.objectives.registry import OBJECTIVES
from tests.support.runs import Ended, run_recipe
from tests.support.tiny import byte_tokenizer, llama_config


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    root = tmp_path_factory.mktemp("divided")
    config = llama_config()
    config.num_attention_heads, config.num_key_value_heads = 6, 2  # two ranks can share them
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(root / "model")
    byte_tokenizer().save_pretrained(root / "model")
    draw = random.Random(1)

    def text(longest: int) -> str:
        return "".join(draw.choice("abcdefgh ") for _ in range(draw.randint(2, longest)))

    rows = [{"prompt": text(12), "chosen": text(12), "rejected": text(12)} for _ in range(20)]
    (root / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (root / "prose.txt").write_text(" ".join(text(40) for _ in range(200)))
    return [
        f"model.path={root}/model", f"data.path={root}/pairs.jsonl", f"data.cache_dir={root}/tokens",
        "data.kind=preference", "data.sequence_length=32", "data.eval_fraction=0.2", "train.steps=3",
        "train.eval_every=3", "train.global_batch_size=4", "train.micro_batch_size=2", "shard.param_dtype=float32",
        "optim.lr=1e-2", "launch.device=cpu",
    ]  # fmt: skip


def _figures(run_dir: Path) -> list[float]:
    """Losses, norms of gradients, tokens and metrics of steps, and those of evaluations."""
    names = ("metrics.jsonl", "evaluations.jsonl")
    rows: list[dict[str, Any]] = [
        json.loads(row) for name in names for row in (run_dir / name).read_text().splitlines()
    ]
    figures = [[row["loss"], row.get("grad_norm", 0.0), *row["metrics"].values()] for row in rows]
    counts = [row.get("tokens", row.get("num_tokens")) for row in rows]
    return [figure for each in figures for figure in each] + counts


def _done(run_dir: Path, *settings: str) -> Ended:
    ended = run_recipe("finetune", run_dir, *settings)
    assert ended.status == 0, ended.err
    return ended


@pytest.mark.long
@pytest.mark.parametrize("overrides", [
    ("objective=dpo",),
    ("objective=dpo", "adapter=lora", "shard=fsdp1", "shard.param_dtype=float32"),
    ("objective=kto", "objective.reference=sharded"),
    ("objective=orpo", "objective.learn_prompts=true", "shard.context_method=ring"),
    ("objective=simpo", "shard.context_method=ring", "model.chunked_loss=false"),
], ids=lambda overrides: " ".join(overrides))  # fmt: skip
def test_answers_are_compared_as_on_one_rank(overrides: tuple[str, ...], settings: list[str], tmp_path: Path) -> None:
    alone = [text for text in overrides if "context" not in text]
    _done(tmp_path / "alone", *settings, *alone)
    divided = ["shard.context_parallel=2", "launch.ranks=2", f"data.cache_dir={tmp_path}/cache"]
    _done(tmp_path / "divided", *settings, *overrides, *divided)
    assert _figures(tmp_path / "divided") == pytest.approx(_figures(tmp_path / "alone"), rel=2e-4, abs=1e-5)


@pytest.mark.long
@pytest.mark.parametrize("logits", ["precomputed", "computed"])
def test_a_student_of_divided_sequences(logits: str, settings: list[str], tmp_path: Path) -> None:
    model = settings[0].partition("=")[2]
    given = [text for text in settings if "data.kind" not in text and "data.path" not in text]
    given += [f"data.path={Path(model).parent}/prose.txt", "objective=distill", f"objective.teacher={model}"]
    given += ["objective.temperature=2", "objective.top_k=20", "data.packing=true", "data.sequence_length=30"]
    _done(tmp_path / "alone", *given)
    divided = ["shard.context_parallel=2", "launch.ranks=4", "shard.context_method=ring"]
    divided += [f"data.cache_dir={tmp_path}/cache", f"objective.teacher_logits={logits}"]
    _done(tmp_path / "divided", *given, *divided)
    assert _figures(tmp_path / "divided") == pytest.approx(_figures(tmp_path / "alone"), rel=2e-4, abs=1e-5)


def test_a_plan_knows_how_many_values_are_gathered() -> None:
    assert OBJECTIVES["distill"].num_token_values == StudentTerms.num_values
    assert OBJECTIVES["dpo"].num_token_values == LabelLogProbs.num_values


def test_packed_pairs_are_not_divided(settings: list[str], tmp_path: Path) -> None:
    given = ["objective=dpo", "data.packing=true", "shard.context_parallel=2", "launch.ranks=2"]
    ended = run_recipe("finetune", tmp_path / "run", *settings, *given)
    assert (ended.status, ended.err.count("error: ")) == (2, 1), ended.err
    assert "packed pairs have masks of their own" in ended.err
