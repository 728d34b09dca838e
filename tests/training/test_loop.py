"""The loop against a plain PyTorch loop, and what must not change: micro-batches, ranks, restarts, evaluations."""

from __future__ import annotations

import copy
import dataclasses
import gc
import json
import math
import os
import signal
import sys
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor

from fsdp_shard.data import ShuffledDataset, WindowDataset
from fsdp_shard.distributed import DistributedContext
from fsdp_shard.errors import ConfigError, LossError
from fsdp_shard.models import build_on_meta, rebuild_buffers
from fsdp_shard.sharding import WRAPPERS, Fsdp2Config
from fsdp_shard.training.config import TrainConfig
from fsdp_shard.training.held_out.evaluator import evaluate_loss
from fsdp_shard.training.loop import train
from fsdp_shard.training.loss.linear_cross_entropy import use_loss_head
from fsdp_shard.training.optim.lr_schedule import learning_rate
from fsdp_shard.training.stop_signal import StopSignal
from fsdp_shard.training.trainer_state import TrainerState
from tests.support.commands import ROOT, run
from tests.support.ranks import on_ranks
from tests.support.sharded import sharded
from tests.support.tiny import llama, llama_config
from tests.training.conftest import Plain, stream, world_of_one
from tests.training.tiny_run import ADAMW, LR, SEED, Run, Uneven, losses


def plain_loop(config: TrainConfig, data: WindowDataset) -> tuple[list[float], list[float]]:
    """What the loop should do, in as few words as PyTorch needs; whole batches, one process."""
    model = llama().train()
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=LR, fused=True)
    values, norms = [], []
    for step in range(config.num_steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(config, LR, step)
        size = config.global_batch_size
        batch = ShuffledDataset(data, SEED).batch(range(step * size, (step + 1) * size))
        logits = model(torch.from_numpy(batch.input_ids)).logits
        loss = F.cross_entropy(logits.flatten(0, 1), torch.from_numpy(batch.labels).flatten())
        optimizer.zero_grad()
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), config.max_grad_norm or math.inf)))
        optimizer.step()
        values.append(loss.item())
    return values, norms


def test_equals_a_plain_loop(alone: DistributedContext) -> None:
    config = TrainConfig(steps=15, global_batch_size=4, micro_batch_size=4, warmup_steps=3, max_grad_norm=0.5)
    reports = Run(alone).go(config)
    expected, norms = plain_loop(config, stream())
    assert losses(reports) == expected, "bit by bit"
    assert [report.grad_norm for report in reports] == pytest.approx(norms, rel=1e-4)
    assert reports[-1].loss < reports[0].loss - 0.1, "it learns by heart"


def test_the_norm_is_measured_without_a_limit_too(alone: DistributedContext) -> None:
    config = TrainConfig(steps=3, global_batch_size=4, micro_batch_size=4, max_grad_norm=None)
    reports = Run(alone).go(config)
    expected, norms = plain_loop(config, stream())
    assert losses(reports) == pytest.approx(expected, rel=2e-6)
    assert [report.grad_norm for report in reports] == pytest.approx(norms, rel=1e-4)


def test_reports(alone: DistributedContext) -> None:
    data = stream(6 * 8 + 4)  # six windows and one of three predictions
    run = Run(alone, data=data)
    config = TrainConfig(steps=2, global_batch_size=7, micro_batch_size=1, schedule="linear")
    first, second = run.go(config)
    assert (first.step, second.step) == (1, 2)
    assert first.tokens == second.tokens == 51
    assert [(report.epoch, report.total_tokens) for report in (first, second)] == [(1.0, 51), (2.0, 102)]
    assert (first.learning_rate, second.learning_rate) == (LR, LR / 2)
    assert first.tokens_per_second == pytest.approx(51 / first.step_seconds)
    assert first.memory_bytes > 10 << 20
    assert (run.state.step, run.state.num_samples, run.state.num_tokens) == (2, 14, 102)
    assert list(json.loads(json.dumps(first.row))) == [
        "step",
        "loss",
        "learning_rate",
        "grad_norm",
        "tokens",
        "tokens_per_second",
        "step_seconds",
        "data_seconds",
        "memory_bytes",
        "skipped",
        "epoch",
        "total_tokens",
    ]


