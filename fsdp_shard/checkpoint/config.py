"""The settings of `checkpoint.*` and of a conversion. Imports next to nothing: every command reads them."""

from __future__ import annotations

from dataclasses import dataclass

from fsdp_shard.checkpoint.remote.url import check_remote, refuse_remote
from fsdp_shard.errors import ConfigError
from fsdp_shard.utils import REQUIRED, parse_size, setting

DEFAULT_SHARD_SIZE = "5GB"


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
    asynchronous: bool = setting(
        True,
        "Save in the background, from a copy in host memory of what is on a GPU, or is not written when the next step "
        "changes it: at most a rank's part of weights and optimizer state. false: training waits for the disk.",
    )
    timeout_seconds: float = setting(
        1800.0, "A save in which a rank waits longer than this for the others fails, and with it the run.", above=0.0
    )
    max_failures: int = setting(
        3,
        "Saves in a row that a full or failing disk may prevent before the run stops. The last save of a run must "
        "succeed.",
        minimum=1,
    )
    keep_last: int | None = setting(
        None,
        "Delete all but this many of the latest checkpoints; the best one is always kept. null: keep all.",
        minimum=1,
    )
    keep_every: int | None = setting(
        None, "With keep_last: keep each step that this number divides for good.", minimum=1
    )
    keep_optimizer_last: int | None = setting(
        None,
        "Keep the optimizer state, twice the size of float32 weights, of this many of the latest checkpoints only; the "
        "others stay as weights. null: of all.",
        minimum=1,
    )
    verify: bool = setting(
        False, "Read each checkpoint back from the disk once it is saved, and stop if a byte is not what was written."
    )
    verify_on_resume: bool = setting(
        True,
        "Before a run goes on from a checkpoint, read all of it and compare it with its digests, each rank a part. "
        "false: only look whether all files are there in full.",
    )
    save_best: bool = setting(
        True,
        "Save each step with the lowest held-out loss so far (train.eval_every), too. When a later one is better, it "
        "is deleted, unless `every` asked for it.",
    )
    remote: str | None = setting(
        None,
        "A directory of a remote store, such as s3://bucket/run, that each saved checkpoint is uploaded to behind the "
        "training; what is kept there goes by keep_last and keep_every too. An upload that fails counts as a save that "
        "fails (max_failures). A run whose run_dir has no checkpoint as late goes on from there. Any store that fsspec "
        "has a package for; credentials and endpoint come from the environment.",
    )
    optimizer: bool = setting(True, "Keep the optimizer state too, which resuming needs.")
    max_shard_size: str = setting(DEFAULT_SHARD_SIZE, "Largest file of a gathered checkpoint, such as 200MB or 5GB.")

    def check(self, prefix: str) -> None:
        """Refuse a size that cannot be read, or that nothing would use."""
        parse_size(self.max_shard_size, f"{prefix}max_shard_size")
        if self.keep_every is not None and self.keep_last is None:
            raise ConfigError(
                f"{prefix}keep_every={self.keep_every} needs {prefix}keep_last: without it every step is kept."
            )
        if self.keep_optimizer_last is not None and not self.optimizer:
            raise ConfigError(
                f"{prefix}keep_optimizer_last={self.keep_optimizer_last} needs {prefix}optimizer=true: without it no "
                "checkpoint has an optimizer state."
            )
        if self.remote is not None:
            check_remote(self.remote, f"{prefix}remote")
            if self.keep_optimizer_last is not None:
                raise ConfigError(
                    f"{prefix}keep_optimizer_last={self.keep_optimizer_last} cannot be had with {prefix}remote: a "
                    f"checkpoint there is never changed. Bound what is kept by {prefix}keep_last."
                )
        if self.layout == "sharded" and self.max_shard_size != DEFAULT_SHARD_SIZE:
            raise ConfigError(
                f"{prefix}max_shard_size={self.max_shard_size} is for {prefix}layout=gathered; with "
                f"{prefix}layout=sharded each rank writes one file."
            )


@dataclass
class ConvertConfig:
    """What to convert, into what."""

    source: str = setting(REQUIRED, "A checkpoint of any format, a run directory (its latest step), or a hub id.")
    base: str | None = setting(
        None,
        "Of an adapter (LoRA), which is merged into it: the base model, where that is not where adapter_config.json "
        "says.",
    )
    target: str = setting(REQUIRED, "The directory to write; it must not exist yet.")
    format: str = setting(
        "huggingface",
        "huggingface: whole tensors; sharded: one file per rank; dcp: what torch.distributed.checkpoint.load reads.",
        choices=("huggingface", "sharded", "dcp"),
    )
    max_shard_size: str = setting(DEFAULT_SHARD_SIZE, "Largest file of format=huggingface, such as 200MB or 2GiB.")
    ranks: int | None = setting(
        None, "Number of ranks that format=sharded or dcp writes for; for dcp null means one.", minimum=1, maximum=16384
    )
    nest: str | None = setting(
        None,
        "Key to put the tensors of format=dcp under: model for what loads {'model': state_dict}, as accelerate does. "
        "null: none.",
    )
    dtype: str = setting(
        "keep",
        "Cast floating-point tensors to this type; those of 8 bits keep theirs.",
        choices=("keep", "float32", "bfloat16", "float16"),
    )
    verify: bool = setting(True, "Read the target back and compare it with what was written.")
    sync: bool = setting(
        True,
        "Have everything on the disk before the target gets its name, so that a power cut leaves it whole or absent. "
        "false: leave that to the system, as cp does; not with overwrite.",
    )
    overwrite: bool = setting(False, "Replace an existing checkpoint at the target, once the new one is complete.")

    def check(self, prefix: str) -> None:
        """Rules that tie several settings together."""
        parse_size(self.max_shard_size, f"{prefix}max_shard_size")
        refuse_remote(self.target, f"{prefix}target", "convert into a directory here and copy that.")
        if self.format == "sharded" and self.ranks is None:
            raise ConfigError(f"{prefix}ranks is not set: format=sharded writes one file per rank. Add ranks=N.")
        if self.format == "huggingface" and self.ranks is not None:
            raise ConfigError(
                f"{prefix}ranks={self.ranks} needs format=sharded or dcp; format=huggingface has no ranks."
            )
        if self.format != "huggingface" and self.max_shard_size != DEFAULT_SHARD_SIZE:
            raise ConfigError(
                f"{prefix}max_shard_size is of format=huggingface; format={self.format} has one file per rank."
            )
        if self.nest is not None and (self.format != "dcp" or not self.nest):
            raise ConfigError(f"{prefix}nest={self.nest!r} needs format=dcp and a key, such as nest=model.")
        if self.overwrite and not self.sync:
            raise ConfigError(
                f"{prefix}overwrite=true needs {prefix}sync=true: a power cut could take the new checkpoint after the "
                "old one is gone. Give another target, or leave sync as it is."
            )
