"""Finds the checkpoint that an evaluation used, by the digest of the weights in its result.json."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fsdp_shard.checkpoint import Location, config_digest, describe_weights, locate
from fsdp_shard.errors import FsdpShardError
from fsdp_shard.evaluation.report.run_files import Run
from fsdp_shard.evaluation.report.stored_steps import ReportedStep

Digests = tuple[str, str | None]
"""The digest of weights, and that of the base model if they are an adapter."""


class WeightDigests:
    """Digests of steps' weights, each computed once and on demand, because it reads all weights.

    Attributes:
        problems: Steps with unreadable weights, a sentence each.
    """

    def __init__(self) -> None:
        self.problems: list[str] = []
        self._known: dict[tuple[Path, str], Digests | None] = {}

    def find(self, weights: Mapping[str, Any], runs: Sequence[Run]) -> tuple[Run, ReportedStep] | None:
        """Find the step with the given weights.

        Args:
            weights: An evaluation's description of them: `digest`, for an adapter `base`, and `step`. If the step is
                known, only steps with this number are read.
            runs: The runs that may contain it.
        """
        wanted, step = digests_in(weights), weights.get("step")
        if wanted is None:
            return None
        candidates = [(run, stored) for run in runs for stored in reversed(run.checkpoints)]
        for run, stored in candidates:
            if (step is None or stored.step == step) and self._of(stored) == wanted:
                return run, stored
        return None

    def has_other_config(self, weights: Mapping[str, Any], stored: ReportedStep) -> bool:
        """Whether an evaluation of a step's weights used another config, as far as both are readable."""
        try:
            return has_other_config(weights, locate(str(stored.path), fetch_weights=False))
        except (FsdpShardError, OSError):  # a step of a custom loop has no config
            return False

    def _of(self, stored: ReportedStep) -> Digests | None:
        key = (stored.path, stored.digest)
        if key not in self._known:
            try:
                self._known[key] = digests_in(describe_weights(locate(str(stored.path), fetch_weights=False)))
            except (FsdpShardError, OSError) as error:
                self._known[key] = None
                self.problems.append(f"{stored.path} is not compared with what was evaluated: {error}")
        return self._known[key]


def has_other_config(weights: Mapping[str, Any], source: Location) -> bool:
    """Whether an evaluation of the weights at `source` built the model from a config other than theirs.

    Args:
        weights: The evaluation's description of them; `config` is its config's digest, missing in older results.
        source: The checkpoint.

    Raises:
        ModelError: `source` has no usable config.
    """
    found = weights.get("config")
    return isinstance(found, str) and found != config_digest(source.config_directory)


def digests_in(weights: Mapping[str, Any]) -> Digests | None:
    """The digests in a description of weights; None if there are none."""
    base, digest = weights.get("base"), weights.get("digest")
    if not isinstance(digest, str):
        return None
    of_base = base.get("digest") if isinstance(base, dict) else None
    return digest, of_base if isinstance(of_base, str) else None
