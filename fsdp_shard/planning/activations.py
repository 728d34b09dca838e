"""Bytes that the forward pass of one micro-batch saves for the backward pass, measured without computing anything.

And those of a chunked loss head, which replaces the logits and their gradient; they are computed.

The model runs on fake tensors, which have shapes, dtypes and storages but no memory, under autograd's hooks for saved
tensors; each storage counts once, parameters do not count. The block that saved a storage says whether checkpointing
frees it, and the operator that made it whether selective checkpointing keeps it. Kernels are those of the CPU; those of
attention save the same as a GPU's flash attention.
"""

from collections.abc import Collection, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import UntypedStorage, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from fsdp_shard.models import attention_implementations, no_split_blocks
from fsdp_shard.sharding import ShardConfig, is_saved_operator, recomputed_fqns
from fsdp_shard.training import LOSS_CHUNK_BYTES, use_loss_head
from fsdp_shard.utils import FakeTensorMode, TorchDispatchMode, replace_tensors

# transformers builds a causal mask whenever it meets fake tensors; real training without padding has none, so that
# kernels with a causal flag are used. This attention is sdpa without a mask.
_ATTENTION = "fsdp_shard_plan"


@dataclass(frozen=True)
class Activations:
    """Bytes of one micro-batch: `saved_bytes` for the backward pass, `logits_bytes` of the model's output."""

    saved_bytes: int
    logits_bytes: int


