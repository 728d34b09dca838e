"""Settings of an evaluation. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass, field

from fsdp_shard.data.base import DataConfig, check_source
from fsdp_shard.data.task import CAUSAL, check_task
from fsdp_shard.errors import ConfigError
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


def check_text(data: DataConfig) -> None:
    """Raise DataError or ConfigError when the text to evaluate (see `evaluation_windows`) cannot be read."""
    if data.mixture:
        raise ConfigError(
            "data.mixture is a way to train on several texts; evaluate each of them on its own, with data.path."
        )
    if data.streaming:
        raise ConfigError("data.streaming=true is for training: an evaluation reads all of data.path. Leave it out.")
    check_task(CAUSAL, data)
    check_source(data, held_out=data.eval_path is not None)
