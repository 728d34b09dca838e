"""`Checkpointer` in loops of people's own: whoever wrapped the model, any optimizer, any number of ranks."""

from __future__ import annotations

import copy
import dataclasses
import errno
import json
import math
import os
import signal
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import CosineAnnealingLR, MultiStepLR
from transformers import AutoTokenizer

import fsdp_shard as fs
from fsdp_shard.checkpoint import FAULTS, CheckpointConfig
from fsdp_shard.distributed import DistributedContext
from fsdp_shard.errors import CheckpointError, ConfigError, ModelError, SaveError
from fsdp_shard.training.checkpoints.checkpointer import CheckpointerSettings
from fsdp_shard.training.checkpoints.checkpointer_document import bits_sums
from tests.support.ranks import on_ranks
from tests.support.stateful import Stateful
from tests.support.tiny import byte_tokenizer, llama, token_batch
from tests.support.wrapped_net import WRAPPERS, Net, by_fully_shard, by_nobody

_STEPS = 6  # three before the save, three after it


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.01, foreach=False),
    "adamw_foreach": lambda params: torch.optim.AdamW(params, lr=0.01, foreach=True),
    "adamw_fused": lambda params: torch.optim.AdamW(params, lr=0.01, fused=True),
    "sgd_momentum": lambda params: torch.optim.SGD(params, lr=0.01, momentum=0.9),
    "sgd": lambda params: torch.optim.SGD(params, lr=0.01),
    "adafactor": lambda params: torch.optim.Adafactor(params, lr=0.01),
}


def run(
    context: DistributedContext, path: Path, wrapper: str, optimizer_name: str, last: int, layout: str = "sharded"
) -> list[float]:
    """Restore, train to `last` and save; the losses, of the same batch for any number of ranks."""
    model = WRAPPERS[wrapper](Net(), context)
    optimizer = OPTIMIZERS[optimizer_name](model.parameters())
    scheduler = CosineAnnealingLR(optimizer, T_max=_STEPS)
    losses = []
    warnings.filterwarnings("ignore", category=FutureWarning)  # torch's own, of names that it uses itself
    with fs.Checkpointer(path, asynchronous=False, layout=layout) as checkpointer:
        restored = checkpointer.restore(model, optimizer, scheduler=scheduler)
        for step in range(restored.step + 1 if restored else 1, last + 1):
            ids = token_batch(step, 6, 5, 13)
            if wrapper in ("by_fully_shard", "by_fsdp", "by_ddp"):
                ids = ids.chunk(context.world_size)[context.rank]
            loss = nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten())
            losses.append(context.all_reduce([float(loss.detach())])[0] / context.world_size)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
        if not restored or restored.step < last:
            checkpointer.save(last, model, optimizer, scheduler=scheduler, extra={"seen": last})
        assert checkpointer.latest == last
    return losses


@pytest.mark.long
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_losses_after_a_restore_are_those_of_one_run(wrapper: str, optimizer: str, tmp_path: Path) -> None:
    if wrapper == "by_tensor_parallel" and optimizer in ("adamw_foreach", "adamw_fused", "adafactor"):
        pytest.skip("torch's kernels do not take parameters of which only some are DTensors")
    if wrapper == "by_fully_shard" and optimizer == "adafactor":
        pytest.skip("torch's Adafactor does not take DTensors")
    whole = on_ranks(2, run, tmp_path / "whole", wrapper, optimizer, _STEPS)[0]
    on_ranks(2, run, tmp_path / "parts", wrapper, optimizer, 2)
    again = on_ranks(2, run, tmp_path / "parts", wrapper, optimizer, 3)[0]
    assert again == whole[2:3], "on as many ranks"
    if (wrapper, optimizer) == ("by_fsdp", "adafactor"):
        return  # under FSDP1 its states are those of a rank's flat parts, which another number of ranks does not have
    few = on_ranks(1, run, tmp_path / "parts", wrapper, optimizer, 4)[0]
    many = on_ranks(3, run, tmp_path / "parts", wrapper, optimizer, _STEPS)[0]
    assert few + many == pytest.approx(whole[3:], abs=1e-6)


# What is saved besides a model and its optimizer


