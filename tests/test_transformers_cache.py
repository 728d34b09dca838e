"""That transformers finds its model files once; what it then offers is what it offers by itself."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.commands import run

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
print(len(files) == len(set(files)), len(set(files)) > 500)
print(len(dir(transformers)), hash(tuple(sorted(dir(transformers.models)))))
from transformers import LlamaForCausalLM
print(LlamaForCausalLM.__module__, transformers.utils.import_utils.__spec__.origin)
"""


def test_the_model_files_are_read_once(tmp_path: Path) -> None:
    kept, usual = (run([sys.executable, "-c", _COUNT, how], tmp_path, PYTHONHASHSEED="0") for how in ("kept", "usual"))
    assert (kept.status, usual.status) == (0, 0), kept.err + usual.err
    assert kept.out.splitlines()[0] == "True True"
    assert usual.out.splitlines()[0] == "False True", (
        "transformers does so by itself now: fsdp_shard can leave it to it"
    )
    assert kept.out.splitlines()[1:] == usual.out.splitlines()[1:]


def test_a_transformers_that_is_there_already_is_left_alone(tmp_path: Path) -> None:
    program = """
import sys, transformers
from fsdp_shard.transformers_cache import keep_what_transformers_finds
before = list(sys.meta_path)
keep_what_transformers_finds()
print(sys.meta_path == before)
"""
    assert run([sys.executable, "-c", program], tmp_path).out == "True\n"
