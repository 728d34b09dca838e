"""Runs whose checkpoints go to a remote store: gone on with from there alone, read from there, and when it fails."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fsdp_shard.checkpoint import RemoteStore, StepStore, convert, local_copy, run_id_of, verify
from fsdp_shard.cli import run_command
from fsdp_shard.distributed import DistributedContext
from fsdp_shard.errors import ConfigError, RemoteError
from fsdp_shard.training import find_step
from tests.checkpoint.remotes import Shelf, s3_server, shelf
from tests.support.ranks import on_ranks
from tests.support.runs import run_recipe
from tests.support.saved_training import Training


@pytest.fixture(params=["shelf", "s3"])
def address(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    if request.param == "shelf":
        yield shelf(tmp_path) + "/run"
        return
    with s3_server() as bucket:
        yield f"{bucket}/run"


@pytest.mark.long
def test_a_run_goes_on_from_the_remote_store_alone(
    address: str, tiny_model: Path, texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir, remote = tmp_path / "run", RemoteStore(address)
    settings = [
        f"model.path={tiny_model}",
        f"data.path={texts}/train.txt",
        f"data.cache_dir={tmp_path}/tokens",
        "data.sequence_length=64",
        "train.steps=4",
        "train.global_batch_size=4",
        "train.micro_batch_size=2",
        "optim.lr=3e-3",
        "launch.ranks=2",
        "launch.device=cpu",
        "checkpoint.every=2",
        f"checkpoint.remote={address}",
    ]
    whole = run_recipe("finetune", run_dir, *settings)
    assert whole.status == 0, whole.err
    assert f"uploaded {remote.address(4)}" in whole.out + whole.err
    assert remote.steps() == [2, 4]
    losses = whole.losses
    shutil.move(run_dir, tmp_path / "before")
    remote.delete(4)

    refused = run_recipe("finetune", run_dir, *settings, "resume=never")
    assert (refused.status, len(refused.err.splitlines())) == (2, 1)
    assert "checkpoint.remote" in refused.err
    assert "already holds checkpoints up to step 2" in refused.err
    refused = run_recipe("finetune", run_dir, *settings, "seed=5")
    assert (refused.status, "seed=5" in refused.err) == (2, True), refused.err
    settings_of_step = (run_dir / "checkpoints" / "step-00000002" / "run_config.yaml").read_bytes()
    assert (run_dir / "config.yaml").read_bytes() == settings_of_step, "of the step that was downloaded"
    again = run_recipe("finetune", run_dir, *settings)
    assert again.status == 0, again.err
    assert again.losses == losses[2:], "bit-equal, and only what was left to do"
    for name in ("", "/optimizer"):
        paths = [f"{place}/checkpoints/step-00000004{name}" for place in (run_dir, tmp_path / "before")]
        assert verify(*paths).is_sound
    assert remote.steps() == [2, 4]

    capsys.readouterr()
    run_command(["verify", address])
    run_command(["inspect", f"{address}/step-00000002"])
    assert "sharded" in capsys.readouterr().out
    report = convert(address, tmp_path / "model")
    assert report.verified
    assert verify(tmp_path / "model", local_copy(address)).is_sound
    elsewhere = find_step(f"{address}/step-00000002", str(tmp_path / "elsewhere"))
    assert elsewhere is not None
    assert elsewhere.is_relative_to(tmp_path / "cache")
    with pytest.raises(ConfigError, match=r"would eventually overwrite checkpoints: checkpoint\.remote"):
        find_step(f"{address}/step-00000002", str(tmp_path / "elsewhere"), address)


def failing(context: DistributedContext, run_dir: Path, address: str) -> list[str]:
    """A store that refuses one upload of rank 1, then all of them."""

    def refuse(operation: str, path: str) -> None:
        if operation == "put" and context.rank == 1:
            raise PermissionError("no more room")

    settings: dict[str, Any] = {"remote": address, "max_failures": 2, "keep_last": 2}
    run = Training(context, run_dir, **settings)
    Shelf.before = staticmethod(refuse)
    run.step()
    run.saver.save(run.state)
    run.saver.wait()
    Shelf.before = None
    run.step()
    run.saver.save(run.state)
    run.saver.finish()
    Shelf.before = staticmethod(refuse)
    for _ in range(2):
        run.step()
        run.saver.save(run.state)
    with pytest.raises(RemoteError, match=r"Step 4 could not be uploaded, and is in the run directory only\. .*"):
        run.saver.wait()
    with pytest.raises(RemoteError):  # and so does the next start, before it trains
        Training(context, run_dir, **settings)
    Shelf.before = None
    later = Training(context, run_dir, **settings)
    return [*run.told, *later.told]


def test_an_upload_that_fails_counts_as_a_save_that_fails(tmp_path: Path) -> None:
    address = shelf(tmp_path) + "/run"
    told = on_ranks(2, failing, tmp_path / "run", address)
    assert told[0] == told[1]
    lines = [line.replace(address, "URL") for line in told[0] if "in the background" not in line]
    refused = "Step 1 could not be uploaded, and is in the run directory only. URL/step-00000001/"
    assert lines[0].startswith(refused)
    assert "could not be written: PermissionError: no more room" in lines[0]
    assert lines[0].endswith("Training continues (failure 1 of checkpoint.max_failures=2 in a row).")
    assert lines[1:3] == ["saved step-00000002", "uploaded URL/step-00000002"]
    assert "Step 3 could not be uploaded" in lines[3]
    assert lines[4:] == ["uploaded URL/step-00000004, which was in the run directory only"]
    assert RemoteStore(address).steps() == [2, 4]
    assert StepStore(tmp_path / "run" / "checkpoints").steps() == [3, 4], "retention here does not wait for elsewhere"


def best_not_uploaded(context: DistributedContext, run_dir: Path, address: str) -> list[str]:
    """A best step whose upload fails, then a worse one; then a better one, and a last one."""

    def refuse(operation: str, path: str) -> None:
        if operation == "put":
            raise PermissionError("no more room")

    run, seen = Training(context, run_dir, remote=address, keep_last=1), []
    for upload_fails, loss in ((True, 3.0), (False, 4.0), (False, 2.0), (False, 5.0)):
        Shelf.before = staticmethod(refuse) if upload_fails else None
        run.step()
        run.state.record_evaluation(loss, 0.0)
        run.saver.save(run.state)
        run.saver.wait()
        remote = RemoteStore(address)
        seen.append(f"{run.store.steps()} {run.store.best()}, {remote.steps()} {remote.best()}")
    Shelf.before = None
    return seen


def test_the_best_step_stays_when_its_upload_failed(tmp_path: Path) -> None:
    address = shelf(tmp_path) + "/run"
    told = on_ranks(2, best_not_uploaded, tmp_path / "run", address)
    assert told[0] == ["[1] 1, [] None", "[1, 2] 1, [2] None", "[3] 3, [3] 3", "[3, 4] 3, [3, 4] 3"]


def catching_up(context: DistributedContext, run_dir: Path, address: str) -> int | None:
    """The best step of a run that could not upload it, when the run goes on."""
    run = Training(context, run_dir)
    run.step()
    run.state.record_evaluation(1.0, 0.0)
    run.saver.save(run.state)
    run.saver.finish()
    Training(context, run_dir, remote=address)
    return RemoteStore(address).best()


def test_what_is_uploaded_later_is_the_best_there_too(tmp_path: Path) -> None:
    assert on_ranks(2, catching_up, tmp_path / "run", shelf(tmp_path) + "/run") == [1, 1]


def in_three_directories(context: DistributedContext, place: Path, address: str) -> list[bytes | None]:
    """The ids of a run, of its continuation in another directory, by `resume=`, and of a run of its own."""
    found = []
    for step, (name, remote) in enumerate((("one", address), ("two", address), ("other", None)), start=1):
        run = Training(context, place / name, remote=remote)
        run.state.step = step - 1
        run.step()
        run.saver.save(run.state)
        run.saver.finish()
        found.append(run_id_of(run.store))
    return found


def test_a_run_keeps_its_id_in_another_directory(tmp_path: Path) -> None:
    first, continued, other = on_ranks(2, in_three_directories, tmp_path, shelf(tmp_path) + "/run")[0]
    assert first == continued != other
    assert None not in (first, other)