@pytest.mark.parametrize("micro", [1, 2, 4])
def test_accumulation_changes_nothing(alone: DistributedContext, micro: int) -> None:
    """The short window has 1 prediction of 8, so a mean of means would be far off."""
    data = stream(5 * 8 + 2)
    config = TrainConfig(steps=8, global_batch_size=8, micro_batch_size=8)
    whole = Run(alone, data=data).go(config)
    parts = Run(alone, data=data).go(dataclasses.replace(config, micro_batch_size=micro))
    assert losses(parts) == pytest.approx(losses(whole), rel=1e-5)


def test_gradients_are_reduced_as_asked(alone: DistributedContext) -> None:
    config = TrainConfig(steps=2, global_batch_size=4, micro_batch_size=1)
    often, seldom = Plain(llama()), Plain(llama())
    of_seldom = losses(Run(alone, seldom).go(config, sync_every_micro_batch=False))
    assert losses(Run(alone, often).go(config)) == of_seldom
    assert often.num_unsynced == 0
    assert seldom.num_unsynced == 2 * 3, "all but the last of each step"


def test_stopping_and_going_on_is_bit_equal(alone: DistributedContext) -> None:
    config = TrainConfig(steps=8, global_batch_size=4, micro_batch_size=2, warmup_steps=2)
    whole = losses(Run(alone).go(config))
    run = Run(alone)
    first = []
    for report in train(run.of(config)):
        first.append(report.loss)
        if report.step == 3:
            break
    saved = copy.deepcopy((run.model.module.state_dict(), run.optimizer.state_dict())), run.state.to_json()
    again = Run(alone)
    again.model.module.load_state_dict(saved[0][0])
    again.optimizer.load_state_dict(saved[0][1])
    again.state = TrainerState.from_json(saved[1].encode(), "trainer.json")
    assert first + losses(again.go(config)) == whole
    assert again.go(config) == [], "a finished run has nothing left to do"


def test_dropout_depends_on_the_position_only(alone: DistributedContext) -> None:
    """An evaluation and any other use of random numbers between two steps change no later loss."""
    config = TrainConfig(steps=5, global_batch_size=4, micro_batch_size=2)

    def run(disturbed: bool) -> list[float]:
        dropping = Run(alone)
        module: Any = dropping.model.module
        for layer in module.model.layers:
            layer.self_attn.attention_dropout = 0.5
        values = []
        for report in train(dropping.of(config)):
            values.append(report.loss)
            if disturbed:
                torch.rand(7)
                evaluate_loss(dropping.model, dropping.data.head(3), 2, alone)
        return values

    assert run(False) == run(True)
    assert run(False) != losses(Run(alone).go(config)), "there is dropout"


def test_gradients_are_freed_between_steps(alone: DistributedContext) -> None:
    run = Run(alone)
    run.go(TrainConfig(steps=1, global_batch_size=2))
    assert all(parameter.grad is None for parameter in run.model.module.parameters())


@pytest.mark.parametrize("where", ["loss", "gradient"])
def test_a_loss_or_gradient_that_is_not_finite(alone: DistributedContext, where: str) -> None:
    data = stream(8 * 8 + 1)
    run = Run(alone, data=data)
    config = TrainConfig(steps=5, global_batch_size=4, micro_batch_size=2)
    samples = [run.dataset.index_of(position) for position in range(4, 8)]
    before = None

    def poison(module: Any, arguments: Any, keywords: Any, output: Any) -> None:
        if run.state.step == 1 and keywords["input_ids"][0].tolist() == data.batch([samples[2]]).input_ids[0].tolist():
            if where == "loss":
                output.logits[0, 0, 0] = math.nan
            else:
                output.logits.register_hook(lambda gradient: gradient * math.inf)

    run.model.module.register_forward_hook(poison, with_kwargs=True)
    with pytest.raises(LossError) as caught:  # noqa: PT012
        for _ in train(run.of(config)):
            before = copy.deepcopy(run.model.module.state_dict())
    message = str(caught.value)
    assert "Step 2" in message
    expected = (
        f"in the loss of samples {sorted(samples[2:])}"
        if where == "loss"
        else f"in the gradients only, samples {sorted(samples)}"
    )
    assert expected in message
    assert run.state.step == 1
    assert before is not None
    assert all(torch.equal(value, before[name]) for name, value in run.model.module.state_dict().items())