def test_everything_that_is_given_comes_back(tmp_path: Path) -> None:
    def save(context: DistributedContext) -> tuple[list[float], Any]:
        models, optimizers, states = _several(context)
        with fs.Checkpointer(tmp_path) as checkpointer:
            extra = {"epoch": 3, "order": torch.arange(4), "name": ("a", b"b"), 7: float("nan")}
            own = {"rank": context.rank, "buffer": torch.full((context.rank + 1,), 2.0)}
            checkpointer.save(5, models, optimizers, extra=extra, extra_per_rank=own, **states)
            drawn = torch.rand(3).tolist()  # what comes after the save
            checkpointer.wait()
        return drawn, [param.sum().item() for param in models["ema"].parameters()]

    def restore(context: DistributedContext) -> tuple[list[float], Any, Any]:
        models, optimizers, states = _several(context, steps=1)
        with fs.Checkpointer(tmp_path) as checkpointer:
            restored = checkpointer.restore(models, optimizers, **states)
        assert restored is not None
        assert (restored.step, restored.has_random_state) == (5, context.world_size == 2)
        extra = restored.extra
        assert (extra["epoch"], extra["order"].tolist(), extra["name"]) == (3, [0, 1, 2, 3], ("a", b"b"))
        assert extra[7] != extra[7], "NaN"
        assert states["scaler"].get_scale() == 512.0
        assert states["scheduler"].milestones == Counter({1: 1, 4: 1})
        return torch.rand(3).tolist(), [param.sum().item() for param in models["ema"].parameters()], restored

    saved, again, alone = on_ranks(2, save), on_ranks(2, restore), on_ranks(1, restore)
    for rank in range(2):
        drawn, averages, restored = again[rank]
        assert drawn == saved[rank][0], "each rank goes on with its own random numbers"
        assert averages == saved[rank][1]
        assert restored.extra_per_rank["rank"] == rank
        assert restored.extra_per_rank["buffer"].tolist() == [2.0] * (rank + 1)
    assert alone[0][2].extra_per_rank is None, "another number of ranks has none of its own"


def _several(context: DistributedContext, steps: int = 3) -> tuple[dict[str, nn.Module], dict[str, Any], Any]:
    """Two models with an optimizer each, an average of one of them, a scheduler and a scaler; trained for `steps`."""
    torch.manual_seed(context.rank)
    models: dict[str, nn.Module] = {name: by_nobody(Net(), context) for name in ("one", "two", "ema")}
    optimizers = {name: torch.optim.AdamW(models[name].parameters(), lr=0.01) for name in ("one", "two")}
    scheduler = MultiStepLR(optimizers["one"], [1, 4])
    scaler = torch.amp.GradScaler("cpu", init_scale=512.0 if steps > 1 else 2.0)
    for step in range(steps):
        for name, optimizer in optimizers.items():
            models[name](token_batch(step, 2, 3, 13)).sum().backward()
            optimizer.step()
        scheduler.step()
        with torch.no_grad():
            for average, param in zip(models["ema"].parameters(), models["one"].parameters(), strict=True):
                average.lerp_(param, 0.5)
    return models, optimizers, {"scheduler": scheduler, "scaler": scaler}


def test_a_save_in_the_background_has_the_state_of_its_step(tmp_path: Path) -> None:
    def train(context: DistributedContext) -> list[dict[str, torch.Tensor]]:
        model = by_fully_shard(Net(), context)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        held = []
        with fs.Checkpointer(tmp_path) as checkpointer:
            for step in range(1, 5):
                model(token_batch(step, 2, 3, 13)).sum().backward()
                optimizer.step()
                checkpointer.save(step, model, optimizer)
                held.append({name: whole(param).clone() for name, param in model.named_parameters()})
        return held

    held = on_ranks(2, train)[0]
    for step, values in enumerate(held, start=1):
        with fs.open_checkpoint(tmp_path / "checkpoints" / f"step-{step:08d}") as index:
            assert all(torch.equal(index.read(name), value) for name, value in values.items())


def _zero(model: nn.Module) -> None:
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()


def _load_state(model: nn.Module) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # FSDP1 has deprecated it
        model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()})


