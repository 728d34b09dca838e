"""The files that make the weights of a model of transformers one that any tool opens: config and tokenizer."""

import copy
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel

from fsdp_shard.utils import read_bounded


def processor_files(processor: Any) -> dict[str, bytes]:
    if processor is None:
        return {}
    with TemporaryDirectory() as directory:
        processor.save_pretrained(directory)
        paths = [path for path in Path(directory).rglob("*") if path.is_file()]
        return {str(path.relative_to(directory)): read_bounded(path, "tokenizer_bytes") for path in paths}


def config_files(model: PreTrainedModel) -> dict[str, bytes]:
    """The config and generation config of a model, as `save_pretrained` would write them."""
    config = copy.deepcopy(model.config)
    # `fully_shard` makes a class of its own of the model's.
    config.architectures = [next(kind.__name__ for kind in type(model).__mro__ if not issubclass(kind, FSDPModule))]
    config.dtype = model.dtype
    with TemporaryDirectory() as directory:
        config.save_pretrained(directory)
        if model.can_generate() and model.generation_config is not None:
            model.generation_config.save_pretrained(directory)
        return {path.name: path.read_bytes() for path in Path(directory).iterdir()}
