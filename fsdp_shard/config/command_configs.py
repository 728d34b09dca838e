"""The complete config of each command: common settings, its own, and those of the rooms that it uses."""

import re
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from datetime import datetime
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from fsdp_shard.checkpoint import DEFAULT_SHARD_SIZE, CheckpointConfig, ConvertSettings, Location, locate
from fsdp_shard.config.config_yaml import as_yaml
from fsdp_shard.data import DataConfig
from fsdp_shard.distributed import LaunchConfig, is_joined_rank
from fsdp_shard.errors import ConfigError
from fsdp_shard.evaluation import EvaluateSettings
from fsdp_shard.inference import DispatchConfig, GenerateSettings, GenerationSettings
from fsdp_shard.models import ModelConfig
from fsdp_shard.planning import (
    AutoDeviceConfig,
    DeviceConfig,
    PlannedLaunchConfig,
    PlanSettings,
)
from fsdp_shard.sharding import WRAPPERS, ShardConfig
from fsdp_shard.training import (
    OBJECTIVES,
    OPTIMIZERS,
    AdapterConfig,
    LoraConfig,
    ObjectiveConfig,
    OptimConfig,
    TrainConfig,
)
from fsdp_shard.utils import derived, refuse_changed, refuse_remote, setting, walk

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from fsdp_shard.distributed import DistributedContext

Ranks = Literal["started", "planned", "one"]


def _resolve_now(found: re.Match[str]) -> str:
    return datetime.now().strftime(found[1].replace("%S", "%S-%f"))


def default_run_dir(command: str) -> str:
    """The default of `run_dir`; `now` is a Hydra resolver whose value is constant within a run.

    Hydra resolves it on the command line, `RunConfig.__post_init__` in a config that is built in Python.
    """
    return setting(
        f"outputs/{command}/${{now:%Y-%m-%d_%H-%M-%S}}", "Output directory of the run, created if it does not exist."
    )


_FOR_LESS_MEMORY = "Smaller batches need less of it, and a smaller dispatch.max_memory leaves more of it for them."


@dataclass
class RunConfig:
    """The settings of every command.

    Attributes:
        command: The command of this config.
        rank_mode: The meaning of launch.ranks: ranks to start, ranks to plan for, or one if the command uses a single
            process.
        unused: Settings and sections that the command does not use: `--help` omits them, and setting one is an error.
        writes: Whether the command writes a run_dir, with its config.yaml.
        takes_training_run: Whether run_dir may be that of a training run, whose files another command would replace.
        headline: Figures of result.json that the table of a sweep shows.
        for_less_memory: What to do if a rank is out of memory, in one sentence.
        per_machine: Settings that may differ between the machines of a run, besides run_dir, debug and launch.
        is_default_run_dir: Whether run_dir was not given.
        explicit_settings: Names of the settings and groups on the command line.
        own_recipe: The file name of the recipe, unless it is the shipped one.
    """

    command: ClassVar[str] = ""
    rank_mode: ClassVar[Ranks] = "one"
    unused: ClassVar[tuple[str, ...]] = ("launch",)
    writes: ClassVar[bool] = True
    takes_training_run: ClassVar[bool] = False
    headline: ClassVar[tuple[str, ...]] = ()
    for_less_memory: ClassVar[str] = "Free some of it, or use a machine that has more."
    per_machine: ClassVar[tuple[str, ...]] = (
        "data.cache_dir",
        "data.workers",
        "dispatch.max_memory",
        "dispatch.prefetch_blocks",
        "objective.reference_max_memory",
        "objective.teacher_max_memory",
    )

    run_dir: str = default_run_dir("run")
    seed: int = setting(0, "Seed of all random number generators.", minimum=0)
    debug: bool = setting(False, "Show tracebacks of errors and the messages of torch's launcher.")
    launch: LaunchConfig = field(default_factory=LaunchConfig)

    is_default_run_dir = False  # not annotated, so it is not a setting
    explicit_settings = frozenset[str]()
    own_recipe = ""

    def __post_init__(self) -> None:
        """Resolve the date in the default of `run_dir`, with microseconds: configs may be built within a second."""
        if self.run_dir == type(self).run_dir:
            self.run_dir = re.sub(r"\$\{now:(.*?)\}", _resolve_now, self.run_dir)

    def check_run(self) -> None:
        """Raise ConfigError for a remote run_dir, or a given setting that the command would ignore."""
        refuse_remote(self.run_dir, "run_dir", "set checkpoint.remote to have what finetune saves uploaded.")
        defaults = {name: value for name, _, value in walk(type(self)())}
        unused = [(name, value) for name, _, value in walk(self) if not is_used(type(self), name)]
        if given := [f"{name}={value}" for name, value in unused if value != defaults[name]]:
            raise ConfigError(f"{', '.join(given)} has no effect: {self.command} does not use it. Remove it.")

    @property
    def kept_run_dir(self) -> str | None:
        """The run_dir, or None for a run that leaves no files and only prints its results."""
        return self.run_dir if self.writes and not (self.is_default_run_dir and self._only_prints) else None

    @property
    def _only_prints(self) -> bool:
        return False

    def to_yaml(self) -> str:
        """All settings, without secrets, and a defaults list with the dataclass of each group."""
        chosen = {
            member.name: option
            for member in fields(self)
            for option, node in OPTIONS.get(member.name, {}).items()
            if type(getattr(self, member.name)) is node
        }
        return as_yaml(self, command_of(type(self)), chosen, self.own_recipe)


