"""Builds a model on the meta device, shards it along its blocks, and loads this rank's shards of its weights."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from transformers import PretrainedConfig, PreTrainedModel

from fsdp_shard import checkpoint
from fsdp_shard.distributed import DistributedContext, LocalShard, run_on_all, run_on_main
from fsdp_shard.errors import ConfigError
from fsdp_shard.models import ModelConfig, no_split_blocks, rebuild_buffers, tied_names
from fsdp_shard.sharding import ShardConfig, ShardedModel, unit_tree
from fsdp_shard.training.loss.fused_kernels import use_kernels
from fsdp_shard.training.loss.linear_cross_entropy import use_loss_head
from fsdp_shard.training.model_identity import model_name, other_config, other_model
from fsdp_shard.training.model_origin import NewHead, classifier_entries, layer_drop_notes, model_on_meta
from fsdp_shard.training.peft import initial_values, lora
from fsdp_shard.training.peft.config import AdapterConfig, LoraConfig
from fsdp_shard.training.peft.earlier_adapter import load_earlier, locate_earlier
from fsdp_shard.training.peft.qlora import QuantizedBase, quantize_base
from fsdp_shard.utils import peak_resident_bytes, resident_bytes


@dataclass(frozen=True)
class LoadFigures:
    """The memory that loading took on the worst rank, in bytes.

    Attributes:
        peak_memory_bytes: Peak of the resident memory.
        shard_bytes: The rank's shards of parameters and buffers.
        largest_block_bytes: The largest block.
        excess_bytes: The peak without shards and largest block: the program itself, and buffers.
    """

    peak_memory_bytes: int
    shard_bytes: int
    largest_block_bytes: int
    excess_bytes: int


@dataclass(frozen=True, kw_only=True)
class ModelDescription:
    """The properties of a model that are known before its weights are loaded.

    Attributes:
        num_params: Number of parameters, without those of an adapter.
        num_blocks: Number of blocks along which it is sharded.
        aliases: Names of tied parameters that are not stored -> the names that are.
        tree: The units with their sizes, one line each, with `shard.explain`.
        adapter: The trained adapter, if any.
        num_fused: Number of modules with fused kernels.
        config: The config of the model; `load_model` always sets it.
        base: The model that the run began from; None if the step to resume from does not record it.
        notes: Lines about unused parts of the files: tensors that the model lacks, settings of its config.
    """

    num_params: int
    num_blocks: int
    aliases: Mapping[str, str]
    tree: list[str] = field(default_factory=list)
    adapter: lora.Adapter | None = None
    num_fused: int = 0
    config: PretrainedConfig | None = None
    base: checkpoint.BaseModel | None = None
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class LoadedModel(ModelDescription):
    """A sharded model with its weights.

    Attributes:
        model: The sharded model.
        figures: The memory that loading took.
        before_bytes: Resident memory of this rank before its weights.
    """

    model: ShardedModel
    figures: LoadFigures
    before_bytes: int = 0


@dataclass(frozen=True)
class UnfilledModel:
    """A model on the meta device, adapted by the settings, and the location of its weights.

    Attributes:
        module: The model. Shard it; then `load` fills it.
        index: The stored tensors, open.
        names: Parameter -> stored name, without the parameters of a new adapter and quantized ones.
        quantized: The base weights that are encoded as they are read, if any.
        resume_from: The step whose adapter is restored, if any.
        context: The ranks.
        largest_block_bytes: The largest block.
        described: The properties that are known before its weights are loaded.
        head: The head that is drawn from the seed, if any.
        earlier: The adapter with the initial values of a new one, if any.
        before_bytes: Resident memory of this rank before its weights.
        computed: Names in the index of values that transformers computes.
    """

    module: PreTrainedModel
    index: checkpoint.TensorIndex
    names: Mapping[str, str]
    quantized: QuantizedBase | None
    resume_from: Path | None
    context: DistributedContext
    largest_block_bytes: int
    described: ModelDescription
    head: NewHead | None = None
    earlier: checkpoint.Location | None = None
    before_bytes: int = 0
    computed: Sequence[str] = ()

    def load(self, sharded: ShardedModel, seed: int) -> LoadedModel:
        """Read each rank's shards from the files; a collective.

        Args:
            sharded: `module`, sharded.
            seed: Seed of the weights of a new adapter or head.
        """
        if self.head is not None:
            self.head.add_to(self.index, seed)
        shards = sharded.local_shards()
        stored = {name: part for name, part in shards.items() if name in self.names}
        run_on_all(self.context, lambda: checkpoint.load_shards(self.index, stored, self.names))
        if (quantized := self.quantized) is not None:
            encoded = {name: shards[name] for name in quantized.names}
            run_on_all(
                self.context,
                lambda: checkpoint.encode_shards(self.index, encoded, quantized.names, quantized.code),
            )
        if self.described.adapter is not None:
            self._fill_adapter(self.described.adapter, shards, seed)
        for name in self.computed:  # the index outlives the model's loading, and has the values whole
            self.index.tensors.pop(name, None)
        figures = _figures(shards, self.largest_block_bytes, self.context)
        return LoadedModel(**vars(self.described), model=sharded, figures=figures, before_bytes=self.before_bytes)

    def _fill_adapter(self, adapter: lora.Adapter, shards: Mapping[str, LocalShard], seed: int) -> None:
        """Fill an adapter from the step to resume from, from an earlier adapter, or with initial values."""
        context, names = self.context, self.names
        if (resume_from := self.resume_from) is not None:
            run_on_all(context, lambda: lora.restore(adapter, shards, resume_from))
            return
        if (earlier := self.earlier) is not None:
            run_on_all(context, lambda: load_earlier(adapter, shards, earlier))
            return
        filled = dict(names) if self.quantized is None else {**names, **self.quantized.names}
        if adapter.principal is not None:
            filled |= dict.fromkeys(adapter.principal.parameters(), "")
        initial_values.fill_new(shards, filled, seed, adapter.config)
        if adapter.principal is not None:
            adapter.principal.fill(shards, names, self.index, seed, context)
        run_on_all(context, lambda: initial_values.fill_magnitudes(adapter.magnitudes, shards, names, self.index))


@contextmanager
def unfilled_model(
    config: ModelConfig,
    source: checkpoint.Location,
    shard: ShardConfig,
    adapter: AdapterConfig,
    resume_from: Path | None,
    context: DistributedContext,
    *,
    chunks_any_vocabulary: bool = False,
) -> Iterator[UnfilledModel]:
    """Build a model on the meta device and match its parameters with the stored tensors; a collective.

    Args:
        config: Dtype, task and kernels.
        source: The location of config and weights, which stay open within the block.
        shard: How it will be sharded: the blocks that the user names, and what the wrapper can quantize.
        adapter: The adapter to add, if any.
        resume_from: Step directory to resume from, with the adapter's weights; None makes a new adapter.
        context: The ranks to shard over.
        chunks_any_vocabulary: Whether `model.chunked_loss=auto` includes small vocabularies.

    Raises:
        ModelError, ConfigError, CheckpointError: On all ranks: model, weights and adapter do not match.
    """
    check_adapter_mesh(adapter, shard)
    model = run_on_all(context, lambda: model_on_meta(config, source))
    num_fused = run_on_all(context, lambda: use_kernels(model, config.kernels))
    added, quantized, earlier = None, None, None
    with run_on_all(context, lambda: source.model_index) as index:
        run_on_all(context, lambda: checkpoint.check_loadable(index))
        # Before names are matched: that may change the index, which is compared with that of an untouched model.
        base = run_on_main(context, lambda: _base_model(config, source, adapter, index, resume_from))
        is_read = resume_from is not None and not isinstance(adapter, LoraConfig)
        head, matched = run_on_all(context, lambda: match_weights(model, config, index, head_is_read=is_read))
        blocks, aliases, names = no_split_blocks(model, shard.blocks), tied_names(model), matched.stored
        if isinstance(adapter, LoraConfig):
            assert base is not None
            if head is not None:
                base = replace(base, head=_head_changes(config, model, index, matched.unused, head))
            modules = () if head is None else head.modules
            added, names = lora.inject_lora(model, adapter, base.path, names, config.task, modules)
            quantized, names = quantize_base(model, adapter.quantize, shard, names)
            added = replace(added, base=base, frozen=quantized.describe() if quantized else None)
            if resume_from is None:
                earlier = run_on_all(context, lambda: locate_earlier(adapter, model_name(config)))
        # The adapter may add an output head.
        run_on_all(context, lambda: chunk_loss(model, config, shard, any_vocabulary=chunks_any_vocabulary))
        rebuild_buffers(model, context.device)
        drawn = str(head or "") if earlier is None else f"the adapter begins with the values of {earlier.weights}"
        described = ModelDescription(
            num_params=sum(block.num_params for block in blocks), num_blocks=len(blocks), aliases=aliases,
            tree=unit_tree(model, shard, context.world_size) if shard.explain else [], adapter=added, base=base,
            num_fused=num_fused, config=model.config,
            notes=[note for note in (matched.note, drawn, *layer_drop_notes(config, source)) if note],
        )  # fmt: skip
        yield UnfilledModel(
            module=model, index=index, names=names, quantized=quantized, resume_from=resume_from, context=context,
            largest_block_bytes=max(block.num_bytes for block in no_split_blocks(model, shard.blocks)),  # with adapter
            described=described, head=head, earlier=earlier, before_bytes=resident_bytes(), computed=matched.computed,
        )  # fmt: skip


def match_weights(
    model: PreTrainedModel, config: ModelConfig, index: checkpoint.TensorIndex, *, head_is_read: bool
) -> tuple[NewHead | None, checkpoint.MatchedNames]:
    """Match the parameters of a model on the meta device with the stored tensors; reads headers and tied copies.

    Args:
        model: The model, without an adapter; tied parameters that are stored with different values become two.
        config: Its settings.
        index: The stored tensors; receives entries for computed and drawn ones.
        head_is_read: Whether the stored tensors include the head for `model.labels`, as in a step of the run.

    Returns:
        The head to draw, if any, and the names.

    Raises:
        CheckpointError: The tensors do not belong to the model.
    """
    checkpoint.untie(model, index)
    head = NewHead.of(model, index) if config.labels and not head_is_read else None
    if head is not None:
        head.add_to(index, seed=0)  # `load` uses the seed of the run
    return head, checkpoint.match_names(model, index)


def load_sharded(
    config: ModelConfig,
    shard: ShardConfig,
    source: checkpoint.Location,
    context: DistributedContext,
    adapter: AdapterConfig | None = None,
    seed: int = 0,
    resume_from: Path | None = None,
) -> LoadedModel:
    """Build a model, shard it, and read each rank's shards from the files; a collective. For tests and benchmarks.

    The arguments and errors are those of `unfilled_model`; `seed` is that of a new adapter's weights. Without `adapter`
    all parameters are trained.
    """
    with unfilled_model(config, source, shard, adapter or AdapterConfig(), resume_from, context) as model:
        return model.load(shard.shard(model.module, context), seed)


def _check_resumed_base(
    config: ModelConfig,
    source: checkpoint.Location,
    index: checkpoint.TensorIndex,
    resume_from: Path,
    recorded: checkpoint.BaseModel,
) -> None:
    """Raise CheckpointError unless the model is the one that the adapter in `resume_from` was trained on."""
    if not checkpoint.is_base_model(index, recorded, source.expected_config_directory):
        raise other_model(resume_from, recorded, config.path)
    if changes := checkpoint.config_changes(recorded, source.expected_config_directory):
        raise other_config(resume_from, recorded, config.path, changes)


def _base_model(
    config: ModelConfig,
    source: checkpoint.Location,
    adapter: AdapterConfig,
    index: checkpoint.TensorIndex,
    resume_from: Path | None,
) -> checkpoint.BaseModel | None:
    """Return the model that the run began from: as the step to resume from records it, or the one that is loaded.

    Raises CheckpointError if an adapter is resumed on another model, or with another config.
    """
    if isinstance(adapter, LoraConfig):
        recorded = None if resume_from is None else checkpoint.read_base_model(resume_from)
        if resume_from is not None and recorded is not None:
            _check_resumed_base(config, source, index, resume_from, recorded)
        began, where = (recorded.adapter, recorded.adapter_path) if recorded is not None else (None, None)
        if resume_from is None and (earlier := locate_earlier(adapter, model_name(config))) is not None:
            began, where = checkpoint.fingerprint(earlier.index), adapter.path
        model, values = lora.base_path(config, source), checkpoint.computation(source.expected_config_directory)
        return checkpoint.BaseModel(
            model,
            checkpoint.fingerprint(index),
            adapter.quantize,
            adapter=began,
            adapter_path=where,
            config=values,
            vocabulary=checkpoint.vocabulary(source.expected_tokenizer_directory),
        )
    if resume_from is not None:
        return checkpoint.read_base_model(resume_from)
    values = checkpoint.computation(source.expected_config_directory)
    return checkpoint.BaseModel(model_name(config), checkpoint.fingerprint(index), config=values)


def _head_changes(
    config: ModelConfig, model: PreTrainedModel, index: checkpoint.TensorIndex, unused: Sequence[str], head: NewHead
) -> checkpoint.HeadChanges:
    """Return an adapter's record of a new head: the stored tensors that the model lacks or replaces."""
    known = model.state_dict(keep_vars=True).keys()
    tied = [name for name in index.aliases if name not in known]
    return checkpoint.HeadChanges(tuple(sorted({*unused, *tied, *head.tensors})), classifier_entries(config, model))


