"""Config and tokenizer files, which any tool needs to open the weights of a transformers model."""

import copy
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel

from fsdp_shard.errors import ConfigError
from fsdp_shard.sharding import ShardedModel, transformers_model
from fsdp_shard.utils import read_bounded


def check_processor(processor: Any) -> None:
    """Raise ConfigError unless `processor` is None or can be saved with a model."""
    if processor is not None and not callable(getattr(processor, "save_pretrained", None)):
        raise ConfigError(
            f"processor={processor!r} has no save_pretrained(); give a tokenizer or processor of transformers, or None."
        )


def side_files(model: nn.Module | ShardedModel, processor: Any) -> dict[str, bytes]:
    """Config and generation config of `model`, if it is or wraps a transformers model, and the files of `processor`.

    Returns:
        File name -> content.
    """
    with TemporaryDirectory() as directory:
        if (found := transformers_model(model)) is not None:
            _save_config(found, directory)
        if processor is not None:
            processor.save_pretrained(directory)
        paths = [path for path in Path(directory).rglob("*") if path.is_file()]
        return {str(path.relative_to(directory)): read_bounded(path, "tokenizer_bytes") for path in paths}


def _save_config(model: PreTrainedModel, directory: str) -> None:
    config = copy.deepcopy(model.config)
    # `fully_shard` replaces the model's class with a subclass.
    config.architectures = [next(kind.__name__ for kind in type(model).__mro__ if not issubclass(kind, FSDPModule))]
    config.dtype = model.dtype
    config.save_pretrained(directory)
    if model.can_generate() and model.generation_config is not None:
        model.generation_config.save_pretrained(directory)