def test_steps_that_are_not_finite_are_skipped(alone: DistributedContext) -> None:
    """As if the others had been made alone: the same weights, with the optimizer untouched in between."""
    data = stream(40 * 8 + 1)
    settings: dict[str, Any] = {"global_batch_size": 4, "micro_batch_size": 4, "schedule": "constant"}
    config = TrainConfig(steps=6, non_finite="skip", max_skips=2, **settings)
    run = Run(alone, data=data)
    poisoned = {2, 3, 5}

    def poison(module: Any, arguments: Any, output: Any) -> None:
        if run.state.step in poisoned:
            output.logits[0, 0, 0] = math.inf

    run.model.module.register_forward_hook(poison)
    reports = run.go(config)
    assert [report.step for report in reports if report.fault] == [3, 4, 6]
    assert [report.skipped for report in reports] == [0, 0, 1, 2, 2, 3]
    assert "not finite in the loss of samples" in reports[2].fault
    assert [report.row["loss"] is None for report in reports] == [False, False, True, True, False, True]
    assert (run.state.num_skipped, run.state.num_skipped_in_row, run.state.num_samples) == (3, 1, 24)

    plain = Run(alone, data=data)
    for step in (0, 1, 4):
        plain.state = TrainerState(SEED, data.identity, step=step, num_samples=4 * step)
        plain.go(TrainConfig(steps=step + 1, **settings))
    weights = plain.model.module.state_dict()
    assert all(torch.equal(value, weights[name]) for name, value in run.model.module.state_dict().items())

    poisoned.update(range(6, 20))
    with pytest.raises(LossError, match=r"Step 8 has .* after 2 skipped steps in a row.*max_skips=2"):
        run.go(dataclasses.replace(config, steps=20))
    with pytest.raises(LossError, match=r"max_skips=1"):  # with fewer than there have been by now
        run.go(dataclasses.replace(config, steps=20, max_skips=1))
    assert all(torch.equal(value, weights[name]) for name, value in run.model.module.state_dict().items())


def test_no_step_follows_when_evaluations_no_longer_improve(alone: DistributedContext) -> None:
    run = Run(alone)
    config = TrainConfig(steps=9, global_batch_size=2, eval_every=1, patience=2)
    steps = []
    for report in train(run.of(config)):
        steps.append(report.step)
        run.state.record_evaluation([3.0, 3.1, 2.0, 2.5, 2.0][report.step - 1])
    assert steps == [1, 2, 3, 4, 5]
    assert run.go(config) == []


def test_evaluation_counts_every_prediction_once(alone: DistributedContext) -> None:
    data = stream(5 * 8 + 4)
    model = Plain(llama().train())
    tokens = torch.from_numpy(data.batch(range(6)).input_ids), torch.from_numpy(data.batch(range(6)).labels)
    with torch.no_grad():
        expected = F.cross_entropy(model.module(tokens[0]).logits.flatten(0, 1), tokens[1].flatten()).item()
    for micro in (1, 4, 6, 50):
        report = evaluate_loss(model, data, micro, alone)
        assert report.loss == pytest.approx(expected, rel=1e-6)
        assert report.num_tokens == 43
        assert report.perplexity == pytest.approx(math.exp(expected), rel=1e-5)
    assert model.module.training, "left as it was"


def test_evaluation_in_eval_mode_and_without_gradients(alone: DistributedContext) -> None:
    model = Plain(llama().train())
    seen = []

    def look(module: Any, arguments: Any, output: Any) -> None:
        seen.append((module.training, torch.is_grad_enabled()))

    model.module.register_forward_hook(look)
    evaluate_loss(model, stream(20), 2, alone)
    assert seen == [(False, False)] * len(seen)


def test_evaluation_of_a_broken_model(alone: DistributedContext) -> None:
    model = Plain(llama())
    with torch.no_grad():
        model.module.get_parameter("lm_head.weight").fill_(math.nan)
    with pytest.raises(LossError, match="held-out loss is nan"):
        evaluate_loss(model, stream(20), 2, alone)


# ---- over ranks -----------------------------------------------------------------------------------------------------


