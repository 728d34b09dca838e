"""A loss and metrics of one's own: against a plain loop, over ranks and micro-batches, and what is refused."""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from fsdp_shard.config import FinetuneConfig
from fsdp_shard.data import IGNORE_INDEX, DataConfig, ShuffledDataset
from fsdp_shard.distributed import DistributedContext
from fsdp_shard.errors import ConfigError, LossError
from fsdp_shard.models import ModelConfig
from fsdp_shard.sharding import WRAPPERS
from fsdp_shard.training.config import TrainConfig
from fsdp_shard.training.held_out.evaluator import HeldOutEvaluator, evaluate_loss
from fsdp_shard.training.loss.custom_functions import CustomFunctions, import_loss
from fsdp_shard.training.loss.linear_cross_entropy import use_loss_head
from fsdp_shard.training.optim.build import build_optimizer
from fsdp_shard.utils import check
from tests.support.ranks import on_ranks
from tests.support.sharded import sharded
from tests.support.tiny import llama
from tests.training.conftest import Plain, stream
from tests.training.tiny_run import ADAMW, LR, SEED, Run, Uneven, losses

CONFIG = TrainConfig(steps=6, global_batch_size=4, micro_batch_size=1, max_grad_norm=0.5, schedule="constant")


def cross_entropy(output: Any, batch: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """What training does anyway."""
    labels = batch["labels"]
    total = F.cross_entropy(output.logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORE_INDEX, reduction="sum")
    return total, (labels != IGNORE_INDEX).sum()


def weighted(output: Any, batch: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Even tokens count thrice: neither sum nor count is that of the cross-entropy."""
    labels = batch["labels"].flatten()
    each = F.cross_entropy(output.logits.flatten(0, 1), labels, ignore_index=IGNORE_INDEX, reduction="none")
    weights = torch.where(labels == IGNORE_INDEX, 0.0, torch.where(labels % 2 == 0, 3.0, 1.0))
    return (each * weights).sum(), weights.sum()


def accuracy(output: Any, batch: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    counted = batch["labels"] != IGNORE_INDEX
    hits = (output.logits.argmax(-1) == batch["labels"]) & counted
    return {"ones": (torch.ones(()), 1), "accuracy": (hits.sum(), counted.sum())}


def uneven() -> Uneven:
    whole = stream(11 * 8 + 4)
    return Uneven(whole.tokens, whole.sequence_length, whole.name)


def plain_loop(config: TrainConfig) -> tuple[list[float], list[float]]:
    """Losses and accuracies of whole batches in one process."""
    model = llama().train()
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": 0.1},
            {"params": [p for p in model.parameters() if p.ndim == 1], "weight_decay": 0.0},
        ],
        lr=LR,
    )
    values, accuracies = [], []
    for step in range(config.num_steps):
        batch = ShuffledDataset(uneven(), SEED).batch(range(step * 4, (step + 1) * 4))
        output = model(torch.from_numpy(batch.input_ids))
        given = {"labels": torch.from_numpy(batch.labels)}
        total, count = weighted(output, given)
        hits, counted = accuracy(output, given)["accuracy"]
        accuracies.append(float(hits / counted))
        optimizer.zero_grad()
        (total / count).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        values.append(float(total.detach() / count))
    return values, accuracies


def train_weighted(context: DistributedContext, wrapper: str) -> dict[str, Any]:
    model = sharded(WRAPPERS[wrapper](param_dtype="float32"), context)
    run = Run(context, model=model, data=uneven())
    run.optimizer = build_optimizer(ADAMW, model, context)
    functions = CustomFunctions(weighted, accuracy)
    reports = run.go(CONFIG, functions=functions)
    held_out = evaluate_loss(model, stream(5 * 8 + 4), 2, context, functions)
    return {"losses": losses(reports), "metrics": [report.metrics for report in reports], "held_out": held_out.loss}


@pytest.mark.parametrize(("wrapper", "world_size"), [("fsdp2", 1), ("fsdp2", 2), ("fsdp1", 2), ("ddp", 4)])
def test_training_equals_a_plain_loop(wrapper: str, world_size: int) -> None:
    expected, accuracies = plain_loop(CONFIG)
    for found in on_ranks(world_size, train_weighted, wrapper):
        assert found["losses"] == pytest.approx(expected, rel=5e-6)
        assert [metrics["accuracy"] for metrics in found["metrics"]] == pytest.approx(accuracies)
        assert [metrics["ones"] for metrics in found["metrics"]] == [1.0] * 6


def test_evaluations_use_it(alone: DistributedContext) -> None:
    data = uneven()
    model: Any = Plain(llama())
    batch = data.batch(range(len(data)))
    with torch.no_grad():
        output = model.module(torch.from_numpy(batch.input_ids))
        total, count = weighted(output, {"labels": torch.from_numpy(batch.labels)})
    report = evaluate_loss(model, data, 4, alone, CustomFunctions(weighted))
    assert report.loss == pytest.approx(float(total / count), rel=1e-6)
    assert report.num_tokens == batch.num_predictions
    assert report.perplexity is None, "its exponential is none"


def test_held_out_data_without_what_it_counts(alone: DistributedContext) -> None:
    def rare(output: Any, batch: Any) -> tuple[torch.Tensor, int]:
        return output.logits.sum() * 0, 0

    model: Any = Plain(llama())
    with pytest.raises(
        LossError, match=r"^The loss function counted nothing in the held-out data, so there is no mean"
    ):
        evaluate_loss(model, uneven(), 4, alone, CustomFunctions(rare))


def test_the_cross_entropy_as_a_function_of_ones_own(alone: DistributedContext) -> None:
    expected = Run(alone, data=uneven()).go(CONFIG)
    found = Run(alone, data=uneven()).go(CONFIG, functions=CustomFunctions(cross_entropy))
    assert losses(found) == pytest.approx(losses(expected), rel=2e-6)
    assert [report.tokens for report in found] == [report.tokens for report in expected]


def test_whole_logits_where_the_head_would_compute_the_loss(alone: DistributedContext) -> None:
    model = llama(tied=False)
    assert use_loss_head(model, True)
    reports = Run(alone, model=Plain(model), data=uneven()).go(CONFIG, functions=CustomFunctions(None, accuracy))
    expected = Run(alone, model=Plain(llama(tied=False)), data=uneven()).go(CONFIG)
    assert losses(reports) == pytest.approx(losses(expected), rel=2e-6)
    assert reports[0].row["metrics"].keys() == {"accuracy", "ones"}


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (lambda output, batch: output.logits.sum(), "The loss function must return a tuple of a sum"),
        (lambda output, batch: (output.logits, 3), "a sum, which is a tensor of one number"),
        (lambda output, batch: (output.logits.sum().detach(), 3), "a sum without a gradient"),
        (lambda output, batch: (output.logits.sum(), -5), r"<lambda> has returned \(a tensor of float32 \[\], -5\)\."),
        (lambda output, batch: (output.logits.sum(), math.nan), r"float32 \[\], nan\)\."),
        (lambda output, batch: (output.logits.sum(), True), r"float32 \[\], True\)\."),
        (lambda output, batch: (output.logits.sum(), batch["labels"] > 0), r"a tensor of bool \[1, 8\]\)\."),
        (lambda output, batch: (output.logits.sum() * 1j, 3), r"has returned \(a tensor of complex64 \[\], 3\)\."),
        (lambda output, batch: None, "has returned None"),
        (5, r"run\.functions\.loss is 5, expected a function"),
    ],
)
def test_what_is_no_loss(alone: DistributedContext, returned: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Run(alone).go(CONFIG, functions=CustomFunctions(returned))


@pytest.mark.parametrize("count", [3, 3.0, np.int64(3), np.float32(3), torch.tensor(3)])
def test_counts_of_any_kind(alone: DistributedContext, count: Any) -> None:
    functions = CustomFunctions(lambda output, batch: (output.logits.square().sum() * 0 + 6, count))
    assert losses(Run(alone).go(CONFIG, functions=functions))[0] == 2


def test_a_negative_count_on_the_device_is_an_error(alone: DistributedContext) -> None:
    """Nothing waits for a device to tell its value, and a loss of 0 would go unnoticed."""
    functions = CustomFunctions(lambda output, batch: (output.logits.square().sum(), torch.tensor(-5)))
    with pytest.raises(LossError, match="has loss inf"):
        Run(alone).go(CONFIG, functions=functions)
    model: Any = Plain(llama())
    with pytest.raises(LossError, match=r"^The loss function counted -\d+\.0 in the held-out data, so"):
        evaluate_loss(model, uneven(), 4, alone, functions)


@pytest.mark.parametrize(("returned", "described"), [
    (None, "None"),
    ([("a", 1, 1)], r"\(\('a', 1, 1\)\)"),
    ({1: (torch.ones(()), 1)}, r"the names \[1\]"),
])  # fmt: skip
def test_what_is_no_metrics(alone: DistributedContext, returned: Any, described: str) -> None:
    functions = CustomFunctions(metrics=lambda output, batch: returned)
    with pytest.raises(ConfigError, match=f"must return a dict of a sum and a count by name.*has returned {described}"):
        Run(alone).go(CONFIG, functions=functions)


@pytest.mark.parametrize(("returned", "described"), [
    (None, "None"),
    ("abc", "'abc'"),
    ([{"prompt": "a", "completion": "b"}], "a list with {'prompt': 'a', 'completion': 'b'}"),
    ([("a", "b"), ("a", 2)], r"a list with \('a', 2\)"),
])  # fmt: skip
def test_what_is_no_samples(alone: DistributedContext, returned: Any, described: str) -> None:
    run = Run(alone).of(
        dataclasses.replace(CONFIG, eval_every=1), functions=CustomFunctions(samples=lambda _: returned)
    )
    log: Any = None
    with pytest.raises(ConfigError, match=rf"a list of \(prompt, completion\).*<lambda> has returned {described}\."):
        HeldOutEvaluator(run, None, log).before_training()


def other_samples(context: DistributedContext) -> str:
    samples: Any = [("a", "b")] if context.rank else None
    functions, log = CustomFunctions(samples=lambda _: samples), cast("Any", None)
    with pytest.raises(ConfigError) as caught:
        HeldOutEvaluator(Run(context).of(CONFIG, functions=functions), None, log).before_training()
    return str(caught.value)


def test_samples_of_rank_0_count() -> None:
    assert all("has returned None" in message for message in on_ranks(2, other_samples))


def test_metrics_have_the_same_names_always(alone: DistributedContext) -> None:
    names = iter("aaab")
    functions = CustomFunctions(metrics=lambda output, batch: {next(names): (torch.ones(()), 1)})
    config = dataclasses.replace(CONFIG, global_batch_size=1)
    with pytest.raises(ConfigError, match=r"returned \['b'\] after \['a'\]"):
        Run(alone).go(config, functions=functions)


def other_names(context: DistributedContext) -> str:
    functions = CustomFunctions(metrics=lambda output, batch: {f"of_rank_{context.rank}": (torch.ones(()), 1)})
    with pytest.raises(ConfigError) as caught:
        Run(context, model=sharded(WRAPPERS["fsdp2"](param_dtype="float32"), context)).go(CONFIG, functions=functions)
    return str(caught.value)


def test_metrics_have_the_same_names_on_all_ranks() -> None:
    assert all("same names on all ranks" in message for message in on_ranks(2, other_names))


def test_import_loss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)  # where it is on the path already, it keeps its place
    path = [*sys.path]
    (tmp_path / "my_own_losses.py").write_text("def focal(output, batch):\n    return output, 1\n")
    (tmp_path / "torch").mkdir()  # hides nothing
    assert import_loss(None) is None
    found: Any = import_loss("my_own_losses:focal")
    assert found(3, {}) == (3, 1)
    assert sys.path == path
    relu: Any = import_loss("torch:relu")
    assert relu is torch.relu
    for name, message in {
        "my_own_losses": "not MODULE:FUNCTION",
        "my_own_losses:focus": r"has no function focus \(did you mean focal\?\)",
        "my_losses:focal": "No module named 'my_losses'.*working directory",
        "my_own_losses:__doc__": "has no function",
    }.items():
        with pytest.raises(ConfigError, match=message):
            import_loss(name)


def test_a_chunked_loss_would_be_ignored() -> None:
    model, data = ModelConfig(path="x", chunked_loss=True), DataConfig(path="x")
    with pytest.raises(ConfigError, match="loss=a:b needs whole logits"):
        check(FinetuneConfig(model=model, data=data, loss="a:b"))
