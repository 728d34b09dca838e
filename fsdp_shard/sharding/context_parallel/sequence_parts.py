"""The tokens of each sequence that a rank holds, and the positions and documents of all tokens.

A sequence is cut into chunks of equal length. For Ulysses, rank r holds chunk r. For ring attention, it holds chunks r
and 2N-1-r of 2N, so that under a causal mask every rank computes the same number of token pairs (zig-zag; Brandon et
al., Striped Attention, 2023, and Zhu, ring-flash-attention, 2024).
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
        chunks: The chunk numbers of each rank, in the order in which the rank holds them.
        rank: The index of this process among them.
        group: Their process group; None if one rank has all chunks.
    """

    chunks: tuple[tuple[int, ...], ...]
    rank: int = 0
    group: Any = None

    @classmethod
    def of(cls, context: DistributedContext, method: str) -> Self:
        """Return the ranks that share sequences with the rank of `context`, for `ulysses` or `ring`."""
        num_ranks = context.num_context_ranks
        return cls(chunks_of_ranks(num_ranks, method), context.rank % num_ranks, context.context_group)

    @property
    def num_ranks(self) -> int:
        """Number of ranks that divide a sequence."""
        return len(self.chunks)

    @property
    def num_chunks(self) -> int:
        """Number of chunks per sequence, over all ranks; lengths are padded to a multiple of it."""
        return sum(map(len, self.chunks))

    def exchange(self, received: torch.Tensor, sent: torch.Tensor) -> None:
        """Send the i-th part of `sent` to rank i, and receive the parts that ranks send to this one; a collective."""
        dist.all_to_all_single(received, sent, group=self.group)

    def begin_send_to_next(self, received: torch.Tensor, sent: torch.Tensor) -> list[Any]:
        """Send to the next rank and receive from the previous one; return the work to wait for."""
        following, before = ((self.rank + step) % self.num_ranks for step in (1, -1))
        sends = dist.P2POp(dist.isend, sent, group=self.group, group_peer=following)
        receives = dist.P2POp(dist.irecv, received, group=self.group, group_peer=before)
        works: list[Any] = dist.batch_isend_irecv([sends, receives])
        return works

    def own_part(self, inputs: Mapping[str, Ints], labels: Ints, ignore_index: int) -> SequencePart:
        """Return this rank's tokens of a batch of whole sequences.

        Args:
            inputs: Arrays [batch_size, length]: `input_ids`, and `position_ids` if documents are packed.
            labels: Labels [batch_size, length], already shifted: each is at the token that predicts it.
            ignore_index: The ignored label, with which labels are padded.

        Returns:
            Inputs and labels [batch_size, part], and the information about whole sequences.
        """
        batch_size, length = labels.shape
        added = -length % self.num_chunks
        positions = inputs.get("position_ids", np.broadcast_to(np.arange(length), labels.shape))
        sequence = WholeSequence.of(self, np.concatenate([positions, positions[:, -1:] + 1 + np.arange(added)], axis=1))
        # The model may have no positions beyond the length, so padding, to which no token attends, begins at zero.
        given = {**inputs, "position_ids": positions}
        endings = {"position_ids": np.broadcast_to(np.arange(added), (batch_size, added))}
        own = self.own_tokens(length + added)
        parts = {}
        for name, array in given.items():
            ending = endings.get(name, np.zeros((batch_size, added), np.int64))
            parts[name] = np.concatenate([array, ending], axis=1)[:, own]
        # Without a mask, transformers would detect packed documents from the positions and find this rank's chunks.
        # This mask only says that no token is masked.
        parts["attention_mask"] = np.ones((batch_size, len(own)), np.int64)
        own_labels = np.concatenate([labels, np.full((batch_size, added), ignore_index, np.int64)], axis=1)[:, own]
        return SequencePart(parts, own_labels, sequence)

    def own_tokens(self, length: int) -> Ints:
        """The positions of this rank's tokens in a sequence of `length` tokens, int64 [length / num_ranks]."""
        size = length // self.num_chunks
        return np.concatenate([np.arange(chunk * size, (chunk + 1) * size) for chunk in self.chunks[self.rank]])

    def gather(self, part: torch.Tensor) -> torch.Tensor:
        """Gather values for the tokens of whole sequences; a collective.

        All ranks must compute the same from the result: the gradient of `part` is its slice of the result's gradient on
        this rank.

        Args:
            part: Values of this rank's tokens, [batch_size, length / num_ranks, num_values].

        Returns:
            The values of all tokens in order, [batch_size, length, num_values].
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


def chunks_of_ranks(num_ranks: int, method: str) -> tuple[tuple[int, ...], ...]:
    """The chunks of each rank for `ulysses` or `ring`."""
    return contiguous_chunks(num_ranks) if method == ULYSSES else zigzag_chunks(num_ranks)


def contiguous_chunks(num_ranks: int) -> tuple[tuple[int, ...], ...]:
    """The chunks of each rank for Ulysses: one chunk per rank, in order."""
    return tuple((rank,) for rank in range(num_ranks))


def zigzag_chunks(num_ranks: int) -> tuple[tuple[int, ...], ...]:
    """The chunks of each rank for ring attention: one from the start of the sequence, one from its end."""
    return tuple((rank, 2 * num_ranks - 1 - rank) for rank in range(num_ranks))


@dataclass(frozen=True)
class WholeSequence:
    """The information that a rank has about all tokens of a micro-batch's sequences.

    Attributes:
        ranks: The ranks that hold the tokens.
        positions: The position of each token in its document, int64 [batch_size, length].
        documents: The document of each token, int64 [batch_size, length], ascending; None for a single document.
        edges: The documents of the first and last token of each chunk, int64 [batch_size, num_chunks, 2], in CPU
            memory; None if `documents` is None.
    """

    ranks: ContextRanks
    positions: torch.Tensor
    documents: torch.Tensor | None = None
    edges: Ints | None = None

    @classmethod
    def of(cls, ranks: ContextRanks, positions: Ints) -> Self:
        """Return the sequences with these positions [batch_size, length]; documents begin where they do not go on."""
        documents = np.cumsum(np.diff(positions, axis=1, prepend=positions[:, :1] - 1) != 1, axis=1)
        whole = torch.from_numpy(np.ascontiguousarray(positions))
        if not documents.any():
            return cls(ranks, whole)
        by_chunk = documents.reshape(len(documents), ranks.num_chunks, -1)
        return cls(ranks, whole, torch.from_numpy(documents), by_chunk[:, :, [0, -1]])

    @property
    def length(self) -> int:
        """Number of tokens per sequence, a multiple of the number of chunks."""
        return int(self.positions.shape[1])

    @property
    def chunk_length(self) -> int:
        """Number of tokens per chunk."""
        return self.length // self.ranks.num_chunks

    def on_one_rank(self) -> WholeSequence:
        """The same sequences if this rank has all chunks, in order, for a part of the heads."""
        return replace(self, ranks=ContextRanks((tuple(range(self.ranks.num_chunks)),)))

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> Self:
        """Apply `function` to each tensor, for example to copy it to a device."""
        documents = None if self.documents is None else function(self.documents)
        return replace(self, positions=function(self.positions), documents=documents)

    def rows(self, row: int) -> Self:
        """Row 0 or 1 of each two-row sample."""
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
        sequence: The information about whole sequences, in CPU memory.
    """

    inputs: dict[str, Ints]
    labels: Ints
    sequence: WholeSequence
