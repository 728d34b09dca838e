"""The objectives against plain loops in one process, their formulas in whole logits, and over ranks."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from fsdp_shard.data import (
    IGNORE_INDEX,
    LABELED,
    NO_WINDOW,
    PAIRS,
    DataConfig,
    ShuffledDataset,
    SourceDataset,
    Task,
    open_samples,
    tokenize_all,
    with_extras,
)
from fsdp_shard.distributed import DistributedContext
from fsdp_shard.sharding import WRAPPERS
from fsdp_shard.training.batch_loader import source_tokens
from fsdp_shard.training.config import TrainConfig
from fsdp_shard.training.held_out.evaluator import evaluate_loss
from fsdp_shard.training.loop import TrainingRun, train
from fsdp_shard.training.loss import row_values
from fsdp_shard.training.loss.linear_cross_entropy import use_loss_head
from fsdp_shard.training.loss.log_probs import LabelLogProbs
from fsdp_shard.training.objectives.answer_pairs import Pairs
from fsdp_shard.training.objectives.objective import ObjectiveConfig
from fsdp_shard.training.objectives.orpo import OrpoConfig
from fsdp_shard.training.objectives.reference_model import EXTRA, ModelReference, PrecomputedReference
from fsdp_shard.training.objectives.registry import OBJECTIVES
from fsdp_shard.training.trainer_state import TrainerState
from tests.support.ranks import on_ranks
from tests.support.sharded import sharded
from tests.support.tiny import byte_tokenizer, llama
from tests.training.conftest import Plain

SEED, LR, STEPS = 3, 1e-2, 5
CONFIG = TrainConfig(steps=STEPS, global_batch_size=4, micro_batch_size=2, schedule="constant")


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pairs whose prompts and answers have many lengths."""
    draw = random.Random(0)

    def text(longest: int) -> str:
        return "".join(draw.choice("abcdefgh ") for _ in range(draw.randint(2, longest)))

    path = tmp_path_factory.mktemp("pairs") / "pairs.jsonl"
    given = [{"prompt": text(15), "chosen": text(12), "rejected": text(20)} for _ in range(13)]
    path.write_text("".join(json.dumps(row) + "\n" for row in given))
    return path


def _samples(path: Path, objective: ObjectiveConfig) -> SourceDataset:
    config = DataConfig(path=str(path), kind="preference", sequence_length=32, cache_dir=str(path.parent / "tokens"))
    task = Task(samples=objective.samples)
    opened = open_samples(config, tokenize_all(config, byte_tokenizer()), task).train
    assert isinstance(opened, ShuffledDataset)
    return opened.dataset


def _token_log_probs(model: Any, batch: Any) -> torch.Tensor:
    """[num_rows, length], from whole logits."""
    labels = torch.from_numpy(batch.labels)
    given = model(torch.from_numpy(batch.input_ids)).logits.log_softmax(-1)
    picked = given.gather(-1, labels.clamp(min=0)[..., None]).squeeze(-1)
    return torch.where(labels != IGNORE_INDEX, picked, 0.0)


def _loss(objective: Any, model: Any, frozen: Any, batch: Any) -> torch.Tensor:
    """The formula of each objective, for a whole batch."""
    each, labels = _token_log_probs(model, batch), torch.from_numpy(batch.labels)
    with torch.no_grad():
        before = _token_log_probs(frozen, batch).sum(-1)
    total, number = each.sum(-1), (labels != IGNORE_INDEX).sum(-1)
    ratio, mean, beta = total - before, total / number, objective.beta
    match objective.name:
        case "dpo":
            x, e = beta * (ratio[0::2] - ratio[1::2]), objective.label_smoothing
            return (-(1 - e) * F.logsigmoid(x) - e * F.logsigmoid(-x)).mean()
        case "ipo":
            return ((ratio / number)[0::2] - (ratio / number)[1::2] - 1 / (2 * beta)).square().mean()
        case "simpo":
            return -F.logsigmoid(beta * (mean[0::2] - mean[1::2]) - objective.gamma).mean()
        case "orpo":
            odds = mean - torch.log(1 - torch.exp(mean))
            return -each[0::2].sum() / number[0::2].sum() - beta * F.logsigmoid(odds[0::2] - odds[1::2]).mean()
    kl = ratio[1::2].detach().mean().clamp(min=0)
    good = torch.from_numpy(batch.extras["desirable"]) > 0
    of_good = objective.desirable_weight * (1 - torch.sigmoid(beta * (ratio[0::2] - kl)))
    of_bad = objective.undesirable_weight * (1 - torch.sigmoid(beta * (kl - ratio[0::2])))
    return torch.where(good, of_good, of_bad).mean()


