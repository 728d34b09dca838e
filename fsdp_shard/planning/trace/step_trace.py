"""Traces the memory of a training step: a rank runs the real code of a run on tensors without memory.

The wrapper shards the model, and the training loop takes two steps with it: forward passes, the loss in chunks,
backward passes, clipping and the optimizer, which creates its state in the first step. The tensors are fake
(`FakeTensorMode`), so nothing of the model's size is in memory. The process group is fake, so nothing is sent, and
1,024 ranks cost as much as 2. `LiveStorages` counts. Kernels are those of the CPU, so that a trace and a run on CPU
ranks have the same operators. All layers run: the time is that of the operators in Python.

Differences on a GPU: its optimizers may update many parameters at once and need more memory for it, the loss of whole
logits has larger chunks, and memory that a stream has not released yet counts as free here. Copies of
`shard.cpu_offload` to the device count while they are made.
"""

import multiprocessing
import warnings
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from math import ceil, prod
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel
from transformers import PretrainedConfig, PreTrainedModel

from fsdp_shard import data, models, sharding
from fsdp_shard.distributed import DistributedContext
from fsdp_shard.errors import ConfigError, FsdpShardError
from fsdp_shard.planning.meta_model import build_planned
from fsdp_shard.planning.planned_run import PlannedRun
from fsdp_shard.planning.step.recording.fake_attention import attention_without_values
from fsdp_shard.planning.step.snapshot import Snapshot, highest, highest_of_phases
from fsdp_shard.planning.trace.fake_rank import as_fake_rank
from fsdp_shard.planning.trace.live_storages import GLOO, OFFLOADED, LiveSnapshot, LiveStorages, snapshots
from fsdp_shard.training import (
    DistillConfig,
    ModelReference,
    PrecomputedReference,
    TrainerState,
    TrainingRun,
    WeightAverage,
    build_optimizer,
    train,
    use_loss_head,
)
from fsdp_shard.utils import first_line, initialize_fsdp2, one_thread, plain_parts, storage_bytes, tensors_in

_STEPS = 2
_MICRO_BATCHES = 3  # the first, a middle one, the last; further ones would be like the middle one
_OFFLOADED_TERMS = ("parameters", "gradients", "optimizer", "optimizer temporaries", "average", "reference")


@dataclass(frozen=True)
class StepTrace:
    """The memory of one rank over two training steps.

    Attributes:
        rank: The rank.
        snapshots: The highest snapshot of each stretch of one phase in one block, in order.
        state_bytes: Bytes after a step, on any device: `parameters`, `gradients` (before the update), `optimizer`,
            `average` and `reference`.
        host_bytes: The part of `state_bytes` in CPU memory, with `shard.cpu_offload`.
    """

    rank: int
    snapshots: tuple[Snapshot, ...]
    state_bytes: Mapping[str, int]
    host_bytes: int = 0

    @property
    def peak(self) -> Snapshot:
        """The snapshot with the most bytes."""
        return highest(self.snapshots)

    @property
    def peak_bytes(self) -> int:
        """The maximum bytes live at one time."""
        return self.peak.total_bytes

    @property
    def peak_by_phase(self) -> dict[str, int]:
        """The maximum bytes live at one time in each phase."""
        return {phase: snapshot.total_bytes for phase, snapshot in highest_of_phases(self.snapshots).items()}


