"""An adapter and its base as one model: W + scale * B @ A, computed range by range as the weights are read.

Whatever reads through an index so reads the merged model, and no tensor of it is ever whole in memory unless its reader
wants it so. Computed in float32 and rounded once to the base's dtype. LoRA's plain kind only; others are refused.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fsdp_shard.checkpoint.formats import peft
from fsdp_shard.checkpoint.index import Codec, Piece, TensorEntry, TensorIndex
from fsdp_shard.checkpoint.io.dtypes import CASTABLE, itemsize, to_torch
from fsdp_shard.checkpoint.io.files import has_file, member, read_json
from fsdp_shard.checkpoint.keys.wrapper_prefixes import ADAPTER
from fsdp_shard.checkpoint.model_files import has_tokenizer
from fsdp_shard.checkpoint.open import open_checkpoint
from fsdp_shard.errors import CheckpointError
from fsdp_shard.models import NAME, side_directory

if TYPE_CHECKING:
    import torch

    Factors = Callable[[], tuple[torch.Tensor, torch.Tensor]]

_PREFIX = "base_model.model."
_LOW_RANK = re.compile(r"(?P<module>.+)\.lora_(?:embedding_)?(?P<part>[AB])(?:\.default)?(?:\.weight)?")
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


def open_weights(path: str | Path, base: str | Path | None = None) -> TensorIndex:
    """The tensor index of the model at `path`: as `open_checkpoint`, but an adapter is merged into its base.

    The base is `base`, or what adapter_config.json names. Raises CheckpointError when it is not there, does not fit, or
    when `base` is given and `path` is no adapter.
    """
    index = open_checkpoint(path)
    if index.format != peft.NAME:
        if base is None:
            return index
        index.close()
        raise CheckpointError(f"base={base} is for an adapter, but {index.place} holds the weights of a model itself.")
    named = str(base) if base is not None else peft.base_of(index.root)
    try:
        below = open_checkpoint(named)
    except CheckpointError as error:
        raise CheckpointError(
            f"{index.root} is an adapter of {named}, which cannot be read: {error} Give its base model with base=PATH "
            f"(convert), or correct base_model_name_or_path in {index.root / peft.CONFIG}."
        ) from error
    if below.format == peft.NAME:
        raise CheckpointError(
            f"{index.root} is an adapter of {named}, which is an adapter itself; convert that one to a model first."
        )
    return _merge(index, below)


def refuse_adapter_beside(index: TensorIndex) -> None:
    """Raise CheckpointError where a state dict holds a base and LoRA beside it: the base alone is another model."""
    if ADAPTER in index.extras:
        raise CheckpointError(
            f"{index.place} holds {index.extras[ADAPTER].num_tensors} tensors of an adapter beside the weights of its "
            f"base, which alone are another model; merge the two with peft, or save the adapter by its save_pretrained."
        )


@dataclass
class _Merged(TensorIndex):
    """The base's index with other entries; closes the files of both."""

    parts: tuple[TensorIndex, ...] = ()

    def close(self) -> None:
        super().close()
        for part in self.parts:
            part.close()


def _merge(adapter: TensorIndex, base: TensorIndex) -> TensorIndex:
    config = peft.read_config(adapter.root)
    _refuse_other_kinds(adapter.root, config)
    pairs: dict[str, dict[str, str]] = {}
    tensors = dict(base.tensors)
    for name in adapter.names:
        fqn = name.removeprefix(_PREFIX)
        if match := _LOW_RANK.fullmatch(fqn):
            pairs.setdefault(match["module"], {})[match["part"]] = name
        elif "lora_" in fqn:
            raise CheckpointError(f"{adapter.root} holds {name}, which is no part of plain LoRA; merge it with peft.")
        else:
            kept = _base_entry(adapter, base, fqn.replace(".modules_to_save.default", "").replace(".base_layer", ""))
            tensors[kept.name] = _replaced(adapter, name, kept)
    for module, parts in pairs.items():
        kept = _base_entry(adapter, base, f"{module}.weight")
        tensors[kept.name] = _adapted(adapter, base, config, module, parts, kept)
    gguf_file = base.metadata.get("file") if base.format == NAME else None
    side = side_directory(base.root / gguf_file) if gguf_file else base.side or base.root
    return _Merged(
        base.root,
        peft.NAME,
        tensors,
        base.aliases,
        {"adapter": str(adapter.root)},
        adapter.step,
        extras=base.extras,
        side=side,
        own_tokenizer=adapter.root if has_tokenizer(adapter.root) else None,
        parts=(adapter, base),
    )


def _refuse_other_kinds(root: Path, config: Mapping[str, Any]) -> None:
    where = root / peft.CONFIG
    if config["peft_type"] != "LORA":
        raise CheckpointError(f"{where}: an adapter of type {config['peft_type']} cannot be merged here, LORA can.")
    for name in _OTHER_KINDS:
        if config.get(name):
            raise CheckpointError(f"{where}: LoRA with {name} cannot be merged here; merge it with peft.")
    start = config.get("init_lora_weights")
    if start not in _PLAIN_STARTS:
        raise CheckpointError(
            f"{where}: init_lora_weights={start!r} changes the base model, so it cannot be merged here; merge it "
            f"with peft."
        )