@pytest.mark.parametrize("change", [_zero, _load_state, None])
@pytest.mark.parametrize("wrapper", ["by_fully_shard", "by_fsdp", "by_ddp", "by_tensor_parallel"])
def test_weights_that_change_while_they_are_saved_fail_the_save(
    wrapper: str, change: Callable[[nn.Module], None] | None, tmp_path: Path
) -> None:
    """In the first step only the optimizer changes them, in the second `change`, or `load_weights`."""
    others = tmp_path / "others.safetensors"
    save_file({name: value.clone() for name, value in Net().state_dict().items()}, others)

    def train(context: DistributedContext) -> list[int]:
        held = threading.Event()

        def hold(point: str) -> None:
            if point == "staged":
                held.wait(60)

        FAULTS.hook = hold
        warnings.filterwarnings("ignore", category=FutureWarning)  # torch's own, of names that it uses itself
        model = WRAPPERS[wrapper](Net(), context)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        with fs.Checkpointer(tmp_path / "run") as checkpointer:
            for step in (1, 2):
                model(token_batch(step, 2, 3, 13)).sum().backward()
                optimizer.step()
                checkpointer.save(step, model, optimizer)
                with torch.no_grad():
                    model(token_batch(9, 2, 3, 13))
                model(token_batch(step, 2, 3, 13)).sum().backward()  # neither pass changes them
                fs.clip_grad_norm_(model, 0.1)
                if step == 1:
                    optimizer.step()
                elif change is None:
                    fs.load_weights(model, others)
                else:
                    change(model)
                held.set()
                if step == 1:
                    checkpointer.wait()
                    held.clear()
            with pytest.raises(SaveError, match=r"weight was changed in place while .* Call wait\(\) before"):
                checkpointer.wait()
            return checkpointer.steps

    assert on_ranks(2, train) == [[1]] * 2


def whole(param: torch.Tensor) -> torch.Tensor:
    return param.full_tensor() if isinstance(param, DTensor) else param.detach()


def test_its_settings_are_those_of_the_config_but_when_and_what_to_save() -> None:
    fields = {field.name for field in dataclasses.fields(CheckpointConfig)}
    assert CheckpointerSettings.__annotations__.keys() == fields - {"every", "save_best", "optimizer"}


def test_all_steps_are_kept_unless_asked(tmp_path: Path) -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters())
    with fs.Checkpointer(tmp_path, monitor="loss") as checkpointer:
        for step, loss in enumerate([3.0, 2.0], start=1):
            checkpointer.save(step, model, optimizer, metrics={"loss": loss})
        with warnings.catch_warnings(action="error"):  # a tensor with its graph is what loops have
            checkpointer.save(3, model, optimizer, metrics={"loss": torch.ones((), requires_grad=True) * 1})
        checkpointer.wait()
        assert (checkpointer.steps, checkpointer.best) == ([1, 2, 3], 3)


def test_retention_and_the_best_step(tmp_path: Path) -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters())
    with fs.Checkpointer(tmp_path, keep_last=2, monitor="accuracy", mode="max") as checkpointer:
        for step, accuracy in enumerate([0.1, 0.7, 0.3, 0.6, 0.2], start=1):
            checkpointer.save(step, model, optimizer, metrics={"accuracy": accuracy})
        checkpointer.wait()
        assert (checkpointer.steps, checkpointer.latest, checkpointer.best) == ([2, 4, 5], 5, 2)
    with fs.Checkpointer(tmp_path, keep_last=2, monitor="accuracy", mode="max") as checkpointer:
        assert checkpointer.restore(model, optimizer, step="best") is not None
        checkpointer.save(6, model, optimizer, metrics={"accuracy": 0.65})
        checkpointer.wait()
        assert checkpointer.best == 2, "it knows what the best one had"


def test_a_metric_that_is_not_finite_is_never_the_best(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters())
    values = [math.nan, 0.2, 0.7, math.inf, math.nan, 0.3]
    with fs.Checkpointer(tmp_path, keep_last=1, monitor="score", mode="max") as checkpointer:
        for step, value in enumerate(values, start=1):
            checkpointer.save(step, model, optimizer, metrics={"score": value})
        checkpointer.wait()
        assert (checkpointer.steps, checkpointer.best) == ([3, 6], 3)
    warnings = [record.message for record in caplog.records if "is not the best" in record.message]
    assert warnings == ["score is nan, which is not finite: such a step is not the best."]


def test_a_best_step_that_is_not_finite_is_replaced(tmp_path: Path) -> None:
    """One that an earlier version has chosen."""
    model = Net()
    with fs.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, model, metrics={"score": math.nan})
    (tmp_path / "checkpoints/best").write_text((tmp_path / "checkpoints/latest").read_text())
    with fs.Checkpointer(tmp_path, monitor="score") as checkpointer:
        assert checkpointer.best == 1
        checkpointer.save(2, model, metrics={"score": 0.5})
        assert checkpointer.best == 2


