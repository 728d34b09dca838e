"""Rejects a run_dir inside another run or checkpoint, whose files would be mixed, deleted and copied together."""

from collections.abc import Iterator
from pathlib import Path

from fsdp_shard import checkpoint
from fsdp_shard.config.command_configs import RunConfig
from fsdp_shard.errors import ConfigError


def refuse_nested(config: RunConfig) -> None:
    """Raise ConfigError if run_dir is inside another run or a checkpoint, even through links."""
    path = Path(config.run_dir).absolute()
    for own in dict.fromkeys((path, path.resolve())):
        for around in _around(own, is_default=config.is_default_run_dir):
            raise ConfigError(f"run_dir={config.run_dir} is in {around}; give a directory outside of it.")


def _around(run_dir: Path, *, is_default: bool) -> Iterator[str]:
    """Yield the runs and checkpoints around a directory. A default run_dir may be inside a model without a manifest."""
    for directory in (run_dir, *run_dir.parents):
        is_own = directory == run_dir
        if checkpoint.is_checkpoint(directory, sealed=is_default or is_own):
            yield f"the checkpoint {directory}"
        store = checkpoint.StepStore(directory / checkpoint.CHECKPOINTS)
        is_run = checkpoint.recorded_command(directory) or store.steps()
        if is_run and not is_own:
            yield f"the directory of another run, {directory}"
