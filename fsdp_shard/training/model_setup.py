"""From settings to a sharded model with its weights: build on meta, shard along the blocks, read this rank's ranges.

The only values that a rank ever reads are its own. Knows no loop and no optimizer.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, cast

from fsdp_shard.checkpoint import (
    carry,
    encode_shards,
    load_shards,
    locate,
    match_names,
    open_weights,
    refuse_adapter_beside,
    untie,
)
from fsdp_shard.data import (
    CLASSIFICATION,
    MASKED_LM,
    SEQ2SEQ,
    DataConfig,
    SpecialTokens,
    Task,
    all_sources,
    check_tokenizer,
)
from fsdp_shard.errors import ConfigError, ModelError
from fsdp_shard.models import (
    ModelConfig,
    ModelSource,
    build_on_meta,
    check_packing,
    check_task,
    load_config,
    load_tokenizer,
    no_split_blocks,
    num_positions,
    rebuild_buffers,
    tied_names,
)
from fsdp_shard.sharding import ShardConfig, ShardedModel, explain, plan_units
from fsdp_shard.training.config import OptimConfig
from fsdp_shard.training.loss.fused_kernels import check_known, use_kernels
from fsdp_shard.training.loss.linear_cross_entropy import use_loss_head
from fsdp_shard.training.peft.config import AdapterConfig, LoraConfig
from fsdp_shard.training.peft.lora import (
    Adapter,
    Base,
    base_path,
    fill_new,
    fingerprint,
    inject,
    is_adapter_step,
    restore,
)
from fsdp_shard.training.peft.qlora import QuantizedBase, quantize_base
from fsdp_shard.utils import format_size, peak_resident_bytes

if TYPE_CHECKING:
    from torch.optim import Optimizer
    from transformers import PretrainedConfig, PreTrainedModel

    from fsdp_shard.distributed import DistributedContext


@dataclass(frozen=True)
class LoadFigures:
    """What loading cost, the worst rank's: `peak_memory_bytes` resident, of which a part had to be.

    `excess_bytes` is the peak without the rank's shard and the largest block: the program itself, and buffers.
    """

    peak_memory_bytes: int
    shard_bytes: int
    largest_block_bytes: int
    excess_bytes: int

    def row(self) -> dict[str, int]:
        return asdict(self)


@dataclass(frozen=True)
class LoadedModel:
    """A sharded model with weights, the tied names that are not stored, what loading it cost, and how it is divided.

    `num_fused` modules have the kernels of `model.kernels`. `config` is that of the model within the wrapper.
    """

    model: ShardedModel
    num_params: int
    num_blocks: int
    aliases: Mapping[str, str]
    figures: LoadFigures
    tree: list[str] = field(default_factory=list)
    adapter: Adapter | None = None
    num_fused: int = 0
    config: PretrainedConfig | None = None


def model_source(config: ModelConfig, step_directory: Path | None) -> ModelSource:
    """Where config, tokenizer and weights come from: the step to resume from, unless it holds only an adapter, else
    `model.path`.
    """
    if step_directory is not None and not is_adapter_step(step_directory):
        return ModelSource(step_directory)
    return locate(config.path, config.gguf_file, need_weights=True)


def check_model(
    config: ModelConfig, shard: ShardConfig, data: DataConfig, adapter: AdapterConfig, source: ModelSource
) -> None:
    """Raise ModelError, ConfigError or DataError when the model cannot be built, or not be sharded as `shard` says, has
    none of the modules that `adapter` names, or it or its tokenizer cannot take the data.
    """
    model_config = load_config(source, config.trust_remote_code)
    check_task(model_config, config.task)
    if config.task == CLASSIFICATION:
        _check_classifier(model_config)
    if data.packing:
        check_packing(model_config, config.attention)
    if config.task == MASKED_LM:
        SpecialTokens.of(load_tokenizer(source, config.trust_remote_code))
    if any(source.kind != "text" for source in all_sources(data)):
        check_tokenizer(data, load_tokenizer(source, config.trust_remote_code), config.task)
    model = _on_meta(config, source)
    _check_lengths(model, config.task, data)
    if config.task == SEQ2SEQ:
        _decoder_start(model)
    shard.check_model(model)
    check_known(model_config, config.kernels)
    _check_adapter(adapter, shard)
    if isinstance(adapter, LoraConfig):
        inject(model, adapter, base_path(config, source), {}, config.task)
        quantize_base(model, adapter.quantize, shard, {})
        shard.check_model(model)  # quantized weights may be units of their own
        _refuse_adapted_experts(model, shard)
    shard.check_dtypes(model)
    _refuse_float16(model)
    _chunk_loss(model, config, shard)


def data_task(config: ModelConfig, source: ModelSource) -> Task:
    """What the samples must be made for."""
    model = load_config(source, config.trust_remote_code)
    start = _decoder_start(_on_meta(config, source)) if config.task == SEQ2SEQ else 0
    numbers = dict(getattr(model, "label2id", None) or {})
    return Task(config.task, start, getattr(model, "num_labels", 0), numbers, _padding(model) or 0)


def _decoder_start(model: PreTrainedModel) -> int:
    """The token that the decoder gets before a target, as the model itself puts it there; ModelError if there is none.

    mBART takes the target's last one, which names its language there: one for a run is to be in its config.
    """
    import torch

    name, config = type(model).__name__, model.config
    told: int | None = getattr(config, "decoder_start_token_id", None)
    shift = getattr(model, "prepare_decoder_input_ids_from_labels", None)
    found = {told}
    try:
        if shift is not None:
            found = {int(shift(labels=torch.tensor([[first, first + 1]]))[0, 0]) for first in (5, 7)}
    except (ValueError, TypeError, AttributeError, RuntimeError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ModelError(f"{name} cannot make the decoder's input of a target: {reason}") from error
    start = found.pop() if len(found) == 1 else told
    if start is None:
        raise ModelError(
            f"{name} has no decoder_start_token_id in its config.json, the token that a target begins with; write its "
            f"number there: for a model of several languages, that of the target's language."
        )
    return start


def _padding(model: PretrainedConfig) -> int | None:
    """The token that the model takes for padding."""
    found: int | None = getattr(model.get_text_config(), "pad_token_id", None)
    return found


def _check_classifier(model: PretrainedConfig) -> None:
    if (num_labels := len(model.id2label or {})) < 2:
        raise ModelError(
            f"The model has num_labels={num_labels} in its config.json, and with one class there is nothing to learn; "
            f"give two or more."
        )
    if _padding(model) is None:
        raise ModelError(
            "The model has no pad_token_id in its config.json, by which a classifier tells where a text ends; write "
            "one there, such as the number of its end-of-text token."
        )


def load_sharded(
    config: ModelConfig,
    shard: ShardConfig,
    source: ModelSource,
    context: DistributedContext,
    adapter: AdapterConfig | None = None,
    seed: int = 0,
    resumed: Path | None = None,
) -> LoadedModel:
    """The model of `source`, sharded by `shard`, each rank's part filled from the files; a collective.

    What `adapter` adds is filled from the step `resumed`, else from `seed`. Raises ModelError, ConfigError or
    CheckpointError, on all ranks, when model, weights and adapter do not fit each other.
    """
    _check_adapter(adapter, shard)
    model = context.together(lambda: _on_meta(config, source))
    num_fused = context.together(lambda: use_kernels(model, config.kernels))
    added: Adapter | None = None
    base: QuantizedBase | None = None
    with context.together(lambda: open_weights(source.weights)) as index:
        context.together(lambda: refuse_adapter_beside(index))
        context.together(lambda: untie(model, index))
        blocks, aliases = no_split_blocks(model, shard.blocks), tied_names(model)
        names = context.together(lambda: match_names(model, index))
        if isinstance(adapter, LoraConfig):
            origin = Base(base_path(config, source), context.decide(lambda: fingerprint(index)), adapter.quantize)
            added, names = inject(model, adapter, origin.path, names, config.task)
            base, names = quantize_base(model, adapter.quantize, shard, names)
            added = replace(added, base=origin, frozen=base.describe() if base else None)
        context.together(lambda: _chunk_loss(model, config, shard))  # the adapter may have a head of its own
        tree = _explain(model, shard, context.world_size) if shard.explain else []
        largest = max(block.num_bytes for block in no_split_blocks(model, shard.blocks))
        rebuild_buffers(model, context.device)
        sharded = shard.shard(model, context)
        shards = sharded.local_shards()
        filled = {name: part for name, part in shards.items() if name in names}
        context.together(lambda: load_shards(index, filled, names))
        if base is not None:
            encoded = {name: shards[name] for name in base.names}
            context.together(lambda: encode_shards(index, encoded, base.names, base.code))
    if added is not None and resumed is not None:
        context.together(lambda: restore(added, shards, resumed))
    elif added is not None:
        fill_new(shards, names if base is None else {**names, **base.names}, seed)
    shard_bytes = sum(part.data.numel() * part.data.element_size() for part in shards.values())
    figures = _figures(shard_bytes, largest, context)
    num_params = sum(block.num_params for block in blocks)
    return LoadedModel(sharded, num_params, len(blocks), aliases, figures, tree, added, num_fused, model.config)


def side_files(source: ModelSource, dtype: str, adapter: Adapter | None = None) -> dict[str, bytes]:
    """Config, generation config and tokenizer files that make a directory of weights a model, by name; those of an
    adapter are its own.
    """
    if adapter is not None:
        return adapter.side_files()
    with TemporaryDirectory() as directory, open_weights(source.weights) as index:
        index.side = index.side or source.directory
        return {name: (Path(directory) / name).read_bytes() for name in carry(index, Path(directory), dtype)}


def build_optimizer(config: OptimConfig, model: ShardedModel, context: DistributedContext) -> Optimizer:
    """The optimizer of the model's parameters, which decides about decay by their logical shapes; a collective."""
    from torch import nn

    from fsdp_shard.sharding import split_groups
    from fsdp_shard.training.optim.whole_param_optimizer import WholeOptimizer

    shards = {name: shard for name, shard in model.local_shards().items() if isinstance(shard.tensor, nn.Parameter)}
    shapes = {name: shard.shape for name, shard in shards.items()}
    if config.needs_whole and context.divides_modules:
        ranks = max(context.num_tensor_ranks, context.num_expert_ranks)
        divided = "tensor_parallel" if context.num_tensor_ranks > 1 else "expert_parallel"
        raise ConfigError(
            "This optimizer needs whole parameters for an update, which it cannot bring together with "
            f"shard.{divided}={ranks}; use optim=adamw or optim=sgd."
        )
    if config.needs_whole:
        group = context.mesh[model.divided_over].get_group()
        return WholeOptimizer(shards, group, lambda params: config.build(params, shapes))
    optimizer = config.build({name: cast("nn.Parameter", shard.tensor) for name, shard in shards.items()}, shapes)
    if context.divides_modules:
        split_groups(optimizer)
    return optimizer