def test_a_best_step_that_could_not_be_saved_is_not_the_best(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(point: str) -> None:
        if point == "weights-written":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    model = Net()
    with fs.Checkpointer(tmp_path, monitor="loss", asynchronous=False, max_failures=2) as checkpointer:
        checkpointer.save(1, model, metrics={"loss": 3.0})
        monkeypatch.setattr(FAULTS, "hook", full)
        checkpointer.save(2, model, metrics={"loss": 1.0})
        monkeypatch.setattr(FAULTS, "hook", None)
        checkpointer.save(3, model, metrics={"loss": 2.0})
        assert (checkpointer.steps, checkpointer.best) == ([1, 3], 3)


def test_the_metrics_of_rank_0_count(tmp_path: Path) -> None:
    def save(context: DistributedContext) -> tuple[list[int], int | None]:
        model = DistributedDataParallel(Net())
        optimizer = torch.optim.SGD(model.parameters())
        name = ("accuracy", "of_rank_1")[context.rank]
        with fs.Checkpointer(tmp_path, keep_last=1, monitor="accuracy", mode="max") as checkpointer:
            for step, accuracy in enumerate([0.1, 0.7, 0.3, 0.2], start=1):
                checkpointer.save(step, model, optimizer, metrics={name: accuracy})
            checkpointer.wait()
            return checkpointer.steps, checkpointer.best

    assert on_ranks(2, save) == [([2, 4], 2)] * 2


@pytest.mark.parametrize("layout", ["sharded", "gathered"])
def test_commands_read_its_steps(layout: str, tmp_path: Path) -> None:
    def save(context: DistributedContext) -> None:
        model = llama(1)
        fully_shard(model)
        optimizer = torch.optim.AdamW(model.parameters())
        with fs.Checkpointer(tmp_path / "run", layout=layout, processor=byte_tokenizer()) as checkpointer:
            checkpointer.save(7, model, optimizer)

    on_ranks(2, save)
    step = tmp_path / "run" / "checkpoints" / "step-00000007"
    assert fs.verify(tmp_path / "run").is_sound
    assert json.loads((step / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]
    fs.convert(tmp_path / "run", tmp_path / "model")
    ids = token_batch(0, 2, 5)
    expected = llama(1).eval()(ids).logits
    for source in (step, tmp_path / "model"):
        model = fs.load_dispatched(source, device_map="cpu")
        torch.testing.assert_close(model(ids).logits, expected, rtol=0, atol=0)
    tokenizer = AutoTokenizer.from_pretrained(step)
    assert tokenizer.decode(tokenizer("abc").input_ids) == "abc"


def test_a_signal_to_one_rank_saves_on_all(tmp_path: Path) -> None:
    def train(context: DistributedContext) -> int:
        model = Net()
        optimizer = torch.optim.SGD(model.parameters())
        with fs.Checkpointer(tmp_path) as checkpointer:
            for step in range(1, 9):
                if step == 3 and context.rank == 1:  # from the first call on, the signal is caught
                    signal.raise_signal(signal.SIGTERM)
                if checkpointer.save_on_signal(step, model, optimizer, extra=step):
                    assert checkpointer.latest == step, "it is on the disk"
                    return step
        return 0

    assert on_ranks(2, train) == [3, 3]


# What is wrong is one clear error, and nothing is lost


def _of_rank(rank: int) -> nn.Module:
    """A model that nobody keeps the same on all ranks."""
    model = Net()
    nn.init.constant_(model.norm.weight, rank)
    return model


def _saves(words: str, **arguments: Any) -> Callable[[DistributedContext, Path], None]:
    """A rank that saves step 1, then a wrong step 2, and restores step 1."""

    def work(context: DistributedContext, path: Path) -> None:
        model = Net()
        optimizer = torch.optim.AdamW(model.parameters())
        given: dict[str, Any] = {"step": 2, "model": model, "optimizer": optimizer} | {
            name: value(context) if callable(value) else value for name, value in arguments.items()
        }
        with fs.Checkpointer(path) as checkpointer:
            checkpointer.save(1, model, optimizer)
            with pytest.raises((SaveError, ConfigError, ModelError), match=words):
                checkpointer.save(**given)
            checkpointer.wait()
            assert checkpointer.steps == [1]
            assert checkpointer.restore(model, optimizer) is not None

    return work


class Params4bit(nn.Parameter):
    """As those of bitsandbytes, which has its scales beside the packed weights."""

    quant_state = "scales"


def _quantized() -> nn.Module:
    model = nn.Linear(4, 4)
    model.weight = Params4bit(torch.zeros(8, 1, dtype=torch.uint8), requires_grad=False)
    return model


def _expanded() -> nn.Module:
    model = nn.Linear(4, 4)
    model.register_buffer("mask", torch.ones(4)[None].expand(3, -1))
    return model


@pytest.mark.parametrize(
    ("words", "arguments"),
    [
        ("step-00000001 exists already", {"step": 1}),
        ("an integer of at least 0, not -1", {"step": -1}),
        ("an integer of at least 0, not True", {"step": True}),
        (
            "differ in the parameter norm.weight, which each of them has whole",
            {"model": lambda context: _of_rank(context.rank), "optimizer": None},
        ),
        ("differ in the number of the step", {"step": lambda context: 2 + context.rank}),
        ("extra.path is a pathlib.*which cannot be stored as data", {"extra": {"path": Path("x")}}),
        ("extra.w is a tensor that is on the meta device", {"extra": {"w": torch.ones(2, device="meta")}}),
        ("extra.w is a tensor of torch.complex128", {"extra": {"w": torch.ones(2, dtype=torch.complex128)}}),
        ("extra.w is a tensor that is sparse", {"extra": {"w": torch.eye(2).to_sparse()}}),
        (r"extra\.xx.* is a tensor whose keys, joined by dots, have", {"extra": {"x" * 1000: torch.ones(1)}}),
        (
            "odd.w is a tensor that is nested",
            {"odd": Stateful({"w": torch.nested.nested_tensor([torch.ones(1)], layout=torch.jagged)})},
        ),
        ("odd.fn is a builtins.function", {"odd": Stateful({"fn": lambda: 0})}),
        ("differ in odd", {"odd": lambda context: Stateful({"n": context.rank})}),
        (
            "a parameter of shape .* that the model does not have",
            {"optimizer": lambda context: torch.optim.SGD(Net().parameters())},
        ),
        ("is not a torch.optim.Optimizer", {"optimizer": lambda context: Stateful({})}),
        ("is on the meta device", {"model": lambda context: Net().to("meta"), "optimizer": None}),
        ("0.weight of .* has no shape and no", {"model": lambda _: nn.Sequential(nn.LazyLinear(2)), "optimizer": None}),
        ("running_mean of .* has no shape", {"model": lambda _: nn.LazyBatchNorm1d(affine=False), "optimizer": None}),
        ("of torch.complex128", {"model": lambda _: nn.Linear(2, 1, dtype=torch.complex128), "optimizer": None}),
        ("None is neither a torch.nn.Module", {"model": None}),
        ("mask .* is a buffer whose elements share memory", {"model": lambda _: _expanded(), "optimizer": None}),
        ("weight is a Params4bit, a quantized weight, of which", {"model": lambda _: _quantized(), "optimizer": None}),
        (
            "a.b.weight is the name of a parameter or buffer of both models 'a' and 'a.b'",
            {"model": {"a": nn.ModuleDict({"b": nn.Linear(2, 1)}), "a.b": nn.Linear(2, 1)}, "optimizer": None},
        ),
        (r"scheduler=3 has no state_dict\(\) and load_state_dict\(\)", {"scheduler": 3}),
        ("metrics has loss='x', which is not a number", {"metrics": {"loss": "x"}}),
    ],
)
def test_what_cannot_be_saved(words: str, arguments: dict[str, Any], tmp_path: Path) -> None:
    on_ranks(2, _saves(words, **arguments), tmp_path)


@pytest.mark.parametrize(
    ("words", "change"),
    [
        ("lacks extra.bias", lambda: {"model": _with_extra()}),
        (r"has embed.weight as F32, where the model has torch.float64", lambda: {"model": Net().double()}),
        ("was saved with one optimizer, and restore\\(\\) was given no optimizer", lambda: {"optimizer": None}),
        ("parameter groups have the options", lambda: {"kind": torch.optim.SGD}),
        ("was saved with the states none, and restore.* scheduler", lambda: {"scheduler": Stateful({})}),
        ("has no step 9; it has 1", lambda: {"step": 9}),
    ],
)
def test_what_a_step_is_not(words: str, change: Callable[[], dict[str, Any]], tmp_path: Path) -> None:
    model = Net()
    with fs.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, model, torch.optim.AdamW(model.parameters()))
        checkpointer.wait()
        given: dict[str, Any] = {"model": model, **change()}
        kind = given.pop("kind", torch.optim.AdamW)
        given = {"optimizer": kind(given["model"].parameters()), **given}
        with pytest.raises(CheckpointError, match=words):
            checkpointer.restore(**given)


@pytest.mark.parametrize("step", ["latest", "best"])
def test_a_first_start_restores_nothing(step: str, tmp_path: Path) -> None:
    with fs.Checkpointer(tmp_path) as checkpointer:
        assert checkpointer.restore(Net(), step=step) is None
        checkpointer.save(1, Net())
        checkpointer.wait()
        if step == "best":
            with pytest.raises(CheckpointError, match="has no step best; it has 1"):
                checkpointer.restore(Net(), step=step)


def test_a_restore_of_what_is_no_module(tmp_path: Path) -> None:
    with fs.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, Net())
        wrong: list[Any] = [None, {"a": None}]
        for model in wrong:
            with pytest.raises(ModelError, match=r"None is neither a torch.nn.Module"):
                checkpointer.restore(model)


