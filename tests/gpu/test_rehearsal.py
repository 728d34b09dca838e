"""What a CPU can show of the checks: that their code runs, that torch has what they ask for, and what a trace says."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from tests.gpu.child import Bench, Child, find_gpus, run_check
from tests.gpu.device import held_on_gpu
from tests.gpu.table import Row, Table
from tests.gpu.trace import summarize

_ROOT = Path(__file__).resolve().parent.parent.parent


def _rehearse(out: Path, *arguments: str, seconds: int = 1200) -> dict[str, list[str]]:
    """Run checks on the CPU as `make gpu` runs them; the outcome and the seconds of each."""
    variables = {"GPU_REHEARSAL": "1", "GPU_SECONDS": str(seconds), "OUT": str(out), "PYTHON": sys.executable}
    command = [str(_ROOT / "scripts" / "gpu"), *arguments]
    # Not those of this run of pytest.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    ended = subprocess.run(command, cwd=_ROOT, env=environment | variables, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout[-6000:] + ended.stderr[-2000:]
    table = (out / "gpu.md").read_text(encoding="utf-8")
    assert table.splitlines()[2] in ended.stdout
    outcomes: dict[str, list[str]] = json.loads((out / "gpu.json").read_text())["tests"]
    return outcomes


@pytest.mark.long
def test_some_checks_are_rehearsed(tmp_path: Path) -> None:
    names = "streamed or background or vocabulary"
    outcomes = _rehearse(tmp_path, "-k", names)
    assert sorted(outcomes) == [
        "test_saves_in_the_background_are_those_of_their_step",
        "test_the_loss_of_a_large_vocabulary",
        "test_tokens_of_streamed_weights_are_right",
    ]
    assert {outcome for outcome, _ in outcomes.values()} == {"passed"}


@pytest.mark.long
def test_checks_of_two_gpus_come_first_with_seconds_of_their_own(tmp_path: Path) -> None:
    """GPU_SECONDS are over at once: what needs one GPU would have no time left."""
    assert _rehearse(tmp_path, "-k", "killed_rank", seconds=0)["test_a_killed_rank_is_named"][0] == "passed"
    variables = dict(os.environ) | {"GPU_REHEARSAL": "1", "PYTHON": sys.executable}
    command = [str(_ROOT / "scripts" / "gpu"), "--collect-only"]
    listed = subprocess.run(command, cwd=_ROOT, env=variables, capture_output=True, text=True, check=True).stdout
    checks = [line.partition("::")[0] for line in listed.splitlines() if "::" in line]
    assert checks.count("test_ranks.py") > 2
    assert set(checks[: checks.count("test_ranks.py")]) == {"test_ranks.py"}


@pytest.mark.slow
def test_all_checks_are_rehearsed(tmp_path: Path) -> None:
    outcomes = _rehearse(tmp_path)
    assert len(outcomes) > 20
    assert {outcome for outcome, _ in outcomes.values()} == {"passed"}


@pytest.mark.long
def test_torch_has_all_that_is_asked_of_it() -> None:
    """Every `torch.cuda.NAME` of the helper, of the package and of the checks is in this build, too."""
    files = [*(_ROOT / "tests" / "gpu").glob("*.py"), *(_ROOT / "fsdp_shard").rglob("*.py")]
    asked = {
        ast.unparse(node)
        for file in files
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute) and ast.unparse(node).startswith("torch.cuda.")
    }
    assert "torch.cuda.max_memory_allocated" in asked
    for name in asked:
        found: object = torch
        for part in name.partition("(")[0].split(".")[1:]:
            assert hasattr(found, part), name
            found = getattr(found, part)


def test_a_trace_has_waits_and_gaps() -> None:
    def event(name: str, cat: str, ts: float, dur: float) -> dict[str, object]:
        return {"ph": "X", "name": name, "cat": cat, "ts": ts, "dur": dur, "tid": 1}

    found = summarize(
        [
            event("aten::item", "cpu_op", 0, 10),
            event("aten::_local_scalar_dense", "cpu_op", 1, 5),
            event("cudaStreamSynchronize", "cuda_runtime", 2, 3),
            event("cudaMemcpyAsync", "cuda_runtime", 1, 1),
            event("gemm", "kernel", 0, 40),
            event("add", "kernel", 20, 30),  # overlaps, in another stream
            event("Memcpy HtoD", "gpu_memcpy", 60, 40),
            event("cudaDeviceSynchronize", "cuda_runtime", 101, 1),  # by the profiler, when all is over
            {"ph": "M", "name": "process_name"},
        ]
    )
    assert (found.num_waits, found.waits) == (1, {"aten::_local_scalar_dense": 1})
    assert found.idle == pytest.approx(0.1)
    assert summarize([]).idle is None


def test_limits_and_what_has_none() -> None:
    rows = {
        "pass": Row("a", 1.0, at_most=1.0),
        "FAIL": Row("b", 0.9, "x", at_least=0.95, note="because"),
        "printed": Row("c", 3.0),
        "none": Row("d", None, at_most=1.0, note="not installed"),
        "rehearsed": Row("e", 9.0, at_most=1.0, counts=False),
    }
    assert {result: row.result for result, row in rows.items()} == {result: result for result in rows}
    lines = Table({"torch": "2"}, list(rows.values()), {"test_a": ("passed", 1.5)}).lines()
    assert [line for line in lines if "0.9 x (because)" in line and ">= 0.95" in line and "FAIL" in line]


def hangs(bench: Bench) -> None:
    bench.record("before", 1.0)
    subprocess.run(["sleep", "1000"], check=True)


def test_a_check_that_hangs_is_ended_and_keeps_its_rows(tmp_path: Path) -> None:
    began = time.monotonic()
    ended = run_check(hangs, {"bench": Bench(tmp_path)}, 2.0, "fork")
    assert "overran its limit of 2 s" in ended.problem
    assert [row.check for row in ended.rows] == ["before"]
    assert time.monotonic() - began < 60


def says(bench: Bench) -> None:
    bench.record("said", 1.0)


def test_a_check_that_ended_in_time_is_read_later(tmp_path: Path) -> None:
    child = Child(says, {"bench": Bench(tmp_path)}, "fork", warm=False)
    child.go()
    child._process.join(60)
    ended = child.finish(0.0)
    assert (ended.problem, [row.check for row in ended.rows]) == ("", ["said"])


def dies(bench: Bench) -> None:
    os._exit(7)


def test_a_check_that_dies_is_said_to(tmp_path: Path) -> None:
    assert run_check(dies, {"bench": Bench(tmp_path)}, 60.0, "fork").problem == (
        "its process ended with status 7 and said nothing"
    )


def test_a_check_that_dies_before_it_is_told_to_begin_is_said_to(tmp_path: Path) -> None:
    child = Child(dies, {"bench": None}, "fork", warm=False)
    child.kill()
    assert child.finish(60.0).problem == "its process ended with status -9 and said nothing"


def test_no_object_holds_memory_of_a_gpu_that_is_not_there() -> None:
    held = torch.ones(1000)
    assert held_on_gpu() == "no Python object"
    assert held.is_cpu


@pytest.mark.skipif(torch.version.cuda is not None, reason="speaks of a torch without CUDA")
def test_gpus_are_counted_by_another_process() -> None:
    assert find_gpus() == ("fork", [])