def describe(loaded: LoadedModel, config: ModelConfig, shard: ShardConfig, context: DistributedContext) -> list[str]:
    """What was built, where, and what it costs a rank, for people."""
    figures = loaded.figures
    mesh = f"{context.world_size} {context.device.type} rank{'s' if context.world_size > 1 else ''}"
    if context.num_tensor_ranks > 1:
        mesh += f" (layers divided over {context.num_tensor_ranks})"
    if context.num_expert_ranks > 1:
        mesh += f" (experts divided over {context.num_expert_ranks})"
    if context.num_replicas > 1:
        mesh += f" ({context.num_replicas} replicas of {context.world_size // context.num_replicas})"
    return [
        f"{config.path}: {loaded.num_params / 1e6:,.1f} M parameters in {loaded.num_blocks} blocks on {mesh}, "
        f"{type(loaded.model).__name__.removesuffix('Model').upper()}, computing in {shard.param_dtype}",
        f"loaded: {format_size(figures.shard_bytes)} of weights a rank, "
        f"{format_size(figures.peak_memory_bytes)} of memory in use at most",
        *loaded.tree,
        *([f"{loaded.num_fused} modules have fused kernels ({config.kernels})"] if loaded.num_fused else []),
        *([] if loaded.adapter is None else [loaded.adapter.describe(loaded.model.local_shards())]),
        *_not_trained(loaded),
    ]


