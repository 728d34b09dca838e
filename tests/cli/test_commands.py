"""The command line from outside: what it prints, how it ends, what it leaves, and how soon."""

from __future__ import annotations

import importlib
import json
import os
import re
import resource
import shutil
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fsdp_shard import __version__
from fsdp_shard.checkpoint import convert
from fsdp_shard.cli import Recipe, load_recipe
from fsdp_shard.config import COMMANDS, PlanConfig
from fsdp_shard.utils import configs, recipes, shipped_directory
from tests.support.commands import FSDP_SHARD, OWN_RECIPE, ROOT, Done, environment, fsdp_shard, hear_signals, run
from tests.support.cpu_speed import slowdown

_GIVEN = ("model.path=org/name", "data.path=text.txt")


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A directory with a text and nothing else."""
    (tmp_path / "text.txt").write_text("To be, or not to be.")
    return tmp_path


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A directory with two small tensors in a safetensors file."""
    header = json.dumps(
        {
            "a": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]},
            "b": {"dtype": "BF16", "shape": [4], "data_offsets": [16, 24]},
        }
    ).encode()
    header += b" " * (-len(header) % 8)
    (tmp_path / "model").mkdir()
    data = struct.pack("<Q", len(header)) + header + bytes(24)
    (tmp_path / "model" / "model.safetensors").write_bytes(data)
    return tmp_path / "model"


def _own(place: Path, *arguments: str) -> Done:
    return fsdp_shard("run", OWN_RECIPE, *_GIVEN, "launch.device=cpu", f"run_dir={place}/run", *arguments, cwd=place)


def _left(place: Path) -> list[str]:
    return sorted(path.relative_to(place).as_posix() for path in place.rglob("*") if path.is_file())


# What needs neither torch nor Hydra


def test_alone_it_shows_what_it_can_do(place: Path) -> None:
    done = fsdp_shard(cwd=place)
    assert done.status == 0
    assert done.out == fsdp_shard("--help", cwd=place).out
    for command in (*COMMANDS, "inspect", "verify", "diff", "ls", "cp", "run"):
        assert f"\n  {command} " in done.out
    assert max(map(len, done.out.splitlines())) <= 101


def test_version(place: Path) -> None:
    assert fsdp_shard("--version", cwd=place).out == f"fsdp-shard {__version__}\n"


@pytest.mark.parametrize("command", [*COMMANDS, "inspect", "verify", "diff", "ls", "cp", "run"])
def test_every_command_has_help(command: str, place: Path) -> None:
    done = fsdp_shard(command, "--help", cwd=place)
    assert (done.status, done.err) == (0, "")
    assert f"fsdp-shard {command}" in done.out
    assert _left(place) == ["text.txt"]


def test_a_command_that_is_not_there(place: Path) -> None:
    done = fsdp_shard("fintune", *_GIVEN, cwd=place)
    assert done.status == 2
    assert done.error.startswith("error: fintune is not a command of fsdp-shard (did you mean finetune?).")


def test_ls_shows_everything_that_ships_with_a_description(place: Path) -> None:
    done = fsdp_shard("ls", cwd=place)
    assert done.status == 0
    for item in (*recipes(), *configs()):
        assert item.description
        assert f"  {item.name} " in done.out
        assert item.description in done.out


def test_cp_copies_out_once(place: Path) -> None:
    name = recipes()[0].name
    assert fsdp_shard("cp", name, "mine.py", cwd=place).status == 0
    assert (place / "mine.py").read_text() == recipes()[0].path.read_text()
    again = fsdp_shard("cp", name, "mine.py", cwd=place)
    assert again.status == 2
    assert again.error == "error: mine.py already exists and is not overwritten; give another name."
    assert fsdp_shard("cp", f"{name}.py", "own/", cwd=place).status == 0
    assert (place / "own" / f"{name}.py").is_file()
    for shipped, wrong in (("finetune", "mine.txt"), ("finetune.yaml", "mine")):
        refused = fsdp_shard("cp", shipped, wrong, cwd=place)
        assert (refused.status, (place / wrong).exists()) == (2, False)
        assert "give it a name that ends with ." in refused.err
    unknown = fsdp_shard("cp", "fintune.yaml", "own/", cwd=place)
    assert unknown.status == 2
    assert "did you mean finetune.yaml?" in unknown.error


