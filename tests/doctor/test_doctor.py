"""The command as users run it: what it says of runs that would work and of runs that would not, and what it leaves."""

from __future__ import annotations

import fcntl
import json
import math
import os
import re
import resource
import shutil
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaForCausalLM

from fsdp_shard.checkpoint import CheckpointConfig
from fsdp_shard.config import DoctorConfig, compose_jobs
from fsdp_shard.distributed import num_cores
from fsdp_shard.doctor import check_disk_space, check_environment, check_memory, plan_run
from fsdp_shard.doctor.disk import max_num_checkpoints
from fsdp_shard.doctor.findings import OK, PROBLEM, Finding
from fsdp_shard.planning import MemoryPlan
from fsdp_shard.training import LOCK, TrainConfig, holder
from tests.support.runs import Ended, run_recipe
from tests.support.tiny import llama_config


def _lines(ended: Ended) -> dict[str, list[tuple[str, str]]]:
    """Of each subject, the mark and text of its lines."""
    found: dict[str, list[tuple[str, str]]] = {}
    for line in ended.out.partition("\n\n")[0].splitlines():
        subject, mark, text = line.split(maxsplit=2)
        found.setdefault(subject, []).append((mark, text))
    return found


def _marks(ended: Ended) -> dict[str, list[str]]:
    return {subject: [mark for mark, _ in lines] for subject, lines in _lines(ended).items()}


@pytest.fixture
def settings(tiny_model: Path, texts: Path, tmp_path: Path) -> list[str]:
    """Of a run that works."""
    return [
        f"model.path={tiny_model}", f"data.path={texts / 'train.txt'}", f"data.cache_dir={tmp_path / 'cache'}",
        "data.sequence_length=64", "shard=float32", "train.steps=4", "launch.device=cpu",
    ]  # fmt: skip


