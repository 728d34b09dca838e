"""Malformed and hostile checkpoints through every command that reads one: one error that names the file, soon, no harm.

All in one forked process, through the functions behind the commands: what a command adds is tested elsewhere. An audit
hook sees each file that Python opens, so that nothing outside is even looked at.
"""

from __future__ import annotations

import contextlib
import copy
import io
import os
import pickle
import resource
import shutil
import sys
import time
import warnings
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from fsdp_shard.cli import Recipe, load_recipe, print_error, run_command
from fsdp_shard.config import COMMANDS, compose_jobs, write_config
from fsdp_shard.errors import FsdpShardError
from tests.checkpoint import test_malformed
from tests.checkpoint.torch_pickle import test_bad_pickles
from tests.faults.counts import count
from tests.faults.saves import LONG, in_fork
from tests.support.runs import RECIPES

_CASES = {f"{name} (safetensors)": case for name, case in test_malformed.CASES.items()}
_CASES |= {f"{name} (torch.save)": case for name, case in test_bad_pickles.CASES.items()}
_MODEL_FILES = ("config.json", "tokenizer.json", "tokenizer_config.json")
_RECIPES = ("convert", "generate", "evaluate", "finetune")
_SECONDS, _BYTES = 5.0, 200 << 20

# Names under which torch, transformers, accelerate or DeepSpeed write something, much of it pickles.
_NAMES = [
    *("pytorch_model.bin", "model.pt", "model.pth", "checkpoint.ckpt", "pytorch_model-00001-of-00001.bin"),
    *("consolidated.00.pth", ".metadata", "__0_0.distcp", "optimizer.pt", "optimizer.bin", "scheduler.pt", "scaler.pt"),
    *("rng_state.pth", "rng_state_0.pth", "training_args.bin", "random_states_0.pkl", "adapter_model.bin"),
    *("mp_rank_00_model_states.pt", "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt", "latest", "model.safetensors"),
    *("model.safetensors.index.json", "pytorch_model.bin.index.json", "manifest.json", "trainer.json", "config.json"),
    *("generation_config.json", "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json"),
    *("merges.txt", "special_tokens_map.json", "shard-00000-of-00001.safetensors", "model.gguf", "model.pkl"),
    *("model.npy", "model.npz"),
]


