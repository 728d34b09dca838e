"""Lightning's Trainer with `LightningCheckpoint`: whatever ends a run, the next one goes on as if nothing had."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("lightning", reason="lightning is not installed; scripts/peers makes an environment that has it")

from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import Callback, EarlyStopping, ModelCheckpoint, WeightAveraging
from torch.utils.data import DataLoader

from fsdp_shard import verify
from fsdp_shard.checkpoint import StepStore
from fsdp_shard.errors import CheckpointError, ConfigError
from fsdp_shard.integrations import LightningCheckpoint, ResumableLoader
from tests.support.commands import FSDP_SHARD, ROOT, run
from tests.support.tiny import save_model
from tests.support.torchrun import kill_all, start_script

pytestmark = pytest.mark.filterwarnings("default")  # Lightning gives many of its own

_STEPS = 12
_LINE = re.compile(r"^step (\d+) loss ([\d.]+)$", re.M)


# ---- the script in examples/, on real ranks


def start(place: Path, run_dir: str, *, ranks: int = 2, strategy: str = "fsdp2") -> subprocess.Popen[str]:
    script = ROOT / "examples" / "lightning_fsdp2.py"
    return start_script(script, run_dir, "model", "text.txt", _STEPS, strategy, cwd=place, ranks=ranks)


def losses(output: str) -> dict[int, str]:
    return {int(step): loss for step, loss in _LINE.findall(output)}


def until(process: subprocess.Popen[str], line: str) -> str:
    """What a process writes, up to a line."""
    assert process.stdout is not None
    head = ""
    while line not in head:
        head += (more := process.stdout.readline())
        assert more, head
    return head


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("lightning")
    save_model(place / "model")
    (place / "text.txt").write_text("".join(f"{number} green bottles hang on the wall. " for number in range(99)))
    return place


@pytest.fixture(scope="module")
def whole(place: Path) -> dict[int, str]:
    """The losses of a run that nothing interrupts: three epochs of four steps."""
    output = start(place, "whole").communicate(timeout=120)[0]
    found = losses(output)
    assert sorted(found) == list(range(1, _STEPS + 1)), output
    return found


def test_nothing_is_lost_when_all_ranks_are_killed(place: Path, whole: dict[int, str]) -> None:
    process = start(place, "killed")
    head = until(process, "step 7 ")
    kill_all(process.pid)
    seen = losses(head + process.communicate()[0])
    store = StepStore(place / "killed" / "checkpoints")
    assert store.steps(), "a step is saved within each epoch"
    seen |= losses(start(place, "killed").communicate(timeout=120)[0])
    assert seen == whole, "each step of each part has the loss that it has without a kill"
    assert store.latest() == _STEPS
    assert all(verify(store.path(step)).is_sound for step in store.steps())
    said = run([*FSDP_SHARD, "generate", "checkpoint=killed", "prompt=one green", "generation.max_new_tokens=4"], place)
    assert said.status == 0, said.err


def test_it_stops_when_asked_and_goes_on_with_another_strategy_and_number_of_ranks(
    place: Path, whole: dict[int, str]
) -> None:
    process = start(place, "asked")
    head = until(process, "step 2 ")
    process.send_signal(signal.SIGTERM)
    output = head + process.communicate(timeout=120)[0]
    seen = losses(output)
    assert process.returncode != 0
    assert "The run was asked to stop" in output
    assert StepStore(place / "asked" / "checkpoints").latest() == max(seen) < _STEPS
    again = losses(start(place, "asked", ranks=3, strategy="ddp").communicate(timeout=120)[0])
    assert sorted(again) == list(range(max(seen) + 1, _STEPS + 1))
    assert [float(again[step]) for step in again] == pytest.approx([float(whole[step]) for step in again], rel=1e-6)


# ---- one process


class _Noisy(LightningModule):
    """Dropout, validation, a plateau scheduler and a moment in each epoch: what depends on where it resumes."""

    def __init__(self, *, interval: str = "epoch") -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 1))
        self.interval = interval
        self.seen: list[tuple[int, float, float]] = []
        self.epochs = self.validations = 0

    def training_step(self, batch: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = (self.layers(batch) - 1).square().mean()
        rate = self.trainer.optimizers[0].param_groups[0]["lr"]
        self.seen.append((self.trainer.fit_loop.total_batch_idx, float(loss.detach()), float(rate)))
        return loss

    def validation_step(self, batch: torch.Tensor) -> None:
        self.log("held_out", self.layers(batch).mean().abs() + self.current_epoch)  # a plateau at once

    def on_train_epoch_end(self) -> None:
        self.epochs += 1

    def on_validation_end(self) -> None:
        self.validations += not self.trainer.sanity_checking

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["counts"] = [self.epochs, self.validations]

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.epochs, self.validations = checkpoint["counts"]

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.1)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": plateau, "monitor": "held_out", "interval": self.interval},
        }


class _Failure(Callback):
    """Ends the run after so many batches."""

    def __init__(self, batches: int) -> None:
        self._batches = batches

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if trainer.fit_loop.total_batch_idx == self._batches:
            raise RuntimeError("the power failed")


_DATA: Any = torch.arange(40 * 4, dtype=torch.float32).view(40, 4) / 160


def fit(run_dir: Path, loader: Any, *callbacks: Callback, model: LightningModule | None = None, **options: Any) -> Any:
    settings: dict[str, Any] = {"every": 1}
    settings |= {name: options.pop(name) for name in ("every", "module", "monitor") if name in options}
    ckpt_path = options.pop("ckpt_path", None)
    limits: dict[str, Any] = {"max_epochs": 3, "num_sanity_val_steps": 1}
    trainer = Trainer(
        callbacks=[LightningCheckpoint(run_dir, **settings), *callbacks],
        **limits | options,
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model or _Noisy(), loader, DataLoader(_DATA[:4], batch_size=2), ckpt_path=ckpt_path)
    return trainer


def loader(global_batch_size: int = 10) -> ResumableLoader:
    return ResumableLoader(_DATA, global_batch_size, shuffle=True, seed=3)


def plain_loader() -> Any:
    return DataLoader(_DATA, batch_size=10, shuffle=True)


def seeded(seed: int = 5) -> _Noisy:
    seed_everything(seed)
    return _Noisy()


def figures(*models: _Noisy) -> dict[int, Any]:
    """Loss and learning rate of each batch; of a later model, where several have seen one."""
    return {number: rest for model in models for number, *rest in model.seen}


def steps(run_dir: Path) -> list[int]:
    return StepStore(run_dir / "checkpoints").steps()


@pytest.mark.parametrize(
    "options",
    [{}, {"max_epochs": -1, "max_steps": 12}, {"accumulate_grad_batches": 3}, {"val_check_interval": 2}],
    ids=str,
)
def test_every_place_of_a_run_is_resumed_bit_equal(tmp_path: Path, options: dict[str, Any]) -> None:
    whole = seeded()
    fit(tmp_path / "whole", loader(), model=whole, **options)
    for batches in (1, 3, 4, 6, 8, 11):
        first, run_dir = seeded(), tmp_path / str(batches)
        with pytest.raises(RuntimeError, match="the power failed"):
            fit(run_dir, loader(), _Failure(batches), model=first, **options)
        second = seeded(6 if steps(run_dir) else 5)
        trainer = fit(run_dir, loader(), model=second, **options)
        assert figures(first, second) == figures(whole), f"ended after {batches} batches"
        assert (trainer.current_epoch, second.epochs, steps(run_dir)[-1]) == (3, whole.epochs, trainer.global_step)
        assert second.validations == whole.validations


@pytest.mark.parametrize("limit", [{"max_epochs": 3}, {"max_epochs": -1, "max_steps": 12}], ids=str)
@pytest.mark.parametrize("make_loader", [loader, plain_loader])
def test_ends_of_epochs_are_resumed_bit_equal(tmp_path: Path, make_loader: Any, limit: dict[str, int]) -> None:
    whole, first = seeded(), seeded()
    seed_everything(5)
    fit(tmp_path / "whole", make_loader(), model=whole, every=None, **limit)
    seed_everything(5)
    with pytest.raises(RuntimeError, match="the power failed"):
        fit(tmp_path / "run", make_loader(), _Failure(6), model=first, every=None, **limit)
    assert steps(tmp_path / "run") == [4]
    second = seeded(6)
    fit(tmp_path / "run", make_loader(), model=second, every=None, **limit)
    assert figures(first, second) == figures(whole)


class _Drawing(ResumableLoader):
    """Draws a random number when it is begun, as a DataLoader does."""

    def __iter__(self) -> Iterator[Any]:
        torch.rand(1)
        return super().__iter__()


def test_what_a_loader_draws_when_it_is_begun_again_is_undone(tmp_path: Path) -> None:
    whole, first = seeded(), seeded()
    seed_everything(5)
    fit(tmp_path / "whole", _Drawing(_DATA, 10), model=whole)
    seed_everything(5)
    with pytest.raises(RuntimeError, match="the power failed"):
        fit(tmp_path / "run", _Drawing(_DATA, 10), _Failure(6), model=first)
    second = seeded(6)
    fit(tmp_path / "run", _Drawing(_DATA, 10), model=second)
    assert figures(first, second) == figures(whole)


def test_a_run_that_has_ended_goes_on_when_it_may_be_longer(tmp_path: Path) -> None:
    whole, first, second = seeded(), seeded(), seeded()
    for model, run_dir, limit in ((whole, "whole", 10), (first, "run", 5), (second, "run", 10)):
        seed_everything(5)
        fit(tmp_path / run_dir, loader(), model=model, max_epochs=-1, max_steps=limit, every=100, monitor="held_out")
    assert [number for number, *_ in second.seen] == [5, 6, 7, 8, 9]
    assert figures(first, second) == figures(whole)


@pytest.mark.parametrize("every", [1, None])
def test_another_epoch_has_the_same_data(every: int | None, tmp_path: Path) -> None:
    fit(tmp_path, loader(), max_epochs=1, every=every)
    with pytest.raises(CheckpointError, match="saved with global_batch_size=10 of ResumableLoader, and now it is 8"):
        fit(tmp_path, loader(8), max_epochs=2, every=every)
    with pytest.raises(CheckpointError, match="saved with shuffle=True of ResumableLoader, and now it is False"):
        fit(tmp_path, ResumableLoader(_DATA, 10, seed=3), max_epochs=2, every=every)


def test_loaders_of_several_kinds_are_compared_with_their_own_states(tmp_path: Path) -> None:
    def loaders(size: int = 8) -> dict[str, Any]:
        others = ResumableLoader(_DATA[:16], 4), ResumableLoader(_DATA[:24], size)
        return {"plain": DataLoader(_DATA[:8], batch_size=4), "first": others[0], "second": others[1]}

    class Both(_Noisy):
        def training_step(self, batch: Any) -> torch.Tensor:
            return super().training_step(batch["first"])

    fit(tmp_path, loaders(), max_epochs=1, every=None, model=Both())
    fit(tmp_path, loaders(), max_epochs=2, every=None, model=Both())
    with pytest.raises(CheckpointError, match="saved with global_batch_size=8 of ResumableLoader, and now it is 6"):
        fit(tmp_path, loaders(6), max_epochs=3, every=None, model=Both())


def test_callbacks_keep_their_state(tmp_path: Path) -> None:
    whole = EarlyStopping("held_out", patience=2, min_delta=0.0)
    fit(tmp_path / "whole", loader(), whole, max_epochs=9)
    with pytest.raises(RuntimeError, match="the power failed"):
        fit(tmp_path / "run", loader(), EarlyStopping("held_out", patience=2), _Failure(9), max_epochs=9)
    again = EarlyStopping("held_out", patience=2)
    fit(tmp_path / "run", loader(), again, max_epochs=9)
    assert again.stopped_epoch == whole.stopped_epoch == 2


def test_a_step_has_the_metrics_of_its_own_weights(tmp_path: Path) -> None:
    """Epochs of four steps, after which is a validation; every third step is saved."""
    fit(tmp_path, loader(), every=3, monitor="held_out")
    store = StepStore(tmp_path / "checkpoints")
    metrics = {
        step: json.loads((store.path(step) / "checkpointer.json").read_text())["metrics"] for step in steps(tmp_path)
    }
    assert [step for step, found in metrics.items() if "held_out" in found] == [12]
    assert sorted(metrics) == [3, 6, 9, 12]
    assert store.best() == 12


def test_settings_are_checked_when_they_are_given(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"keep_lastt is not a setting of LightningCheckpoint \(did you mean keep_last"
    ):
        LightningCheckpoint(tmp_path, keep_lastt=1)
    with pytest.raises(ConfigError, match="mode='maximum' is neither"):
        LightningCheckpoint(tmp_path, mode="maximum")
    assert not any(tmp_path.iterdir())


def test_a_run_without_a_best_step_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    fit(tmp_path, loader(), monitor="held_ou", max_epochs=1)
    assert "has no best step: none that was saved has held_ou; evaluate at steps that are saved" in caplog.text
    assert StepStore(tmp_path / "checkpoints").best() is None


def test_wrong_use_is_one_error(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    cases: list[tuple[dict[str, Any], str]] = [
        ({"every": 0}, "every=0 is neither a number of steps"),
        ({"module": "layer"}, "module='layer' does not hold all of _Noisy: "),
        ({"model": _Noisy(interval="step")}, "interval='step'"),
    ]
    for wrong, message in cases:
        with pytest.raises(ConfigError, match=message):
            fit(run_dir, loader(), **wrong)
    with pytest.raises(ConfigError, match="ModelCheckpoint in addition to LightningCheckpoint"):
        fit(run_dir, loader(), ModelCheckpoint(tmp_path))
    with pytest.raises(ConfigError, match=r"WeightAveraging, which keeps its state by on_save_checkpoint"):
        fit(run_dir, loader(), WeightAveraging())
    with pytest.raises(ConfigError, match="a DataLoader without state_dict"):
        fit(run_dir, plain_loader())
    assert not steps(run_dir)
    fit(tmp_path / "plain", plain_loader(), max_steps=5, every=None)
    with pytest.raises(CheckpointError, match="step-00000005 was saved within an epoch, and this training data has no"):
        fit(tmp_path / "plain", plain_loader(), every=None)
    fit(run_dir, loader(), max_steps=5)
    with pytest.raises(RuntimeError, match="0 stateful loaders, but found 1 states"):  # Lightning's own
        fit(run_dir, plain_loader(), every=None)
    with pytest.raises(CheckpointError, match="saved with global_batch_size=10 of ResumableLoader, and now it is 8"):
        fit(run_dir, loader(8))
    other = Trainer(
        max_epochs=1, accelerator="cpu", logger=False, enable_progress_bar=False, enable_checkpointing=False
    )
    other.fit(_Noisy(), plain_loader(), DataLoader(_DATA[:4]))
    other.save_checkpoint(tmp_path / "other.ckpt")
    with pytest.raises(ConfigError, match=r"other\.ckpt.*which has step 5; remove ckpt_path"):
        fit(run_dir, loader(), ckpt_path=tmp_path / "other.ckpt")
    trainer = fit(tmp_path / "new", loader(), ckpt_path=tmp_path / "other.ckpt")
    assert trainer.global_step == 12, "the checkpoint of Lightning is what a new run begins with"
    with pytest.raises(ConfigError, match="not divisible by the 3 ranks"):
        next(iter(ResumableLoader(_DATA, 10, num_replicas=3, rank=0)))
    with pytest.raises(ConfigError, match="sampler is not an option"):
        ResumableLoader(_DATA, 10, sampler=None)


# ---- Fabric: no more than a loop of one's own

_FABRIC = """
import sys
import torch
from lightning.fabric import Fabric
from lightning.fabric.strategies import ModelParallelStrategy
from torch.distributed.fsdp import fully_shard
import fsdp_shard as fs
from fsdp_shard.integrations import ResumableLoader

