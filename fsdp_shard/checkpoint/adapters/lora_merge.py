"""Merges a LoRA adapter into its base model: W + scale * B @ A, computed range by range as the weights are read.

Everything that reads through the index therefore reads the merged model, and needs memory only for those ranges.
The product is computed in float32 and rounded once to the base's dtype. With DoRA (Liu et al., 2024), the weights of
each output are scaled to the trained norm. The adapter stores a classifier's new head as a whole, and trained rows of
an embedding in place of the base's. Other kinds of adapters are rejected.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fsdp_shard.checkpoint.adapters.adapter_checks import (
    AdapterParts,
    check_adapter,
    check_factors,
    is_unread_copy,
    quantized_base_error,
    refuse_other_base,
)
from fsdp_shard.checkpoint.adapters.merged_matrix import LowRankSum, ReplacedRows, ScaledSum
from fsdp_shard.checkpoint.base_model import read_base_model
from fsdp_shard.checkpoint.formats import peft
from fsdp_shard.checkpoint.index import TensorIndex
from fsdp_shard.checkpoint.io import CASTABLE, kind_of, to_torch
from fsdp_shard.checkpoint.keys.lora_settings import LoraSettings
from fsdp_shard.checkpoint.keys.model_names import (
    CopiedTensor,
    ModelNames,
    names_of_files,
    names_of_model,
)
from fsdp_shard.checkpoint.keys.quantized_weights import quantization
from fsdp_shard.checkpoint.keys.tied_weights import absent_ties, has_same_bytes, stored_twice
from fsdp_shard.checkpoint.model_files import read_config
from fsdp_shard.checkpoint.tensor_entry import Piece, TensorEntry
from fsdp_shard.errors import CheckpointError, InputError, one_line
from fsdp_shard.utils import first_few

if TYPE_CHECKING:
    import torch


# Types of models that store some linear layers transposed (transformers' Conv1D), and the names of these layers.
_CONV1D_MODELS = frozenset({"gpt2", "openai-gpt", "imagegpt", "decision_transformer", "clvp", "clvp_decoder"})
_CONV1D_LAYERS = frozenset({"c_attn", "c_proj", "c_fc", "q_attn"})
_RESIZE = (
    "If the vocabulary was changed for it, resize the base likewise (resize_token_embeddings), save it, and give it as "
    "the base."
)
_IN_LAYER = re.compile(r"\.\d+\.")  # the name of a tensor in one of several layers, which are never tied


def merge_adapter(adapter: TensorIndex, base: TensorIndex, side: Path) -> TensorIndex:
    """Merge a LoRA adapter into its base model; reads only the weights that identify the base.

    Contradictory tensors and settings are rejected or dropped as in peft.

    Args:
        adapter: The adapter's tensors.
        base: The base model's weights.
        side: The directory with the config of the base.

    Returns:
        The index of the merged model; its notes list what was dropped.

    Raises:
        QuantizedBaseError: The base's weights that the adapter changes are quantized.
        CheckpointError: The adapter is not for this base, or it is neither LoRA nor DoRA.
    """
    settings, parts = check_adapter(adapter)
    recorded = read_base_model(adapter.root)
    if recorded is not None:
        refuse_other_base(adapter.root, base, side, recorded)
        base = base if recorded.head is None else _without(base, recorded.head.replaced)
    has_new_head = recorded is not None and recorded.head is not None
    try:
        return _merged(adapter, base, side, settings, parts, has_new_head=has_new_head)
    except CheckpointError as error:  # quantized weights have other names, shapes and dtypes
        if (method := quantization(base)) is None or _are_plain(base, settings, parts):
            raise
        raise quantized_base_error(adapter, base, method) from error


def _merged(
    adapter: TensorIndex,
    base: TensorIndex,
    side: Path,
    settings: LoraSettings,
    parts: AdapterParts,
    *,
    has_new_head: bool,
) -> TensorIndex:
    """Return the index of the merged model; see `merge_adapter`."""
    names = _names(adapter, base, side, settings, parts, has_new_head=has_new_head)
    merge = _Merge(adapter, base, side, settings, parts, names, has_new_head)
    targets = {module: factors for module, factors in parts.factors.items() if merge.is_target(module)}
    notes = merge.check_modules()
    merge.check_tokens()
    stored = {fqn: name for fqn, name in merge.whole.items() if not merge.is_absent_copy(fqn)}
    entries = {entry.name: entry for entry in (merge.replacement(name, fqn) for fqn, name in stored.items())}
    entries |= {entry.name: entry for entry in (merge.adapted_weight(*item, entries) for item in targets.items())}
    for module, name in merge.tokens.items():
        entries |= {entry.name: entry for entry in merge.replaced_rows(module, name, entries)}
    if both := [module for module in targets if module in merge.wrapped_parameters]:
        raise CheckpointError(f"{settings.path}: target_modules and target_parameters both have {both[0]}.")
    stacks = {module: factors for module, factors in parts.factors.items() if module in merge.wrapped_parameters}
    for item in stacks.items():
        entries |= {entry.name: entry for entry in merge.adapted_parameter(*item, entries)}
    targets |= stacks
    used = {*merge.whole.values(), *merge.tokens.values(), *merge.copied_tokens.values()}
    used |= {name for factors in targets.values() for name in factors.values()}
    if unused := [name for name in adapter.names if name not in used and not is_unread_copy(name)]:
        notes.append(_left_out(adapter, unused))
    if not entries:
        raise CheckpointError(f"{notes[-1]} Nothing of it is left.")
    if unused and settings.is_all_linear and (method := quantization(base)) is not None:
        raise quantized_base_error(adapter, base, method)  # no matrices show that its layers are linear
    return replace(
        base,
        format=peft.NAME,
        tensors=base.tensors | entries,
        metadata={"adapter": str(adapter.root)},
        step=adapter.step,
        world_size=None,
        side=side,
        parts=(adapter, base),
        notes=(*base.notes, *map(one_line, notes)),  # whose names are those in the file
    )


def _names(
    adapter: TensorIndex,
    base: TensorIndex,
    side: Path,
    settings: LoraSettings,
    parts: AdapterParts,
    *,
    has_new_head: bool,
) -> ModelNames:
    """Return the model's names for the base's tensors.

    The model class is consulted only if the adapter has other names, such as those with the prefix of the bare model
    that the base stores, or adapts parameters: the order of parameters in a module identifies them in the adapter.
    """
    names = names_of_files(base)
    whole = {_in_base(fqn): name for fqn, name in parts.whole.items()}
    changed = [f"{module}.weight" for module in (*parts.factors, *parts.tokens)] + ([] if has_new_head else list(whole))
    if not settings.parameters and names.tensors.keys() >= {*map(_in_base, changed)}:
        return names
    head = {fqn: adapter.tensors[name]._replace(name=fqn) for fqn, name in whole.items() if not _find(names, fqn)}
    try:
        return names_of_model(base, side, head if has_new_head else {})
    except InputError as error:
        if settings.parameters:
            raise CheckpointError(
                f"{settings.path}: target_parameters needs the base model's class, which cannot be built: {error}"
            ) from error
        return names  # the error then names the missing tensors


def _are_plain(base: TensorIndex, settings: LoraSettings, parts: AdapterParts) -> bool:
    """Return whether the matrices that an adapter changes are stored in floating point, each under its own name."""
    names = names_of_files(base)
    for module in (*parts.factors, *parts.tokens):
        found = [base.tensors.get(name) for name in _find(names, f"{module}.weight")]
        if len(found) != 1 or found[0] is None or found[0].dtype not in CASTABLE:
            return False
    return not settings.parameters


def _in_base(fqn: str) -> str:
    """Return the base's name for a tensor of an adapted module."""
    return fqn.replace(".token_adapter.", ".").replace(".base_layer.", ".")


