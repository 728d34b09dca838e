"""The registry of checkpoint formats: what a format's module has to offer, and the list of all formats.

To add a format, write one module in this folder with the names of `Format` (and of `Writer`, if it can be written),
then add its module name to `FORMATS` (and to `WRITERS`). A module that reads looks like this:

    NAME = "myformat"

    def recognize(path: Path) -> bool: ...
    def read(path: Path) -> TensorIndex: ...

Formats deal with files, tensors and bytes, never with a process group: a `TensorIndex` lists the tensors with the byte
ranges of their pieces, a `TargetPlan` lists the files to write with the byte ranges of their tensors.
"""

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from fsdp_shard.checkpoint.index import TensorIndex
from fsdp_shard.checkpoint.io import TensorSpec, refuse_many_entries
from fsdp_shard.checkpoint.steps.file_plan import TargetPlan, WriteRequest


class Format(Protocol):
    """The module of a format that can be read.

    It may set `KEEPS_NAMES = True` if the stored names are to be kept as they are (an adapter's, or our own shards).
    Without it, prefixes and nesting that wrappers and trainers add to names (`module.`, `_orig_mod.`, `model.model.`)
    are removed after `read`.
    """

    NAME: str
    """The name of the format, as in `TensorIndex.format` and in the output of `inspect`."""

    def recognize(self, path: Path) -> bool:
        """Whether `path` (a file or a directory) looks like this format. Cheap; raises nothing."""

    def read(self, path: Path) -> TensorIndex:
        """The index of a path that `recognize` accepts, from headers alone.

        Raises:
            CheckpointError: A file is missing, damaged or of another save; the message names it.
        """


class Writer(Protocol):
    """The module of a format that can be written, too."""

    LISTS_TIED_NAMES: bool
    """Whether tied weights are listed under all of their names, for readers that load a state dict in place (DCP).

    Otherwise each is stored under one name, and readers tie the others again (`from_pretrained`, our own).
    """

    def plan(self, specs: Sequence[TensorSpec], request: WriteRequest) -> TargetPlan:
        """Every file to write, and the byte range in it of every range of every tensor. Pure: writes nothing."""


# In the order in which they are asked to `recognize` a path: frequent and fast ones first. Modules are imported only
# when they are asked, which halves the time that `inspect` takes to start.
FORMATS = (
    "peft",  # before native_sharded: averages of an adapter are rank files
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
    """The format of exactly this file or directory, or None if it is none; CheckpointError if it has too many files."""
    refuse_many_entries(path)
    return next((known for known in map(_module, FORMATS) if known.recognize(path)), None)


def writer(name: str) -> Writer:
    """The writer of a format, by one of the values of `ConvertSettings.format`."""
    found: Writer = _module(WRITERS[name])
    return found


def _module(name: str) -> Any:
    return importlib.import_module(f"{__package__}.{name}")