def test_a_copied_preset_is_used_from_its_directory(place: Path) -> None:
    assert fsdp_shard("cp", "experiment/small_cpu", "own/", cwd=place).status == 0
    copy = place / "own" / "experiment" / "small_cpu.yaml"
    copy.write_text(copy.read_text().replace("steps: 60", "steps: 61"))
    done = fsdp_shard("finetune", "--config-dir", "own", "experiment=small_cpu", "--cfg", "job", cwd=place)
    assert "steps: 61" in done.out


def test_a_copied_preset_is_the_first_argument(place: Path) -> None:
    done = fsdp_shard("cp", "experiment/small_cpu", "mine.yaml", cwd=place)
    assert done.out == "Copied to mine.yaml; use it with fsdp-shard finetune mine.yaml\n"
    assert "@package" not in (place / "mine.yaml").read_text()
    done = fsdp_shard("finetune", "mine.yaml", *_GIVEN, "--cfg", "job", cwd=place)
    assert "steps: 60" in done.out
    assert fsdp_shard("cp", "finetune.yaml", "whole.yaml", cwd=place).out.endswith("fsdp-shard finetune whole.yaml\n")


def test_inspect_and_verify(checkpoint: Path) -> None:
    told = fsdp_shard("inspect", checkpoint, cwd=checkpoint)
    assert told.status == 0
    assert "huggingface" in told.out
    told = fsdp_shard("inspect", "--json", checkpoint, cwd=checkpoint)
    assert json.loads(told.out)["num_tensors"] == 2
    sound = fsdp_shard("verify", checkpoint, cwd=checkpoint)
    assert (sound.status, sound.err) == (0, "")
    file = checkpoint / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    damaged = fsdp_shard("verify", checkpoint, cwd=checkpoint)
    assert damaged.status == 1
    assert "model.safetensors" in damaged.out
    assert damaged.error.endswith("model: 1 problem, listed above.")


def test_inspect_lists_tensors(checkpoint: Path) -> None:
    told = fsdp_shard("inspect", checkpoint, "--tensors", "[ab]", cwd=checkpoint)
    assert told.out == "a  F32   2 x 2  16 B  model.safetensors\nb  BF16  4       8 B  model.safetensors\n"
    none = fsdp_shard("inspect", checkpoint, "--tensors", "weight", cwd=checkpoint)
    assert none.status == 2
    assert none.error.endswith("model has no tensor that weight fits; it has a, b.")


@pytest.mark.long
def test_two_checkpoints(checkpoint: Path) -> None:
    copy = checkpoint.parent / "copy"
    shutil.copytree(checkpoint, copy)
    for command in (["verify", "model", "--against", "copy"], ["diff", "model", "copy"]):
        same = fsdp_shard(*command, cwd=checkpoint.parent)
        assert (same.status, same.err) == (0, "")
        assert len(same.out.splitlines()) == 1
    file = copy / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"\x40")
    told = fsdp_shard("verify", "model", "--against", "copy", cwd=checkpoint.parent)
    assert (told.status, told.error) == (1, "error: model against copy: 1 problem, listed above.")
    assert told.out.startswith("tensor b differs from [3] on: model/model.safetensors, bytes ")
    told = fsdp_shard("diff", "model", "copy", cwd=checkpoint.parent)
    assert (told.status, told.error) == (1, "error: model and copy differ in 1 tensor.")
    assert "1 of 2 tensors differ" in told.out
    told = fsdp_shard("diff", "model", "copy", "--json", cwd=checkpoint.parent)
    assert json.loads(told.out)["differences"][0]["max_absolute"] == 2.0
    told = fsdp_shard("verify", "model", "--against", "copy", "--json", cwd=checkpoint.parent)
    assert json.loads(told.out)["problems"][0]["tensor"] == "b"
    missing = fsdp_shard("diff", "model", "nowhere", cwd=checkpoint.parent)
    assert (missing.status, missing.error) == (2, "error: nowhere: there is no such file or directory.")


