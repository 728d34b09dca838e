"""Sound checkpoints by the real writers, made once; a case damages a copy of one."""

from __future__ import annotations

import os
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path

from fsdp_shard.checkpoint import convert
from tests.support.tiny import save_adapter, save_model

_made: list[Path] = []  # the directory of this process


def copy(name: str, root: Path) -> Path:
    """Copy the sound checkpoint of this name to a path that does not exist yet; returns it."""
    shutil.copytree(_made[0] / name, root, symlinks=True)
    return root


def damaged(name: str, damage: Callable[[Path], object]) -> Callable[[Path], None]:
    """The `build` of a case: a copy of a sound checkpoint, after `damage` of the copy's directory."""

    def build(root: Path) -> None:
        damage(copy(name, root))

    return build


def make_all(place: Path) -> None:
    """Make those that are not there yet, and use them in this process."""
    _made[:] = [place]
    place.mkdir(parents=True, exist_ok=True)
    for name, make in BASES.items():
        if not (place / name).exists():
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                make(place / "partial")
            os.rename(place / "partial", place / name)


def _model(root: Path) -> None:
    """The tiny Llama with its byte tokenizer and a chat template, as transformers writes them."""
    save_model(root)
    (root / "chat_template.jinja").write_text(
        "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant:{% endif %}"
    )


def _sealed(root: Path) -> None:
    """The same, with a manifest."""
    convert(_made[0] / "model", root)


def _sharded(root: Path) -> None:
    """Rank files of ours, by 2 ranks."""
    convert(_made[0] / "model", root, format="sharded", ranks=2)


def _dcp(root: Path) -> None:
    convert(_made[0] / "model", root, format="dcp", ranks=2)


def _indexed(root: Path) -> None:
    """Several safetensors files with an index, without a manifest."""
    convert(_made[0] / "model", root, max_shard_size="60kB")
    (root / "manifest.json").unlink()


def _adapter(root: Path) -> None:
    """A peft adapter of the tiny model, which lies beside the bases."""
    save_adapter(root, _made[0] / "model")


BASES: dict[str, Callable[[Path], None]] = {
    "model": _model,
    "sealed": _sealed,
    "indexed": _indexed,
    "sharded": _sharded,
    "dcp": _dcp,
    "adapter": _adapter,
}
