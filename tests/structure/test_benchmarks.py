"""The benchmarks run, on a model of a few MB. What they measure here means nothing."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parent.parent.parent


def test_training_is_measured(tmp_path: Path) -> None:
    table = tmp_path / "table.json"
    command = [sys.executable, "benchmarks/train.py", "--quick", "--work", str(tmp_path / "work"), "--json", str(table)]
    result = subprocess.run(
        [*command, "--only", "tokens", "--loops", "bare"], cwd=ROOT, capture_output=True, text=True, timeout=280
    )
    assert result.returncode == 0, result.stderr
    rows = json.loads(table.read_text())
    assert len(rows) == 1
    assert all(row["value"] > 0 and math.isfinite(row["value"]) for row in rows)
    losses = [line.split("first loss ")[1] for line in result.stdout.splitlines() if "first loss" in line]
    assert len(losses) == 2
    assert len({*losses}) == 1, "they begin alike"


def test_conversions_are_measured(tmp_path: Path) -> None:
    table = tmp_path / "table.json"
    sizes = ["--size", "0.004", "--shard-size", "1MB", "--repeats", "1", "--only", "header", "split", "integrity"]
    command = [sys.executable, "benchmarks/convert.py", "--work", str(tmp_path / "work"), *sizes]
    result = subprocess.run(
        [*command, "--no-peers", "--json", str(table)], cwd=ROOT, capture_output=True, text=True, timeout=280
    )
    assert result.returncode == 0, result.stderr
    rows = json.loads(table.read_text())
    assert len(rows) == 12
    assert all(row["value"] > 0 and math.isfinite(row["value"]) for row in rows)
    assert all(row["name"] in result.stdout for row in rows)


def test_saves_are_measured(tmp_path: Path) -> None:
    table = tmp_path / "table.json"
    command = [
        sys.executable,
        "benchmarks/save.py",
        "--work",
        str(tmp_path),
        "--quick",
        "--repeats",
        "1",
        "--windows",
        "2",
    ]
    result = subprocess.run([*command, "--json", str(table)], cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert result.returncode == 0, result.stderr
    rows = json.loads(table.read_text())
    assert sum("limit" in row and row["limit"] is not None for row in rows) == 8
    assert all(math.isfinite(row["value"]) for row in rows)


def test_loading_is_measured(tmp_path: Path) -> None:
    table = tmp_path / "table.json"
    command = [sys.executable, "benchmarks/load.py", "--quick", "--repeats", "1", "--work", str(tmp_path)]
    result = subprocess.run([*command, "--json", str(table)], cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert result.returncode == 0, result.stderr
    rows = json.loads(table.read_text())
    assert len(rows) == 3
    assert len({row["sum"] for row in rows}) == 1, "they load the same"


def test_orders_of_an_evaluation_are_compared(tmp_path: Path) -> None:
    table = tmp_path / "table.json"
    command = [sys.executable, "benchmarks/layer_major.py", "--quick", "--float32", "--work", str(tmp_path)]
    result = subprocess.run([*command, "--json", str(table)], cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert result.returncode == 0, result.stderr
    once, often, *others = [row["value"] for row in json.loads(table.read_text())]
    assert once == pytest.approx(1, abs=0.01)
    assert often > 7
    assert all(math.isfinite(value) for value in others)


def test_checkpointers_are_compared(tmp_path: Path) -> None:
    table = tmp_path / "table.json"
    command = [sys.executable, "benchmarks/checkpointer.py", "--work", str(tmp_path), "--quick", "--kills", "2"]
    sides = ["--flips", "1", "--only", "ours", "dcp-async", "accelerate", "trainer", "--json", str(table)]
    result = subprocess.run([*command, *sides], cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert result.returncode == 0, result.stderr
    ours, *others = json.loads(table.read_text())
    assert len(others) == 3
    assert (ours["unreadable"], ours["mixed"], ours["gone"], ours["flips_silent"]) == (0, 0, 0, 0)
    assert all(one["kills"] == 2 and one["flips"] == 1 and not one["unavailable"] for one in (ours, *others))
    assert all(set(one["restore"]) == {"1", "2", "3"} and not one["unequal"] for one in (ours, *others))


def test_architectures_are_counted(tmp_path: Path) -> None:
    report = tmp_path / "coverage.md"
    command = [sys.executable, "benchmarks/coverage.py", "--work", str(tmp_path), "--report", str(report)]
    for name in ("masked/bert/", "other/clip/"):
        result = subprocess.run([*command, "--only", name], cwd=ROOT, capture_output=True, text=True, timeout=280)
        assert result.returncode == 0, result.stderr
    text = report.read_text()
    assert "| all | 2 | 2 | 2 | 2 |" in text, "built, resolved, sharded"
    assert "| all | 1 | 1 | 1 | 1 | 1 |" in text, "trained alone, trained, equal, dispatched"


def test_many_ranks_are_simulated(tmp_path: Path) -> None:
    work, table = tmp_path / "work", tmp_path / "table.json"
    work.mkdir()
    shapes = {"embed.weight": [64, 8], "layer.o_proj.weight": [8, 16], "norm.weight": [2048]}
    (work / "70B.json").write_text(json.dumps(shapes))  # instead of the shapes of that model
    command = [sys.executable, "benchmarks/scale.py", "--work", str(work), "--ranks", "8", "--json", str(table)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert result.returncode == 0, result.stderr
    found = {row["measure"]: row for row in json.loads(table.read_text())}
    assert len(found) == 7
    assert found["open"]["opened"] == 0
    assert found["resume"]["opened"] == 3, "its own files, of weights and optimizer, and that with the step counts"
    assert found["save"]["median_received"] < 10_000
    for option, *figures in (("--plot", table, table), ("--plot-saves", table)):
        drawn = tmp_path / f"{option}.svg"
        command = [sys.executable, "benchmarks/scale.py", option, *map(str, figures), str(drawn)]
        assert subprocess.run(command, cwd=ROOT, timeout=280).returncode == 0
        assert drawn.stat().st_size > 1000