@pytest.mark.parametrize("command", ["inspect", "verify"])
def test_a_checkpoint_that_is_not_there(command: str, place: Path) -> None:
    done = fsdp_shard(command, "nowhere", cwd=place)
    assert done.status == 2
    assert "nowhere" in done.error
    assert fsdp_shard(command, cwd=place).error.startswith("error: The following arguments are required: path.")


# How soon

_HEAVY = ("torch", "transformers", "datasets", "numpy", "matplotlib", "hydra")

_TIMED = """
import atexit, sys
def heavy():
    print("HEAVY", *(name for name in {names} if name in sys.modules), file=sys.stderr)
atexit.register(heavy)
from fsdp_shard.cli import main
main()
"""


def _cpu_seconds_and_imports(arguments: list[str], cwd: Path) -> tuple[float, str]:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = run([sys.executable, "-c", _TIMED.format(names=_HEAVY), *arguments], cwd)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
    return seconds, done.err.splitlines()[-1]


@pytest.mark.parametrize(
    ("arguments", "limit"),
    [
        *(([command, "--help"], 0.3) for command in (*COMMANDS, "inspect", "ls", "run")),
        (["--help"], 0.3),
        (["ls"], 0.3),
        (["cp", "finetune.yaml", "copied.yaml"], 0.3),
        (["inspect", "model"], 0.3),
        (["verify", "model", "--against", "model"], 0.3),
        (["diff", "model", "model"], 0.3),
        (["finetune", *_GIVEN, "--cfg", "job"], 0.5),
        (["convert", "source=model", "target=converted"], 0.7),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, list) else "",
)
def test_it_starts_at_once_and_loads_nothing_heavy(arguments: list[str], limit: float, checkpoint: Path) -> None:
    # Seconds of the CPU: those of the clock depend on what else the machine does. At least twice the limit, as a busy
    # one is slower at everything; importing torch alone takes more than that.
    seconds, loaded = _cpu_seconds_and_imports(arguments, checkpoint.parent)
    assert loaded == (
        "HEAVY hydra" if arguments[0] in ("finetune", "convert") and arguments[1] != "--help" else "HEAVY"
    )
    assert seconds < 2 * limit * slowdown()


def test_a_wrong_setting_cuts_the_imports_short(place: Path) -> None:
    seconds, loaded = _cpu_seconds_and_imports(["finetune", *_GIVEN, "train.stepz=1"], place)
    assert "transformers" not in loaded
    assert seconds < 2 * slowdown()  # of two processes; all imports take more than that


def test_verify_needs_numpy_only_where_there_is_no_manifest(checkpoint: Path) -> None:
    seconds, loaded = _cpu_seconds_and_imports(["verify", "model"], checkpoint.parent)
    assert loaded == "HEAVY numpy"
    assert seconds < 0.9 * slowdown()
    convert(checkpoint, checkpoint.parent / "digested")
    seconds, loaded = _cpu_seconds_and_imports(["verify", "digested"], checkpoint.parent)
    assert loaded == "HEAVY"
    assert seconds < 0.6 * slowdown()


# Recipes


@pytest.mark.long
def test_a_recipe_runs_in_this_process_or_on_ranks(place: Path) -> None:
    done = _own(place)
    assert (done.status, done.err) == (0, "")
    assert _left(place) == ["run/config.yaml", "run/rank-0", "text.txt"]
    assert (place / "run" / "rank-0").read_text() == "0 of 1"
    done = _own(place, "launch.ranks=2")
    assert (done.status, done.err) == (0, "")
    assert _left(place) == ["run/config.yaml", "run/rank-0", "run/rank-1", "text.txt"]
    assert (place / "run" / "rank-1").read_text() == "1 of 2"
    assert "ranks: 2" in (place / "run" / "config.yaml").read_text()


