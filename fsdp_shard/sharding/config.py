"""The shard settings common to all wrappers, and the interface of a wrapper.

A wrapper consists of its settings, in `registry.py`, and a module of the same name with the functions `shard`,
`local_shapes`, `all_gather_numel` and `check_supported`, which is imported on demand. This file imports no torch, so a
config can be checked without it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from fsdp_shard.errors import ConfigError
from fsdp_shard.utils import in_yaml, non_default_settings, refuse_changed, setting

if TYPE_CHECKING:
    import torch
    from torch import nn

    from fsdp_shard.distributed import DistributedContext, LocalShard

Shape = tuple[int, ...]

# float16 needs loss scaling, which bfloat16 made unnecessary.
_ITEMSIZES = {"float32": 4, "bfloat16": 2}
DTYPES = tuple(_ITEMSIZES)

# Values of `activation_checkpointing` other than true, false and a number.
CHECKPOINTING_MODES = ("none", "all", "selective")


@dataclass
class ShardConfig:
    """Settings common to all wrappers.

    Attributes:
        wrapper: Name of the wrapper: its value in `shard=`, and its module in this folder.
        quantized_dtype: The storage dtype of quantized weights. Unless it is uint8, the wrapper needs each quantized
            weight in a separate unit.
        flattens_units: Whether all parameters of a unit, frozen and trained, form one flat parameter.
        is_sharded: Whether parameters are divided over ranks at all.
        accumulates_offloaded_gradients: Whether gradients of several micro-batches can be accumulated in CPU memory.
    """

    wrapper: ClassVar[str]
    quantized_dtype: ClassVar[str] = "uint8"
    flattens_units: ClassVar[bool] = False
    is_sharded: ClassVar[bool] = True
    accumulates_offloaded_gradients: ClassVar[bool] = True

    param_dtype: str = setting(
        "bfloat16", "The dtype in which blocks compute and parameters are gathered.", choices=DTYPES
    )
    reduce_dtype: str = setting("float32", "The dtype in which gradients are reduced.", choices=DTYPES)
    norms_in_float32: bool = setting(
        False, "Compute norm layers in float32 when param_dtype is narrower; each becomes a separate unit."
    )
    replicas: int = setting(1, "Number of replicas of the model; each is sharded over its own ranks (HSDP).", minimum=1)
    tensor_parallel: int = setting(
        1, "Number of neighboring ranks that divide each layer by the model's tensor-parallel plan.", minimum=1
    )
    expert_parallel: int = setting(
        1,
        "Number of neighboring ranks that divide the experts of a mixture-of-experts model by its expert-parallel "
        "plan.",
        minimum=1,
    )
    context_parallel: int = setting(
        1, "Number of neighboring ranks that divide each sequence; they share the same samples.", minimum=1
    )
    context_method: str = setting(
        "auto",
        "How they attend to each other's tokens. ulysses: exchange tokens for heads; ring: send keys and values around "
        "the ranks; auto: ulysses if context_parallel divides the heads, else ring.",
        choices=("auto", "ulysses", "ring"),
    )
    reshard_after_forward: bool | int = setting(
        True,
        "true frees a unit's gathered parameters after the forward pass and gathers them again for the backward pass; "
        "false keeps them; a number N reshards them over N neighboring ranks.",
    )
    prefetch_forward: int | None = setting(
        None, "Number of units to prefetch in the forward pass; null uses PyTorch's default.", minimum=0
    )
    prefetch_backward: int | None = setting(
        None, "Number of units to prefetch in the backward pass; null uses PyTorch's default, one.", minimum=0
    )
    cpu_offload: bool = setting(False, "Keep parameters, gradients and optimizer state in CPU memory. GPU only.")
    activation_checkpointing: bool | int | str = setting(
        False,
        "What to recompute in the backward pass: true or all, every block; a number N, every N-th block; selective, "
        "everything but the results of matrix products and attention; false or none, nothing.",
    )
    activation_offload: bool = setting(
        False,
        "Keep the activations of blocks in CPU memory until the backward pass. GPU only. With "
        "activation_checkpointing=true only the inputs of blocks are copied; without it the copies take longer than "
        "the step.",
    )
    compile: bool | str = setting(
        False, "Compile each block with torch.compile: true for its default backend (inductor), or a backend's name."
    )
    sync_every_micro_batch: bool = setting(
        True,
        "Reduce gradients after every micro-batch and keep only this rank's shard. "
        "false keeps unsharded gradients and reduces them once per step: more memory, less communication.",
    )
    blocks: list[str] = setting([], "Class names of the blocks to shard along; empty: the model's own no-split blocks.")
    min_params: int | None = setting(
        None,
        "Make a unit of every module with at least this many parameters outside of such modules inside it; null: of "
        "every block.",
        minimum=1,
    )
    explain: bool = setting(False, "Print the tree of units with their parameters and bytes before the run.")

    def check(self, prefix: str) -> None:
        """Raise ConfigError for settings that contradict each other, regardless of model and number of ranks."""
        checkpointing, reshard = self.activation_checkpointing, self.reshard_after_forward
        is_unknown = isinstance(checkpointing, str) and checkpointing not in CHECKPOINTING_MODES
        if is_unknown or (type(checkpointing) is int and checkpointing < 1):
            raise ConfigError(
                f"{prefix}activation_checkpointing={checkpointing} is not true, false, "
                f"{', '.join(CHECKPOINTING_MODES)} or a number N from 1 on, for every N-th block."
            )
        if type(reshard) is int and reshard < 2:
            raise ConfigError(
                f"{prefix}reshard_after_forward={reshard} is not true, false or a number of ranks from 2 on; "
                f"to keep parameters gathered after the forward pass, set it to false."
            )
        if self.blocks and self.min_params is not None:
            raise ConfigError(
                f"{prefix}blocks={self.blocks} and {prefix}min_params={self.min_params} are two ways to choose the "
                f"units; set only one of them."
            )
        if self.activation_offload and self.activation_checkpointing == "selective":
            raise ConfigError(
                f"{prefix}activation_offload=true moves nearly nothing with {prefix}activation_checkpointing="
                f"selective, whose results stay on the GPU; set {prefix}activation_checkpointing=true, or none."
            )
        if self.norms_in_float32 and self.param_dtype == "float32":
            raise ConfigError(
                f"{prefix}norms_in_float32=true has no effect, as {prefix}param_dtype=float32 holds for all layers."
            )
        if self.prefetch_backward is not None and reshard is False:
            raise ConfigError(
                f"{prefix}prefetch_backward={self.prefetch_backward} has no effect with {prefix}"
                f"reshard_after_forward=false, which keeps parameters gathered for the backward pass."
            )
        for name, others in (("tensor_parallel", ()), ("expert_parallel", ("tensor_parallel", "activation_offload"))):
            if getattr(self, name) > 1:
                _check_divided(self, prefix, name, others)
        if self.context_parallel == 1:
            why = f"has no effect without {prefix}context_parallel=N, the number of ranks that divide a sequence."
            refuse_changed(self, ["context_method"], prefix, why)
        else:
            names = ("tensor_parallel", "expert_parallel", "compile")
            _refuse_together(prefix, non_default_settings(self, names), f"context_parallel={self.context_parallel}")

    def check_supported(self, model: nn.Module) -> None:
        """Raise ConfigError if this wrapper cannot shard `model`, which may be on meta."""
        self._module().check_supported(model, self)

    def local_shapes(
        self, shapes: Mapping[str, Shape], units: Sequence[Unit], num_shards: int
    ) -> list[dict[str, Shape]]:
        """The local shape of every parameter, and of any padding, for each shard.

        Args:
            shapes: The unsharded shape of every parameter, by FQN.
            units: All units of the model.
            num_shards: Number of ranks over which one replica is sharded.

        Returns:
            For each shard, a mapping from FQN to local shape.
        """
        local: list[dict[str, Shape]] = self._module().local_shapes(shapes, units, num_shards)
        return local

    def all_gather_numel(self, shapes: Mapping[str, Shape], dtype: str, num_shards: int) -> int:
        """Number of elements that a rank sends when a unit is gathered, including padding.

        Args:
            shapes: The unsharded shapes of the unit's parameters, in order.
            dtype: The computation dtype of the unit.
            num_shards: Number of ranks over which one replica is sharded.
        """
        return int(self._module().all_gather_numel(shapes, dtype, num_shards))

    def shard(self, model: nn.Module, context: DistributedContext) -> ShardedModel:
        """Shard `model` (on meta, buffers on the device) over the ranks of `context`; parameters are left unfilled.

        For recipes, whose settings `check_finetune` has checked. Elsewhere use `fs.shard`, which checks the model, the
        settings and the context.
        """
        sharded: ShardedModel = self._module().shard(model, self, context)
        return sharded

    def _module(self) -> Any:
        if not hasattr(self, "wrapper"):
            raise ConfigError(
                "shard has no wrapper: make the config with `fs.compose_config(fs.FinetuneConfig, [...])`, which has "
                "fsdp2 unless the settings name another, such as shard=fsdp1."
            )
        return import_module(f"{__package__}.{self.wrapper}")


def _check_divided(shard: ShardConfig, prefix: str, divided: str, others: Sequence[str]) -> None:
    wrong = non_default_settings(shard, ("compile", "explain", "cpu_offload", *others))
    if type(shard.reshard_after_forward) is int:  # torch does not support it for parameters that are already divided
        wrong["reshard_after_forward"] = shard.reshard_after_forward
    _refuse_together(prefix, wrong, f"{divided}={getattr(shard, divided)}")


def _refuse_together(prefix: str, wrong: Mapping[str, Any], given: str) -> None:
    for name, value in wrong.items():
        raise ConfigError(
            f"{prefix}{name}={in_yaml(value)} cannot be combined with {prefix}{given} yet; remove one of them."
        )


@dataclass(frozen=True, slots=True)
class Unit:
    """A module whose parameters are gathered together.

    Attributes:
        fqn: FQN of the module; empty for the root.
        cls: Class name of the module.
        parameters: FQNs of its parameters, except those of nested units; tied ones once.
        num_params: Number of weights, including those that quantized parameters represent.
        num_bytes: Bytes of the parameters as stored.
        dtype: The computation dtype of the unit.
        num_trained: Number of elements that are not frozen.
        gathered_bytes: Bytes of the gathered parameters.
        is_quantized: Whether the parameters are raw bytes in a floating-point dtype, which must not be cast.
    """

    fqn: str
    cls: str
    parameters: tuple[str, ...]
    num_params: int
    num_bytes: int
    dtype: str
    num_trained: int
    gathered_bytes: int
    is_quantized: bool = False


def itemsize(dtype: str) -> int:
    """Bytes per element of a computation dtype."""
    return _ITEMSIZES[dtype]


class ShardedModel(Protocol):
    """A model whose parameters are sharded over ranks, as `shard` returns it.

    Example:
        >>> def loss_of(model: fsdp_shard.ShardedModel, ids: torch.Tensor) -> torch.Tensor:  # doctest: +SKIP
        ...     return model.module(input_ids=ids, labels=ids).loss
    """

    shard_mesh_dim: str
    """The dimension of the device mesh over which each parameter is divided."""

    @property
    def module(self) -> nn.Module:
        """The wrapped model."""

    def no_sync(self) -> AbstractContextManager[None]:
        """Within the block, keep the gradients of backward passes on this rank, unreduced."""

    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        """Scale all gradients so that their global 2-norm is at most `max_norm`; return the norm before, a scalar."""

    def local_shards(self) -> dict[str, LocalShard]:
        """This rank's shard of every parameter and persistent buffer, by its FQN in the unsharded model."""
