"""Objectives of preferences against TRL's trainers: 20 steps on the same data, in float32, from the same weights."""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
from collections.abc import Container
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaForSequenceClassification

pytest.importorskip("trl", reason="trl is not installed; scripts/peers makes an environment that has it")

from fsdp_shard.data import ShuffledDataset, WindowDataset
from tests.support import trl_runs
from tests.support.runs import run_recipe
from tests.support.tiny import byte_tokenizer, llama_config

STEPS, BATCH, PAIRS, SEED, LR = 20, 4, 64, 3, 1e-3
WORDS = re.findall(r"\w+", "the a cat dog sees runs over under house tree red blue very old fish and then stops here")
# Log-probabilities of answers are some -100 nats, whose sums in float32 are off by some 1e-5: more than a part of
# differences that are near 0, as those of the first steps are. Rewards are differences times beta.
ROUNDING, ROUNDING_OF_REWARDS = 5e-5, 5e-6


@dataclass(frozen=True)
class Peer:
    """An objective as both have it: our settings, TRL's options, and which model and data they begin from."""

    objective: str
    ours: tuple[str, ...] = ()
    options: dict[str, Any] = field(default_factory=dict)
    data: str = "pairs"
    model: str = "model"
    adapter: bool = False


PEERS = {
    "dpo": Peer("dpo", ("objective.beta=0.1", "objective.reference=sharded"), {"beta": 0.1}),
    "dpo_precomputed": Peer(
        "dpo",
        ("objective.beta=0.1", "objective.reference=precomputed"),
        {"beta": 0.1, "precompute_ref_log_probs": True},
    ),
    "dpo_lora": Peer("dpo", ("objective.beta=0.1", "objective.reference=adapter"), {"beta": 0.1}, adapter=True),
    "ipo": Peer("ipo", ("objective.beta=0.1",), {"beta": 0.1}),
    "orpo": Peer("orpo", ("objective.beta=0.1", "objective.learn_prompts=true"), {"beta": 0.1}),
    "kto": Peer(
        "kto",
        ("objective.beta=0.1", "objective.undesirable_weight=1.5"),
        {"beta": 0.1, "undesirable_weight": 1.5},
        data="labeled",
    ),
    "simpo": Peer(
        "simpo",
        ("objective.beta=2.0", "objective.gamma=1.0", "objective.label_smoothing=0.1"),
        {"beta": 2.0, "simpo_gamma": 1.0, "label_smoothing": 0.1},
    ),
    "reward": Peer(
        "reward",
        ("model.task=sequence_classification", "objective.center=0.01"),
        {"center_rewards_coefficient": 0.01},
        model="reward_model",
    ),
}
# TRL logs the mean log-probability of a token there, and ours that of the whole answer.
MEAN_LOG_PROBS = ("orpo", "simpo")
LORA = ("adapter=lora", "adapter.rank=8", "adapter.alpha=16")


