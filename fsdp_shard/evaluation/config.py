"""Settings of an evaluation, and what every kind of it is to a recipe. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from fsdp_shard.data import CAUSAL, DataConfig, check_source, check_task
from fsdp_shard.errors import ConfigError
from fsdp_shard.inference import DispatchConfig
from fsdp_shard.utils import REQUIRED, setting, walk

if TYPE_CHECKING:
    from transformers import PreTrainedModel

PERPLEXITY, LM_EVAL = "perplexity", "lm_eval"


@dataclass
class LmEvalConfig:
    """Settings of `task=lm_eval`: which questions of EleutherAI's lm-evaluation-harness, and how they are put."""

    # Any, as on a command line one name is no list.
    tasks: Any = field(
        default=None,
        metadata={
            "help": "The harness's tasks, groups or tags, such as [hellaswag, arc_easy]; * stands for anything. Their "
            "questions come from the hub, unless include_path has others."
        },
    )
    include_path: str | None = setting(
        None,
        "A directory with tasks of your own, as YAML files.",
        warning="Python functions that its YAML files name are run; only for files you trust.",
    )
    num_fewshot: int | None = setting(
        None, "Examples with their answers before each question. Default: what the task says.", minimum=0
    )
    limit: int | None = setting(
        None, "Ask so many questions of each task only, to see that it works; no figure to publish.", minimum=1
    )
    chat_template: bool = setting(False, "Put each question as a conversation, by the model's chat template.")
    save_samples: bool = setting(
        False, "Write every question with the model's answers and their scores to RUN_DIR/samples/TASK.jsonl."
    )

    @property
    def names(self) -> list[str]:
        """`tasks` as a list of names, or patterns of names."""
        return [str(name) for name in self._given if name not in (None, "")]

    def check(self, prefix: str) -> None:
        """Refuse names that are none."""
        if any(isinstance(name, (Mapping, list)) for name in self._given):
            raise ConfigError(f"{prefix}tasks={self.tasks} is not a list of names, such as [hellaswag, arc_easy].")

    @property
    def _given(self) -> list[Any]:
        return self.tasks if isinstance(self.tasks, list) else [self.tasks]


@dataclass
class EvaluateSettings:
    """What `fsdp-shard evaluate` is asked: which model, which figure, on which text or questions."""

    # What need not be given where another setting has a value.
    instead: ClassVar[dict[str, str]] = {"data.path": f"task={LM_EVAL}"}

    checkpoint: str = setting(REQUIRED, "A run, a checkpoint of any format, a .gguf file, or a hub id.")
    task: str = setting(
        PERPLEXITY,
        "perplexity: how well the model predicts each token of data.path. lm_eval: how well it answers questions of "
        "lm_eval.tasks (needs the extra `eval`).",
        choices=(PERPLEXITY, LM_EVAL),
    )
    data: DataConfig = field(default_factory=DataConfig)
    lm_eval: LmEvalConfig = field(default_factory=LmEvalConfig)
    batch_size: int = setting(8, "Windows, or questions, to run through the model at once.", minimum=1)
    dispatch: DispatchConfig = field(default_factory=DispatchConfig)

    def check(self, prefix: str) -> None:
        """Refuse settings of another task than the one that is asked for, and that one without what it needs."""
        other, unused = (PERPLEXITY, "data") if self.task == LM_EVAL else (LM_EVAL, "lm_eval")
        section = getattr(self, unused)
        defaults = {name: value for name, _, value in walk(type(section)())}
        for name, _, value in walk(section):
            stands_in = unused == "data" and name == "path" and value == ""  # what composing puts there
            if value != defaults[name] and not stands_in:
                raise ConfigError(
                    f"{prefix}{unused}.{name}={value} is for {prefix}task={other}, not {self.task}; leave one of them "
                    f"out."
                )
        if self.task == LM_EVAL and not self.lm_eval.names:
            raise ConfigError(
                f"{prefix}task={LM_EVAL} needs the names of tasks: add {prefix}lm_eval.tasks=[hellaswag] or others "
                f"(`lm_eval ls tasks` lists them)."
            )


class Evaluation(Protocol):
    """All that an evaluation needs but the model."""

    def describe(self) -> str:
        """What it is on, for people."""
        ...

    def measure(self, model: PreTrainedModel) -> Figures:
        """Run it, with a progress bar; raises LossError or RunError where there is no figure."""
        ...


@dataclass(frozen=True)
class Figures:
    """What an evaluation came to: for people, and for result.json."""

    text: str
    row: Mapping[str, Any]


def check_evaluation(settings: EvaluateSettings) -> None:
    """Raise DataError or ConfigError when what to evaluate on cannot be read, as far as can be seen without torch."""
    if settings.task == PERPLEXITY:
        check_text(settings.data)
    elif find_spec("lm_eval") is None:
        raise ConfigError(
            "task=lm_eval needs lm_eval, which is not installed. Install it with pip install 'fsdp-shard[eval]', or "
            "take task=perplexity."
        )


def check_text(data: DataConfig) -> None:
    """Raise DataError or ConfigError when the text to evaluate (see `evaluation_windows`) cannot be read."""
    if data.mixture:
        raise ConfigError(
            "data.mixture is a way to train on several texts; evaluate each of them on its own, with data.path."
        )
    if data.streaming:
        raise ConfigError("data.streaming=true is for training: an evaluation reads all of data.path. Leave it out.")
    check_task(CAUSAL, data)
    check_source(data, held_out=data.eval_path is not None)
