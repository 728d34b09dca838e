"""The `checkpoint.*` settings of a run, and those of conversions. Every command imports this, so it imports little."""

from dataclasses import dataclass

from fsdp_shard.checkpoint.remote.hub_push import HubTarget
from fsdp_shard.checkpoint.remote.store import check_remote
from fsdp_shard.distributed import LONGEST_TIMEOUT_SECONDS
from fsdp_shard.errors import ConfigError
from fsdp_shard.utils import REQUIRED, Parsed, parse_size, refuse_remote, setting

DEFAULT_SHARD_SIZE = "5GB"


@dataclass
class CheckpointConfig:
    """The content and frequency of a training run's checkpoints. The last step is always saved."""

    layout: str = setting(
        "sharded",
        "sharded: one file per rank. gathered: a Hugging Face directory that any tool can load. Each rank writes its "
        "own shards in both, so neither needs more memory or time.",
        choices=("sharded", "gathered"),
    )
    every: int = setting(0, "Number of steps between checkpoints; 0 saves only the last step.", minimum=0)
    asynchronous: bool = setting(
        True,
        "Save in the background. Needs host memory for a copy of tensors that are on a GPU, or not yet written when "
        "the next step changes them: at most a rank's shards of weights and optimizer state. false: training waits "
        "for the disk.",
    )
    timeout_seconds: float = setting(
        1800.0,
        "Timeout for the ranks to finish a save together, in seconds; after it the run fails.",
        above=0.0,
        maximum=LONGEST_TIMEOUT_SECONDS,
    )
    max_failures: int = setting(
        3,
        "Number of consecutive saves that may fail on a full or failing disk before the run stops. The last save of a "
        "run must succeed.",
        minimum=1,
    )
    keep_last: int | None = setting(
        None,
        "Number of latest checkpoints to keep; the best one is always kept. null: keep all.",
        minimum=1,
    )
    keep_every: int | None = setting(
        None, "With keep_last: also keep every step that is a multiple of this number.", minimum=1
    )
    keep_optimizer_last: int | None = setting(
        None,
        "Number of latest checkpoints whose optimizer state (twice the size of float32 weights) is kept; the others "
        "keep only their weights. null: keep all.",
        minimum=1,
    )
    verify: bool = setting(
        False, "Read each checkpoint back after it is saved, and stop if it differs from what was written."
    )
    verify_on_resume: bool = setting(
        True,
        "Compare a checkpoint with its digests before resuming from it; the ranks divide the reading. false: only "
        "check that all files exist and have the right size.",
    )
    save_best: bool = setting(
        True,
        "Also save the step with the lowest held-out loss so far (train.eval_every). When a later one is better, it is "
        "deleted, unless `every` would have saved it.",
    )
    remote: str | None = setting(
        None,
        "A directory on a remote store, such as s3://bucket/run, to which each checkpoint is uploaded in the "
        "background; keep_last and keep_every apply to it, too. A failed upload counts as a failed save "
        "(max_failures). If its latest checkpoint is later than that in run_dir, the run resumes from it. Any store "
        "that fsspec supports; credentials and endpoint come from the environment.",
    )
    optimizer: bool = setting(True, "Save the optimizer state, too, which resuming needs.")
    max_shard_size: str = setting(DEFAULT_SHARD_SIZE, "Largest file of a gathered checkpoint, such as 200MB or 5GB.")
    max_shard_bytes = Parsed("max_shard_size", parse_size)

    def check(self, prefix: str) -> None:
        """Raise ConfigError for settings that contradict each other or would have no effect."""
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
                    f"{prefix}keep_optimizer_last={self.keep_optimizer_last} cannot be combined with {prefix}remote, "
                    f"where a checkpoint is never changed; limit what is kept with {prefix}keep_last."
                )
        if self.layout == "sharded" and self.max_shard_size != DEFAULT_SHARD_SIZE:
            raise ConfigError(
                f"{prefix}max_shard_size={self.max_shard_size} is for {prefix}layout=gathered; with "
                f"{prefix}layout=sharded each rank writes one file."
            )


@dataclass(kw_only=True)
class SourceSettings:
    """Where to find files that a checkpoint lacks.

    Attributes:
        leaves_files: Whether the files of the command are left for the user, and so worth naming.
    """

    leaves_files = True  # not annotated, so it is not a setting

    config: str | None = setting(
        None,
        "For weights without config.json (torch DCP, rank files, a single file): the directory or hub id of their "
        "model, whose config is used, and whose tokenizer if they have none.",
    )
    tokenizer: str | None = setting(None, "The directory or hub id of the tokenizer, if it is not next to the config.")
    base: str | None = setting(
        None,
        "For an adapter (LoRA), which is merged into its base model: the path or hub id of the base, if it is not at "
        "the place named in adapter_config.json.",
    )