@pytest.fixture(scope="module")
def place(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with both models, the data, and the data in the order of our steps for TRL."""
    directory = tmp_path_factory.mktemp("trl")
    (directory / "model").symlink_to(tiny_model)
    config = llama_config()
    config.num_labels, config.pad_token_id = 1, byte_tokenizer().pad_token_id
    config.architectures = ["LlamaForSequenceClassification"]
    torch.manual_seed(1)
    LlamaForSequenceClassification(config).save_pretrained(directory / "reward_model")
    byte_tokenizer().save_pretrained(directory / "reward_model")
    pairs, labeled = written_data()
    positions = ShuffledDataset(WindowDataset(np.arange(PAIRS + 1), 1, "any of as many samples"), SEED)
    order = [positions.index_of(position) for position in range(STEPS * BATCH)]
    before = [{**row, "mismatched": labeled[number - 1]["completion"]} for number, row in enumerate(labeled)]
    for name, rows in {
        "pairs": pairs,
        "labeled": labeled,
        "pairs-ordered": [pairs[number] for number in order],
        "labeled-ordered": [before[number] for number in order],
    }.items():
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (directory / f"{name}.jsonl").write_text(text, encoding="utf-8")
    return directory


def written_data() -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Pairs whose rejected completion is in capitals, and one of each with the label that says which."""
    draw = random.Random(0)

    def text(longest: int) -> str:
        return " ".join(draw.choices(WORDS, k=draw.randint(1, longest)))

    pairs = [{"prompt": f"{text(6)}: ", "chosen": text(8), "rejected": text(8).upper()} for _ in range(PAIRS)]
    labeled = [
        {"prompt": row["prompt"], "completion": row["rejected" if number % 2 else "chosen"], "label": number % 2 == 0}
        for number, row in enumerate(pairs)
    ]
    return pairs, labeled


def our_settings(place: Path, peer: Peer) -> list[str]:
    return [
        f"model.path={place / peer.model}",
        f"data.path={place / peer.data}.jsonl",
        f"data.cache_dir={place / 'cache'}",
        "data.kind=preference",
        "data.sequence_length=128",
        f"objective={peer.objective}",
        *peer.ours,
        *(LORA if peer.adapter else ()),
        f"train.global_batch_size={BATCH}",
        f"train.micro_batch_size={BATCH}",
        "train.max_grad_norm=1.0",
        "optim.weight_decay=0",
        "shard.param_dtype=float32",
        f"seed={SEED}",
    ]


@pytest.fixture(scope="module")
def trl(place: Path) -> dict[str, dict[str, Any]]:
    """What TRL's trainers do, all in one process."""
    runs = {}
    for name, peer in PEERS.items():
        rows = place / f"{peer.data}-ordered.jsonl"
        run = {"objective": peer.objective, "rows": str(rows), "options": peer.options}
        adapter = {"adapter": str(first_adapter(place, peer))} if peer.adapter else {}
        runs[name] = {**run, **adapter, "model": str(place / peer.model)}
    job = {
        "model": str(place / "model"),
        "steps": STEPS,
        "batch_size": BATCH,
        "lr": LR,
        "betas": [0.9, 0.999],
        "eps": 1e-8,
        "schedule": "linear",
        "max_grad_norm": 1.0,
        "runs": runs,
    }
    (place / "job.json").write_text(json.dumps(job))
    command = [sys.executable, trl_runs.__file__, str(place / "job.json"), str(place / "trl.json")]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    found: dict[str, dict[str, Any]] = json.loads((place / "trl.json").read_text())
    return found


def first_adapter(place: Path, peer: Peer) -> Path:
    """The adapter that our run begins with, in peft's format: from a run of one update that vanishes in float32."""
    once = ["train.steps=1", "train.schedule=constant", "optim.lr=1e-30"]
    ended = run_recipe("finetune", place / "first_adapter", *our_settings(place, peer), *once)
    assert ended.status == 0, ended.err
    return ended.checkpoint


@pytest.mark.parametrize("name", PEERS)
def test_losses_and_margins_are_those_of_trl(name: str, place: Path, trl: dict[str, dict[str, Any]]) -> None:
    peer, theirs = PEERS[name], trl[name]["steps"]
    margins = [row["rewards/margins"] for row in theirs if "rewards/margins" in row]
    assert margins[-1] > margins[0] + 0.01, "the comparison means nothing unless training moves the model"
    schedule = [f"train.steps={STEPS}", "train.schedule=linear", f"optim.lr={LR}"]
    ended = run_recipe("finetune", place / name, *our_settings(place, peer), *schedule)
    assert ended.status == 0, ended.err
    assert ended.losses == pytest.approx([row["loss"] for row in theirs], rel=1e-4)
    assert [row["learning_rate"] for row in ended.metrics] == pytest.approx([row["learning_rate"] for row in theirs])
    assert [row["grad_norm"] for row in ended.metrics] == pytest.approx([row["grad_norm"] for row in theirs], rel=1e-3)
    for step, (ours, row) in enumerate(zip(ended.metrics, theirs, strict=True), start=1):
        metrics = compared(row, step, peer.objective)
        close = {
            name: pytest.approx(value, rel=1e-4, abs=ROUNDING_OF_REWARDS if "rewards/" in name else ROUNDING)
            for name, value in metrics.items()
        }
        assert with_margins(ours["metrics"], metrics) == close, f"step {step}"


def compared(row: dict[str, Any], step: int, objective: str) -> dict[str, float]:
    """The metrics of a step of TRL that ours has, too; of the first step no accuracy, where all rewards are equal."""
    kinds = ("rewards/",) if objective in MEAN_LOG_PROBS else ("rewards/", "logps/", "kl")
    names = [name for name in row if name.startswith(kinds)]
    return {name: row[name] for name in names if step > 1 or name != "rewards/accuracies"}


def with_margins(metrics: dict[str, Any], names: Container[str]) -> dict[str, Any]:
    """Those of `metrics` in `names`. Answers that stand alone have no margins: TRL's is that of the mean rewards."""
    if "rewards/margins" in names and "rewards/margins" not in metrics:
        metrics = {**metrics, "rewards/margins": metrics["rewards/chosen"] - metrics["rewards/rejected"]}
    return {name: value for name, value in metrics.items() if name in names}


@pytest.mark.parametrize("name", ["dpo", "orpo"])
def test_trl_reads_the_tokens_that_ours_reads(name: str, place: Path, trl: dict[str, dict[str, Any]]) -> None:
    """Bytes of the prompt, bytes of the completion and the end-of-text token, then padding."""
    tokenizer = byte_tokenizer()
    rows = [json.loads(line) for line in (place / "pairs-ordered.jsonl").read_text().splitlines()[:BATCH]]
    parts = {
        side: [tokenizer(row["prompt"] + row[side])["input_ids"] for row in rows] for side in ("chosen", "rejected")
    }
    batch = trl[name]["batch"]
    expected = {"input_ids": [*parts["chosen"], *parts["rejected"]]} if name == "dpo" else {}
    for key, sequences in (expected or {f"{side}_input_ids": ids for side, ids in parts.items()}).items():
        length = 1 + max(map(len, sequences))
        assert batch[key] == [ids + [tokenizer.eos_token_id] * (length - len(ids)) for ids in sequences]