def test_a_step_is_an_integer_of_any_library(tmp_path: Path) -> None:
    model, last = Net(), Net()
    with fs.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(numpy.int64(2), model)
        checkpointer.save(torch.tensor(3), last)
        assert checkpointer.steps == [2, 3]
        restored = checkpointer.restore(last, step=numpy.int64(2))
    assert restored is not None
    assert (type(restored.step), restored.step) == (int, 2)
    assert all(map(torch.equal, model.parameters(), last.parameters()))


@pytest.mark.parametrize("step", ["1", True, 1.0, None])
def test_what_is_no_step(step: Any, tmp_path: Path) -> None:
    model = Net()
    with fs.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, model)
        with pytest.raises(ConfigError, match=f"step={step!r} is neither the number of a step nor 'latest' or 'best'"):
            checkpointer.restore(model, step=step)


def _with_extra() -> nn.Module:
    model = Net()
    model.extra = nn.Linear(2, 2)
    return model


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_a_digest_on_a_gpu_is_a_sum_of_bits(dtype: torch.dtype) -> None:
    """On the CPU, as a GPU is asked for nothing else."""
    data = torch.arange(1.0, 9.0).to(dtype)
    other = data.clone()
    other[3] = 7.0
    negative, one, two = torch.full((8,), -1.0).to(dtype), data[:1], data[1:2]
    given = [one, data, two, other, data.clone(), torch.ones(1, dtype=torch.float16), data[:0], negative]
    sums = bits_sums(given)
    assert sums == [bits_sums([each])[0] for each in given]
    assert len({sums[0], sums[1], sums[2], sums[3]}) == 4
    assert sums[1] == sums[4]
    assert sums[6] == 0
    assert all(0 <= number < 2**64 for number in sums)
    assert bits_sums([]) == []


