"""Changes to a run that reduce its memory, and the cost of each change.

The costs order a search. A cost of 10 means a step that takes about 10 % longer. Recomputing a block is a third of its
arithmetic (true), and less without its matrix products (selective); a smaller micro-batch makes matrix products
smaller. Offloading moves bytes over PCIe. On an H200 (docs/benchmarks.md), copying activations that are not recomputed
took longer than computing them again, so activations are offloaded only where blocks are recomputed. With the
parameters in CPU memory a step took 10 times as long, so that comes last. A change to the training costs as much as it
changes: narrower weights less than another optimizer, and another optimizer less than an adapter.
"""

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, fields, replace
from math import log2
from typing import Any

from fsdp_shard.models import SEQUENCE_CLASSIFICATION
from fsdp_shard.planning.planned_run import PlannedRun
from fsdp_shard.sharding import Fsdp2Config
from fsdp_shard.training import OPTIMIZERS, DistillConfig, LoraConfig
from fsdp_shard.utils import in_yaml

MAX_RANKS = 1024
_LONG_SEQUENCE = 8192  # tokens; shorter ones are not worth dividing

_HALVING, _DOUBLING, _TENSOR_DOUBLING, _CONTEXT_DOUBLING = 6.0, 100.0, 20.0, 25.0


@dataclass(frozen=True)
class Option:
    """One change to a run, or none.

    Attributes:
        change: Makes the changed run; None if not possible.
        cost: The cost, as defined in the module docstring.
        overrides: The change, as typed on the command line.
        trains: How it changes the training; empty if the training is the same.
    """

    change: Callable[[PlannedRun], PlannedRun | None] = lambda run: run
    cost: float = 0.0
    overrides: tuple[str, ...] = ()
    trains: str = ""

    @property
    def names(self) -> set[str]:
        """The changed settings."""
        return {override.partition("=")[0] for override in self.overrides}


@dataclass(frozen=True)
class MemorySaver:
    """The options of one decision, from no change to the largest saving; it affects `activations` only, or more."""

    options: tuple[Option, ...]
    is_of_activations: bool = False

    def allowed(self, fixed: Collection[str], *, may_change_training: bool) -> "MemorySaver":
        """Return the saver without options that change settings in `fixed`, or the training."""
        kept = (o for o in self.options if not o.names & set(fixed) and (may_change_training or not o.trains))
        return replace(self, options=tuple(kept))


def memory_savers(run: PlannedRun, given: Collection[str], num_nodes: int = 1) -> list[MemorySaver]:
    """Return all possible changes to `run`; each saver starts with the current value.

    Args:
        run: The run.
        given: Names of the settings that the user chose, which a new optimizer or wrapper must also have.
        num_nodes: Number of machines.
    """
    shard = run.shard
    is_reshardable = shard.is_sharded and shard.reshard_after_forward is not True
    is_chunkable = run.model.chunked_loss is not True and run.model.task != SEQUENCE_CLASSIFICATION
    savers = [
        MemorySaver(tuple(_wrappers(run, given))),
        MemorySaver(tuple(_ranks(run, num_nodes))),
        MemorySaver(_if(shard.replicas > 1, _set("shard", {"replicas": 1}, 20.0))),
        MemorySaver(tuple(_divided(run, "tensor_parallel", _TENSOR_DOUBLING))),
        MemorySaver(tuple(_sequences(run)), is_of_activations=True),
        MemorySaver(tuple(_adapters(run))),
        MemorySaver(tuple(_optimizers(run, given))),
        MemorySaver(tuple(_dtypes(run))),
        MemorySaver(_if(not shard.cpu_offload, _set("shard", {"cpu_offload": True}, 300.0))),
        MemorySaver(tuple(_references(run))),
        MemorySaver(tuple(_average(run))),
        MemorySaver(
            _if(not shard.sync_every_micro_batch, _set("shard", {"sync_every_micro_batch": True}, 8.0)),
            is_of_activations=True,
        ),
        MemorySaver(_if(is_reshardable, _set("shard", {"reshard_after_forward": True}, 8.0)), is_of_activations=True),
        MemorySaver(_if(is_chunkable, _set("model", {"chunked_loss": True}, 3.0)), is_of_activations=True),
        MemorySaver(tuple(_recomputing(run)), is_of_activations=True),
        MemorySaver(tuple(_offloading(run)), is_of_activations=True),
        MemorySaver(tuple(_micro_batches(run)), is_of_activations=True),
    ]
    return [replace(saver, options=(Option(), *saver.options)) for saver in savers if saver.options]


def _if(is_possible: bool, option: Option) -> tuple[Option, ...]:
    return (option,) if is_possible else ()


def _replace(cost: float, overrides: tuple[str, ...], trains: str = "", **values: Any) -> Option:
    """The option that replaces values of a run."""
    return Option(lambda run: replace(run, **values), cost, overrides, trains)


def _set(section: str, values: dict[str, Any], cost: float, trains: str = "") -> Option:
    """The option that replaces settings of a section."""

    def change(run: PlannedRun) -> PlannedRun:
        return replace(run, **{section: replace(getattr(run, section), **values)})

    return Option(change, cost, tuple(f"{section}.{name}={in_yaml(value)}" for name, value in values.items()), trains)


