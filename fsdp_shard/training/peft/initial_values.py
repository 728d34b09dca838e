"""Initial values of a new adapter: random factors, and for DoRA the norms of the weights to which it is added."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fsdp_shard.checkpoint import TensorIndex
from fsdp_shard.distributed import LocalShard
from fsdp_shard.training.peft.config import EVA
from fsdp_shard.training.seeding import derived_seed

MAGNITUDE_CHUNK_BYTES = 16 << 20  # of the base model, read at a time


@dataclass(frozen=True)
class Magnitude:
    """The weight whose norms are the magnitudes of an adapted module.

    Attributes:
        weight: FQN of the base weight.
        is_transposed: Whether the norms are those of its columns, as in embeddings and layers that store it transposed.
    """

    weight: str
    is_transposed: bool


def fill_new(
    shards: Mapping[str, LocalShard], names: Mapping[str, str], seed: int, settings: Mapping[str, Any]
) -> None:
    """Initialize the factors of a new adapter like peft: their product is zero.

    Factors that `fill_eva` computes later are NaN until then.

    Each matrix is drawn unsharded from (seed, its name), so its values do not depend on the number of ranks.

    Args:
        shards: This rank's shards of all parameters and buffers.
        names: Those that are filled from stored tensors.
        seed: Seed of the run.
        settings: Content of adapter_config.json: `init_lora_weights` and `r`.
    """
    kind = settings["init_lora_weights"]
    for name, shard in shards.items():
        if name in names or "lora_magnitude_vector" in name:
            continue
        if kind == "orthogonal" and "lora_embedding_" not in name:
            values = _orthogonal(name, shard.shape, seed)
        elif kind == EVA and "lora_A" in name:
            values = torch.full((1,), math.nan).expand(shard.shape)  # so that nothing trains before `fill_eva`
        elif "lora_B" in name or "lora_embedding_A" in name:
            values = torch.zeros(1).expand(shard.shape)
        else:
            values = torch.empty(shard.shape)
            generator = torch.Generator().manual_seed(derived_seed("lora", seed, name))
            if "lora_embedding_B" in name:
                values.normal_(generator=generator)
            elif kind == "gaussian":
                values.normal_(std=1 / settings["r"], generator=generator)
            else:
                nn.init.kaiming_uniform_(values, a=math.sqrt(5), generator=generator)
        shard.fill(values)


def _orthogonal(name: str, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """Return A or B of peft's initialization with orthogonal rows (https://datta0.github.io/posts/rethink-lora-init).

    Both lie in mutually orthogonal spans, so B @ A is zero although neither matrix is.
    """
    module, _, rest = name.partition(".lora_")
    is_a = rest.startswith("A")
    rank, features = shape if is_a else shape[::-1]
    shared = torch.Generator().manual_seed(derived_seed("lora", seed, module))
    basis, _ = torch.linalg.qr(torch.randn(rank, rank, generator=shared))
    own = torch.Generator().manual_seed(derived_seed("lora", seed, name))
    if is_a:
        return torch.randn(features, rank // 2, generator=own).mm(basis[0::2]).T / 10.0
    return torch.randn(rank // 2, features, generator=own).T.mm(basis[1::2]) / 10.0


def fill_magnitudes(
    magnitudes: Mapping[str, Magnitude],
    shards: Mapping[str, LocalShard],
    names: Mapping[str, str],
    index: TensorIndex,
) -> None:
    """Initialize DoRA's magnitudes with the norms of the base weights, one per output.

    Each rank reads only the rows or columns for its own magnitudes.

    Args:
        magnitudes: The base weights, by the parameter that holds the magnitudes.
        shards: This rank's shards of all parameters.
        names: Parameter -> stored tensor that fills it.
        index: The stored tensors.
    """
    for name, magnitude in magnitudes.items():
        shard, dtype = shards[name], shards[magnitude.weight].data.dtype
        stored, outputs = names[magnitude.weight], range(shard.start, shard.start + len(shard.data))
        if not outputs:
            continue
        num_rows, num_columns = index.entry(stored).shape
        columns = slice(outputs.start, outputs.stop) if magnitude.is_transposed else slice(0, num_columns)
        rows = range(num_rows) if magnitude.is_transposed else outputs
        squares = torch.zeros(len(outputs), dtype=torch.float64)
        per_chunk = max(1, MAGNITUDE_CHUNK_BYTES // (4 * num_columns))
        for chunk in (rows[first : first + per_chunk] for first in range(0, len(rows), per_chunk)):
            # In the model's dtype, from which the forward pass computes the norms.
            part = index.read(stored, (slice(chunk.start, chunk.stop), columns)).to(dtype).double().square()
            if magnitude.is_transposed:
                squares += part.sum(dim=0)
            else:
                squares[chunk.start - outputs.start : chunk.stop - outputs.start] = part.sum(dim=1)
        shard.data.copy_(squares.sqrt())
