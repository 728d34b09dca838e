"""Streams in one order, by weights: a mixture of sources that are read while training. Knows no torch.

Sample n of the order is the next one of the source whose turn it is (`shares.py`), and which of its own samples that is
is a division. So where a run stands is where each of its streams stands. Every rank goes through all streams alike.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from fsdp_shard.data.samples.collate import merge
from fsdp_shard.data.samples.mixture_schedule import counts_before, turns
from fsdp_shard.data.samples.windows import NO_WINDOW, Batch
from fsdp_shard.data.streaming.dataset import StreamDataset, Streamed
from fsdp_shard.errors import CheckpointError


class StreamMixture(Streamed):
    """`streams` by name, of which each has `shares` of every round of samples; each goes through epochs of its own."""

    def __init__(self, streams: Mapping[str, StreamDataset], shares: Mapping[str, int], seed: int) -> None:
        self.names = tuple(sorted(streams))  # so that the order of the settings does not matter
        self.parts = tuple(streams[name] for name in self.names)
        self.shares = tuple(shares[name] for name in self.names)
        described = zip(self.names, self.shares, self.parts, strict=True)
        identity = "mixture:" + ",".join(f"{name}={share}*{part.identity}" for name, share, part in described)
        super().__init__(seed, identity, max(part.sequence_length for part in self.parts))

    def batch(self, indices: Sequence[int] | npt.NDArray[np.int64]) -> Batch:
        assert NO_WINDOW not in list(indices), "an evaluation reads no stream"
        pieces = []
        for row, index in enumerate(map(int, indices)):
            number = int(turns(self.shares, index, 1)[0])
            inner = int(counts_before(self.shares, index)[number])
            pieces.append((np.asarray([row]), self.parts[number].batch([inner])))
        return merge(pieces)

    def owners(self, indices: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """The number, in `names`, of the source of each sample."""
        return np.asarray([turns(self.shares, int(index), 1)[0] for index in indices], np.int64)

    @property
    def place(self) -> dict[str, Any]:
        return {"sources": {name: part.place for name, part in zip(self.names, self.parts, strict=True)}}

    def go_to(self, place: Any, what: str = "trainer.json") -> None:
        places = dict.fromkeys(self.names) if place is None else _sources(place)
        if places is None or set(places) != set(self.names):
            raise CheckpointError(f"{what} has no place in streamed data of {', '.join(self.names)} to resume from.")
        for name, part in zip(self.names, self.parts, strict=True):
            part.go_to(places[name], what)

    def read_to(self, num_samples: int) -> None:
        for part, count in zip(self.parts, counts_before(self.shares, num_samples).tolist(), strict=True):
            part.read_to(count)

    def seen(self, num_samples: int) -> dict[str, dict[str, Any]]:
        """By name, what of each source is among the first `num_samples` samples, and what was read for them."""
        self.read_to(num_samples)
        counts = counts_before(self.shares, num_samples).tolist()
        found = {}
        for name, part, share, count in zip(self.names, self.parts, self.shares, counts, strict=True):
            stream = part.seen()
            epochs = stream.pop("epochs")
            found[name] = {"share": share / sum(self.shares), "samples": count, "epochs": epochs, "stream": stream}
        return found


def _sources(place: Any) -> dict[str, Any] | None:
    found = place.get("sources") if isinstance(place, dict) else None
    return found if isinstance(found, dict) else None
