"""Bytes of live tensors, counted while real code runs, and a planned run trained on real ranks under that count.

What is counted are storages in CPU memory that operators make or use, each once, by the size that it has now: FSDP
frees and allocates the memory of its gathered parameters by resizing a storage, which no operator sees, so sizes are
read again at each operator. What a kernel allocates inside of itself is not seen.
"""

from __future__ import annotations

import time
import weakref
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PretrainedConfig

from fsdp_shard.checkpoint import CheckpointConfig
from fsdp_shard.data import Batch, Sample, ShuffledDataset, WindowDataset
from fsdp_shard.distributed import DistributedContext
from fsdp_shard.models import build_on_meta, rebuild_buffers, tied_names
from fsdp_shard.planning import PlannedRun
from fsdp_shard.sharding import ShardedModel
from fsdp_shard.training import (
    FinetuneSaver,
    LoraConfig,
    ModelReference,
    PrecomputedReference,
    RunContent,
    RunLock,
    TrainerState,
    TrainingRun,
    WeightAverage,
    build_optimizer,
    evaluate_loss,
    inject_lora,
    quantize_base,
    train,
    use_loss_head,
)
from fsdp_shard.utils import plain_parts, storage_bytes, tensors_in
from tests.support.ranks import on_ranks

# A thread of gloo holds the tensors of a collective a moment longer than whoever waits for it.
_SETTLE_SECONDS = 0.002

