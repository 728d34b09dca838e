"""fsdp-shard's fine-tuning on Ray Train workers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ray.train

from fsdp_shard.cli import finetune
from fsdp_shard.errors import ConfigError


def ray_finetune(config: Mapping[str, Any]) -> None:
    """Run `finetune` as the `train_loop_per_worker` of a TorchTrainer; each worker is a rank.

    Workers that Ray restarts after a failure (`FailureConfig`) continue from the last step in `run_dir`. At the end,
    the figures of result.json are reported as metrics, and the last step as a checkpoint, which Ray copies to its
    storage.

    Args:
        config: `settings`: a list of settings as on the command line. It must include `run_dir` as an absolute path of
            a directory that all workers can access: relative paths belong to Ray's session and would not be found
            again.

    Raises:
        ConfigError: `settings` or `run_dir` is missing.
        FsdpShardError: As in the command; Ray shows it as the cause of its TrainingFailedError.

    Example:
        >>> from fsdp_shard.integrations import ray_finetune
        >>> settings = ["model.path=/models/tiny", "data.path=/data/text.txt", "run_dir=/runs/mine"]
        >>> TorchTrainer(ray_finetune, train_loop_config={"settings": settings}, ...).fit()  # doctest: +SKIP
    """
    if config.keys() != {"settings"}:
        raise ConfigError(
            f"train_loop_config has {', '.join(config) or 'nothing'}; ray_finetune takes settings alone, such as "
            f"{{'settings': ['train.steps=4']}}."
        )
    settings = config["settings"]
    run_dirs = [one.partition("=")[2] for one in settings if one.startswith("run_dir=")]
    if not run_dirs or not Path(run_dirs[-1]).is_absolute():
        found = f"run_dir={run_dirs[-1]} is relative" if run_dirs else "run_dir is not among the settings"
        raise ConfigError(
            f"{found}, and Ray's workers start again in other directories; give run_dir the absolute path of a "
            f"directory that all workers see."
        )
    figures = finetune(settings)
    if not figures:
        ray.train.report({})  # every worker must report; only the first one's report counts
        return
    last = Path(figures["checkpoint"])
    ray.train.report(figures, checkpoint=ray.train.Checkpoint.from_directory(last), checkpoint_dir_name=last.name)
