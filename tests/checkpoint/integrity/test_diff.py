from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fsdp_shard.checkpoint.conversion import convert
from fsdp_shard.checkpoint.integrity.diff import diff
from fsdp_shard.checkpoint.integrity.diff_report import TensorDifference
from fsdp_shard.checkpoint.integrity.numeric_errors import Errors, decode
from fsdp_shard.checkpoint.integrity.verify import verify
from fsdp_shard.checkpoint.io.safetensors_format import from_torch_name
from fsdp_shard.errors import CheckpointError
from tests.checkpoint.files import Tensors, random_tensor, raw_bytes, write_huggingface
from tests.support.tiny import llama_config, save_adapter

_DTYPES = (
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.bool),
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint64, torch.uint32, torch.uint16, torch.uint8),
)


def differences(tmp_path: Path, one: Tensors, two: Tensors) -> dict[str, TensorDifference]:
    report = diff(write_huggingface(tmp_path / "a", one), write_huggingface(tmp_path / "b", two))
    json.dumps(report.to_dict(), allow_nan=False)
    return {found.name: found for found in report.differences}


@pytest.mark.parametrize("dtype", _DTYPES, ids=str)
def test_numbers_are_decoded_as_torch_does(dtype: torch.dtype) -> None:
    tensor = random_tensor((777,), dtype)
    found = decode(from_torch_name(str(dtype)), memoryview(bytearray(raw_bytes(tensor))))
    wide = "complex128" if dtype.is_complex else "float64"
    with np.errstate(invalid="ignore"):  # a signalling NaN becomes a quiet one
        numbers = torch.from_numpy(found.astype(wide))
    assert torch.equal(numbers.nan_to_num(7), tensor.to(getattr(torch, wide)).nan_to_num(7))


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("lora_alpha", 500, "lora_alpha is 8 and 500"),
        ("lora_alpha", 0, "lora_alpha is 8 and 0"),
        ("use_rslora", True, "use_rslora is False and True"),
        ("rank_pattern", {"q_proj": 4}, "rank_pattern is {} and {'q_proj': 4}"),
    ],
)
def test_adapters_of_equal_matrices_and_other_settings(
    tiny_model: Path, tmp_path: Path, name: str, value: Any, says: str
) -> None:
    one = save_adapter(tmp_path / "one", tiny_model)
    two = shutil.copytree(one, tmp_path / "two")
    settings = json.loads((two / "adapter_config.json").read_text())
    assert diff(one, two).is_equal
    assert verify(one, two).is_sound
    assert not (*diff(one, two).notes, *verify(one, two).notes)
    (two / "adapter_config.json").write_text(json.dumps(settings | {"base_model_name_or_path": "other"}))
    assert diff(one, two).is_equal, "one model may have two names"
    assert str(verify(one, two)).startswith(f"The adapters name different base models, {tiny_model} and other, which")
    assert "different base models" in diff(one, two).to_text()
    # What has no part in it: null is the default, and another order of targets is the same.
    settings |= {"use_dora": None, "target_modules": sorted(settings["target_modules"], reverse=True)}
    (two / "adapter_config.json").write_text(json.dumps(settings))
    assert diff(one, two).is_equal
    (two / "adapter_config.json").write_text(json.dumps(settings | {name: value}))
    report = diff(one, two)
    assert not report.is_equal
    assert says in report.to_text()
    (problem,) = verify(one, two).problems
    assert says in problem.message


def test_equal_checkpoints_of_two_formats(tmp_path: Path) -> None:
    tensors = {f"w{number}": random_tensor((3, 5), dtype) for number, dtype in enumerate(_DTYPES)}
    source = write_huggingface(tmp_path / "source", tensors | {"empty": torch.zeros(0, 3)})
    convert(source, tmp_path / "ranks", format="sharded", ranks=2)
    report = diff(source, tmp_path / "ranks")
    assert report.is_equal
    assert report.num_equal == len(_DTYPES) + 1
    assert len(report.to_text().splitlines()) == 1
    assert "are equal, byte for byte" in report.to_text()


