"""FLOPs and saved bytes of a forward and backward pass, measured on one block of each kind, for any sequence length.

The model runs on the meta device or on fake tensors, which compute nothing. Identical blocks run once; the others of
their kind only pass shapes on. Each operator's cost is a polynomial of degree two in the sequence length, fitted to
three lengths. For an encoder-decoder it is a polynomial in both lengths, fitted to six pairs. Attention through
transformers' interface has its own formula, so that masked pairs do not count.

The count covers the matrix products, convolutions and attention that `torch.utils.flop_counter` counts, and the
grouped products of experts. Scores that a flash kernel recomputes in its backward pass do not count.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from fractions import Fraction
from functools import partial
from math import lcm, prod
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import flop_registry
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from fsdp_shard.models import attention_implementations
from fsdp_shard.planning.step.recording.recorder import GROUPED_PRODUCT, grouped_product
from fsdp_shard.utils import TorchDispatchMode, is_costly_operator, replace_tensors, tensors_in, tree_leaves, tree_map

_STEP, _LONGEST_STEP = 64, 1024  # tokens; 64 is a multiple of the chunk size of linear attention
_LENGTHS = ((1, 1), (2, 2), (3, 3))  # in steps; without a decoder both lengths are equal
# Encoder and decoder lengths: values at these six pairs determine a polynomial of degree two.
_LENGTHS_OF_BOTH = ((1, 1), (2, 1), (3, 1), (1, 2), (1, 3), (2, 2))
_ATTENTION = "fsdp_shard_flops"
_NUMBERS_OF_A_LAYER = ("layer_idx", "layer_index", "layer_number", "block_idx")


@dataclass(frozen=True)
class Attention:
    """Attention of one layer to one sequence.

    Attributes:
        flops_per_pair: FLOPs per query-key pair, over all heads.
        is_causal: Whether queries attend to no later keys.
        window: Maximum number of keys that a query attends to, itself included, on each side that the mask allows; None
            for all.
        chunk: Length of the chunks that a sequence is divided into, where queries attend within their own chunk only
            (Llama 4); None otherwise.
        heads: Number of heads of the queries, and of the keys and values.
        widths: Head width of the queries and keys, and of the values.
        in_decoder: Whether the queries, and the keys, belong to the decoder's tokens, if it has its own.
    """

    flops_per_pair: int
    is_causal: bool
    window: int | None
    chunk: int | None
    heads: tuple[int, int]
    widths: tuple[int, int]
    in_decoder: tuple[bool, bool] = (False, False)

    def flops(self, length: int, decoder_length: int) -> int:
        """FLOPs for sequences of these lengths, counting the pairs that the mask allows."""
        queries, keys = (decoder_length if is_there else length for is_there in self.in_decoder)
        if not self.is_causal:
            is_windowed = self.window is not None and queries == keys
            num_pairs = 2 * self._causal_pairs(keys) - keys if is_windowed else queries * keys
            return self.flops_per_pair * num_pairs
        num_chunks, rest = divmod(keys, self.chunk or keys)
        return self.flops_per_pair * (num_chunks * self._causal_pairs(self.chunk or keys) + self._causal_pairs(rest))

    def _causal_pairs(self, keys: int) -> int:
        window = min(keys, self.window or keys)
        return window * keys - window * (window - 1) // 2


@dataclass(frozen=True)
class CostPolynomial:
    """A number that depends on the length of a sequence: a polynomial, and attention.

    Attributes:
        terms: Coefficients by (power of the length, power of the decoder's length); missing ones are 0.
        attention: Attention, counted by its own formula.
    """

    terms: Mapping[tuple[int, int], Fraction] = field(default_factory=dict)
    attention: tuple[Attention, ...] = ()

    def at(self, length: int, decoder_length: int | None = None, *, is_packed: bool = False) -> int:
        """The number for one sequence of `length` tokens; the decoder of an encoder-decoder may have another length.

        For packed rows it is the minimum: document boundaries are unknown, so each token attends to itself only.
        """
        decoder_length = decoder_length or length
        terms = (term * length**one * decoder_length**other for (one, other), term in self.terms.items())
        return round(sum(terms, Fraction(0))) + sum(
            attention.flops_per_pair * length if is_packed else attention.flops(length, decoder_length)
            for attention in self.attention
        )

    def times(self, number: int) -> "CostPolynomial":
        """The amount of so many calls."""
        return CostPolynomial({powers: number * term for powers, term in self.terms.items()}, number * self.attention)


@dataclass(frozen=True)
class BlockCosts:
    """Amounts that a block, or the model outside its blocks, needs for one sequence.

    Attributes:
        forward: FLOPs of the forward pass.
        backward: FLOPs of the backward pass, without `recomputed`.
        recomputed: FLOPs of recomputing the whole block in the backward pass. torch stops recomputing where nothing
            more is needed, often before the last product.
        recomputed_selectively: FLOPs of the operators that selective checkpointing recomputes.
        saved_bytes: Bytes that autograd saves between the two passes without recomputation.
        input_bytes: Bytes of the block's input.
    """

    forward: CostPolynomial = CostPolynomial()
    backward: CostPolynomial = CostPolynomial()
    recomputed: CostPolynomial = CostPolynomial()
    recomputed_selectively: CostPolynomial = CostPolynomial()
    saved_bytes: CostPolynomial = CostPolynomial()
    input_bytes: CostPolynomial = CostPolynomial()

    def times(self, number: int) -> "BlockCosts":
        """The costs of so many calls, as ALBERT calls one block in place of many layers."""
        if number == 1:
            return self
        return BlockCosts(**{item.name: getattr(self, item.name).times(number) for item in fields(self)})


@dataclass(frozen=True)
class ModelCosts:
    """The costs of a model's blocks by FQN, and of the part `outside` of them.

    Attributes:
        blocks: The costs of all calls of each block.
        outside: Those of the rest of the model.
        num_calls: How often each block is called in a pass.
    """

    blocks: Mapping[str, BlockCosts]
    outside: BlockCosts
    num_calls: Mapping[str, int]

    def num_calls_of(self, module: str) -> int:
        """How often a module inside a block, or a block, is called in a pass; 1 for others."""
        return next((number for fqn, number in self.num_calls.items() if f"{module}.".startswith(f"{fqn}.")), 1)


@dataclass
class _Counts:
    """Counts of one phase at one length."""

    flops: int = 0
    attention: list[Attention] = field(default_factory=list)


@dataclass
class _BlockCounts:
    phases: dict[str, _Counts] = field(default_factory=dict)
    saved_bytes: int = 0
    input_bytes: int = 0
    output: Any = None  # shapes and dtypes, for blocks that only pass them on

    def phase(self, name: str) -> _Counts:
        return self.phases.setdefault(name, _Counts())


class _Counter(TorchDispatchMode):
    """Sums the FLOPs of operators by block and phase.

    Attributes:
        counts: Counts of the block that runs.
        phase: `forward`, `backward` or `recomputed`.
        decoder_length: Number of decoder tokens, if it differs from the encoder's.
    """

    def __init__(self, counts: _BlockCounts) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        self.counts, self.phase = counts, "forward"
        self.decoder_length: int | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.name() == "aten::_local_scalar_dense":  # a value that control flow depends on
            return 1.0 if args[0].is_floating_point() else 1
        output = grouped_product(args, kwargs) if func.name() == GROUPED_PRODUCT else func(*args, **(kwargs or {}))
        if flops := _operator_flops(func, args, kwargs or {}, output):
            self.counts.phase(self.phase).flops += flops
            if self.phase == "recomputed" and not is_costly_operator(func):
                self.counts.phase("recomputed selectively").flops += flops
        return output

    @contextmanager
    def counting(self, counts: _BlockCounts, phase: str) -> Iterator[None]:
        """Add what runs inside the context to `counts`."""
        before = self.counts, self.phase
        self.counts, self.phase = counts, phase
        try:
            yield
        finally:
            self.counts, self.phase = before

    def attend(self, attention: Attention) -> None:
        if attention.flops_per_pair:
            self.counts.phase(self.phase).attention.append(attention)


def _operator_flops(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], output: Any) -> int:
    name = str(func.name())
    if name == GROUPED_PRODUCT:  # its groups divide the rows of the first factor, or else the summed dimension
        left, right = args[0].shape, args[1].shape
        return int(2 * left[-2] * left[-1] * right[-1])
    if name == "aten::convolution_backward":  # torch's formula multiplies all channels, of grouped ones too
        grad, given, weight, is_transposed = args[0], args[1], args[2], args[7]
        each = 2 * (given if is_transposed else grad).numel() * prod(weight.shape[1:])
        return int(each * sum(args[10][:2]))
    formula = flop_registry.get(func.overloadpacket)
    return 0 if formula is None else int(formula(*args, **kwargs, out_val=output))


class _Attend(torch.autograd.Function):
    """Produces the shapes of attention, saves what flash attention saves, and counts the necessary products."""

    @staticmethod
    def forward(
        ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, counter: _Counter, mask: Any
    ) -> torch.Tensor:
        ctx.counter, ctx.mask = counter, mask
        heads, width, value_width = query.shape[1], query.shape[-1], value.shape[-1]
        in_decoder = tuple(tensor.shape[2] == counter.decoder_length for tensor in (query, key))
        ctx.sizes = (heads, key.shape[1]), (width, value_width), in_decoder
        output = query.new_empty((*query.shape[:2], query.shape[2], value_width))
        log_sums = query.new_empty(query.shape[:3], dtype=torch.float32)
        ctx.save_for_backward(query, key, value, output, log_sums)
        counter.attend(Attention(2 * heads * (width + value_width), *mask, *ctx.sizes))
        return output

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        query, key, value, _, _ = ctx.saved_tensors
        (heads, _), (width, value_width), _ = ctx.sizes
        of_query, of_key, of_value = ctx.needs_input_grad[:3]
        widths = value_width * of_value + (value_width if of_query or of_key else 0) + width * (of_query + of_key)
        ctx.counter.attend(Attention(2 * heads * widths, *ctx.mask, *ctx.sizes))
        needed = ((query, of_query), (key, of_key), (value, of_value))
        return *(torch.empty_like(tensor) if needs else None for tensor, needs in needed), None, None


def measure_costs(model: PreTrainedModel, blocks: Sequence[str], device: str) -> ModelCosts:
    """Measure the costs of the blocks of `model` for one sequence.

    Args:
        model: The model on meta, in its compute dtype. It is modified and cannot be used afterwards.
        blocks: FQNs of the blocks that activation checkpointing recomputes, not nested.
        device: `meta`, or `cpu` inside a `FakeTensorMode`, which is slower but supports more operators.

    Returns:
        The costs for sequences of any length.

    Raises:
        Any of CANNOT_RUN: The model cannot run on that device.
    """
    replace_tensors(model.train(), lambda tensor: torch.empty(tensor.shape, dtype=tensor.dtype, device=device))
    step = _step_of(model)
    runs = _Runs(model, blocks, device, step)
    of_both = model.config.is_encoder_decoder
    measured = [runs.measure(*lengths) for lengths in (_LENGTHS_OF_BOTH if of_both else _LENGTHS)]
    costs = {key: _costs([counts[key] for counts in measured], step) for key in measured[0]}
    of_blocks = {fqn: costs[kind].times(runs.num_calls[fqn]) for fqn, kind in runs.kinds.items()}
    return ModelCosts({fqn: of_blocks[fqn] for fqn in blocks if fqn in of_blocks}, costs[None], runs.num_calls)


def _step_of(model: PreTrainedModel) -> int:
    """Tokens of a step: a multiple of the chunks of Mamba-2 and the like, which pad a sequence to whole chunks."""
    config = model.config.get_text_config()
    sizes = [getattr(config, name, None) for name in ("chunk_size", "mamba_chunk_size")]
    step = lcm(_STEP, *(size for size in sizes if isinstance(size, int) and size > 0))
    return step if step <= _LONGEST_STEP else _STEP


class _Runs:
    """Forward and backward passes of a model in which one block of each kind runs.

    Attributes:
        kinds: FQN -> the key that blocks of one kind share.
        num_calls: FQN -> how often the block is called in a pass.
    """

    def __init__(self, model: PreTrainedModel, blocks: Sequence[str], device: str, step: int) -> None:
        self.kinds: dict[str, Any] = {}
        self.num_calls: Counter[str] = Counter()
        self._model, self._device, self._step = model, device, step
        self._found: dict[Any, _BlockCounts] = {}
        self._counter = _Counter(_BlockCounts())
        for fqn in blocks:
            module = model.get_submodule(fqn)
            module.forward = partial(self._run_block, fqn, module, module.forward)

    def measure(self, num_steps: int, num_decoder_steps: int) -> dict[Any, _BlockCounts]:
        """Count each kind of block, and under None the rest of the model, for so many steps of tokens."""
        self._found = {None: _BlockCounts()}
        self.num_calls.clear()
        self._counter.decoder_length = None if num_steps == num_decoder_steps else num_decoder_steps * self._step
        lengths = {"input_ids": num_steps}
        if self._model.config.is_encoder_decoder:
            lengths["decoder_input_ids"] = num_decoder_steps
        inputs = {
            name: torch.zeros((1, number * self._step), dtype=torch.long, device=self._device)
            for name, number in lengths.items()
        }
        outside = self._found[None]
        with (
            _counted_attention(self._model, self._counter),
            torch.device(self._device),
            torch.enable_grad(),
            self._counter,
        ):
            with self._counter.counting(outside, "forward"):
                logits = self._model(**inputs, use_cache=False).logits
            with self._counter.counting(outside, "backward"):
                _backward([logits])
        return self._found

    def _run_block(self, fqn: str, module: nn.Module, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        given = list(tensors_in((args, kwargs)))
        kind = self.kinds[fqn] = _kind(module, given)
        self.num_calls[fqn] += 1
        if kind not in self._found:
            self._found[kind] = self._measure_block(forward, args, kwargs)
        sources = [tensor for tensor in given if tensor.requires_grad]

        def pass_on(template: Any) -> Any:
            if not isinstance(template, torch.Tensor):
                return template
            made = torch.empty_like(template, requires_grad=template.requires_grad and not sources)
            # Modules before this block receive its gradients.
            return made + sum(source.sum().to(made.dtype) for source in sources) if template.requires_grad else made

        return tree_map(pass_on, self._found[kind].output)

    def _measure_block(self, forward: Callable[..., Any], args: Any, kwargs: Any) -> _BlockCounts:
        counts = _BlockCounts()
        args, kwargs = tree_map(_alone, (args, kwargs))
        given = list(tensors_in((args, kwargs)))
        counts.input_bytes = sum(tensor.nbytes for tensor in given if tensor.requires_grad)
        passes = iter(("forward", "recomputed"))

        def run(*args: Any, **kwargs: Any) -> Any:
            with self._counter.counting(counts, next(passes)):
                return forward(*args, **kwargs)

        output = checkpoint(run, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)
        with self._counter.counting(counts, "backward"):
            _backward(tree_leaves(output))
        counts.saved_bytes = self._saved_bytes(forward, args, kwargs)
        counts.output = tree_map(_alone, output)
        return counts

    def _saved_bytes(self, forward: Callable[..., Any], args: Any, kwargs: Any) -> int:
        weights = {tensor.untyped_storage() for tensor in (*self._model.parameters(), *self._model.buffers())}
        saved: dict[torch.UntypedStorage, int] = {}

        def save(tensor: torch.Tensor) -> torch.Tensor:
            if (storage := tensor.untyped_storage()) not in weights:
                saved[storage] = storage.nbytes()
            return tensor

        nowhere = _BlockCounts()
        with (
            self._counter.counting(nowhere, "forward"),
            torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor),
        ):
            output = forward(*args, **kwargs)
            del output
        return sum(saved.values())


def _kind(module: nn.Module, given: Sequence[torch.Tensor]) -> Any:
    """A key of everything that makes costs differ: parameters, plain settings of modules, and inputs.

    Input lengths do not matter: all inputs have the length of the run.
    """
    params = tuple((name, tuple(param.shape), param.requires_grad) for name, param in module.named_parameters())
    parts = list(module.modules())
    plain = tuple(
        (type(part).__name__, *((name, value) for name, value in vars(part).items() if _is_plain(name, value)))
        for part in parts
    )
    chunks = tuple(map(_chunk_of, parts))
    return params, plain, chunks, tuple((tensor.ndim, tensor.requires_grad) for tensor in given)


def _is_plain(name: str, value: Any) -> bool:
    return name not in _NUMBERS_OF_A_LAYER and isinstance(value, int | float | str | bool | None)


def _alone(value: Any) -> Any:
    """The tensor, detached from its autograd history."""
    return value.detach().requires_grad_(value.requires_grad) if isinstance(value, torch.Tensor) else value


def _backward(outputs: Sequence[Any]) -> None:
    trained = [output for output in outputs if isinstance(output, torch.Tensor) and output.requires_grad]
    if trained:
        torch.autograd.backward(trained, [torch.empty_like(output) for output in trained])


@contextmanager
def _counted_attention(model: PreTrainedModel, counter: _Counter) -> Iterator[None]:
    """Make attention through transformers' interface only count, without a mask."""
    before = attention_implementations(model)
    if before not in (["sdpa"], ["flash_attention_2"]):
        yield
        return

    def attend(
        module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, None]:
        is_causal = kwargs.get("is_causal")
        hides = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
        allowed = (hides, kwargs.get("sliding_window"), _chunk_of(module) if hides else None)
        attended = _Attend.apply(  # type: ignore[no-untyped-call]  # untyped in torch
            query, key, value, counter, allowed
        )
        return attended.transpose(1, 2), None

    AttentionInterface.register(_ATTENTION, attend)
    AttentionMaskInterface.register(_ATTENTION, lambda *args, **kwargs: None)
    model.set_attn_implementation(_ATTENTION)
    try:
        yield
    finally:
        model.set_attn_implementation(before[0])


def _chunk_of(module: nn.Module) -> int | None:
    """Length of the chunks of an attention layer; transformers gives the layer a mask of them, and no argument."""
    number: int | None = getattr(module, "layer_idx", None)
    config: Any = getattr(module, "config", None)
    layer_types = getattr(config, "layer_types", None) or []
    is_chunked = number is not None and layer_types[number : number + 1] == ["chunked_attention"]
    return int(config.attention_chunk_size) if is_chunked else None


def _costs(measured: Sequence[_BlockCounts], step: int) -> BlockCosts:
    """A block's costs, from its counts at each of the lengths, in steps of so many tokens."""

    def of(phase: str) -> CostPolynomial:
        counts = [at_lengths.phases.get(phase, _Counts()) for at_lengths in measured]
        # With equal lengths, the two sides of an encoder-decoder could not be distinguished.
        return CostPolynomial(_polynomial([found.flops for found in counts], step), tuple(counts[1].attention))

    def size(name: str) -> CostPolynomial:
        return CostPolynomial(_polynomial([getattr(found, name) for found in measured], step))

    return BlockCosts(
        forward=of("forward"),
        backward=of("backward"),
        recomputed=of("recomputed"),
        recomputed_selectively=of("recomputed selectively"),
        saved_bytes=size("saved_bytes"),
        input_bytes=size("input_bytes"),
    )


def _polynomial(values: Sequence[int], step: int) -> dict[tuple[int, int], Fraction]:
    """The terms of the polynomial with these values at `_LENGTHS`, or at `_LENGTHS_OF_BOTH`."""
    one, two, three = values[:3]
    constant, linear, quadratic = _in_one_length(one, two, three, step)
    if len(values) == len(_LENGTHS):
        return {(0, 0): constant, (1, 0): linear, (2, 0): quadratic}
    one_one, two_one, _, one_two, one_three, two_two = values
    _, linear_in_decoder, quadratic_in_decoder = _in_one_length(one_one, one_two, one_three, step)
    product = Fraction(two_two - two_one - one_two + one_one, step * step)
    return {
        (0, 0): constant - step * (linear_in_decoder - product * step) - step**2 * quadratic_in_decoder,
        (1, 0): linear - product * step,
        (2, 0): quadratic,
        (0, 1): linear_in_decoder - product * step,
        (0, 2): quadratic_in_decoder,
        (1, 1): product,
    }


def _in_one_length(one: int, two: int, three: int, step: int) -> tuple[Fraction, Fraction, Fraction]:
    """Coefficients of the polynomial with these values at one, two and three steps."""
    quadratic = Fraction(three - 2 * two + one, 2 * step**2)
    linear = Fraction(two - one, step) - 3 * step * quadratic
    return one - linear * step - quadratic * step**2, linear, quadratic
