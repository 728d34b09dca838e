"""The commands as functions of a checkpoint's path, in this process: their configs are composed once."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import fsdp_shard
from fsdp_shard.cli import load_recipe, run_command
from fsdp_shard.config import COMMANDS, compose_jobs
from tests.faults.corpus import bases
from tests.support.runs import RECIPES

Command = Callable[[Path, Path], None]  # (what the command is given, an empty directory to work in)

FORMATS = ("huggingface", "sharded", "dcp")
_LOADING = ("generate", "chat", "evaluate", "finetune", "train-chat", "load", "logits")
_CONVERTING = tuple(f"convert-{format}" for format in FORMATS)
SLOW = ("logits", "finetune", "train-chat", "plan", "doctor", "resume")
# Which commands must refuse a case of this damage. All others may do without what is damaged.
READERS = {
    "headers": ("open", "inspect", "verify", "diff", *_CONVERTING, *_LOADING),
    "values": ("verify",),
    "storages": ("verify", *_CONVERTING, *_LOADING),
    "weights": ("verify", *_LOADING),
    "config": (*_LOADING, "plan", "doctor"),
    "tokenizer": ("generate", "chat", "evaluate", "finetune", "train-chat", "logits"),
    "chat": ("chat", "train-chat"),
    "training": ("resume",),
    "adapter": (*_CONVERTING, *_LOADING),
    "links": ("verify", *_CONVERTING, *_LOADING, "plan", "doctor"),
    "sealed": ("verify", *_CONVERTING),
}


def commands() -> dict[str, Command]:
    """All commands."""
    _, *data = bases.run_settings("x")
    data.pop()
    few = "generation.max_new_tokens=2"
    train = [*data, "train.steps=1"]
    chat = [f"data.path={bases.conversations()}", "data.kind=chat", "data.sequence_length=64"]
    found: dict[str, Command] = {
        "open": _open,
        "inspect": lambda path, _: run_command(["inspect", str(path)]),
        "verify": lambda path, _: run_command(["verify", str(path)]),
        "diff": lambda path, _: run_command(["diff", str(path), str(path)]),
        "logits": lambda path, _: run_command(["diff", str(path), str(path), "--logits", "Hello"]),
        "load": _load,
        "generate": _recipe("generate", "checkpoint", ["prompt=Hello", few]),
        "chat": _recipe("generate", "checkpoint", ["prompt=Hello", "chat=true", few]),
        "evaluate": _recipe("evaluate", "checkpoint", [data[0], data[2]]),
        "finetune": _recipe("finetune", "model.path", train),
        "train-chat": _recipe("finetune", "model.path", [*train, *chat]),
        "plan": _recipe("plan", "model.path", ["data.sequence_length=16"]),
        "doctor": _recipe("doctor", "model.path", train),
    }
    for format in FORMATS:
        ranks = [] if format == "huggingface" else ["ranks=2"]
        found[f"convert-{format}"] = _recipe("convert", "source", ["target=x", f"format={format}", *ranks])
    return found | {"resume": _resume()}  # last, as it writes into the case


def _open(path: Path, _: Path) -> None:
    with fsdp_shard.open_checkpoint(path) as index:
        for name in index.names:
            index.read(name)


def _load(path: Path, _: Path) -> None:
    model = fsdp_shard.load_dispatched(path, device_map={"": "cpu", "model.layers.1": "disk"})
    with contextlib.suppress(ValueError, RuntimeError):  # what transformers raises in a loop of one's own stays its own
        model(torch.tensor([[1, 2, 3]]))


def _recipe(command: str, setting: str, arguments: list[str]) -> Command:
    job, recipe = compose_jobs(COMMANDS[command], [f"{setting}=x", *arguments], command)[0], _load_recipe(command)

    def run(path: Path, place: Path) -> None:
        config: Any = copy.deepcopy(job.config)
        *owners, name = setting.split(".")
        owner = config
        for each in owners:
            owner = getattr(owner, each)
        setattr(owner, name, str(path))
        config.run_dir = str(place / "run")
        (place / "run").mkdir()
        if command == "convert":
            config.target = str(place / "target")
        recipe.check(config)
        recipe.run_on_rank(config)

    return run


def _resume() -> Command:
    """Finetune goes on in the run that is damaged; a case of anything else passes."""
    job = compose_jobs(COMMANDS["finetune"], [*bases.run_settings("x"), "train.steps=2"], "finetune")[0]
    recipe = _load_recipe("finetune")

    def run(path: Path, _: Path) -> None:
        if not (path / "checkpoints").is_dir():
            return
        config: Any = copy.deepcopy(job.config)
        config.run_dir = str(path)
        recipe.check(config)
        recipe.run_on_rank(config)

    return run


def _load_recipe(command: str) -> Any:
    return load_recipe(RECIPES / f"{command}.py")
