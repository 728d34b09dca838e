"""Settings of an evaluation, and the checks that need no torch."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any, ClassVar

from fsdp_shard.checkpoint import Location, SourceSettings, locate
from fsdp_shard.data import CAUSAL, DataConfig, check_source, check_task
from fsdp_shard.errors import ConfigError
from fsdp_shard.inference import DispatchConfig
from fsdp_shard.utils import REQUIRED, Parsed, changed_settings, refuse_changed, require_package, setting

PERPLEXITY, LM_EVAL = "perplexity", "lm_eval"
WINDOWS, DOCUMENTS = "windows", "documents"


def parse_names(value: Any, setting: str) -> list[str]:
    """Parse the name of a task, or a list of names or patterns; raises ConfigError for anything else."""
    given = value if isinstance(value, list) else [value]
    if any(isinstance(name, (Mapping, list)) for name in given):
        raise ConfigError(f"{setting}={value} is not a list of names, such as [hellaswag, arc_easy].")
    return [str(name) for name in given if name not in (None, "")]


@dataclass
class PerplexityConfig:
    """Settings of `task=perplexity`: what is scored as one text, and the statistics over documents."""

    by: str = setting(
        WINDOWS,
        "windows: those of training's held-out evaluation, in which documents continue from window to window. "
        "documents: each document (a row, or what data.sample_by says) alone, whatever its length, with a row in "
        "RUN_DIR/documents.jsonl and a confidence interval over them.",
        choices=(WINDOWS, DOCUMENTS),
    )
    num_resamples: int = setting(
        10_000, "by=documents: resamples of documents for intervals, and permutations for p-values.", minimum=100
    )

    def check(self, prefix: str) -> None:
        """Raise ConfigError for a setting that would have no effect."""
        if self.by == WINDOWS:
            refuse_changed(self, ["num_resamples"], prefix, f"is for {prefix}by={DOCUMENTS}; leave it out.")


@dataclass
class LmEvalConfig:
    """Settings of `task=lm_eval`: which tasks of EleutherAI's lm-evaluation-harness, and how questions are asked."""

    # Any, as a single name on the command line is not a list.
    tasks: Any = setting(
        None,
        "The harness's tasks, groups or tags, such as [hellaswag, arc_easy]; * matches anything. Their questions are "
        "downloaded from the hub, except those of tasks in include_path.",
    )
    include_path: str | None = setting(
        None,
        "A directory with your own tasks, as YAML files.",
        warning="Python functions named in its YAML files are run; only for files you trust.",
    )
    num_fewshot: int | None = setting(
        None, "Number of solved examples before each question. Default: that of the task.", minimum=0
    )
    limit: int | None = setting(
        None, "Maximum number of questions of each task, for a quick check; not a figure to publish.", minimum=1
    )
    chat_template: bool = setting(False, "Ask each question through the model's chat template.")
    save_samples: bool = setting(
        False, "Write every question with the model's answers and their scores to RUN_DIR/samples/TASK.jsonl."
    )

    names = Parsed("tasks", parse_names)