def train_sharded(context: DistributedContext, config: TrainConfig, options: dict[str, Any]) -> dict[str, Any]:
    """Losses, norms and a held-out loss of the tiny Llama under fully_shard."""
    model = sharded(Fsdp2Config(param_dtype="float32"), context)
    shapes = {name: shard.shape for name, shard in model.local_shards().items()}
    whole = stream(11 * 8 + 4)
    run = Run(context, model=model, data=Uneven(whole.tokens, whole.sequence_length, whole.name))
    run.optimizer = ADAMW.build(dict(model.module.named_parameters()), shapes)
    with StopSignal() as stop:
        if options.pop("stop_rank", None) == context.rank:
            os.kill(os.getpid(), signal.SIGTERM)
        reports = run.go(config, stop=stop, **options)
    held_out = evaluate_loss(model, stream(5 * 8 + 4), 2, context)
    assert all(isinstance(param, DTensor) for param in model.module.parameters()), "nothing stays gathered"
    return {
        "losses": losses(reports),
        "norms": [report.grad_norm for report in reports],
        "tokens": [report.tokens for report in reports],
        "stop": reports[-1].stop_signal,
        "held_out": (held_out.loss, held_out.num_tokens),
    }


@pytest.fixture(scope="module")
def one_rank() -> dict[str, Any]:
    return on_ranks(1, train_sharded, CONFIG, {})[0]


# 8 micro-batches on one rank, 4 on each of two, 2 on each of four.
CONFIG = TrainConfig(steps=6, global_batch_size=8, micro_batch_size=1, max_grad_norm=0.5)


@pytest.mark.parametrize(
    ("world_size", "options"),
    [(2, {}), (2, {"sync_every_micro_batch": False}), (4, {})],
    ids=["2 ranks", "2 ranks, reduced once a step", "4 ranks"],
)
def test_ranks_train_as_one(one_rank: dict[str, Any], world_size: int, options: dict[str, Any]) -> None:
    results = on_ranks(world_size, train_sharded, CONFIG, options)
    assert all(result == results[0] for result in results), "all ranks report the same"
    assert one_rank["losses"][-1] < one_rank["losses"][0] - 0.1, "the comparison means nothing unless weights move"
    assert results[0]["losses"] == pytest.approx(one_rank["losses"], abs=1e-5)
    assert results[0]["norms"] == pytest.approx(one_rank["norms"], rel=1e-3)
    assert results[0]["tokens"] == one_rank["tokens"]
    assert results[0]["held_out"][0] == pytest.approx(one_rank["held_out"][0], rel=1e-5)
    assert results[0]["held_out"][1] == one_rank["held_out"][1] == 43


def test_a_signal_to_one_rank_stops_all_after_the_same_step() -> None:
    results = on_ranks(2, train_sharded, CONFIG, {"stop_rank": 1})
    assert [len(result["losses"]) for result in results] == [1, 1]
    assert [result["stop"] for result in results] == [signal.SIGTERM] * 2


def train_poisoned(context: DistributedContext) -> str:
    run = Run(context, data=stream(8 * 8 + 1))
    if context.rank == 1:
        with torch.no_grad():
            run.model.module.get_parameter("lm_head.weight").fill_(math.nan)
    model: Any = run.model
    model.clip_grad_norm_ = lambda limit: torch.tensor(1.0 + context.rank * math.inf)
    assert run.go(TrainConfig(steps=1, global_batch_size=4, non_finite="skip"))[0].fault, "on each rank"
    run.state = TrainerState(SEED, run.data.identity)
    with pytest.raises(LossError) as caught:
        run.go(TrainConfig(steps=5, global_batch_size=4, micro_batch_size=1))
    return str(caught.value)


def test_a_bad_loss_on_one_rank_is_an_error_on_all() -> None:
    first, second = on_ranks(2, train_poisoned)
    order = [ShuffledDataset(stream(8 * 8 + 1), SEED).index_of(position) for position in range(4)]
    assert first == second
    assert f"in the loss of samples {sorted([order[1], order[3]])}" in first


@pytest.mark.parametrize("wrapper", ["fsdp2", "fsdp1", "ddp"])
def test_an_optimizer_of_other_parameters_is_refused(alone: DistributedContext, wrapper: str) -> None:
    """It would train nothing, without a word."""
    model: Any = build_on_meta(llama_config(), "float32")
    rebuild_buffers(model, alone.device)
    too_early = torch.optim.SGD(model.parameters(), 0.1)
    run = Run(alone, WRAPPERS[wrapper](param_dtype="float32").shard(model, alone))
    run.of(CONFIG)
    run.optimizer = torch.optim.SGD(run.model.module.parameters(), 0.1)
    run.of(CONFIG)
    run.optimizer = too_early
    with pytest.raises(ConfigError, match=r"^SGD has a parameter of shape \[.*\] that the model does not have; make"):
        run.of(CONFIG)