def trace_step(config: PretrainedConfig, run: PlannedRun, rank: int = 0) -> StepTrace:
    """Trace the memory of a rank in training steps of a run.

    This runs in a separate process, which leaves the process groups, threads and random state of this one unchanged.

    Args:
        config: The transformers config of the model.
        run: The settings of the run.
        rank: The rank, out of `run.num_ranks`.

    Returns:
        The live bytes over time.

    Raises:
        ConfigError: The settings do not work for this model and number of ranks, or cannot be traced.
        ModelError: No blocks are found in the model, or it cannot be run.
    """
    _check(run, rank)
    # A fork has everything imported. Ranks of a process group cannot fork, and where there is a GPU, torch refuses a
    # backward pass in a fork of a process that has run one, as the plan has.
    cannot_fork = dist.is_initialized() or torch.accelerator.is_available()
    processes: Any = multiprocessing.get_context("spawn" if cannot_fork else "fork")
    receiver, sender = processes.Pipe(duplex=False)
    child = processes.Process(target=_trace_and_send, args=(sender, config, run, rank))
    child.start()
    sender.close()
    try:
        answer = receiver.recv()
    except EOFError:
        child.join()
        raise RuntimeError(f"the process that traces a step ended with exit code {child.exitcode}") from None
    except BaseException:  # such as SIGTERM: Python would wait for the trace before it exits
        child.kill()
        raise
    finally:
        receiver.close()
    child.join()
    if isinstance(answer, BaseException):
        raise answer
    assert isinstance(answer, StepTrace)
    return answer


def _check(run: PlannedRun, rank: int) -> None:
    """Raise ConfigError for settings that cannot be traced."""
    if not 0 <= rank < run.num_ranks:
        raise ConfigError(f"There is no rank {rank} of {run.num_ranks} to trace; give one from 0 on.")
    run.optim.check_installed()
    sharding.check_mesh(run.shard, run.num_ranks)
    if run.shard.compile is not False:
        raise ConfigError(
            "trace=true cannot be used with shard.compile, as compiled blocks need tensors that have memory; plan with "
            "shard.compile=false, which needs no less."
        )
    if isinstance(run.shard, sharding.Fsdp1Config) and not run.shard.reshard_after_forward:
        raise ConfigError(
            "trace=true cannot be used with shard=fsdp1 and shard.reshard_after_forward=false, as torch asks there for "
            "the address of gathered parameters, which tensors without memory do not have; trace shard=fsdp2 instead."
        )
    if run.shard.activation_offload:
        raise ConfigError(
            "trace=true cannot be used with shard.activation_offload=true, as a trace runs on the CPU, from which "
            "nothing is offloaded; remove one of them."
        )
    if isinstance(run.shard, sharding.Fsdp1Config) and run.shard.cpu_offload:
        raise ConfigError(
            "trace=true cannot be used with shard=fsdp1 and shard.cpu_offload=true, as torch locks pages there of "
            "memory that a trace does not have; trace shard=fsdp2 instead."
        )
    if isinstance(run.objective, DistillConfig):
        raise ConfigError(
            "trace=true cannot be used with objective=distill, as the teacher is another model; leave trace "
            "out: the plan has the memory of a teacher that runs alongside."
        )


def _trace_and_send(sender: Connection, config: PretrainedConfig, run: PlannedRun, rank: int) -> None:
    """Trace in this process, and send the trace or the error."""
    torch.set_num_threads(1)
    try:
        answer: Any = _trace(config, run, rank)
    except FsdpShardError as error:
        answer = error
    except Exception as error:  # from torch, which cannot trace every operator
        answer = ConfigError(
            f"trace=true cannot follow {type(error).__name__} in the training step of {_name(config)}: "
            f"{first_line(error)}. Plan with trace=false."
        )
    sender.send(answer)
    sender.close()


def _name(config: PretrainedConfig) -> str:
    return next(iter(config.architectures or ()), type(config).__name__)


