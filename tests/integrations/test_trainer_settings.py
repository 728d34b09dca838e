"""`CheckpointerCallback` where a run goes on with other settings or data than its steps were saved with."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from datasets import Dataset
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR
from transformers import Trainer, TrainingArguments

from fsdp_shard.checkpoint import StepStore
from fsdp_shard.distributed import DistributedContext
from fsdp_shard.errors import ConfigError, FsdpShardError
from fsdp_shard.integrations import CheckpointerCallback
from fsdp_shard.integrations.trainer_settings import follow_arguments, settings_of
from fsdp_shard.training import Restored
from tests.support.ranks import on_ranks
from tests.support.tiny import llama
from tests.support.torchrun import as_by_torchrun


class End(NamedTuple):
    """What a run has come to: learning rates as logged, options of the first group, and what was said."""

    rates: list[float]
    options: dict[str, Any]
    said: str


def rows(first: int = 0) -> Dataset:
    """16 samples, of which `first` changes the first one."""
    samples = [[(number * 7 + place) % 257 for place in range(8)] for number in range(16)]
    samples[0][0] = first
    return Dataset.from_dict({"input_ids": samples, "labels": samples})


def run(
    run_dir: Path,
    data: Any = None,
    *,
    makes_schedule: bool = False,
    callback: dict[str, Any] | None = None,
    metrics: Callable[[Any], dict[str, float]] | None = None,
    **given: Any,
) -> End:
    """Start or resume a run with these TrainingArguments."""
    arguments = {
        "learning_rate": 1e-2,
        "lr_scheduler_type": "constant",
        "logging_steps": 1,
        "per_device_train_batch_size": 2,
        "save_strategy": "no",
        "use_cpu": True,
        "disable_tqdm": True,
        "report_to": [],
        **given,
    }
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]  # of this one
    log = logging.getLogger("fsdp_shard")
    log.addHandler(handler)
    model, saving = llama(), CheckpointerCallback(run_dir, **{"every": 1, **(callback or {})})
    optimizer = torch.optim.AdamW(model.parameters(), lr=arguments["learning_rate"]) if makes_schedule else None
    schedule: Any = CosineAnnealingLR(optimizer, 10) if optimizer is not None else None
    data = rows() if data is None else data
    trainer = Trainer(
        model,
        TrainingArguments(str(run_dir), **arguments),
        train_dataset=data,
        eval_dataset=data,
        callbacks=[saving],
        optimizers=(optimizer, schedule),
        compute_metrics=metrics,
    )
    try:
        trainer.train(resume_from_checkpoint=saving.resume_from(trainer))
    except FsdpShardError as error:
        said.append(f"{type(error).__name__}: {error}")
    finally:
        log.removeHandler(handler)
        saving.close()
    rates = [entry["learning_rate"] for entry in trainer.state.log_history if "learning_rate" in entry]
    options = dict(trainer.optimizer.param_groups[0]) if trainer.optimizer is not None else {}
    return End(rates, {name: options.get(name) for name in ("lr", "weight_decay", "betas")}, "\n".join(said))


def changed(context: DistributedContext, place: Path) -> list[End]:
    """A run that goes on as it was, and with changes of the optimizer, the length, the schedule."""
    as_by_torchrun()
    linear: dict[str, Any] = {"lr_scheduler_type": "linear"}
    for name in ("optimizer", "length", "schedule", "same"):
        run(place / name, max_steps=2, **({} if name == "optimizer" else linear))
    others: dict[str, Any] = {"learning_rate": 0.5, "weight_decay": 0.7, "adam_beta1": 0.5}
    warming: dict[str, Any] = {"lr_scheduler_type": "cosine", "warmup_steps": 3, "optim": "sgd"}
    run(place / "warming", max_steps=4, **warming, callback={"keep_last": 9})
    for step in (3, 4):  # as if it had been killed
        _remove(place / "warming", step)
    return [
        run(place / "optimizer", max_steps=3, **others),
        run(place / "optimizer", max_steps=4, **others),
        run(place / "length", max_steps=4, **linear),
        run(place / "schedule", max_steps=4),
        run(place / "warming", max_steps=4, **warming),
        run(place / "whole", max_steps=4, **warming),
    ]


def _remove(run_dir: Path, step: int) -> None:
    directory = run_dir / "checkpoints" / f"step-{step:08}"
    directory.rename(run_dir / f"moved-{step}")


def test_changed_arguments_are_followed_and_said(tmp_path: Path) -> None:
    optimizer, again, length, schedule, warming, whole = on_ranks(1, changed, tmp_path)[0]
    assert optimizer.rates == [0.01, 0.01, 0.5]
    assert optimizer.options == {"lr": 0.5, "weight_decay": 0.7, "betas": (0.5, 0.999)}
    assert "settings have changed since" in optimizer.said
    assert "betas (0.9, 0.999) -> (0.5, 0.999), learning_rate 0.01 -> 0.5, weight_decay 0.0 -> 0.7" in optimizer.said
    assert again.rates == [0.01, 0.01, 0.5, 0.5]
    assert "have changed" not in again.said, "they were saved with the step"
    assert length.rates == pytest.approx([0.01, 0.005, 0.005, 0.0025]), "the step was saved with a rate of 0"
    assert "learning rate of the next step 0 -> 0.005" in length.said
    assert schedule.rates == pytest.approx([0.01, 0.005, 0.01, 0.01])
    assert warming.rates == whole.rates
    assert "have changed" not in warming.said


def refused(context: DistributedContext, place: Path) -> list[str]:
    """What is said of a schedule of one's own, other data, and metrics that are not there."""
    as_by_torchrun()
    run(place / "own", makes_schedule=True, max_steps=2)
    run(place / "data", max_steps=2)
    evaluating: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 1, "max_steps": 2}
    return [
        run(place / "own", makes_schedule=True, max_steps=3, learning_rate=0.5).said,
        run(place / "own", makes_schedule=True, max_steps=3).said,
        run(place / "data", rows(first=9), max_steps=3).said,
        run(place / "data", rows().rename_column("labels", "label"), max_steps=3).said,
        run(place / "data", list(rows()), max_steps=3).said,
        run(place / "none", callback={"monitor": "eval_loss"}, max_steps=2).said,
        run(place / "wrong", callback={"monitor": "eval_los"}, **evaluating).said,
        run(place / "logged", callback={"monitor": "loss", "every": 2}, **{**evaluating, "logging_steps": 2}).said,
        run(place / "unsaved", callback={"monitor": "eval_loss"}, eval_delay=9, **evaluating).said,
    ]


