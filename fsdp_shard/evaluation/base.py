"""Settings of an evaluation. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from fsdp_shard.data.base import DataConfig
from fsdp_shard.inference.base import DispatchConfig
from fsdp_shard.settings import REQUIRED, setting


@dataclass
class EvaluateSettings:
    """What `fsdp-shard evaluate` is asked: which model, which figure, on which text."""

    checkpoint: str = setting(REQUIRED, "A run, a checkpoint of any format, a .gguf file, or a hub id.")
    task: str = setting(
        "perplexity", "perplexity: how well the model predicts each token of data.path.", choices=("perplexity",)
    )
    data: DataConfig = field(default_factory=DataConfig)
    batch_size: int = setting(8, "Windows to run through the model at once.", minimum=1)
    dispatch: DispatchConfig = field(default_factory=DispatchConfig)


def evaluated_text(data: DataConfig) -> DataConfig:
    """`data` such that only what is to be evaluated is read.

    That is what training would hold out: data.eval_path when it is given, the last part of data.path when
    data.eval_fraction is; else all of data.path.
    """
    if data.eval_path is None:
        return data
    return replace(data, path=data.eval_path, split=data.eval_split, eval_path=None)
