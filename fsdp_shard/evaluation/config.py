"""Evaluation settings, and the checks that need no torch."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, ClassVar

from fsdp_shard.checkpoint import Location, locate
from fsdp_shard.data import (
    PAIRS,
    ROWS,
    DataConfig,
    check_source,
    check_task,
    open_source,
    refuse_unread,
)
from fsdp_shard.errors import ConfigError
from fsdp_shard.evaluation.scored_rows.config import ScoringConfig
from fsdp_shard.inference import CheckpointSettings, DispatchConfig
from fsdp_shard.models import CAUSAL, SEQUENCE_CLASSIFICATION
from fsdp_shard.utils import Parsed, derived, non_default_settings, refuse_changed, require_package, setting

PERPLEXITY, LM_EVAL, SPEED = "perplexity", "lm_eval", "speed"
CLASSIFICATION, REWARD, GENERATION = "classification", "reward", "generation"
TASKS = (PERPLEXITY, LM_EVAL, CLASSIFICATION, REWARD, GENERATION, SPEED)
SCORED_ROWS = (CLASSIFICATION, REWARD, GENERATION)
WINDOWS, DOCUMENTS = "windows", "documents"

# The tasks that use a setting or a section; with any other task it is an error.
_TASKS_OF: dict[str, tuple[str, ...]] = {
    "data": (PERPLEXITY, *SCORED_ROWS),
    "perplexity": (PERPLEXITY,),
    "against": (PERPLEXITY,),
    "stride": (PERPLEXITY,),
    "lm_eval": (LM_EVAL,),
    "scoring": SCORED_ROWS,
    "batch_size": (PERPLEXITY, LM_EVAL, *SCORED_ROWS),
    "speed": (SPEED,),
}
_MAX_SIZE = 1 << 20  # maximum of a batch and of a context


def parse_names(value: Any, setting: str) -> list[str]:
    """Parse a task name, or a list of names or patterns; raises ConfigError for anything else."""
    given = value if isinstance(value, list) else [value]
    if any(isinstance(name, (Mapping, list)) for name in given):
        raise ConfigError(f"{setting}={value} is not a list of names, such as [hellaswag, arc_easy].")
    return [str(name) for name in given if name not in (None, "")]


def parse_counts(value: Any, setting: str) -> list[int]:
    """Parse a positive integer or a list of them, without duplicates, ascending; raises ConfigError for anything else.

    None, which leaves the choice to the program, gives an empty list.
    """
    if value is None:
        return []
    given = value if isinstance(value, list) else [value]
    if not given or any(type(count) is not int or not 1 <= count <= _MAX_SIZE for count in given):
        raise ConfigError(
            f"{setting}={value} is not a list of whole numbers from 1 to {_MAX_SIZE:,}, such as [1, 8]; correct it."
        )
    return sorted(set(given))


@dataclass
class PerplexityConfig:
    """Settings of `task=perplexity`: the scored texts, and the statistics over documents."""

    by: str = setting(
        WINDOWS,
        "windows: as in training's held-out evaluation, where documents continue from window to window. "
        "documents: each document (a row, or as set by data.sample_by) on its own, at any length, with a row in "
        "RUN_DIR/documents.jsonl and a confidence interval over documents.",
        choices=(WINDOWS, DOCUMENTS),
    )
    num_resamples: int = setting(
        10_000, "by=documents: resamples of documents for intervals, and permutations for p-values.", minimum=100
    )

    def check(self, prefix: str) -> None:
        """Raise ConfigError for a setting without effect."""
        if self.by == WINDOWS:
            refuse_changed(self, ["num_resamples"], prefix, f"is for {prefix}by={DOCUMENTS}; remove it.")


@dataclass
class LmEvalConfig:
    """Settings of `task=lm_eval`: the tasks of EleutherAI's lm-evaluation-harness, and how questions are asked."""

    # Any, because a single name on the command line is not a list.
    tasks: Any = setting(
        None,
        "The harness's tasks, groups or tags, such as [hellaswag, arc_easy]; * matches anything. Their questions are "
        "downloaded from the hub, except for tasks in include_path, and for `everyday`: 110 multiple-choice questions "
        "about everyday things with four choices, which are part of fsdp-shard.",
    )
    include_path: str | None = setting(
        None,
        "A directory with your own tasks as YAML files.",
        warning="Python functions named in its YAML files are run; only for files you trust.",
    )
    num_fewshot: int | None = setting(
        None, "Number of solved examples before each question. Default: the task's own.", minimum=0
    )
    limit: int | None = setting(
        None, "Maximum number of questions per task, for a quick check; do not publish such figures.", minimum=1
    )
    chat_template: bool = setting(False, "Format each question with the model's chat template.")
    save_samples: bool = setting(
        False, "Write every question with the model's answers and their scores to RUN_DIR/samples/TASK.jsonl."
    )

    cache: bool = setting(
        False,
        "Let the harness cache each answer in RUN_DIR/lm_eval_cache, so that a killed evaluation can continue.",
        warning="The files in lm_eval_cache are pickles; only for a run directory of your own.",
    )

    names = Parsed("tasks", parse_names)


