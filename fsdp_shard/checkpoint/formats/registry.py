"""The registry of checkpoint formats: the interface of a format's module, and the list of all formats.

To add a format, write a module in this folder with the names of `Format` (and of `Writer`, if it can be written), then
add its name to `FORMATS` (and to `WRITERS`). A module that reads looks like this:

    NAME = "myformat"

    def recognize(path: Path) -> bool: ...
    def read(path: Path) -> TensorIndex: ...

Formats deal with files, tensors and bytes, never with a process group. A `TensorIndex` lists the tensors with the byte
ranges of their pieces, a `TargetPlan` the files to write with the byte ranges of their tensors.
"""

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from fsdp_shard.checkpoint.index import TensorIndex
from fsdp_shard.checkpoint.io import TensorSpec, refuse_many_entries
from fsdp_shard.checkpoint.steps.file_plan import TargetPlan, WriteRequest


class Format(Protocol):
    """The module of a readable format.

    `KEEPS_NAMES = True` keeps the stored names unchanged (an adapter's, or our own shards). Otherwise the prefixes and
    nesting that wrappers and trainers add (`module.`, `_orig_mod.`, `model.model.`) are stripped after `read`.
    """

    NAME: str
    """The format's name, as in `TensorIndex.format` and the output of `inspect`."""

    def recognize(self, path: Path) -> bool:
        """Return whether `path` (a file or a directory) looks like this format. Cheap; raises nothing."""

    def read(self, path: Path) -> TensorIndex:
        """Return the index of a path that `recognize` accepts, from headers alone.

        Raises:
            CheckpointError: A file, which the message names, is missing, damaged or of another save.
        """


class Writer(Protocol):
    """The module of a format that can also be written."""

    LISTS_TIED_NAMES: bool
    """Whether tied weights are listed under all of their names, for readers that load a state dict in place (DCP).

    Otherwise each is stored under one name, and readers (`from_pretrained`, our own) tie the others again.
    """

    def plan(self, specs: Sequence[TensorSpec], request: WriteRequest) -> TargetPlan:
        """Plan every file to write, and the byte range in it of every range of every tensor. Pure: writes nothing."""


# In the order in which they try to `recognize` a path: frequent and fast ones first. Importing each module only then
# halves the start-up time of `inspect`.
FORMATS = (
    "peft",  # before native_sharded: an adapter's averages are rank files
    "native_sharded",
    "dcp.dcp_safetensors",
    "huggingface",
    "dcp.dcp_reader",
    "gguf",
    "deepspeed",
    "torch_rank_files",
    "torch_checkpointing",
    "torch_file",
)
# The values of `ConvertSettings.format` -> the modules that write them.
WRITERS = {"huggingface": "huggingface", "sharded": "native_sharded", "dcp": "dcp.dcp_writer"}


def recognize(path: Path) -> Format | None:
    """Return the format of this file or directory, or None; CheckpointError if it has too many files."""
    refuse_many_entries(path)
    return next((known for known in map(_module, FORMATS) if known.recognize(path)), None)


def writer(name: str) -> Writer:
    """Return the writer for a value of `ConvertSettings.format`."""
    found: Writer = _module(WRITERS[name])
    return found


def _module(name: str) -> Any:
    return importlib.import_module(f"{__package__}.{name}")