@dataclass
class FinetuneConfig(RunConfig):
    """Fine-tune a model under FSDP or DDP: causal, masked, encoder-decoder or classifier.

    Example:
        >>> @dataclasses.dataclass  # doctest: +SKIP
        ... class MyConfig(fs.FinetuneConfig):
        ...     gamma: float = 2.0  # as gamma=3 on the command line of a copied recipe
    """

    # `shard`, `adapter` and `optim` have the common base type of their group's options; conf/finetune.yaml selects one.
    command: ClassVar[str] = "finetune"
    headline: ClassVar[tuple[str, ...]] = ("final_loss", "best_loss", "tokens_per_second", "peak_memory_bytes")
    for_less_memory: ClassVar[str] = (
        "`fsdp-shard plan` with the same settings (it names those to leave out) shows what the memory is for, and with "
        "device.memory=SIZE, which settings need less."
    )
    rank_mode: ClassVar[Ranks] = "started"
    unused: ClassVar[tuple[str, ...]] = ()
    takes_training_run: ClassVar[bool] = True

    run_dir: str = default_run_dir("finetune")
    resume: str = setting(
        "auto",
        "auto: resume from the latest checkpoint in run_dir, if there is one; never: start from scratch; or the PATH "
        "of a run or checkpoint to resume from, or RUN@step-400.",
    )
    loss: str | None = setting(
        None,
        "MODULE:FUNCTION of your own loss instead of the cross-entropy, in an installed module or a file in the "
        "working directory. It receives the model's output and the batch (a dict; labels are already shifted, and "
        "-100 is ignored), and returns the sum of the losses and their count.",
    )
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    shard: ShardConfig = field(default_factory=ShardConfig)
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    adapter: AdapterConfig = field(default_factory=AdapterConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)

    @derived("model.path", "model.gguf_file")
    def source(self) -> Location:
        """The location that `model.path` leads to, resolved once."""
        return locate(self.model.path, self.model.gguf_file)

    def load_dispatched(
        self,
        source: Location,
        max_memory: Any,
        context: "DistributedContext",
        log: Callable[[str], object],
        dtype: str = "keep",
    ) -> "PreTrainedModel":
        """Load a model that is not trained, on each rank, over GPU, CPU and disk within the budgets `max_memory`.

        Args:
            source: The model.
            max_memory: Budgets as in `dispatch.max_memory`; with several GPUs, each rank uses its own.
            context: The ranks.
            log: Receives a line about the placement of the model.
            dtype: The dtype to load; `keep` for that of its weights.

        Raises:
            ConfigError: The budgets name GPUs, but not those of all ranks on this machine.
            PlanError, CheckpointError, ModelError: The model does not fit, or cannot be read.
        """
        from fsdp_shard.inference import dispatch_model
        from fsdp_shard.models import load_config

        trust = self.model.trust_remote_code
        settings = DispatchConfig(max_memory=max_memory, dtype=dtype, trust_remote_code=trust)
        config = load_config(source.config_directory, trust)
        return dispatch_model(source, config, settings, log=log, context=context.without_tensor_parallel())

    def check(self, prefix: str) -> None:
        """Raise ConfigError for settings that contradict each other.

        What `finetune` alone can refuse is here; `check_combination` of `training` has what `plan` refuses, too.
        """
        _check_budgets(self.objective, prefix)
        _check_restarts(self.launch, prefix, saves_optimizer=self.checkpoint.optimizer)
        if not self.adapter.trains_all and self.checkpoint.max_shard_size != DEFAULT_SHARD_SIZE:
            raise ConfigError(
                f"{prefix}checkpoint.max_shard_size={self.checkpoint.max_shard_size} has no effect with an adapter, "
                f"which peft loads from a single file; remove it."
            )
        if self.train.epochs is not None and self.data.mixture:
            raise ConfigError(
                f"{prefix}train.epochs={self.train.epochs:g} cannot be combined with {prefix}data.mixture, because "
                f"each source of a mixture has epochs of its own; set {prefix}train.steps instead."
            )
        if self.loss is not None and self.objective.name != "sft":
            raise ConfigError(
                f"{prefix}loss={self.loss} replaces the cross-entropy of objective=sft, and objective="
                f"{self.objective.name} has a loss of its own; remove one of them."
            )
        if self.loss is not None and self.model.chunked_loss is True:
            raise ConfigError(
                f"{prefix}model.chunked_loss=true is for the cross-entropy, and {prefix}loss={self.loss} needs whole "
                f"logits; remove one of them."
            )