def _plain_loop(objective: ObjectiveConfig, data: SourceDataset) -> list[float]:
    model, frozen = llama(tied=False).train(), llama(tied=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.0, fused=True)
    losses = []
    for step in range(STEPS):
        batch = ShuffledDataset(data, SEED).batch(range(step * 4, step * 4 + 4))
        loss = _loss(objective, model, frozen, batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def _with_reference(data: SourceDataset) -> SourceDataset:
    """What the frozen model says of each row, from whole logits."""
    frozen = llama(tied=False)
    with torch.no_grad():
        values = [_token_log_probs(frozen, data.batch([i])).sum(-1) for i in range(len(data))]
    return with_extras(data, EXTRA, torch.stack(values).numpy())


def _train(
    context: DistributedContext, objective: ObjectiveConfig, path: Path, wrapper: str, reference: str
) -> tuple[list[float], dict[str, float]]:
    """Losses of the steps, and the metrics of an evaluation after them."""
    data, settings = _samples(path, objective), WRAPPERS[wrapper](param_dtype="float32")
    model = sharded(settings, context, tied=False, prepare=lambda model: use_loss_head(model, True))
    if reference == "precomputed":
        data = _with_reference(data)
    compared: Any = PrecomputedReference() if reference == "precomputed" else None
    if reference == "sharded":
        frozen = sharded(settings, context, tied=False, prepare=lambda module: module.requires_grad_(False))
        compared = ModelReference(frozen, leaves_adapter_out=False)
    optimizer = torch.optim.AdamW(model.module.parameters(), lr=LR, weight_decay=0.0, fused=True)
    state = TrainerState(SEED, data.identity)
    run = TrainingRun(model, optimizer, ShuffledDataset(data, SEED), CONFIG, context, state)
    run.objective, run.reference = objective, compared
    losses = [report.loss for report in train(run)]
    report = evaluate_loss(model, data, 2, context, objective=objective, reference=compared)
    return losses, {"loss": report.loss, **report.metrics}


def _configured(name: str) -> Any:
    given: dict[str, dict[str, Any]] = {
        "dpo": {"beta": 0.3, "label_smoothing": 0.1},
        "kto": {"desirable_weight": 1.5, "undesirable_weight": 0.7, "beta": 0.4},
        "orpo": {"beta": 0.7},
    }
    return OBJECTIVES[name](**given.get(name, {}))


@pytest.mark.parametrize(("name", "wrapper", "num_ranks", "reference"), [
    ("dpo", "fsdp2", 1, "precomputed"),
    ("dpo", "fsdp2", 2, "sharded"),
    ("dpo", "fsdp1", 2, "precomputed"),
    ("dpo", "ddp", 2, "sharded"),
    ("ipo", "fsdp2", 2, "precomputed"),
    ("orpo", "fsdp2", 2, "none"),
    ("orpo", "fsdp1", 1, "none"),
    ("simpo", "fsdp2", 2, "none"),
    ("kto", "fsdp2", 2, "precomputed"),
    ("kto", "fsdp1", 2, "sharded"),
])  # fmt: skip
def test_losses_are_those_of_a_plain_loop(name: str, wrapper: str, num_ranks: int, reference: str, rows: Path) -> None:
    objective = _configured(name)
    expected = _plain_loop(objective, _samples(rows, objective))
    assert expected[-1] != pytest.approx(expected[0], rel=1e-2), "something is learned"
    for losses, evaluated in on_ranks(num_ranks, _train, objective, rows, wrapper, reference):
        assert losses == pytest.approx(expected, rel=1e-5)
        if objective.samples == PAIRS:
            margin = evaluated["rewards/chosen"] - evaluated["rewards/rejected"]
            assert evaluated["rewards/margins"] == pytest.approx(margin, abs=1e-5)
            assert 0 < evaluated["rewards/accuracies"] <= 1


def test_evaluations_are_over_all_samples_whatever_the_batches(alone: DistributedContext, rows: Path) -> None:
    for name in ("dpo", "orpo", "kto"):
        objective = _configured(name)
        data = _with_reference(_samples(rows, objective))
        model: Any = Plain(llama(tied=False))
        with torch.no_grad():
            for param in model.module.parameters():
                param.add_(0.02 * torch.randn(param.shape, generator=torch.Generator().manual_seed(1)))
        expected = _loss(objective, model.module, llama(tied=False), data.batch(range(len(data)))).item()
        for size in (1, 4, len(data)):
            report = evaluate_loss(model, data, size, alone, objective=objective, reference=PrecomputedReference())
            assert report.loss == pytest.approx(expected, rel=1e-5), (name, size)
            assert report.perplexity is None


def test_tokens_are_those_of_what_is_compared(tmp_path: Path, rows: Path) -> None:
    """Not of the prompts with other answers, and not of pairs that fill up a batch; those of sources add up to them."""
    answers, pairs = OBJECTIVES["kto"](), OBJECTIVES["reward"]()
    batch = _samples(rows, answers).batch(range(5))
    assert answers.all_counts(batch) == [5.0, float((batch.labels[0::2] != IGNORE_INDEX).sum())]

    source = {"path": str(rows), "kind": "preference"}
    config = DataConfig(path="", mixture={"a": source, "b": source}, sequence_length=32, cache_dir=str(tmp_path))
    task = Task("sequence_classification", samples=pairs.samples)
    mixed = open_samples(config, tokenize_all(config, byte_tokenizer(), task.name), task).train
    positions = np.arange(6)
    batch = mixed.batch(positions)
    num_tokens = int(batch.inputs["attention_mask"].sum())
    assert pairs.all_counts(batch) == [6.0, float(num_tokens)]
    by_source = source_tokens(mixed, [positions], [pairs.trained_tokens(batch)])
    assert sum(by_source) == num_tokens
    assert min(by_source) > 0
    data = mixed.sources[0]
    filled = data.batch([0, 1, NO_WINDOW, NO_WINDOW])
    assert pairs.all_counts(filled) == pairs.all_counts(data.batch([0, 1]))


def test_the_cross_entropy_of_orpo_may_have_the_prompts(alone: DistributedContext, rows: Path) -> None:
    objective = OrpoConfig(learn_prompts=True)
    data, model = _samples(rows, objective), Plain(llama(tied=False))
    batch = data.batch(range(len(data)))
    total = number = 0.0
    with torch.no_grad():
        logits = model.module(torch.from_numpy(batch.input_ids)).logits
        for row in range(0, len(batch.labels), 2):
            last = (batch.labels[row] != IGNORE_INDEX).nonzero()[0][-1]
            wanted = [*batch.input_ids[row, 1 : last + 1].tolist(), int(batch.labels[row, last])]
            total += float(F.cross_entropy(logits[row, : last + 1], torch.tensor(wanted), reduction="sum"))
            number += last + 1
    whole: Any = evaluate_loss(model, data, 3, alone, objective=objective)
    answers: Any = evaluate_loss(model, data, 3, alone, objective=OBJECTIVES["orpo"]())
    odds_ratio = _loss(OBJECTIVES["orpo"](), model.module, model.module, batch).detach()
    labels = torch.from_numpy(batch.labels)[0::2]
    own = -_token_log_probs(model.module, batch).detach()[0::2].sum() / (labels != IGNORE_INDEX).sum()
    assert answers.loss == pytest.approx(float(odds_ratio), rel=1e-5)
    assert whole.loss - answers.loss == pytest.approx(total / number - float(own), abs=1e-5)


@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("chunk_bytes", [1 << 30, 4 * 50 * 3])
def test_log_probs_and_their_gradients(
    softcap: float | None, chunk_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(row_values, "LOSS_CHUNK_BYTES", chunk_bytes)
    torch.manual_seed(0)
    hidden, weight, bias = torch.randn(10, 8), torch.randn(50, 8), torch.randn(50)
    labels, outer = torch.randint(0, 50, (10,)), torch.randn(10)
    labels[[2, 7]] = IGNORE_INDEX
    inputs = [each.requires_grad_() for each in (hidden, weight, bias)]
    logits = F.linear(hidden, weight, bias)
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    expected = torch.where(
        labels != IGNORE_INDEX, logits.log_softmax(1).gather(1, labels.clamp(min=0)[:, None]).squeeze(1), 0.0
    )
    gradients = torch.autograd.grad(expected @ outer, inputs, retain_graph=True)
    rows = (labels != IGNORE_INDEX).nonzero().flatten()
    function = LabelLogProbs(labels[rows])
    found = row_values.linear_rows(hidden, weight, bias, rows, function, softcap).squeeze(1)
    torch.testing.assert_close(found, expected)
    for one, other in zip(torch.autograd.grad(found @ outer, inputs), gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
    copied = logits.detach().requires_grad_()
    of_logits = row_values.rows_of_logits(copied, rows, function).squeeze(1)
    torch.testing.assert_close(of_logits, expected)
    (slope,) = torch.autograd.grad(of_logits @ outer, copied)
    (wanted,) = torch.autograd.grad(expected @ outer, logits)
    torch.testing.assert_close(slope, wanted)


def test_no_logits_are_kept(rows: Path, alone: DistributedContext) -> None:
    """With a loss head nothing of the size of the logits is saved for the backward pass."""
    objective = OBJECTIVES["simpo"]()
    data = _samples(rows, objective)
    sizes = dict[bool, int]()
    for has_head in (True, False):
        model = llama(tied=False)
        assert use_loss_head(model, has_head) is has_head
        largest = 0

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            nonlocal largest
            largest = max(largest, tensor.numel())
            return tensor

        wrapped: Any = Plain(model)
        run = TrainingRun(
            wrapped, torch.optim.SGD(model.parameters(), 0.1), ShuffledDataset(data, SEED),
            TrainConfig(steps=1, global_batch_size=8, micro_batch_size=8), alone, TrainerState(SEED, data.identity),
        )  # fmt: skip
        run.objective = objective
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            next(train(run))
        sizes[has_head] = largest
    vocabulary = llama(tied=False).config.vocab_size
    assert sizes[False] >= 8 * 2 * 8 * vocabulary
    assert sizes[True] < sizes[False] / 2


def test_every_objective_says_what_it_needs() -> None:
    for name, settings in OBJECTIVES.items():
        assert settings.name == name
        assert settings.samples in ("rows", PAIRS, LABELED)
        assert settings.__doc__
    assert [name for name, each in OBJECTIVES.items() if each.is_cross_entropy] == ["sft"]


def test_functions_of_ones_own_are_for_sft(alone: DistributedContext, rows: Path) -> None:
    objective = OBJECTIVES["simpo"]()
    data, model = _samples(rows, objective), llama()
    wrapped: Any = Plain(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    run = TrainingRun(wrapped, optimizer, ShuffledDataset(data, SEED), CONFIG, alone, TrainerState(SEED, data.identity))
    run.objective = objective
    own: Callable[..., Any] = lambda output, batch: {}  # noqa: E731
    run.functions.metrics = own
    with pytest.raises(Exception, match="objective=simpo computes its own loss and metrics"):
        next(train(run))


def test_an_answer_that_is_certain_has_a_gradient(alone: DistributedContext) -> None:
    """Its odds would be infinite; in float32 a mean log-probability of 0 is reached soon."""
    means = torch.tensor([[0.0, -1.0], [-1.0, 0.0]], requires_grad=True)
    pairs = Pairs(means, torch.ones(2, 2), torch.zeros(2, 2))
    losses = OrpoConfig().losses(pairs)
    (gradient,) = torch.autograd.grad(losses.sum(), means)
    assert bool(losses.isfinite().all())
    assert bool(gradient.isfinite().all())
