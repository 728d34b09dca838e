"""Weights as codes, against a plain implementation, and the layer that is made of them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fsdp_shard.models.quantized_linear import _NORMAL, QUANTIZATION_BLOCK, QUANTIZATION_CODES, QuantizedLinear
from tests.support.plain_codes import normal_levels, quantized

KINDS = ["int8", "nf4"]


def weights() -> torch.Tensor:
    """Random ones, with blocks of zeros, of tiny and of huge numbers, and a last block that is not full."""
    flat = torch.randn(9 * QUANTIZATION_BLOCK + 17, generator=torch.Generator().manual_seed(0))
    flat[QUANTIZATION_BLOCK : 2 * QUANTIZATION_BLOCK] = 0
    flat[2 * QUANTIZATION_BLOCK : 3 * QUANTIZATION_BLOCK] *= 1e-30
    flat[3 * QUANTIZATION_BLOCK : 4 * QUANTIZATION_BLOCK] *= 1e30
    return flat


@pytest.mark.parametrize(
    ("kind", "row_bytes", "worst", "typical"), [("int8", 68, 0.5 / 127, 0.01), ("nf4", 36, 0.153, 0.12)]
)
def test_codes_are_those_of_a_plain_implementation(kind: str, row_bytes: int, worst: float, typical: float) -> None:
    code, flat = QUANTIZATION_CODES[kind], weights()
    rows = code.encode(flat)
    plain_rows, plain_values = quantized(flat, kind)
    assert (rows.dtype, tuple(rows.shape)) == (torch.uint8, (10, row_bytes))
    assert rows.numpy().tobytes() == plain_rows
    decoded = code.decode(rows, len(flat), torch.float32)
    torch.testing.assert_close(decoded, plain_values, rtol=1e-6, atol=0)
    assert torch.equal(code.decode(rows, len(flat), torch.bfloat16), decoded.bfloat16())
    for block, found in zip(flat.split(QUANTIZATION_BLOCK), decoded.split(QUANTIZATION_BLOCK), strict=True):
        assert bool(((block - found).abs() <= worst * block.abs().max() * (1 + 1e-5)).all())
        assert float((block - found).double().norm()) <= typical * float(block.double().norm())
    assert torch.equal(code.encode(flat[3 * QUANTIZATION_BLOCK : 7 * QUANTIZATION_BLOCK]), rows[3:7])
    assert code.bits == 8 * row_bytes / QUANTIZATION_BLOCK


def test_levels_are_those_of_the_paper() -> None:
    assert normal_levels() == pytest.approx(_NORMAL, abs=1e-6)


def test_more_weights_than_are_decoded_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    code, flat = QUANTIZATION_CODES["nf4"], weights()
    whole = code.decode(code.encode(flat), len(flat), torch.float32)
    monkeypatch.setattr("fsdp_shard.models.quantized_linear._DECODED_AT_ONCE", 3 * QUANTIZATION_BLOCK)
    assert torch.equal(code.decode(code.encode(flat), len(flat), torch.float32), whole)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("held_as", [torch.uint8, torch.float32, torch.bfloat16])
def test_a_layer_computes_as_with_the_decoded_weight_and_keeps_only_bytes(kind: str, held_as: torch.dtype) -> None:
    torch.manual_seed(0)
    plain, inputs = nn.Linear(37, 11).requires_grad_(False), torch.randn(2, 5, 37)
    rows, decoded = quantized(plain.weight, kind)
    layer = QuantizedLinear(plain, QUANTIZATION_CODES[kind], held_as, torch.bfloat16)
    (held,) = (param for name, param in layer.named_parameters() if name == "quantized.rows")
    assert (held.is_meta, held.requires_grad, held.numel() * held.element_size()) == (True, False, len(rows))
    layer.quantized.rows = nn.Parameter(
        torch.frombuffer(bytearray(rows), dtype=torch.uint8).view(held.shape[0], -1).view(held_as), requires_grad=False
    )
    plain.weight.copy_(decoded)
    outcomes: list[tuple[torch.Tensor, ...]] = []
    kept: list[list[torch.Tensor]] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept[-1].append(tensor)
        return tensor

    for module in (plain, layer):
        given = inputs.clone().requires_grad_()
        kept.append([])
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            output = module(given)
        output.sin().sum().backward()
        assert given.grad is not None
        outcomes.append((output.detach(), given.grad))
    torch.testing.assert_close(outcomes[1], outcomes[0], rtol=1e-5, atol=1e-6)
    assert [tensor.data_ptr() for tensor in kept[0]] == [plain.weight.data_ptr()]
    assert [tensor.data_ptr() for tensor in kept[1]] == [layer.quantized.rows.data_ptr()]
    assert (layer.weight.dtype, tuple(layer.weight.shape), layer.weight.is_meta) == (torch.bfloat16, (11, 37), True)
