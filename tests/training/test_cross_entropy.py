"""The chunked loss is the plain one: value and gradient, whatever the chunks, masks, dtypes and shapes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F

from fsdp_shard.training.loss import cross_entropy as loss_module
from fsdp_shard.training.loss.cross_entropy import cross_entropy

NUM_TOKENS, VOCABULARY = 37, 101


@pytest.fixture(params=[1, 7, 10_000], ids="rows={}".format)
def rows_per_chunk(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    monkeypatch.setitem(loss_module._CHUNK_BYTES, "cpu", request.param * 4 * VOCABULARY)
    return request.param


def example(dtype: torch.dtype, ignored: float = 0.3) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    logits = (torch.randn(NUM_TOKENS, VOCABULARY, generator=generator) * 4).to(dtype).requires_grad_()
    labels = torch.randint(0, VOCABULARY, (NUM_TOKENS,), generator=generator)
    labels[torch.rand(NUM_TOKENS, generator=generator) < ignored] = -100
    return logits, labels


def plain(logits: torch.Tensor, labels: torch.Tensor, divisor: float) -> tuple[torch.Tensor, torch.Tensor]:
    value = F.cross_entropy(logits.float(), labels, ignore_index=-100, reduction="sum") / divisor
    return value.detach(), torch.autograd.grad(value, logits)[0]


@pytest.mark.parametrize("ignored", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equals_the_plain_loss(rows_per_chunk: int, dtype: torch.dtype, ignored: float) -> None:
    logits, labels = example(dtype, ignored)
    expected, expected_gradient = plain(logits, labels, 11.0)
    value = cross_entropy(logits, labels, 11.0)
    assert value.dtype == torch.float32
    value.backward()
    assert logits.grad is not None
    assert logits.grad.dtype == dtype
    torch.testing.assert_close(value.detach(), expected, rtol=1e-6, atol=0)
    # one unit in the last place: both round the same float32 number
    torch.testing.assert_close(
        logits.grad, expected_gradient, rtol=2e-6 if dtype == torch.float32 else 2**-8, atol=1e-9
    )
    if rows_per_chunk > NUM_TOKENS:
        assert value.item() == expected.item()
        assert torch.equal(logits.grad, expected_gradient)


def test_gradient_against_finite_differences(rows_per_chunk: int) -> None:
    logits, labels = example(torch.float32)
    cross_entropy(logits, labels, 5.0).backward()
    assert logits.grad is not None
    direction = torch.randn(logits.shape, generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        ahead, behind = (cross_entropy(logits + sign * 1e-2 * direction, labels, 5.0) for sign in (1, -1))
    slope = float((ahead - behind) / 2e-2)
    assert slope == pytest.approx(float((logits.grad * direction).sum()), rel=1e-3)


def test_chain_rule_on_both_sides() -> None:
    logits, labels = example(torch.float32)
    weight = torch.randn(VOCABULARY, VOCABULARY, generator=torch.Generator().manual_seed(3), requires_grad=True)

    def gradient(value: torch.Tensor) -> torch.Tensor:
        return torch.autograd.grad(3.0 * value * value, weight)[0]

    x = logits.detach() * 0.1
    ours = gradient(cross_entropy(x @ weight, labels, 7.0))
    theirs = gradient(F.cross_entropy(x @ weight, labels, reduction="sum") / 7.0)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_leading_dimensions_and_logits_are_left_alone() -> None:
    logits, labels = example(torch.float32)
    before = logits.detach().clone()
    nested = cross_entropy(logits[:36].view(4, 9, VOCABULARY), labels[:36].view(4, 9), 1.0)
    assert nested.item() == pytest.approx(plain(logits[:36], labels[:36], 1.0)[0].item(), rel=1e-6)
    nested.backward()
    assert torch.equal(logits.detach(), before)


def test_a_second_backward_is_refused() -> None:
    logits, labels = example(torch.float32)
    value = cross_entropy(logits, labels, 1.0)
    value.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="already used"):
        value.backward()


def test_no_gradient_is_made_when_none_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    logits, labels = example(torch.float32)
    monkeypatch.setattr(torch.autograd, "grad", None)
    with torch.no_grad():
        value = cross_entropy(logits, labels, 1.0)
    monkeypatch.undo()
    assert value.item() == pytest.approx(plain(logits, labels, 1.0)[0].item(), rel=1e-6)


def test_infinite_and_nan_logits_are_not_hidden() -> None:
    for bad in (float("nan"), float("inf")):
        logits, labels = example(torch.float32, ignored=0.0)
        with torch.no_grad():
            logits[3, 4] = bad
        assert not torch.isfinite(cross_entropy(logits, labels, 1.0))
