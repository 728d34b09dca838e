"""The memory of `generate` on each device, from configs alone: weights by the device map, KV cache and activations.

One prefill pass and one decoding pass at full length run on fake tensors, as in training (`step/recording`).
Activations outside the KV cache count on the device whose block runs. Tokens are sampled by top-p, which needs more
memory than greedy decoding. A rank computes one batch at a time, with one length and a padding mask.
"""

from __future__ import annotations

import inspect
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from transformers import PreTrainedModel, TopPLogitsWarper

from fsdp_shard.inference import READ_BYTES, DevicePlan, KVCacheBudget, cached_blocks, device_name
from fsdp_shard.models import kv_cache_of, no_split_blocks
from fsdp_shard.planning.step.recording.events import DONE, POST_FORWARD, Event
from fsdp_shard.planning.step.recording.record_passes import CANNOT_RUN, record_forward, what_failed
from fsdp_shard.planning.step.recording.recorder import Recorder
from fsdp_shard.planning.step.snapshot import ACTIVATIONS, Snapshot, highest, highest_of_phases
from fsdp_shard.utils import format_size, format_table, storage_bytes, tensors_in

WEIGHTS, ADAPTERS, IN_FLIGHT, READ, CACHE = "weights", "adapters", "blocks in flight", "read buffers", "KV cache"
_PHASES = ("prefill", "logits", "decode")
_TERMS = (WEIGHTS, ADAPTERS, IN_FLIGHT, READ, CACHE, ACTIVATIONS)


@dataclass(frozen=True)
class GenerationPlan:
    """The memory of each device at the highest snapshot of each phase.

    Attributes:
        peaks: Device -> its highest snapshot of each phase, in order.
        problem: Why activations could not be measured, if so; there are no snapshots in this case.
        uncounted: What the peaks do not include, in a sentence, if anything.
    """

    peaks: Mapping[str, Sequence[Snapshot]] = field(default_factory=dict)
    problem: str | None = None
    uncounted: str | None = None

    @property
    def peak_bytes(self) -> dict[str, int]:
        """The peak bytes on each device."""
        return {device: highest(snapshots).total_bytes for device, snapshots in self.peaks.items()}

    def figures(self) -> dict[str, Any]:
        """The figures of result.json."""
        peaks = {device: [asdict(snapshot) for snapshot in snapshots] for device, snapshots in self.peaks.items()}
        return {"peak_bytes": self.peak_bytes, "peaks": peaks, "problem": self.problem, "uncounted": self.uncounted}

    def describe(self, budget: KVCacheBudget) -> str:
        """Describe the plan, for the texts in `budget`."""
        if self.problem is not None:
            return f"What else generation takes could not be measured ({self.problem})."
        shown = [term for term in _TERMS if any(term in m.terms for found in self.peaks.values() for m in found)]
        rows = [["device", "phase", "all", *shown, "at"]]
        for device, snapshots in self.peaks.items():
            for snapshot in snapshots:
                sizes = [snapshot.total_bytes, *(snapshot.terms.get(term, 0) for term in shown)]
                rows.append([device, snapshot.phase, *map(format_size, sizes), snapshot.where or "(root)"])
        peaks = ", ".join(f"{format_size(size)} on {device}" for device, size in self.peak_bytes.items())
        summary = f"Generation of {budget} takes up to {peaks}. {self.uncounted or ''}".rstrip()
        return "\n".join([*format_table(rows), "", summary])


