"""What `Checkpointer` keeps besides weights: states of objects and modules, and of any optimizer."""

from __future__ import annotations

import threading
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Shard
from transformers import Adafactor

import fsdp_shard as fs
from fsdp_shard.checkpoint import FAULTS
from fsdp_shard.distributed import DistributedContext
from fsdp_shard.errors import CheckpointError, ModelError, SaveError
from tests.support.ranks import on_ranks
from tests.support.stateful import Stateful
from tests.support.tiny import token_batch
from tests.support.wrapped_net import WRAPPERS, Net


def test_tensors_whose_keys_look_alike_stay_apart(tmp_path: Path) -> None:
    state = {
        "shadow": {"weight": torch.zeros(2)},
        "shadow.weight": torch.ones(2),
        0: torch.ones(1),
        "0": torch.zeros(1),
    }
    first, second = Stateful(state), Stateful({"b": {"c": torch.full((2,), 2.0)}})
    given: dict[str, Any] = {"a": Stateful({"b.b.c": torch.full((2,), 3.0)}), "a.b": second, "odd": first}
    model = Net()
    with fs.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, model, extra=state, **given)
        checkpointer.wait()
        found: dict[str, Any] = {name: Stateful({}) for name in given}
        restored = checkpointer.restore(model, **found)
    assert restored is not None
    for again in (restored.extra, found["odd"].state):
        assert (again["shadow"]["weight"].tolist(), again["shadow.weight"].tolist()) == ([0, 0], [1, 1])
        assert (again[0].item(), again["0"].item()) == (1, 0)
    assert (found["a"].state["b.b.c"].tolist(), found["a.b"].state["b"]["c"].tolist()) == ([3, 3], [2, 2])


class _Counting(nn.Linear):
    """A layer whose state is not only tensors."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.extra: Any = {"calls": 0}

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


@pytest.mark.parametrize("wrapper", ["by_nobody", "by_ddp", "by_fsdp"])
def test_extra_states_of_modules_come_back(wrapper: str, tmp_path: Path) -> None:
    def work(context: DistributedContext, calls: int) -> Any:
        net = Net()
        net.blocks[1].counting = layer = _Counting()
        layer.extra = {"calls": calls, "amax": torch.full((2,), float(calls))}
        models = {"net": WRAPPERS[wrapper](net, context), "other": nn.Linear(2, 1)}
        with fs.Checkpointer(tmp_path) as checkpointer:
            if calls:
                checkpointer.save(1, models)
                layer.extra = {"calls": context.rank}
                checkpointer.wait()
                with pytest.raises(SaveError, match=r"differ in get_extra_state\(\) of modules"):
                    checkpointer.save(2, models)
                layer.extra = {"scales": {1.0}}
                words = r"modules.net.blocks.1.counting.scales is a builtins.set, which cannot be stored"
                with pytest.raises(SaveError, match=words):
                    checkpointer.save(2, models)
            else:
                checkpointer.restore(models)
        return layer.extra

    on_ranks(2, work, 42)
    for found in on_ranks(2, work, 0):
        assert (found["calls"], found["amax"].tolist()) == (42, [42.0, 42.0])


def test_extra_states_of_other_modules_change_nothing(tmp_path: Path) -> None:
    saved, model = nn.Sequential(_Counting(), nn.Linear(2, 2)), nn.Sequential(nn.Linear(2, 2), _Counting())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    before = [param.detach().clone() for param in model[0].parameters()]
    with fs.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, saved, torch.optim.SGD(saved.parameters(), lr=0.1))
        with pytest.raises(CheckpointError, match=r"modules 0, and the model has modules with such a state 1;"):
            checkpointer.restore(model, optimizer)
    assert all(map(torch.equal, before, model[0].parameters()))
    assert optimizer.param_groups[0]["lr"] == 0.5


class _WithoutRate(torch.optim.Optimizer):
    """Steps of a fixed size, with a sum of gradients."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"step_size": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # it takes no closure and has no loss
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    total = self.state[param].setdefault("total", torch.zeros_like(param))
                    param.sub_(group["step_size"] * total.add_(param.grad))


def test_an_optimizer_without_a_learning_rate_comes_back(tmp_path: Path) -> None:
    model = nn.Linear(2, 1)
    optimizer = _WithoutRate(model.parameters())
    model(torch.ones(2)).sum().backward()
    optimizer.step()
    with fs.Checkpointer(tmp_path, asynchronous=False) as checkpointer:
        checkpointer.save(1, model, optimizer)
        again = _WithoutRate(model.parameters())
        assert checkpointer.restore(model, again) is not None
    assert torch.equal(again.state[model.weight]["total"], torch.ones(1, 2))