# A storage that grew: its bytes, and what made it.
_Entry = tuple[int, str]


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of live storages, of those that operators inside make or use.

    Attributes:
        now: Bytes that are live.
        most: The most that were live at one time.
        phase: What is running, for `most_by_phase`; "backward" is found without being told.
        most_by_phase: The most that were live in each phase.
        by_maker: At the peak, bytes by the phase and the operator that made them, if `explains`.
    """

    def __init__(self, *, explains: bool = False) -> None:
        super().__init__()
        self.now = self.most = 0
        self.phase = "load"
        self.most_by_phase: dict[str, int] = {}
        self.by_maker: Counter[str] = Counter()
        self._explains = explains
        self._num_waits = 0
        self._live: dict[int, _Entry] = {}  # by the address of the C++ object
        self._storages: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._ignored: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, FakeTensor) for kind in types):  # DTensor asks them for shapes
            return func(*args, **(kwargs or {}))
        if any(kind not in (torch.Tensor, torch.nn.Parameter) for kind in types):
            return NotImplemented  # a subclass runs operators on its parts, which come here
        maker = ""
        if self._explains:
            maker = f"{self._phase_now()} {func.name()}"
        if self._num_waits:
            time.sleep(_SETTLE_SECONDS)
            self._num_waits -= 1
        self._poll()
        result = func(*args, **(kwargs or {}))
        if func.namespace in ("c10d", "_c10d_functional"):
            self._num_waits = 4  # some operators are part of waiting
        for tensor in tensors_in((result, args, kwargs)):
            self._count(tensor, maker)
        self._poll()
        return result

    def ignore(self, *tensors: torch.Tensor) -> None:
        """Do not count these."""
        self._ignored |= {tensor.untyped_storage()._cdata for tensor in tensors}

    def reset(self) -> None:
        """Forget the peaks, but not what is live."""
        self.most, self.most_by_phase, self.by_maker = self.now, {}, Counter()

    def _phase_now(self) -> str:
        return "backward" if torch._C._current_graph_task_id() != -1 else self.phase

    def _count(self, tensor: torch.Tensor, maker: str) -> None:
        is_plain = type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout == torch.strided
        if tensor.device.type != "cpu" or not is_plain:
            return
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._live or key in self._ignored:
            return
        shape = list(tensor.shape)
        self._live[key] = 0, f"{maker} {tensor.dtype} {shape}" if self._explains else ""
        self._storages[key] = weakref.ref(storage)
        weakref.finalize(storage, self._gone, key)

    def _gone(self, key: int) -> None:
        size, _ = self._live.pop(key, (0, ""))
        self._storages.pop(key, None)
        self.now -= size

    def _poll(self) -> None:
        """Read the sizes again, and compare with the peaks."""
        for key, (size, maker) in list(self._live.items()):
            storage = self._storages[key]() if key in self._storages else None
            if storage is not None and (found := storage.nbytes()) != size:
                self._live[key] = found, maker
                self.now += found - size
        phase = self._phase_now()
        self.most_by_phase[phase] = max(self.now, self.most_by_phase.get(phase, 0))
        if self.now > self.most:
            self.most = self.now
            if self._explains:
                self.by_maker = Counter()
                for size, maker in self._live.values():
                    self.by_maker[maker] += size


@dataclass(frozen=True)
class RankBytes:
    """Bytes on one rank of a run.

    Attributes:
        parameters: Of its shards of the parameters, without padding.
        gradients: Of the storages of the gradients, at the beginning of the optimizer's step.
        optimizer: Of the state of the optimizer, after the last step.
        peak: The most bytes of tensors that were live at one time, after the model was built.
        by_phase: The same in each phase: forward, loss, backward, optimizer, end, evaluation, save.
        by_maker: What was live at the peak, by what made it, the largest first.
    """

    parameters: int
    gradients: int
    optimizer: int
    peak: int
    by_phase: Mapping[str, int] = field(default_factory=dict)
    by_maker: Mapping[str, int] = field(default_factory=dict)


def measure_run(
    config: PretrainedConfig, run: PlannedRun, *, evaluates: bool = False, explains: bool = False
) -> list[RankBytes]:
    """Train a planned run for two steps on real ranks with random weights and tokens; what each rank had in memory.

    After each step it is saved, if the settings say so, after an evaluation with `evaluates`.
    """
    shard = run.shard
    mesh = {
        name: getattr(shard, name) for name in ("replicas", "tensor_parallel", "expert_parallel", "context_parallel")
    }
    with TemporaryDirectory() as directory:
        return on_ranks(run.num_ranks, _measure, config, run, evaluates, explains, directory, **mesh)


def _measure(
    context: DistributedContext,
    config: PretrainedConfig,
    run: PlannedRun,
    evaluates: bool,
    explains: bool,
    directory: str,
) -> RankBytes:
    with LiveBytes(explains=explains) as live:
        model, adapter = build_sharded(config, run, context)
        training = training_run(config, run, model, context)
        loaded: Any = SimpleNamespace(model=model, aliases=tied_names(model.module), adapter=adapter)
        saving = CheckpointConfig(every=run.saves_every, asynchronous=run.saves_asynchronously)
        gradients: list[int] = []
        content = RunContent(loaded, training.optimizer, training.average, {})
        saver = FinetuneSaver(directory, saving, context, content, _Silent(), RunLock())
        with step_phases(live, training, gradients), saver:
            live.reset()
            live.phase = "start"
            for _ in train(training):
                live.phase = "end"
                if evaluates:
                    live.phase = "evaluation"
                    _evaluate(training, run)
                if run.saves_every:
                    live.phase = "save"
                    saver.save(training.state)
                live.phase = "start"
    params = [
        shard.data for name, shard in model.local_shards().items() if isinstance(shard.tensor, torch.nn.Parameter)
    ]
    states = getattr(training.optimizer, "inner", training.optimizer).state.values()
    tensors = [value for state in states for value in state.values()]
    largest = dict(sorted(live.by_maker.items(), key=lambda item: -item[1])[:60])
    return RankBytes(
        sum(param.numel() * param.element_size() for param in params),
        max(gradients, default=0),
        storage_bytes(plain_parts(tensors)),
        live.most,
        live.most_by_phase,
        largest,
    )


class _Silent:
    """A log of saves that shows nothing."""

    def note(self, lines: str) -> None:
        pass

    def warn(self, lines: str) -> None:
        raise AssertionError(lines)

    def saved(self, directory: Path) -> None:
        pass


def _evaluate(training: TrainingRun, run: PlannedRun) -> None:
    """Evaluate two batches of each rank."""
    size = run.train.micro_batch_size
    held_out: Any = _HeldOut(training.dataset, 2 * size * run.num_data_ranks)
    evaluate_loss(
        training.model, held_out, size, training.context, objective=training.objective, reference=training.reference
    )


class _HeldOut:
    """The first samples of a dataset of a run."""

    def __init__(self, inner: Any, number: int) -> None:
        self._inner, self._number = inner, number

    def __len__(self) -> int:
        return self._number

    def sample(self, index: int) -> Sample:
        found: Sample = self._inner.sample(index)
        return found

    def batch(self, indices: Any) -> Batch:
        found: Batch = self._inner.batch(indices)
        return found


def build_sharded(config: PretrainedConfig, run: PlannedRun, context: DistributedContext) -> tuple[ShardedModel, Any]:
    """The model of a run with random weights, sharded as `load_sharded` does, and its adapter, if any."""
    model, adapter = build_on_meta(config, run.model.dtype).train(), None
    if isinstance(run.adapter, LoraConfig):
        adapter, _ = inject_lora(model, run.adapter, run.model.path, {}, run.model.task)
        quantize_base(model, run.adapter.quantize, run.shard, {})
    if run.shard.tensor_parallel == 1:
        use_loss_head(model, run.model.chunked_loss, any_vocabulary=not run.objective.is_cross_entropy)
    rebuild_buffers(model, context.device)
    found = run.shard.shard(model, context)
    _fill(found, context.rank)  # were all shards the same, a router would choose the same experts always
    return found, adapter


@torch.no_grad()
def _fill(model: ShardedModel, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for name, shard in model.local_shards().items():
        if "quantized" in name or not isinstance(shard.tensor, torch.nn.Parameter):
            shard.data.zero_()
        elif "norm" in name or "ln_" in name or "layer_norm" in name:
            shard.data.fill_(1.0)
        else:
            shard.data.normal_(0.0, 0.02, generator=generator)


def training_run(
    config: PretrainedConfig,
    run: PlannedRun,
    model: ShardedModel,
    context: DistributedContext,
) -> TrainingRun:
    """The run at its beginning."""

    optimizer, data = build_optimizer(run.optim, model, context), _data(config, run)
    settings = replace(run.train, steps=2, schedule="constant", log_every=1 << 30)
    settings.global_batch_size = run.num_micro_batches * run.train.micro_batch_size * run.num_data_ranks
    training = TrainingRun(
        model, optimizer, data, settings, context, TrainerState(0, data.identity), objective=run.objective,
        sync_every_micro_batch=run.shard.sync_every_micro_batch,
    )  # fmt: skip
    if run.train.ema_decay is not None:
        training.average = WeightAverage(run.train.ema_decay, model.local_shards())
    if run.reference_kind == "sharded":
        frozen, _ = build_sharded(config, run, context)
        frozen.module.requires_grad_(False)
        training.reference = ModelReference(frozen, leaves_adapter_out=not run.adapter.trains_all)
    elif run.reference_kind == "adapter":
        training.reference = ModelReference(model, leaves_adapter_out=True)
    elif run.reference_kind == "precomputed":
        training.reference = PrecomputedReference()
    return training


class _Rows:
    """Random rows as a dataset gives them; `extra` changes each batch."""

    def __init__(self, inner: Any, extra: Any) -> None:
        self._inner, self._extra = inner, extra

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def batch(self, positions: Any) -> Batch:
        found: Batch = self._extra(self._inner.batch(positions))
        return found


def _data(config: PretrainedConfig, run: PlannedRun) -> Any:
    length, vocabulary = run.sequence_length, config.get_text_config().vocab_size
    tokens = np.random.default_rng(0).integers(0, vocabulary, 64 * length + 1)
    windows = ShuffledDataset(WindowDataset(tokens, length, "random"), seed=0)
    if run.objective.samples == "pairs":
        return _Rows(windows, _packed_pairs if run.is_packed else _in_pairs)
    if run.objective.samples == "labeled":
        return _Rows(windows, _packed_labeled if run.is_packed else _labeled)
    if getattr(config, "is_encoder_decoder", False):
        return _Rows(windows, _for_encoder_decoder)
    return _Rows(windows, _packed) if run.is_packed else windows


def _in_pairs(batch: Batch) -> Batch:
    """Each row twice: a chosen and a rejected answer."""
    return Batch({name: value.repeat(2, 0) for name, value in batch.inputs.items()}, batch.labels.repeat(2, 0))


def _labeled(batch: Batch) -> Batch:
    """The same with whether each answer is good, and what a precomputed reference says."""
    found = _in_pairs(batch)
    return Batch(found.inputs, found.labels, _of_labeled(len(batch.labels)))


def _of_labeled(count: int) -> dict[str, Any]:
    extras = {"desirable": np.arange(count) % 2.0, "reference_log_probs": np.zeros((count, 2))}
    return {name: value.astype(np.float32) for name, value in extras.items()}


def _packed_labeled(batch: Batch) -> Batch:
    """Two answers in each row, and in the row after it their prompts with others."""
    packed, num_answers = _packed(_in_pairs(batch)), 2 * len(batch.labels)
    documents = np.cumsum(packed.inputs["position_ids"] == 0, axis=1) - 1
    segments = 3 * documents + 2 + np.arange(len(documents))[:, None] % 2
    return Batch(packed.inputs, packed.labels, _of_labeled(num_answers), segments=segments, rows_per_sample=2)


def _for_encoder_decoder(batch: Batch) -> Batch:
    tokens = batch.inputs["input_ids"]
    return Batch({"input_ids": tokens, "decoder_input_ids": tokens}, batch.labels)


def _packed_pairs(batch: Batch) -> Batch:
    """A pair in each row, without a prompt."""
    found = _packed(batch)
    documents = np.cumsum(found.inputs["position_ids"] == 0, axis=1)
    return Batch(found.inputs, found.labels, {"reference_log_probs": np.zeros((len(documents), 2), np.float32)},
                 segments=documents + 1)  # fmt: skip


def _packed(batch: Batch) -> Batch:
    """Two documents in each row."""
    rows, length = batch.inputs["input_ids"].shape
    positions = np.concatenate([np.arange(length // 2), np.arange(length - length // 2)])
    return Batch({**batch.inputs, "position_ids": positions[None].repeat(rows, 0)}, batch.labels)


@contextmanager
def step_phases(live: LiveBytes, run: TrainingRun, gradients: list[int] | None = None) -> Iterator[None]:
    """Tell `live` what of a step runs, and collect the bytes of the gradients at the beginning of each update."""
    module = run.model.module

    def enters(name: str) -> Any:
        def set_phase(*args: Any, **kwargs: Any) -> None:
            if live.phase not in ("evaluation", "completions"):
                live.phase = name

        return set_phase

    def begins_update(*args: Any) -> None:
        live.phase = "optimizer"
        found = [param.grad for param in module.parameters() if param.grad is not None]
        if gradients is not None:
            gradients.append(storage_bytes(plain_parts(found)))

    hooks = [
        module.register_forward_pre_hook(enters("forward")),
        module.register_forward_hook(enters("loss")),
        run.optimizer.register_step_pre_hook(begins_update),
        run.optimizer.register_step_post_hook(enters("end")),
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
