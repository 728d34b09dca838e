"""The Trainer of transformers with `CheckpointerCallback`: the script in `examples/`, killed, stopped and misused."""

from __future__ import annotations

import json
import os
import shutil
import signal
import threading
import time
from functools import partial
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest
from transformers import Trainer, TrainingArguments

from fsdp_shard import convert, verify
from fsdp_shard.checkpoint import StepStore
from fsdp_shard.distributed import DistributedContext
from fsdp_shard.errors import ConfigError, FsdpShardError
from fsdp_shard.integrations import CheckpointerCallback
from tests.support.commands import ROOT
from tests.support.ranks import on_ranks
from tests.support.tiny import llama, save_model
from tests.support.torchrun import as_by_torchrun, kill_all, start_script

_SCRIPT = ROOT / "examples" / "trainer.py"
_LAST = 15


def store(run_dir: Path) -> StepStore:
    return StepStore(run_dir / "checkpoints")


def losses(run_dir: Path) -> list[float]:
    """The loss of each step, as the state of the Trainer in the last one has them."""
    found = store(run_dir)
    state = json.loads((found.path(found.latest() or 0) / "trainer_state.json").read_text())
    logged = [entry for entry in state["log_history"] if "loss" in entry]
    assert [entry["step"] for entry in logged] == list(range(1, state["global_step"] + 1))
    return [entry["loss"] for entry in logged]