def test_errors_are_those_that_torch_finds(tmp_path: Path) -> None:
    a = torch.randn(400, 1000, generator=torch.Generator().manual_seed(0))
    b = a.clone()
    b[100:200] += 1e-3 * torch.randn(100, 1000, generator=torch.Generator().manual_seed(1))
    b[399, 999] = -5
    found = differences(tmp_path, {"w": a, "same": a[0].clone()}, {"w": b, "same": a[0].clone()})["w"]
    x, y = a.double(), b.double()
    assert found.num_different == int((a != b).sum())
    assert found.num_special == 0
    assert found.max_absolute == float((x - y).abs().max())
    assert found.max_relative == float(((x - y).abs() / torch.maximum(x.abs(), y.abs())).max())
    assert found.cosine == pytest.approx(float((x * y).sum() / (x.norm() * y.norm())), abs=1e-12)
    assert found.worst == (399, 999)


def test_a_cast_copy(tmp_path: Path) -> None:
    tensor = torch.randn(300, 300)
    found = differences(
        tmp_path, {"w": tensor, "one": torch.ones(3)}, {"w": tensor.bfloat16(), "one": torch.ones(3).bfloat16()}
    )
    assert found["w"].dtypes == ("F32", "BF16")
    assert found["w"].max_absolute == float((tensor - tensor.bfloat16().float()).abs().max())
    assert found["w"].max_relative is not None
    assert found["w"].max_relative <= 2**-8
    assert (found["one"].num_different, found["one"].max_absolute, found["one"].cosine) == (0, 0.0, 1.0)


@pytest.mark.parametrize(
    ("one", "two", "expected"),
    [
        # (num_different, num_special, max_absolute, max_relative, cosine)
        ([1.0, math.nan], [1.0, math.nan], None),
        ([0.0, 2.0], [-0.0, 2.0], (0, 0, 0.0, 0.0, 1.0)),
        ([0.0, 0.0], [0.0, -0.0], (0, 0, 0.0, 0.0, 1.0)),
        ([0.0, 0.0], [3.0, 4.0], (2, 0, 4.0, 1.0, 0.0)),
        ([3.0, 4.0], [-3.0, -4.0], (2, 0, 8.0, 2.0, -1.0)),
        ([1.0, math.nan], [1.0, 5.0], (1, 1, 0.0, 0.0, 1.0)),
        ([1.0, math.inf], [1.0, -math.inf], (1, 1, 0.0, 0.0, 1.0)),
        ([2.0, math.inf, math.nan], [1.0, math.inf, math.nan], (1, 0, 1.0, 0.5, 1.0)),
    ],
)
def test_special_numbers(one: list[float], two: list[float], expected: object, tmp_path: Path) -> None:
    found = differences(tmp_path, {"w": torch.tensor(one)}, {"w": torch.tensor(two)})
    if expected is None:
        assert not found
        return
    w = found["w"]
    assert (w.num_different, w.num_special, w.max_absolute, w.max_relative, w.cosine) == expected


def test_the_largest_doubles_stay_numbers() -> None:
    errors = Errors()
    a = torch.tensor([1.7e308, 1.0], dtype=torch.float64).numpy()
    errors.add(a, -a, 0)
    assert errors.max_absolute == pytest.approx(1.797e308, rel=1e-3)
    assert errors.num_special == 0
    assert errors.cosine is None


def test_integers_booleans_and_complex_numbers(tmp_path: Path) -> None:
    large = torch.tensor([2**62, -(2**63), 5])
    one = {"i": large, "u": torch.tensor([3, 250], dtype=torch.uint8), "b": torch.tensor([True, False])}
    two = {
        "i": large + torch.tensor([1, 0, 0]),
        "u": torch.tensor([250, 3], dtype=torch.uint8),
        "b": torch.tensor([True, True]),
    }
    c = torch.tensor([3 + 4j, 1j])
    found = differences(tmp_path, one | {"c": c}, two | {"c": c * torch.tensor([0, 1])})
    assert (found["i"].num_different, found["i"].max_absolute, found["i"].worst) == (1, 1.0, (0,))
    assert found["u"].max_absolute == 247
    assert (found["b"].num_different, found["b"].max_absolute) == (1, 1.0)
    assert (found["c"].num_different, found["c"].max_absolute) == (1, 5.0)
    other = differences(tmp_path / "wide", {"i": large}, {"i": torch.tensor([-(2**63), 2**63 - 1, 5])})["i"]
    assert other.max_absolute == pytest.approx(2.0**64)


