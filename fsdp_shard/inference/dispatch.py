"""Runs a model on the available devices, reading its weights directly from a checkpoint of any format.

The model is built on the meta device. Blocks that stay on a device receive memory there, filled one tensor at a time;
the others are read again each time they run (see `offload`). Nothing is written, so no copy can become stale.
"""

import os
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypedDict, Unpack, cast

import torch
from torch import nn
from transformers import GenerationConfig, PretrainedConfig, PreTrainedModel

from fsdp_shard import checkpoint
from fsdp_shard.checkpoint import Location, TensorIndex, locate
from fsdp_shard.distributed import DistributedContext, gpu_number
from fsdp_shard.errors import CheckpointError, ConfigError, ModelError, PlanError, one_line
from fsdp_shard.inference import available_memory, batch_schedule, quantization, tensor_parallel_dispatch
from fsdp_shard.inference.config import Device, DispatchConfig, locate_adapters, parse_adapters
from fsdp_shard.inference.device_map.device_plan import DevicePlan
from fsdp_shard.inference.device_map.strategies import plan_device_map
from fsdp_shard.inference.generation.kv_cache_size import KVCacheBudget, cache_bytes
from fsdp_shard.inference.named_adapters import adapters_bytes, add_adapters
from fsdp_shard.inference.offload.placement import PageBudget, dispatch_blocks
from fsdp_shard.inference.registry import QUANTIZATIONS
from fsdp_shard.models import Block, build_on_meta, keep_dtypes, load_config, no_split_blocks
from fsdp_shard.utils import check, format_count, format_size, nearest

if TYPE_CHECKING:

    class _DispatchedModel(PreTrainedModel):
        """What type checkers know of a dispatched model; only language models have `generate`."""

        hf_device_map: dict[str, int | str]

        def generate(self, *args: Any, **kwargs: Any) -> Any: ...


Log = Callable[[str], object]
OnPlan = Callable[[DevicePlan], object]
# Options of a file's generation config that make `generate` compile native code, import other packages, load weights
# from the path or hub id in config.json, or request code from the hub.
_UNSAFE_OPTIONS = (
    "cache_implementation",
    "cache_config",
    "compile_config",
    "continuous_batching_config",
    "use_mtp",
    "penalty_alpha",
    "dola_layers",
    "constraints",
    "force_words_ids",
    "num_beam_groups",
    "diversity_penalty",
)


class DispatchOptions(TypedDict, total=False):
    """The options of `load_dispatched` besides the placement of blocks; documented there."""

    prefetch_blocks: int
    quantize: str
    trust_remote_code: bool
    adapters: Mapping[str, str | os.PathLike[str]] | None


def load_dispatched(
    path: str | os.PathLike[str],
    device_map: str | Mapping[str, Any] = "auto",
    max_memory: Mapping[Any, Any] | None = None,
    dtype: str | torch.dtype | None = None,
    *,
    config: str | os.PathLike[str] | None = None,
    base: str | os.PathLike[str] | None = None,
    **options: Unpack[DispatchOptions],
) -> "_DispatchedModel":
    """Load a transformers model in eval mode, ready for `generate()`, its blocks spread over devices and disk.

    Parameters require no gradients, until the model's own `set_adapter` or `enable_adapters` makes those of an adapter
    trainable; changes to a block on disk are lost after its next pass. Inputs may be on the CPU or on the first device.
    `model.hf_device_map` maps each block to its device.

    Args:
        path: A run or one of its steps (RUN@best), a checkpoint of any format, a .gguf file, or a hub id.
        device_map: auto, balanced, balanced_low_0, sequential, cpu, disk, or {module: GPU number, cpu or disk}.
        max_memory: Sizes of the devices to use, such as {0: "20GB", "cpu": "64GB"}; by default their free memory.
        dtype: Dtype to load in; None or "keep" for the stored dtype.
        config: Model directory or hub id to take the config from, for weights without one, or to replace theirs.
        base: Base model of an adapter, if it is not at the path in adapter_config.json.
        options: `prefetch_blocks`: number of blocks to read ahead from disk while one computes (2). `quantize`: none,
            int8 or int4, for the weights of linear layers. `trust_remote_code`: run Python code that comes with the
            model (False). `adapters`: name -> LoRA adapter, loaded without merging; the first is active, and
            `model.set_adapter(name)`, `disable_adapters()` and `enable_adapters()` switch.

    Returns:
        The model.

    Raises:
        CheckpointError, ModelError: The checkpoint cannot be read, does not match the model, or holds no model.
        RemoteError: What an address leads to cannot be fetched.
        PlanError: The blocks do not fit.
        ConfigError: An argument is invalid.

    Example:
        >>> model = load_dispatched("outputs/run", max_memory={"cpu": "2GB"})
        >>> tokenizer = AutoTokenizer.from_pretrained(model.name_or_path)
        >>> model.generate(**tokenizer("Once upon a time", return_tensors="pt"), max_new_tokens=20)
    """
    _check_names(options)
    located = locate_adapters(parse_adapters(options.get("adapters")))
    others: Any = {name: value for name, value in options.items() if name != "adapters" and value is not None}
    settings = DispatchConfig(
        device_map=dict(device_map) if isinstance(device_map, Mapping) else device_map,
        max_memory=dict(max_memory) if isinstance(max_memory, Mapping) else max_memory,
        dtype=str(dtype or "keep").removeprefix("torch."),
        **others,
    )
    check(settings)
    # Blocks on disk are read throughout the model's life, even if the working directory changes.
    source = locate(_absolute(path), base=None if base is None else _absolute(base), config=config)
    settings = reserve_adapter_memory(settings, source, located) if located else settings
    with torch.device("cpu"):  # for tensors created without a device; torch.set_default_device may name another
        model = dispatch_model(source, load_config(source.config_directory, settings.trust_remote_code), settings)
        if located:
            add_adapters(model, located, source)
    return cast("_DispatchedModel", model)