def _find(names: ModelNames, fqn: str) -> list[str]:
    """Find the name that `fqn` means; a checkpoint of the bare model lacks the model's prefix."""
    if fqn in names.tensors:
        return [fqn]
    return [name for name in names.tensors if fqn.endswith(f".{name}") or name.endswith(f".{fqn}")]


def _module_of(name: str) -> str:
    """Return the FQN of a parameter's module."""
    return name.rpartition(".")[0]


def _without(base: TensorIndex, names: Sequence[str]) -> TensorIndex:
    """Return the base without tensors that a new head replaces."""
    dropped = set(names)
    return replace(
        base,
        tensors={name: entry for name, entry in base.tensors.items() if name not in dropped},
        aliases={name: kept for name, kept in base.aliases.items() if not {name, kept} & dropped},
    )


def _left_out(adapter: TensorIndex, names: Sequence[str]) -> str:
    return (
        f"{adapter.root}: left out {first_few(names, 3)}, as peft does: {peft.ADAPTER_CONFIG} does not name these "
        f"modules, or names them otherwise (target_modules, exclude_modules, layers_to_transform, modules_to_save)."
    )


@dataclass(frozen=True)
class _Merge:
    """Makes the merged model's entries.

    Attributes:
        adapter: The adapter's tensors.
        base: The base model's weights.
        side: The directory with the config of the base.
        settings: The settings of the adapter.
        parts: What the adapter's tensors are.
        names: The model's names for the base's tensors.
        has_new_head: The adapter has tensors that its base lacks.
    """

    adapter: TensorIndex
    base: TensorIndex
    side: Path
    settings: LoraSettings
    parts: AdapterParts
    names: ModelNames
    has_new_head: bool

    @functools.cached_property
    def whole(self) -> Mapping[str, str]:
        """Return the name in the adapter of each tensor that it stores whole, of those that peft reads."""
        return {fqn: name for fqn, name in self.parts.whole.items() if self._is_read(fqn)}

    def _is_read(self, fqn: str) -> bool:
        """Return whether peft reads a whole tensor: it wraps adapted modules and keeps the base's as `base_layer`."""
        owner = fqn.rpartition(".")[0]
        module = owner.removesuffix(".base_layer").removesuffix(".token_adapter")
        is_wrapped = self.is_target(module) or module in self.parts.tokens
        return not module.endswith(".modules_to_save.default") and is_wrapped == (owner != module)

    def is_target(self, module: str) -> bool:
        """Return whether the settings adapt a module of the base."""
        if not self.settings.is_all_linear:
            return self.settings.is_target(module)
        is_linear = self._is_layer(module) if self.names.linear is None else module in self.names.linear
        return is_linear and self.settings.is_target(module)

    def replacement(self, name: str, fqn: str) -> TensorEntry:
        """Return a tensor that the adapter stores whole (modules_to_save, biases, embeddings with more rows)."""
        entry = self.adapter.tensors[name]
        codec = CopiedTensor(self.adapter, name)
        if self.has_new_head and not _find(self.names, fqn):
            of_base = next(iter(self.base.tensors.values()))
            return TensorEntry(fqn, entry.dtype, entry.shape, of_base.pieces).with_codec(codec)
        kept = self._base_entry(_in_base(fqn))
        if entry.shape != kept.shape:
            misfit = self._misfit(name, entry.shape, kept.name, kept.shape)
            if len(entry.shape) == 2 and entry.shape[1] == kept.shape[1]:
                raise CheckpointError(f"{misfit} {_RESIZE}")
            raise misfit
        if kind_of(entry.dtype) != kind_of(kept.dtype):
            raise CheckpointError(
                f"{self.adapter.root}: {name} is stored as {entry.dtype}, but {kept.name} of its base as {kept.dtype}."
            )
        return kept._replace(dtype=entry.dtype).with_codec(codec)

    def adapted_weight(
        self, module: str, factors: Mapping[str, str], replaced: Mapping[str, TensorEntry]
    ) -> TensorEntry:
        """Return a module's weight, which may be `replaced`, plus the product of its factors.

        Args:
            module: The module.
            factors: The name in the adapter of each factor (A, B, M).
            replaced: The tensors that the adapter stores whole, by name.
        """
        adapter, kept = self.adapter, self._base_entry(f"{module}.weight")
        kept = self._castable(replaced.get(kept.name, kept))
        columns, rows = adapter.shapes[factors["A"]][1], adapter.shapes[factors["B"]][0]
        are_embeddings = {"lora_embedding_" in factors[letter] for letter in "AB"}
        is_transposed = are_embeddings == {True} or self._is_conv1d(module, rows, kept.shape)
        is_clear = len(are_embeddings) == 1 and (are_embeddings == {False} or rows != columns)
        if not is_clear or kept.shape != ((columns, rows) if is_transposed else (rows, columns)):
            raise self._misfit(f"lora_B @ lora_A of {module}", (rows, columns), kept.name, kept.shape)
        if self.settings.is_dora and adapter.shapes[factors["M"]] != (rows,):
            raise self._misfit(factors["M"], adapter.shapes[factors["M"]], kept.name, kept.shape)

        @functools.lru_cache(maxsize=1)
        def read_factors() -> tuple[torch.Tensor, torch.Tensor]:
            a, b = adapter.read(factors["A"]).float(), adapter.read(factors["B"]).float()
            return (a.T.contiguous(), b.T.contiguous()) if is_transposed else (b, a)

        codec = LowRankSum(self.base, kept, adapter.root, read_factors, self.settings.scale(module))
        if self.settings.is_dora:
            return kept.with_codec(ScaledSum(codec, functools.partial(adapter.read, factors["M"]), is_transposed))
        return kept.with_codec(codec)

    @functools.cached_property
    def wrapped_parameters(self) -> dict[str, str]:
        """Return {module name in the adapter: the adapted parameter whose factors it holds}.

        peft wraps a module around that of each parameter in turn: the last one is the outermost and keeps its name.
        """
        found: dict[str, list[str]] = {}
        for name in self.names.tensors:
            if self.settings.is_target_parameter(name):
                found.setdefault(name.rpartition(".")[0], []).append(name)
        return {
            owner + ".base_layer" * depth: name
            for owner, names in found.items()
            for depth, name in enumerate(reversed(names))
        }

    def adapted_parameter(
        self, module: str, factors: Mapping[str, str], replaced: Mapping[str, TensorEntry]
    ) -> Iterator[TensorEntry]:
        """Yield the stored tensors of a parameter, which may be `replaced`, plus the products of its factors.

        The parameter holds a matrix for each expert, or is a single matrix. A stores expert after expert; B stores rank
        0 of all experts, then rank 1 of all (peft's `ParamWrapper`).
        """
        adapter, fqn = self.adapter, self.wrapped_parameters[module]
        shape, parts = self.names.tensors[fqn]
        self._refuse_tied(fqn)
        if not parts or len(shape) not in (2, 3):
            raise self._other_form(fqn, ", or which is neither a matrix nor a stack of matrices")
        num_experts = shape[0] if len(shape) == 3 else 1
        check_factors(adapter, fqn, factors, self.settings, self.settings.rank(fqn) * num_experts)
        is_transposed = len(shape) == 3 and module.removesuffix(".base_layer") in self.names.transposed
        sizes = (adapter.shapes[factors["B"]][0], adapter.shapes[factors["A"]][1])
        if sizes != (shape[:-3:-1] if is_transposed else shape[-2:]):
            raise self._misfit(f"lora_B @ lora_A of {fqn}", sizes, fqn, shape)

        @functools.lru_cache(maxsize=1)
        def read_factors() -> tuple[torch.Tensor, torch.Tensor]:
            return adapter.read(factors["A"]).float(), adapter.read(factors["B"]).float()

        def of_box(expert: int, rows: slice, columns: slice) -> tuple[torch.Tensor, torch.Tensor]:
            a, b = read_factors()
            rank = len(a) // num_experts
            a, b = a[expert * rank : (expert + 1) * rank], b[:, expert::num_experts]
            left, right = (a.T, b.T) if is_transposed else (b, a)
            return left[rows], right[:, columns]

        for part in parts:
            kept = self._castable(replaced.get(part.name, self.base.tensors[part.name]))
            matrix = part.shape[-2:]
            box = [slice(start, start + size) for start, size in zip(part.offsets[-2:], matrix, strict=True)]
            pieces = []
            for number in range(part.shape[0] if len(kept.shape) == 3 else 1):
                expert = number + (part.offsets[0] if len(shape) == 3 else 0)
                codec = LowRankSum(
                    self.base,
                    kept,
                    adapter.root,
                    functools.partial(of_box, expert, *box),
                    self.settings.scale(fqn),
                    number * math.prod(matrix),
                )
                first, is_stack = kept.pieces[0], len(kept.shape) == 3
                offsets, piece_shape = ((number, 0, 0), (1, *matrix)) if is_stack else ((0, 0), matrix)
                pieces.append(Piece(first.file, first.start, offsets, piece_shape, codec))
            yield kept._replace(pieces=tuple(pieces))

    def check_modules(self) -> list[str]:
        """Compare the modules that the settings name with the tensors; returns notes.

        Raises:
            CheckpointError: A module cannot be adapted, or is missing from the adapter.
        """
        names, parts = self.names.tensors, self.parts
        owners = {name.rpartition(".")[0] for name in names}
        if not all(module in owners or module in self.wrapped_parameters for module in parts.factors):
            return []  # the base has another prefix or none: peft's rules do not cover its names
        settings, path = self.settings, self.settings.path
        modules = sorted({owner.rsplit(".", up)[0] for owner in owners for up in range(owner.count(".") + 1)} - {""})
        settings.try_patterns([*modules, *self.wrapped_parameters.values()])
        saved = [(m, n) for m in filter(settings.is_saved, modules) for n in names if n.startswith(f"{m}.")]
        saved += [(_module_of(alias), alias) for alias in (self._ties if settings.saved else ())]
        for module, name in saved:
            if settings.is_saved(module) and name not in parts.whole:
                raise CheckpointError(
                    f"{path}: modules_to_save has {module}, but the adapter does not hold its {name}."
                )
        targets = [module for module in modules if self.is_target(module)]
        if wrong := [module for module in targets if not self._is_layer(module)]:
            raise CheckpointError(f"{path}: target_modules has {wrong[0]}, which is not a layer that LoRA can adapt.")
        absent = [module for module in (*targets, *self.wrapped_parameters) if module not in parts.factors]
        if not targets and not self.wrapped_parameters:
            raise CheckpointError(f"{path}: its settings, such as target_modules, name no module of {self.base.path}.")
        if absent and not settings.starts_at_zero:
            raise CheckpointError(
                f"{path}: the adapter holds no tensors of {first_few(absent, 3)}, which target_modules has."
            )
        return (
            [f"{path}: without tensors for {first_few(absent, 3)}, which stay as in the base, as in peft."]
            if absent
            else []
        )

    def _castable(self, kept: TensorEntry) -> TensorEntry:
        """Return the entry; CheckpointError if no product can be added to it."""
        if kept.dtype not in CASTABLE:
            raise CheckpointError(
                f"{self.adapter.root} changes {kept.name}, which {self.base.path} stores as {kept.dtype}; an adapter "
                f"merges into floating-point weights of 16 or 32 bits only."
            )
        return kept

    def _is_layer(self, module: str) -> bool:
        """Return whether a module of the base has a weight of at least two dimensions."""
        found = self.names.tensors.get(f"{module}.weight")
        return found is not None and len(found.shape) > 1

    def _base_entry(self, fqn: str) -> TensorEntry:
        """Return the base's tensor that the adapter calls `fqn`, if it may be changed alone."""
        self._refuse_tied(fqn)
        return self._stored(fqn)

    def _stored(self, fqn: str) -> TensorEntry:
        names = _find(self.names, fqn)
        if len(names) != 1:
            advice = " If that was loaded with a new head, save it with the head, and give it as the base."
            raise CheckpointError(
                f"{self.adapter.root} changes {fqn}, but {self.base.path} has no such tensor: it is not its base model."
                f"{'' if _IN_LAYER.search(fqn) else advice}"
            )
        shape, parts = self.names.tensors[names[0]]
        if [part[1:] for part in parts] != [((0,) * len(shape), shape)]:
            raise self._other_form(fqn)
        return self.base.tensors[parts[0].name]

    def is_absent_copy(self, fqn: str) -> bool:
        """Return whether a tensor is not stored in the base, and equal to the one that the base ties it to."""
        name = _in_base(fqn)
        return not self.has_new_head and not _find(self.names, name) and name in self._copies

    @functools.cached_property
    def _copies(self) -> Mapping[str, str]:
        """Return the ties of which the adapter stores both tensors, equal, as with peft's `ensure_weight_tying`."""
        return self._equal_ties({_in_base(fqn): name for fqn, name in self.whole.items()})

    def _equal_ties(self, held: Mapping[str, str]) -> Mapping[str, str]:
        """Return the ties of which the adapter has both tensors, equal; `held` maps names in the model to its own."""
        both = {alias: kept for alias, kept in self._ties.items() if alias in held and kept in held}
        return {alias: kept for alias, kept in both.items() if has_same_bytes(self.adapter, held[alias], held[kept])}

    @functools.cached_property
    def copied_tokens(self) -> Mapping[str, str]:
        """Return the rows that the adapter also stores for a tied embedding, by module."""
        held = {f"{module}.weight": name for module, name in self.parts.tokens.items()}
        ties = self._equal_ties(held) if len(held) > 1 else {}
        return {_module_of(alias): held[alias] for alias in ties}

    def check_tokens(self) -> None:
        """Raise CheckpointError if the settings name rows that neither the module nor a tied one has in the adapter."""
        settings, modules = self.settings, {*self.parts.tokens}
        for alias, kept in self._ties.items() if settings.tokens else ():
            tied, other = _module_of(alias), _module_of(kept)
            if other in modules and settings.token_rows(tied) == settings.token_rows(other):
                modules.add(tied)
        for end in settings.tokens:
            if not any(end is None or module.endswith(end) for module in modules):
                what = f"trainable_token_indices has {'the input embedding' if end is None else end}"
                raise CheckpointError(f"{settings.path}: {what}, but the adapter has no rows of it.")

    @functools.cached_property
    def tokens(self) -> Mapping[str, str]:
        """Return the rows that replace those of a module, by module."""
        return {
            module: name
            for module, name in self.parts.tokens.items()
            if module not in self.copied_tokens and self.settings.token_rows(module) is not None
        }

    def replaced_rows(self, module: str, name: str, replaced: Mapping[str, TensorEntry]) -> Iterator[TensorEntry]:
        """Yield a module's weight, which may be `replaced`, with trained rows, and those stored that are tied to it."""
        fqn = f"{module}.weight"
        if fqn in self._ties:
            raise self._tied(fqn)
        aliases = [alias for alias, other in self._ties.items() if other == fqn and _find(self.names, alias)]
        for one in (fqn, *aliases):
            kept = self._stored(one)
            yield self._with_rows(module, name, self._castable(replaced.get(kept.name, kept)))

    def _with_rows(self, module: str, name: str, kept: TensorEntry) -> TensorEntry:
        rows = self.settings.token_rows(module)
        assert rows is not None, "else peft ignores them"
        shape, num_rows = self.adapter.shapes[name], kept.shape[0]
        if len(kept.shape) != 2 or shape != (len(rows), kept.shape[1]):
            raise self._misfit(name, shape, kept.name, kept.shape)
        if max(rows, default=0) >= num_rows:
            raise CheckpointError(
                f"{self.adapter.root} changes row {max(rows)} of {kept.name}, and its base has {num_rows}. {_RESIZE}"
            )

        @functools.lru_cache(maxsize=1)
        def read_rows() -> torch.Tensor:
            stored = self.adapter.read(name)
            new = stored.to(to_torch(kept.dtype))
            if (stored.isfinite() & ~new.isfinite()).any():
                raise CheckpointError(
                    f"{self.adapter.root}: {name} has values that are too large for {kept.dtype}, the dtype of "
                    f"{kept.name} of {self.base.path}; store the base in a wider dtype."
                )
            return new

        return kept.with_codec(ReplacedRows(self.base, kept, rows, read_rows))

    def _refuse_tied(self, fqn: str) -> None:
        ties = {} if _IN_LAYER.search(fqn) else self._ties
        if any(fqn in (alias, kept) for alias, kept in ties.items() if alias not in self._copies):
            raise self._tied(fqn)

    @functools.cached_property
    def _ties(self) -> Mapping[str, str]:
        """Return the base's ties; without an entry in its config, from its class, which imports transformers."""
        if self.names.ties is not None:
            return self.names.ties
        return self.base.aliases or stored_twice(self.base) or absent_ties(self.base, self.side)

    def _is_conv1d(self, module: str, rows: int, shape: tuple[int, ...]) -> bool:
        """Return whether a weight of the base is stored transposed, as in transformers' Conv1D.

        peft looks at the class of the module and corrects `fan_in_fan_out`. Models with such layers give them the same
        names.
        """
        types = _model_types(read_config(self.side))
        if types:
            return not _CONV1D_MODELS.isdisjoint(types) and module.rpartition(".")[2] in _CONV1D_LAYERS
        if shape == (rows, rows) and self.settings.fan_in_fan_out:
            raise CheckpointError(
                f"{self.settings.path}: fan_in_fan_out is set, but whether the square weight of {module} is stored "
                f"transposed depends on the class of the model, which {self.side} does not define; merge it with peft."
            )
        return len(shape) == 2 and shape[0] != rows

    def _tied(self, fqn: str) -> CheckpointError:
        return CheckpointError(
            f"{self.adapter.root} changes {fqn}, which {self.base.path} ties to another tensor; merging would change "
            f"both. Merge it with peft."
        )

    def _misfit(self, what: str, shape: Sequence[int], fqn: str, base_shape: Sequence[int]) -> CheckpointError:
        return CheckpointError(
            f"{self.adapter.root}: {what} has shape {list(shape)}, but {fqn} of its base has {list(base_shape)}: it is "
            f"an adapter of another model."
        )

    def _other_form(self, fqn: str, alternative: str = "") -> CheckpointError:
        return CheckpointError(
            f"{self.adapter.root} changes {fqn}, which {self.base.path} stores in another form, as transformers "
            f"converts{alternative}; merge it with peft."
        )


def _model_types(config: Mapping[str, Any]) -> set[str]:
    """Return the types of a model and its parts, such as a decoder; empty unless transformers defines them all."""
    found: set[str] = set()
    left: list[Mapping[str, Any]] = [config] if isinstance(config.get("model_type"), str) else []
    while left:
        part = left.pop()
        if "auto_map" in part:
            return set()
        found |= {part["model_type"]} if isinstance(part.get("model_type"), str) else set()
        left += [value for value in part.values() if isinstance(value, Mapping)]
    return found
