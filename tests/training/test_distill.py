"""Distillation against plain loops in one process and whole logits, and what is kept of a teacher on disk."""

from __future__ import annotations

import math
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from transformers import PreTrainedModel

from fsdp_shard.config import FinetuneConfig
from fsdp_shard.data import (
    IGNORE_INDEX,
    NO_WINDOW,
    Batch,
    DataConfig,
    ShuffledDataset,
    SourceDataset,
    used_samples,
    with_token_values,
)
from fsdp_shard.distributed import DistributedContext
from fsdp_shard.errors import ConfigError, DataError, Interrupted
from fsdp_shard.inference import load_dispatched
from fsdp_shard.models import ModelConfig
from fsdp_shard.sharding import WRAPPERS
from fsdp_shard.training import RunStart, add_reference, open_data
from fsdp_shard.training.batch_loader import to_device
from fsdp_shard.training.config import TrainConfig
from fsdp_shard.training.held_out.evaluator import evaluate_loss
from fsdp_shard.training.loop import TrainingRun, train
from fsdp_shard.training.loss import row_values
from fsdp_shard.training.loss.distillation import StudentTerms, Targets
from fsdp_shard.training.loss.linear_cross_entropy import use_loss_head
from fsdp_shard.training.objectives.distill import DistillConfig
from fsdp_shard.training.objectives.teachers.teacher_cache import LOG_PROBS, TOKENS, TeacherCache
from fsdp_shard.training.objectives.teachers.teacher_model import ModelTeacher, PrecomputedTeacher
from fsdp_shard.training.trainer_state import TrainerState
from tests.support.ranks import on_ranks
from tests.support.sharded import sharded
from tests.support.tiny import byte_tokenizer, llama
from tests.training.conftest import Plain, stream

SEED, LR, STEPS, VOCABULARY = 3, 1e-2, 5, 257
CONFIG = TrainConfig(steps=STEPS, global_batch_size=4, micro_batch_size=2, schedule="constant")
CPU = torch.device("cpu")


def _teacher() -> PreTrainedModel:
    """A larger model, whose distributions are far from uniform."""
    model = llama(7, tied=False, layers=3).eval()
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(20)
    return model


def _settings(top_k: int | None) -> DistillConfig:
    return DistillConfig(teacher="unused", alpha=0.7, temperature=1.5, top_k=top_k)


def _formula(settings: DistillConfig, student: torch.Tensor, teacher: torch.Tensor, labels: torch.Tensor) -> Any:
    """Loss, KL, cross-entropy and agreement of whole logits [num_rows, vocabulary]."""
    temperature = settings.temperature
    kept = teacher
    if settings.top_k is not None:
        lowest = teacher.topk(settings.top_k, dim=-1).values[:, -1:]
        kept = teacher.masked_fill(teacher < lowest, -math.inf)
    of_teacher, of_student = (kept / temperature).log_softmax(-1), (student / temperature).log_softmax(-1)
    divergence = F.kl_div(
        of_student, of_teacher.masked_fill(kept == -math.inf, -1e4), log_target=True, reduction="none"
    )
    divergence = divergence.sum(-1).mean()
    plain = F.cross_entropy(student, labels)
    same = (student.argmax(-1) == teacher.argmax(-1)).float().mean()
    return settings.alpha * temperature**2 * divergence + (1 - settings.alpha) * plain, divergence, plain, same


def _logits(model: Any, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """Whole logits of the tokens that count, and their labels."""
    labels = torch.from_numpy(batch.labels)
    return model(torch.from_numpy(batch.input_ids)).logits[labels != IGNORE_INDEX], labels[labels != IGNORE_INDEX]


def _loss(settings: DistillConfig, model: Any, teacher: Any, batch: Batch) -> Any:
    student, labels = _logits(model, batch)
    with torch.no_grad():
        wanted = _logits(teacher, batch)[0]
    return _formula(settings, student, wanted, labels)


def _plain_loop(settings: DistillConfig, data: SourceDataset) -> tuple[list[float], list[float]]:
    model, teacher = llama(tied=False).train(), _teacher()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.0, fused=True)
    losses = []
    for step in range(STEPS):
        loss = _loss(settings, model, teacher, ShuffledDataset(data, SEED).batch(range(step * 4, step * 4 + 4)))[0]
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    with torch.no_grad():
        return losses, [float(each) for each in _loss(settings, model.eval(), teacher, data.batch(range(len(data))))]