@dataclass
class SpeedConfig:
    """Settings of `task=speed`: batch sizes, prompt lengths, and repetitions."""

    # Any, because a single number on the command line is not a list.
    batch_sizes: Any = setting([1, 8], "Numbers of texts to generate at once, such as [1, 8].")
    context_lengths: Any = setting(
        None,
        "Prompt lengths in tokens, such as [128, 1024], each measured with each batch size. Default: 128 and 1,024, or "
        "the model's context minus new_tokens if that is less than 128. Prompts that would exceed the context with "
        "new_tokens are skipped with a message.",
    )
    new_tokens: int = setting(
        32,
        "Number of tokens to generate per text, whatever they are. The first one belongs to the prefill.",
        minimum=2,
    )
    repeats: int = setting(3, "Number of measurements per size, after one that is not counted.", minimum=1)

    batches = Parsed("batch_sizes", parse_counts)
    contexts = Parsed("context_lengths", parse_counts)

    def check(self, prefix: str) -> None:
        """Raise ConfigError if there is no batch to measure."""
        if not self.batches:
            raise ConfigError(f"{prefix}batch_sizes={self.batch_sizes} names no size; give a list such as [1, 8].")


@dataclass
class EvaluateSettings(CheckpointSettings):
    """The settings of `evaluate`: the model, the metric, and the text or questions."""

    # Required settings that another setting makes unnecessary.
    instead: ClassVar[dict[str, tuple[str, ...]]] = {"data.path": (f"task={LM_EVAL}|{SPEED}", "data.eval_path")}

    task: str = setting(
        PERPLEXITY,
        "perplexity: how well the model predicts each token of data.path. lm_eval: how well it answers the questions "
        "of lm_eval.tasks (needs the extra `eval`). classification: how often a classifier predicts a text's label. "
        "reward: how often a reward model gives the better answer of a pair the higher reward. "
        "generation: how well generated answers match those in the data, by scoring.metrics. speed: generation speed "
        "by batch size and prompt length, and the memory required.",
        choices=TASKS,
    )
    against: str | None = setting(
        None,
        "task=perplexity: a second checkpoint, such as the base model of `checkpoint`, in the same form. It is "
        "evaluated on the same tokens, and the difference is tested for significance.",
    )
    stride: int | None = setting(
        None,
        "task=perplexity: tokens by which windows of data.sequence_length advance, as in transformers' guide to the "
        "perplexity of fixed-length models; tokens that a window shares with the previous one serve only as context. "
        "Default: windows without overlap, as in training.",
        minimum=1,
    )
    data: DataConfig = field(default_factory=DataConfig)
    perplexity: PerplexityConfig = field(default_factory=PerplexityConfig)
    lm_eval: LmEvalConfig = field(default_factory=LmEvalConfig)
    scoring: ScoringConfig = field(default_factory=ScoringConfig)
    speed: SpeedConfig = field(default_factory=SpeedConfig)
    batch_size: int = setting(8, "Windows, questions, texts, pairs or prompts per batch.", minimum=1)
    dispatch: DispatchConfig = field(default_factory=DispatchConfig)

    @derived("against")
    def other_source(self) -> Location | None:
        """The located `against`, located once."""
        return None if self.against is None else locate(self.against)

    @property
    def sources(self) -> list[Location]:
        """The located `checkpoint` and `against`."""
        return [self.source, *([self.other_source] if self.other_source else [])]

    def check(self, prefix: str) -> None:
        """Raise ConfigError for settings of other tasks, and for conflicting settings of the task."""
        self._refuse_others(prefix)
        if self.task != PERPLEXITY:
            why = f"is for {prefix}task={PERPLEXITY}, not {self.task}; remove one of them."
            refuse_changed(self.dispatch, ["schedule"], f"{prefix}dispatch.", why)
        if self.task == PERPLEXITY:
            self._check_texts(prefix)
        elif self.task == LM_EVAL and not LmEvalConfig.names.of(self.lm_eval, f"{prefix}lm_eval."):
            raise ConfigError(
                f"{prefix}task={LM_EVAL} needs the names of tasks: add {prefix}lm_eval.tasks=[hellaswag] or others "
                f"(`lm_eval ls tasks` lists them)."
            )
        elif self.task in SCORED_ROWS:
            self._check_rows(prefix)

    def _refuse_others(self, prefix: str) -> None:
        """Raise ConfigError for a setting that only other tasks use."""
        for name, tasks in _TASKS_OF.items():
            for key, value in () if self.task in tasks else self._non_default_settings(name):
                *most, last = tasks
                listed = f"{', '.join(most)} or {last}" if most else last
                raise ConfigError(
                    f"{prefix}{key}={value} is for {prefix}task={listed}, not {self.task}; remove one of them."
                )

    def _non_default_settings(self, name: str) -> list[tuple[str, Any]]:
        """The setting `name`, or the section's settings, that differ from the default: names and values."""
        section = getattr(self, name)
        if not is_dataclass(section):
            return list(non_default_settings(self, [name]).items())
        changed = non_default_settings(section, [one.name for one in fields(section)])
        if name == "data" and changed.get("path") == "":  # added by composing
            del changed["path"]
        return [(f"{name}.{key}", value) for key, value in changed.items()]

    def _check_texts(self, prefix: str) -> None:
        """Raise ConfigError if the data cannot be divided into windows as requested."""
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

    def _check_rows(self, prefix: str) -> None:
        """Raise ConfigError for data that the task does not accept, and for settings without effect on it."""
        data, why = self.data, f"has no effect with {prefix}task={self.task}; remove it."
        held_out = f"holds out rows in training; give the rows of {prefix}task={self.task} as {prefix}data.path."
        refuse_changed(data, ["eval_fraction"], f"{prefix}data.", held_out)
        if self.task == REWARD and data.kind != "preference":
            raise ConfigError(
                f"{prefix}task={REWARD} compares pairs of answers, and {prefix}data.kind={data.kind} has none; set "
                f"{prefix}data.kind=preference, and give rows with a chosen and a rejected answer."
            )
        if self.task == REWARD:
            refuse_changed(data, ["packing"], f"{prefix}data.", why)
        if self.task in (CLASSIFICATION, REWARD):
            refuse_changed(self.scoring, ["metrics", "max_new_tokens"], f"{prefix}scoring.", why)
            return
        ScoringConfig.asked.of(self.scoring, f"{prefix}scoring.")
        if data.kind == "text":
            raise ConfigError(
                f"{prefix}task={GENERATION} needs prompts with answers: set {prefix}data.kind=pairs, instruction or "
                f"chat."
            )
        # Prompts are complete, and tokenized as they are read.
        names = ["sequence_length", "target_length", "packing", "workers", "cache_dir"]
        refuse_changed(data, names, f"{prefix}data.", why)