def _check_budgets(objective: ObjectiveConfig, prefix: str) -> None:
    """Raise ConfigError if the memory for a teacher or a reference is malformed."""
    for of in ("teacher", "reference"):
        budgets = DispatchConfig(max_memory=getattr(objective, f"{of}_max_memory", None))
        DispatchConfig.budgets.of(budgets, f"{prefix}objective.{of}_")


def _check_restarts(launch: LaunchConfig, prefix: str, *, saves_optimizer: bool) -> None:
    """Raise ConfigError if ranks that restart would miss the optimizer state."""
    if not saves_optimizer and (launch.max_restarts or launch.is_elastic):
        name = "max_restarts" if launch.max_restarts else "nodes"
        raise ConfigError(
            f"{prefix}launch.{name}={getattr(launch, name)} resumes from the last checkpoint, which needs the "
            f"optimizer state that {prefix}checkpoint.optimizer=false leaves out; remove one of them."
        )


@dataclass
class ConvertConfig(RunConfig, ConvertSettings):
    """Write the weights of any checkpoint in another layout, file size or dtype.

    Example:
        >>> fs.ConvertConfig(source="outputs/run", target="model").max_shard_size
        '5GB'
    """

    command: ClassVar[str] = "convert"
    headline: ClassVar[tuple[str, ...]] = ("num_bytes", "seconds")
    unused: ClassVar[tuple[str, ...]] = ("seed", "launch")

    run_dir: str = default_run_dir("convert")


@dataclass
class EvaluateConfig(RunConfig, EvaluateSettings):
    """Evaluate a checkpoint: perplexity, tasks of lm-evaluation-harness, classes, rewards, generated answers, or speed.

    Several ranks each load the model, and divide the batches.

    Example:
        >>> fs.EvaluateConfig(checkpoint="outputs/run@best").task
        'perplexity'
    """

    command: ClassVar[str] = "evaluate"
    headline: ClassVar[tuple[str, ...]] = (
        *("perplexity", "loss", "first_token_seconds", "prefill_tokens_per_second", "decode_tokens_per_second"),
        *("accuracy", "mean_margin", "f1_macro", "exact_match", "f1", "rougeL", "wer", "seconds"),
    )
    for_less_memory: ClassVar[str] = _FOR_LESS_MEMORY
    rank_mode: ClassVar[Ranks] = "started"
    unused: ClassVar[tuple[str, ...]] = ()

    run_dir: str = default_run_dir("evaluate")

    def check(self, prefix: str) -> None:
        """Raise ConfigError for a seed or device without effect, in addition to the checks of the settings."""
        super().check(prefix)
        _refuse_device_of_one_process(self.launch, prefix)
        if self.perplexity.by != "documents" and self.task in ("perplexity", "lm_eval"):
            why = (
                f"has no effect: it draws documents for intervals, with {prefix}perplexity.by=documents, the rows of "
                f"{prefix}task=classification, reward and generation, and the prompts of {prefix}task=speed. Remove it."
            )
            refuse_changed(self, ["seed"], prefix, why)


def _refuse_device_of_one_process(launch: LaunchConfig, prefix: str) -> None:
    """Raise ConfigError for `launch.device` where a single process dispatches the model by `dispatch.device_map`."""
    if launch.device != "auto" and launch.ranks == launch.max_nodes == 1 and not is_joined_rank():
        raise ConfigError(
            f"{prefix}launch.device={launch.device} is for several ranks; for one process set "
            f"{prefix}dispatch.device_map, such as cpu, or remove it."
        )


