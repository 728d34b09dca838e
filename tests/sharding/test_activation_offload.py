"""Activations in CPU memory: no gradient changes, whatever a block saves, and the device keeps what it should.

`shard.activation_offload` is refused without a GPU; below that, the code runs on any device.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fsdp_shard.distributed import DistributedContext
from fsdp_shard.sharding.activation_checkpointing import recompute_blocks
from fsdp_shard.sharding.activations.activation_offload import _Copies, _SavedTensor, offload_blocks
from fsdp_shard.sharding.registry import Fsdp2Config
from tests.support.ranks import on_ranks
from tests.support.tiny import llama, token_batch

CPU = torch.device("cpu")


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # torch.compile's
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("recomputed", ["none", 2], ids=["kept", "recomputed"])
def test_offloaded_activations_change_no_gradient(recomputed: str | int, compiled: bool) -> None:
    grads = []
    for offload in (False, True):
        model = llama(layers=3)
        blocks = recompute_blocks(model, Fsdp2Config(activation_checkpointing=recomputed))
        for block in blocks if compiled else ():
            block.forward = torch.compile(block.forward, backend="aot_eager")
        if offload:
            offload_blocks(blocks, CPU)
        for step in range(2):  # the second one begins with what the first one left
            model(input_ids=token_batch(step), labels=token_batch(step), use_cache=False).loss.backward()
        grads.append([param.grad for param in model.parameters()])
    assert all(torch.equal(one, two) for one, two in zip(*grads, strict=True))


class Block(nn.Module):
    """Saves its input twice, through views, and its output."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.one(x) * self.two(x)).sigmoid()


class CopiedBytes(TorchDispatchMode):
    """Counts the bytes that are copied from one tensor to another."""

    num_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num_bytes += args[1].nbytes if func is torch.ops.aten.copy_.default else 0
        return func(*args, **(kwargs or {}))


def test_offload_moves_each_tensor_once_and_no_parameter() -> None:
    def on_device() -> list[bool]:
        return [saved.on_device is not None for saved in gc.get_objects() if type(saved) is _SavedTensor]

    blocks = [Block() for _ in range(3)]
    offload_blocks(blocks, CPU)
    x = torch.randn(2, 8, 64, requires_grad=True)
    with CopiedBytes() as copied:
        for block in blocks:
            x = block(x)
    assert copied.num_bytes == 3 * 4 * x.nbytes, "input, two products, output; no weight, no second view"
    assert Counter(on_device()) == {False: 8, True: 4}, "the last block stays"
    x.sum().backward()
    del x
    assert not on_device(), "let go by the backward pass"


