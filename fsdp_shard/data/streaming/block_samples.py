"""Makes the samples of a block of a stream, in the same way as those of a tokenized file.

Text continues from row to row and from block to block: tokens that do not fill a window are prepended to the next
block's. Rows of other kinds have their own windows. With packing, the rows of a block are packed together.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import xxhash

from fsdp_shard.data.samples.factory import SampleFactory
from fsdp_shard.data.samples.protocol import SourceDataset
from fsdp_shard.data.tokenized.token_file import Examples, classes_of

if TYPE_CHECKING:
    import pyarrow

_ROWS_OF_A_PART = 8  # of text; decides which tokens a masked language model predicts


@dataclass
class Counts:
    """What became of the rows of a stream so far, by number.

    Attributes:
        rows: Rows that were read.
        used: Examples that are in samples.
        dropped: Rows without anything to learn, and examples that have nothing left after truncation.
        truncated: Used examples that were longer than a window.
        tokens: Tokens of all examples, before truncation.
        left_out: In data that are compared, the number of dropped pairs or answers by reason.
    """

    rows: int = 0
    used: int = 0
    dropped: int = 0
    truncated: int = 0
    tokens: int = 0
    left_out: dict[str, int] = field(default_factory=dict)

    def figures(self) -> dict[str, Any]:
        """Return the counts as JSON, without reasons if there are none."""
        return {name: count for name, count in asdict(self).items() if name != "left_out" or count}


# Makes datasets of a block's samples from its table, the tokens left over from the block before, the counts over all
# blocks, and the index of the first sample. It updates the leftover tokens and the counts.
MakeSamples: TypeAlias = "Callable[[pyarrow.Table, list[int], Counts, int], list[SourceDataset]]"


@dataclass(frozen=True)
class RowSamples:
    """Rows that have their own windows."""

    factory: SampleFactory
    keeps_last: bool

    def __call__(self, table: pyarrow.Table, leftover: list[int], counts: Counts, first: int) -> list[SourceDataset]:
        classes = classes_of(table)
        examples = Examples.of(table, classes, keeps_last=self.keeps_last)
        cut = self.factory.cut(examples, classes)
        counts.used += len(cut.kept)
        counts.dropped += cut.num_dropped
        counts.truncated += cut.num_truncated
        reasons = {f"{one.noun}s{one.words}": one.number for one in cut.skipped}
        counts.left_out = dict(Counter(counts.left_out) + Counter(reasons))  # adds to earlier blocks
        counts.tokens += len(examples.tokens)
        return [self.factory.samples(examples, cut, classes)] if len(cut.kept) else []


@dataclass(frozen=True)
class TextSamples:
    """Documents that continue from window to window, each after `num_separators` tokens but for the first one."""

    factory: SampleFactory
    num_separators: int

    def __call__(self, table: pyarrow.Table, leftover: list[int], counts: Counts, first: int) -> list[SourceDataset]:
        step = self.factory.num_window_tokens()
        # The last token that a window predicts is the first one of the next window.
        overlap = int(self.factory.special is None)
        left, parts = np.asarray(leftover, np.int64), list[SourceDataset]()
        for start in range(0, len(table), _ROWS_OF_A_PART):
            documents = Examples.of(table[start : start + _ROWS_OF_A_PART], [])
            added = np.asarray(documents.tokens)
            if not counts.used:
                added = added[self.num_separators :]
            counts.used += len(documents)
            counts.tokens += len(added)
            tokens = np.concatenate([left, added])
            num = max(0, (len(tokens) - overlap) // step)
            if num:
                seed = xxhash.xxh3_64_intdigest(f"{self.factory.seed} {first}".encode())
                parts.append(self.factory.windows(tokens[: num * step + overlap], "", seed))
            left, first = tokens[num * step :], first + num
        leftover[:] = left.tolist()
        return parts