def _choose(run: PlannedRun, section: str, kind: type, option: Option, given: Collection[str]) -> Iterator[Option]:
    """`option` with another dataclass of a section that keeps the user's settings; nothing if one is missing."""
    old = getattr(run, section)
    defaults = type(old)()
    names = {field.name for field in fields(old)}
    kept = {n for n in names if f"{section}.{n}" in given or getattr(old, n) != getattr(defaults, n)}
    if kept - {field.name for field in fields(kind)}:
        return

    def change(run: PlannedRun) -> PlannedRun:
        return replace(run, **{section: kind(**{name: getattr(getattr(run, section), name) for name in kept})})

    yield replace(option, change=change)


def _wrappers(run: PlannedRun, given: Collection[str]) -> Iterator[Option]:
    if run.shard.is_sharded or run.num_ranks == 1:
        return
    option, name, dtype = Option(cost=15.0, overrides=("shard=fsdp2",)), "shard.param_dtype", Fsdp2Config().param_dtype
    if name in given or run.shard.param_dtype == dtype:
        yield from _choose(run, "shard", Fsdp2Config, option, given)
        return
    same = replace(option, overrides=(*option.overrides, f"{name}={run.shard.param_dtype}"))
    yield from _choose(run, "shard", Fsdp2Config, same, {*given, name})
    yield from _choose(run, "shard", Fsdp2Config, replace(option, trains=f"computes in {dtype}"), given)


def _ranks(run: PlannedRun, num_nodes: int) -> Iterator[Option]:
    factor = 2
    while run.num_ranks * factor <= max(MAX_RANKS, 2 * run.num_ranks):
        number = run.num_ranks * factor
        yield _replace(_DOUBLING * log2(factor), (f"launch.ranks={number // num_nodes}",), num_ranks=number)
        factor *= 2


def _divided(run: PlannedRun, name: str, cost: float) -> Iterator[Option]:
    if getattr(run.shard, name) == 1:
        for ranks in (2, 4, 8):
            yield _set("shard", {name: ranks}, cost * log2(ranks))


def _sequences(run: PlannedRun) -> Iterator[Option]:
    if run.sequence_length >= _LONG_SEQUENCE:
        yield from _divided(run, "context_parallel", _CONTEXT_DOUBLING)


def _adapters(run: PlannedRun) -> Iterator[Option]:
    if run.adapter.trains_all:
        what = "trains an adapter"
        yield _replace(60.0, ("adapter=lora",), what, adapter=LoraConfig())
        overrides = ("adapter=lora", "adapter.quantize=nf4")
        yield _replace(90.0, overrides, f"{what} of quantized weights", adapter=LoraConfig(quantize="nf4"))
    elif isinstance(run.adapter, LoraConfig) and run.adapter.quantize != "nf4":
        yield _set("adapter", {"quantize": "nf4"}, 40.0, "quantizes the frozen weights")


def _optimizers(run: PlannedRun, given: Collection[str]) -> Iterator[Option]:
    for name, cost in (("adamw8bit", 15.0), ("adafactor", 25.0)):
        if type(run.optim) is not OPTIMIZERS[name]:
            option = Option(cost=cost, overrides=(f"optim={name}",), trains="another optimizer")
            yield from _choose(run, "optim", OPTIMIZERS[name], option, given)


def _dtypes(run: PlannedRun) -> Iterator[Option]:
    if run.model.dtype != "float32":
        return
    weights = _set("model", {"dtype": "bfloat16"}, 12.0, "weights in bfloat16")
    if run.shard.is_sharded:
        yield weights
        return
    of_wrapper = _set("shard", {"param_dtype": "bfloat16", "reduce_dtype": "bfloat16"}, 0.0)

    def change(run: PlannedRun) -> PlannedRun | None:
        changed = weights.change(run)
        return None if changed is None else of_wrapper.change(changed)

    yield replace(weights, change=change, overrides=weights.overrides + of_wrapper.overrides)


def _references(run: PlannedRun) -> Iterator[Option]:
    if run.has_sharded_reference and not run.is_streamed:
        yield _set("objective", {"reference": "precomputed"}, 5.0)
    if isinstance(run.objective, DistillConfig) and not run.objective.is_precomputed and not run.is_streamed:
        yield _set("objective", {"teacher_logits": "precomputed"}, 5.0)


def _average(run: PlannedRun) -> Iterator[Option]:
    if run.train.ema_decay is not None:
        none = _set("train", {"ema_decay": None}, 20.0, "keeps no average")
        yield replace(none, overrides=("train.ema_decay=null",))


def _recomputing(run: PlannedRun) -> Iterator[Option]:
    kind = run.shard.activation_checkpointing
    if kind in (False, "none") and not run.shard.activation_offload:
        yield _set("shard", {"activation_checkpointing": "selective"}, 10.0)
    if kind is not True and kind != "all":
        yield _set("shard", {"activation_checkpointing": True}, 25.0)


def _offloading(run: PlannedRun) -> Iterator[Option]:
    """Offload the inputs of recomputed blocks to CPU memory; runs after `_recomputing`, to see its choice."""
    if not run.shard.activation_offload:
        option = _set("shard", {"activation_offload": True}, 30.0)

        def change(run: PlannedRun) -> PlannedRun | None:
            return option.change(run) if run.shard.activation_checkpointing in (True, "all") else None

        yield replace(option, change=change)


def _micro_batches(run: PlannedRun) -> Iterator[Option]:
    size = now = run.train.micro_batch_size
    while size > 1:
        size //= 2
        if now % size == 0:
            yield _set("train", {"micro_batch_size": size}, _HALVING * log2(now / size))
