"""The known formats, in the order in which a path is offered to them. A new format is a new file and one line here."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from fsdp_shard.checkpoint.index import TensorIndex

if TYPE_CHECKING:
    from fsdp_shard.checkpoint.io.dtypes import TensorSpec
    from fsdp_shard.checkpoint.steps.file_plan import TargetPlan, WriteRequest


class Format(Protocol):
    """What a format's module offers."""

    NAME: str

    def recognize(self, path: Path) -> bool:
        """Whether `path` (a file or a directory) looks like this format; cheap, raises nothing."""

    def read(self, path: Path) -> TensorIndex:
        """Its index, from headers alone; CheckpointError naming the file that is wrong."""


class Writer(Protocol):
    """What a format's module offers besides, where it can be written."""

    NAME: str
    LISTS_TIED_NAMES: bool
    """Whether readers expect tied names in it too: a state dict that is loaded in place has them."""

    def plan(self, specs: Sequence[TensorSpec], request: WriteRequest) -> TargetPlan:
        """Every file, and where each range of each tensor goes. Pure."""


# In the order in which a path is offered to them. Those that are seen most come first and are light; the others are
# imported when their turn comes, which halves the time that `inspect` takes to start.
FORMATS = (
    "native_sharded",
    "peft",
    "dcp_safetensors",
    "huggingface",
    "dcp",
    "gguf",
    "deepspeed",
    "torch_rank_files",
    "torch_file",
)
# `convert`'s names of the formats that can be written -> their modules.
WRITERS = {"huggingface": "huggingface", "sharded": "native_sharded", "dcp": "dcp"}


def recognize(path: Path) -> Format | None:
    """The format of exactly this file or directory, or None."""
    return next((known for known in map(_module, FORMATS) if known.recognize(path)), None)


def writer(name: str) -> Writer:
    """What writes the format of this name, one of `ConvertConfig.format`'s choices."""
    found: Writer = _module(WRITERS[name])
    return found


def _module(name: str) -> Any:
    return importlib.import_module(f"{__package__}.{name}")
