"""Writes the config.yaml of a run directory."""

from pathlib import Path

from fsdp_shard.checkpoint import CONFIG_FILE
from fsdp_shard.config.command_configs import RunConfig
from fsdp_shard.errors import ConfigError
from fsdp_shard.utils import has_content, refuse_remote, write_atomically


def write_config(config: RunConfig) -> None:
    """Write RUN_DIR/config.yaml atomically, replacing the file of an earlier run that this one resumes.

    Pass it as the first argument of the recipe to repeat the run. A run that leaves no files does not write it.

    Raises:
        ConfigError: `run_dir` cannot be written.

    Example:
        >>> fs.write_config(config)  # doctest: +SKIP
    """
    refuse_remote(config.run_dir, "run_dir", "give a local directory.")
    if config.kept_run_dir is None:
        return
    file, content = Path(config.run_dir) / CONFIG_FILE, config.to_yaml().encode()
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        if not has_content(file, content):
            write_atomically(file, content)
    except OSError as error:
        raise not_writable(config.run_dir, error) from error


def not_writable(run_dir: str, error: OSError) -> ConfigError:
    """The error for a run_dir that cannot be written."""
    return ConfigError(
        f"run_dir={run_dir} cannot be written: {error.strerror or error}. Set it to a writable directory."
    )