@dataclass(frozen=True)
class Figures:
    """The result of an evaluation: text to print, and a row for result.json."""

    text: str
    row: Mapping[str, Any]


def check_inputs(settings: EvaluateSettings) -> None:
    """Raise DataError or ConfigError if the data cannot be read, or a package is missing; needs no torch."""
    if settings.task in (PERPLEXITY, GENERATION):
        settings.scoring.check_packages()
        check_text(settings.data)
    elif settings.task == CLASSIFICATION:
        check_text(settings.data, SEQUENCE_CLASSIFICATION)
    elif settings.task == REWARD:
        check_text(settings.data, SEQUENCE_CLASSIFICATION, PAIRS)
    elif settings.task == LM_EVAL:
        require_package("lm_eval", "eval", "task=lm_eval", "set task=perplexity")


def check_text(data: DataConfig, task: str = CAUSAL, samples: str = ROWS) -> None:
    """Raise DataError or ConfigError if the evaluation data cannot be read.

    Args:
        data: The data settings.
        task: The model's `model.task`.
        samples: The shape of samples, as in `Task`.
    """
    if data.mixture:
        raise ConfigError(
            "data.mixture is for training on several texts; evaluate each of them separately, with data.path."
        )
    if data.eval_sets:
        raise ConfigError(
            "data.eval_sets is for evaluations during training; evaluate each of them separately, with data.path."
        )
    if data.streaming:
        raise ConfigError("data.streaming=true is for training: an evaluation reads all of data.path. Remove it.")
    check_task(task, data, samples)
    if data.eval_path is not None and data.path:
        open_source(data, held_out=False)  # not read, but a missing file is a mistake
    found = check_source(data, held_out=data.eval_path is not None, task=task, samples=samples)
    refuse_unread([data], [found])
