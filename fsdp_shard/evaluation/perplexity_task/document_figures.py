"""Figures of single documents, and the uncertainty of the overall figure."""

import json
import math
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from fsdp_shard.data import Ints
from fsdp_shard.evaluation.data_rows import first_fields
from fsdp_shard.evaluation.perplexity_task.scored_text import ScoredDocument, ScoredText
from fsdp_shard.evaluation.significance import LEVEL, Difference, Floats, bootstrap_interval
from fsdp_shard.utils import format_count, write_atomically

MAX_LOSS = 700.0  # larger arguments of exp overflow a double


@dataclass(frozen=True)
class DocumentFigures:
    """The figures of the documents of `text`; each window's summed loss is in `losses` [num_windows]."""

    text: ScoredText
    losses: Floats
    num_resamples: int
    seed: int

    @cached_property
    def _scored(self) -> Ints:
        """The indices of the documents with scored tokens."""
        return np.flatnonzero([not one.skip_reason for one in self.text.documents or ()])

    def _sums(self, losses: Floats) -> Floats:
        """Sum window losses by document [num_documents], including skipped documents."""
        sums = np.zeros(len(self.text.documents or ()))
        np.add.at(sums, self.text.document_of, losses)
        return sums

    def _sizes(self, name: str) -> Floats:
        """Return the tokens, or the bytes, of each scored document."""
        found = [one.num_tokens if name == "tokens" else one.size.num_bytes for one in self.text.documents or ()]
        return np.array(found, np.float64)[self._scored]

    @cached_property
    def interval(self) -> dict[str, Any] | None:
        """The 95 % intervals, for result.json; None for a single document."""
        sums, num_bytes = self._sums(self.losses)[self._scored], self._sizes("bytes")
        loss = bootstrap_interval(sums, self._sizes("tokens"), self.num_resamples, self.seed)
        if loss is None:
            return None
        bits = bootstrap_interval(sums, num_bytes, self.num_resamples, self.seed) if num_bytes.all() else None
        return {
            "level": LEVEL,
            "method": "percentile bootstrap over documents",
            "num_resamples": self.num_resamples,
            "loss": list(loss),
            "perplexity": [_exp(bound) for bound in loss],
            "bits_per_byte": None if bits is None else [bound / math.log(2) for bound in bits],
        }

    @property
    def row(self) -> dict[str, Any]:
        """Document counts and the interval, for result.json."""
        row = {
            "num_documents": len(self._scored),
            "left_out": self.text.num_skipped,
            "confidence_interval": self.interval,
        }
        return row if self.interval else row | {"confidence_interval_note": "it needs at least two documents"}

    def lines(self, bits_per_byte: float | None) -> list[str]:
        """The interval and the bits per byte, as text."""
        lines = [] if bits_per_byte is None else [f"{bits_per_byte:.4f} bits per byte"]
        count = format_count(len(self._scored), "document")
        if self.interval is None:
            return [*lines, f"no interval: there is {count}"]
        low, high = self.interval["perplexity"]
        bounds = (
            "the loss is too large for one" if low is None or high is None else f"perplexity {low:.4f} to {high:.4f}"
        )
        return [*lines, f"95 % interval: {bounds}, by bootstrap over {count}"]

    def against(self, other: Floats) -> Difference:
        """Compare with another model's losses [num_windows]."""
        ours, theirs = (self._sums(losses)[self._scored] for losses in (self.losses, other))
        return Difference.between(ours, theirs, self._sizes("tokens"), self.num_resamples, self.seed)

    def write(self, path: Path, other: Floats | None) -> None:
        """Write a JSON row for each data row, in order; `other` are the other model's losses."""
        sums = self._sums(self.losses)
        others = None if other is None else self._sums(other)
        lines = []
        for index, document in enumerate(self.text.documents or ()):
            row = first_fields(index, document.row.where, document.row.name) | _figures(document, float(sums[index]))
            if others is not None:
                row["against"] = _figures(document, float(others[index]), sizes=False)
            if document.skip_reason:
                row["left_out"] = document.skip_reason
            lines.append(json.dumps(row, ensure_ascii=False) + "\n")
        write_atomically(path, "".join(lines))


def _figures(document: ScoredDocument, loss: float, *, sizes: bool = True) -> dict[str, Any]:
    """Return the figures of a document with this summed loss; null without tokens or text."""
    num_tokens, (num_bytes, num_characters) = document.num_tokens, document.size
    row: dict[str, Any] = {"num_tokens": num_tokens, "num_bytes": num_bytes, "num_characters": num_characters}
    return (row if sizes else {}) | {
        "loss_sum": loss,
        "perplexity": _exp(loss / num_tokens) if num_tokens else None,
        "bits_per_byte": loss / math.log(2) / num_bytes if num_bytes else None,
    }


def _exp(loss: float) -> float | None:
    return math.exp(loss) if loss <= MAX_LOSS else None