@dataclass
class ConvertSettings(SourceSettings):
    """The source of a conversion, its target, and the format to write."""

    source: str = setting(
        REQUIRED, "A checkpoint of any format, a run (its latest step), a step of it (RUN@best), or a hub id."
    )
    target: str = setting(REQUIRED, "The directory to write; it must not exist yet.")
    format: str = setting(
        "huggingface",
        "huggingface: a Hugging Face directory; sharded: one file per rank; dcp: torch.distributed.checkpoint.",
        choices=("huggingface", "sharded", "dcp"),
    )
    max_shard_size: str = setting(DEFAULT_SHARD_SIZE, "Largest file of format=huggingface, such as 200MB or 2GiB.")
    max_shard_bytes = Parsed("max_shard_size", parse_size)
    ranks: int | None = setting(
        None,
        "Number of ranks for which to write files, with format=sharded or dcp; for dcp, null means one.",
        minimum=1,
        maximum=16384,
    )
    nest: str | None = setting(
        None,
        "Keys for the tensors of format=dcp, with dots between them: model for programs that load "
        "{'model': state_dict}, as accelerate does; app.model for the AppState of torch's tutorial, saved as "
        "{'app': AppState(...)}. null: none, as torchtitan loads them.",
    )
    dtype: str = setting(
        "keep",
        "Dtype to which floating-point tensors are cast; 8-bit tensors keep theirs, and those that the model loads in "
        "float32 stay in it. Quantized weights are not cast.",
        choices=("keep", "float32", "bfloat16", "float16"),
    )
    dequantize: bool = setting(
        False,
        "Write quantized weights in floating point, without their scales: fp8 with block scales and fp4 experts, as in "
        "DeepSeek, and MXFP4, as in gpt-oss. In dtype, or else in that of config.json. Needed to run or train them.",
    )
    verify: bool = setting(True, "Read the target back and compare it with the written data.")
    sync: bool = setting(
        True,
        "Flush everything to the disk before the target gets its name, so that after a power failure it is complete or "
        "absent. false: leave that to the system, as cp does; not with overwrite.",
    )
    overwrite: bool = setting(False, "Replace an existing checkpoint at the target, once the new one is complete.")
    push_to: str | None = setting(
        None,
        "A repository of the Hugging Face hub, org/name, to which the target is pushed, with a model card generated "
        "from the run. If it does not exist, it is created as private. null: no push.",
    )
    push_public: bool = setting(False, "With push_to: create the repository public, or push to one that is public.")

    def check(self, prefix: str) -> None:
        """Raise ConfigError for settings that contradict each other or would have no effect."""
        refuse_remote(self.target, f"{prefix}target", "convert into a local directory and copy that.")
        if self.format == "sharded" and self.ranks is None:
            raise ConfigError(f"{prefix}ranks is not set: format=sharded writes one file per rank. Add ranks=N.")
        if self.format == "huggingface" and self.ranks is not None:
            raise ConfigError(
                f"{prefix}ranks={self.ranks} needs format=sharded or dcp; format=huggingface has no ranks."
            )
        if self.format != "huggingface" and self.max_shard_size != DEFAULT_SHARD_SIZE:
            raise ConfigError(
                f"{prefix}max_shard_size is for format=huggingface; format={self.format} writes one file per rank."
            )
        if self.nest is not None and (self.format != "dcp" or not all(self.nest.split("."))):
            raise ConfigError(
                f"{prefix}nest={self.nest!r} needs format=dcp and keys, such as nest=model or nest=app.model; leave it "
                "out for a state dict that is not nested."
            )
        self._check_push(prefix)
        if self.overwrite and not self.sync:
            raise ConfigError(
                f"{prefix}overwrite=true needs {prefix}sync=true: a power failure could destroy the new checkpoint "
                "after the old one is deleted. Give another target, or remove sync=false."
            )

    def _check_push(self, prefix: str) -> None:
        if self.push_to is None:
            if self.push_public:
                raise ConfigError(
                    f"{prefix}push_public=true needs {prefix}push_to=org/name; without it nothing is pushed."
                )
            return
        HubTarget(self.push_to).check(f"{prefix}push_to=")
        if self.format != "huggingface":
            raise ConfigError(
                f"{prefix}push_to={self.push_to} needs format=huggingface, which others can load, not {self.format}."
            )