def _absolute(path: str | os.PathLike[str]) -> str | os.PathLike[str]:
    """Return the absolute path of a local one, and anything else as it is."""
    local = checkpoint.local_path(path)
    return local.absolute() if local.exists() else path


def _check_names(options: Iterable[str]) -> None:
    known = ["device_map", "max_memory", "dtype", "config", "base", *DispatchOptions.__annotations__]
    if unknown := [name for name in options if name not in known]:
        raise ConfigError(
            f"load_dispatched has no option {unknown[0]}{nearest(unknown[0], known)}; give some of {', '.join(known)}."
        )


def reserve_adapter_memory(
    settings: DispatchConfig, source: Location, adapters: Mapping[str, Location]
) -> DispatchConfig:
    """Return the settings for a model with adapters: given budgets are reduced by the adapters' memory.

    Without budgets, they fit into the part of free memory that no plan uses.

    Raises:
        ConfigError: The weights are quantized, the model is an adapter itself, or a budget cannot hold the adapters.
    """
    if settings.quantize != "none":
        raise ConfigError(
            f"adapters cannot be combined with quantize={settings.quantize}, which replaces the layers that they are "
            f"added to; remove one of them."
        )
    if source.is_adapter:
        raise ConfigError(f"{source} is an adapter itself, and others cannot be loaded over it; give its base model.")
    if settings.budgets is None:
        return settings
    reserved = adapters_bytes(adapters)
    for name, size in settings.budgets.items():
        if size <= reserved:
            raise ConfigError(
                f"max_memory.{name} is {format_size(size)}, and the adapters alone need {format_size(reserved)}; give "
                f"more, or fewer adapters."
            )
    return replace(settings, max_memory={name: str(size - reserved) for name, size in settings.budgets.items()})