def _trace(config: PretrainedConfig, run: PlannedRun, rank: int) -> StepTrace:
    warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")  # FSDP1 compares them
    shard = run.shard
    mesh = {name: getattr(shard, name) for name in ("tensor_parallel", "expert_parallel", "context_parallel")}
    built, frozen = _build(config, run), _build(config, run) if run.has_sharded_reference else None
    with one_thread():
        run.optim.build({"weight": nn.Parameter(torch.zeros(64, 64))}, {"weight": (64, 64)})  # for its imports
    live, state = LiveStorages(follows_values=shard.expert_parallel > 1), dict[str, int]()
    with (
        as_fake_rank(rank, run.num_ranks, shard.replicas, **mesh) as context,
        _attention(built.model, run),
        nullcontext() if frozen is None else _attention(frozen.model, run),
        live,
    ):
        with live.fake:
            training = _training(config, run, built, frozen, context, live)
            shards = training.model.local_shards().values()
            held = [shard.data for shard in shards if isinstance(shard.tensor, nn.Parameter)]
            state["parameters"] = sum(part.nbytes for part in held)
        live.phase = "forward"
        with _phases(live, training, built.blocks, state):
            for _ in train(training):
                training.interrupted_by = 0  # a fake tensor reads as 1, as if a signal to stop had come
                live.phase = "optimizer"
    uncounted = {*(_OFFLOADED_TERMS if shard.cpu_offload else (OFFLOADED,)), *((GLOO,) if run.on_gpu else ())}
    found = snapshots(live.events, uncounted)
    kept = tuple(_snapshot(snapshot) for snapshot in found if snapshot.phase != "load")
    return StepTrace(rank, kept, state, sum(state.values()) if shard.cpu_offload else 0)


def _snapshot(live: LiveSnapshot) -> Snapshot:
    return Snapshot(live.phase, live.where, {kind: size for kind, size in sorted(live.by_kind.items()) if size})


@dataclass(frozen=True)
class _Built:
    """A model on meta that is ready to be sharded.

    Attributes:
        model: The model.
        blocks: Its blocks by FQN.
        units: Its units.
        adapter: Its adapter, if any.
    """

    model: PreTrainedModel
    blocks: Mapping[str, nn.Module]
    units: tuple[sharding.Unit, ...]
    adapter: Any = None


def _build(config: PretrainedConfig, run: PlannedRun) -> _Built:
    """Build the model on meta, as `finetune` does, and check it."""
    model, adapter = build_planned(config, run.model, run.adapter, run.model.dtype, run.shard)
    if run.shard.tensor_parallel == 1:
        use_loss_head(model, run.model.chunked_loss, any_vocabulary=not run.objective.is_cross_entropy)
    models.rebuild_buffers(model, "cpu")
    sharding.check_shardable(model, run.shard)
    sharding.check_context_parallel(config, model, run.model, run.shard, run.sequence_length)
    fqns = [block.fqn for block in models.no_split_blocks(model, run.shard.blocks) if not block.direct]
    blocks = {fqn: model.get_submodule(fqn) for fqn in fqns if fqn}
    return _Built(model, blocks, tuple(sharding.plan_units(model, run.shard)), adapter)


def _attention(model: PreTrainedModel, run: PlannedRun) -> AbstractContextManager[None]:
    """Attention with the mask of the run, if any; divided sequences use another one."""
    if run.shard.context_parallel > 1:
        return nullcontext()
    return attention_without_values(model, run.rows)


def _training(
    config: PretrainedConfig,
    run: PlannedRun,
    built: _Built,
    frozen: _Built | None,
    context: DistributedContext,
    live: LiveStorages,
) -> TrainingRun:
    """The run before its first step, on fake tensors."""
    elements = _elements_per_rank(built, run)  # FSDP1 has other parameters
    model = _sharded(built.model, run, context)
    live.mark(model.module.parameters(), "parameters")
    optimizer = build_optimizer(run.optim, model, context, built.adapter, elements)
    num_batches = min(run.num_micro_batches, _MICRO_BATCHES)
    settings = replace(
        run.train, steps=_STEPS, epochs=None, schedule="constant", warmup_steps=0, profile=[],
        global_batch_size=num_batches * run.train.micro_batch_size * run.num_data_ranks,
    )  # fmt: skip
    samples = _Samples(config, run)
    training = TrainingRun(
        model, optimizer, samples, settings, context, TrainerState(0, samples.identity), objective=run.objective,
        sync_every_micro_batch=run.shard.sync_every_micro_batch,
    )  # fmt: skip
    if run.train.ema_decay is not None:
        training.average = WeightAverage(run.train.ema_decay, model.local_shards())
        live.mark((shard.data for shard in training.average.trained().values()), "average")
    if frozen is not None:
        frozen.model.requires_grad_(False)
        reference = _sharded(frozen.model, run, context)
        live.mark(reference.module.parameters(), "reference")
        training.reference = ModelReference(reference, leaves_adapter_out=run.adapter.begins_at_base)
    elif run.reference_kind == "adapter":
        training.reference = ModelReference(model, leaves_adapter_out=True)
    elif run.reference_kind == "precomputed":
        training.reference = PrecomputedReference()
    return training