@dataclass
class _Passes:
    """A prefill pass and a decoding pass, on fake tensors.

    Attributes:
        model: The model.
        budget: The texts: all are assumed to have prompts, and with an encoder-decoder answers, of full length.
        cached: Bytes of the cache by layer, after the prefill pass.
    """

    model: PreTrainedModel
    budget: KVCacheBudget
    cached: list[int] = field(default_factory=list)

    def __call__(self, recorder: Recorder) -> None:
        rows, length = self.budget.batch_size, self.budget.num_tokens
        ids = torch.ones((rows, length), dtype=torch.long)
        mask = torch.ones_like(ids)
        has_decoder = bool(self.model.config.is_encoder_decoder)
        names = inspect.signature(self.model.forward).parameters
        given: dict[str, Any] = {"use_cache": True} | ({"logits_to_keep": 1} if "logits_to_keep" in names else {})
        given |= {"attention_mask": mask} if "attention_mask" in names else {}
        if has_decoder:
            output = self.model(input_ids=ids, decoder_input_ids=ids[:, :1], **given)
            given |= {"encoder_outputs": (output.encoder_last_hidden_state,)}
        else:
            output = self.model(input_ids=ids, **given, **_positions(names, mask))
        recorder.mark(DONE, "prefill")
        states = output.get("cache_params")  # of Mamba, before transformers 5.24
        cache = {"cache_params": states} if states is not None else kv_cache_of(output)
        if has_decoder:  # an answer of full length, which is not generated in one pass
            output = self.model(decoder_input_ids=ids[:, 1:], **cache, **given)
            output.logits = output.logits[:, -1:].clone()  # those of one token, as `generate` has at a time
            recorder.mark(DONE, "answer")
        self.cached = _cached_bytes(next(iter(cache.values()), None))
        self._choose(ids, output)
        recorder.mark(DONE, "logits")
        del output
        given |= cache
        longer = torch.cat([mask, mask[:, :1]], dim=1)
        given |= {"attention_mask": longer} if "attention_mask" in given and not has_decoder else {}
        key = "decoder_input_ids" if has_decoder else "input_ids"
        output = self.model(**{key: ids[:, :1]}, **given, **({} if has_decoder else _positions(names, longer, 1)))
        self._choose(ids, output)
        recorder.mark(DONE, "decode")

    def _choose(self, ids: torch.Tensor, output: Any) -> None:
        scores = output.logits[:, -1].to(copy=True, dtype=torch.float32)
        chosen = TopPLogitsWarper(0.9)(ids, scores)
        torch.multinomial(chosen.softmax(-1), 1)


def _positions(names: Mapping[str, object], mask: torch.Tensor, number: int | None = None) -> dict[str, torch.Tensor]:
    """The positions of the last `number` tokens as `generate` passes them, for models that accept positions."""
    if "position_ids" not in names:
        return {}
    positions = mask.cumsum(-1) - 1
    return {"position_ids": positions if number is None else positions[:, -number:]}


def _cached_bytes(cache: Any) -> list[int]:
    """Bytes of a cache by layer; for an encoder-decoder, of both attentions' caches."""
    if hasattr(cache, "self_attention_cache"):
        pairs = zip(_cached_bytes(cache.self_attention_cache), _cached_bytes(cache.cross_attention_cache), strict=False)
        return [sum(pair) for pair in pairs]
    return [storage_bytes(tensors_in(vars(layer))) for layer in getattr(cache, "layers", ())]


def plan_generation(
    model: PreTrainedModel, devices: DevicePlan, budget: KVCacheBudget, *, casts: bool = False, quantize: str = "none"
) -> GenerationPlan:
    """Plan the memory of generating the texts in `budget`.

    Args:
        model: The model on meta, which is changed.
        devices: The placement of its blocks.
        budget: Number and length of the texts.
        casts: Whether weights are loaded in a dtype other than the stored one.
        quantize: As in `dispatch.quantize`; layers run as if they were not quantized.

    Returns:
        The plan.
    """
    buffers = sum(buffer.nbytes for buffer in model.buffers())
    blocks = no_split_blocks(model)
    repeated = [block.fqn for block in cached_blocks(model, blocks)]
    passes = _Passes(model, budget)
    try:
        recording, like = record_forward(model, passes, has_mask=budget.batch_size > 1)
    except CANNOT_RUN as error:
        return GenerationPlan(problem=what_failed(error))
    adapters: Counter[str] = Counter()
    for name, param in model.named_parameters():
        if ".lora_" in name:
            fqn = max((block.fqn for block in blocks if name.startswith(f"{block.fqn}.")), key=len, default="")
            adapters[fqn] += param.nbytes
    cached = dict(zip(repeated, passes.cached, strict=False))
    cached |= {fqn: cached.get(other, 0) for fqn, other in like.items() if fqn in repeated}
    simulator = _GenerationSimulator(
        devices, buffers, cached, adapters, READ_BYTES if casts or devices.execution_device != "cpu" else 0
    )
    simulator.replay(recording)
    return GenerationPlan(simulator.peaks(), uncounted=_uncounted(model, quantize))


