"""Training on one GPU: its speed beside a bare loop, its memory, its waits, its losses."""

from __future__ import annotations

import json
import math
import statistics
import time
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from fsdp_shard.checkpoint import locate
from fsdp_shard.distributed import DistributedContext, init_distributed
from fsdp_shard.models import ModelConfig
from fsdp_shard.planning import PlannedRun, plan_memory
from fsdp_shard.sharding import WRAPPERS
from fsdp_shard.training import (
    OPTIMIZERS,
    AdamWConfig,
    AdapterConfig,
    LoadedModel,
    LoraConfig,
    OptimConfig,
    SgdConfig,
    TrainConfig,
    TrainingRun,
    load_sharded,
    train,
)
from tests.gpu.child import Bench, apart, in_turn
from tests.gpu.device import IS_REHEARSAL, OUT, Device, held_on_gpu, open_device
from tests.gpu.loops import LR, Job, Measured, filled_alike, measure, ours, training_run
from tests.gpu.models import config_of, flops_per_token, random_model, written
from tests.gpu.trace import Steps, read_trace, summarize

check = pytest.mark.check
_AMPLE_BYTES = 120e9  # room for an 8B model in bfloat16 with two states of AdamW and its activations
_PEAK_SIDE = 8192
_LEFT_BYTES = 1e8  # what libraries keep of a run is less


def _length(length: int) -> int:
    return 32 if IS_REHEARSAL else length


def matmul_flops() -> float:
    """Measured operations per second of bfloat16 matrix products, on random data."""
    device = open_device()
    side = 128 if IS_REHEARSAL else _PEAK_SIDE
    left, right = (torch.randn(side, side, device=device.torch_device).bfloat16() for _ in range(2))
    return 2.0 * side**3 / device.seconds(lambda: left @ right, 30)


@check(seconds=110)
@pytest.mark.parametrize("shape", ["1.2B", "8B"])
def test_tokens_per_second_beside_a_bare_loop(shape: str, bench: Bench) -> None:
    is_ample = bench.device.total_bytes > _AMPLE_BYTES
    # Of fewer windows a step is too short for the host, which launches its kernels.
    job = Job(config_of(shape), _length(4096), rows=4 if is_ample else 2)
    note = f"float32 weights, AdamW, {job.rows} rows"
    if shape == "8B":
        # With the states of AdamW it fits in 141 GB, not in 80.
        job = replace(job, config=config_of(shape, None if is_ample else 24))
        optim: Any = AdamWConfig(lr=LR) if is_ample else SgdConfig(lr=LR, momentum=0.0)
        job = replace(job, dtype=torch.bfloat16, optim=optim, rows=1)
        note = f"bfloat16 weights, {job.config.num_hidden_layers} layers, {'AdamW' if is_ample else 'SGD'}"
    peak, *measured = in_turn((matmul_flops,), *((measure, side, job, 6) for side in ("bare", "ours")))
    sides: dict[str, Measured] = dict(zip(("bare", "ours"), measured, strict=True))
    ratio = sides["bare"].seconds / sides["ours"].seconds
    bench.record(f"{shape}: tokens/s of a bare fully_shard loop", ratio, "x", at_least=0.97, note=note)
    tokens = job.rows * job.length / sides["ours"].seconds
    used = tokens * flops_per_token(job.config, job.length) / peak
    about = f"{tokens:,.0f} tokens/s, matmul {peak / 1e12:,.0f} TFLOP/s"
    bench.record(f"{shape}: MFU of the measured matmul peak", used, at_least=0.50, note=about)
    memory = sides["ours"].peak_bytes / sides["bare"].peak_bytes
    bench.record(f"{shape}: peak memory of the bare loop", memory, "x", note=f"{sides['ours'].peak_bytes / 1e9:.1f} GB")
    assert all(map(math.isfinite, sides["ours"].losses)), sides["ours"].losses


def profiled(job: Job, steps: int, name: str, *activities: ProfilerActivity) -> Steps:
    """The waits and the idle time of `steps` steps after four that do not count; the trace stays as `name`.json.gz."""
    device = open_device()
    running = ours(job, device)
    for _ in range(1 if IS_REHEARSAL else 4):
        next(running)
    device.synchronize()
    OUT.mkdir(parents=True, exist_ok=True)
    path = OUT / f"{name}.json.gz"
    with profile(activities=activities) as profiler:
        for _ in range(steps):
            next(running)
    profiler.export_chrome_trace(str(path))
    running.close()  # type: ignore[attr-defined]  # it is a generator
    return summarize(read_trace(path))