def _sharded(model: PreTrainedModel, run: PlannedRun, context: DistributedContext) -> sharding.ShardedModel:
    for owner in model.modules():
        for name, buffer in list(owner.named_buffers(recurse=False)):
            if not buffer.is_meta:  # computed earlier; its values are not needed
                setattr(owner, name, torch.empty(buffer.shape, dtype=buffer.dtype))
    # DDP rebuilds its buckets, of the same bytes, in the order of the first step unless parameters may be unused. It
    # would read that order from a tensor.
    shard = replace(run.shard, find_unused_parameters=True) if isinstance(run.shard, sharding.DdpConfig) else run.shard
    sharded = shard.shard(model, context)
    if isinstance(sharded.module, DistributedDataParallel):
        sharded.module.register_comm_hook(None, _pretend_all_reduce)
    if isinstance(sharded.module, FSDPModule):
        initialize_fsdp2(sharded.module)
    return sharded


def _pretend_all_reduce(state: None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Return a bucket as if all-reduced in place, because the fake process group cannot complete the all-reduce."""
    reduced: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    reduced.set_result(bucket.buffer())
    return reduced


def _elements_per_rank(built: _Built, run: PlannedRun) -> dict[str, list[int]] | None:
    """The number of elements of each parameter on each rank that shares it, for optimizers that need it."""
    if not run.optim.needs_full_params:
        return None
    shapes = {name: tuple(param.shape) for name, param in built.model.named_parameters()}
    by_rank = run.shard.local_shapes(shapes, built.units, run.num_shards)
    return {name: [prod(local[name]) for local in by_rank] for name in shapes}


@contextmanager
def _phases(
    live: LiveStorages, run: TrainingRun, blocks: Mapping[str, nn.Module], state: dict[str, int]
) -> Iterator[None]:
    """Inform `live` of what runs and what storages hold; fill `state` with the bytes of the rank's state."""
    module, optimizer = run.model.module, run.optimizer

    def begin_forward(*args: Any) -> None:
        live.phase, live.where, live.in_backward_pass = "forward", "", False

    def enter_backward(*args: Any) -> None:
        live.in_backward_pass = True

    def end_forward(module: nn.Module, args: Any, output: Any) -> None:
        live.phase, live.where = "loss", ""
        for tensor in tensors_in(output):
            if tensor.grad_fn is not None:
                tensor.grad_fn.register_prehook(enter_backward)

    def before_update(*args: Any) -> None:
        gradients = [param.grad for param in module.parameters() if param.grad is not None]
        live.mark(gradients, "gradients")
        live.phase, live.where = "optimizer", ""
        state["gradients"] = storage_bytes(plain_parts(gradients))

    def after_update(*args: Any) -> None:
        states = getattr(optimizer, "inner", optimizer).state.values()
        held = [value for values in states for value in values.values()]
        live.mark(held, "optimizer")
        state["optimizer"] = storage_bytes(plain_parts(held))
        if run.average is not None:
            state["average"] = storage_bytes(plain_parts(shard.data for shard in run.average.trained().values()))
        if isinstance(run.reference, ModelReference) and run.reference.model is not run.model:
            state["reference"] = storage_bytes(plain_parts(run.reference.model.module.parameters()))

    with ExitStack() as hooks:
        handles = [
            module.register_forward_pre_hook(begin_forward),
            module.register_forward_hook(end_forward),
            optimizer.register_step_pre_hook(before_update),
            optimizer.register_step_post_hook(after_update),
        ]
        for fqn, block in blocks.items():
            handles += _hook_block(live, fqn, block)
        for handle in handles:
            hooks.callback(handle.remove)
        yield


def _hook_block(live: LiveStorages, fqn: str, block: nn.Module) -> list[Any]:
    """Inform `live` when `block` runs, and when its backward pass begins."""

    def enter(*args: Any) -> None:
        live.where = fqn

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        live.where = ""
        first = output[0] if isinstance(output, tuple) else output
        if isinstance(first, torch.Tensor) and first.grad_fn is not None:
            first.grad_fn.register_prehook(enter)

    return [block.register_forward_pre_hook(enter), block.register_forward_hook(leave)]


class _Samples(data.Dataset):
    """Samples of a planned run: all of full length, predicting every token."""

    identity = "planned"
    num_samples = None

    def __init__(self, config: PretrainedConfig, run: PlannedRun) -> None:
        self._run, self.sequence_length = run, run.sequence_length
        self._is_causal = run.model.task == models.CAUSAL
        self._decodes = bool(getattr(config, "is_encoder_decoder", False))

    def sample(self, position: int) -> data.Sample:
        length, compares = self.sequence_length, self._run.objective.samples != data.ROWS
        if compares and self._run.is_packed:
            return self._packed_answers() if self._run.objective.samples == data.LABELED else self._packed_pair()
        rows = (2,) if compares else ()
        tokens = np.zeros((*rows, length), np.int64)
        labels = np.zeros((*rows, self._run.target_length or length), np.int64)
        inputs = {"input_ids": tokens} if self._is_causal else {"input_ids": tokens, "attention_mask": tokens + 1}
        if self._run.is_packed:
            inputs["position_ids"] = np.arange(length) % -(-length // 2)  # two documents
        if self._run.model.task == models.SEQUENCE_CLASSIFICATION:
            labels = np.zeros(rows, np.int64)
        if self._run.mask_fraction is not None:
            labels[ceil(length * self._run.mask_fraction) :] = data.IGNORE_INDEX
        extras = {"reference_log_probs": np.zeros(2, np.float32)} if compares else {}
        if self._run.objective.samples == data.LABELED:
            extras["desirable"] = np.zeros((), np.float32)
        return data.Sample(inputs, labels, decoder_start=0 if self._decodes else None, extras=extras)

    def _packed_answers(self) -> data.Sample:
        """An answer without a prompt that fills its row, and another one in the other row."""
        tokens = np.zeros((2, self.sequence_length), np.int64)
        inputs = {"input_ids": tokens, "position_ids": np.tile(np.arange(self.sequence_length), (2, 1))}
        extras = {"reference_log_probs": np.zeros((1, 2), np.float32), "desirable": np.zeros(1, np.float32)}
        segments = np.repeat([[data.CHOSEN_PART], [data.REJECTED_PART]], self.sequence_length, axis=1)
        return data.Sample(inputs, tokens, extras=extras, segments=segments)

    def _packed_pair(self) -> data.Sample:
        """A pair without a prompt, whose answers fill a row."""
        length, half = self.sequence_length, -(-self.sequence_length // 2)
        is_second = np.arange(length) >= half
        inputs = {"input_ids": np.zeros(length, np.int64), "position_ids": np.arange(length) % half}
        labels = np.zeros(length, np.int64)
        if self._run.model.task == models.SEQUENCE_CLASSIFICATION:  # the score of each answer's last token counts
            labels[np.diff(is_second, append=False) == 0] = data.IGNORE_INDEX
        extras = {"reference_log_probs": np.zeros((1, 2), np.float32)}
        segments = np.where(is_second, data.REJECTED_PART, data.CHOSEN_PART)
        return data.Sample(inputs, labels, extras=extras, segments=segments)