def test_a_world_of_one_needs_no_environment(tmp_path: Path) -> None:
    with world_of_one() as context:
        assert len(Run(context).go(TrainConfig(steps=1, global_batch_size=1))) == 1


def alive_after_training(context: DistributedContext, wrapper: str, evaluates: bool) -> int:
    """Parameters that stay in memory when the model, which has a head of its own, and the run are gone."""
    model: Any = build_on_meta(llama_config(tied=False), "float32")
    rebuild_buffers(model, context.device)
    assert use_loss_head(model, True)
    wrapped = WRAPPERS[wrapper]().shard(model, context)
    for shard in wrapped.local_shards().values():
        shard.data.fill_(0.01)
    run = Run(context, wrapped)
    if evaluates:
        evaluate_loss(wrapped, run.data, 2, context)
    else:
        run.go(TrainConfig(steps=2, global_batch_size=2, micro_batch_size=2 // context.world_size))
    found = [weakref.ref(param) for param in wrapped.module.parameters()]
    del model, wrapped, run, shard
    gc.collect()
    return sum(param() is not None for param in found)


@pytest.mark.parametrize("evaluates", [False, True], ids=["trained", "evaluated"])
@pytest.mark.parametrize("wrapper", ["fsdp1", "fsdp2"])
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_model_that_is_no_longer_used_is_freed(num_ranks: int, wrapper: str, evaluates: bool) -> None:
    assert on_ranks(num_ranks, alive_after_training, wrapper, evaluates) == [0] * num_ranks


_LEFT_OPEN = """
from fsdp_shard.training.config import TrainConfig
from fsdp_shard.training.loop import train
from tests.training.conftest import world_of_one
from tests.training.tiny_run import Run

with world_of_one() as context:
    steps = train(Run(context).of(TrainConfig(steps=9, global_batch_size=1)))
    print(next(steps).step)
"""


@pytest.mark.long
def test_a_script_that_ends_between_steps_says_nothing_of_it(tmp_path: Path) -> None:
    done = run([sys.executable, "-c", _LEFT_OPEN], tmp_path, PYTHONPATH=str(ROOT))
    assert (done.status, done.out, done.err) == (0, "1\n", "")


class _WithClosure(torch.optim.SGD):
    def step(self, closure: Any) -> Any:  # type: ignore[override]  # which is the point
        return super().step(closure)


class _WithoutHooks(torch.optim.Optimizer):
    def __init__(self, params: Any) -> None:
        self.param_groups = [{"params": list(params), "lr": 0.1}]

    def step(self, closure: Any = None) -> Any:
        pass


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda params: torch.optim.Rprop([{"params": params, "lr": None}]), "has lr=None, and the loop sets"),
        (_WithClosure, r"^_WithClosure.step\(\) requires a closure"),
        (_WithoutHooks, r"^_WithoutHooks does not call Optimizer.__init__"),
    ],
)
def test_an_optimizer_that_the_loop_cannot_step_is_refused(make: Any, words: str) -> None:
    with world_of_one() as context:
        run = Run(context)
        run.optimizer = make(list(run.model.module.parameters()))
        with pytest.raises(ConfigError, match=words):
            run.of(TrainConfig(steps=1))


def test_a_scheduler_of_ones_own_is_refused() -> None:
    """It had no effect."""
    words = r"^The learning rate of AdamW was set to 0.005 after step 1, and train.schedule sets it again"
    with world_of_one() as context:
        run = Run(context)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(run.optimizer, 0.5)
        reports = train(run.of(TrainConfig(steps=3, schedule="constant", global_batch_size=2)))
        next(reports)
        scheduler.step()
        with pytest.raises(ConfigError, match=words):
            next(reports)


def test_a_schedule_of_ones_own_sets_the_peak() -> None:
    with world_of_one() as context:
        run = Run(context)
        rates = []
        for report in train(run.of(TrainConfig(steps=3, schedule="constant", global_batch_size=2))):
            rates.append(report.learning_rate)
            for group in run.optimizer.param_groups:
                group["initial_lr"] = LR / (1 + report.step)
    assert rates == [LR, LR / 2, LR / 3]
