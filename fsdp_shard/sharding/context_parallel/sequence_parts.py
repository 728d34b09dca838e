"""Which tokens of each sequence a rank has, and what it must know of the others: their positions and documents.

A sequence is cut into chunks of equal length. For Ulysses rank r has chunk r. For ring attention it has chunks r and
2N-1-r of 2N, so that under a causal mask every rank has as many pairs of tokens to compute as the others (zig-zag;
Brandon et al., Striped Attention, 2023, and Zhu, ring-flash-attention, 2024).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Self, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from fsdp_shard.distributed import DistributedContext

Ints: TypeAlias = npt.NDArray[np.int64]

ULYSSES, RING = "ulysses", "ring"


@dataclass(frozen=True)
class ContextRanks:
    """The neighboring ranks that divide each sequence.

    Attributes:
        chunks: The numbers of the chunks of each rank, in the order in which it holds them.
        rank: Which of them this process is.
        group: Their process group; None where one rank has all chunks.
    """

    chunks: tuple[tuple[int, ...], ...]
    rank: int = 0
    group: Any = None

    @classmethod
    def of(cls, context: DistributedContext, method: str) -> Self:
        """Return the ranks that divide sequences with the rank of `context`, for `ulysses` or `ring`."""
        num_ranks = context.num_context_ranks
        chunks = contiguous_chunks(num_ranks) if method == ULYSSES else zigzag_chunks(num_ranks)
        return cls(chunks, context.rank % num_ranks, context.context_group)

    @property
    def num_ranks(self) -> int:
        """Number of ranks that divide a sequence."""
        return len(self.chunks)

    @property
    def num_chunks(self) -> int:
        """Number of chunks of a sequence, over all ranks: lengths are padded to a multiple of it."""
        return sum(map(len, self.chunks))

    def exchange(self, received: torch.Tensor, sent: torch.Tensor) -> None:
        """Send the i-th part of `sent` to rank i, and receive what all ranks send to this one; a collective."""
        dist.all_to_all_single(received, sent, group=self.group)

    def begin_send_to_next(self, received: torch.Tensor, sent: torch.Tensor) -> list[Any]:
        """Send to the next rank and receive from the one before; returns what to wait for."""
        following, before = ((self.rank + step) % self.num_ranks for step in (1, -1))
        sends = dist.P2POp(dist.isend, sent, group=self.group, group_peer=following)
        receives = dist.P2POp(dist.irecv, received, group=self.group, group_peer=before)
        works: list[Any] = dist.batch_isend_irecv([sends, receives])
        return works

    def own_part(self, inputs: Mapping[str, Ints], labels: Ints, masked: int) -> SequencePart:
        """Return this rank's tokens of a batch of whole sequences.

        Args:
            inputs: Arrays [batch_size, length]: `input_ids`, and `position_ids` where documents are packed.
            labels: Labels [batch_size, length], shifted already: each is at the token that predicts it.
            masked: The label that does not count, with which labels are padded.

        Returns:
            Inputs and labels [batch_size, part], and what the rank must know of the whole.
        """
        batch_size, length = labels.shape
        added = -length % self.num_chunks
        positions = inputs.get("position_ids", np.broadcast_to(np.arange(length), labels.shape))
        sequence = WholeSequence.of(self, np.concatenate([positions, positions[:, -1:] + 1 + np.arange(added)], axis=1))
        # The model itself may have no positions beyond the length: padding, which no token attends to, begins at zero.
        given = {**inputs, "position_ids": positions}
        endings = {"position_ids": np.broadcast_to(np.arange(added), (batch_size, added))}
        own = self.own_tokens(length + added)
        parts = {}
        for name, array in given.items():
            ending = endings.get(name, np.zeros((batch_size, added), np.int64))
            parts[name] = np.concatenate([array, ending], axis=1)[:, own]
        # transformers looks for packed documents in positions unless there is a mask, and would find the chunks of this
        # rank; that no token of theirs is masked is all that this one says.
        parts["attention_mask"] = np.ones((batch_size, len(own)), np.int64)
        own_labels = np.concatenate([labels, np.full((batch_size, added), masked, np.int64)], axis=1)[:, own]
        return SequencePart(parts, own_labels, sequence)

    def own_tokens(self, length: int) -> Ints:
        """The places in a sequence of `length` tokens of those that this rank has, int64 [length / num_ranks]."""
        size = length // self.num_chunks
        return np.concatenate([np.arange(chunk * size, (chunk + 1) * size) for chunk in self.chunks[self.rank]])

    def gather(self, part: torch.Tensor) -> torch.Tensor:
        """Gather values of the tokens of whole sequences; a collective.

        Each rank is to compute the same of them: the gradient of `part` is what it has in the gradient of the result on
        this rank.

        Args:
            part: Values of this rank's tokens, [batch_size, length / num_ranks, num_values].

        Returns:
            Those of all tokens in their order, [batch_size, length, num_values].
        """
        gathered: torch.Tensor = _Gather.apply(part, self)  # type: ignore[no-untyped-call]  # untyped in torch
        return gathered


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, ranks: ContextRanks) -> torch.Tensor:
        ctx.ranks = ranks
        parts = [torch.empty_like(part, memory_format=torch.contiguous_format) for _ in range(ranks.num_ranks)]
        dist.all_gather(parts, part.contiguous(), group=ranks.group)
        in_order: list[torch.Tensor] = [part] * ranks.num_chunks
        for chunks, values in zip(ranks.chunks, parts, strict=True):
            for chunk, of_chunk in zip(chunks, values.chunk(len(chunks), dim=1), strict=True):
                in_order[chunk] = of_chunk
        return torch.cat(in_order, dim=1)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        by_chunk = gradient.chunk(ctx.ranks.num_chunks, dim=1)
        return torch.cat([by_chunk[chunk] for chunk in ctx.ranks.chunks[ctx.ranks.rank]], dim=1), None


def contiguous_chunks(num_ranks: int) -> tuple[tuple[int, ...], ...]:
    """The chunks of each rank for Ulysses: as many chunks as ranks, in order."""
    return tuple((rank,) for rank in range(num_ranks))


def zigzag_chunks(num_ranks: int) -> tuple[tuple[int, ...], ...]:
    """The chunks of each rank for ring attention: one from the start of the sequence, one from its end."""
    return tuple((rank, 2 * num_ranks - 1 - rank) for rank in range(num_ranks))


@dataclass(frozen=True)
class WholeSequence:
    """What a rank knows of all tokens of the sequences of a micro-batch.

    Attributes:
        ranks: The ranks that have them.
        positions: The position of each token in its document, int64 [batch_size, length].
        documents: Which document each token belongs to, int64 [batch_size, length], ascending; None if it is one.
        edges: The documents of the first and the last token of each chunk, int64 [batch_size, num_chunks, 2], in CPU
            memory; None as `documents`.
    """

    ranks: ContextRanks
    positions: torch.Tensor
    documents: torch.Tensor | None = None
    edges: Ints | None = None

    @classmethod
    def of(cls, ranks: ContextRanks, positions: Ints) -> Self:
        """Return the sequences with these positions [batch_size, length]: a document begins where they do not go on."""
        documents = np.cumsum(np.diff(positions, axis=1, prepend=positions[:, :1] - 1) != 1, axis=1)
        whole = torch.from_numpy(np.ascontiguousarray(positions))
        if not documents.any():
            return cls(ranks, whole)
        by_chunk = documents.reshape(len(documents), ranks.num_chunks, -1)
        return cls(ranks, whole, torch.from_numpy(documents), by_chunk[:, :, [0, -1]])

    @property
    def length(self) -> int:
        """Number of tokens of a sequence, a multiple of the number of chunks."""
        return int(self.positions.shape[1])

    @property
    def chunk_length(self) -> int:
        """Number of tokens of a chunk."""
        return self.length // self.ranks.num_chunks

    def on_one_rank(self) -> WholeSequence:
        """The same sequences where this rank has all chunks, in order, for a part of the heads."""
        return replace(self, ranks=ContextRanks((tuple(range(self.ranks.num_chunks)),)))

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> Self:
        """The same with `function` of each tensor, such as a copy on a device."""
        documents = None if self.documents is None else function(self.documents)
        return replace(self, positions=function(self.positions), documents=documents)

    def rows(self, row: int) -> Self:
        """Row 0 or 1 of each sample of two rows."""
        edges = None if self.edges is None else self.edges[row::2]
        return replace(self.map(lambda tensor: tensor[row::2]), edges=edges)

    def tensors(self) -> list[torch.Tensor]:
        """The tensors on the device."""
        return [self.positions] if self.documents is None else [self.positions, self.documents]


@dataclass(frozen=True)
class SequencePart:
    """A rank's tokens of a batch.

    Attributes:
        inputs: Arguments of the model by name, int64 [batch_size, part].
        labels: Labels, int64 [batch_size, part].
        sequence: What the rank must know of the whole, in CPU memory.
    """

    inputs: dict[str, Ints]
    labels: Ints
    sequence: WholeSequence
