"""The Triton kernel against operators of torch, in Triton's interpreter, where Triton is installed."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

from tests.support.commands import run

_PROGRAM = """
import torch
from fsdp_shard.models import QUANTIZATION_CODES, nf4_kernel
from fsdp_shard.models.quantized_linear import _levels

code = QUANTIZATION_CODES["nf4"]
for num_weights in (1, 63, 64, 65, 64 * 64, 64 * 64 * 3 + 17):
    rows = code.encode(torch.randn(num_weights))
    for dtype in (torch.float32, torch.float16):  # the interpreter cuts bfloat16 off instead of rounding
        decoded = nf4_kernel.decode_nf4(rows, _levels(rows.device), num_weights, dtype)
        assert torch.equal(decoded, code.decode(rows, num_weights, dtype)), (num_weights, dtype)
assert nf4_kernel.is_usable(torch.device("cpu"))
"""


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
def test_the_kernel_decodes_bit_by_bit(tmp_path: Path) -> None:
    done = run([sys.executable, "-c", _PROGRAM], tmp_path, TRITON_INTERPRET="1")
    assert done.status == 0, done.err