def _not_trained(loaded: LoadedModel) -> list[str]:
    """What the model's config asks of a loss and is not done here."""
    asks = getattr(loaded.config, "output_router_logits", False)
    told = "config.json has output_router_logits: the loss that balances experts is not part of the loss trained here"
    return [told] if asks else []


def _check_adapter(adapter: AdapterConfig | None, shard: ShardConfig) -> None:
    for name in ("tensor_parallel", "expert_parallel"):  # peft wraps layers and experts, and plans know no wrapper
        if isinstance(adapter, LoraConfig) and getattr(shard, name) > 1:
            raise ConfigError(
                f"adapter=lora does not go together with shard.{name}={getattr(shard, name)} yet; leave one of them "
                f"out."
            )


def _refuse_adapted_experts(model: PreTrainedModel, shard: ShardConfig) -> None:
    """peft adds to experts' parameters in place, and in a flat parameter they are views that nobody may change."""
    name = next(
        (name for name, _ in model.named_parameters() if re.search(r"experts\.(base_layer\.)?lora_A", name)), ""
    )
    if name and shard.joins_frozen:
        raise ConfigError(
            f"adapter=lora with shard=fsdp1 cannot adapt experts ({name}); use shard=fsdp2, or name other modules in "
            f"adapter.target_modules."
        )