def _base_entry(adapter: TensorIndex, base: TensorIndex, fqn: str) -> TensorEntry:
    """The base's tensor that the adapter calls `fqn`; a checkpoint of the bare model lacks the model's prefix."""
    if fqn in base.aliases or fqn in base.aliases.values():
        raise CheckpointError(
            f"{adapter.root} changes {fqn}, which {base.place} ties to another tensor; merging would change both."
        )
    names = [fqn] if fqn in base.tensors else [n for n in base.names if fqn.endswith(f".{n}") or n.endswith(f".{fqn}")]
    if len(names) != 1:
        raise CheckpointError(
            f"{adapter.root} changes {fqn}, but {base.place} has no such tensor: it is no base of it."
        )
    return base.tensors[names[0]]


def _replaced(adapter: TensorIndex, name: str, kept: TensorEntry) -> TensorEntry:
    """A tensor that the adapter has whole (modules_to_save)."""
    if adapter.shapes[name] != kept.shape:
        raise _misfit(adapter, name, adapter.shapes[name], kept)
    entry = adapter.tensors[name]
    codec = _Elsewhere(adapter, name, entry.num_bytes)
    return kept._replace(dtype=entry.dtype, pieces=(_piece(kept, codec),))


def _adapted(
    adapter: TensorIndex,
    base: TensorIndex,
    config: Mapping[str, Any],
    module: str,
    parts: Mapping[str, str],
    kept: TensorEntry,
) -> TensorEntry:
    if parts.keys() != {"A", "B"}:
        raise CheckpointError(f"{adapter.root} has only one of lora_A and lora_B of {module}.")
    if kept.dtype not in CASTABLE:
        raise CheckpointError(
            f"{adapter.root} changes {kept.name}, which {base.place} stores as {kept.dtype}; an adapter merges into "
            f"floating-point weights of 16 or 32 bits only."
        )
    (rank, columns), (rows, rank_b) = (_matrix(adapter, parts[part]) for part in "AB")
    if rank != rank_b or set(kept.shape) != {rows, columns} or len(kept.shape) != 2:
        raise _misfit(adapter, f"lora_B @ lora_A of {module}", (rows, columns), kept)
    is_embedding = "lora_embedding_A" in parts["A"]
    is_square = rows == columns
    transposed = is_embedding or (_is_conv1d(base, config, module) if is_square else kept.shape != (rows, columns))
    scale = _scale(adapter, config, module, rank)

    @functools.lru_cache(maxsize=1)
    def factors() -> tuple[torch.Tensor, torch.Tensor]:
        a, b = adapter.read(parts["A"]).float(), adapter.read(parts["B"]).float() * scale
        return (a.T.contiguous(), b.T.contiguous()) if transposed else (b, a)

    return kept._replace(pieces=(_piece(kept, _LowRank(base, kept, factors)),))


def _is_conv1d(base: TensorIndex, config: Mapping[str, Any], module: str) -> bool:
    """Whether a square weight of the base lies transposed, as in transformers' Conv1D.

    peft's own `fan_in_fan_out` is that of the last module which it came to. Models with such layers name these alike.
    """
    told = bool(config.get("fan_in_fan_out"))
    side = base.side or base.root
    document = read_json(member(side, "config.json")) if has_file(side, "config.json") else {}
    kind = document.get("model_type") if isinstance(document, dict) else None
    return module.rpartition(".")[2] in _CONV1D_LAYERS if kind in _CONV1D_MODELS else told


def _matrix(adapter: TensorIndex, name: str) -> tuple[int, int]:
    shape = adapter.shapes[name]
    if len(shape) != 2:
        raise CheckpointError(f"{adapter.root}: {name} has shape {list(shape)}; only matrices can be merged.")
    return shape[0], shape[1]


def _scale(adapter: TensorIndex, config: Mapping[str, Any], module: str, rank: int) -> float:
    alpha = _of_module(config.get("alpha_pattern") or {}, module, config.get("lora_alpha"))
    if not isinstance(alpha, (int, float)) or isinstance(alpha, bool):
        raise CheckpointError(f"{adapter.root / peft.CONFIG}: lora_alpha is {alpha!r}; expected a number.")
    return float(alpha) / (math.sqrt(rank) if config.get("use_rslora") else rank)


def _of_module(patterns: Mapping[str, Any], module: str, default: Any) -> Any:
    """peft's rule: the first pattern that is the module's name, or the end of it after a dot."""
    try:
        return next((value for key, value in patterns.items() if re.match(rf"(.*\.)?({key})$", module)), default)
    except (re.error, AttributeError) as error:
        raise CheckpointError(f"{peft.CONFIG}: alpha_pattern {patterns!r} cannot be used: {error}.") from error


def _misfit(adapter: TensorIndex, what: str, shape: tuple[int, ...], kept: TensorEntry) -> CheckpointError:
    return CheckpointError(
        f"{adapter.root}: {what} has shape {list(shape)}, but {kept.name} of its base has {list(kept.shape)}: it is an "
        f"adapter of another model."
    )


def _piece(kept: TensorEntry, codec: Codec) -> Piece:
    return Piece(kept.pieces[0].file, kept.pieces[0].start, (0,) * len(kept.shape), kept.shape, codec)


@dataclass(frozen=True, slots=True)
class _Elsewhere:
    """A tensor that another index holds."""

    index: TensorIndex
    name: str
    num_bytes: int

    def decode_into(self, read: Any, start: int, out: memoryview) -> None:
        self.index.read_into(self.name, start, out)


@dataclass(frozen=True, slots=True)
class _LowRank:
    """A matrix of `base` plus the product of two thin ones, [rows, r] and [r, columns]."""

    base: TensorIndex
    entry: TensorEntry
    factors: Factors = field(repr=False)

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
        values.copy_(values.float() + product)
