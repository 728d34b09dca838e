"""Runs each check in a process of its own, within its seconds, and ends in a table of figures.

Checks are functions with the mark `check(seconds=...)` that take a `bench`. Where there is no GPU, they are skipped;
GPU_REHEARSAL=1 runs them on the CPU, on tiny shapes and without limits. GPU_SECONDS (560) bounds all of them together;
those that need several GPUs come first where there are as many, and their seconds are added to it.
The table is printed, and written as gpu.md and gpu.json into $OUT, or build/gpu.

The mark says what may run beside a check, as a process takes 15 seconds until it has used a GPU:
- `concurrent="all"`: it measures no time. All of these run at once, before the others.
- `concurrent="next"`, the default: the process of the next check starts and loads its libraries, and waits.
- `concurrent="none"`: nothing, since it reads the memory of the whole GPU or needs all GPUs.
"""

from __future__ import annotations

import os
import platform
import shutil
import time
from collections.abc import Iterator
from inspect import signature
from typing import Any

import pytest
import torch
import transformers

from tests.gpu.child import Bench, Child, find_gpus
from tests.gpu.device import IS_REHEARSAL, OUT, open_device
from tests.gpu.table import Row, Table

_BEGAN, _SECONDS = time.monotonic(), float(os.environ.get("GPU_SECONDS", "560"))
_LEAST_SECONDS = 5.0
_PATIENCE = 8  # of a rehearsal, which may share two cores with other tests
# What matters most comes first, as the time may not suffice for all.
_ORDER = (
    "test_training", "test_inference", "test_saving", "test_settings", "test_peers", "test_ranks", "test_commands",
)  # fmt: skip
_CONCURRENT = {"all": None, "next": 1, "none": 0}  # how many of the checks that follow may start beside one
_TABLE = pytest.StashKey[Table]()
_DEADLINE = pytest.StashKey[float]()
_METHOD = pytest.StashKey[str]()
_CHILDREN = pytest.StashKey[dict[str, Child]]()


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "check(seconds, gpus=1, concurrent=next): needs a GPU; run by `make gpu`")
    config.stash[_TABLE] = Table(
        {"Python": platform.python_version(), "torch": torch.__version__, "transformers": transformers.__version__}
    )
    config.stash[_CHILDREN] = {}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    places = [number for number, item in enumerate(items) if item.get_closest_marker("check")]
    checks = sorted(
        (items[number] for number in places),
        key=lambda item: (_gpus(item) == 1, list(_CONCURRENT).index(_concurrent(item)), _ORDER.index(item.path.stem)),
    )
    for number, item in zip(places, checks, strict=True):
        items[number] = item


def pytest_collection_finish(session: pytest.Session) -> None:
    """Count the GPUs, in another process: one that has used a GPU cannot fork others that do. Then the time counts."""
    checks = [item for item in session.items if item.get_closest_marker("check")]
    if not checks:
        return
    found: tuple[str, list[str]] = ("fork", [])
    if IS_REHEARSAL:
        found = "fork", [open_device().name] * 2
    elif torch.version.cuda:
        found = find_gpus()
    session.config.stash[_METHOD], names = found
    session.config.stash[_TABLE].machine["GPUs"] = ", ".join(names)
    count, added = len(names), 0.0
    for item in checks:
        needed = _gpus(item)
        added += _seconds(item) if 1 < needed <= count else 0.0
        if count < needed:
            reason = f"needs {needed} GPU(s), and torch finds {count}; `make gpu` runs it where there are"
            item.add_marker(pytest.mark.skip(reason=reason))
    session.config.stash[_DEADLINE] = _BEGAN + _SECONDS + added


def _gpus(item: pytest.Item) -> int:
    """How many GPUs a check needs."""
    mark = item.get_closest_marker("check")
    return int(mark.kwargs.get("gpus", 1)) if mark else 1