class Elsewhere(torch.autograd.Function):
    """Saves a tensor that is not where the block computes, as `checkpoint` and attention with a seed do on a GPU."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(torch.empty(0, device="meta"), x)
        return x * x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        elsewhere, x = ctx.saved_tensors
        assert elsewhere.is_meta
        return 2 * grad * x


def test_offload_leaves_what_is_not_on_the_device_where_it_is() -> None:
    class Squared(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(Elsewhere.apply(x))

    blocks = [Squared() for _ in range(3)]
    grads: list[torch.Tensor] = []
    for offload in (False, True):
        if offload:
            offload_blocks(blocks, CPU)
        x = first = torch.full((2, 64), 0.5, requires_grad=True)
        for block in blocks:
            x = block(x)
        x.sum().backward()
        assert first.grad is not None
        grads.append(first.grad)
    assert torch.equal(grads[0], grads[1])


class Computed(nn.Module):
    """A block that computes `function` of what a layer returns."""

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.layer, self.function = nn.Linear(8, 8), function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.function(self.layer(x))


def masked(x: torch.Tensor) -> torch.Tensor:
    """One mask after the other, of which only autograd keeps what it needs, as dropout does on a GPU."""
    for every in range(2, 8):
        x = x * (torch.arange(8) % every == 0).float() + x.masked_fill(torch.arange(8) % every == 1, 0.5)
    return x


def rewritten(x: torch.Tensor) -> torch.Tensor:
    scratch = torch.full((8,), 5.0)
    _ = x * scratch  # saved, and never used
    return x * scratch.fill_(2.0)


def conjugated(x: torch.Tensor) -> torch.Tensor:
    z = torch.complex(x, torch.sin(x))
    return (z * z.conj() * z).real + (z * z.conj().imag).real


def sparse(x: torch.Tensor) -> torch.Tensor:
    return torch.sparse.mm(torch.eye(4).to_sparse(), x)


def nested(x: torch.Tensor) -> torch.Tensor:
    rows = torch.nested.as_nested_tensor([x[:1], x[1:]], layout=torch.jagged)
    return (rows.sin() * (rows * 2)).values()


def expanded(x: torch.Tensor) -> torch.Tensor:
    """Repeated, padded and overlapping rows."""
    rows, padded = x[:1].sin().expand(4, 8), torch.cat([x, x], 1)[:, :9].exp()[:, 1:]
    return rows * padded + x.sin().as_strided((4, 8), (2, 3)) * x


@pytest.mark.parametrize("function", [masked, rewritten, conjugated, sparse, nested, expanded])
@pytest.mark.filterwarnings("ignore:Casting complex values to real discards the imaginary part")
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage")
def test_whatever_is_saved_returns_as_it_was(function: Callable[[torch.Tensor], torch.Tensor]) -> None:
    grads = []
    for offload in (False, True):
        torch.manual_seed(0)
        blocks, x = [Computed(function) for _ in range(3)], torch.randn(4, 8, requires_grad=True)
        if offload:
            offload_blocks(blocks, CPU)
        y = x
        for block in blocks:
            y = block(y)
        y.sum().backward()
        grads.append([x.grad, *(param.grad for block in blocks for param in block.parameters())])
    assert all(torch.equal(one, two) for one, two in zip(*grads, strict=True))


class Strided(torch.autograd.Function):
    """Requires the strides that a tensor had when it was saved, as the backward pass of a compiled block does."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, part)
        ctx.strides = part.stride()
        return x * part

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, part = ctx.saved_tensors
        assert part.stride() == ctx.strides
        return grad * part, grad * x


def test_compiled_blocks_get_the_strides_of_a_slice() -> None:
    """As Gemma 4's layers, each of which has its part of one large input."""

    class Part(nn.Module):
        def forward(self, x: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
            return Strided.apply(x, part)

    blocks, x = [Part() for _ in range(3)], torch.ones(4, 8, requires_grad=True)
    large = torch.randn(4, 5, 8, requires_grad=True)
    offload_blocks(blocks, CPU, compiled=True)
    y: torch.Tensor = x
    for number, block in enumerate(blocks):
        y = block(y, (large * 1)[:, number])
    y.sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad, large[:, :3].prod(1))


class Stream:
    """Stands in for the stream of a GPU: its events are counted, and what waits for them is told."""

    def __init__(self) -> None:
        self.num_events = 0
        self.waits: list[tuple[int, int]] = []  # (the event, how many there were)

    def record_event(self) -> Any:
        self.num_events += 1
        number = self.num_events
        return SimpleNamespace(synchronize=lambda: self.waits.append((number, self.num_events)))