def _with_teacher(data: SourceDataset, top_k: int) -> SourceDataset:
    """What the teacher says of each sample, from whole logits."""
    teacher, found, counts = _teacher(), [], [0]
    with torch.no_grad():
        for index in range(len(data)):
            logits, _ = _logits(teacher, data.batch([index]))
            found.append(logits.log_softmax(-1).topk(top_k, dim=-1))
            counts.append(len(logits))
    values = {LOG_PROBS: torch.cat([each.values for each in found]).numpy()}
    values[TOKENS] = torch.cat([each.indices for each in found]).int().numpy()
    return with_token_values(data, values, np.cumsum(counts))


def _train(
    context: DistributedContext, top_k: int | None, wrapper: str, teacher: str, has_head: bool
) -> tuple[list[float], list[float]]:
    """Losses of the steps; then the held-out loss, and its metrics."""
    settings, data = _settings(top_k), stream(length=8)
    k = VOCABULARY if top_k is None else top_k
    model = sharded(
        WRAPPERS[wrapper](param_dtype="float32"), context, tied=False,
        prepare=lambda model: use_loss_head(model, has_head),
    )  # fmt: skip
    samples: SourceDataset = _with_teacher(data, k) if teacher == "precomputed" else data
    reference: Any = PrecomputedTeacher() if teacher == "precomputed" else ModelTeacher(_teacher(), k)
    optimizer = torch.optim.AdamW(model.module.parameters(), lr=LR, weight_decay=0.0, fused=True)
    state = TrainerState(SEED, data.identity)
    run = TrainingRun(model, optimizer, ShuffledDataset(samples, SEED), CONFIG, context, state)
    run.objective, run.reference = settings, reference
    losses = [report.loss for report in train(run)]
    report = evaluate_loss(model, samples, 3, context, objective=settings, reference=reference)
    assert report.perplexity is None
    return losses, [report.loss, *(report.metrics[name] for name in ("kl", "cross_entropy", "agreement"))]


