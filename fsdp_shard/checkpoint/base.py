"""The settings of `checkpoint.*`. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

from fsdp_shard.errors import ConfigError
from fsdp_shard.settings import setting
from fsdp_shard.sizes import parse_size


@dataclass
class CheckpointConfig:
    """What a run keeps of itself, and how often. The last step is always kept."""

    layout: str = setting(
        "sharded",
        "sharded: one file per rank. gathered: a Hugging Face directory that any tool opens. Every rank writes its own "
        "part in both, so neither needs more memory or time.",
        choices=("sharded", "gathered"),
    )
    every: int = setting(0, "Steps between checkpoints; 0 keeps only the last step.", minimum=0)
    keep_last: int | None = setting(
        None,
        "Delete all but this many of the latest checkpoints; the best one is always kept. null: keep all.",
        minimum=1,
    )
    optimizer: bool = setting(True, "Keep the optimizer state too, which resuming needs.")
    max_shard_size: str = setting("5GB", "Largest file of a gathered checkpoint, such as 200MB or 5GB.")

    def check(self, prefix: str) -> None:
        """Refuse a size that cannot be read, or that nothing would use."""
        parse_size(self.max_shard_size, f"{prefix}max_shard_size")
        default = type(self).__dataclass_fields__["max_shard_size"].default
        if self.layout == "sharded" and self.max_shard_size != default:
            raise ConfigError(
                f"{prefix}max_shard_size={self.max_shard_size} is for {prefix}layout=gathered; with "
                f"{prefix}layout=sharded each rank writes one file."
            )
