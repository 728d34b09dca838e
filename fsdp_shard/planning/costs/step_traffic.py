"""Bytes that a rank sends in a step, by collective and participating ranks.

Each formula assumes the algorithm that sends least without help from switches: for a gathered or reduced tensor a rank
sends the share (N-1)/N, for an all-reduced one twice that. The few bytes of counts, norms and losses are not counted.
Tokens are assumed to be distributed evenly over experts.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from math import prod

from fsdp_shard import sharding
from fsdp_shard.errors import ConfigError
from fsdp_shard.planning.costs.block_flops import Attention
from fsdp_shard.planning.costs.model_facts import ModelFacts, text_setting
from fsdp_shard.planning.costs.unit_shares import UnitShare
from fsdp_shard.planning.planned_run import PlannedRun

_EXPERTS_PER_TOKEN = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_top_k", "top_k")
_COUNT_BYTES, _FLOAT32_BYTES = 8, 4

# Per collective: how many times the share (N-1)/N a rank sends.
_SENT = {"all-gather": 1, "reduce-scatter": 1, "all-reduce": 2, "all-to-all": 1}


@dataclass(frozen=True)
class Traffic:
    """Traffic of all collectives of one kind over the same ranks in a step.

    Attributes:
        collective: `all-gather`, `reduce-scatter`, `all-reduce`, `all-to-all`, or `send` to a neighbor.
        over: The mesh dimension: `shard`, `replicate`, `tensor`, `expert` or `context`; `expert shard` for
            ranks with the same experts; `reshard` for the neighboring ranks of `shard.reshard_after_forward=N`.
        num_ranks: Number of participating ranks.
        stride: Distance between neighbors among them.
        payload_bytes: Bytes of the whole tensor that is gathered or reduced; of everything one rank contributes to an
            all-to-all, including its own part and averaged if ranks contribute different amounts; or of what is sent to
            a neighbor.
    """

    collective: str
    over: str
    num_ranks: int
    stride: int
    payload_bytes: int

    @property
    def sent_bytes(self) -> int:
        """Bytes that a rank sends to other ranks."""
        if self.collective == "send":
            return self.payload_bytes
        return int(Fraction(self.num_ranks - 1, self.num_ranks) * _SENT[self.collective] * self.payload_bytes)


def step_traffic(facts: ModelFacts, run: PlannedRun, shares: Iterable[UnitShare]) -> tuple[Traffic, ...]:
    """Compute the traffic of each rank in a step.

    Args:
        facts: The model.
        run: The settings of the run.
        shares: `unit_shares(facts, run)`.

    Returns:
        The traffic, summed by collective and ranks, without empty entries.

    Raises:
        ConfigError: The config of a mixture of experts does not define the number of experts per token.
    """
    found: dict[tuple[str, str], Traffic] = {}
    for traffic in (
        *_of_units(facts, run, shares),
        *_of_layers(facts, run),
        *_of_experts(facts, run),
        *_of_parts(facts, run),
        *_of_optimizer(facts, run),
    ):
        if traffic.num_ranks > 1 and traffic.payload_bytes:
            key = traffic.collective, traffic.over
            before = found[key].payload_bytes if key in found else 0
            found[key] = replace(traffic, payload_bytes=before + traffic.payload_bytes)
    return tuple(found.values())


def _of_units(facts: ModelFacts, run: PlannedRun, shares: Iterable[UnitShare]) -> Iterator[Traffic]:
    """Traffic of parameters and gradients."""
    shard, num_copies = run.shard, run.shard.replicas
    if not shard.is_sharded:
        num_copies = run.num_ranks
    for unit in shares:
        num, stride = unit.num_chunks, unit.stride
        over = "expert shard" if unit.is_expert else "shard"
        gathered = num * unit.gathered_bytes
        yield Traffic("all-gather", over, num, stride, unit.num_gathers * gathered)
        if unit.num_small_gathers:
            assert type(shard.reshard_after_forward) is int
            small = shard.reshard_after_forward
            yield Traffic("all-gather", "reshard", small, stride, unit.num_small_gathers * gathered)
        yield Traffic("reduce-scatter", over, num, stride, unit.num_reductions * num * unit.reduced_bytes)
        reduced = unit.num_reductions * unit.reduced_bytes
        yield Traffic("all-reduce", "replicate", num_copies, num * stride, reduced)
    scalars = sum(not param.shape and param.is_trained for param in facts.params.values())
    if shard.wrapper == "fsdp2":  # keeps scalars whole on every rank
        itemsize = sharding.itemsize(shard.reduce_dtype)
        yield Traffic("all-reduce", "all", run.num_ranks, 1, run.num_reductions * scalars * itemsize)


def _of_layers(facts: ModelFacts, run: PlannedRun) -> Iterator[Traffic]:
    """Traffic of activations, and their gradients, between ranks that divide layers."""
    num, itemsize = run.shard.tensor_parallel, sharding.itemsize(run.shard.param_dtype)
    if num == 1:
        return
    elements = run.num_micro_batches * run.num_rows * run.sequence_length * itemsize
    last_rows: dict[str, str] = {}
    recomputed = recomputed_blocks(facts, run)
    weights = dict(facts.model.named_parameters(remove_duplicate=False))  # a tied head, too
    for fqn, style in facts.tensor_plan.items():
        weight = weights.get(f"{fqn}.weight")
        if weight is None or len(weight.shape) != 2:  # a parameter, or a module without one
            continue
        outputs, inputs = weight.shape
        if style == "embedding_rowwise":
            yield Traffic("all-reduce", "tensor", num, 1, elements * inputs)
        elif style in sharding.ROW_STYLES:
            yield Traffic("all-reduce", "tensor", num, 1, elements * outputs)
            if (block := _block_of(fqn, recomputed)) is not None:
                if block in last_rows:  # the last one's output is not needed again
                    yield Traffic("all-reduce", "tensor", num, 1, elements * outputs)
                last_rows[block] = fqn
        elif style in sharding.COLUMN_STYLES:
            yield Traffic("all-reduce", "tensor", num, 1, elements * inputs)  # of the input's gradient
            if style != "colwise":
                yield Traffic("all-gather", "tensor", num, 1, elements * num * -(-outputs // num))


def recomputed_blocks(facts: ModelFacts, run: PlannedRun) -> set[str]:
    """FQNs of the blocks whose activation collectives run again in the backward pass."""
    if run.shard.activation_checkpointing == "selective" or facts.costs is None:
        return set()
    return set(sharding.recomputed_fqns(list(facts.costs.blocks), run.shard.activation_checkpointing))


def _block_of(fqn: str, blocks: set[str]) -> str | None:
    return next((block for block in blocks if fqn.startswith(f"{block}.")), None)


def _of_experts(facts: ModelFacts, run: PlannedRun) -> Iterator[Traffic]:
    """Traffic of tokens to experts and back, of their gradients, and of the token counts."""
    num = run.shard.expert_parallel
    modules = [fqn for fqn, style in facts.expert_plan.items() if style == sharding.SENDS_TO_EXPERTS]
    if num == 1 or not modules:
        return
    chosen = text_setting(facts.config, *_EXPERTS_PER_TOKEN)
    width = text_setting(facts.config, "hidden_size")
    if chosen is None or width is None:
        raise ConfigError(
            f"shard.expert_parallel={num} cannot be planned: the config of this model does not say how many experts a "
            f"token goes to. Plan with shard.expert_parallel=1."
        )
    rows = run.num_micro_batches * run.num_rows * run.sequence_length * chosen
    tokens = rows * width * sharding.itemsize(run.shard.param_dtype)
    recomputed = recomputed_blocks(facts, run)
    counted_again = recomputed if run.shard.activation_checkpointing != "selective" else set(facts.blocks)
    for fqn in modules:
        experts = next(param.shape[0] for name, param in facts.params.items() if name.startswith(f"{fqn}."))
        counts = run.num_micro_batches * experts * _COUNT_BYTES
        num_passes = 4 + 2 * (_block_of(fqn, recomputed) is not None)
        num_counts = 1 + (_block_of(fqn, counted_again) is not None)
        yield Traffic("all-to-all", "expert", num, 1, num_passes * tokens + num_counts * counts)


def _of_parts(facts: ModelFacts, run: PlannedRun) -> Iterator[Traffic]:
    """Traffic between ranks that divide sequences: attention, and token values for losses of whole sequences."""
    shard, num = run.shard, run.shard.context_parallel
    if num == 1 or facts.costs is None:
        return
    method = sharding.resolve_context_method(shard, facts.config)
    num_chunks = num if method == "ulysses" else 2 * num
    part = -(-run.sequence_length // num_chunks) * num_chunks // num
    itemsize, tokens = sharding.itemsize(shard.param_dtype), run.num_micro_batches * run.num_rows * part
    if run.objective.compares_whole_sequences:  # of the part, each has only its own gradient, which is not sent
        values = run.objective.num_token_values * _FLOAT32_BYTES
        yield Traffic("all-gather", "context", num, 1, num * tokens * values)
    again = set(sharding.recomputed_fqns(list(facts.costs.blocks), shard.activation_checkpointing))
    for fqn, block in facts.costs.blocks.items():
        num_passes = 2 + (fqn in again)
        for layer in block.forward.attention:
            if method == "ulysses":
                sent = tokens * _exchanged_width(layer, num) * itemsize
                yield Traffic("all-to-all", "context", num, 1, num_passes * sent)
            else:
                width = tokens * layer.heads[1] * sum(layer.widths)
                sent = (num - 1) * width * (num_passes * itemsize + _FLOAT32_BYTES)
                yield Traffic("send", "context", num, 1, sent)


def _of_optimizer(facts: ModelFacts, run: PlannedRun) -> Iterator[Traffic]:
    """Traffic of parameters that are updated whole: values and gradients go to the owner, and values come back."""
    if not run.optim.needs_full_params:
        return
    trained = [param for param in facts.params.values() if param.is_trained]
    sent = sum(3 * prod(param.shape) * param.itemsize for param in trained)
    if run.shard.wrapper == "fsdp2":  # scalars are whole on every rank, and come back to each
        sent += sum((run.num_shards - 1) * param.itemsize for param in trained if not param.shape)
    yield Traffic("all-to-all", "shard", run.num_shards, 1, sent // run.num_shards)


def _exchanged_width(layer: Attention, num_ranks: int) -> int:
    """Elements per token in queries, keys, values and outputs, with repeated keys and values."""
    heads, (width, value_width) = layer.heads, layer.widths
    return (heads[0] + sharding.num_sent_heads(heads[1], num_ranks)) * (width + value_width)
