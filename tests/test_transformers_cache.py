"""transformers' model files are looked through once for all programs; what it offers is what it offers by itself."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from fsdp_shard.transformers_cache import _files, _packed, _remembered, _unpacked
from tests.commands import Done, run

_COUNT = """
import builtins, sys
if sys.argv[1] == "kept":
    from fsdp_shard.transformers_cache import keep_what_transformers_finds
    keep_what_transformers_finds()
opened = []
usual = builtins.open
builtins.open = lambda file, *rest, **more: (opened.append(str(file)), usual(file, *rest, **more))[1]
import transformers
import transformers.models
builtins.open = usual
files = [file for file in opened if "/transformers/models/" in file]
print(len(files), len(set(files)))
print(len(dir(transformers)), hash(tuple(sorted(dir(transformers.models)))))
from transformers import LlamaForCausalLM
print(LlamaForCausalLM.__module__, transformers.utils.import_utils.__spec__.origin)
"""


def _import(how: str, home: Path) -> Done:
    done = run([sys.executable, "-c", _COUNT, how], Path.cwd(), PYTHONHASHSEED="0", XDG_CACHE_HOME=str(home))
    assert done.status == 0, done.err
    return done


def test_the_model_files_are_read_once_for_all_programs(tmp_path: Path) -> None:
    first, second, usual = (_import(how, tmp_path / "home") for how in ("kept", "kept", "usual"))
    num_read, num_files = map(int, first.out.splitlines()[0].split())
    assert num_read == num_files > 1_000
    assert second.out.splitlines()[0] == "0 0"
    assert int(usual.out.split()[0]) > num_read, "transformers does so by itself now: fsdp_shard can leave it to it"
    assert first.out.splitlines()[1:] == second.out.splitlines()[1:] == usual.out.splitlines()[1:]


def test_a_home_that_cannot_be_written_costs_time_only(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    done = _import("kept", tmp_path / "file" / "home")
    assert int(done.out.split()[0]) > 1_000


FOUND = {"llama": {frozenset({"torch"}): {"modeling_llama": {"LlamaModel"}}}, frozenset(): {"none": {"A", "B"}}}


def test_what_was_found_is_kept_as_it_is() -> None:
    assert _unpacked(json.loads(json.dumps(_packed(FOUND)))) == FOUND


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    (tmp_path / "models" / "llama").mkdir(parents=True)
    (tmp_path / "utils").mkdir()
    for name in ("none.py", "llama/modeling_llama.py", "llama/convert_llama.py", "../utils/import_utils.py"):
        (tmp_path / "models" / name).write_text("")
    return tmp_path / "models"


def _looks(models: Path, times: int = 1) -> int:
    """How often it is looked through when as many programs ask."""
    looks: list[str] = []
    for _ in range(times):
        _remembered.cache_clear()
        assert _remembered(lambda path: looks.append(path) or FOUND, models) == FOUND
    return len(looks)


def test_any_change_is_seen(models: Path) -> None:
    assert len(list(_files(str(models)))) == 2
    assert _looks(models, 3) == 1
    (models / "llama" / "modeling_llama.py").write_text("__all__ = []")
    assert _looks(models, 2) == 1
    os.utime(models / "none.py", ns=(0, 0))
    assert _looks(models, 2) == 1
    (models / "new.py").write_text("")
    assert _looks(models, 2) == 1
    (models / "new.py").unlink()
    assert _looks(models, 2) == 1
    os.utime(models.parent / "utils" / "import_utils.py", ns=(0, 0))  # it may look for something else now
    assert _looks(models, 2) == 1


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"of": 1', '{"of": null, "found": 3}', "\0"])
def test_what_is_no_such_file_is_written_anew(models: Path, text: str) -> None:
    assert _looks(models) == 1
    (file,) = (models.parent / "home" / "fsdp-shard").iterdir()
    file.write_text(text)
    assert _looks(models, 2) == 1


@pytest.mark.parametrize("found", [3, [], [1, 2], [[[1]], {}], [[[["torch"], 3]], {}]])
def test_nor_is_what_has_another_content(models: Path, found: object) -> None:
    assert _looks(models) == 1
    (file,) = (models.parent / "home" / "fsdp-shard").iterdir()
    file.write_text(json.dumps(json.loads(file.read_text()) | {"found": found}))
    assert _looks(models, 2) == 1


def test_a_transformers_that_is_there_already_is_left_alone(tmp_path: Path) -> None:
    program = """
import sys, transformers
from fsdp_shard.transformers_cache import keep_what_transformers_finds
before = list(sys.meta_path)
keep_what_transformers_finds()
print(sys.meta_path == before)
"""
    assert run([sys.executable, "-c", program], tmp_path).out == "True\n"