def dispatch_model(
    source: Location,
    config: PretrainedConfig,
    settings: DispatchConfig,
    kv_cache: KVCacheBudget | None = None,
    *,
    log: Log | None = None,
    context: DistributedContext | None = None,
    on_plan: OnPlan | None = None,
) -> PreTrainedModel:
    """Build a located model on meta, plan the devices of its blocks, and load or stream each block.

    Args:
        source: The located checkpoint.
        config: The model's config.
        settings: Devices, budgets, dtype.
        kv_cache: Contents of the KV cache; memory for it is reserved.
        log: Called with the plan before any weight is read, and with stored tensors that the model does not have; with
            None, the latter cause a Python warning.
        context: The ranks of this run, which each hold the model or divide its layers; None for a single process.
        on_plan: Called with the plan before any weight is read, unless ranks divide the layers.

    Returns:
        The model, in eval mode.

    Raises:
        CheckpointError: The checkpoint cannot be read, or does not match the model.
        PlanError: The blocks do not fit.
    """
    warn = log or partial(warnings.warn, stacklevel=3)  # at the caller of load_dispatched
    log = log or (lambda text: None)
    if source.is_adapter:
        log(f"adapter {source.weights} on {source.base}")
    index = source.model_index
    checkpoint.check_loadable(index)
    model = _build(config, _dtype(settings.dtype, index), settings.trust_remote_code)
    checkpoint.untie(model, index)
    matched = checkpoint.match_names(model, index)
    if matched.note:
        warn(one_line(matched.note))
    if context is not None and context.num_tensor_ranks > 1:
        tensor_parallel_dispatch.load_divided(model, index, matched.stored, context, log)
        device_map: dict[str, Any] = {"": str(context.device)}
    else:
        blocks, plan = plan_dispatch(model, settings, kv_cache, context)
        available_memory.check_devices([*plan.devices.values(), plan.execution_device])
        log(f"{index.path}: {plan.describe()}")
        if on_plan is not None:
            on_plan(plan)
        page_cache_bytes = max(available_memory.free_cpu_bytes() - plan.resident_bytes.get("cpu", 0), 0)
        pages = PageBudget("cpu" in (settings.budgets or {}), page_cache_bytes)
        quantizer = _quantizer(model, blocks, settings.quantize, plan.execution_device, log)
        stream = dispatch_blocks(model, blocks, plan, index, matched.stored, pages, quantizer)
        if stream.num_blocks:  # a model without streamed blocks can be copied and pickled
            batch_schedule.keep_stream(model, stream)
        device_map = dict(plan.devices)
    model.__dict__["hf_device_map"] = device_map  # the name in transformers and accelerate
    _load_generation_config(model, source)
    return model


def _quantizer(
    model: PreTrainedModel, blocks: Sequence[Block], quantize: str, execution_device: Device, log: Log
) -> quantization.Quantizer | None:
    """Return the quantizer for layers as they are loaded; None if nothing is quantized."""
    if (kind := QUANTIZATIONS.get(quantize)) is None:
        return None
    layers = quantization.quantized_layers(model, blocks, kind)
    log(f"quantize={quantize}: {quantization.describe(model, layers)}")
    return kind.quantizer(model, layers, execution_device)


def plan_dispatch(
    model: PreTrainedModel,
    settings: DispatchConfig,
    kv_cache: KVCacheBudget | None = None,
    context: DistributedContext | None = None,
) -> tuple[list[Block], DevicePlan]:
    """Plan the devices of a model's blocks; the machine is queried only if `settings` have no budgets.

    Args:
        model: The model, which may be on meta.
        settings: Device map, budgets, prefetch and quantization.
        kv_cache: Contents of the KV cache, if memory for it is reserved.
        context: The ranks on this machine; None for a single process.

    Returns:
        The blocks with their sizes after quantization, and the plan.

    Raises:
        ConfigError: The budgets name GPUs, but not the GPU of every rank on this machine.
        PlanError: The blocks do not fit, or quantized blocks would have to be streamed.
    """
    budgets = _budgets_of_rank(settings, context)
    if budgets is None and isinstance(settings.assignment, dict):
        budgets = {}  # a mapping names the devices, and nothing needs to be chosen
    elif budgets is None:
        ranks = (context.local_rank, context.local_world_size) if context else (0, 1)
        use_gpus = context is None or context.device.type != "cpu"
        budgets = available_memory.machine_budgets(*ranks, use_gpus=use_gpus)
    blocks = no_split_blocks(model)
    if kind := QUANTIZATIONS.get(settings.quantize):
        blocks = quantization.quantized_blocks(model, blocks, kind, on_gpu=_uses_gpus(settings.assignment, budgets))
    kv_bytes = {} if kv_cache is None else cache_bytes(model, blocks, kv_cache)
    ties, prefetch = tied_blocks(model, blocks), settings.prefetch_blocks
    plan = plan_device_map(blocks, settings.assignment, budgets, ties=ties, prefetch=prefetch, cache_bytes=kv_bytes)
    streamed = [fqn for fqn in plan.devices if plan.is_streamed(fqn)]
    if kind and streamed:  # otherwise each would be quantized again for every token
        raise PlanError(
            f"dispatch.quantize={settings.quantize} is for models that fit when quantized, and "
            f"{format_count(len(streamed), 'block')} ({streamed[0]} first) would be on disk, or on the CPU while a "
            f"GPU computes; give more memory, or remove quantize."
        )
    return blocks, plan


def _uses_gpus(assignment: str | dict[str, Device], budgets: Mapping[Device, int]) -> bool:
    """Whether a GPU computes, judging by a device mapping, or by a strategy and the budgets."""
    devices = assignment.values() if isinstance(assignment, dict) else () if assignment == "cpu" else budgets
    return any(isinstance(device, int) for device in devices)