@check(seconds=60)
def test_waits_and_idle_time_of_a_step(bench: Bench) -> None:
    steps = bench.size(4, 2)
    # Enough work in each operator for the host to be ahead of the GPU.
    job = Job(config_of("8B", 8), _length(4096), num_micro_batches=2)
    on_gpu = [ProfilerActivity.CPU if IS_REHEARSAL else ProfilerActivity.CUDA]
    # To name the operators takes the host time, in which the GPU would be idle.
    both = list({ProfilerActivity.CPU, *on_gpu})
    calls = [
        (profiled, job, steps, "waits", *both),
        *([] if IS_REHEARSAL else [(profiled, job, steps, "idle", *on_gpu)]),
    ]
    named, *last = in_turn(*calls)
    found = (last or [named])[0]
    assert IS_REHEARSAL or found.idle is not None, "the trace has no kernels, so it says nothing of the GPU"
    often = ", ".join(f"{name} {count / steps:g}" for name, count in list(named.waits.items())[:4])
    bench.record("waits of the host per step", named.num_waits / steps, at_most=1.0, note=often)
    bench.record("GPU idle while training", found.idle, at_most=0.02)


@dataclass(frozen=True)
class _Mode:
    """Settings to plan: of `shard`, of the adapter, and what else differs from the usual."""

    shard: dict[str, Any] = field(default_factory=dict)
    adapter: dict[str, Any] = field(default_factory=dict)
    optim: OptimConfig = field(default_factory=AdamWConfig)
    dtype: str = "float32"
    rows: int = 1
    num_micro_batches: int = 1
    chunked_loss: bool | str = "auto"


_MODES = {
    "fsdp2": _Mode(),
    "nf4 lora": _Mode(adapter={"rank": 16, "quantize": "nf4"}),
    "fsdp1": _Mode({"wrapper": "fsdp1"}),
    "ddp": _Mode({"wrapper": "ddp"}),
    "adafactor": _Mode(optim=OPTIMIZERS["adafactor"]()),
    "muon": _Mode(optim=OPTIMIZERS["muon"]()),
    "sgd": _Mode(optim=SgdConfig()),
    "logits": _Mode(chunked_loss=False),
    "4 rows": _Mode(rows=4),
    "accumulation": _Mode({"sync_every_micro_batch": False}, num_micro_batches=2),
    "bfloat16": _Mode(dtype="bfloat16"),
    "checkpointing": _Mode({"activation_checkpointing": True}),
    "selective": _Mode({"activation_checkpointing": "selective"}),
    "cpu_offload": _Mode({"cpu_offload": True}),
    "activation_offload": _Mode({"activation_offload": True}),
    "lora": _Mode(adapter={"rank": 16}),
    "lora, checkpointing": _Mode({"activation_checkpointing": True}, {"rank": 16}, rows=4),
}


def _planned_run(mode: _Mode, path: str, length: int) -> PlannedRun:
    options = dict(mode.shard)
    shard = WRAPPERS[options.pop("wrapper", "fsdp2")](**open_device().only_here(**options))
    batch = mode.rows * mode.num_micro_batches
    return PlannedRun(
        ModelConfig(path=path, dtype=mode.dtype, chunked_loss=mode.chunked_loss), shard,
        TrainConfig(global_batch_size=batch, micro_batch_size=mode.rows), mode.optim, length, 1,
        LoraConfig(**mode.adapter) if mode.adapter else AdapterConfig(), on_gpu=not IS_REHEARSAL,
    )  # fmt: skip


def _peaks_by_phase(run: TrainingRun, device: Device, steps: int) -> dict[str, int]:
    """Train, and return the most bytes that tensors took in each phase, of all steps."""
    peaks: dict[str, int] = {}

    def end(phase: str) -> None:
        peaks[phase] = max(peaks.get(phase, 0), device.peak_bytes)
        device.restart_peak()

    module = run.model.module
    hooks = [
        module.register_forward_pre_hook(lambda *_: end("start")),
        module.register_forward_hook(lambda *_: end("forward")),
        run.optimizer.register_step_pre_hook(lambda *_: end("backward")),
        run.optimizer.register_step_post_hook(lambda *_: end("optimizer")),
    ]
    assert len(list(train(run))) == steps
    end("end")
    for hook in hooks:
        hook.remove()
    return peaks


def _free(device: Device) -> int:
    """Reset the device once the last collectives of the run before have let go of what they reduced."""
    before = device.reset()
    for _ in range(20):
        if before < _LEFT_BYTES:
            break
        time.sleep(0.1)
        before = device.reset()
    return before


@dataclass(frozen=True)
class _Peaks:
    """Bytes of a mode: by phase as measured, as planned, and of what libraries hold."""

    phases: dict[str, int]
    planned: int | None
    allocator: int
    reserved: int
    context: int


def _job(mode: _Mode, length: int) -> Job:
    return Job(config_of("1.2B", 8), length, mode.num_micro_batches, mode.rows, optim=mode.optim)