@pytest.mark.parametrize(("top_k", "wrapper", "num_ranks", "teacher", "has_head"), [
    (None, "fsdp2", 1, "precomputed", True),
    (None, "fsdp1", 2, "computed", True),
    (5, "fsdp2", 2, "precomputed", True),
    (5, "fsdp2", 2, "computed", False),
    (5, "fsdp1", 1, "precomputed", False),
    (5, "ddp", 2, "computed", True),
    (1, "fsdp2", 1, "computed", True),
])  # fmt: skip
def test_losses_are_those_of_a_plain_loop(
    top_k: int | None, wrapper: str, num_ranks: int, teacher: str, has_head: bool
) -> None:
    expected, evaluated = _plain_loop(_settings(top_k), stream(length=8))
    assert expected[-1] != pytest.approx(expected[0], rel=2e-3), "something is learned"
    for losses, after in on_ranks(num_ranks, _train, top_k, wrapper, teacher, has_head):
        assert losses == pytest.approx(expected, rel=1e-5)
        assert after == pytest.approx(evaluated, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("chunk_bytes", [1 << 30, 4 * 50 * 3])
@pytest.mark.parametrize("k", [50, 4])
def test_terms_and_their_gradients(
    k: int, chunk_bytes: int, softcap: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(row_values, "LOSS_CHUNK_BYTES", chunk_bytes)
    torch.manual_seed(0)
    hidden, weight, bias = torch.randn(10, 8), torch.randn(50, 8), torch.randn(50)
    teacher, labels, rows = 3 * torch.randn(10, 50), torch.randint(0, 50, (10,)), torch.tensor([0, 1, 3, 4, 5, 6, 8, 9])
    inputs = [each.requires_grad_() for each in (hidden, weight, bias)]
    logits = F.linear(hidden, weight, bias)
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    settings = DistillConfig(teacher="unused", alpha=0.3, temperature=2.0, top_k=k)
    loss, *terms = _formula(settings, logits[rows], teacher[rows], labels[rows])
    expected = torch.autograd.grad(loss, inputs, retain_graph=True)
    top = teacher[rows].log_softmax(-1).topk(k, dim=-1)
    function = StudentTerms(labels[rows], Targets(top.values, top.indices.int()), 2.0)
    found = row_values.linear_rows(hidden, weight, bias, rows, function, softcap)
    assert found[[2, 7]].abs().sum() == 0
    torch.testing.assert_close(found.sum(0) / len(rows), torch.stack(terms), rtol=1e-5, atol=1e-5)

    def whole(values: torch.Tensor) -> torch.Tensor:
        means = values.sum(0) / len(rows)
        return 0.3 * 4 * means[0] + 0.7 * means[1]

    for one, other in zip(torch.autograd.grad(whole(found), inputs), expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
    copied = logits.detach().requires_grad_()
    (slope,) = torch.autograd.grad(whole(row_values.rows_of_logits(copied, rows, function)), copied)
    torch.testing.assert_close(slope, torch.autograd.grad(loss, logits)[0])


def test_a_teacher_read_from_the_disk_says_the_same(tmp_path: Path) -> None:
    """Whole logits, a loss head, and blocks that are streamed agree."""
    _teacher().save_pretrained(tmp_path)
    batch = to_device(stream().batch(range(6)), CPU)
    expected = ModelTeacher(_teacher(), 9).targets(batch)
    for budget in ("1GB", "150KB"):
        model = load_dispatched(tmp_path, max_memory={"cpu": budget})
        assert ("disk" in model.hf_device_map.values()) is (budget == "150KB")
        for has_head in (False, True):
            assert not has_head or use_loss_head(model, True)
            found = ModelTeacher(model, 9).targets(batch)
            torch.testing.assert_close(found.log_probs, expected.log_probs)
            assert torch.equal(found.tokens, expected.tokens)
    assert len(expected.tokens) == int((stream().batch(range(6)).labels != IGNORE_INDEX).sum())


def test_no_logits_are_kept(alone: DistributedContext) -> None:
    """With a loss head nothing of the size of the logits is saved for the backward pass."""
    sizes = dict[bool, int]()
    for has_head in (True, False):
        model, largest = llama(tied=False), 0
        assert use_loss_head(model, has_head) is has_head

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            nonlocal largest
            largest = max(largest, tensor.numel())
            return tensor

        wrapped: Any = Plain(model)
        data = stream(length=32)
        run = TrainingRun(
            wrapped, torch.optim.SGD(model.parameters(), 0.1), ShuffledDataset(data, SEED),
            TrainConfig(steps=1, global_batch_size=8, micro_batch_size=8), alone, TrainerState(SEED, data.identity),
        )  # fmt: skip
        run.objective, run.reference = _settings(4), ModelTeacher(_teacher(), 4)
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            next(train(run))
        sizes[has_head] = largest
    assert sizes[False] >= 8 * 32 * VOCABULARY
    assert sizes[True] < sizes[False] / 2


def test_values_follow_their_samples() -> None:
    data = stream(401, 8)
    starts = np.arange(0, 401, 8)
    extended = with_token_values(data, {"a": np.arange(400)[:, None]}, starts)
    assert extended.identity == data.identity
    assert extended.batch([3, -1, 1]).token_values["a"][:, 0].tolist() == [*range(24, 32), *range(8, 16)]
    part = extended.slice(10, 20)
    assert part.batch([2]).token_values["a"][:, 0].tolist() == [*range(96, 104)]
    assert part.num_predictions == part.dataset.num_predictions == 80  # type: ignore[attr-defined]  # it is ShuffledDataset
    assert extended.head(4).batch([3]).labels.tolist() == data.batch([3]).labels.tolist()
    with pytest.raises(ValueError, match="values of 9 samples for 50"):
        with_token_values(data, {}, starts[:10])


def test_which_samples_a_run_uses() -> None:
    data, held_out = stream(401, 8), stream(81, 8)
    order = ShuffledDataset(data, SEED)
    of_train, of_held_out = used_samples(order, range(4, 10), held_out, 3)
    assert np.flatnonzero(of_train).tolist() == sorted(order.index_of(position) for position in range(4, 10))
    assert np.flatnonzero(of_held_out).tolist() == [0, 1, 2]
    (all_of_them,) = used_samples(order, range(10**9), None, None)
    assert all_of_them.all()


class _Backward(ShuffledDataset):
    """An order of one's own, whose constructor is another, too."""

    def __init__(self, dataset: SourceDataset) -> None:
        super().__init__(dataset, SEED)
        self.identity = f"{dataset.identity}, backward"

    def index_of(self, position: int) -> int:
        return len(self.dataset) - 1 - position % len(self.dataset)


def test_ones_own_order_decides_which_samples_have_values() -> None:
    data = stream(401, 8)
    own = _Backward(data)
    (used,) = used_samples(own, range(4), None, None)
    assert np.flatnonzero(used).tolist() == [46, 47, 48, 49]
    extended = with_token_values(data, {"a": np.arange(400)[:, None]}, np.arange(0, 401, 8), used)
    again = own.with_sources([extended])
    assert isinstance(again, _Backward)
    assert again.identity == f"{data.identity}, backward"
    assert again.sample(1).token_values["a"][:, 0].tolist() == [*range(384, 392)]
    assert own.dataset is data, "the first one is unchanged"
    assert extended.sample(NO_WINDOW).token_values["a"].size == 0
    for late in (ShuffledDataset(extended, SEED), ShuffledDataset(extended.slice(0, 10), SEED)):
        with pytest.raises(ConfigError, match=r"has no a: fs\.add_reference adds .* before that call"):
            late.batch(range(10))
    with pytest.raises(ConfigError, match=r"lack the teacher's tokens, which fs\.add_reference"):
        PrecomputedTeacher().targets(to_device(own.batch([0]), CPU))


def test_a_cache_has_what_was_written(tmp_path: Path) -> None:
    data, cache = stream(25, 8), TeacherCache(tmp_path / "cache", 2)
    cache.create(data)
    assert cache.starts(3).tolist() == [0, 8, 16, 24]
    with cache.writer(24) as writer:
        writer.write(8, {LOG_PROBS: np.full((8, 2), -0.5), TOKENS: np.full((8, 2), 7)})
        writer.sync()
    cache.mark(np.array([False, True, False]))
    cache.create(data)  # leaves what is there
    assert cache.done(3).tolist() == [False, True, False]
    found = cache.values(24)
    assert (found[LOG_PROBS][8:16] == -0.5).all()
    assert (found[TOKENS][8:16] == 7).all()
    assert not found[TOKENS][16:].any()
    for name, content in (("tokens", b"\x93NUMPY"), ("log_probs", (tmp_path / "cache/done.npy").read_bytes())):
        (tmp_path / f"cache/{name}.npy").write_bytes(content)
        with pytest.raises(DataError, match=rf"{name}\.npy is damaged"):
            cache.values(24)


def test_a_cache_that_two_runs_create_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In containers, their processes may have the same number."""
    data, cache, save = stream(25, 8), TeacherCache(tmp_path / "cache", 2), np.save

    def after_the_other(file: Path, array: Any) -> None:
        monkeypatch.setattr(np, "save", save)
        cache.create(data)
        save(file, array)

    monkeypatch.setattr(np, "save", after_the_other)
    cache.create(data)
    assert cache.starts(3).tolist() == [0, 8, 16, 24]
    assert [path.name for path in tmp_path.iterdir()] == ["cache"]


@pytest.mark.long
def test_a_stopped_pass_keeps_what_it_has(alone: DistributedContext, tiny_model: Path, tmp_path: Path) -> None:
    teacher, text = tmp_path / "teacher", tmp_path / "text.txt"
    _teacher().save_pretrained(teacher)
    byte_tokenizer().save_pretrained(teacher)
    text.write_text("the quick brown fox " * 30)
    config = FinetuneConfig(
        model=ModelConfig(path=str(tiny_model)),
        data=DataConfig(path=str(text), sequence_length=16, cache_dir=str(tmp_path / "cache")),
        objective=DistillConfig(teacher=str(teacher), top_k=5),
        train=TrainConfig(steps=3, global_batch_size=4, micro_batch_size=2),
    )
    start = RunStart(alone, config.source)
    data = open_data(config, start)
    start.stop.number = signal.SIGTERM
    with pytest.raises(Interrupted, match="Stopped by SIGTERM before training, in the pass of the teacher"):
        add_reference(config, start, data)
    (file,) = (tmp_path / "cache").glob("teacher-*/done.npy")
    assert np.load(file).sum() == 2, "a micro-batch"
    start.stop.number = 0
    extended = add_reference(config, start, data)
    assert "12 samples: 10 computed" in extended.notes[-1]
    batch = to_device(extended.train.batch(range(12)), CPU)
    expected = ModelTeacher(_teacher(), 5).targets(batch)
    assert torch.equal(batch.token_values[TOKENS], expected.tokens)
    torch.testing.assert_close(batch.token_values[LOG_PROBS], expected.log_probs)
