"""A loop of accelerate with `AcceleratorCheckpointer`: the script in `examples/`, killed, stopped and misused."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import signal
import threading
import time
from contextlib import redirect_stdout
from functools import partial
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader

from fsdp_shard import convert, verify
from fsdp_shard.checkpoint import StepStore
from fsdp_shard.distributed import DistributedContext
from fsdp_shard.errors import CheckpointError, ConfigError, FsdpShardError
from fsdp_shard.integrations import AcceleratorCheckpointer
from tests.support.commands import ROOT
from tests.support.ranks import on_ranks
from tests.support.tiny import save_model
from tests.support.torchrun import as_by_torchrun, kill_all, start_script

_SCRIPT = ROOT / "examples" / "accelerate_loop.py"
_LINE = re.compile(r"^step (\d+) loss ([\d.]+)$", re.M)
_LAST = 21


def loop(
    context: DistributedContext, run_dir: Path, source: str, *options: int, stop_after: int | None = None
) -> dict[int, str] | str:
    """Run the script on this rank: the losses that it prints, or the error of this package that ended it.

    With `stop_after`, one rank is asked to stop as soon as that step is on the disk.
    """
    os.environ.update(
        MASTER_ADDR="localhost", MASTER_PORT="1", OMP_NUM_THREADS="1"
    )  # as torchrun does; the ranks have met already
    if stop_after is not None and context.is_main:
        threading.Thread(target=_stop, args=(run_dir, stop_after), daemon=True).start()
    spec = spec_from_file_location("example", _SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    example = module_from_spec(spec)
    spec.loader.exec_module(example)
    place, out = run_dir.parent, io.StringIO()
    try:
        with redirect_stdout(out):
            example.main(str(run_dir), str(place / source), str(place / "text.txt"), *options)
    except FsdpShardError as error:
        return f"{type(error).__name__}: {error}"
    return {int(step): loss for step, loss in _LINE.findall(out.getvalue())}


def _stop(run_dir: Path, step: int) -> None:
    while (StepStore(run_dir / "checkpoints").latest() or 0) < step:
        time.sleep(0.002)
    os.kill(os.getpid(), signal.SIGTERM)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, one with dropout, and a text of 84 rows: 7 steps of 2 x 6 of them in an epoch."""
    place = tmp_path_factory.mktemp("accelerate")
    for name, dropout in (("model", 0.0), ("dropout", 0.2)):
        config = save_model(place / name) / "config.json"
        config.write_text(json.dumps(json.loads(config.read_text()) | {"attention_dropout": dropout}))
    save_model(place / "untied", tied=False)
    text = "".join(f"{number} green bottles hang on the wall. " for number in range(99))
    (place / "text.txt").write_text(text[: 84 * 32])
    return place


@pytest.fixture(scope="module")
def whole(place: Path) -> dict[int, str]:
    """The losses of a run that nothing interrupts."""
    found: dict[int, str] = on_ranks(2, loop, place / "whole", "model")[0]
    assert sorted(found) == list(range(1, _LAST + 1))
    return found


@pytest.mark.long
def test_nothing_is_lost_when_it_is_killed(place: Path) -> None:
    expected: dict[int, str] = on_ranks(2, loop, place / "dropout-whole", "dropout")[0]
    run_dir = place / "killed"
    store = StepStore(run_dir / "checkpoints")
    process = start_script(_SCRIPT, run_dir, "dropout", "text.txt", cwd=place)
    while (store.latest() or 0) < 6:
        assert process.poll() is None
        time.sleep(0.002)
    kill_all(process.pid)
    seen = {int(step): loss for step, loss in _LINE.findall(process.communicate()[0])}
    latest = store.latest() or 0
    assert latest < _LAST

    again: dict[int, str] = on_ranks(2, loop, run_dir, "dropout")[0]
    assert sorted(again) == list(range(latest + 1, _LAST + 1))
    assert seen | again == expected, "each step has the loss that it has without a kill, dropout included"
    assert all(verify(store.path(step)).is_sound for step in store.steps())
    convert(run_dir, place / "converted")
    assert (place / "converted" / "config.json").is_file()


