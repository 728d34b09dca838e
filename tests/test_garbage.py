"""When Python looks for garbage in a program of ours: not while it loads, as ever while it works, not as it ends."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.commands import fsdp_shard, run

_PROGRAM = """
import atexit, gc
from fsdp_shard.memory import collect_as_usual
from fsdp_shard.shell import run_as_program

kept = []

def work():
    print("loads", gc.isenabled())
    collect_as_usual()
    print("works", gc.isenabled())
    kept.extend([] for _ in range(20_000))
    before.append(gc.get_freeze_count())

before = []
atexit.register(lambda: print("ends", gc.get_freeze_count() - before[0] >= 10_000))
run_as_program(work, debug=False)
"""

_RECIPE = """
from fsdp_shard.cli import recipe
from fsdp_shard.config import ConvertConfig

@recipe(ConvertConfig, loads=["large_module"])
def main(config):
    import gc, sys
    print("works", gc.isenabled(), gc.get_freeze_count() > 10_000, "large_module" in sys.modules)
"""


def test_garbage_is_looked_for_while_a_program_works(tmp_path: Path) -> None:
    done = run([sys.executable, "-c", _PROGRAM], tmp_path)
    assert (done.status, done.err) == (0, "")
    assert done.out.split("\n") == ["loads False", "works True", "ends True", ""]


def test_what_a_recipe_loads_comes_before_that_and_after_the_settings(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(_RECIPE, encoding="utf-8")
    (tmp_path / "large_module.py").write_text("import gc; print('loads', gc.isenabled())", encoding="utf-8")
    done = fsdp_shard("run", "own.py", "source=a", "target=b", cwd=tmp_path)
    assert (done.status, done.err) == (0, "")
    assert done.out.split("\n") == ["loads False", "works True True True", ""]
    wrong = fsdp_shard("run", "own.py", "source=a", "targt=b", cwd=tmp_path)
    assert (wrong.status, wrong.out) == (2, "")
    assert "targt" in wrong.error


def test_the_other_commands_look_for_it_too(tmp_path: Path) -> None:
    program = """
import gc
from fsdp_shard import cli
from fsdp_shard.shell import run_as_program
cli._OTHERS["ls"] = lambda arguments: print(gc.isenabled())
run_as_program(lambda: cli.dispatch(["ls"]), debug=False)
"""
    assert run([sys.executable, "-c", program], tmp_path).out == "True\n"


def test_the_process_that_starts_ranks_looks_for_it_too(tmp_path: Path) -> None:
    program = """
import gc
from pathlib import Path
from fsdp_shard.config import FinetuneConfig
from fsdp_shard.launch import LaunchConfig, launch
from fsdp_shard.memory import collect_later

def work(config):
    Path(f"{gc.isenabled()}").touch()  # forked, so as its starter is

collect_later()
launch(work, FinetuneConfig(run_dir="run", launch=LaunchConfig(ranks=2, device="cpu")))
"""
    done = run([sys.executable, "-c", program], tmp_path)
    assert (done.status, done.err) == (0, "")
    assert [path.name for path in tmp_path.iterdir()] == ["True"]


def test_what_an_earlier_job_left_is_found_before_the_next(tmp_path: Path) -> None:
    program = """
import gc, weakref
from fsdp_shard.memory import collect_as_usual, collect_later

class Model:
    def __init__(self):
        self.itself = self

collect_later()
for _ in range(3):  # the jobs of a sweep
    collect_as_usual()
    model = weakref.ref(Model())
    gc.disable()
    gc.enable()
collect_as_usual()
print(model())
"""
    done = run([sys.executable, "-c", program], tmp_path)
    assert (done.status, done.out, done.err) == (0, "None\n", "")
