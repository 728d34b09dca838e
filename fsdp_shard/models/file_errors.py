"""Turns exceptions of transformers, tokenizers and jinja about a model's files into errors that name the files.

Imports none of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from fsdp_shard.errors import FsdpShardError, ModelError
from fsdp_shard.utils import first_line, is_out_of_memory

if TYPE_CHECKING:
    from torch import nn
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

# Their messages explain the error; those of others, such as KeyError, need the class name.
_EXPLAINED = (ValueError, OSError, RuntimeError, ImportError)
MADE_FROM = "made_from.txt"
"""In the directory of files that were made from a GGUF file, its path."""
_LONGEST_PATH = 4096
_PANIC = "PanicException"  # of Rust libraries; not an Exception, and cannot be imported


@contextmanager
def model_errors(
    problem: str, advice: str = "", is_other: Callable[[BaseException], bool] = lambda error: False
) -> Iterator[None]:
    """Raise anything that a library raises in this context as a ModelError.

    The libraries check few of the values in the files that they read, so a wrong value can cause any error, anywhere.
    Keep our own code out of the block, or its bugs would be blamed on files.

    Args:
        problem: The file, and the operation that failed.
        advice: Advice, in one sentence.
        is_other: Whether an error is to be left unchanged.
    """
    try:
        yield
    except BaseException as error:
        is_of_a_library = isinstance(error, Exception) or type(error).__name__ == _PANIC
        if not is_of_a_library or isinstance(error, FsdpShardError) or is_other(error):
            raise
        kind = "" if isinstance(error, _EXPLAINED) else f"{type(error).__name__}: "
        said = first_line(error)
        said += "." if advice and said[-1:] not in {".", "!", "?", ":"} else ""
        raise ModelError(f"{problem}: {kind}{said}{advice and f' {advice}'}") from error


def model_run_errors(model: nn.Module, hint: str = "") -> AbstractContextManager[None]:
    """Raise anything that a running model raises as a ModelError, as wrong values in its files may show only then.

    Errors of the machine stay unchanged. So do RuntimeErrors if there are several ranks, as a lost rank causes one.

    Args:
        model: The model.
        hint: Another possible cause with advice, in one sentence.
    """
    if not hasattr(model, "config"):
        model = getattr(model, "module", model)  # DistributedDataParallel
    name = origin(getattr(getattr(model, "config", None), "name_or_path", "")) or type(model).__name__
    advice = "Its config.json or generation_config.json may be wrong; debug=true or --debug shows where it fails."
    advice = f"{hint} {advice}" if hint else advice
    import torch
    import torch.distributed as dist

    # Memory, GPUs, disks, and readers of the output.
    machine = (OSError, torch.AcceleratorError)
    is_one_of_several = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    others = (*machine, RuntimeError) if is_one_of_several else machine

    def is_other(error: BaseException) -> bool:
        return isinstance(error, others) or is_out_of_memory(error)

    return model_errors(f"The model {name} cannot be run", advice, is_other)


def config_file(config: PretrainedConfig) -> str:
    """The file from which a config was loaded, for errors; for a config made from a GGUF file, that file."""
    if not config.name_or_path:
        return "its config"
    made_from = origin(config.name_or_path)
    return f"{made_from}/config.json" if made_from == config.name_or_path else made_from


def tokenizer_files(tokenizer: PreTrainedTokenizerBase) -> str:
    """The directory or GGUF file from which a tokenizer was loaded, for errors; "" if it was made in memory."""
    return origin(tokenizer.name_or_path)


def origin(path: str) -> str:
    """The GGUF file from which the files of a directory were made, if any; else `path`."""
    note = Path(path, MADE_FROM)
    if not path or not note.is_file():
        return path
    with note.open(encoding="utf-8", errors="replace") as file:
        return file.read(_LONGEST_PATH)
