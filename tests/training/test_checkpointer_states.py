"""What `Checkpointer` keeps besides weights: states of objects and modules, and of any optimizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fsdp_shard as fs
from fsdp_shard.distributed import DistributedContext
from fsdp_shard.errors import ModelError, SaveError
from tests.support.ranks import on_ranks
from tests.support.stateful import Stateful
from tests.support.wrapped_net import WRAPPERS, Net


def test_tensors_whose_keys_look_alike_stay_apart(tmp_path: Path) -> None:
    state = {
        "shadow": {"weight": torch.zeros(2)},
        "shadow.weight": torch.ones(2),
        0: torch.ones(1),
        "0": torch.zeros(1),
    }
    first, second = Stateful(state), Stateful({"b": {"c": torch.full((2,), 2.0)}})
    given = {"a": Stateful({"b.b.c": torch.full((2,), 3.0)}), "a.b": second, "odd": first}
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
                words = r"modules.net.blocks.1.counting.scales is a builtins.set, which is no data"
                with pytest.raises(SaveError, match=words):
                    checkpointer.save(2, models)
            else:
                checkpointer.restore(models)
        return layer.extra

    on_ranks(2, work, 42)
    for found in on_ranks(2, work, 0):
        assert (found["calls"], found["amax"].tolist()) == (42, [42.0, 42.0])


class _WithoutRate(torch.optim.Optimizer):
    """Steps of a fixed size, with a sum of gradients."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"step_size": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
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
        self.state.setdefault("global", {"steps": torch.zeros(())})["steps"] += 1
        return super().step(closure)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (torch.optim.LBFGS, "LBFGS cannot be saved as an optimizer: restore.* a step with gradients of zeros"),
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
            model.table.zero_()
            fill(model)
            assert model.table.tolist() == [[0, 3], [1, 4], [2, 5]]
        model.to(memory_format=torch.channels_last)
        for use in (
            lambda model: checkpointer.save(2, model),
            checkpointer.restore,
            lambda model: fs.load_weights(model, tmp_path / "run"),
            lambda model: fs.save_pretrained(model, tmp_path / "model"),
        ):
            with pytest.raises(ModelError, match=r"weight of shape \[4, 3, 3, 3\] is not contiguous.*param.data = "):
                use(model)
