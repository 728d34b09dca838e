"""The settings of a run as they are recorded, in `run_config.yaml` of its steps and `config.yaml` of its directory."""

from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from fsdp_shard import checkpoint
from fsdp_shard.errors import CheckpointError
from fsdp_shard.utils import read_bounded, run_limited


def read_settings(path: Path) -> dict[str, Any] | None:
    """Read recorded settings; None if there is no such file. Raises CheckpointError if it is damaged."""
    if not checkpoint.has_file(path.parent, path.name):
        return None
    return parse_settings(read_bounded(checkpoint.member(path.parent, path.name), "settings_bytes"), str(path))


def parse_settings(content: bytes, what: str) -> dict[str, Any]:
    """Parse settings; their `defaults`, a list, become the choice of each group.

    Raises:
        CheckpointError: They are damaged; `what` names them.
    """
    # YAML repeats and nests what it likes, and its reader takes the square of the time for that.
    return run_limited(lambda: _parse(content, what), f"reading the settings in {what}", error=CheckpointError)


def _parse(content: bytes, what: str) -> dict[str, Any]:
    try:
        document: Any = OmegaConf.to_container(OmegaConf.create(content.decode()), resolve=False)
        groups = [choice for choice in document["defaults"] if isinstance(choice, dict)]
        return {**document, "defaults": {group: option for choice in groups for group, option in choice.items()}}
    except Exception as error:  # YAML, OmegaConf and a file that is no map have no error in common
        raise CheckpointError(
            f"{what} is damaged: it is not the settings of a run ({type(error).__name__})."
        ) from error