@pytest.mark.long
def test_a_run_that_would_work(settings: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fsdp_shard.doctor.disk._SLOW_BYTES_PER_SECOND", 0)  # other tests write to the disk meanwhile
    place = tmp_path / "outputs"
    place.mkdir()
    ended = run_recipe("doctor", place / "run", *settings, "launch.ranks=2", "checkpoint.every=2")
    assert ended.status == 0, ended.err
    assert {mark for marks in _marks(ended).values() for mark in marks} == {"ok"}, ended.out
    lines = {subject: " ".join(text for _, text in found) for subject, found in _lines(ended).items()}
    assert "a new run starts" in lines["run_dir"]
    assert "LlamaForCausalLM" in lines["memory"]
    assert "up to 2 checkpoints" in lines["space"]
    assert "4 steps with 32 samples of" in lines["data"]
    assert "2 ranks (cpu) met" in lines["ranks"]
    assert ended.out.endswith("\nNo problem found.\n")
    assert list(place.iterdir()) == []  # no run directory, and nothing of what was tried


@pytest.mark.long
def test_memory_is_divided_among_the_ranks_of_this_machine_that_others_started(
    settings: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (job,) = compose_jobs(DoctorConfig, [*settings, f"run_dir={tmp_path}/run"], "doctor")
    variables = {"RANK": "0", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4", "MASTER_ADDR": "localhost"}
    for name, value in (variables | {"MASTER_PORT": "29777"}).items():
        monkeypatch.setenv(name, value)
    plan = plan_run(job.config)
    assert plan is not None
    assert plan.needed_bytes is not None
    found = {}
    for times in (3, 50):
        monkeypatch.setattr("fsdp_shard.inference.free_cpu_bytes", lambda times=times: times * plan.needed_bytes)
        (found[times], *_) = check_memory(job.config, lambda: plan)
    assert (found[3].mark, found[50].mark) == (PROBLEM, OK), found
    monkeypatch.setenv("OMP_NUM_THREADS", str(num_cores()))
    (threads,) = check_environment(job.config.launch)
    assert f"with LOCAL_WORLD_SIZE=4 asks for {4 * num_cores()} threads" in threads.text


def test_every_problem_is_told_and_the_status_is_one(settings: list[str], tmp_path: Path) -> None:
    taken = tmp_path / "run"
    taken.mkdir()
    handle = os.open(taken / LOCK, os.O_RDWR | os.O_CREAT)
    fcntl.flock(handle, fcntl.LOCK_EX)
    try:
        ended = run_recipe(
            "doctor", taken, *settings, "train.global_batch_size=3", "train.micro_batch_size=1", "launch.ranks=2",
        )  # fmt: skip
    finally:
        os.close(handle)
    assert ended.status == 1
    assert ended.err.splitlines()[-1].startswith("error: finetune would fail: 2 problems")
    assert [subject for subject, marks in _marks(ended).items() if "FAIL" in marks] == ["run_dir", "settings"]
    assert "in use by another run" in _lines(ended)["run_dir"][0][1]
    assert "train.global_batch_size=3" in _lines(ended)["settings"][0][1]
    assert "ranks" in _marks(ended)  # what comes after a problem is looked at


def test_data_without_rows_is_one_problem(settings: list[str], tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text("")
    given = [*settings, f"data.path={tmp_path}/empty.jsonl", "data.kind=preference", "objective=dpo"]
    ended = run_recipe("doctor", tmp_path / "run", *given)
    assert ended.status == 1
    assert ended.err.splitlines()[-1] == "error: finetune would fail: 1 problem, marked FAIL above."
    assert "empty.jsonl is empty: it has 0 rows, none with anything to learn." in ended.out
    assert "ranks" in _marks(ended)


def test_the_steps_of_epochs(settings: list[str], tmp_path: Path) -> None:
    given = [*settings, "train.steps=null", "checkpoint.every=10", "data.sample_by=line", "data.packing=true"]
    ended = run_recipe("doctor", tmp_path / "run", *given, "train.epochs=2", "train.warmup_steps=40")
    assert ended.status == 0, ended.err
    lines = _lines(ended)
    match = re.search(r"(\d+) steps with [0-9,]+ samples of (\d+): 2", lines["data"][-1][1])
    assert match is not None
    num_steps = int(match[1])
    assert num_steps == math.ceil(2 * int(match[2]) / 8) > 40
    assert f"up to {math.ceil(num_steps / 10)} checkpoints" in lines["space"][0][1]
    short = run_recipe("doctor", tmp_path / "run", *given, "train.epochs=0.5", "train.warmup_steps=400")
    assert (short.status, _lines(short)["data"][-1][0]) == (1, "FAIL")
    assert "train.warmup_steps=400 is not less than train.epochs=0.5, which is " in _lines(short)["data"][-1][1]


def test_what_is_not_there_is_told_once(tmp_path: Path) -> None:
    ended = run_recipe("doctor", tmp_path / "run", f"model.path={tmp_path / 'none'}", "data.path=x.txt")
    assert ended.status == 1
    problems = [text for lines in _lines(ended).values() for mark, text in lines if mark == "FAIL"]
    assert len(problems) == len(set(problems))
    assert any(str(tmp_path / "none") in text for text in problems)


@pytest.mark.parametrize("wrong", [{"dtype": "float99"}, {"vocab_size": "257"}], ids=["dtype", "vocabulary"])
def test_a_broken_config_is_no_fault_of_the_tokenizer(
    wrong: dict[str, str], settings: list[str], tiny_model: Path, tmp_path: Path
) -> None:
    shutil.copytree(tiny_model, tmp_path / "model")
    path = tmp_path / "model" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | wrong))
    ended = run_recipe("doctor", tmp_path / "run", *settings, f"model.path={tmp_path / 'model'}")
    (told,) = (text for lines in _lines(ended).values() for mark, text in lines if mark == "FAIL")
    assert str(path.parent) in told
    assert "okenizer" not in told


def test_ranks_that_cannot_be_divided_are_not_started(settings: list[str], tmp_path: Path) -> None:
    ended = run_recipe("doctor", tmp_path / "run", *settings, "launch.ranks=2", "shard.replicas=3")
    assert ended.status == 1
    (told,) = (text for lines in _lines(ended).values() for mark, text in lines if mark == "FAIL")
    assert "shard.replicas=3" in told
    assert "ranks" not in _marks(ended), "two ranks met that no run could have"


def test_without_settings_the_machine_is_looked_at(tmp_path: Path) -> None:
    ended = run_recipe("doctor", tmp_path / "run", "launch.device=cpu", "shard=float32")
    assert ended.status == 0, ended.err
    marks = _marks(ended)
    assert marks["software"] == marks["disk"] == ["ok"]
    assert marks["settings"] == marks["memory"] == marks["data"] == ["-"]


@pytest.mark.slow
def test_a_disk_and_a_memory_that_are_too_small(settings: list[str], tmp_path: Path) -> None:
    ended = run_recipe(
        "doctor", tmp_path / "run", *settings, "train.steps=1000000000", "checkpoint.every=1",
        "train.micro_batch_size=1000000", "train.global_batch_size=1000000",
    )  # fmt: skip
    assert ended.status == 1
    lines = _lines(ended)
    assert lines["memory"][0][0] == lines["space"][0][0] == "FAIL"
    assert "train.micro_batch_size" in lines["memory"][0][1]
    assert "1,000,000,000 checkpoints" in lines["space"][0][1]


@pytest.mark.long
def test_a_run_that_has_begun_and_one_that_is_finished(settings: list[str], tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert run_recipe("finetune", run, *settings).status == 0
    finished = run_recipe("doctor", run, *settings)
    longer = run_recipe("doctor", run, *settings, "train.steps=6")
    assert (finished.status, longer.status) == (0, 0)
    assert _lines(finished)["run_dir"][0][0] == "warn"
    assert "step 4 of 6" in _lines(longer)["run_dir"][0][1]
    assert _lines(finished)["space"] == [("ok", "the run is finished: no checkpoint is left to save")]
    assert _lines(longer)["space"][0][1].startswith("one more checkpoint of ")


@pytest.mark.parametrize(
    ("train", "checkpoint", "count"),
    [
        ({}, {}, 1),
        ({}, {"every": 10}, 10),
        ({}, {"every": 30}, 4),
        ({"eval_every": 5}, {"every": 10}, 11),
        ({"eval_every": 5}, {"every": 10, "save_best": False}, 10),
        ({}, {"every": 10, "keep_last": 2}, 3),
        ({}, {"every": 10, "keep_last": 2, "keep_every": 50}, 4),
        ({"eval_every": 5}, {"every": 10, "keep_last": 2}, 4),
    ],
)
def test_how_many_checkpoints_there_are_at_a_time(
    train: dict[str, Any], checkpoint: dict[str, Any], count: int
) -> None:
    assert max_num_checkpoints(TrainConfig(steps=100, **train), CheckpointConfig(**checkpoint)) == count


@pytest.mark.parametrize(
    ("checkpoint", "num_saved", "count"),
    [
        ({"every": 10}, 9, 1),
        ({"every": 1}, 90, 10),
        ({"every": 10, "keep_last": 2}, 2, 1),
        ({"every": 1, "keep_last": 2}, 1, 2),
        ({"every": 1, "keep_last": 2}, 8, 1),
        ({"every": 1, "keep_last": 20}, 0, 10),
    ],
)
def test_how_many_checkpoints_a_resumed_run_adds(checkpoint: dict[str, int], num_saved: int, count: int) -> None:
    config = CheckpointConfig(**checkpoint)  # type: ignore[arg-type]  # values of a table
    assert max_num_checkpoints(TrainConfig(steps=100), config, 90, num_saved) == count


def _space(settings: list[str], run: Path, *more: str) -> list[Finding]:
    (job,) = compose_jobs(DoctorConfig, [*settings, f"run_dir={run}", *more], "doctor")
    return list(check_disk_space(job.config, lambda: plan_run(job.config), lambda: None))


@pytest.mark.long
def test_a_checkpoint_has_the_parts_of_all_tensor_parallel_ranks(settings: list[str], tmp_path: Path) -> None:
    config = llama_config()
    config.update({"hidden_size": 64, "head_dim": 16, "num_attention_heads": 4, "num_key_value_heads": 2})
    config.update({"intermediate_size": 128, "vocab_size": 258})
    model = LlamaForCausalLM(config)
    model.save_pretrained(tmp_path / "model")
    given = [f"model.path={tmp_path / 'model'}", "launch.ranks=2", "shard.tensor_parallel=2"]
    ((mark, text),) = _space(settings, tmp_path / "run", *given)
    match = re.match(r"one checkpoint of ([0-9.]+) MiB", text)
    assert mark == OK
    assert match is not None, text
    assert float(match[1]) == pytest.approx(3 * 4 * model.num_parameters() / 2**20, rel=0.05)  # Adam has two states


def _marks_of_space(config: DoctorConfig, plan: MemoryPlan) -> list[str]:
    return [mark for mark, _ in check_disk_space(config, lambda: plan, lambda: None)]


def test_ddp_ranks_divide_the_files_of_a_checkpoint(settings: list[str], tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    found = []
    for ranks in (1, 2):
        (job,) = compose_jobs(
            DoctorConfig, [*settings, f"run_dir={tmp_path}", "shard=ddp", f"launch.ranks={ranks}"], "doctor"
        )
        plan = plan_run(job.config)
        assert plan is not None
        resource.setrlimit(resource.RLIMIT_FSIZE, (plan.per_rank[0].optimizer_bytes * 3 // 4, hard))
        try:
            found.append(_marks_of_space(job.config, plan))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert found == [[OK, PROBLEM], [OK]]


def test_asking_who_is_in_a_directory_takes_no_lock(tmp_path: Path) -> None:
    assert holder(tmp_path / "none") is None
    assert holder(tmp_path) is None
    assert list(tmp_path.iterdir()) == []
    handle = os.open(tmp_path / LOCK, os.O_RDWR | os.O_CREAT)
    assert holder(tmp_path) is None
    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    assert holder(tmp_path) is not None
    os.close(handle)
    assert (tmp_path / LOCK).read_bytes() == b""