@pytest.mark.long
def test_a_sweep_runs_one_after_the_other_and_goes_on_after_a_failure(place: Path) -> None:
    done = _own(place, "-m", "act=loss,data,write", "launch.ranks=1")
    assert done.status == 1
    assert done.err.splitlines() == [
        "error: The loss became NaN.",
        "error: text.txt has no rows on this rank.",
        f"error: 2 of 3 runs failed: {place}/run/0, {place}/run/1.",
    ]
    assert "[3/3] act=write -> " in done.out
    assert [line.split() for line in done.out.splitlines()[-4:]] == [
        ["run", "act", "status", "run_dir"],
        ["0", "loss", "failed", f"{place}/run/0"],
        ["1", "data", "failed", f"{place}/run/1"],
        ["2", "write", "done", f"{place}/run/2"],
    ]
    failed = [f"run/{number}/{file}" for number in (0, 1) for file in ("config.yaml", "error.txt", "rank-0")]
    assert _left(place) == [*failed, "run/2/config.yaml", "run/2/rank-0", "text.txt"]


@pytest.mark.long
@pytest.mark.parametrize("start", ["run", "torchrun"])
def test_wrong_input_is_said_once_before_anything_is_written(start: str, place: Path) -> None:
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2")
    command = {"run": (*FSDP_SHARD, "run"), "torchrun": torchrun}[start]
    for argument, said in (
        ("train.stepz=1", "train.stepz is not a setting of finetune (did you mean train.steps?)."),
        ("data.path=nowhere.txt", "data.path=nowhere.txt: there is no such file."),
    ):
        done = run([*command, OWN_RECIPE, *_GIVEN, "launch.ranks=2", argument], place)
        errors = [line for line in done.err.splitlines() if line.startswith("error: ")]
        assert len(errors) == 1, done.err
        assert errors[0].startswith(f"error: {said}")
        assert _left(place) == ["text.txt"]
        if start != "torchrun":
            assert done.status == 2
            assert len(done.err.splitlines()) == 1, "no traceback"


@pytest.mark.long
def test_torchrun_and_python_do_the_same(place: Path) -> None:
    done = run([sys.executable, OWN_RECIPE, *_GIVEN, "run_dir=python", "launch.ranks=2"], place)
    assert (done.status, done.err) == (0, "")
    assert sorted(path.name for path in (place / "python").iterdir()) == ["config.yaml", "rank-0", "rank-1"]
    # The ranks agree on a directory that is named by the time: the recipe asserts it.
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2")
    done = run([*torchrun, OWN_RECIPE, *_GIVEN], place, OMP_NUM_THREADS="1")
    assert done.status == 0, done.err
    (made,) = (place / "outputs" / "finetune").iterdir()
    assert sorted(path.name for path in made.iterdir()) == ["config.yaml", "rank-0", "rank-1"]


@pytest.mark.long
@pytest.mark.parametrize(
    ("act", "ranks", "status", "said"),
    [
        ("data", 2, 2, "error: text.txt has no rows on this rank."),
        ("loss", 2, 1, "error: The loss became NaN."),
        ("bug", 1, 1, "error: KeyError: 'nonsense' at "),
        ("bug", 2, 1, "error: Rank 1 raised KeyError: 'nonsense'"),
    ],
)
def test_what_a_rank_raises_is_said_once(act: str, ranks: int, status: int, said: str, place: Path) -> None:
    done = _own(place, f"act={act}", f"launch.ranks={ranks}")
    assert done.status == status
    assert said in done.error
    assert "Traceback" not in done.err


@pytest.mark.long
@pytest.mark.parametrize(("how", "ranks"), [("--debug", 1), ("debug=true", 2)])
def test_debug_shows_the_traceback_of_the_rank(how: str, ranks: int, place: Path) -> None:
    done = _own(place, "act=bug", f"launch.ranks={ranks}", how)
    assert done.status == 1
    assert 'raise KeyError("nonsense")' in done.err
    assert done.err.splitlines()[-1].startswith("error: ")
    assert "debug: true" in (place / "run" / "config.yaml").read_text()


@pytest.mark.long
@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE", "LOCAL_RANK"])
def test_a_rank_that_is_no_number_is_reported(name: str, place: Path) -> None:
    """Before the ranks meet, for which the others may have to be waited for."""
    variables = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1", name: "x"}
    done = run([*FSDP_SHARD, "run", OWN_RECIPE, *_GIVEN, "run_dir=run"], place, **variables)
    assert done.status == 2
    assert f"{name}=x is not a number, as torchrun or srun sets it" in done.error