def test_what_would_be_ignored_is_an_error(tmp_path: Path) -> None:
    own, same, data, columns, listed, none, wrong, logged, unsaved = on_ranks(1, refused, tmp_path)[0]
    assert "was saved with learning_rate=0.01, and now it is 0.5" in own
    assert "CosineAnnealingLR continues with its own" in own
    assert "Error" not in same
    for said in (data, columns):
        assert "was saved with training data whose names of columns and rows here and there have the digest" in said
    assert "Error" not in listed, "of a list nothing is known"
    assert "ConfigError: CheckpointerCallback has monitor='eval_loss', a metric of evaluations" in none
    assert "eval_strategy='no'" in none
    assert "monitor='eval_los' (did you mean eval_loss?), and the evaluation of step 1 has no such metric" in wrong
    assert "eval_loss, eval_runtime" in wrong
    assert logged == "", "what is logged need not be with each evaluation"
    assert "has no best step: none that was saved has eval_loss" in unsaved


def scored(context: DistributedContext, place: Path) -> str:
    """What is said of a run whose first evaluation gives NaN."""
    as_by_torchrun()
    scores = iter([math.nan, 0.2, 0.7, 0.1])
    callback = {"monitor": "eval_score", "mode": "max", "every": 1, "keep_last": 1}
    evaluating: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 1, "max_steps": 4}
    return run(place / "run", callback=callback, metrics=lambda _: {"score": next(scores)}, **evaluating).said


def test_a_metric_that_is_not_finite_is_never_the_best(tmp_path: Path) -> None:
    assert "eval_score is nan, which is not finite" in on_ranks(1, scored, tmp_path)[0]
    store = StepStore(tmp_path / "run/checkpoints")
    assert (store.steps(), store.best()) == ([3, 4], 3)


def test_settings_are_checked_when_they_are_given(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"evry is not a setting of CheckpointerCallback \(did you mean every\?\)"):
        CheckpointerCallback(tmp_path, evry=3)
    with pytest.raises(ConfigError, match="mode='most' is neither"):
        CheckpointerCallback(tmp_path, mode="most")
    with pytest.raises(ConfigError, match="keep_last"):
        CheckpointerCallback(tmp_path, keep_last=0)
    assert not any(tmp_path.iterdir())


def test_steps_that_do_not_record_their_settings_keep_them(tmp_path: Path) -> None:
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=0.5)
    schedule = LambdaLR(optimizer, lambda step: 1 / (1 + step))
    now = settings_of(optimizer)
    optimizer.param_groups[0].update(lr=0.1, initial_lr=0.1, weight_decay=0.3)  # as in a step that is restored
    follow_arguments(optimizer, schedule, None, now, Restored(1, tmp_path, {}, None, {}, has_random_state=True))
    assert [optimizer.param_groups[0][name] for name in ("lr", "weight_decay")] == [0.1, 0.3]
    assert schedule.get_last_lr() == [0.1]
