"""`task=speed`: generation speed by batch size and prompt length, and the memory required.

The model is loaded once, with memory reserved for the largest KV cache, and generates as in `generate`.
"""

import platform
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from fsdp_shard.errors import ConfigError, PlanError, RunError
from fsdp_shard.evaluation.config import EvaluateSettings, Figures, SpeedConfig
from fsdp_shard.evaluation.earlier_results import PLOT, remove_earlier
from fsdp_shard.evaluation.evaluation_base import EvaluationBase, LoadModel
from fsdp_shard.evaluation.provenance import provenance
from fsdp_shard.evaluation.speed_task.speed_passes import Size, SizeFigures, TimedModel
from fsdp_shard.evaluation.speed_task.speed_plot import speed_plot
from fsdp_shard.evaluation.speed_task.speed_table import speed_table
from fsdp_shard.inference import DevicePlan, KVCacheBudget, device_name
from fsdp_shard.models import ContextLength, load_context_length
from fsdp_shard.utils import (
    first_line,
    format_count,
    is_out_of_memory,
    report_progress,
    write_atomically,
)

_CONTEXT_LENGTHS = (128, 1024)
_CPUINFO = Path("/proc/cpuinfo")


@dataclass(frozen=True)
class UnmeasuredSize:
    """A size that is not measured, and the reason."""

    size: Size
    reason: str

    def __str__(self) -> str:
        return f"left out: {self.size}: {self.reason}"

    @property
    def row(self) -> dict[str, Any]:
        """The entry for result.json."""
        return {**asdict(self.size), "reason": self.reason}


@dataclass(frozen=True, kw_only=True)
class SpeedEvaluation(EvaluationBase):
    """The speed of the model in `settings.checkpoint` at `sizes`; `unmeasured` are sizes beyond its context."""

    sizes: tuple[Size, ...]
    unmeasured: tuple[UnmeasuredSize, ...]

    def describe(self) -> str:
        """Describe the sizes, the number of repetitions, and the skipped sizes."""
        speed = self.settings.speed
        sizes = f"{speed.new_tokens} new tokens each for {format_count(len(self.sizes), 'size')} of batch and prompt"
        times = f"measured {format_count(speed.repeats, 'time')} after one time that is not counted"
        return "\n".join([f"{sizes}, {times}", *map(str, self.unmeasured)])

    def measure(self, load: LoadModel) -> Figures:
        """Load the model, with memory reserved for the largest KV cache that fits, and measure each size.

        Raises:
            PlanError: No size fits in memory.
            RunError: Memory was insufficient for every size.
        """
        remove_earlier(self.run_dir)
        start = time.perf_counter()
        model, plan, fitting, unmeasured = self._load(load)
        load_seconds = time.perf_counter() - start
        timed = TimedModel(model, self.tokenizer, plan, self.settings.speed, self.seed)
        start = time.perf_counter()
        figures, beyond_memory = self._time(timed, fitting)
        seconds = time.perf_counter() - start
        unmeasured += beyond_memory
        if not figures:
            raise RunError(
                f"No size could be measured: {unmeasured[-1].size}: {unmeasured[-1].reason}. Give smaller "
                f"speed.batch_sizes or speed.context_lengths, or keep fewer blocks in memory by dispatch.max_memory."
            )
        self.run_dir.mkdir(parents=True, exist_ok=True)
        write_atomically(self.run_dir / PLOT, speed_plot(figures, self.settings.source.path))
        lines = [*speed_table(figures, cpu_memory_is_peak=timed.cpu_memory_is_peak), *map(str, unmeasured)]
        lines.append(f"drawn in {self.run_dir / PLOT}")
        row = {
            # The best over all sizes.
            "first_token_seconds": min(one.first_token.median for one in figures),
            "prefill_tokens_per_second": max(one.prefill.median for one in figures),
            "decode_tokens_per_second": max(one.decoded.median for one in figures),
            "speed": [one.row for one in figures],
            "left_out": [one.row for one in (*self.unmeasured, *unmeasured)],
            "cpu_memory_is_peak": timed.cpu_memory_is_peak,
            **_planned(plan),
            "load_seconds": load_seconds,
            "seconds": seconds,
            "provenance": self._provenance(timed),
        }
        return Figures("\n".join(lines), row)

    def _load(self, load: LoadModel) -> tuple[PreTrainedModel, DevicePlan, list[Size], list[UnmeasuredSize]]:
        """Load the model; return it, its plan, the sizes that fit, and those whose KV cache does not."""
        new_tokens = self.settings.speed.new_tokens
        budgets = {size: KVCacheBudget(size.batch_size, size.context_length + new_tokens) for size in self.sizes}
        fitting = sorted(self.sizes, key=lambda size: budgets[size].batch_size * budgets[size].num_tokens)
        unmeasured: list[UnmeasuredSize] = []
        plans: list[DevicePlan] = []
        while True:
            try:
                model = load(self.settings.source, budgets[fitting[-1]], plans.append)
            except PlanError as error:  # raised before any weight is read
                if len(fitting) == 1:
                    raise
                unmeasured.append(UnmeasuredSize(fitting.pop(), str(error)))
                continue
            return model, plans[-1], [size for size in self.sizes if size in fitting], unmeasured

    def _time(self, timed: TimedModel, sizes: list[Size]) -> tuple[list[SizeFigures], list[UnmeasuredSize]]:
        """Return the figures of each size, and the sizes without enough memory for their passes."""
        found: list[SizeFigures] = []
        unmeasured: list[UnmeasuredSize] = []
        passes = 1 + self.settings.speed.repeats
        with report_progress(len(sizes) * passes, "speed", "passes") as count:
            for size in sizes:
                try:
                    found.append(timed.measure(size, count))
                except (MemoryError, RuntimeError) as error:
                    if not is_out_of_memory(error):
                        raise
                    unmeasured.append(UnmeasuredSize(size, f"not enough memory as it ran ({first_line(error)})"))
                if timed.gpus:
                    torch.cuda.empty_cache()  # same starting state for each size
        return found, unmeasured

    def _provenance(self, timed: TimedModel) -> dict[str, Any]:
        speed = self.settings.speed
        sizes = {"batch_sizes": speed.batches, "context_lengths": speed.contexts or None}
        settled = {"speed": {**sizes, "new_tokens": speed.new_tokens, "repeats": speed.repeats}}
        machine = {
            "cpu": _cpu_name(),
            "num_threads": torch.get_num_threads(),
            "gpus": {device_name(gpu): torch.cuda.get_device_name(gpu) for gpu in timed.gpus},
        }
        return provenance(self, settled) | {"machine": machine, "seed": self.seed}