def _loaded(planned: PlannedRun, path: str, context: DistributedContext) -> LoadedModel:
    lora = planned.adapter if isinstance(planned.adapter, LoraConfig) else None
    return load_sharded(planned.model, planned.shard, locate(path), context, lora)


def modes_in_turn(names: list[str], path: str, length: int) -> tuple[dict[str, _Peaks], str]:
    """Train in each mode until one leaves memory in use, which the next would seem to need; and what that left."""
    device, found, left = open_device(), dict[str, _Peaks](), ""
    with init_distributed(device.type, timeout_seconds=60) as context:
        for name in names:
            before, reserved = _free(device), device.reserved_bytes
            if found and before > _LEFT_BYTES:  # seen sometimes, never twice in the same mode
                left = f"{before} bytes of {[*found][-1]} stay in use, by {held_on_gpu()}"
                break
            planned, job = _planned_run(_MODES[name], path, length), _job(_MODES[name], length)
            loaded = _loaded(planned, path, context)
            peaks = {"load": device.peak_bytes}
            run = training_run(job, loaded.model, context, steps=2)
            peaks |= _peaks_by_phase(run, device, 2)
            reserved = device.reserved_bytes - reserved
            del run, loaded
            plan = plan_memory(job.config, planned)
            found[name] = _Peaks(
                {phase: peak - before for phase, peak in peaks.items()}, plan.peak_bytes,
                plan.overhead.get("allocator", 0), reserved, device.used_bytes - reserved,
            )  # fmt: skip
    return found, left


@check(seconds=240, concurrent="all")
def test_the_plan_beside_the_measured_peak(bench: Bench) -> None:
    length = _length(2048)
    path = str(apart(written, bench.directory, "1.2B", 8, bench.device.torch_device))
    facts: dict[str, Any] = {}
    names = list(_MODES)[: bench.size(len(_MODES), 4)]
    while names:
        found, left = apart(modes_in_turn, names, path, length)
        names = names[len(found) :]
        for name, peaks in found.items():
            measured, planned = max(peaks.phases.values()), peaks.planned
            ratio = None if planned is None else planned / max(measured, 1)
            about = ", ".join(f"{phase} {peak / 1e9:.2f}" for phase, peak in peaks.phases.items())
            note = f"{measured / 1e9:.3f} GB measured ({about}), {peaks.reserved / 1e9:.2f} reserved"
            bench.record(f"plan of {name}: planned / measured peak", ratio, "x", at_least=1.0, at_most=1.07, note=note)
            ratio = None if planned is None else (planned + peaks.allocator) / max(peaks.reserved, 1)
            bench.record(f"plan of {name}: the same with the allocator's part / reserved", ratio, "x")
            facts[name] = asdict(peaks)
        if left:
            bench.record("memory that a mode leaves", None, note=left)
        OUT.mkdir(parents=True, exist_ok=True)
        (OUT / "memory.json").write_text(json.dumps(facts, indent=1), encoding="utf-8")


def steps_in_planned_memory(name: str, path: str, length: int) -> int:
    """The steps of a run that may have no more memory than its plan says, allocator included."""
    device = open_device()
    planned, job = _planned_run(_MODES[name], path, length), _job(_MODES[name], length)
    plan = plan_memory(job.config, planned)
    assert plan.peak_bytes is not None
    with init_distributed(device.type, timeout_seconds=60) as context:
        device.limit(plan.peak_bytes + plan.overhead.get("allocator", 0))
        loaded = _loaded(planned, path, context)
        return len(list(train(training_run(job, loaded.model, context, steps=3))))


@check(seconds=150, concurrent="all")
def test_runs_fit_in_the_memory_of_their_plans(bench: Bench) -> None:
    path = str(apart(written, bench.directory, "1.2B", 8, bench.device.torch_device))
    for name in ("fsdp2", "fsdp1", "nf4 lora")[: bench.size(3, 1)]:
        steps = apart(steps_in_planned_memory, name, path, _length(2048))
        bench.record(f"{name}: steps in the memory of its plan", steps, "of 3", at_least=3, exact=True)