def layers(count: int, change: float = 0.0) -> dict[str, torch.Tensor]:
    tensors = {"embed.weight": torch.ones(4, 4)}
    for layer in range(count):
        for part in ("attn.q.weight", "attn.k.weight", "mlp.up.weight", "mlp.down.weight", "norm.weight"):
            tensors[f"layers.{layer}.{part}"] = torch.ones(4) + change * layer
    return tensors


def test_what_is_told_of_many_tensors(tmp_path: Path) -> None:
    one, two = layers(200), layers(200, 0.5)
    one |= {f"heads.{n}.weight": torch.zeros(3) for n in range(400)}
    two |= {"lm_head.weight": torch.ones(2), "embed.weight": torch.ones(4, 5)}
    report = diff(write_huggingface(tmp_path / "a", one), write_huggingface(tmp_path / "b", two))
    assert len(report.missing) == 400
    assert [spec.name for spec in report.extra] == ["lm_head.weight"]
    assert report.num_equal == 5
    text = report.to_text()
    lines = text.splitlines()
    assert len(lines) < 75
    assert "only in A: 400 tensors, 4.69 KiB" in lines
    assert "  heads" in lines
    assert "    0..399 (400 alike)" in lines
    assert "only in B: 1 tensor, 8 B" in lines
    assert "  embed.weight  4 x 4 in A, 4 x 5 in B" in lines
    first = lines.index("layers.199")
    assert first < lines.index("layers.198")
    assert lines[first + 1].split() == ["attn.k.weight", "99.5", "0.99", "1", "100.0%", "of", "4"]
    assert "  2 more, at most 99.5" in lines
    assert "189 more layers and modules, at most 94.5; --all shows them" in lines
    assert lines[-1].startswith("1,397 of 1,402 tensors differ (")
    assert len(report.to_text(everything=True).splitlines()) > 1200


def test_tied_tensors_are_compared_once(tmp_path: Path) -> None:
    tensor = torch.randn(4)
    tied = write_huggingface(tmp_path / "tied", {"embed": tensor}, head="embed")
    twice = write_huggingface(tmp_path / "twice", {"embed": tensor, "head": tensor.clone()})
    assert diff(tied, twice).is_equal
    assert diff(tied, tied).num_equal == 1


def test_an_adapter_beside_its_base_is_not_passed_over(tmp_path: Path) -> None:
    """What a wrapper of peft has in its state dict; only the adapters of the two differ."""
    for name, factor in (("a", 1.0), ("b", 2.0)):
        adapted = {"lora_A.default.weight": torch.full((2, 4), factor), "lora_B.default.weight": torch.ones(4, 2)}
        (tmp_path / name).mkdir()
        tensors = {"base_model.model.q.base_layer.weight": torch.ones(4, 4)}
        tensors |= {f"base_model.model.q.{key}": value for key, value in adapted.items()}
        torch.save(tensors, tmp_path / name / "pytorch_model.bin")
    for compare in (diff, verify):
        with pytest.raises(CheckpointError, match="a holds 2 tensors of an adapter together with the weights of its"):
            compare(tmp_path / "a", tmp_path / "b")
    assert verify(tmp_path / "a").is_sound, "alone, nothing is compared"
    (tmp_path / "a" / "config.json").write_text(json.dumps(llama_config().to_dict(), default=str))
    report = verify(tmp_path / "a")
    assert "a holds 2 tensors of an adapter together" in report.problems[0].message