def open_speed(base: EvaluationBase) -> SpeedEvaluation:
    """Prepare the sizes.

    Raises:
        ConfigError: The model's context has room for none of them, or there are several ranks.
    """
    settings, context = base.settings, base.context
    if context is not None:  # ranks would disturb each other
        raise ConfigError(
            f"task=speed measures one process, and this run has {context.world_size} ranks; remove launch.ranks."
        )
    directory, trust = settings.source.config_directory, settings.dispatch.trust_remote_code
    sizes, unmeasured = sizes_within(settings.speed, load_context_length(directory, trust))
    return SpeedEvaluation(**vars(base), sizes=tuple(sizes), unmeasured=tuple(unmeasured))


def check_sizes(settings: EvaluateSettings) -> None:
    """Raise ConfigError if the model's context has room for none of the sizes."""
    directory, trust = settings.source.config_directory, settings.dispatch.trust_remote_code
    sizes_within(settings.speed, load_context_length(directory, trust))


def sizes_within(speed: SpeedConfig, context_length: ContextLength) -> tuple[list[Size], list[UnmeasuredSize]]:
    """Return the sizes that a context has room for with the new tokens, and the others.

    Raises:
        ConfigError: None fits.
    """
    wanted = speed.contexts or list(_CONTEXT_LENGTHS)
    room = max(wanted) if context_length.length is None else context_length.length - speed.new_tokens
    if room < 1:
        raise ConfigError(
            f"speed.new_tokens={speed.new_tokens} leaves no room for a prompt in the model's context of "
            f"{context_length.length} tokens; give at most {(context_length.length or 1) - 1}."
        )
    fitting = [length for length in wanted if length <= room]
    if not fitting and speed.contexts:
        raise ConfigError(
            f"speed.context_lengths={speed.context_lengths} with speed.new_tokens={speed.new_tokens} exceeds the "
            f"model's context of {context_length.length} tokens; give prompts of at most {room}."
        )
    reason = f"with {speed.new_tokens} new tokens it exceeds the model's context of {context_length.length} tokens"
    beyond = [length for length in wanted if length > room]
    sizes = [Size(batch, length) for batch in speed.batches for length in fitting or [room]]
    return sizes, [UnmeasuredSize(Size(batch, length), reason) for batch in speed.batches for length in beyond]


def _planned(plan: DevicePlan) -> dict[str, Any]:
    """The placement of weights, and the plan's other reservations, by device."""
    streaming = {device_name(plan.execution_device): plan.buffer_bytes, "cpu": plan.staging_bytes}
    if plan.execution_device == "cpu":
        streaming["cpu"] = plan.buffer_bytes
    return {
        "weights_bytes": {device_name(device): num_bytes for device, num_bytes in plan.resident_bytes.items()},
        "streaming_bytes": {device: num_bytes for device, num_bytes in streaming.items() if num_bytes},
        "kv_cache_bytes": {device_name(device): num_bytes for device, num_bytes in plan.cache_bytes.items()},
    }


def _cpu_name() -> str:
    """The system's name of the processor."""
    try:
        lines = _CPUINFO.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, "") or platform.processor() or platform.machine()
