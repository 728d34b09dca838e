"""A micro-batch on the device of a rank: what a loss is computed from."""

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from fsdp_shard.sharding import WholeSequence


@dataclass(frozen=True)
class DeviceBatch:
    """A micro-batch on the device of this rank.

    Attributes:
        inputs: Arguments of the model by name, int64 [micro_batch_size, length].
        labels: Labels as in `Batch`, int64.
        counted: Positions in the flat labels of those that count, int64 [num_predictions]. Counted on the CPU: a GPU
            would have to be waited for.
        extras: Other values of each sample as in `Batch`, float32.
        token_values: Values of each label that counts as in `Batch`.
        sequence: What this rank must know of the whole sequences, where it has parts of them.
    """

    inputs: dict[str, torch.Tensor]
    labels: torch.Tensor
    counted: torch.Tensor
    extras: dict[str, torch.Tensor] = field(default_factory=dict)
    token_values: dict[str, torch.Tensor] = field(default_factory=dict)
    sequence: WholeSequence | None = None

    def tensors(self) -> Iterator[torch.Tensor]:
        """Yield all of them."""
        yield from self.inputs.values()
        yield self.labels
        yield self.counted
        yield from self.extras.values()
        yield from self.token_values.values()
        yield from () if self.sequence is None else self.sequence.tensors()
