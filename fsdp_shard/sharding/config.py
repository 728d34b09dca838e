"""What every wrapper takes and gives: the shard settings, and a sharded model as training sees it.

A wrapper is one file with a config dataclass whose `shard(model, context)` returns a `ShardedModel`; the rest of the
package calls only what is written here. Imports no torch, so that a config can be checked without it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Protocol

from fsdp_shard.distributed import LocalShard
from fsdp_shard.errors import ConfigError
from fsdp_shard.sharding.shard_sizes import Shape, itemsize
from fsdp_shard.utils import setting

if TYPE_CHECKING:
    import torch
    from torch import nn

    from fsdp_shard.distributed import DistributedContext
    from fsdp_shard.sharding.wrap_policy import Unit

# float16 needs loss scaling, which bfloat16 made unnecessary.
DTYPES = ("float32", "bfloat16")

# What can be said of `activation_checkpointing` beside true, false and a number.
RECOMPUTED = ("none", "all", "selective")


@dataclass
class ShardConfig:
    """Settings that all wrappers share.

    `held_bytes` is the type of quantized weights: one that the wrapper gathers as it is. If not uint8, then only in a
    unit that has nothing else. `joins_frozen`: what is frozen is in one flat parameter with what is trained.
    """

    held_bytes: ClassVar[str] = "uint8"
    joins_frozen: ClassVar[bool] = False

    param_dtype: str = setting(
        "bfloat16", "The dtype that blocks compute in; gathered parameters have it.", choices=DTYPES
    )
    reduce_dtype: str = setting("float32", "The dtype that gradients are summed over the ranks in.", choices=DTYPES)
    norms_in_float32: bool = setting(
        False, "Compute norm layers in float32, each gathered on its own, where param_dtype is narrower."
    )
    replicas: int = setting(
        1, "Groups of ranks that hold a copy of the model each, sharded inside a group (HSDP).", minimum=1
    )
    tensor_parallel: int = setting(
        1, "Neighboring ranks that divide each layer by the model's own plan, and see the same samples.", minimum=1
    )
    expert_parallel: int = setting(
        1,
        "Neighboring ranks that divide the experts of a mixture by the model's own plan, and send each other tokens.",
        minimum=1,
    )
    reshard_after_forward: bool | int = setting(
        True,
        "true frees a unit's gathered parameters after its forward pass and gathers them again for the backward pass; "
        "false keeps them; a number N keeps 1/N of them on each of N neighboring ranks.",
    )
    prefetch_forward: int | None = setting(
        None, "Units to gather ahead of the one that computes, in the forward pass; null: as torch does.", minimum=0
    )
    prefetch_backward: int | None = setting(
        None, "The same in the backward pass; null: as torch does, which is one.", minimum=0
    )
    cpu_offload: bool = setting(False, "Keep parameters, gradients and optimizer state in CPU memory. GPU only.")
    activation_checkpointing: bool | int | str = setting(
        False,
        "What to recompute in the backward pass instead of keeping its activations: true or all, every block; a number "
        "N, each N-th block; selective, all but the results of matrix products and attention; false or none, nothing.",
    )
    activation_offload: bool = setting(
        False, "Keep what blocks need in the backward pass in CPU memory until then. GPU only."
    )
    compile: bool | str = setting(
        False, "Compile each block with torch.compile: true for its default backend (inductor), or a backend's name."
    )
    sync_every_micro_batch: bool = setting(
        True,
        "Reduce gradients after every micro batch, which keeps only this rank's part of them. "
        "If false, whole gradients are kept and reduced once a step: more memory, less communication.",
    )
    blocks: list[str] = field(
        default_factory=list,
        metadata={"help": "Class names of the blocks to shard along; empty: the model's own no-split blocks."},
    )
    min_params: int | None = setting(
        None,
        "Shard along any module instead that has at least so many parameters in no smaller such module; null: along "
        "the blocks.",
        minimum=1,
    )
    explain: bool = setting(False, "Print the tree of units with their parameters and bytes before the run.")

    def check(self, prefix: str) -> None:
        """Refuse what can work for no model and no number of ranks, or would do nothing."""
        kind, every = self.activation_checkpointing, self.reshard_after_forward
        if (isinstance(kind, str) and kind not in RECOMPUTED) or (type(kind) is int and kind < 1):
            raise ConfigError(
                f"{prefix}activation_checkpointing={kind} is not true, false, {', '.join(RECOMPUTED)} or a number N "
                f"from 1 on, for each N-th block."
            )
        if type(every) is int and every < 2:
            raise ConfigError(
                f"{prefix}reshard_after_forward={every} is not true, false or a number of ranks from 2 on; "
                f"to keep parameters whole after the forward pass, give false."
            )
        if self.blocks and self.min_params is not None:
            raise ConfigError(
                f"{prefix}blocks={self.blocks} and {prefix}min_params={self.min_params} are two ways to choose the "
                f"units; give one of them."
            )
        if self.norms_in_float32 and self.param_dtype == "float32":
            raise ConfigError(
                f"{prefix}norms_in_float32=true would do nothing, as {prefix}param_dtype=float32 holds for all layers."
            )
        if self.prefetch_backward is not None and self.reshard_after_forward is False:
            raise ConfigError(
                f"{prefix}prefetch_backward={self.prefetch_backward} would do nothing with {prefix}"
                f"reshard_after_forward=false, which keeps parameters gathered for the backward pass."
            )

        for divided, others in (
            ("tensor_parallel", ()),
            ("expert_parallel", ("tensor_parallel", "activation_offload")),
        ):
            if getattr(self, divided) > 1:
                self._check_divided(prefix, divided, others)

    def _check_divided(self, prefix: str, divided: str, others: Sequence[str]) -> None:
        standard = type(self)()
        refused = ("compile", "explain", "cpu_offload", *others)
        wrong = [name for name in refused if getattr(self, name) != getattr(standard, name)]
        if type(self.reshard_after_forward) is int:  # torch cannot, of parameters that are divided already
            wrong.append("reshard_after_forward")
        for name in wrong:
            raise ConfigError(
                f"{prefix}{name}={str(getattr(self, name)).lower()} does not go together with "
                f"{prefix}{divided}={getattr(self, divided)} yet; leave one of them out."
            )

    def check_ranks(self, num_ranks: int, on_gpu: bool) -> None:
        """Raise ConfigError when these settings cannot work, or would do nothing, on `num_ranks` ranks."""
        self.check_mesh(num_ranks)
        for name in ("cpu_offload", "activation_offload"):
            if getattr(self, name) and not on_gpu:
                raise ConfigError(f"shard.{name}=true needs a GPU to offload from; this run is on the CPU already.")

    def check_mesh(self, num_ranks: int) -> None:
        """Raise ConfigError when `num_ranks` ranks cannot be arranged as these settings say, whatever drives them."""
        for divided in ("tensor_parallel", "expert_parallel"):
            if (ranks := getattr(self, divided)) > 1 and num_ranks % (self.replicas * ranks):
                raise ConfigError(
                    f"shard.replicas={self.replicas} times shard.{divided}={ranks} does not divide the {num_ranks} "
                    f"ranks of this run."
                )
        if num_ranks % self.replicas:
            raise ConfigError(f"shard.replicas={self.replicas} does not divide the {num_ranks} ranks of this run.")
        every, num_shards = self.reshard_after_forward, self.num_shards(num_ranks)
        if type(every) is int and (num_shards % every or every >= num_shards):
            raise ConfigError(
                f"shard.reshard_after_forward={every} must divide the {num_shards} ranks that share the model, and be "
                f"less; true reshards over all of them."
            )

    def check_model(self, model: nn.Module) -> None:
        """Raise ModelError or ConfigError when these settings cannot work for `model`, which may be on meta."""
        from fsdp_shard.sharding.compile import check_backend
        from fsdp_shard.sharding.wrap_policy import plan_units

        check_backend(self.compile)
        self._check_recomputed(model, plan_units(model, self))

    def _check_recomputed(self, model: nn.Module, units: Sequence[Unit]) -> None:
        from fsdp_shard.models import no_split_blocks
        from fsdp_shard.sharding.activation_checkpointing import recomputed_fqns

        kind = self.activation_checkpointing
        if kind in (False, "none"):
            return
        repeated = [block.fqn for block in no_split_blocks(model, self.blocks) if block.repeated]
        inside = [unit.fqn for unit in units if any(unit.fqn.startswith(f"{block}.") for block in repeated)]
        if kind == "selective" and inside:
            # Its parameters are gathered within what is computed again, and torch takes that for a computation.
            raise ConfigError(
                f"shard.activation_checkpointing=selective does not go together with units inside of blocks, of which "
                f"{inside[0]} is one (shard.norms_in_float32, shard.min_params or adapter.quantize made it); give true."
            )
        if not recomputed_fqns(repeated, kind):
            raise ConfigError(
                f"shard.activation_checkpointing={kind} would do nothing, as {type(model).__name__} has "
                f"{len(repeated)} repeated blocks."
            )

    def check_accumulation(self, num_micro_batches: int) -> None:
        """Raise ConfigError where this wrapper cannot add up the gradients of so many micro-batches."""

    def check_dtypes(self, model: nn.Module) -> None:
        """Raise ConfigError when parameters that this wrapper keeps together have several dtypes: those of a unit,
        frozen ones too where it has them in one flat parameter.
        """
        from fsdp_shard.sharding.wrap_policy import plan_units

        params = dict(model.named_parameters())
        for unit in plan_units(model, self):
            held = [params[name] for name in unit.parameters if self.joins_frozen or params[name].requires_grad]
            dtypes = sorted({str(param.dtype).removeprefix("torch.") for param in held})
            if len(dtypes) > 1:
                raise ConfigError(
                    f"shard={type(self).__name__.removesuffix('Config').lower()} cannot shard {unit.fqn or 'the root'} "
                    f"({unit.cls}), which has parameters of {' and '.join(dtypes)}; give model.dtype=float32"
                    f"{', or use shard=fsdp2' if self.joins_frozen else ''}."
                )

    def num_shards(self, num_ranks: int) -> int:
        """Ranks that a copy of the model is divided over."""
        return num_ranks // (self.replicas * self.tensor_parallel)

    def num_data_ranks(self, num_ranks: int) -> int:
        """Ranks, or groups of them, that see samples of their own."""
        return num_ranks // self.tensor_parallel

    def shares(self, shapes: Mapping[str, Shape], units: Sequence[Unit], num_shards: int) -> list[dict[str, Shape]]:
        """For each shard, the local shape of every parameter (`shapes` has the whole ones), and of any padding."""
        raise AssertionError("a wrapper's config class implements this")

    def unsharded_bytes(self, units: Sequence[Unit], num_shards: int, *, accumulates: bool) -> int:
        """What is whole on a rank for a while, at most; `accumulates` says that a step has several micro-batches.

        Gathered: the root, the unit that computes and those gathered ahead, in the dtype that they compute in; what is
        kept after the forward pass of all of them. Gradients: those of the root and of one unit before they are
        reduced, and the copy of one of the two that is reduced; of all units, if they are reduced once a step only.
        """
        *inner, root = (unit.gathered_bytes for unit in units)
        reduce = itemsize(self.reduce_dtype)
        largest = sorted(inner, reverse=True)
        ahead = max(1, self.prefetch_forward or 0, self.prefetch_backward or 0)
        every = self.reshard_after_forward
        gathered = root + (sum(inner) if every is False else sum(largest[: 1 + ahead]))
        if type(every) is int:
            gathered += sum(inner) // every
        *trained, of_root = (unit.num_trained * itemsize(unit.dtype) for unit in units)
        gradients = of_root + max(trained, default=0) + reduce * max(unit.num_trained for unit in units)
        if accumulates and not self.sync_every_micro_batch:
            gradients += sum(unit.num_trained for unit in units) * itemsize(self.accumulate_dtype)
        return gathered + gradients

    @property
    def accumulate_dtype(self) -> str:
        """The dtype of whole gradients that are added up before they are reduced."""
        return self.reduce_dtype

    def shard(self, model: nn.Module, context: DistributedContext) -> ShardedModel:
        """Wrap `model` (on meta, buffers on the device) over the ranks of `context`; parameters are left unfilled."""
        raise AssertionError("a wrapper's config class implements this")


class ShardedModel(Protocol):
    """A model whose parameters are divided over ranks."""

    module: nn.Module
    divided_over: str
    """The dimension of the mesh over whose ranks each parameter is divided."""

    def no_sync(self) -> AbstractContextManager[None]:
        """Keep gradients of the backward passes inside on this rank, unreduced."""
        ...

    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        """Scale all gradients so that their global 2-norm is at most `max_norm`; the norm before, a scalar []."""
        ...

    def local_shards(self) -> dict[str, LocalShard]:
        """This rank's part of every parameter and persistent buffer, by the FQN that the unsharded model has."""
        ...
