"""Settings of the tasks that score rows: classification, reward and generation. Imports no torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from fsdp_shard.errors import ConfigError
from fsdp_shard.utils import Parsed, nearest, require_package, setting

EXACT_MATCH, F1, ROUGE, WER = "exact_match", "f1", "rouge", "wer"
_PACKAGES = {EXACT_MATCH: None, F1: None, ROUGE: "rouge_score", WER: "jiwer"}  # metric -> the required package

# The figures in result.json that each become a row of a report, in its order.
MEASURES = (
    *("accuracy", "f1_macro", "f1_weighted", "cross_entropy"),
    *("mean_margin", "mean_reward_chosen", "mean_reward_rejected", "preference_loss"),
    *(EXACT_MATCH, F1, "rouge1", "rouge2", "rougeL", WER),
)


def parse_metrics(value: Any, setting: str) -> list[str] | None:
    """Parse a metric name or a list of them, into their usual order; None leaves the choice to the program.

    Raises:
        ConfigError: A name is unknown, or the list is empty.
    """
    if value is None:
        return None
    names = value if isinstance(value, list) else [value]
    for name in names:
        if isinstance(name, (Mapping, list)) or str(name) not in _PACKAGES:
            near = nearest(str(name), list(_PACKAGES))
            raise ConfigError(f"{setting}: there is no metric {name}{near}; there are {', '.join(_PACKAGES)}.")
    if not names:
        raise ConfigError(f"{setting}=[] names no metric; give some of {', '.join(_PACKAGES)}, or remove it.")
    return [name for name in _PACKAGES if name in names]


@dataclass
class ScoringConfig:
    """Settings of `task=classification`, `task=reward` and `task=generation`: how answers are generated and scored."""

    # Any, because a single name on the command line is not a list.
    metrics: Any = setting(
        None,
        "task=generation: some of [exact_match, f1, rouge, wer]. exact_match and f1 (of words) follow SQuAD; rouge is "
        "ROUGE-1, -2 and -L by rouge-score, wer the word error rate by jiwer; the latter two need the extra `eval`. "
        "Default: the metrics whose packages are installed.",
    )
    max_new_tokens: int = setting(64, "task=generation: maximum number of tokens per answer.", minimum=1)
    num_resamples: int = setting(10_000, "Number of resamples of rows for confidence intervals.", minimum=100)

    asked = Parsed("metrics", parse_metrics)

    @property
    def chosen_metrics(self) -> list[str]:
        """The metrics to compute: the requested ones, or all with an installed package."""
        return [name for name in _PACKAGES if _is_installed(name)] if self.asked is None else self.asked

    @property
    def missing_metrics(self) -> list[str]:
        """The metrics skipped because their package is missing, if the choice is the program's."""
        return [] if self.asked is not None else [name for name in _PACKAGES if not _is_installed(name)]

    def check_packages(self) -> None:
        """Raise ConfigError if the package of a requested metric is not installed."""
        for name in self.asked or ():
            if (package := _PACKAGES[name]) is not None:
                require_package(package, "eval", f"scoring.metrics=[{name}]", "remove it from the list")


def _is_installed(metric: str) -> bool:
    package = _PACKAGES[metric]
    return package is None or find_spec(package) is not None