class _Global(torch.optim.SGD):
    """Keeps a state that is of no parameter."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        state: dict[Any, Any] = self.state
        state.setdefault("global", {"steps": torch.zeros(())})["steps"] += 1
        return super().step(closure)


class _WithClosure(torch.optim.SGD):
    """Cannot step without a function that computes the loss."""

    def step(self, closure: Any) -> Any:  # type: ignore[override]  # which is the point
        return super().step(closure)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (_WithClosure, r"a resume creates its states by .*, and its step\(\) requires a closure"),
        (torch.optim.LBFGS, "LBFGS cannot be saved as an optimizer: a resume.* a step with zero gradients"),
        (torch.optim.SparseAdam, "SparseAdam cannot be saved .*such as state_of_sparseadam=optimizer"),
        (_Global, "_Global cannot be saved as an optimizer: it has a state under the key 'global'"),
    ],
)
def test_an_optimizer_that_is_saved_as_a_state(kind: Any, words: str, tmp_path: Path) -> None:
    def trained() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = nn.Embedding(5, 2, sparse=kind is torch.optim.SparseAdam)
        optimizer = kind(model.parameters())

        def loss() -> torch.Tensor:
            optimizer.zero_grad()
            found = model(torch.arange(4)).square().sum()
            found.backward()
            return found

        optimizer.step(loss)
        return model, optimizer

    with fs.Checkpointer(tmp_path) as checkpointer:
        model, optimizer = trained()
        with pytest.raises(SaveError, match=words):
            checkpointer.save(1, model, optimizer)
        checkpointer.save(1, model, mine=optimizer)
        saved = optimizer.state_dict()
        checkpointer.wait()
        again = kind(model.parameters())
        checkpointer.restore(model, mine=again)
    torch.testing.assert_close(again.state_dict(), saved, rtol=0, atol=0)


def test_gradients_outlive_a_restore(tmp_path: Path) -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2)).sum().backward()
    optimizer.step()
    with fs.Checkpointer(tmp_path, asynchronous=False) as checkpointer:
        checkpointer.save(1, model, optimizer)
        checkpointer.restore(model, optimizer)
    assert model.weight.grad is not None
    assert model.weight.grad.tolist() == [[1.0, 1.0]]


def test_tensors_that_are_not_contiguous(tmp_path: Path) -> None:
    model = nn.Conv2d(3, 4, 3)
    model.register_buffer("table", torch.arange(6.0).reshape(2, 3).t())
    with fs.Checkpointer(tmp_path / "run", asynchronous=False) as checkpointer:
        checkpointer.save(1, model)
        for fill in (checkpointer.restore, lambda model: fs.load_weights(model, tmp_path / "run")):
            model.get_buffer("table").zero_()
            fill(model)
            assert model.get_buffer("table").tolist() == [[0, 3], [1, 4], [2, 5]]
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # which its types leave out
        for use in (
            lambda model: checkpointer.save(2, model),
            checkpointer.restore,
            lambda model: fs.load_weights(model, tmp_path / "run"),
            lambda model: fs.save_pretrained(model, tmp_path / "model"),
        ):
            with pytest.raises(ModelError, match=r"weight of shape \[4, 3, 3, 3\] is not contiguous.*param.data = "):
                use(model)


class _CountingSGD(torch.optim.Optimizer):
    """States that are not tensors, of which one exists from the first step and one from the second."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # it has no closure
        for param in self.param_groups[0]["params"]:
            if param.grad is not None:
                state = self.state[param]
                if "step" in state:
                    state["late"] = state.get("late", 0) + 1
                state["step"] = state.get("step", 0) + 1
                param.add_(param.grad, alpha=-0.1 / (state["step"] + state.get("late", 0)))