def _uncounted(model: PreTrainedModel, quantize: str) -> str | None:
    """What the plan of a quantized model omits: memory of torchao itself, whose layers do not run on fake tensors."""
    if quantize == "none":
        return None
    largest = max((m.weight.nbytes for m in model.modules() if isinstance(m, torch.nn.Linear)), default=0)
    return (
        f"With dispatch.quantize={quantize}, the peaks exclude memory for quantizing while weights load, and temporary "
        f"copies of a weight in matrix products (up to {format_size(largest)})."
    )


class _GenerationSimulator:
    """Replays a recording to find the memory of each device at each point."""

    def __init__(
        self, devices: DevicePlan, buffers: int, cached: Mapping[str, int], adapters: Mapping[str, int], read: int
    ) -> None:
        self._devices, self._cached = devices, cached
        self._execution_device = device_name(devices.execution_device)
        self._snapshots: defaultdict[str, list[Snapshot]] = defaultdict(list)
        self._state: defaultdict[str, Counter[str]] = defaultdict(Counter)
        for device, num_bytes in devices.resident_bytes.items():
            if device != "disk":
                self._state[device_name(device)][WEIGHTS] = num_bytes
        self._state[self._execution_device] += Counter({WEIGHTS: buffers, IN_FLIGHT: devices.buffer_bytes})
        if devices.staging_bytes:
            self._state["cpu"][IN_FLIGHT] = devices.staging_bytes
        for fqn, num_bytes in adapters.items():
            self._state[self._device_of(fqn)][ADAPTERS] += num_bytes
        if read:
            self._state["cpu"][READ] = read
        for name in list(self._state):
            self._note(name, "load", "", 0, Counter())

    def replay(self, recording: Sequence[Event]) -> None:
        """Replay a prefill pass and a decoding pass."""
        phases = iter(_PHASES)
        live, phase, before = 0, next(phases), list[tuple[str, str, int]]()
        for event in recording:
            before.append((event.module if event.kind == POST_FORWARD else "", event.kind, live + event.rise))
            live += event.change
            if event.kind != DONE:
                continue
            if event.module != "answer":
                self._replay_phase(phase, before)
                phase = next(phases, phase)
            before.clear()

    def _replay_phase(self, phase: str, intervals: Sequence[tuple[str, str, int]]) -> None:
        held: Counter[str] = Counter()  # bytes of the cache, by device
        done: set[str] = set()
        for fqn, size in self._cached.items() if phase != "prefill" else ():
            held[self._device_of(fqn)] += size
        for where, kind, live in intervals:
            device = self._device_of(where)
            activations = max(0, live - sum(held.values()))
            self._note(device, phase, where, activations, held)
            if kind == POST_FORWARD and phase == "prefill" and where in self._cached and where not in done:
                done.add(where)
                held[device] += self._cached[where]

    def _device_of(self, fqn: str) -> str:
        """The device that computes a block; everything outside blocks runs on the execution device."""
        if fqn not in self._devices.devices or self._devices.is_streamed(fqn):
            return self._execution_device
        return device_name(self._devices.devices[fqn])

    def _note(self, device: str, phase: str, where: str, activations: int, held: Counter[str]) -> None:
        terms = {**self._state[device], CACHE: held[device], ACTIVATIONS: activations}
        self._snapshots[device].append(Snapshot(phase, where, {term: num for term, num in terms.items() if num}))

    def peaks(self) -> dict[str, list[Snapshot]]:
        """The highest snapshot of each phase, by device."""
        return {device: [*highest_of_phases(found).values()] for device, found in self._snapshots.items()}