@dataclass
class GenerateConfig(RunConfig, GenerateSettings):
    """Generate text from a checkpoint, with its blocks dispatched over GPUs, CPU and disk.

    Several ranks each load the model, and divide the prompts.

    Example:
        >>> fs.GenerateConfig(checkpoint="outputs/run", prompt="Once").generation.max_new_tokens
        64
    """

    command: ClassVar[str] = "generate"
    headline: ClassVar[tuple[str, ...]] = ("num_new_tokens", "tokens_per_second", "peak_memory_bytes")
    for_less_memory: ClassVar[str] = _FOR_LESS_MEMORY
    rank_mode: ClassVar[Ranks] = "started"
    unused: ClassVar[tuple[str, ...]] = ("dispatch.schedule",)  # each token needs the previous one

    run_dir: str = default_run_dir("generate")

    def check(self, prefix: str) -> None:
        """Raise ConfigError for a seed or device without effect, in addition to the checks of the settings."""
        super().check(prefix)
        _refuse_device_of_one_process(self.launch, prefix)
        if not self.generation.do_sample:
            why = f"has no effect while {prefix}generation.do_sample=false; add {prefix}generation.do_sample=true, or"
            refuse_changed(self, ["seed"], prefix, f"{why} remove it.")

    @property
    def _only_prints(self) -> bool:
        return self.prompts is None and self.output is None


@dataclass
class PlanConfig(RunConfig, PlanSettings):
    """Plan the memory that each rank of a run would need, from the config alone.

    Example:
        >>> fs.PlanConfig().train.micro_batch_size
        1
    """

    command: ClassVar[str] = "plan"
    headline: ClassVar[tuple[str, ...]] = ("peak_bytes", "fits")
    rank_mode: ClassVar[Ranks] = "planned"
    takes_training_run: ClassVar[bool] = True
    # The activations of fused kernels cannot be measured, batches are not planned, and no ranks are started.
    unused: ClassVar[tuple[str, ...]] = (
        *("seed", "model.kernels", "dispatch.schedule", "launch.timeout_seconds", "launch.max_restarts"),
        *("launch.grace_seconds", "launch.numa_binding"),
    )

    run_dir: str = default_run_dir("plan")
    launch: PlannedLaunchConfig = field(default_factory=PlannedLaunchConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    shard: ShardConfig = field(default_factory=ShardConfig)
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    adapter: AdapterConfig = field(default_factory=AdapterConfig)
    train: TrainConfig = field(default_factory=TrainConfig)

    @property
    def _only_prints(self) -> bool:
        return True

    @derived("model.path", "model.gguf_file")
    def source(self) -> Location:
        """The location that `model.path` leads to, resolved once; weights of a hub id are not downloaded."""
        return locate(self.model.path, self.model.gguf_file, fetch_weights=False)

    def check(self, prefix: str) -> None:
        """Raise ConfigError for what `finetune` refuses about ranks and budgets, after the checks of the settings."""
        super().check(prefix)
        _check_budgets(self.objective, prefix)
        _check_restarts(self.launch, prefix, saves_optimizer=self.checkpoint.optimizer)


@dataclass
class DoctorConfig(FinetuneConfig):
    """Dry run of finetune: report the problems that it would hit with these settings.

    Example:
        >>> fs.DoctorConfig().resume
        'auto'
    """

    command: ClassVar[str] = "doctor"
    rank_mode: ClassVar[Ranks] = "planned"
    writes: ClassVar[bool] = False

    model: ModelConfig = field(default_factory=lambda: ModelConfig(path=""))
    data: DataConfig = field(default_factory=lambda: DataConfig(path=""))


COMMANDS: dict[str, type[RunConfig]] = {
    schema.command: schema
    for schema in (FinetuneConfig, ConvertConfig, EvaluateConfig, GenerateConfig, PlanConfig, DoctorConfig)
}

# Group -> option -> its dataclass; YAML files in conf/GROUP/ are options, too. There can be no group `checkpoint`:
# Hydra would read generate's `checkpoint=PATH` as an option of it.
OPTIONS: dict[str, dict[str, type]] = {
    "shard": dict(WRAPPERS),
    "objective": dict(OBJECTIVES),
    "optim": dict(OPTIMIZERS),
    "adapter": {"none": AdapterConfig, "lora": LoraConfig},
    "train": {"default": TrainConfig},
    "device": {"auto": AutoDeviceConfig, "custom": DeviceConfig},
    "dispatch": {"default": DispatchConfig},
    "generation": {"default": GenerationSettings},
}


def is_used(schema: type[RunConfig], name: str) -> bool:
    """Whether the command reads the setting with this dotted name."""
    return not any(name == unused or name.startswith(f"{unused}.") for unused in schema.unused)


def command_of(schema: type) -> str:
    """The command of the config `schema`: its own, or that of the class that it extends."""
    if command := getattr(schema, "command", ""):
        return str(command)
    raise TypeError(f"{schema.__name__} must be, or extend, the config of a command (fsdp_shard.config)")
