"""The snapshots before the first step: a model is loaded, and where a run resumes, the optimizer's state made."""

import math
from collections.abc import Sequence

import torch
from torch import nn
from transformers import PretrainedConfig

from fsdp_shard.checkpoint import ENCODED_AT_ONCE, READ_STAGE_BYTES
from fsdp_shard.models import QuantizationCode, quantized_weights
from fsdp_shard.planning.planned_run import PlannedRun
from fsdp_shard.planning.step.recording.recorder import Recorder
from fsdp_shard.planning.step.shard_state import RankPart
from fsdp_shard.planning.step.snapshot import GRADIENTS, LOADING, Snapshot, highest
from fsdp_shard.planning.step.unit_bytes import UnitBytes
from fsdp_shard.training import MAGNITUDE_CHUNK_BYTES, PRINCIPAL, LoraConfig, principal_factors
from fsdp_shard.utils import FakeTensorMode

FIGURES_BYTES = 1024  # counts, losses and sums of metrics of a step: some dozens of numbers


def loading_snapshots(
    config: PretrainedConfig, part: RankPart, run: PlannedRun, units: Sequence[UnitBytes], terms: dict[str, int]
) -> list[Snapshot]:
    """The snapshots of loading a model and of resuming, without what only some ranks have.

    Args:
        config: Its config, which has the dtype that it is stored in.
        part: What a replica's rank has of it.
        run: The settings of the run.
        units: Its units, the root last.
        terms: Bytes by term when the model is loaded.
    """
    gradients = sum(p.nbytes for p in part.model.parameters() if p.requires_grad)
    buckets = {} if run.shard.is_sharded else {GRADIENTS: gradients}  # of DDP, which it makes when it wraps the model
    buffers = sum(buffer.nbytes for buffer in part.model.buffers())
    terms = {**terms, **buckets, "buffers": buffers + FIGURES_BYTES}
    taken = max(0 if run.on_gpu else _read_bytes(config, part.model, run), place_bytes(part.model, run))
    snapshots = [Snapshot("load", "", {**terms, LOADING: taken})]
    if run.shard.flattens_units:  # a unit is whole, parameter by parameter and as one, while it is wrapped
        held = 0
        for unit in units:
            held += 0 if run.shard.cpu_offload or unit.num_shards == 1 else unit.stored
            now = {"parameters": held, LOADING: 2 * unit.stored * unit.num_shards, "buffers": terms["buffers"]}
            snapshots.append(Snapshot("load", unit.fqn, now))
            held += unit.stored if unit.num_shards == 1 and not run.shard.cpu_offload else 0
        snapshots = [highest(snapshots[1:]), snapshots[0]]
    resumed = {name: num for name, num in terms.items() if name != "reference"}  # which is opened later
    return [*snapshots, *([Snapshot("resume", "", resumed)] if run.resumes else [])]


def place_bytes(model: nn.Module, run: PlannedRun) -> int:
    """What DTensor takes to find the place of a rank's rows: the numbers of all of them."""
    return 8 * max((param.shape[0] for param in model.parameters() if param.ndim), default=0) // run.num_shards


def _read_bytes(config: PretrainedConfig, model: nn.Module, run: PlannedRun) -> int:
    """The most that reading a shard takes in addition to it, where it is cast or encoded; on a GPU, of host memory."""
    stored = _stored_dtype(config)
    encoded = {f"{fqn}.rows": module for fqn, module in quantized_weights(model)}
    most = 0
    for name, param in model.named_parameters():
        is_read = ".lora_" not in name and not (run.resumes and param.requires_grad)  # a step has its own dtypes
        if is_read and name not in encoded and param.is_floating_point() and param.dtype != stored:
            most = max(most, min(-(-param.numel() // run.num_shards) * stored.itemsize, READ_STAGE_BYTES))
        elif ".lora_A." in name and not run.resumes:  # drawn whole, of which the rank takes its part
            most = max(most, param.nbytes)
    if encoded:
        largest = max(encoded.values(), key=lambda module: module.num_weights)
        number = min(-(-largest.num_weights // run.num_shards), ENCODED_AT_ONCE)
        most = max(most, _encoding_bytes(largest.code, number, stored))
    return max(most, _initial_value_bytes(model, run))


def _initial_value_bytes(model: nn.Module, run: PlannedRun) -> int:
    """The most that computing the initial values of an adapter from the weights takes in addition."""
    adapter, begins = run.adapter, not run.resumes
    if not begins or not isinstance(adapter, LoraConfig) or adapter.path is not None:
        return 0
    factors = {which: dict[str, torch.Size]() for which in "AB"}  # by the layer
    for name, param in model.named_parameters():
        for which, shapes in factors.items():
            layer, is_factor, _ = name.partition(f".lora_{which}.")
            if is_factor:
                shapes[layer] = param.shape
    sizes = [(factors["B"][layer][0], shape[1]) for layer, shape in factors["A"].items() if layer in factors["B"]]
    if not sizes:
        return 0
    most = 0
    if adapter.dora:  # a chunk of a weight in float64, its squares, and the squares of the chunk before
        at_once = MAGNITUDE_CHUNK_BYTES // 4
        rows = [(-(-outputs // run.num_shards), inputs) for outputs, inputs in sizes]
        most = max(24 * min(at_once, outputs * inputs) + 16 * outputs for outputs, inputs in rows)
    if adapter.init in PRINCIPAL:
        every = 4 * adapter.rank * sum(map(sum, sizes))
        most = max(
            most, _decomposing_bytes(adapter, *max(sizes, key=math.prod)) + 3 * every
        )  # own ones, as bytes to send, and all
    return most


def _decomposing_bytes(adapter: LoraConfig, outputs: int, inputs: int) -> int:
    """The most bytes while a weight is decomposed, with the weight in float32."""
    with FakeTensorMode(), Recorder() as recorder:
        weight = torch.empty(outputs, inputs)
        weight.isfinite().all()
        principal_factors(adapter.init, weight, adapter.rank, 1.0, 0)
        recorder.mark("", "")
    rise: int = recorder.events[0].rise
    return rise


def _encoding_bytes(code: QuantizationCode, num_weights: int, stored: torch.dtype) -> int:
    """The most bytes while weights are encoded, with the weights as they are stored."""
    with FakeTensorMode(), Recorder() as recorder:
        weights = torch.empty(num_weights, dtype=stored)
        code.encode(weights.float())
        recorder.mark("", "")
    rise: int = recorder.events[0].rise
    return rise


def _stored_dtype(config: PretrainedConfig) -> torch.dtype:
    found = config.dtype or torch.float32
    dtype: torch.dtype = getattr(torch, found) if isinstance(found, str) else found
    return dtype
