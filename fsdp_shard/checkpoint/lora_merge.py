"""Merges a LoRA adapter into its base model: W + scale * B @ A, computed range by range as the weights are read.

So everything that reads through the index reads the merged model, and needs memory only for the ranges it reads.
Computed in float32 and rounded once to the base's dtype. Plain LoRA only; other kinds of adapters are refused.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fsdp_shard.checkpoint.base_model import fingerprint, read_base_model
from fsdp_shard.checkpoint.formats import peft
from fsdp_shard.checkpoint.index import TensorIndex
from fsdp_shard.checkpoint.io import CASTABLE, has_file, itemsize, member, read_json, to_torch
from fsdp_shard.checkpoint.keys.quantized_weights import quantization, refuse_quantized
from fsdp_shard.checkpoint.keys.wrapper_prefixes import ADAPTER
from fsdp_shard.checkpoint.model_files import CONFIG
from fsdp_shard.checkpoint.tensor_entry import Codec, Piece, TensorEntry
from fsdp_shard.errors import CheckpointError
from fsdp_shard.utils import format_count

if TYPE_CHECKING:
    import torch

    Factors = Callable[[], tuple[torch.Tensor, torch.Tensor]]

_PREFIX = "base_model.model."
_LOW_RANK = re.compile(r"(?P<module>.+)\.lora_(?:embedding_)?(?P<factor>[AB])(?:\.default)?(?:\.weight)?")
# Settings of kinds of LoRA that are more than a product of two matrices, or that change the base.
_OTHER_KINDS = (
    "use_dora",
    "use_qalora",
    "lora_bias",
    "target_parameters",
    "trainable_token_indices",
    "layer_replication",
    "alora_invocation_tokens",
    "use_bdlora",
    "arrow_config",
    "kasa_config",
    "monteclora_config",
    "velora_config",
    "megatron_config",
)
_CONV1D_MODELS = frozenset({"gpt2", "openai-gpt", "imagegpt", "decision_transformer"})
_CONV1D_LAYERS = frozenset({"c_attn", "c_proj", "c_fc", "q_attn"})
_PLAIN_STARTS = (None, True, False, "gaussian", "orthogonal", "eva")


def merge_adapter(adapter: TensorIndex, base: TensorIndex, side: Path) -> TensorIndex:
    """Merge a LoRA adapter into its base model; of the weights, only what identifies the base is read.

    Args:
        adapter: The adapter's own tensors.
        base: The weights of the model that it is for.
        side: The directory with the config of the base.

    Returns:
        The index of the merged model.

    Raises:
        CheckpointError: The adapter is not for this base, or it is more than plain LoRA.
    """
    config = peft.read_adapter_config(adapter.root)
    _refuse_other_kinds(adapter.root, config)
    _refuse_other_base(adapter.root, base)
    merge = _Merge(adapter, base, side, config)
    factors: dict[str, dict[str, str]] = {}
    tensors = dict(base.tensors)
    for name in adapter.names:
        fqn = name.removeprefix(_PREFIX)
        if match := _LOW_RANK.fullmatch(fqn):
            factors.setdefault(match["module"], {})[match["factor"]] = name
        elif "lora_" in fqn:
            raise CheckpointError(f"{adapter.root} holds {name}, which is no part of plain LoRA; merge it with peft.")
        else:
            entry = merge.replaced(name, fqn.replace(".modules_to_save.default", "").replace(".base_layer", ""))
            tensors[entry.name] = entry
    for module, names in factors.items():
        entry = merge.adapted(module, names)
        tensors[entry.name] = entry
    return replace(
        base,
        format=peft.NAME,
        tensors=tensors,
        metadata={"adapter": str(adapter.root)},
        step=adapter.step,
        world_size=None,
        side=side,
        parts=(adapter, base),
    )


def check_loadable(index: TensorIndex) -> None:
    """Raise CheckpointError unless the stored weights are those that the model computes with.

    Quantized weights are not, nor are those of a base model that are stored together with its LoRA.
    """
    refuse_quantized(index.path, quantization(index))
    if ADAPTER in index.extras:
        found = format_count(index.extras[ADAPTER].num_tensors, "tensor")
        raise CheckpointError(
            f"{index.path} holds {found} of an adapter together with the weights of its base, which alone are another "
            f"model; merge the two with peft, or save the adapter by its save_pretrained."
        )


def _refuse_other_kinds(root: Path, config: Mapping[str, Any]) -> None:
    start, problem = config.get("init_lora_weights"), None
    if config["peft_type"] != "LORA":
        problem = f"an adapter of type {config['peft_type']} cannot be merged here, LORA can"
    elif kind := next((name for name in _OTHER_KINDS if config.get(name)), None):
        problem = f"LoRA with {kind} cannot be merged here; merge it with peft"
    elif start not in _PLAIN_STARTS:
        problem = f"init_lora_weights={start!r} changes the base model, so it cannot be merged here; merge it with peft"
    if problem is not None:
        raise CheckpointError(f"{root / peft.ADAPTER_CONFIG}: {problem}.")


def _refuse_other_base(root: Path, base: TensorIndex) -> None:
    """Refuse other weights of the same shapes, where the adapter records those it was trained on."""
    recorded = read_base_model(root)
    if recorded is not None and fingerprint(base) != recorded.fingerprint:
        raise CheckpointError(
            f"{root} is an adapter that was trained on {recorded.path}, but the weights in {base.path} are others; "
            f"give that model as base, with the names and dtypes that it had."
        )


@dataclass(frozen=True)
class _Merge:
    """Makes entries of the merged model; `config` is the parsed adapter_config.json."""

    adapter: TensorIndex
    base: TensorIndex
    side: Path
    config: Mapping[str, Any]

    def replaced(self, name: str, fqn: str) -> TensorEntry:
        """A tensor that the adapter has as a whole (modules_to_save)."""
        kept, entry = self._base_entry(fqn), self.adapter.tensors[name]
        if entry.shape != kept.shape:
            raise self._misfit(name, entry.shape, kept)
        return _with_codec(kept._replace(dtype=entry.dtype), _Copied(self.adapter, name, entry.num_bytes))

    def adapted(self, module: str, names: Mapping[str, str]) -> TensorEntry:
        """The weight of a module plus the product of its two factors, whose names in the adapter are `names`."""
        adapter, kept = self.adapter, self._base_entry(f"{module}.weight")
        if names.keys() != {"A", "B"}:
            raise CheckpointError(f"{adapter.root} has only one of lora_A and lora_B of {module}.")
        if kept.dtype not in CASTABLE:
            raise CheckpointError(
                f"{adapter.root} changes {kept.name}, which {self.base.path} stores as {kept.dtype}; an adapter merges "
                f"into floating-point weights of 16 or 32 bits only."
            )
        (rank, columns), (rows, rank_b) = (self._matrix(names[factor]) for factor in "AB")
        if rank != rank_b or set(kept.shape) != {rows, columns} or len(kept.shape) != 2:
            raise self._misfit(f"lora_B @ lora_A of {module}", (rows, columns), kept)
        is_stored_transposed = self._is_conv1d(module) if rows == columns else kept.shape != (rows, columns)
        is_transposed = "lora_embedding_A" in names["A"] or is_stored_transposed
        scale = self._scale(module, rank)

        @functools.lru_cache(maxsize=1)
        def factors() -> tuple[torch.Tensor, torch.Tensor]:
            a, b = adapter.read(names["A"]).float(), adapter.read(names["B"]).float()
            return (a.T.contiguous(), b.T.contiguous()) if is_transposed else (b, a)

        return _with_codec(kept, _LowRankSum(self.base, kept, factors, scale))

    def _base_entry(self, fqn: str) -> TensorEntry:
        """The base's tensor that the adapter calls `fqn`; a checkpoint of the bare model lacks the model's prefix."""
        base = self.base
        if fqn in base.aliases or fqn in base.aliases.values():
            raise CheckpointError(
                f"{self.adapter.root} changes {fqn}, which {base.path} ties to another tensor; merging would change "
                f"both."
            )
        names = [n for n in base.names if fqn.endswith(f".{n}") or n.endswith(f".{fqn}")]
        names = [fqn] if fqn in base.tensors else names
        if len(names) != 1:
            raise CheckpointError(
                f"{self.adapter.root} changes {fqn}, but {base.path} has no such tensor: it is no base of it."
            )
        return base.tensors[names[0]]

    def _is_conv1d(self, module: str) -> bool:
        """Whether a square weight of the base is stored transposed, as in transformers' Conv1D.

        peft's `fan_in_fan_out` is that of the last module it adapted. Models with such layers name these alike.
        """
        has_config = has_file(self.side, CONFIG)
        document = read_json(member(self.side, CONFIG)) if has_config else {}
        model_type = document.get("model_type") if isinstance(document, dict) else None
        if model_type in _CONV1D_MODELS:
            return module.rpartition(".")[2] in _CONV1D_LAYERS
        return bool(self.config.get("fan_in_fan_out"))

    def _matrix(self, name: str) -> tuple[int, int]:
        shape = self.adapter.shapes[name]
        if len(shape) != 2:
            raise CheckpointError(f"{self.adapter.root}: {name} has shape {list(shape)}; only matrices can be merged.")
        return shape[0], shape[1]

    def _scale(self, module: str, rank: int) -> float:
        path, patterns = self.adapter.root / peft.ADAPTER_CONFIG, self.config.get("alpha_pattern") or {}
        alpha = self.config.get("lora_alpha")
        try:  # peft's rule: the first pattern that is the module's name, or the end of it after a dot
            alpha = next((value for key, value in patterns.items() if re.match(rf"(.*\.)?({key})$", module)), alpha)
        except (re.error, AttributeError) as error:
            raise CheckpointError(f"{path}: alpha_pattern {patterns!r} cannot be used: {error}.") from error
        if not isinstance(alpha, (int, float)) or isinstance(alpha, bool):
            raise CheckpointError(f"{path}: lora_alpha is {alpha!r}; expected a number.")
        return float(alpha) / (math.sqrt(rank) if self.config.get("use_rslora") else rank)

    def _misfit(self, what: str, shape: tuple[int, ...], kept: TensorEntry) -> CheckpointError:
        return CheckpointError(
            f"{self.adapter.root}: {what} has shape {list(shape)}, but {kept.name} of its base has {list(kept.shape)}: "
            f"it is an adapter of another model."
        )


def _with_codec(entry: TensorEntry, codec: Codec) -> TensorEntry:
    """The entry as one piece that `codec` reads; the file only stands for those of the base."""
    first = entry.pieces[0]
    return entry._replace(pieces=(Piece(first.file, first.start, (0,) * len(entry.shape), entry.shape, codec),))


@dataclass(frozen=True, slots=True)
class _Copied:
    """A tensor that another index holds."""

    index: TensorIndex
    name: str
    num_bytes: int

    def decode_into(self, read: Any, start: int, out: memoryview) -> None:
        self.index.read_into(self.name, start, out)


@dataclass(frozen=True, slots=True)
class _LowRankSum:
    """A matrix of `base` plus the product of two thin ones, [rows, r] and [r, columns], scaled after it as by peft."""

    base: TensorIndex
    entry: TensorEntry
    factors: Factors = field(repr=False)
    scale: float

    @property
    def num_bytes(self) -> int:
        return self.entry.num_bytes

    def decode_into(self, read: Any, start: int, out: memoryview) -> None:
        import torch

        self.base.read_into(self.entry.name, start, out)
        left, right = self.factors()
        columns = self.entry.shape[1]
        stop = start + len(out) // itemsize(self.entry.dtype)
        first, last = start // columns, -(-stop // columns)
        product = (left[first:last] @ right).view(-1)[start - first * columns : stop - first * columns]
        values = torch.frombuffer(out, dtype=to_torch(self.entry.dtype))
        values.copy_(values.float() + product * self.scale)