class _Canary:
    """A pickle of it makes a file where it is loaded."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return os.mkdir, (str(self._file),)


class _Commands:
    """The commands, in this process: config composed once, then pointed at one checkpoint after the other."""

    def __init__(self, place: Path, texts: Path) -> None:
        self._place, self._number = place, 0
        self._recipes: dict[str, Recipe[Any]] = {}
        self._configs: dict[str, Any] = {}
        text = f"data.path={texts}/held_out.txt"
        settings = {
            "convert": ["source=x", "target=x"],
            "generate": ["checkpoint=x", "prompt=Hello", "generation.max_new_tokens=2"],
            "evaluate": ["checkpoint=x", text, "data.sequence_length=16"],
            "finetune": ["model.path=x", text, "data.sequence_length=16", "train.steps=1", "launch.device=cpu"],
        }
        for command, arguments in settings.items():
            (job,) = compose_jobs(COMMANDS[command], [*arguments, f"run_dir={place}/run"], command)
            self._recipes[command], self._configs[command] = load_recipe(RECIPES / f"{command}.py"), job.config
        self._configs["finetune"].data.cache_dir = str(place / "tokens")

    def run(self, command: str, root: Path) -> None:
        self._number += 1
        run_dir = self._place / f"run-{self._number}"
        if command in ("inspect", "verify"):
            run_command([command, str(root)])
        elif command == "diff":
            run_command([command, str(root), str(root)])
        else:
            config, recipe = copy.deepcopy(self._configs[command]), self._recipes[command]
            config.run_dir = str(run_dir)
            run_dir.mkdir()
            if command == "convert":
                config.source, config.target = str(root), str(run_dir / "target")
            elif command == "finetune":
                config.model.path = str(root)
            else:
                config.checkpoint = str(root)
            recipe.check(config)
            recipe.perform(config)
        shutil.rmtree(run_dir, ignore_errors=True)


def _ways(number: int) -> Iterator[str]:
    """Every command in the long form; in the short one, of the recipes one for each checkpoint in turn."""
    yield from ("inspect", "verify", "diff")
    yield from _RECIPES if LONG else (_RECIPES[number % len(_RECIPES)],)


def _snapshot(place: Path) -> dict[str, tuple[int, int]]:
    return {str(p): (p.lstat().st_mtime_ns, p.lstat().st_size) for p in place.rglob("*")}


def _try_all(place: Path, texts: Path, tiny_model: Path, cases: dict[str, Any]) -> list[tuple[str, str, str]]:
    """(case, command, what was wrong with how it ended) for every case and command."""
    commands, opened = _Commands(place / "runs", texts), []
    sys.addaudithook(lambda event, args: opened.append(str(args[0])) if event == "open" else None)
    os.chdir(place / "runs")
    found = []
    for number, (name, (make, damage, _)) in enumerate(cases.items()):
        outside = place / str(number)
        root = outside / "model"
        outside.mkdir()
        path = make(root)
        for file in _MODEL_FILES:
            shutil.copyfile(tiny_model / file, root / file)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of zipfile, that a name stands there twice
            damage(path)
        (outside / "secret").write_text("secret")
        before = _snapshot(outside)
        for command in _ways(number):
            opened.clear()
            said = io.StringIO()
            began, memory = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            wrong = "it was not refused"
            try:
                with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
                    commands.run(command, root)
            except FsdpShardError as error:
                lines = str(error).strip().splitlines()
                wrong = "" if len(lines) == 1 and str(root) in said.getvalue() + lines[0] else f"it says {lines}"
            except BaseException as error:
                wrong = f"{type(error).__name__}: {error}"
            seconds = time.process_time() - began
            num_bytes = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory) * 1024
            if seconds > _SECONDS:
                wrong += f"; it took {seconds:.1f} s"
            # The first of each recipe imports and allocates what all share.
            if num_bytes > _BYTES and number > 3:
                wrong += f"; it took {num_bytes} bytes"
            if strange := [p for p in opened if p.startswith(str(outside)) and not p.startswith(str(root))]:
                wrong += f"; it opened {strange}"
            if _snapshot(outside) != before:
                wrong += "; it changed files"
            found.append((name, command, wrong))
        shutil.rmtree(outside)
    return found


def test_every_command_refuses_what_is_malformed(tmp_path: Path, tiny_model: Path, texts: Path) -> None:
    (tmp_path / "runs").mkdir()
    assert len(_CASES) >= 60
    found = in_fork(_try_all, tmp_path, texts, tiny_model, _CASES, seconds=1400 if LONG else 280)
    for _, command, wrong in found:
        count(f"malformed or hostile, {command}", failed=bool(wrong))
    assert [one for one in found if one[2]] == []


def _pickles(canary: Path) -> dict[str, bytes]:
    """The canary as each container of a pickle has it."""
    zipped = io.BytesIO()
    with zipfile.ZipFile(zipped, "w") as archive:
        for name in ("archive/data.pkl", "data.pkl", "archive/version"):
            archive.writestr(name, pickle.dumps(_Canary(canary), protocol=2))
    saved = io.BytesIO()
    torch.save({"a": _Canary(canary)}, saved)
    old = io.BytesIO()
    torch.save({"a": _Canary(canary)}, old, _use_new_zipfile_serialization=False)
    kinds = {f"protocol {number}": pickle.dumps(_Canary(canary), protocol=number) for number in (0, 2, 4)}
    return {**kinds, "zip": zipped.getvalue(), "torch.save": saved.getvalue(), "old torch.save": old.getvalue()}


def _try_canaries(place: Path, texts: Path, tiny_model: Path) -> list[tuple[str, str]]:
    """(file name, kind) of each pickle that something has run; each lies alone, and beside a sound model."""
    commands, canary, found = _Commands(place / "runs", texts), place / "canary", []
    os.chdir(place / "runs")
    for number, name in enumerate(_NAMES):
        for kind_number, (kind, data) in enumerate(_pickles(canary).items()):
            if not LONG and kind_number != number % 6:
                continue
            for beside in (False, True):
                root = place / "model"
                if beside:
                    shutil.copytree(tiny_model, root)
                else:
                    root.mkdir()
                (root / name).write_bytes(data)
                for command in _ways(number):
                    with (
                        contextlib.suppress(FsdpShardError),
                        contextlib.redirect_stdout(io.StringIO()),
                        contextlib.redirect_stderr(io.StringIO()),
                    ):
                        commands.run(command, root)
                if canary.exists():
                    found.append((name, kind))
                    canary.rmdir()
                shutil.rmtree(root)
    pickle.loads(pickle.dumps(_Canary(canary)))
    assert canary.exists(), "the canary sings where it is loaded"
    return found


def test_no_pickle_is_run(tmp_path: Path, tiny_model: Path, texts: Path) -> None:
    (tmp_path / "runs").mkdir()
    found = in_fork(_try_canaries, tmp_path, texts, tiny_model, seconds=1400 if LONG else 280)
    count("pickle canaries", failed=bool(found), times=len(_NAMES) * (6 if LONG else 1) * 2)
    assert found == []


@pytest.mark.parametrize("where", ["environment", "address", "name"])
def test_a_token_is_never_written(
    where: str, tmp_path: Path, tiny_model: Path, texts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    token = "hf_" + "TotallySecretToken"
    monkeypatch.setenv("HF_TOKEN", token if where != "name" else "another")
    path = {"environment": str(tiny_model), "address": f"https://user:{token}@host/org/name", "name": f"org/{token}"}
    said = in_fork(_spend_token, tmp_path, texts, path[where])
    assert token not in said
    assert ("***" in said) == (where != "environment")
    files = [file for file in tmp_path.rglob("*") if file.is_file()]
    assert tmp_path / "run" / "config.yaml" in files
    assert not [file for file in files if token.encode() in file.read_bytes()]
    count("token in logs, configs or results")


def _spend_token(place: Path, texts: Path, path: str) -> str:
    """All that a run says: it trains, or is given a source that is none."""
    out = io.StringIO()
    arguments = [f"model.path={path}", f"data.path={texts}/held_out.txt", "train.steps=1", "launch.device=cpu"]
    arguments += ["data.sequence_length=16", f"run_dir={place}/run", f"data.cache_dir={place}/tokens"]
    (job,) = compose_jobs(COMMANDS["finetune"], arguments, "finetune")
    recipe = load_recipe(RECIPES / "finetune.py")
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        write_config(job.config)
        try:
            recipe.check(job.config)
            recipe.perform(job.config)
        except FsdpShardError as error:
            print_error(error, debug=True)
    return out.getvalue()