def test_restarts_by_torchrun_need_a_run_dir(place: Path) -> None:
    torchrun = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    done = run([*FSDP_SHARD, "run", OWN_RECIPE, *_GIVEN], place, **torchrun, TORCHELASTIC_MAX_RESTARTS="3")
    assert done.status == 2
    assert "torchrun --max-restarts starts failed ranks again, and a run_dir named by date would be" in done.error
    assert not (place / "outputs").exists()


@pytest.mark.long
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_rank_out_of_memory_says_what_needs_less(ranks: int, place: Path) -> None:
    done = _own(place, "act=fill", f"launch.ranks={ranks}")
    assert done.status == 1
    assert re.match(
        rf"error: Rank {ranks - 1} is out of memory: .*can't allocate memory.*\. `fsdp-shard plan` with the same "
        r"settings .*device\.memory=SIZE.* debug=true or --debug shows where it happened\.",
        done.error,
    )
    assert "torch.empty(1 << 50)" in _own(place, "act=fill", f"launch.ranks={ranks}", "--debug").err


@pytest.mark.long
def test_a_rank_that_is_killed_is_named(place: Path) -> None:
    done = _own(place, "act=die", "launch.ranks=2")
    assert done.status == 1
    assert done.error.startswith("error: Rank 1 ")
    assert "killed" in done.error
    assert "memory" in done.error


@pytest.mark.long
@pytest.mark.parametrize(
    ("number", "ranks"), [(signal.SIGINT, 2), (signal.SIGTERM, 1), (signal.SIGHUP, 1), (signal.SIGHUP, 2)]
)
def test_a_signal_lets_every_rank_save(number: signal.Signals, ranks: int, place: Path) -> None:
    arguments = [*_GIVEN, "run_dir=run", "act=save", f"launch.ranks={ranks}", "launch.device=cpu"]
    process = subprocess.Popen(
        [*FSDP_SHARD, "run", str(OWN_RECIPE), *arguments],
        cwd=place,
        env=environment(),
        stderr=subprocess.PIPE,
        text=True,
        # As in a terminal, where Ctrl-C reaches every process of the group.
        start_new_session=True,
        preexec_fn=hear_signals,
    )
    _wait_for([place / "run" / f"ready-{rank}" for rank in range(ranks)])
    os.killpg(process.pid, number)
    err = process.communicate(timeout=60)[1]
    assert err == "Stopped after step 3, which is saved in run.\n"
    # The recipe has no handler for a closed terminal: it is told so as by SIGTERM.
    assert process.returncode == 128 + (signal.SIGTERM if ranks == 1 and number == signal.SIGHUP else number)
    for rank in range(ranks):
        assert (place / "run" / f"saved-{rank}").read_text() == "1 signal"


@pytest.mark.long
def test_ctrl_c_while_nothing_handles_it(place: Path) -> None:
    process = subprocess.Popen(
        [*FSDP_SHARD, "run", str(OWN_RECIPE), *_GIVEN, "run_dir=run", "act=wait", "launch.device=cpu"],
        cwd=place,
        env=environment(),
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=hear_signals,
    )
    _wait_for([place / "run" / "rank-0"])
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=60)[1] == "interrupted\n"
    assert process.returncode == 130


def _wait_for(files: list[Path]) -> None:
    end = time.monotonic() + 60
    while not all(file.exists() for file in files):
        assert time.monotonic() < end
        time.sleep(0.02)


def test_more_ranks_than_a_single_process_command_has(checkpoint: Path) -> None:
    done = fsdp_shard("convert", "source=model", "target=x", "launch.ranks=2", cwd=checkpoint.parent)
    assert done.status == 2
    assert "launch.ranks=2 has no effect: convert does not use it" in done.error


