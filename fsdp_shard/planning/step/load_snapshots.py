"""The snapshots before the first step: loading the model, and on resuming, creating the optimizer state."""

import math
from collections.abc import Sequence

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from fsdp_shard.checkpoint import ENCODED_AT_ONCE, READ_STAGE_BYTES, ROW_GROUP_BYTES
from fsdp_shard.models import QuantizationCode, quantized_weights
from fsdp_shard.planning.planned_run import PlannedRun
from fsdp_shard.planning.step.divided_model import divided_by_columns
from fsdp_shard.planning.step.recording.recorder import Recorder
from fsdp_shard.planning.step.shard_state import RankPart
from fsdp_shard.planning.step.snapshot import GRADIENTS, LOADING, Snapshot, highest
from fsdp_shard.planning.step.unit_bytes import UnitBytes
from fsdp_shard.training import MAGNITUDE_CHUNK_BYTES, PRINCIPAL, LoraConfig, principal_factors
from fsdp_shard.utils import FakeTensorMode

FIGURES_BYTES = 1024  # counts, losses and metric sums of a step: a few dozen numbers


def loading_snapshots(
    config: PretrainedConfig, part: RankPart, run: PlannedRun, units: Sequence[UnitBytes], terms: dict[str, int]
) -> list[Snapshot]:
    """The snapshots of loading a model and of resuming, without rank-specific bytes.

    Args:
        config: The model's config, which contains the stored dtype.
        part: A replica rank's part of the model.
        run: The settings of the run.
        units: The model's units, the root last.
        terms: Bytes by term once the model is loaded.
    """
    gradients = sum(p.nbytes for p in part.model.parameters() if p.requires_grad)
    buckets = {} if run.shard.is_sharded else {GRADIENTS: gradients}  # DDP makes them when it wraps the model
    buffers = sum(buffer.nbytes for buffer in part.model.buffers())
    terms = {**terms, **buckets, "buffers": buffers + FIGURES_BYTES}
    taken = max(0 if run.on_gpu else _read_bytes(config, part.model, run), row_index_bytes(part.model, run))
    snapshots = [Snapshot("load", "", {**terms, LOADING: taken})]
    if run.shard.flattens_units:  # while wrapped, a unit exists in full twice: as parameters and flattened
        held = 0
        for unit in units:
            held += 0 if run.shard.cpu_offload or unit.num_shards == 1 else unit.stored
            now = {"parameters": held, LOADING: 2 * unit.stored * unit.num_shards, "buffers": terms["buffers"]}
            snapshots.append(Snapshot("load", unit.fqn, now))
            held += unit.stored if unit.num_shards == 1 and not run.shard.cpu_offload else 0
        snapshots = [highest(snapshots[1:]), snapshots[0]]
    resumed = {name: num for name, num in terms.items() if name != "reference"}  # the reference is opened later
    return [*snapshots, *([Snapshot("resume", "", resumed)] if run.resumes else [])]


def row_index_bytes(model: nn.Module, run: PlannedRun) -> int:
    """Bytes that DTensor uses to locate a rank's rows: the indices of all rows."""
    return 8 * max((param.shape[0] for param in model.parameters() if param.ndim), default=0) // run.num_shards


def _read_bytes(config: PretrainedConfig, model: PreTrainedModel, run: PlannedRun) -> int:
    """Maximum temporary bytes of reading a shard, if it is cast or encoded; in host memory on a GPU rank."""
    stored = _stored_dtype(config)
    encoded = {f"{fqn}.rows": module for fqn, module in quantized_weights(model)}
    most = 0
    for name, param in model.named_parameters():
        is_read = ".lora_" not in name and not (run.resumes and param.requires_grad)  # a checkpoint has its own dtypes
        if is_read and name not in encoded and param.is_floating_point() and param.dtype != stored:
            most = max(most, min(-(-param.numel() // run.num_shards) * stored.itemsize, READ_STAGE_BYTES))
        elif ".lora_A." in name and not run.resumes:  # drawn whole, then cut to the rank's part
            most = max(most, param.nbytes)
    if encoded:
        largest = max(encoded.values(), key=lambda module: module.num_weights)
        number = min(-(-largest.num_weights // run.num_shards), ENCODED_AT_ONCE)
        most = max(most, _encoding_bytes(largest.code, number, stored))
    if run.shard.tensor_parallel > 1:
        most = max(most, _column_bytes(model, run, stored))
    return max(most, _initial_value_bytes(model, run))


def _column_bytes(model: PreTrainedModel, run: PlannedRun, stored: torch.dtype) -> int:
    """Maximum temporary bytes of reading some columns of a weight: these columns, and full rows that contain them."""
    most = 0
    for param in divided_by_columns(model):
        num_rows, width = -(-param.shape[0] // run.num_shards), param.shape[-1]
        row_bytes = width * run.shard.tensor_parallel * stored.itemsize
        together = min(num_rows if param.ndim == 2 else param.shape[-2], max(1, ROW_GROUP_BYTES // row_bytes))
        part = num_rows * math.prod(param.shape[1:]) * stored.itemsize
        most = max(most, part + together * row_bytes)
    return most


def _initial_value_bytes(model: nn.Module, run: PlannedRun) -> int:
    """Maximum temporary bytes of computing an adapter's initial values from the weights."""
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
    if adapter.dora:  # a weight chunk in float64, its squares, and the squares of the previous chunk
        at_once = MAGNITUDE_CHUNK_BYTES // 4
        rows = [(-(-outputs // run.num_shards), inputs) for outputs, inputs in sizes]
        most = max(24 * min(at_once, outputs * inputs) + 16 * outputs for outputs, inputs in rows)
    if adapter.init in PRINCIPAL:
        every = 4 * adapter.rank * sum(map(sum, sizes))
        most = max(
            most, _decomposing_bytes(adapter, *max(sizes, key=math.prod)) + 3 * every
        )  # the rank's own, as bytes to send, and all
    return most


def _decomposing_bytes(adapter: LoraConfig, outputs: int, inputs: int) -> int:
    """Maximum bytes while a weight is decomposed, including the weight in float32."""
    with FakeTensorMode(), Recorder() as recorder:
        weight = torch.empty(outputs, inputs)
        weight.isfinite().all()
        principal_factors(adapter.init, weight, adapter.rank, 1.0, 0)
        recorder.mark("", "")
    rise: int = recorder.events[0].rise
    return rise


def _encoding_bytes(code: QuantizationCode, num_weights: int, stored: torch.dtype) -> int:
    """Maximum bytes while weights are encoded, including the weights as stored."""
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