def _check_lengths(model: PreTrainedModel, task: str, data: DataConfig) -> None:
    """Refuse windows that a model with learned positions has no position for: a GPU would die of it without a word."""
    room = num_positions(model)
    lengths = {"data.sequence_length": data.sequence_length}
    if task == SEQ2SEQ and data.target_length is not None:
        lengths["data.target_length"] = data.target_length
    for name, length in lengths.items():
        if room is not None and length > room:
            raise ConfigError(f"{name}={length} exceeds the {room} positions that the model has; give at most {room}.")


def _refuse_float16(model: PreTrainedModel) -> None:
    name = next(
        (name for name, p in model.named_parameters() if p.requires_grad and str(p.dtype) == "torch.float16"), ""
    )
    if name:
        raise ConfigError(
            f"model.dtype=float16 is too narrow to train in: most squares of gradients are zero in it ({name}). Give "
            f"float32 or bfloat16; shard.param_dtype says what is computed in."
        )


def _chunk_loss(model: PreTrainedModel, config: ModelConfig, shard: ShardConfig) -> None:
    """As `model.chunked_loss` says. Not where the output head is divided: it then gathers the logits itself."""
    if shard.tensor_parallel == 1:
        use_loss_head(model, config.chunked_loss)
    elif config.chunked_loss is True:
        raise ConfigError(
            f"model.chunked_loss=true does not go together with shard.tensor_parallel={shard.tensor_parallel}, which "
            f"divides the output head; set model.chunked_loss=auto."
        )


def _explain(model: PreTrainedModel, shard: ShardConfig, num_ranks: int) -> list[str]:
    shapes = {name: tuple(param.shape) for name, param in model.named_parameters()}
    return explain(plan_units(model, shard), shapes, shard, num_ranks)


def _on_meta(config: ModelConfig, source: ModelSource) -> PreTrainedModel:
    return build_on_meta(
        load_config(source, config.trust_remote_code),
        config.dtype,
        trust_remote_code=config.trust_remote_code,
        attention=config.attention,
    )


def _figures(shard_bytes: int, block_bytes: int, context: DistributedContext) -> LoadFigures:
    peak = peak_resident_bytes()
    worst = context.all_reduce([peak, shard_bytes, peak - shard_bytes - block_bytes], "max")
    return LoadFigures(int(worst[0]), int(worst[1]), block_bytes, int(worst[2]))