def test_a_file_without_a_recipe(place: Path) -> None:
    (place / "none.py").write_text("x = 1\n")
    assert "has 0 functions that are recipes" in fsdp_shard("run", "none.py", cwd=place).error
    (place / "broken.py").write_text("import nothing_like_it\n")
    done = fsdp_shard("run", "broken.py", cwd=place)
    assert done.status == 2
    assert "broken.py could not be loaded: ModuleNotFoundError: No module named 'nothing_like_it'" in done.error
    assert "nowhere.py is not a file" in fsdp_shard("run", "nowhere.py", cwd=place).error
    assert fsdp_shard("run", cwd=place).status == 2


@pytest.mark.long
def test_a_recipe_can_import_what_lies_beside_it(place: Path) -> None:
    (place / "beside.py").write_text("NAME = 'found'\n")
    text = OWN_RECIPE.read_text().replace("import os\n", "import os\nimport beside\n", 1)
    (place / "copied.py").write_text(text)
    done = fsdp_shard("run", "copied.py", *_GIVEN, "run_dir=run", "launch.device=cpu", cwd=place)
    assert (done.status, done.err) == (0, "")


def test_shipped_recipes_shadow_no_packages(tmp_path: Path) -> None:
    """lm-evaluation-harness imports the `evaluate` of Hugging Face, and a recipe is called evaluate.py, too."""
    (tmp_path / "evaluate.py").write_text("PACKAGE = True\n")
    found: list[bool] = []

    def work(config: PlanConfig) -> None:
        found.append(importlib.import_module("evaluate").PACKAGE)

    shipped = load_recipe(shipped_directory("recipes") / "evaluate.py")
    recipe = Recipe(PlanConfig, work, work)
    recipe.file = shipped.file
    sys.path.append(str(tmp_path))
    try:
        recipe.check(PlanConfig())
        recipe.run_on_rank(PlanConfig())
    finally:
        sys.path.remove(str(tmp_path))
        sys.modules.pop("evaluate")
    assert found == [True, True]


def test_loading_a_recipe_leaves_the_path_of_imports_as_it_is(place: Path) -> None:
    before = list(sys.path)
    (place / "sibling.py").write_text("NAME = 'found'\n")
    text = OWN_RECIPE.read_text().replace("import os\n", "import os\nimport sibling\n", 1)
    (place / "loaded.py").write_text(text)
    assert load_recipe(place / "loaded.py").file == place / "loaded.py"
    assert sys.path == before


@pytest.mark.long
def test_a_recipe_can_import_its_siblings_while_it_runs(place: Path) -> None:
    (place / "sibling.py").write_text("NAME = 'found'\n")
    body = "    from fsdp_shard.distributed import init_distributed\n"
    (place / "late.py").write_text(OWN_RECIPE.read_text().replace(body, f"{body}    import sibling\n"))
    arguments = ("late.py", *_GIVEN, "run_dir=run", "launch.device=cpu", "launch.ranks=2")
    done = fsdp_shard("run", *arguments, cwd=place)
    assert (done.status, done.err) == (0, "")


@pytest.mark.long
@pytest.mark.parametrize("given", [(), ("run_dir=kept",), ("output=o.jsonl",)])
def test_what_only_prints_leaves_no_directory(given: tuple[str, ...], tiny_model: Path, place: Path) -> None:
    words = ("generate", f"checkpoint={tiny_model}", "prompt=Hello, world", "generation.max_new_tokens=1", *given)
    done = fsdp_shard(*words, cwd=place)
    assert done.status == 0, done.err
    if not given:
        assert "written to" not in done.out
        assert _left(place) == ["text.txt"]
    else:
        written = "kept/completions.jsonl" if given == ("run_dir=kept",) else "o.jsonl"
        assert f"written to {written}\n" in done.out
        assert {written, "text.txt"} < set(_left(place))


@pytest.mark.long
def test_what_libraries_quote_from_files_is_escaped(tiny_model: Path, place: Path) -> None:
    model = shutil.copytree(tiny_model, place / "model")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"\x1b[2J\n_token_id": -1}))
    done = fsdp_shard("generate", f"checkpoint={model}", "prompt=hi", "generation.max_new_tokens=1", cwd=place)
    assert done.status == 0, done.err
    assert "\\x1b[2J\n_token_id must be" in done.err, "transformers warns of it"
    assert "\x1b" not in done.err + done.out


