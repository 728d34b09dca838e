"""How programs start and end: the garbage collector, and outputs that are closed or full."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import pytest

from tests.support.commands import FSDP_SHARD, fsdp_shard, run

_PROGRAM = """
import atexit, gc
from fsdp_shard.cli.exit import run_as_program, start_garbage_collection

kept = []

def work():
    print("imports", gc.isenabled())
    start_garbage_collection()
    print("works", gc.isenabled())
    kept.extend([] for _ in range(20_000))
    before.append(gc.get_freeze_count())

before = []
atexit.register(lambda: print("ends", gc.get_freeze_count() - before[0] >= 10_000))
run_as_program(work, debug=False)
"""

_RECIPE = """
import gc
from fsdp_shard.cli import recipe
from fsdp_shard.config import ConvertConfig

print("imports", gc.isenabled())

@recipe(ConvertConfig)
def main(config):
    print("works", gc.isenabled(), gc.get_freeze_count() > 10_000)
"""

_SWEEP = """
import gc, weakref
from fsdp_shard.cli import recipe
from fsdp_shard.config import ConvertConfig

class Model:
    def __init__(self):
        self.itself = self

models = []

@recipe(ConvertConfig)
def main(config):
    print("left", [model() for model in models if model() is not None])
    models.append(weakref.ref(Model()))
"""


def test_garbage_is_collected_while_a_program_works(tmp_path: Path) -> None:
    done = run([sys.executable, "-c", _PROGRAM], tmp_path)
    assert (done.status, done.err) == (0, "")
    assert done.out.split("\n") == ["imports False", "works True", "ends True", ""]


def test_a_recipe_is_imported_before_that_and_after_the_settings(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(_RECIPE, encoding="utf-8")
    done = fsdp_shard("run", "own.py", "source=a", "target=b", cwd=tmp_path)
    assert (done.status, done.err) == (0, "")
    assert done.out.split("\n") == ["imports False", "works True True", ""]


def test_the_other_commands_collect_it_too(tmp_path: Path) -> None:
    program = """
import gc
from fsdp_shard.cli import command_line, run_as_program
command_line.COMMANDS["ls"] = lambda arguments: print(gc.isenabled())
run_as_program(lambda: command_line.run_command(["ls"]), debug=False)
"""
    assert run([sys.executable, "-c", program], tmp_path).out == "True\n"


def test_what_an_earlier_job_left_is_collected_before_the_next(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(_SWEEP, encoding="utf-8")
    done = fsdp_shard("run", "own.py", "-m", "source=a", 'target="b","c","d"', cwd=tmp_path)
    assert (done.status, done.err) == (0, "")
    assert [line for line in done.out.splitlines() if line.startswith("left")] == ["left []"] * 3


def test_a_process_that_is_no_program_of_ours_is_left_alone(tmp_path: Path) -> None:
    program = """
import gc
from fsdp_shard.cli.exit import start_garbage_collection
before = gc.get_freeze_count()  # Python 3.12 begins with some
start_garbage_collection()
print(gc.isenabled(), gc.get_freeze_count() - before)
"""
    assert run([sys.executable, "-c", program], tmp_path).out == "True 0\n"


@pytest.mark.parametrize("closed", [">&-", ">&- 2>&-", "<&- >&-"])
def test_a_closed_output_takes_what_is_printed(closed: str, tmp_path: Path) -> None:
    command = shlex.join(FSDP_SHARD)
    done = run(["sh", "-c", f"{command} ls {closed}"], tmp_path)
    assert (done.status, done.out, done.err) == (0, "", "")
    assert run(["sh", "-c", f"{command} inspect nothing {closed}"], tmp_path).status == 2


def test_a_full_output_is_an_error_of_one_sentence(tmp_path: Path) -> None:
    done = run(["sh", "-c", f"{shlex.join(FSDP_SHARD)} ls >/dev/full"], tmp_path)
    assert done.status == 1
    room = "Make room, or send it elsewhere."
    assert done.error == f"error: Standard output cannot be written: No space left on device. {room}"