def _steps(model: nn.Module, optimizer: torch.optim.Optimizer, numbers: range) -> list[float]:
    losses = []
    for number in numbers:
        loss = model(token_batch(number, 2, 3, 13)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("wrapper", ["by_nobody", "by_fully_shard", "by_fsdp"])
def test_states_that_are_no_tensors_come_back(wrapper: str, tmp_path: Path) -> None:
    def work(context: DistributedContext) -> tuple[list[float], list[float]]:
        model = WRAPPERS[wrapper](Net(), context)
        optimizer = _CountingSGD(model.parameters())
        with fs.Checkpointer(tmp_path) as checkpointer:
            _steps(model, optimizer, range(3))
            checkpointer.save(3, model, optimizer)
            expected = _steps(model, optimizer, range(3, 6))
            model = WRAPPERS[wrapper](Net(), context)
            optimizer = _CountingSGD(model.parameters())
            assert checkpointer.restore(model, optimizer) is not None
            return expected, _steps(model, optimizer, range(3, 6))

    for expected, found in on_ranks(1 if wrapper == "by_nobody" else 2, work):
        assert found == expected


def test_tensors_within_a_state_are_refused(tmp_path: Path) -> None:
    """On each of several ranks they may be others; they were lost."""
    model = Net()
    optimizer = _CountingSGD(model.parameters())
    optimizer.state[next(model.parameters())]["factors"] = [torch.ones(2)]
    with fs.Checkpointer(tmp_path) as checkpointer:
        with pytest.raises(SaveError, match=r"'factors' has tensors in it, .* state_of__countingsgd=optimizer"):
            checkpointer.save(1, model, optimizer)
        checkpointer.save(1, model, state_of_sgd=optimizer)


def test_a_rate_may_become_a_tensor(tmp_path: Path) -> None:
    model = Net()
    with fs.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, model, torch.optim.AdamW(model.parameters(), lr=0.25))
        other = torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.5))
        checkpointer.restore(model, other)
    assert float(other.param_groups[0]["lr"]) == 0.25


def test_states_that_change_while_they_are_saved_fail_the_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held = threading.Event()
    monkeypatch.setattr(FAULTS, "hook", lambda point: point == "staged" and held.wait(60))
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    _steps(model, optimizer, range(1))
    with fs.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, model, optimizer)
        for state in optimizer.state.values():
            state["exp_avg"].zero_()
        held.set()
        with pytest.raises(SaveError, match="exp_avg was changed in place while it was being saved"):
            checkpointer.wait()
        assert checkpointer.steps == []


class _Lookahead(torch.optim.Optimizer):
    """Has slow weights beside the states of another optimizer."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        super().__init__([param for group in optimizer.param_groups for param in group["params"]], {})


def test_an_optimizer_within_another_is_refused(tmp_path: Path) -> None:
    """Only the states of one of them were saved."""

    def work(context: DistributedContext) -> list[str]:
        warnings.filterwarnings("ignore", category=DeprecationWarning)  # torch's own, in the import
        from torch.distributed.optim import ZeroRedundancyOptimizer

        model = nn.parallel.DistributedDataParallel(Net())
        divided = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW)
        said = []
        with fs.Checkpointer(tmp_path) as checkpointer:
            for optimizer in (divided, _Lookahead(torch.optim.AdamW(model.parameters()))):
                with pytest.raises(SaveError) as raised:
                    checkpointer.save(1, model, optimizer)
                said.append(str(raised.value))
        return said

    for kind, said in zip(("ZeroRedundancyOptimizer", "_Lookahead"), on_ranks(2, work)[0], strict=True):
        assert f"{kind} cannot be saved as an optimizer: there is another optimizer in it" in said


def test_states_that_differ_between_ranks_are_refused(tmp_path: Path) -> None:
    """Only one rank's values were saved."""

    def work(context: DistributedContext) -> list[str]:
        model = nn.parallel.DistributedDataParallel(nn.Linear(600, 600))
        optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
        model(torch.ones(1, 600)).sum().backward()
        optimizer.step()
        weight, own, said = model.module.weight, float(context.rank), []
        with fs.Checkpointer(tmp_path) as checkpointer:
            for value in (torch.full_like(weight, own), torch.tensor(own), own):
                optimizer.state[weight]["error"] = value
                with pytest.raises(SaveError) as raised:
                    checkpointer.save(1, model, optimizer)
                said.append(str(raised.value))
                checkpointer._has_compared = False
            optimizer.state[weight]["error"] = torch.ones(3)
            checkpointer.save(1, model, optimizer)
        return said

    words = "the ranks differ in states of SGD for weight that are not sharded, and only the value of one"
    for found in on_ranks(2, work):
        assert all(words in said for said in found), found


class _Columns(torch.optim.Optimizer):
    """Divides the momentum of square matrices by columns, or keeps each rank's summand of it."""

    def __init__(self, params: Any, *, partial: bool = False) -> None:
        self.partial = partial
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # it has no closure
        for param in self.param_groups[0]["params"]:
            gradient = param.grad
            if isinstance(gradient, DTensor) and param.ndim == 2:
                gradient = gradient.redistribute(placements=[Shard(1)])
            momentum = self.state[param].setdefault("momentum", torch.zeros_like(gradient))
            momentum.mul_(0.9).add_(gradient)
            if self.partial:
                self.state[param]["sum"] = DTensor.from_local(gradient.to_local(), param.device_mesh, [Partial()])
            moved = momentum
            if isinstance(moved, DTensor):
                moved = moved.redistribute(placements=param.placements)
            param.sub_(moved, alpha=0.1)