def _seconds(item: pytest.Item) -> float:
    """How long a check may run."""
    mark = item.get_closest_marker("check")
    return float(mark.kwargs["seconds"]) * (_PATIENCE if IS_REHEARSAL else 1) if mark else 0.0


def _concurrent(item: pytest.Item) -> str:
    mark = item.get_closest_marker("check")
    return str(mark.kwargs.get("concurrent", "next")) if mark else ""


@pytest.fixture(scope="session")
def bench(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Bench]:
    """Its directory gets some 30 GB, which pytest would keep for a while."""
    directory = tmp_path_factory.mktemp("gpu")
    yield Bench(directory)
    for child in request.config.stash[_CHILDREN].values():
        child.kill()
    shutil.rmtree(directory, ignore_errors=True)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a check in its process, and fail if it fails or if a figure is beyond its limit."""
    mark = pyfuncitem.get_closest_marker("check")
    if mark is None:
        return None
    table = pyfuncitem.config.stash[_TABLE]
    left = pyfuncitem.config.stash[_DEADLINE] - time.monotonic()
    if left < _LEAST_SECONDS:
        _note(table, pyfuncitem.name, "no time left", 0.0)
        pytest.fail("No time was left for it: GPU_SECONDS are over.", pytrace=False)
    seconds = min(_seconds(pyfuncitem), left)
    bench = pyfuncitem.funcargs["bench"]
    assert isinstance(bench, Bench)
    ended = _start(pyfuncitem, bench).finish(seconds)
    table.rows += ended.rows
    beyond = [row for row in ended.rows if row.counts and row.is_within is False]
    if ended.problem.startswith("not installed"):
        _note(table, pyfuncitem.name, ended.problem, ended.seconds)
        pytest.skip(ended.problem)
    if ended.problem:
        table.rows.append(Row(pyfuncitem.name, None, note=ended.problem.strip().splitlines()[-1][:200]))
    _note(table, pyfuncitem.name, "FAILED" if ended.problem or beyond else "passed", ended.seconds)
    if ended.problem:
        pytest.fail(ended.problem, pytrace=False)
    if beyond:
        pytest.fail("\n".join(" | ".join(row.cells()) for row in beyond), pytrace=False)
    assert ended.rows, "a check has at least one figure"
    return True


def _start(item: pytest.Function, bench: Bench) -> Child:
    """The running process of a check; also start what may run beside it."""
    children, kind = item.config.stash[_CHILDREN], _concurrent(item)
    child = children.pop(item.nodeid, None) or _child(item, bench)
    child.go()
    later = item.session.items[item.session.items.index(item) + 1 :]
    others = [each for each in later if _concurrent(each) == kind and not each.get_closest_marker("skip")]
    for each in others[: _CONCURRENT[kind]]:
        if isinstance(each, pytest.Function) and each.nodeid not in children:
            children[each.nodeid] = _child(each, bench)
            if kind == "all":
                children[each.nodeid].go()
    return child


def _child(item: pytest.Function, bench: Bench) -> Child:
    values = item.callspec.params if hasattr(item, "callspec") else {}
    arguments = {name: values.get(name, bench) for name in signature(item.function).parameters}
    return Child(item.function, arguments, item.config.stash[_METHOD], warm=_concurrent(item) == "next")


def _note(table: Table, name: str, outcome: str, seconds: float) -> None:
    """Keep the outcome of a test, and write the table as far as it is."""
    table.outcomes[name] = (outcome, seconds)
    table.write(OUT)


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    table = config.stash[_TABLE]
    if not table.outcomes:
        return
    terminalreporter.section("rehearsal on the CPU: no figure means anything" if IS_REHEARSAL else "GPU")
    for line in table.lines():
        terminalreporter.write_line(line)
    failed = sum(outcome != "passed" for outcome, _ in table.outcomes.values())
    terminalreporter.write_line(f"{len(table.outcomes)} checks, {failed} not passed; written to {OUT}")