def train(context: DistributedContext, run_dir: Path, source: str, *options: str, stop_after: int | None = None) -> str:
    """Run the script on this rank; the error of this package that ended it, or nothing.

    With `stop_after`, one rank is asked to stop as soon as that step is on the disk.
    """
    if stop_after is not None and context.is_main:
        threading.Thread(target=_stop, args=(run_dir, stop_after), daemon=True).start()
    os.environ.update(
        MASTER_ADDR="localhost", MASTER_PORT="1", OMP_NUM_THREADS="1"
    )  # as torchrun does; the ranks have met already
    spec = spec_from_file_location("example", _SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    example = module_from_spec(spec)
    spec.loader.exec_module(example)
    place = run_dir.expanduser().parent
    try:
        example.main(str(run_dir), str(place / source), str(place / "text.txt"), *options)
    except FsdpShardError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _stop(run_dir: Path, step: int) -> None:
    while (store(run_dir).latest() or 0) < step:
        time.sleep(0.002)
    os.kill(os.getpid(), signal.SIGTERM)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, one with dropout, one without tied weights, and a text of 72 rows: 60 to train on are 5 steps of 12."""
    place = tmp_path_factory.mktemp("trainer")
    for name, dropout in (("model", 0.0), ("dropout", 0.2), ("untied", 0.0)):
        config = save_model(place / name, tied=name != "untied") / "config.json"
        config.write_text(json.dumps(json.loads(config.read_text()) | {"attention_dropout": dropout}))
    text = "".join(f"{number} green bottles hang on the wall. " for number in range(99))
    (place / "text.txt").write_text(text[: 72 * 32])
    return place


@pytest.fixture(scope="module")
def whole(place: Path) -> list[float]:
    """The losses of a run that nothing interrupts."""
    assert on_ranks(2, train, place / "whole", "model") == ["", ""]
    return losses(place / "whole")


@pytest.mark.long
def test_nothing_is_lost_when_it_is_killed(place: Path) -> None:
    assert on_ranks(2, train, place / "dropout-whole", "dropout") == ["", ""]
    run_dir = place / "killed"
    process = start_script(_SCRIPT, run_dir, "dropout", "text.txt", cwd=place)
    while (store(run_dir).latest() or 0) < 6:
        assert process.poll() is None
        time.sleep(0.002)
    kill_all(process.pid)
    process.communicate()
    assert (store(run_dir).latest() or 0) < _LAST

    assert on_ranks(2, train, run_dir, "dropout") == ["", ""]
    assert losses(run_dir) == losses(place / "dropout-whole"), "bit by bit, dropout and evaluations included"
    assert all(verify(store(run_dir).path(step)).is_sound for step in store(run_dir).steps())
    convert(run_dir, place / "converted")
    assert (place / "converted" / "config.json").is_file()


@pytest.mark.long
def test_it_stops_when_it_is_asked_to_and_goes_on_with_other_ranks(place: Path, whole: list[float]) -> None:
    run_dir = place / "asked"
    ends = on_ranks(2, partial(train, stop_after=3), run_dir, "model")
    found = store(run_dir).latest()
    assert found is not None
    assert 3 <= found < _LAST
    assert all(end.startswith(f"Interrupted: The run was asked to stop; step {found} is saved") for end in ends)
    accumulating = ("ddp", "gradient_accumulation_steps=2", "per_device_train_batch_size=2")
    assert on_ranks(3, train, run_dir, "model", *accumulating) == ["", "", ""]
    assert losses(run_dir) == pytest.approx(whole, abs=2e-6)


@pytest.mark.long
def test_a_model_that_transformers_shards_is_resumed_which_the_trainer_itself_cannot(place: Path) -> None:
    assert on_ranks(2, train, place / "fsdp-whole", "untied", "fsdp") == ["", ""]
    run_dir = place / "fsdp"
    on_ranks(2, partial(train, stop_after=3), run_dir, "untied", "fsdp")
    shutil.copytree(run_dir, place / "fsdp-on-one")
    assert on_ranks(2, train, run_dir, "untied", "fsdp") == ["", ""]
    assert losses(run_dir) == losses(place / "fsdp-whole")
    assert on_ranks(1, train, place / "fsdp-on-one", "untied") == [""]
    assert losses(place / "fsdp-on-one") == pytest.approx(losses(place / "fsdp-whole"), abs=2e-6)


def test_a_finished_run_stays_as_it_is(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The Trainer alone would do one step more with each start."""
    monkeypatch.setenv("HOME", str(place))
    monkeypatch.chdir(tmp_path)
    for run_dir in (place / "finished", Path("~/finished")):
        assert on_ranks(1, train, run_dir, "model", "ddp", "max_steps=13") == [""]
        assert len(losses(place / "finished")) == store(place / "finished").latest() == 13
    assert not any(tmp_path.iterdir()), "~ is the home directory"


def misuse(context: DistributedContext, place: Path) -> list[str]:
    """The errors of each wrong use of a run that exists."""
    shutil.copytree(place / "whole", place / "misused")
    as_by_torchrun()
    callback = CheckpointerCallback(place / "another")
    arguments = TrainingArguments(str(place / "another"), save_strategy="no", use_cpu=True)
    trainer = Trainer(llama(), arguments, train_dataset=[{"input_ids": [1]}], callbacks=[callback])
    with pytest.raises(ConfigError) as without:
        trainer.train()
    run_dir = place / "misused"
    return [
        str(without.value),
        train(context, run_dir, "model", "ddp", 'save_strategy="steps"'),
        train(context, run_dir, "model", "ddp", 'save_strategy="no"', "save_total_limit=2"),
        train(context, run_dir, "model", "ddp", "per_device_train_batch_size=6"),
        train(context, run_dir, "model", "ddp", "seed=1"),
        train(context, run_dir, "untied"),
        train(context, run_dir, "model"),
    ]


def test_wrong_use_is_one_clear_error(place: Path, whole: list[float]) -> None:
    without, both, limit, batch, seed, model, right = on_ranks(1, misuse, place)[0]
    assert without.startswith("Start and resume the Trainer by trainer.train(resume_from_checkpoint=callback.resume")
    assert "TrainingArguments has save_strategy='steps'" in both
    assert "save_total_limit=2" in limit
    assert "give keep_last" in limit
    assert batch.startswith("CheckpointError: ")
    assert "the global batch size (per_device_train_batch_size x gradient_accumulation_steps x ranks) 12" in batch
    assert "now it is 6" in batch
    assert "the seed of their order 42, and now it is 1" in seed
    assert model.startswith("CheckpointError: ")
    assert right == "", "what was refused has left nothing behind"
