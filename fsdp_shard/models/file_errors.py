"""What transformers, tokenizers and jinja raise for the files of a model, as errors that name the files.

Imports none of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from fsdp_shard.errors import FsdpShardError, ModelError
from fsdp_shard.utils import first_line

if TYPE_CHECKING:
    from torch import nn
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

# Their messages say what is wrong; those of others, such as KeyError, need the name of the error.
_EXPLAINED = (ValueError, OSError, RuntimeError, ImportError)
MADE_FROM = "made_from.txt"
"""In the directory of files that were made from a GGUF file, its path."""
_LONGEST_PATH = 4096
_PANIC = "PanicException"  # of libraries in Rust; no Exception, and there is nothing to import it from


@contextmanager
def model_errors(problem: str, advice: str = "", others: tuple[type[Exception], ...] = ()) -> Iterator[None]:
    """Raise whatever a library raises in this context as a ModelError.

    The libraries check few of the values in the files that they read, so a wrong one shows as any error, anywhere.
    Nothing of ours belongs into such a context, or its bugs are taken for those of files.

    Args:
        problem: The file, and what could not be done with it.
        advice: What to do, in a sentence.
        others: Errors that stay what they are.
    """
    try:
        yield
    except BaseException as error:
        is_of_a_library = isinstance(error, Exception) or type(error).__name__ == _PANIC
        if not is_of_a_library or isinstance(error, (FsdpShardError, *others)):
            raise
        kind = "" if isinstance(error, _EXPLAINED) else f"{type(error).__name__}: "
        raise ModelError(f"{problem}: {kind}{first_line(error)}{advice and f' {advice}'}") from error


def running(model: nn.Module, hint: str = "") -> AbstractContextManager[None]:
    """Raise what a model raises as it runs as a ModelError, as a wrong value in its files may show only then.

    Errors of the machine stay what they are, and where there are several ranks, RuntimeErrors: another rank that is
    lost is one.

    Args:
        model: The model.
        hint: What else may be wrong, and what to do then, in a sentence.
    """
    name = origin(getattr(getattr(model, "config", None), "name_or_path", "")) or type(model).__name__
    advice = "Its config.json or generation_config.json may be wrong; debug=true or --debug shows where it fails."
    advice = f"{hint} {advice}" if hint else advice
    import torch
    import torch.distributed as dist

    # Memory, GPUs, disks, and whoever reads what is printed.
    machine = (MemoryError, OSError, torch.OutOfMemoryError, torch.AcceleratorError)
    is_one_of_several = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    others = (*machine, RuntimeError) if is_one_of_several else machine
    return model_errors(f"The model {name} cannot be run", advice, others)


def config_file(config: PretrainedConfig) -> str:
    """The file that a config was loaded from, for errors; what was made from a GGUF file is that file's."""
    if not config.name_or_path:
        return "its config"
    made_from = origin(config.name_or_path)
    return f"{made_from}/config.json" if made_from == config.name_or_path else made_from


def tokenizer_files(tokenizer: PreTrainedTokenizerBase) -> str:
    """The directory, or the GGUF file, that a tokenizer was loaded from, for errors; "" if it was made in memory."""
    return origin(tokenizer.name_or_path)


def origin(path: str) -> str:
    """The GGUF file that the files of a directory were made from, if that is where they come from; else `path`."""
    note = Path(path, MADE_FROM)
    if not path or not note.is_file():
        return path
    with note.open(encoding="utf-8", errors="replace") as file:
        return file.read(_LONGEST_PATH)