def _budgets_of_rank(settings: DispatchConfig, context: DistributedContext | None) -> dict[Device, int] | None:
    """The budgets in `settings`; with several ranks on a machine, those of this rank's GPU and of the CPU.

    A mapping from modules to devices itself defines the devices that every rank uses.
    """
    budgets = settings.budgets
    if budgets is None or context is None or context.local_world_size == 1 or isinstance(settings.assignment, dict):
        return budgets
    own = [gpu_number(rank) for rank in range(context.local_world_size)]
    check_gpu_budgets(budgets, own)
    return {device: size for device, size in budgets.items() if device in ("cpu", own[context.local_rank])}


def check_gpu_budgets(budgets: Mapping[Device, int], gpus: Sequence[int], setting: str = "max_memory") -> None:
    """Raise ConfigError for budgets that cover only some of the GPUs used by a machine's ranks.

    Args:
        budgets: Device -> bytes.
        gpus: The number of each rank's GPU.
        setting: The name of the budgets' setting.
    """
    named = [device for device in budgets if device != "cpu"]
    if named and (missing := [gpu for gpu in gpus if gpu not in named]):
        sizes = ", ".join(f"{gpu}: SIZE" for gpu in dict.fromkeys(gpus))
        raise ConfigError(
            f"{setting} names GPU {min(named, key=str)}, but not GPU {missing[0]}, and each of the {len(gpus)} ranks "
            f"on a machine uses the GPU of its number; give {{{sizes}}} besides the CPU's size, or remove it."
        )


def model_from_config(config: PretrainedConfig, settings: DispatchConfig) -> PreTrainedModel:
    """Build the model to dispatch on meta, from its config; dtype `keep` uses the config's dtype."""
    named = str(config.dtype or torch.float32) if settings.dtype == "keep" else settings.dtype
    dtype: torch.dtype = getattr(torch, named.removeprefix("torch."))
    return _build(config, dtype, settings.trust_remote_code)


def tied_blocks(model: nn.Module, blocks: Sequence[Block]) -> list[list[str]]:
    """Groups of block FQNs that share a parameter."""
    groups: list[tuple[set[int], list[str]]] = []  # ids of parameters, FQNs
    for block in blocks:
        params = {id(param) for param in model.get_submodule(block.fqn).parameters(recurse=not block.direct)}
        tied = [group for group in groups if group[0] & params]
        fqns = [*(fqn for _, names in tied for fqn in names), block.fqn]
        groups = [group for group in groups if group not in tied]
        groups.append((params.union(*(others for others, _ in tied)), fqns))
    return [fqns for _, fqns in groups if len(fqns) > 1]


def _dtype(wanted: str, index: TensorIndex) -> torch.dtype:
    """The dtype to load in: `wanted`, or with `keep` the stored dtype of most bytes."""
    if wanted != "keep":
        return getattr(torch, wanted)  # type: ignore[no-any-return]  # one of DTYPES
    dtype = checkpoint.main_dtype((entry.dtype, entry.num_bytes) for entry in index.tensors.values())
    if dtype is None:
        raise CheckpointError(f"{index.root} holds no floating-point tensors, so it has no model.")
    return checkpoint.to_torch(dtype)


def _build(config: PretrainedConfig, dtype: torch.dtype, trust_remote_code: bool) -> PreTrainedModel:
    """Build the model on meta; as in `from_pretrained`, tensors that its class keeps in float32 stay so."""
    model = build_on_meta(config, dtype, trust_remote_code=trust_remote_code).requires_grad_(False)
    keep_dtypes(model, dtype, model.named_parameters(remove_duplicate=False))
    return model


def _load_generation_config(model: PreTrainedModel, source: Location) -> None:
    """Read generation_config.json, or without one the options in config.json. Unsafe options are unset."""
    if not model.can_generate():
        return
    directory = source.config_directory
    has_file = checkpoint.has_file(directory, "generation_config.json")
    file = directory / ("generation_config.json" if has_file else checkpoint.CONFIG)
    try:
        if has_file:
            model.generation_config = GenerationConfig.from_pretrained(directory)
        else:  # older models have the options there, and a loaded config drops them
            model.generation_config = GenerationConfig.from_model_config(dict(checkpoint.read_config(directory)))
    except Exception as error:  # anything the file's content may cause
        raise ModelError(
            f"{file} has no valid generation settings ({type(error).__name__}); repair it, or remove these settings to "
            f"use the defaults."
        ) from error
    for name in _UNSAFE_OPTIONS:
        setattr(model.generation_config, name, None)