def main(run, ranks, last):
    def parallelize(model, mesh):
        return fully_shard(model, mesh=mesh["data_parallel"])

    sharded = ModelParallelStrategy(parallelize, data_parallel_size=ranks, tensor_parallel_size=1)
    fabric = Fabric(accelerator="cpu", devices=ranks, strategy=sharded if ranks > 1 else "auto")
    fabric.launch()
    fabric.seed_everything(1)
    module = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
    wrapped = fabric.setup_module(module)
    adamw = torch.optim.AdamW(wrapped.parameters(), lr=0.1)
    optimizer = fabric.setup_optimizers(adamw)
    loader = ResumableLoader(torch.arange(160.0).view(40, 4) / 160, 6, shuffle=True)
    with fs.Checkpointer(run) as checkpointer:
        restored = checkpointer.restore(wrapped.module, adamw, loader=loader)
        step = restored.step if restored else 0
        while step < last:
            for batch in loader:
                step += 1
                loss = (wrapped(batch) - 1).square().mean()
                fabric.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
                fabric.print(f"step {step} loss {float(fabric.all_reduce(loss.detach())):.9f}", flush=True)
                checkpointer.save(step, wrapped.module, adamw, loader=loader)
                if step == last:
                    break

if __name__ == "__main__":
    main(sys.argv[1], 2, int(sys.argv[2]))
"""


def test_fabric_needs_a_checkpointer_only(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "loop.py").write_text(_FABRIC)
    here: dict[str, Any] = {"__name__": "loop"}
    exec(_FABRIC, here)
    here["main"](tmp_path / "whole", 1, 16)
    whole = losses(capsys.readouterr().out)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = run([*launcher, "loop.py", "run", "8"], tmp_path, OMP_NUM_THREADS="1")
    assert done.status == 0, done.err
    here["main"](tmp_path / "run", 1, 16)
    first, second = losses(done.out), losses(capsys.readouterr().out)
    assert (sorted(first), sorted(second)) == ([*range(1, 9)], [*range(9, 17)])
    seen = first | second
    assert [float(seen[step]) for step in whole] == pytest.approx([float(whole[step]) for step in whole], rel=1e-6)