@pytest.mark.parametrize("keep_last", ["3", 1.5, True])
def test_a_number_of_steps_is_a_whole_number(keep_last: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"keep_last={keep_last!r} is .*, expected an int"):
        fs.Checkpointer(tmp_path, keep_last=keep_last)


def test_settings_that_a_loop_does_not_have(tmp_path: Path) -> None:
    for settings, words in (
        ({"keep_lats": 1}, r"keep_lats is not a setting of Checkpointer \(did you mean keep_last\?\)"),
        ({"every": 5}, "every is not a setting of Checkpointer"),
        ({"layout": "flat"}, "layout=flat is not one of sharded, gathered"),
        ({"keep_every": 5}, "keep_every=5 needs keep_last"),
        ({"mode": "least"}, "neither 'min' nor 'max'"),
        ({"processor": 3}, r"processor=3 has no save_pretrained\(\); give a tokenizer"),
    ):
        with pytest.raises(ConfigError, match=words):
            fs.Checkpointer(tmp_path, **settings)
    assert list(tmp_path.iterdir()) == []


def test_an_optimizer_that_was_saved_is_not_left_empty(tmp_path: Path) -> None:
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    model(token_batch(0, 2, 3, 13)).sum().backward()
    optimizer.step()
    with fs.Checkpointer(tmp_path, keep_optimizer_last=1) as checkpointer:
        checkpointer.save(1, model, optimizer)
        checkpointer.save(2, model, optimizer)
        checkpointer.wait()
        with pytest.raises(CheckpointError, match="step-00000001 was saved with optimizer state, which is missing"):
            checkpointer.restore(model, optimizer, step=1)
        assert checkpointer.restore(model, optimizer) is not None