@dataclass
class EvaluateSettings(SourceSettings):
    """The settings of `evaluate`: which model, which metric, on which text or questions."""

    # Required settings that are not needed with another setting.
    instead: ClassVar[dict[str, str]] = {"data.path": f"task={LM_EVAL}"}

    checkpoint: str = setting(
        REQUIRED, "A run or a step of it (RUN@best), a checkpoint of any format, a .gguf file, or a hub id."
    )
    task: str = setting(
        PERPLEXITY,
        "perplexity: how well the model predicts each token of data.path. lm_eval: how well it answers the questions "
        "of lm_eval.tasks (needs the extra `eval`).",
        choices=(PERPLEXITY, LM_EVAL),
    )
    against: str | None = setting(
        None,
        "task=perplexity: a second checkpoint, such as the model that `checkpoint` was tuned from, given like it. It "
        "is evaluated on the same tokens, and their difference is tested.",
    )
    stride: int | None = setting(
        None,
        "task=perplexity: tokens by which windows of data.sequence_length advance, as in transformers' guide to the "
        "perplexity of models with a fixed length; those that a window shares with the one before are only context. "
        "Default: windows as in training, which share nothing.",
        minimum=1,
    )
    data: DataConfig = field(default_factory=DataConfig)
    perplexity: PerplexityConfig = field(default_factory=PerplexityConfig)
    lm_eval: LmEvalConfig = field(default_factory=LmEvalConfig)
    batch_size: int = setting(8, "Windows, or questions, per batch.", minimum=1)
    dispatch: DispatchConfig = field(default_factory=DispatchConfig)

    @cached_property
    def source(self) -> Location:
        """What `checkpoint` leads to, located once."""
        return locate(self.checkpoint, base=self.base, config=self.config, tokenizer=self.tokenizer)

    @cached_property
    def other_source(self) -> Location | None:
        """What `against` leads to, located once."""
        return None if self.against is None else locate(self.against)

    @property
    def sources(self) -> list[Location]:
        """What `checkpoint` and `against` lead to."""
        return [self.source, *([self.other_source] if self.other_source else [])]

    def check(self, prefix: str) -> None:
        """Raise ConfigError for settings of the other task, and for lm_eval without names of tasks."""
        if self.task == LM_EVAL:
            for name in ("data", "perplexity"):
                self._refuse_section(name, PERPLEXITY, prefix)
            why = f"is for {prefix}task={PERPLEXITY}, not {self.task}; remove one of them."
            refuse_changed(self, ["against", "stride"], prefix, why)
            if not LmEvalConfig.names.of(self.lm_eval, f"{prefix}lm_eval."):
                raise ConfigError(
                    f"{prefix}task={LM_EVAL} needs the names of tasks: add {prefix}lm_eval.tasks=[hellaswag] or others "
                    f"(`lm_eval ls tasks` lists them)."
                )
            return
        self._refuse_section("lm_eval", LM_EVAL, prefix)
        self._check_texts(prefix)

    def _refuse_section(self, unused: str, other: str, prefix: str) -> None:
        section = getattr(self, unused)
        for name, value in changed_settings(section, [one.name for one in fields(section)]).items():
            if (unused, name, value) != ("data", "path", ""):  # which composing puts there
                raise ConfigError(
                    f"{prefix}{unused}.{name}={value} is for {prefix}task={other}, not {self.task}; remove one of them."
                )

    def _check_texts(self, prefix: str) -> None:
        """Raise ConfigError if windows cannot be laid over the data in the way that is asked for."""
        data, by = self.data, f"{prefix}perplexity.by={DOCUMENTS}"
        if self.perplexity.by == DOCUMENTS:
            why = f"lays documents into windows, and {by} scores each alone; remove one of them."
            refuse_changed(data, ["packing"], f"{prefix}data.", why)
            why = (
                f"holds out windows, and {by} scores documents; give the held-out documents by {prefix}data.eval_path."
            )
            refuse_changed(data, ["eval_fraction"], f"{prefix}data.", why)
        elif self.stride is not None and (data.packing or data.kind != "text"):
            rows = f"data.kind={data.kind}" if data.kind != "text" else "data.packing=true"
            raise ConfigError(
                f"{prefix}stride={self.stride} is for text that continues from window to window, and with "
                f"{prefix}{rows} each window has rows of its own; add {by}, which scores each row alone."
            )


@dataclass(frozen=True)
class Figures:
    """The result of an evaluation: text to print, and a row for result.json."""

    text: str
    row: Mapping[str, Any]


def check_inputs(settings: EvaluateSettings) -> None:
    """Raise DataError or ConfigError if the data cannot be read, or a package is missing; needs no torch."""
    if settings.task == PERPLEXITY:
        check_text(settings.data)
    else:
        require_package("lm_eval", "eval", "task=lm_eval", "set task=perplexity")


def check_text(data: DataConfig) -> None:
    """Raise DataError or ConfigError if the text to evaluate, as `open_perplexity` reads it, cannot be read."""
    if data.mixture:
        raise ConfigError(
            "data.mixture is for training on several texts; evaluate each of them separately, with data.path."
        )
    if data.streaming:
        raise ConfigError("data.streaming=true is for training: an evaluation reads all of data.path. Remove it.")
    check_task(CAUSAL, data)
    check_source(data, held_out=data.eval_path is not None)