def test_blocks_are_fetched_no_faster_than_the_device_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each block waits until the one before has begun, so that three at most have memory there."""
    compute = Stream()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: compute)
    copies = _Copies(CPU)
    copies._stream = compute  # type: ignore[assignment]  # a stand-in
    for _ in range(4):
        copies.limit_fetches()
    assert compute.waits == [(1, 2), (2, 3), (3, 4)]

    limited = []
    monkeypatch.setattr(_Copies, "limit_fetches", lambda copies: limited.append(True))
    blocks = [Block() for _ in range(3)]
    offload_blocks(blocks, CPU)
    x = torch.randn(2, 8, 64, requires_grad=True)
    for block in blocks:
        x = block(x)
    x.sum().backward()
    assert len(limited) == 3


def test_bits_are_resolved_before_a_copy_begins() -> None:
    """torch resolves them on the CPU, where the copy of a GPU may not have arrived yet."""

    class Resolved(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.ops.aten.copy_.default:
                copied.append(args[1].is_conj() or args[1].is_neg() or args[0].is_conj() or args[0].is_neg())
            return func(*args, **(kwargs or {}))

    copied: list[bool] = []
    z = torch.randn(4, dtype=torch.complex64)
    with Resolved():
        hosts = [_Copies(CPU).to_host(tensor) for tensor in (z.conj(), z.conj().imag)]
    assert torch.equal(hosts[0], z.conj())
    assert torch.equal(hosts[1], -z.imag)
    assert copied
    assert not any(copied[-2:])


def test_memory_on_the_cpu_is_dense() -> None:
    """Of others, a copy between devices goes through memory that is not pinned."""
    for tensor in (torch.randn(4, 8).t(), torch.randn(4, 16)[:, :8].t(), torch.randn(4, 6)[:, ::2]):
        host = _Copies(CPU).to_host(tensor)
        assert torch.equal(host, tensor)
        assert host.is_contiguous() or host.t().is_contiguous()


class Divided(nn.Module):
    """Two layers, of which each rank has half of the columns, then half of the rows."""

    def __init__(self, context: DistributedContext) -> None:
        super().__init__()
        one, two = torch.randn(2, 8, 8).unbind()
        mesh = context.mesh["shard"]
        self.one = nn.Parameter(distribute_tensor(one, mesh, [Shard(1)]))
        self.two = nn.Parameter(distribute_tensor(two, mesh, [Shard(0)]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x.sin() @ self.one).cos() @ self.two


def divided_gradients(context: DistributedContext) -> tuple[list[list[torch.Tensor]], int, int]:
    """The gradients without and with offload, and the bytes that are copied on a rank and saved on one."""
    grads = []
    for offload in (False, True):
        torch.manual_seed(0)
        blocks = [Divided(context) for _ in range(3)]
        if offload:
            offload_blocks(blocks, CPU)
        x: Any = distribute_tensor(torch.randn(4, 8), context.mesh["shard"], [Replicate()]).requires_grad_()
        with CopiedBytes() as copied:
            for block in blocks:
                x = block(x).redistribute(placements=[Replicate()])
        x.sum().backward()
        params = [param for block in blocks for param in block.parameters()]
        grads.append([grad.full_tensor() for param in params if isinstance(grad := param.grad, DTensor)])
    whole = 4 * 8 * 4
    return grads, copied.num_bytes, 3 * (2 * whole + 2 * whole // 2)


def test_divided_tensors_return_in_their_ranks() -> None:
    """As tensor parallelism saves them: each rank copies its own part, and no parameter."""
    for (plain, offloaded), copied, saved in on_ranks(2, divided_gradients):
        assert len(plain) == 6
        assert all(torch.equal(one, two) for one, two in zip(plain, offloaded, strict=True))
        assert copied == saved


def test_expanded_tensors_are_copied_once() -> None:
    class Repeated(nn.Module):
        def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            return x * mask

    block, mask = Repeated(), torch.rand(1, 8, 8)
    offload_blocks([block], CPU)
    with CopiedBytes() as copied:
        y = block(torch.randn(16, 8, 8, requires_grad=True), mask.expand(16, 8, 8))
    assert copied.num_bytes == mask.nbytes
    y.sum().backward()


def test_what_is_changed_in_place_is_an_error_as_it_is_without_offload() -> None:
    def changed(x: torch.Tensor) -> torch.Tensor:
        weights = torch.ones(8)
        y = x * weights
        weights.add_(1)
        return y

    for num_blocks in (1, 3):  # still on the device, and gone
        blocks, x = [Computed(changed) for _ in range(num_blocks)], torch.randn(4, 8)
        offload_blocks(blocks, CPU)
        for block in blocks:
            x = block(x)
        with pytest.raises(RuntimeError, match="modified by an in-place operation after the block used it"):
            x.sum().backward()


def test_a_block_that_fails_leaves_nothing_behind() -> None:
    def fails(x: torch.Tensor) -> torch.Tensor:
        raise ValueError(str((x * x).shape))

    block = Computed(fails)
    offload_blocks([block], CPU)
    gc.disable()
    try:
        with pytest.raises(ValueError, match="4, 8"):
            block(torch.randn(4, 8))
        assert not [saved for saved in gc.get_objects() if type(saved) is _SavedTensor]
    finally:
        gc.enable()
