"""Settings of the tasks that score rows: classification, reward and generation; imports no torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from fsdp_shard.errors import ConfigError
from fsdp_shard.utils import Parsed, nearest, require_package, setting

EXACT_MATCH, F1, ROUGE, WER = "exact_match", "f1", "rouge", "wer"
_PACKAGES = {EXACT_MATCH: None, F1: None, ROUGE: "rouge_score", WER: "jiwer"}  # metric -> the package that it needs

# The figures in result.json of which one row of a report is made each, in its order.
MEASURES = (
    *("accuracy", "f1_macro", "f1_weighted", "cross_entropy"),
    *("mean_margin", "mean_reward_chosen", "mean_reward_rejected", "preference_loss"),
    *(EXACT_MATCH, F1, "rouge1", "rouge2", "rougeL", WER),
)


def parse_metrics(value: Any, setting: str) -> list[str] | None:
    """Parse the name of a metric or a list of them, in their usual order; None leaves the choice to the program.

    Raises:
        ConfigError: A name is unknown, or there is none.
    """
    if value is None:
        return None
    names = value if isinstance(value, list) else [value]
    for name in names:
        if isinstance(name, (Mapping, list)) or str(name) not in _PACKAGES:
            near = nearest(str(name), list(_PACKAGES))
            raise ConfigError(f"{setting}: there is no metric {name}{near}; there are {', '.join(_PACKAGES)}.")
    if not names:
        raise ConfigError(f"{setting}=[] names no metric; give some of {', '.join(_PACKAGES)}, or leave it out.")
    return [name for name in _PACKAGES if name in names]


@dataclass
class ScoringConfig:
    """Settings of `task=classification`, `task=reward` and `task=generation`: how answers are made and scored."""

    # Any, as a single name on the command line is not a list.
    metrics: Any = setting(
        None,
        "task=generation: some of [exact_match, f1, rouge, wer]. exact_match and f1 (of words) are those of SQuAD, "
        "rouge is ROUGE-1, -2 and -L by rouge-score, wer the word error rate by jiwer; these two need the extra "
        "`eval`. Default: those whose package is installed.",
    )
    max_new_tokens: int = setting(64, "task=generation: the most tokens of an answer.", minimum=1)
    num_resamples: int = setting(10_000, "Resamples of rows for confidence intervals.", minimum=100)

    asked = Parsed("metrics", parse_metrics)

    @property
    def chosen(self) -> list[str]:
        """The metrics to compute: those that are asked for, or all whose package is installed."""
        return [name for name in _PACKAGES if _is_installed(name)] if self.asked is None else self.asked

    @property
    def missing(self) -> list[str]:
        """The metrics that are not computed as their package is not installed, if the choice is the program's."""
        return [] if self.asked is not None else [name for name in _PACKAGES if not _is_installed(name)]

    def check_packages(self) -> None:
        """Raise ConfigError if the package of a metric that is asked for is not installed."""
        for name in self.asked or ():
            if (package := _PACKAGES[name]) is not None:
                require_package(package, "eval", f"scoring.metrics=[{name}]", "leave it out of the list")


def _is_installed(metric: str) -> bool:
    package = _PACKAGES[metric]
    return package is None or find_spec(package) is not None