@pytest.mark.long
def test_a_plan_leaves_no_directory(tiny_model: Path, place: Path) -> None:
    words = ("plan", f"model.path={tiny_model}", "data.sequence_length=16")
    assert fsdp_shard(*words, cwd=place).status == 0
    assert _left(place) == ["text.txt"]
    assert fsdp_shard(*words, "run_dir=kept", cwd=place).status == 0
    assert _left(place) == ["kept/config.yaml", "kept/plan.html", "kept/result.json", "kept/timeline.png", "text.txt"]


# The shell


def test_a_reader_that_leaves_early_is_no_error(place: Path) -> None:
    command = " ".join([*FSDP_SHARD, "finetune", "--help"])
    done = run(["bash", "-c", f"{command} | head -n 1"], place)
    assert (done.status, done.err) == (0, "")
    assert done.out.startswith("fsdp-shard finetune")


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("fsdp-shard ", {"finetune", "convert", "inspect", "ls", "run"}),
        ("fsdp-shard fin", {"finetune"}),
        ("fsdp-shard finetune train.st", {"train.steps="}),
        ("fsdp-shard finetune shard=", {"shard=fsdp1", "shard=fsdp2"}),
        ("fsdp-shard inspect mod", set()),
    ],
)
def test_shell_completion(line: str, expected: set[str], place: Path) -> None:
    done = run([*FSDP_SHARD, "-sc", "query=bash"], place, COMP_LINE=line)
    assert done.status == 0
    assert expected <= set(done.out.split())


def test_shell_completion_installs_for_our_name(place: Path) -> None:
    done = fsdp_shard("-sc", "install=bash", cwd=place)
    assert done.out.rstrip().endswith("hydra_bash_completion fsdp-shard")


def test_hydras_own_ways_of_looking(place: Path) -> None:
    assert "steps: 3" in fsdp_shard("finetune", "train.steps=3", "--cfg", "job", cwd=place).out
    assert "shard/fsdp1" in fsdp_shard("finetune", "shard=fsdp1", "--info", "defaults", cwd=place).out
    assert _left(place) == ["text.txt"]


def test_the_module_and_the_command_are_the_same() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    assert 'fsdp-shard = "fsdp_shard.cli.command_line:main"' in text


@pytest.mark.parametrize("run_dir", ["kept", "outputs/deep/new"])
def test_a_refused_conversion_leaves_nothing(checkpoint: Path, tmp_path: Path, run_dir: str) -> None:
    (tmp_path / "kept").mkdir()
    given = (f"target={tmp_path}/t", f"run_dir={tmp_path}/{run_dir}")
    before = _left(tmp_path)
    done = fsdp_shard("convert", f"source={checkpoint}", "dtype=bfloat16", f"config={checkpoint}", *given, cwd=tmp_path)
    assert (done.status, done.err.count("error: ")) == (2, 1), done.err
    assert not (tmp_path / "outputs").exists()
    assert (tmp_path / "kept").exists()
    assert [name for name in _left(tmp_path) if not name.startswith("kept/")] == before


@pytest.mark.parametrize("is_refused", [False, True])
def test_runs_of_the_same_second_have_their_own_directories(checkpoint: Path, tmp_path: Path, is_refused: bool) -> None:
    now = time.time()
    for second in range(120):  # as if another run had begun in each
        taken = time.strftime("%Y-%m-%d_%H-%M-%S", time.localtime(now + second))
        (tmp_path / "outputs" / "convert" / taken).mkdir(parents=True)
    wrong = ("dtype=bfloat16", f"config={checkpoint}") if is_refused else ()
    done = fsdp_shard("convert", f"source={checkpoint}", f"target={tmp_path}/t", *wrong, cwd=tmp_path)
    assert done.status == (2 if is_refused else 0), done.err
    others = [path for path in (tmp_path / "outputs" / "convert").iterdir() if path.name.endswith("_2")]
    assert len(others) == (0 if is_refused else 1)
    assert _left(tmp_path / "outputs") == [
        f"convert/{each.name}/{n}" for each in others for n in ("config.yaml", "result.json")
    ]