def check_adapter_mesh(adapter: AdapterConfig, shard: ShardConfig) -> None:
    """Raise ConfigError if the adapter cannot be combined with the parallelism of `shard`."""
    if not isinstance(adapter, LoraConfig):
        return
    for name in ("tensor_parallel", "expert_parallel"):  # their plans do not support the wrappers that peft adds
        if (ranks := getattr(shard, name)) > 1:
            raise ConfigError(f"adapter=lora cannot be combined with shard.{name}={ranks} yet; remove one of them.")
    if adapter.finds_directions and shard.context_parallel > 1:
        raise ConfigError(
            f"adapter.init=eva cannot be combined with shard.context_parallel={shard.context_parallel} yet; remove "
            f"one of them."
        )
    if adapter.dora and shard.flattens_units and shard.min_params is not None:
        raise ConfigError(
            f"adapter.dora=true cannot be combined with shard.min_params={shard.min_params} under "
            f"shard={shard.wrapper}: DoRA uses the weights of a layer outside of the units that they would be in. "
            f"Remove shard.min_params, or use shard=fsdp2."
        )


def check_chunked_loss(config: ModelConfig, shard: ShardConfig) -> None:
    """Raise ConfigError if `model.chunked_loss` is asked for where layers are divided over ranks."""
    if config.chunked_loss is True and shard.tensor_parallel > 1:
        raise ConfigError(
            f"model.chunked_loss=true cannot be combined with shard.tensor_parallel={shard.tensor_parallel}, which "
            f"divides the output head; set model.chunked_loss=auto."
        )


def chunk_loss(model: PreTrainedModel, config: ModelConfig, shard: ShardConfig, *, any_vocabulary: bool) -> None:
    """Apply `model.chunked_loss`, unless tensor parallelism divides the output head, which then gathers the logits.

    Args:
        model: The model, on the meta device.
        config: Its settings.
        shard: How it will be sharded.
        any_vocabulary: Whether `auto` includes small vocabularies, as for log-probabilities of pairs of answers.
    """
    check_chunked_loss(config, shard)
    if shard.tensor_parallel == 1:
        use_loss_head(model, config.chunked_loss, any_vocabulary=any_vocabulary)


def _figures(shards: Mapping[str, LocalShard], block_bytes: int, context: DistributedContext) -> LoadFigures:
    peak = peak_resident_bytes()
    shard_bytes = sum(part.data.nbytes for part in shards.values())
    worst = context.all_reduce([peak, shard_bytes, peak - shard_bytes - block_bytes], "max")
    return LoadFigures(int(worst[0]), int(worst[1]), block_bytes, int(worst[2]))