def padded_steps(lengths: list[int], cudnn: bool) -> list[float]:
    """Seconds of a forward and backward pass of padded rows of each length: first as a length is new, then again."""
    device, seconds = open_device(), list[float]()
    model = random_model(config_of("1.2B", 4), torch.bfloat16, device.torch_device).train()
    torch.backends.cuda.enable_cudnn_sdp(cudnn)
    for length in (16, *lengths, *lengths):  # the first loads libraries
        ids = torch.ones(4, length, dtype=torch.int64, device=device.torch_device)
        mask = torch.ones_like(ids)
        mask[0, length // 2 :] = 0
        device.synchronize()
        began = time.perf_counter()
        model(input_ids=ids, attention_mask=mask, labels=ids, use_cache=False).loss.backward()
        model.zero_grad()
        device.synchronize()
        seconds.append(time.perf_counter() - began)
    new, again = seconds[1 : len(lengths) + 1], seconds[len(lengths) + 1 :]
    return [statistics.median(new), statistics.median(again)]


@check(seconds=40)
def test_padded_batches_of_new_lengths(bench: Bench) -> None:
    lengths = [bench.size(701, 17) + bench.size(64, 3) * number for number in range(bench.size(12, 2))]
    for cudnn in (True, False):
        ((new, again),) = in_turn((padded_steps, lengths, cudnn))
        name = "with" if cudnn else "without"
        note = f"{1000 * new:.1f} ms of a new length, {1000 * again:.1f} ms of a known one"
        bench.record(f"padded batches {name} cuDNN's attention: a length that is new", new / again, "x", note=note)


@check(seconds=100)
def test_offloading_costs_little(bench: Bench) -> None:
    job, device = Job(config_of("1.2B"), _length(4096)), bench.device
    recomputed = {"activation_checkpointing": True}
    offloaded = device.only_here(activation_offload=True)
    sides = {
        "all": replace(job, shard={}),
        "all, offloaded": replace(job, shard=offloaded),
        "inputs": replace(job, shard=recomputed),
        "inputs, offloaded": replace(job, shard=recomputed | offloaded),
    }
    found = dict(zip(sides, in_turn(*((measure, "ours", side, 5, 2) for side in sides.values())), strict=True))
    for kept, limit in (("inputs", 1.3), ("all", None)):
        plain, other = found[kept], found[f"{kept}, offloaded"]
        note = f"{(plain.peak_bytes - other.peak_bytes) / 1e9:.1f} GB less, {1000 * plain.seconds:.0f} ms without"
        name = "with checkpointing" if kept == "inputs" else "without checkpointing"
        bench.record(f"activation_offload {name}: step", other.seconds / plain.seconds, "x", at_most=limit, note=note)
        assert abs(other.losses[0] - plain.losses[0]) < 1e-3


@check(seconds=100)
def test_parameters_in_cpu_memory(bench: Bench) -> None:
    job = Job(config_of("1.2B"), _length(4096))
    offloaded = replace(job, shard=bench.device.only_here(cpu_offload=True))
    plain, other = in_turn((measure, "ours", job, 3, 2), (measure, "ours", offloaded, 2, 1))
    note = f"{(plain.peak_bytes - other.peak_bytes) / 1e9:.1f} GB less, {1000 * other.seconds:.0f} ms"
    bench.record("cpu_offload: step", other.seconds / plain.seconds, "x", note=note)


@check(seconds=100)
def test_compiled_blocks_are_faster_and_compiled_once(bench: Bench) -> None:
    job = Job(config_of("1.2B"), _length(4096))
    backend = "eager" if IS_REHEARSAL else True
    compiled = replace(job, shard={"compile": backend})
    # Raises if anything is compiled after the first steps.
    eager, found = in_turn((measure, "ours", job, 6), (_compiled, compiled))
    bench.record("tokens/s of compiled blocks beside eager", eager.seconds / found.seconds, "x", at_least=1.05)
    bench.record("recompilations after three steps", 0.0, at_most=0.0, exact=True)


def _compiled(job: Job) -> Measured:
    return measure("ours", job, 6, 3, fails_on_recompile=True)


@check(seconds=150, concurrent="all")
def test_losses_in_float32_are_those_of_the_cpu(bench: Bench) -> None:
    shards = {"param_dtype": "float32", "reduce_dtype": "float32"}
    config = config_of("100M", layers=4)
    jobs = {
        wrapper: Job(config, _length(128), dtype=torch.float32, shard={"wrapper": wrapper, **shards}, windows=8)
        for wrapper in ("fsdp2", "fsdp1")
    }
    (expected,) = in_turn((small_losses, jobs["fsdp2"], "cpu", 6))
    losses = in_turn(*((small_losses, job, bench.device.type, 6) for job in jobs.values()))
    for wrapper, found in zip(jobs, losses, strict=True):
        worst = max(abs(one - other) / abs(other) for one, other in zip(found, expected, strict=True))
        bench.record(f"{wrapper}: losses in float32 beside the CPU", worst, "relative", at_most=1e-4, exact=True)


def small_losses(job: Job, kind: str, steps: int) -> list[float]:
    """Losses of a model whose weights are the same on every kind of device."""
    with init_distributed(kind, timeout_seconds=60) as context:
        return [report.loss for report in train(training_run(job, filled_alike(job, context), context, steps))]