@pytest.mark.long
@pytest.mark.parametrize("ranks", [1, 3])
def test_it_stops_when_it_is_asked_to_and_goes_on_with_other_ranks(
    place: Path, whole: dict[int, str], ranks: int
) -> None:
    run_dir = place / f"asked-{ranks}"
    head: dict[int, str] = on_ranks(2, partial(loop, stop_after=6), run_dir, "model")[0]
    assert StepStore(run_dir / "checkpoints").latest() == max(head), "the step at which it was asked"
    again: dict[int, str] = on_ranks(ranks, loop, run_dir, "model")[0]
    assert sorted(again) == list(range(max(head) + 1, _LAST + 1))
    assert [float(again[step]) for step in again] == pytest.approx([float(whole[step]) for step in again], abs=1e-6)


def misuse(context: DistributedContext, place: Path) -> list[dict[int, str] | str]:
    """The errors of another model and another global batch size, and a run that goes on."""
    shutil.copytree(place / "whole", place / "misused")
    return [loop(context, place / "misused", *given) for given in (("untied",), ("model", 12), ("model",))]


def test_another_model_or_batch_size_is_one_clear_error(place: Path, whole: dict[int, str]) -> None:
    model, batch, right = on_ranks(1, misuse, place)[0]
    assert model.startswith("CheckpointError: ")
    assert batch.startswith("CheckpointError: ")
    assert "gradient_accumulation_steps) 12, and now it is 24" in batch
    assert right == {}, "the run is finished; what was refused has left nothing behind"


def stepping_for_each_process(context: DistributedContext, run_dir: Path) -> str:
    """Save or resume a loop whose scheduler steps once for each process, and that has an object of its own."""
    as_by_torchrun()
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer)
    rows: Any = torch.ones(24, 2)  # as a data set
    loader = DataLoader(rows, 12 // context.world_size // 2)
    prepared = accelerator.prepare(model, optimizer, loader, scheduler)
    counter = _Counter()
    with AcceleratorCheckpointer(run_dir, accelerator, *prepared, counter) as checkpointer:
        try:
            if checkpointer.restore() is None:
                counter.seen = 7
                checkpointer.save(1)
        except CheckpointError as error:
            return str(error)
    return f"seen {counter.seen}"


class _Counter:
    """What one would give to `register_for_checkpointing`."""

    def __init__(self) -> None:
        self.seen = 0

    def state_dict(self) -> dict[str, int]:
        return {"seen": self.seen}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.seen = state["seen"]


def test_a_scheduler_that_steps_for_each_process_is_resumed_on_as_many_only(tmp_path: Path) -> None:
    assert on_ranks(2, stepping_for_each_process, tmp_path / "run") == ["seen 7"] * 2
    assert on_ranks(2, stepping_for_each_process, tmp_path / "run") == ["seen 7"] * 2
    assert (
        "was saved by 2 processes, and now there are 1" in on_ranks(1, stepping_for_each_process, tmp_path / "run")[0]
    )


def refusals(context: DistributedContext, run_dir: Path) -> list[str]:
    """What cannot be saved or found again."""
    as_by_torchrun()
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = accelerator.prepare(torch.nn.Linear(2, 1))
    rows: Any = torch.ones(8, 2)  # as a data set
    random = accelerator.prepare(DataLoader(rows, 2, shuffle=True))
    errors = []
    for given in ((model, random), (model, DataLoader(rows, 2)), (model, object()), ()):
        with pytest.raises(ConfigError) as refused:
            AcceleratorCheckpointer(run_dir, accelerator, *given)
        errors.append(str(refused.value))
    with AcceleratorCheckpointer(run_dir, accelerator, model) as checkpointer:
        with accelerator.accumulate(model), pytest.raises(ConfigError) as refused:
            checkpointer.save(1)
        errors.append(str(refused.value))
    return errors


def test_what_could_not_be_found_again_is_refused(tmp_path: Path) -> None:
    random, unprepared, stateless, nothing, accumulating = on_ranks(1, refusals, tmp_path / "run")[0]
    assert "use_seedable_sampler=True" in random
    assert "is not prepared" in unprepared
    assert "object cannot be saved" in stateless
    assert "0 models" in nothing
    assert "while gradients are accumulated" in accumulating