def test_weights_that_the_model_ties_must_be_the_same(tmp_path: Path) -> None:
    model = Net()
    model.head.weight = nn.Parameter(torch.zeros(13, 12))
    with fs.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, model)
        with pytest.raises(CheckpointError, match=r"embed.weight and head.weight with different values"):
            checkpointer.restore(Net())


@pytest.mark.parametrize("wrapper", ["nobody", "fully_shard"])
def test_layers_that_two_models_share_must_be_the_same(wrapper: str, tmp_path: Path) -> None:
    def pair(trunks: Sequence[nn.Module]) -> dict[str, nn.Module]:
        if wrapper == "fully_shard":
            for trunk in dict.fromkeys(trunks):
                fully_shard(trunk)
        return {name: nn.Sequential(trunk, nn.Linear(3, 1)) for name, trunk in zip("ab", trunks, strict=True)}

    def work(context: DistributedContext) -> None:
        torch.manual_seed(0)
        one = nn.Linear(3, 3)
        shared = pair([one, one])
        with fs.Checkpointer(tmp_path) as checkpointer:
            checkpointer.save(1, pair([nn.Linear(3, 3), nn.Linear(3, 3)]))
            checkpointer.save(2, shared)
            before = [param.detach().clone() for param in one.parameters()]
            with pytest.raises(CheckpointError, match=r"has a.0.\w+ and b.0.\w+ with different values, and they share"):
                checkpointer.restore(shared, step=1)
            assert all(map(torch.equal, before, one.parameters()))
            checkpointer.restore(shared, step=2)

    on_ranks(2, work)


def test_an_average_of_a_sharded_model_is_divided_as_it_is(tmp_path: Path) -> None:
    def averages(context: DistributedContext, steps: int) -> dict[str, torch.Tensor]:
        model = by_fully_shard(Net(), context)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        average = Stateful({name: param.detach().clone() for name, param in model.named_parameters()})
        with fs.Checkpointer(tmp_path) as checkpointer:
            checkpointer.restore(model, optimizer, average=average)
            for step in range(1, steps + 1):
                model(token_batch(step, 2, 3, 13)).sum().backward()
                optimizer.step()
                for name, param in model.named_parameters():
                    average.state[name].lerp_(param.detach(), 0.5)
                checkpointer.save(step, model, optimizer, average=average)
        return {name: whole(value) for name, value in average.state.items()}

    saved, few, many = (on_ranks(ranks, averages, steps)[0] for ranks, steps in ((2, 2), (1, 0), (3, 0)))
    assert len(saved) > 5
    for name, value in saved.items():
        assert torch.equal(few[name], value), name
        assert torch.equal(many[name], value), name


def test_a_flipped_bit_is_found_before_anything_changes(tmp_path: Path) -> None:
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    with fs.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, model, optimizer)
        checkpointer.wait()
        file = checkpointer.path / "checkpoints" / "step-00000001" / "shard-00000-of-00001.safetensors"
        content = bytearray(file.read_bytes())
        content[-1] ^= 1
        file.write_bytes(content)
        before = [param.clone() for param in model.parameters()]
        with pytest.raises(CheckpointError, match="shard-00000-of-00001"):
            checkpointer.restore(model, optimizer)
        assert all(map(torch.equal, before, model.parameters()))


