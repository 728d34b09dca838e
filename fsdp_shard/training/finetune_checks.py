"""Checks the settings of a run against its machine, its data and its model, before any rank starts."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

from transformers import PretrainedConfig, PreTrainedModel

from fsdp_shard import checkpoint, data, models, sharding
from fsdp_shard.distributed import is_restarted, uses_gpus, world_sizes
from fsdp_shard.errors import ConfigError
from fsdp_shard.training.checkpoints import resume
from fsdp_shard.training.checkpoints.run_lock import check_free
from fsdp_shard.training.config import (
    CombinedSettings,
    FinetuneSettings,
    TrainConfig,
    check_held_out,
    num_micro_batches,
)
from fsdp_shard.training.held_out.sample_completions import check_samples
from fsdp_shard.training.load_model import check_adapter_mesh, check_chunked_loss, chunk_loss, match_weights
from fsdp_shard.training.logging.loss_plot import check_plots
from fsdp_shard.training.logging.trackers import check_trackers
from fsdp_shard.training.loss.custom_functions import import_loss
from fsdp_shard.training.loss.fused_kernels import check_installed, check_kernels, check_known
from fsdp_shard.training.model_identity import check_base_model, model_name
from fsdp_shard.training.model_origin import (
    check_classifier,
    decoder_start,
    model_on_meta,
    model_source,
    origin_config,
)
from fsdp_shard.training.objectives.objective import ObjectiveConfig
from fsdp_shard.training.objectives.objective_checks import check_objective
from fsdp_shard.training.objectives.teachers.teacher_checks import check_same_teacher, check_teacher
from fsdp_shard.training.optim.ema import check_average
from fsdp_shard.training.peft import lora
from fsdp_shard.training.peft.config import PRINCIPAL, LoraConfig
from fsdp_shard.training.peft.earlier_adapter import (
    check_earlier,
    check_head,
    check_resumed,
    is_gone,
    locate_earlier,
    pin_earlier,
)
from fsdp_shard.training.peft.qlora import quantize_base
from fsdp_shard.training.sample_length import settle_run_length
from fsdp_shard.utils import check


def check_finetune(config: FinetuneSettings) -> None:
    """Raise an InputError for every mistake that can be found before a run starts.

    Sets `data.sequence_length` if it is null, so that the ranks and all records have a number. If `adapter.path` is a
    run, sets it to the run's current step.

    Args:
        config: The settings of `finetune`.

    Example:
        >>> fs.check_finetune(config)  # doctest: +SKIP
    """
    check(config)
    _check_settings(config)
    resume_from = _find_resumed(config)
    if resume_from is None or not is_gone(config.adapter):
        pin_earlier(config.adapter, model_name(config.model))
    check_base_model(config, resume_from)
    source = model_source(config, resume_from)
    check_model(config, source, resume_from)
    check_teacher(config, source)
    check_same_teacher(config, resume_from)
    check_trackers(config.train.trackers)
    if config.train.plot:
        check_plots()


def check_combination(
    settings: CombinedSettings, num_ranks: int, *, on_gpu: bool, is_packed: bool, is_streamed: bool
) -> None:
    """Raise ConfigError if `finetune` refuses these sections together, whatever the data and the architecture.

    Args:
        settings: The sections.
        num_ranks: Number of ranks.
        on_gpu: Whether the ranks have GPUs.
        is_packed: Whether samples are packed.
        is_streamed: Whether samples are unknown before training.
    """
    model, shard, train, adapter = settings.model, settings.shard, settings.train, settings.adapter
    _check_inputs(model, shard, train, is_packed=is_packed, is_streamed=is_streamed)
    sharding.check_ranks(shard, num_ranks, on_gpu=on_gpu)
    sharding.check_accumulation(shard, num_micro_batches(train, sharding.num_data_ranks(shard, num_ranks)))
    if train.tf32 and not on_gpu:
        raise ConfigError("train.tf32=true has no effect: the ranks of this run are on the CPU. Remove it.")
    check_objective(settings.objective, model, shard, adapter, is_packed=is_packed, is_streamed=is_streamed)
    check_kernels(model.kernels, shard, on_gpu=on_gpu)
    check_chunked_loss(model, shard)
    settings.optim.check_installed()
    settings.optim.check_divided(shard.tensor_parallel, shard.expert_parallel)
    adapter.check_installed()
    check_adapter_mesh(adapter, shard)
    if train.ema_decay is not None and adapter.init in PRINCIPAL:
        raise ConfigError(
            f"train.ema_decay cannot be combined with adapter.init={'|'.join(PRINCIPAL)} yet; remove one of them."
        )


def _check_inputs(
    model: models.ModelConfig, shard: sharding.ShardConfig, train: TrainConfig, *, is_packed: bool, is_streamed: bool
) -> None:
    """Raise ConfigError if the samples, or the prompts to complete, contradict other sections."""
    if train.epochs is not None and is_streamed:
        raise ConfigError(
            f"train.epochs={train.epochs:g} cannot be combined with data.streaming=true, because the length of a "
            f"stream is not known before its end; set train.steps instead."
        )
    if train.sample_prompts and model.task != models.CAUSAL:
        raise ConfigError(f"train.sample_prompts is for model.task={models.CAUSAL}, not {model.task}; remove it.")
    if train.neftune_alpha is not None and shard.context_parallel > 1:
        raise ConfigError(
            f"train.neftune_alpha={train.neftune_alpha} cannot be combined with shard.context_parallel="
            f"{shard.context_parallel} yet: the noise depends on the length of whole sequences. Remove one of them."
        )
    if is_packed and model.attention == "flash_attention_2" and train.micro_batch_size > 1:
        raise ConfigError(
            "data.packing=true with model.attention=flash_attention_2 needs train.micro_batch_size=1: in a larger "
            "batch transformers does not find the boundaries of documents, and they would attend to each other. Or "
            "use model.attention=sdpa."
        )


def _check_settings(config: FinetuneSettings) -> None:
    """Check what needs neither the run directory nor the model: ranks, settings, data files, packages."""
    packing, streaming, on_gpu = config.data.packing, config.data.streaming, uses_gpus(config.launch)
    for num_ranks in world_sizes(config.launch):
        check_combination(config, num_ranks, on_gpu=on_gpu, is_packed=packing, is_streamed=streaming)
    check_installed(config.model.kernels)
    import_loss(config.loss)
    data.check_task(config.model.task, config.data, config.objective.samples)
    data.check_data(config.data, config.model.task, config.objective.samples)
    check_held_out(config.train, config.data)


def _find_resumed(config: FinetuneSettings) -> Path | None:
    """Find the step to resume from, if any, and check that these settings can continue it."""
    is_restart = check_free(config.run_dir, may_join=config.launch.is_elastic) or is_restarted()
    resume_from = resume.find_step(config.resume, config.run_dir, config.checkpoint.remote, is_restart=is_restart)
    if resume_from is None and checkpoint.recognize(Path(config.run_dir)) is not None:
        raise ConfigError(
            f"run_dir={config.run_dir} holds the weights of a model, which the checkpoints of a run in it would hide; "
            f"give another directory."
        )
    if not resume.is_finished(resume_from, config.run_dir, config.train):
        resume.check_optimizer(resume_from, config.optim)
        check_average(config.train.ema_decay, resume_from)
    _check_labels(config, resume_from)
    resume.check_same_objective(resume_from, config.objective, config.loss)
    lora.check_continues(config.adapter, resume_from)
    if resume_from is not None:
        check_resumed(config.adapter, model_name(config.model), resume_from)
    return resume_from


def check_model(config: FinetuneSettings, source: checkpoint.Location, resume_from: Path | None = None) -> None:
    """Build the model on the meta device, check that it fits the settings, and determine `data.sequence_length`.

    Args:
        config: The settings of the run.
        source: The model.
        resume_from: The step to resume from, if any.

    Raises:
        ModelError, ConfigError, DataError: The model cannot be built, sharded or adapted by these settings, or it or
            its tokenizer does not support the data.
    """
    task, shard, adapter = config.model.task, config.shard, config.adapter
    model_config = origin_config(config.model, source)
    models.check_model_task(model_config, task)
    check_architecture(model_config, task, config.objective)
    checkpoint.check_loadable(source.model_index)
    packs_pairs = config.data.packing and config.objective.samples == data.PAIRS
    if config.data.packing and not packs_pairs:
        models.check_packing(model_config, config.model.attention)
    open_tokenizer = cache(lambda: models.load_tokenizer(source.tokenizer_directory, config.model.trust_remote_code))
    if task == models.MASKED_LM:
        data.SpecialTokens.of(open_tokenizer())
    if any(part.kind != "text" for part in data.all_sources(config.data)):
        data.check_tokenizer(config.data, open_tokenizer(), task)
    model = model_on_meta(config.model, source)
    head_is_read = resume_from is not None and not isinstance(adapter, LoraConfig)
    # Matching adds entries to an index, but the index of `source` must stay as stored for later comparisons.
    with replace(source).model_index as index:
        head, _ = match_weights(model, config.model, index, head_is_read=head_is_read)
    context_length = models.context_length_of(model_config, config.model.trust_remote_code)
    settle_run_length(config.data, resume_from, context_length)
    if (target := config.data.target_length) is not None:
        context_length.check(f"data.target_length={target}", target)
    if packs_pairs:
        models.check_shared_prompts(model_config, config.model.attention, config.data.window_length)
    sharding.check_context_parallel(model_config, model, config.model, shard, config.data.window_length)
    if config.train.sample_prompts:
        check_samples(config, open_tokenizer(), context_length)
    if task == models.SEQ2SEQ:
        decoder_start(model)
    sharding.check_shardable(model, shard)
    check_known(model_config, config.model.kernels)
    if isinstance(adapter, LoraConfig):
        _check_lora(config, adapter, model, source, resume_from, () if head is None else head.modules)
    config.optim.check_parameters([name for name, _ in model.named_parameters(remove_duplicate=False)])
    check_trained(model, shard)
    chunk_loss(model, config.model, shard, any_vocabulary=not config.objective.is_cross_entropy)


def check_architecture(model: PretrainedConfig, task: str, objective: ObjectiveConfig) -> None:
    """Raise ModelError if a model of this kind cannot learn the task, whatever its weights.

    Args:
        model: Its config, which `check_model_task` accepts.
        task: The value of `model.task`.
        objective: The objective.
    """
    if task == models.CAUSAL:
        models.check_left_to_right(model)
    if task == models.SEQUENCE_CLASSIFICATION:
        check_classifier(model, is_reward_model=objective.name == "reward")


def _check_lora(
    config: FinetuneSettings,
    adapter: LoraConfig,
    model: PreTrainedModel,
    source: checkpoint.Location,
    resume_from: Path | None,
    head: Sequence[str],
) -> None:
    """Inject the adapter into `model`, compare it with the adapter it continues from, and quantize the base."""
    added, _ = lora.inject_lora(model, adapter, lora.base_path(config.model, source), {}, config.model.task, head)
    is_read = resume_from is None or not is_gone(adapter)  # by a resumed run, too, as the reference
    if is_read and (earlier := locate_earlier(adapter, model_name(config.model))) is not None:
        shapes = {name: tuple(param.shape) for name, param in model.named_parameters()}
        check_head(adapter, config.model.labels, earlier)
        check_earlier(added, adapter, shapes, earlier, source.model_index, source.expected_config_directory)
    quantize_base(model, adapter.quantize, config.shard, {})
    sharding.check_shardable(model, config.shard)  # quantized weights may be units of their own


def check_trained(model: PreTrainedModel, shard: sharding.ShardConfig) -> None:
    """Check that these settings can train the trainable parameters of a model.

    Args:
        model: The model on meta, with its adapter, and quantized.
        shard: How it will be sharded.

    Raises:
        ConfigError: The settings do not fit the model, or each other.
    """
    sharding.check_dtypes(model, shard)
    _check_float16(model)


def _check_labels(config: FinetuneSettings, resume_from: Path | None) -> None:
    """Raise ConfigError if the resumed run has a new head with other classes, or the same ones in another order."""
    if resume_from is None or not config.model.labels:
        return
    if config.adapter.trains_all:
        names = checkpoint.class_names(models.load_config(resume_from, config.model.trust_remote_code).id2label or {})
    else:
        base = checkpoint.read_base_model(resume_from)
        names = [] if base is None or base.head is None else base.head.classes
    if names != list(config.model.labels):
        raise ConfigError(
            f"{resume_from} has a head with the classes [{','.join(names)}], but model.labels="
            f"[{','.join(config.model.labels)}]; set model.labels=[{','.join(names)}], or start a new run in another "
            f"run_dir."
        )


def _check_float16(model: PreTrainedModel) -> None:
    trained = ((name, str(param.dtype)) for name, param in model.named_parameters() if param.requires_grad)
    if name := next((name for name, dtype in trained if dtype == "torch.float16"), ""):
        raise ConfigError(
            f"model.dtype=float16 is too narrow to train in: most squared gradients underflow to zero ({name}). Use "
            f"float32 or bfloat16; shard.param_dtype is the dtype of the computation."
        )