@dataclass
class _Saved:
    """What autograd saves, by storage, and the block that saved it.

    Attributes:
        parameters: Storages that do not count.
        recomputed: FQNs of the recomputed blocks.
        maker: Saved storage -> FQN of the block that saved it; None outside of blocks.
        inputs: Inputs of recomputed blocks.
        results: Results in recomputed blocks that selective checkpointing keeps.
        block: FQN of the block that runs.
    """

    parameters: Collection[UntypedStorage]
    recomputed: Collection[str]
    maker: dict[UntypedStorage, str | None] = field(default_factory=dict)
    inputs: set[UntypedStorage] = field(default_factory=set)
    results: set[UntypedStorage] = field(default_factory=set)
    block: str | None = None

    def save(self, tensor: torch.Tensor) -> torch.Tensor:
        if (storage := tensor.untyped_storage()) not in self.parameters:
            self.maker.setdefault(storage, self.block)
        return tensor

    def enter(self, fqn: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        self.block = fqn
        if fqn in self.recomputed:
            self.inputs.update(_storages((args, kwargs)))

    def leave(self, module: nn.Module, args: Any, output: Any) -> None:
        self.block = None

    def keep_results(self, output: Any) -> None:
        if self.block in self.recomputed:
            self.results.update(_storages(output))

    def device_bytes(self, offload: bool) -> int:
        """Bytes on the device while the block that saved most runs its backward pass, with all that it needs there.

        With `offload`, what blocks save (inputs of recomputed ones too, but not results) is in CPU memory until then;
        that of the next block comes back meanwhile.
        """
        kept = self.results | (set() if offload else self.inputs)
        of_block: dict[str, int] = {}
        for storage, maker in self.maker.items():
            if maker is None or not (offload or maker in self.recomputed):
                kept.add(storage)
            elif storage not in kept:
                of_block[maker] = of_block.get(maker, 0) + storage.nbytes()
        most = max(of_block, key=lambda block: of_block[block], default="")
        fetched = [num for block, num in of_block.items() if offload and block != most and block not in self.recomputed]
        return sum(storage.nbytes() for storage in kept) + of_block.get(most, 0) + max(fetched, default=0)


class _SelectiveMode(TorchDispatchMode):
    """Notes the results of the operators that selective checkpointing keeps."""

    def __init__(self, saved: _Saved) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        self._saved = saved

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        if is_saved_operator(func):
            self._saved.keep_results(output)
        return output


def measure_activations(
    model: PreTrainedModel, settings: ShardConfig, batch_size: int, sequence_length: int
) -> Activations:
    """Run the forward pass of `model` on fake tensors and add up what it saves for the backward pass.

    Args:
        model: The model on meta, in the dtype that it computes in. It is changed: its parameters end up as fake ones.
        settings: The blocks, and what of their activations is recomputed or offloaded.
        batch_size: Number of samples in the micro-batch.
        sequence_length: Length of each sample, in tokens.

    Returns:
        The bytes of activations and logits.
    """
    model.train()
    repeated = [block.fqn for block in no_split_blocks(model, settings.blocks) if block.repeated]
    with causal_without_mask(model), FakeTensorMode():
        replace_tensors(model, lambda tensor: torch.empty(tensor.shape, dtype=tensor.dtype))
        parameters = set(_storages([*model.parameters(), *model.buffers()]))
        saved = _Saved(parameters, recomputed_fqns(repeated, settings.activation_checkpointing))
        for fqn in repeated:
            module = model.get_submodule(fqn)
            module.register_forward_pre_hook(partial(saved.enter, fqn), with_kwargs=True)
            module.register_forward_hook(saved.leave)
        with (
            torch.autograd.graph.saved_tensors_hooks(saved.save, lambda tensor: tensor),
            _SelectiveMode(saved) if settings.activation_checkpointing == "selective" else nullcontext(),
        ):
            names = ["input_ids", *(["decoder_input_ids"] if model.config.is_encoder_decoder else [])]
            inputs = {name: torch.zeros((batch_size, sequence_length), dtype=torch.long) for name in names}
            output = model(**inputs, use_cache=False)
        logits = output.logits.untyped_storage().nbytes()
        return Activations(saved.device_bytes(settings.activation_offload), logits)


def _storages(value: Any) -> Iterator[UntypedStorage]:
    """The storages of all tensors in nested tuples, lists and mappings."""
    if isinstance(value, torch.Tensor):
        yield value.untyped_storage()
    elif isinstance(value, (tuple, list, dict)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _storages(item)


@contextmanager
def causal_without_mask(model: PreTrainedModel) -> Iterator[None]:
    """Have a model with sdpa attention use its causal flag instead of a mask."""
    if attention_implementations(model) != ["sdpa"]:
        yield
        return
    AttentionInterface.register(_ATTENTION, sdpa_attention_forward)
    AttentionMaskInterface.register(_ATTENTION, lambda *args, **kwargs: None)
    model.set_attn_implementation(_ATTENTION)
    try:
        yield
    finally:
        model.set_attn_implementation("sdpa")


def take_out_head(
    model: PreTrainedModel, chunked_loss: bool | str, num_rows: int, *, any_vocabulary: bool = False
) -> int | None:
    """Have `model` return its hidden state instead of logits, where training would use a chunked loss.

    Args:
        model: The model, on meta.
        chunked_loss: The setting `model.chunked_loss`.
        num_rows: Number of tokens in a micro-batch.
        any_vocabulary: Whether `auto` includes small vocabularies.

    Returns:
        Bytes of the loss head, or None where training would use logits.

    Raises:
        ModelError: `chunked_loss` is true and the model cannot be used with it.
    """
    softcap = getattr(model.config.get_text_config(), "final_logit_softcapping", None)
    if not use_loss_head(model, chunked_loss, any_vocabulary=any_vocabulary):
        return None
    head = model.get_output_embeddings()
    assert isinstance(head, nn.Linear), "use_loss_head has checked it"
    head.forward = lambda hidden: hidden  # type: ignore[method-assign, assignment]  # of an instance
    shape, dtype, is_trained = tuple(head.weight.shape), head.weight.dtype, head.weight.requires_grad
    return head_bytes(num_rows, shape, dtype, is_capped=softcap is not None, is_trained=is_trained)


def head_bytes(
    num_rows: int, shape: tuple[int, ...], dtype: torch.dtype, *, is_capped: bool = False, is_trained: bool = True
) -> int:
    """Peak bytes of the loss of `num_rows` tokens and its gradients, for a head of shape [vocabulary, width]."""
    vocabulary, width = shape
    chunk_rows = min(num_rows, max(1, LOSS_CHUNK_BYTES // (4 * vocabulary)))
    itemsize, precise = dtype.itemsize, 4 if chunk_rows < num_rows else dtype.itemsize
    # Logits as they come and in float32; to cap them, twice more in float32.
    of_logits = (0 if itemsize == 4 else itemsize) + 4 * (3 if is_capped else 1)
    of_chunk = chunk_rows * (vocabulary * of_logits + width * itemsize)
    in_end = vocabulary * width * itemsize if is_trained and precise != itemsize else 0
    kept = num_rows * width * itemsize + (vocabulary * width * precise if is_trained else 0)
    return kept + max(of_chunk, in_end)
