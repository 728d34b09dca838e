"""The built wheel, installed away from the checkout: it has all that the commands need, and nothing else."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import venv
import zipfile
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import pytest

from fsdp_shard.config import COMMANDS
from fsdp_shard.utils import configs, recipes
from tests.support.commands import OWN_RECIPE, ROOT, Done, environment


def _built(kind: str, source: Path, target: Path) -> Path:
    """A wheel or an sdist as a release has it, built by the backend that is installed: nothing is fetched."""
    build = [sys.executable, "-m", "build", f"--{kind}", "--no-isolation", "--outdir", str(target), str(source)]
    done = subprocess.run(build, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (built,) = target.iterdir()
    return built


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _built("wheel", ROOT, tmp_path_factory.mktemp("dist"))


@pytest.fixture(scope="module")
def command(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`fsdp-shard` in an environment of its own, which borrows this one's packages but not our checkout."""
    place = tmp_path_factory.mktemp("environment")
    venv.create(place, with_pip=False)
    python = place / "bin" / "python"
    install = [sys.executable, "-m", "pip", f"--python={python}", "install", "--quiet", "--no-deps", "--no-index"]
    subprocess.run([*install, "--disable-pip-version-check", str(wheel)], check=True)
    # A directory named in a .pth file is on the path, while .pth files in it, such as our own, are not looked at.
    site = next(place.glob("lib/python*/site-packages"))
    (site / "borrowed.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    return place / "bin" / "fsdp-shard"


def _run(command: Sequence[str | Path], cwd: Path) -> Done:
    variables = environment()
    del variables["PYTHONPATH"]
    done = subprocess.run(command, cwd=cwd, env=variables, capture_output=True, text=True, timeout=120, check=False)
    return Done(done.returncode, done.stdout, done.stderr)


def test_the_wheel_puts_nothing_but_the_package_on_the_path(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    tops = {name.partition("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"fsdp_shard"}
    inside = {name for name in names if name.startswith("fsdp_shard/_shipped/")}
    assert inside == {
        *(f"fsdp_shard/_shipped/conf/{item.name}" for item in configs()),
        *(f"fsdp_shard/_shipped/conf/lm_eval/everyday{end}" for end in (".yaml", ".jsonl", "_questions.py")),
        *(f"fsdp_shard/_shipped/recipes/{item.name}.py" for item in recipes()),
    }
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert "fsdp_shard/py.typed" in names


@pytest.mark.long
def test_the_sdist_builds_the_same_wheel_at_any_time(wheel: Path, tmp_path: Path) -> None:
    sdist = _built("sdist", ROOT, tmp_path / "sdist")
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path / "source", filter="data")
    (source,) = (tmp_path / "source").iterdir()
    assert (source / "tests" / "structure" / "test_wheel.py").exists(), "what CI runs can be run from it"
    assert (source / "Makefile").exists()
    for file in source.rglob("*"):
        os.utime(file, (1_600_000_000, 1_600_000_000))
    again = _built("wheel", source, tmp_path / "wheel")
    assert again.name == wheel.name
    assert again.read_bytes() == wheel.read_bytes()
    assert _built("sdist", source, tmp_path / "sdist-again").read_bytes() == sdist.read_bytes()


def test_every_extra_is_documented() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    rows = [line for line in (ROOT / "docs" / "install.md").read_text().splitlines() if line.startswith("| `")]
    documented = {name for row in rows for name in re.findall(r"`([\w-]+)`", row.split("|")[1])}
    assert documented == set(extras)


@pytest.mark.long
def test_every_command_works_away_from_the_checkout(command: Path, tmp_path: Path) -> None:
    where = _run([command.parent / "python", "-c", "import fsdp_shard; print(fsdp_shard.__file__)"], tmp_path)
    assert str(command.parent.parent) in where.out
    for name in (*COMMANDS, "inspect", "verify", "ls", "cp", "run"):
        done = _run([command, name, "--help"], tmp_path)
        assert (done.status, done.err) == (0, ""), name
        assert f"fsdp-shard {name}" in done.out
    assert _run([command, "finetune", "--cfg", "job"], tmp_path).status == 0
    assert "did you mean train.steps?" in _run([command, "finetune", "train.stepz=1"], tmp_path).err


@pytest.mark.long
def test_recipes_and_configs_come_along(command: Path, tmp_path: Path) -> None:
    done = _run([command, "ls"], tmp_path)
    assert (done.status, done.err) == (0, "")
    for item in (*recipes(), *configs()):
        assert f"  {item.name} " in done.out
        copied = _run([command, "cp", item.name, "own/"], tmp_path)
        assert (copied.status, copied.err) == (0, "")
    (tmp_path / "own" / "experiment" / "small_cpu.yaml").rename(tmp_path / "own" / "experiment" / "mine.yaml")
    shown = _run([command, "finetune", "--config-dir", "own", "experiment=mine", "--cfg", "job"], tmp_path)
    assert (shown.status, shown.err) == (0, "")
    assert "sequence_length: 256" in shown.out
    for item in recipes():
        shown = _run([command, "run", f"own/{item.name}.py", "--cfg", "job"], tmp_path)
        assert (shown.status, shown.err) == (0, "")


@pytest.mark.long
@pytest.mark.skipif(find_spec("torchao") is not None, reason="nothing is missing where torchao is installed")
def test_the_command_that_an_error_names_installs_the_extra(command: Path, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("text")
    settings = ["model.path=.", "data.path=text.txt", "run_dir=run", "optim=adamw8bit"]
    error = _run([command, "finetune", *settings], tmp_path).err
    named = shlex.split(error.partition("Install it with ")[2].partition(", or set")[0])
    assert named == [str(command.parent / "python"), "-m", "pip", "install", "fsdp-shard[quantize]"]
    # Where nothing can be fetched, pip finds fsdp-shard as it is installed, and misses what the extra names.
    done = _run([*named, "--no-index", "--disable-pip-version-check"], tmp_path)
    assert "No matching distribution found for torchao" in done.err


def test_a_copied_recipe_runs_on_two_ranks(command: Path, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN_RECIPE.read_text())
    (tmp_path / "text.txt").write_text("text")
    arguments = ["model.path=x", "data.path=text.txt", "run_dir=run", "launch.ranks=2", "launch.device=cpu"]
    done = _run([command, "run", "own.py", *arguments], tmp_path)
    assert (done.status, done.err) == (0, "")
    assert (tmp_path / "run" / "rank-1").read_text() == "1 of 2"