def test_a_failed_restore_leaves_the_optimizer_as_it_was(tmp_path: Path) -> None:
    model = Net()
    model(token_batch(0, 2, 3, 13)).sum().backward()
    first, second = torch.optim.AdamW(model.parameters()), torch.optim.AdamW(model.parameters(), amsgrad=True)
    first.step()
    second.step()
    with fs.Checkpointer(tmp_path, asynchronous=False) as checkpointer:
        checkpointer.save(1, model, first)
        weights = [param.clone() for param in model.parameters()]
        before = copy.deepcopy(second.state_dict())
        with pytest.raises(CheckpointError, match="max_exp_avg_sq"):
            checkpointer.restore(model, second)
    assert all(map(torch.equal, weights, model.parameters()))
    torch.testing.assert_close(second.state_dict(), before, rtol=0, atol=0)


def test_an_optimizer_of_other_parameters_does_not_make_a_step_damaged(tmp_path: Path) -> None:
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    with fs.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, model, optimizer)
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
        with pytest.raises(ConfigError, match=r"^AdamW has a parameter of shape \[2\] that the model does not have"):
            checkpointer.restore(model, optimizer)


def test_the_steps_of_finetune_are_neither_restored_nor_deleted(tiny_model: Path, texts: Path, tmp_path: Path) -> None:
    given = ["train.steps=1", "data.sequence_length=16", "launch.device=cpu", f"data.cache_dir={tmp_path}/cache"]
    fs.finetune([*given, f"model.path={tiny_model}", f"data.path={texts}/held_out.txt", f"run_dir={tmp_path}/run"])
    model = Net()
    with fs.Checkpointer(tmp_path / "run", keep_last=1) as checkpointer:
        with pytest.raises(CheckpointError, match=r"has no checkpointer.json: it was not saved by a Checkpointer"):
            checkpointer.restore(model)
        words = (
            r"step-00000001 has no checkpointer.json: `fsdp-shard finetune` saved it.*another directory than .*run\."
        )
        with pytest.raises(SaveError, match=words):
            checkpointer.save(2, model)
        assert checkpointer.steps == [1]


def test_a_document_that_is_gone(tmp_path: Path) -> None:
    model = Net()
    with fs.Checkpointer(tmp_path, verify_on_resume=False, asynchronous=False) as checkpointer:
        checkpointer.save(1, model)
        (tmp_path / "checkpoints" / "step-00000001" / "checkpointer.json").unlink()
        with pytest.raises(CheckpointError, match=r"checkpointer.json is missing: the checkpoint names it"):
            checkpointer.restore(model)
        checkpointer.save(2, model)
        assert checkpointer.steps == [1, 2]


_DAMAGES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "a list": lambda document: [],
    "another version": lambda document: {**document, "format_version": 9},
    "no ranks": lambda document: {**document, "ranks": {}},
    "a rank of nothing": lambda document: {**document, "ranks": [7]},
    "no random state": lambda document: {**document, "ranks": [[{"extra": None}, {}]]},
    "a random state of texts": lambda document: {
        **document,
        "ranks": [[{"extra": None, "random": {"python": "x", "numpy": [], "torch": "", "cuda": None}}, {}]],
    },
    "no groups": lambda document: {**document, "groups": None},
    "groups of texts": lambda document: {**document, "groups": {"": ["x"]}},
    "a tensor that is not there": lambda document: {**document, "extra": {"$tensor": "$nothing"}},
    "an unknown mark": lambda document: {**document, "extra": {"$pickle": "gASVAAAA"}},
    "bytes that are none": lambda document: {**document, "extra": {"$bytes": "?"}},
    "a dictionary of lists": lambda document: {**document, "extra": {"$dict": [[[], 1]]}},
    "deep nesting": lambda document: {**document, "extra": json.loads("[" * 60 + "]" * 60)},
}


@pytest.mark.parametrize("name", _DAMAGES)
def test_a_damaged_document(name: str, tmp_path: Path) -> None:
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    with fs.Checkpointer(tmp_path, verify_on_resume=False) as checkpointer:
        checkpointer.save(1, model, optimizer)
        checkpointer.wait()
        file = tmp_path / "checkpoints" / "step-00000001" / "checkpointer.json"
        file.write_text(json.dumps(_DAMAGES[name](json.loads(file.read_text()))))
        if name == "deep nesting":  # as deep as people may nest what they save
            assert checkpointer.restore(model, optimizer) is not None
            return
        with pytest.raises(CheckpointError, match=r"checkpointer.json|parameter groups|another optimizer"):
            checkpointer.restore(model, optimizer)


def test_a_rank_without_a_process_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match=r"one of 2 ranks .* no process group yet; call"):
        fs.Checkpointer(tmp_path)