def test_states_are_divided_in_their_own_way(tmp_path: Path) -> None:
    """Square ones were stored as if they were divided like their parameters."""

    def trained(context: DistributedContext, **options: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8, bias=False))
        if context.world_size > 1:
            fully_shard(model)
        optimizer = _Columns(model.parameters(), **options)
        model(torch.arange(8.0)).square().sum().backward()
        optimizer.step()
        return model, optimizer

    def work(context: DistributedContext) -> list[torch.Tensor]:
        with fs.Checkpointer(tmp_path) as checkpointer:
            if context.world_size > 1:
                model, optimizer = trained(context)
                checkpointer.save(1, model, optimizer)
                checkpointer.wait()
                with pytest.raises(CheckpointError, match=r"keeps 0.weight.sum as .* each rank has a summand only"):
                    checkpointer.save(2, *trained(context, partial=True))
            model, optimizer = trained(context)
            for state in optimizer.state.values():
                state["momentum"].zero_()
            checkpointer.restore(model, optimizer)
        found = [state["momentum"] for state in optimizer.state.values()]
        return [value.full_tensor() if isinstance(value, DTensor) else value.clone() for value in found]

    on_two, alone = on_ranks(2, work)[0], on_ranks(1, work)[0]
    assert [value.abs().sum() > 0 for value in alone] == [True] * 3
    assert all(map(torch.equal, on_two, alone))


class _Odd(torch.optim.Optimizer):
    """A transposed state, an expanded one, and one that appears in the second step."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # it has no closure
        for param in self.param_groups[0]["params"]:
            if param.grad is None:
                continue
            state = self.state[param]
            if "last" in state:
                state.setdefault("change", torch.zeros_like(param)).add_(param.grad - state["last"])
            state["last"] = param.grad.clone(memory_format=torch.contiguous_format).t().contiguous().t()
            state.setdefault("scale", torch.ones(1).expand(param.shape))
            param.sub_(state["last"] * state["scale"] + state.get("change", 0), alpha=0.1)


def test_states_that_are_not_contiguous_or_appear_late_come_back(tmp_path: Path) -> None:
    def trained(numbers: range) -> tuple[nn.Module, _Odd]:
        model = Net()
        optimizer = _Odd([param for param in model.parameters() if param.ndim == 2])
        _steps(model, optimizer, numbers)
        return model, optimizer

    with fs.Checkpointer(tmp_path) as checkpointer:
        model, optimizer = trained(range(3))
        for state in optimizer.state.values():
            state["scale"] = torch.full((1,), 0.5).expand(state["scale"].shape)
        checkpointer.save(3, model, optimizer)
        expected = _steps(model, optimizer, range(3, 6))
        model, optimizer = trained(range(0))
        checkpointer.restore(model, optimizer)
        assert _steps(model, optimizer, range(3, 6)) == expected


def test_saved_options_decide_which_states_there_are(tmp_path: Path) -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(2)).sum().backward()
    optimizer.step()
    with fs.Checkpointer(tmp_path, asynchronous=False) as checkpointer:
        checkpointer.save(1, model, optimizer)
        again = torch.optim.SGD(model.parameters(), lr=0.1)
        checkpointer.restore(model, again)
    assert again.state[model.weight]["momentum_buffer"].tolist() == [[1.0, 1.0]]


class _Wrapper(torch.optim.Optimizer):
    """Like timm's Lookahead, it does not call `Optimizer.__init__`, so that its steps run no hooks."""

    def __init__(self, base: torch.optim.Optimizer) -> None:
        self.base, self.param_groups, self.defaults, self.state = base, base.param_groups, base.defaults, base.state

    def step(self, closure: Any = None) -> Any:
        return self.base.step(closure)


def test_without_step_hooks_a_save_is_not_in_the_background(tmp_path: Path) -> None:
    """A later step was mixed with the saved one."""
    model = nn.Linear(2, 1)
    with fs.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, model, _Wrapper(torch.optim.SGD(model.parameters())))
        assert checkpointer.steps == [1]


def test_what_adafactor_computes_anew_in_each_step_may_differ(tmp_path: Path) -> None:
    def work(context: DistributedContext) -> bool:
        torch.manual_seed(0)
        model = nn.Linear(3, 3)
        optimizer = Adafactor(model.parameters(), lr=0.1, relative_step=False, scale_parameter=False)
        model.weight.grad, model.bias.grad = torch.ones(3, 3), torch.ones(3)
        optimizer.step()
        optimizer.state[model.weight]["RMS"] = torch.tensor(float(context.rank))  # of a rank's part, under FSDP1
        with fs.Checkpointer(tmp_path / "run", asynchronous=False) as checkpointer:
            checkpointer.save(1, model, optimizer)
        return True

    assert on_ranks(2, work) == [True, True]
