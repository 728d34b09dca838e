"""The stages of `finetune` around its loop, each one line of `recipes/finetune.py`."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict
from functools import partial

from torch.optim import Optimizer

from fsdp_shard.checkpoint import BASE_MODEL, RUN_CONFIG
from fsdp_shard.data import Dataset, Samples, prepare_on_ranks
from fsdp_shard.distributed import (
    LONGEST_TIMEOUT_SECONDS,
    DistributedContext,
    check_same_settings,
    check_started,
    describe_missing_numactl,
    init_distributed,
    is_restarted,
    run_on_main,
)
from fsdp_shard.errors import ConfigError
from fsdp_shard.models import load_context_length
from fsdp_shard.training.checkpoints import resume
from fsdp_shard.training.checkpoints.recorded_settings import changed_values
from fsdp_shard.training.checkpoints.resume_report import describe_finished, describe_resume
from fsdp_shard.training.checkpoints.run_lock import RunLock, run_lock
from fsdp_shard.training.checkpoints.saver import FinetuneSaver, RunContent
from fsdp_shard.training.config import FinetuneSettings
from fsdp_shard.training.dataset_figures import data_figures, describe_streams
from fsdp_shard.training.finetune_checks import check_combination
from fsdp_shard.training.held_out.sample_completions import sample_completions
from fsdp_shard.training.load_model import LoadedModel, UnfilledModel, unfilled_model
from fsdp_shard.training.logging.mfu import trains_every_token, utilization
from fsdp_shard.training.logging.model_summary import describe_loaded_model
from fsdp_shard.training.logging.profiler import profile_step
from fsdp_shard.training.logging.run_log import RunLog
from fsdp_shard.training.logging.trackers import public_settings
from fsdp_shard.training.loop import TrainingRun
from fsdp_shard.training.loss.custom_functions import CustomFunctions, import_loss
from fsdp_shard.training.model_identity import check_base_model
from fsdp_shard.training.model_origin import RunStart, collect_model_files, data_task, model_source
from fsdp_shard.training.objectives.reference_model import open_reference
from fsdp_shard.training.objectives.teachers.teacher_checks import check_same_teacher, teacher_record
from fsdp_shard.training.optim.build import check_rates, check_steps
from fsdp_shard.training.optim.ema import average_files, open_average
from fsdp_shard.training.peft.eva import fill_eva
from fsdp_shard.training.sample_length import describe_lengths
from fsdp_shard.training.seeding import deterministic_algorithms, tf32_products
from fsdp_shard.training.stop_signal import StopSignal, interrupted
from fsdp_shard.training.trainer_state import TrainerState
from fsdp_shard.utils import check, device_peak_bytes, format_count, keep_freed_memory, reset_device_peak, say


@contextmanager
def start_run(config: FinetuneSettings) -> Iterator[RunStart]:
    """Join the ranks, lock the run directory, catch signals to stop, and find the step to resume from.

    A collective, after `check_finetune`. If the run is already finished, rank 0 reports that. The peak memory of this
    process counts from here.

    Args:
        config: The settings of `finetune`.

    Raises:
        ConfigError, CheckpointError: On all ranks: a setting is wrong or not the same on all ranks, the ranks are not
            those of `launch`, another run uses the directory, or the run cannot be resumed.

    Example:
        >>> with fs.start_run(config) as start:  # doctest: +SKIP
        ...     print(start.context.world_size, start.resume_from)
    """
    check(config)
    launch, shard = config.launch, config.shard
    with (
        deterministic_algorithms(config.train.deterministic),
        tf32_products(config.train.tf32),
        init_distributed(
            launch.device,
            shard.replicas,
            launch.timeout_seconds,
            tensor_parallel=shard.tensor_parallel,
            expert_parallel=shard.expert_parallel,
            context_parallel=shard.context_parallel,
        ) as context,
    ):
        check_started(launch, context.world_size)
        check_same_settings(context, config)
        packing, streaming, on_gpu = config.data.packing, config.data.streaming, context.device.type == "cuda"
        check_combination(config, context.world_size, on_gpu=on_gpu, is_packed=packing, is_streamed=streaming)
        _share_run_dir(config, context)
        with run_lock(config.run_dir, context) as lock, StopSignal() as stop:
            if context.device.type == "cpu":
                keep_freed_memory()  # a tenth of a step's time
            reset_device_peak(context.device.type)  # of an earlier run of this process
            yield _find_start(config, context, stop, lock)


def _share_run_dir(config: FinetuneSettings, context: DistributedContext) -> None:
    """Set `run_dir` to that of rank 0, as one that is named by date differs between ranks; a collective."""
    config.run_dir = run_on_main(context, lambda: config.run_dir)


def _find_start(config: FinetuneSettings, context: DistributedContext, stop: StopSignal, lock: RunLock) -> RunStart:
    """Find the step to resume from and verify it; a collective."""
    remote, trust = config.checkpoint.remote, config.model.trust_remote_code
    # Rank 0 may download a step. Without a remote store nothing takes long, and no other group is needed.
    patient_context = context.with_new_group(LONGEST_TIMEOUT_SECONDS) if remote else context
    resume_from = run_on_main(
        patient_context, lambda: resume.find_step(config.resume, config.run_dir, remote, is_restart=is_restarted())
    )
    note = run_on_main(context, lambda: check_base_model(config, resume_from))
    source = model_source(config, resume_from)
    if resume_from is not None and run_on_main(
        context, lambda: resume.is_finished(resume_from, config.run_dir, config.train)
    ):
        run_on_main(context, lambda: say(describe_finished(config, resume_from), sys.stderr))
        return RunStart(context, source, resume_from, is_finished=True)
    run_on_main(context, lambda: check_same_teacher(config, resume_from))
    resume.verify_resumed(resume_from, config.optim, config.checkpoint, context)
    return RunStart(context, source, resume_from, stop=stop, lock=lock, note=note, trust_remote_code=trust)


def open_data(config: FinetuneSettings, start: RunStart) -> Samples:
    """Tokenize the data of a run on rank 0, unless it is cached, and open it on every rank; a collective.

    Args:
        config: The settings of `finetune`.
        start: Its model and ranks.

    Returns:
        `train`, a `Dataset` in the order of training; `held_out`, or None; and `notes` to print.

    Raises:
        DataError, ConfigError: On all ranks: the data cannot be read, or contain nothing to train on.

    Example:
        >>> data = fs.open_data(config, start)  # doctest: +SKIP
        >>> data.train.batch([0, 1]).input_ids.shape  # doctest: +SKIP
        (2, 2048)
    """
    if config.data.sequence_length is None:
        raise ConfigError(
            "data.sequence_length is null, which check_finetune sets; call fs.check_finetune(config) on all ranks "
            "before fs.start_run."
        )
    task = data_task(config.model, start.source, config.objective.samples)
    return prepare_on_ranks(config.data, start.open_tokenizer, start.context, task=task, seed=config.seed)


def build_unfilled(config: FinetuneSettings, start: RunStart) -> AbstractContextManager[UnfilledModel]:
    """Build the model of a run on the meta device, with its adapter, and find its weights; a collective.

    Args:
        config: The settings of `finetune`.
        start: The location of the weights, and the step to resume from, whose adapter is restored.

    Returns:
        A context manager that keeps the files open. Its value has the `module`, to be sharded, and
        `load(sharded, seed)`, which reads each rank's own shards.

    Raises:
        ModelError, ConfigError, CheckpointError: On all ranks: model, weights and adapter do not match.

    Example:
        >>> with fs.build_unfilled(config, start) as unfilled:  # doctest: +SKIP
        ...     unfilled.module.model.embed_tokens.requires_grad_(False)
        ...     sharded = config.shard.shard(unfilled.module, start.context)
        ...     loaded = unfilled.load(sharded, config.seed)
    """
    return unfilled_model(
        config.model,
        start.source,
        config.shard,
        config.adapter,
        start.resume_from,
        start.context,
        chunks_any_vocabulary=not config.objective.is_cross_entropy,
    )


def open_run(
    config: FinetuneSettings, start: RunStart, loaded: LoadedModel, optimizer: Optimizer, dataset: Dataset
) -> TrainingRun:
    """Create the run that `train` drives, at the step to resume from, with its optimizer restored; a collective.

    Args:
        config: The settings of `finetune`.
        start: Where the run starts.
        loaded: The model.
        optimizer: Its optimizer, whose state is filled.
        dataset: The training data.

    Returns:
        The run. `functions` holds the loss of `loss=` and the function for `train.sample_prompts`, if they are set.

    Raises:
        ConfigError, CheckpointError: On all ranks: the step was saved with another seed, data or optimizer, or the
            optimizer is of other parameters, has no learning rate, or cannot step without a closure.

    Example:
        >>> run = fs.open_run(config, start, loaded, optimizer, data.train)  # doctest: +SKIP
        >>> run.functions.loss = my_loss  # doctest: +SKIP
    """
    context, adapter = start.context, loaded.adapter
    check_steps(optimizer)  # before its state is restored
    check_rates(optimizer, has_rates=adapter is not None and adapter.lora_plus is not None)
    state = run_on_main(context, lambda: _initial_state(config, start, dataset))
    if start.resume_from is not None:
        resume.restore_optimizer(optimizer, loaded, start.resume_from, context)
    elif adapter is not None and adapter.eva:
        loaded.notes.append(fill_eva(config, loaded.model, adapter.eva, dataset, context, start.stop))
    names = {} if adapter is None else adapter.names
    return TrainingRun(
        model=loaded.model,
        optimizer=optimizer,
        dataset=dataset,
        config=config.train,
        context=context,
        state=state,
        stop=start.stop,
        sync_every_micro_batch=config.shard.sync_every_micro_batch,
        profile=partial(profile_step, config.train.profile, config.run_dir, context),
        functions=CustomFunctions(
            loss=import_loss(config.loss), samples=sample_completions(config, start.open_tokenizer, context)
        ),
        objective=config.objective,
        reference=open_reference(config, start, loaded),
        average=open_average(config.train.ema_decay, loaded.model.local_shards(), names, start.resume_from, context),
    )


def _initial_state(config: FinetuneSettings, start: RunStart, dataset: Dataset) -> TrainerState:
    """Return the training progress of the run, with the settings that a resume changes."""
    state = resume.initial_state(start.resume_from, config, dataset.identity)
    if start.resume_from is not None:
        state.record_resume(changed_values(config, start.resume_from))
    return state


def open_log(
    config: FinetuneSettings, run: TrainingRun, start: RunStart, loaded: LoadedModel, notes: Iterable[str] = ()
) -> RunLog:
    """Create the log of a run: progress on the terminal, metrics.jsonl, trackers and, at the end, result.json.

    A collective. Every rank has a log; the log of rank 0 prints and writes.

    Args:
        config: The settings of `finetune`.
        run: The run.
        start: Where it starts.
        loaded: The model, which is described first.
        notes: More lines to print first.

    Returns:
        The log, to be used as a context manager.

    Raises:
        CheckpointError: On all ranks: the step to resume from has no valid settings or position in the data.

    Example:
        >>> with fs.open_log(config, run, start, loaded) as log:  # doctest: +SKIP
        ...     log.note("shown once")
    """
    opening = run_on_main(run.context, lambda: _first_lines(config, run, start))
    described = describe_loaded_model(loaded, config.model, config.shard, run.context)
    settings = public_settings(config) | {"train.steps": run.config.num_steps}
    mfu = None
    if trains_every_token(config):
        mfu = utilization(loaded, config.shard.param_dtype, config.data.window_length, run.context)
    return RunLog(config.run_dir, run, start.resume_from, settings, mfu, [*opening, *described, *notes])


def _first_lines(config: FinetuneSettings, run: TrainingRun, start: RunStart) -> list[str]:
    """Return what the log begins with: where the run resumes, what it trains otherwise than usual, how much data."""
    lines = [] if start.resume_from is None else [describe_resume(config, start.resume_from, run)]
    lines += [] if start.note is None else [start.note]
    if (loss := run.functions.loss) is not None:
        name = config.loss or f"{loss.__module__}:{getattr(loss, '__qualname__', type(loss).__name__)}"
        lines.append(f"loss={name}, not the cross-entropy: model.chunked_loss is off, as it needs whole logits")
    if config.train.ema_decay is not None:
        lines.append(
            f"train.ema_decay={config.train.ema_decay:g}: an average of the weights is saved in ema/ of each step; "
            f"evaluations are of the weights themselves"
        )
    if run.context.num_context_ranks > 1 and (run.functions.loss or run.functions.metrics):
        lines.append(
            f"shard.context_parallel={run.context.num_context_ranks}: the loss and metrics of your own get the tokens "
            f"of one rank, not whole sequences; they must be sums over tokens"
        )
    context_length = load_context_length(start.source.config_directory, config.model.trust_remote_code)
    lines += [*describe_lengths(config.data, context_length), *describe_missing_numactl(config.launch)]
    if (epochs := run.config.epochs) is not None:
        steps = format_count(run.config.num_steps, "step")
        lines.append(f"train.epochs={epochs:g} of {run.state.samples_per_epoch:,} samples: {steps}")
    return lines


def open_saver(
    config: FinetuneSettings, run: TrainingRun, start: RunStart, loaded: LoadedModel, log: RunLog
) -> FinetuneSaver:
    """Create the saver of a run's steps, each with the files that make it a model; a collective.

    It deletes what an interrupted save left, and uploads a step that `checkpoint.remote` lacks.

    Args:
        config: The settings of `finetune`.
        run: The run.
        start: Where it starts.
        loaded: Its model.
        log: Reports saves.

    Returns:
        The saver, to be used as a context manager.

    Raises:
        RemoteError: A step could not be uploaded.

    Example:
        >>> with fs.open_saver(config, run, start, loaded, log) as saver:  # doctest: +SKIP
        ...     saver.save(run.state)
    """
    source, adapter = start.source, loaded.adapter
    files = run_on_main(run.context, lambda: collect_model_files(source, config.model, config.data, adapter))
    files |= average_files(files) if run.average is not None else {}
    files |= run_files(config, loaded) | run_on_main(run.context, lambda: teacher_record(config))
    content = RunContent(loaded, run.optimizer, run.average, files)
    return FinetuneSaver(config.run_dir, config.checkpoint, run.context, content, log, start.lock)


def run_files(config: FinetuneSettings, loaded: LoadedModel) -> dict[str, bytes]:
    """Return each step's record of its run: the settings, and the model that the run began from.

    Returns:
        File name -> content.
    """
    files = {RUN_CONFIG: config.to_yaml().encode()}
    # An adapter has its base among its own files.
    return files if loaded.base is None or loaded.adapter is not None else files | {BASE_MODEL: loaded.base.to_json()}


def finish_run(config: FinetuneSettings, run: TrainingRun, loaded: LoadedModel, log: RunLog) -> None:
    """Write result.json, which marks the run as complete, and report rows dropped from streams; a collective.

    Args:
        config: The settings of `finetune`.
        run: The run, after its last step was saved.
        loaded: Its model.
        log: Its log.

    Raises:
        Interrupted: A signal has ended the run before its last step; the message says how to resume.

    Example:
        >>> fs.finish_run(config, run, loaded, log)  # doctest: +SKIP
    """
    figures = data_figures(run.dataset, run.state.num_samples, run.state.source_tokens)
    log.note(describe_streams(figures, run.dataset.sequence_length))
    if run.interrupted_by:
        raise interrupted(run.interrupted_by, run.state.step, config.run_dir, config.resume)
    peaks = run.context.all_gather_object(device_peak_bytes(run.context.device.type))
    figures["peak_memory_bytes_by_rank"] = peaks
    figures["memory_before_bytes_by_rank"] = run.context.all_gather_object(loaded.before_bytes)
    figures["device"] = run.context.device.type
    log.finish(config.model.path, {"num_params": loaded.num_params, "load": asdict(loaded.figures), **figures})
