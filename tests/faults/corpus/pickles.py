"""Pickles that run something where they are loaded, under the names that other trainers use: alone, and in a model."""

from __future__ import annotations

import io
import os
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tests.faults.corpus import bases
from tests.faults.corpus.case import Case

# Names under which torch, transformers, accelerate or DeepSpeed write something, much of it pickles.
NAMES = [
    *("pytorch_model.bin", "model.pt", "model.pth", "checkpoint.ckpt", "pytorch_model-00001-of-00001.bin"),
    *("consolidated.00.pth", ".metadata", "__0_0.distcp", "optimizer.pt", "optimizer.bin", "scheduler.pt", "scaler.pt"),
    *("rng_state.pth", "rng_state_0.pth", "training_args.bin", "random_states_0.pkl", "adapter_model.bin"),
    *("mp_rank_00_model_states.pt", "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt", "latest", "model.safetensors"),
    *("model.safetensors.index.json", "pytorch_model.bin.index.json", "manifest.json", "trainer.json", "config.json"),
    *("generation_config.json", "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json"),
    *("merges.txt", "special_tokens_map.json", "shard-00000-of-00001.safetensors", "model.gguf", "model.pkl"),
    *("model.npy", "model.npz", "metadata.pkl", "model_0.pt"),
]


class Canary:
    """A pickle of it makes a file where it is loaded."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return os.mkdir, (str(self._file),)


def pickles(canary: Path) -> dict[str, bytes]:
    """The canary as each container of a pickle has it."""
    zipped = io.BytesIO()
    with zipfile.ZipFile(zipped, "w") as archive:
        for name in ("archive/data.pkl", "data.pkl", "archive/version"):
            archive.writestr(name, pickle.dumps(Canary(canary), protocol=2))
    saved = io.BytesIO()
    torch.save({"a": Canary(canary)}, saved)
    old = io.BytesIO()
    torch.save({"a": Canary(canary)}, old, _use_new_zipfile_serialization=False)
    kinds = {f"protocol {number}": pickle.dumps(Canary(canary), protocol=number) for number in (0, 2, 4)}
    return {**kinds, "zip": zipped.getvalue(), "torch.save": saved.getvalue(), "old torch.save": old.getvalue()}


def _build(name: str, number: int, in_a_model: bool) -> Callable[[Path], None]:
    def build(root: Path) -> None:
        if in_a_model:
            bases.copy("model", root)
        else:
            root.mkdir()
        kinds = list(pickles(root.parent / "canary").values())
        (root / name).write_bytes(kinds[number % len(kinds)])

    return build


CASES = [
    Case(f"{name} {'in a model' if in_a_model else 'alone'}", _build(name, number, in_a_model), expect="any")
    for number, name in enumerate(NAMES)
    for in_a_model in (False, True)
]
