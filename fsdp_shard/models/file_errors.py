"""What transformers, tokenizers and jinja raise for the files of a model, as errors that name the files."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import torch
import torch.distributed as dist
from torch import nn
from transformers import PretrainedConfig

from fsdp_shard.errors import FsdpShardError, ModelError
from fsdp_shard.utils import first_line

# Their messages say what is wrong; those of others, such as KeyError, need the name of the error.
_EXPLAINED = (ValueError, OSError, RuntimeError, ImportError)
_PANIC = "PanicException"  # of libraries in Rust; no Exception, and there is nothing to import it from
# What a machine raises as a model runs: memory, GPUs, disks, and whoever reads what is printed.
_OF_THE_MACHINE = (MemoryError, OSError, torch.OutOfMemoryError, torch.AcceleratorError)


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


def running(model: nn.Module) -> AbstractContextManager[None]:
    """Raise what a model raises as it runs as a ModelError, as a wrong value in its files may show only then.

    Errors of the machine stay what they are, and where there are several ranks, RuntimeErrors: another rank that is
    lost is one.
    """
    name = getattr(getattr(model, "config", None), "name_or_path", "") or type(model).__name__
    advice = "Its config.json or generation_config.json may be wrong; debug=true or --debug shows where it fails."
    is_one_of_several = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    others = (*_OF_THE_MACHINE, RuntimeError) if is_one_of_several else _OF_THE_MACHINE
    return model_errors(f"The model {name} cannot be run", advice, others)


def config_file(config: PretrainedConfig) -> str:
    """The file that a config was loaded from, for errors."""
    return f"{config.name_or_path}/config.json" if config.name_or_path else "its config"
