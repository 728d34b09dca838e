"""The names of GPUs, and the presets that hold their figures."""

import pytest

from fsdp_shard.distributed.hardware import _PRESETS, device_preset, peak_flops, preset_of


@pytest.mark.parametrize(
    ("gpu", "peak"),
    [
        ("NVIDIA GB200", 2.5e15),
        ("NVIDIA B200", 2.25e15),
        ("NVIDIA H200", 989.4e12),
        ("NVIDIA H200 NVL", 989.4e12),
        ("NVIDIA GH200 480GB", 989.4e12),
        ("NVIDIA H100 80GB HBM3", 989.4e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H100 NVL", 835e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA A100-PCIE-40GB", 312e12),
        ("NVIDIA L40S", 362.05e12),
        ("NVIDIA L4", 121e12),
        ("NVIDIA A10", 125e12),
        ("AMD Instinct MI300X", 1307.4e12),
        ("AMD Instinct MI250X", 191.5e12),
        ("NVIDIA GeForce RTX 4090", 165.2e12),
        ("NVIDIA GeForce RTX 4090 D", None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA GeForce GTX 1080", None),
    ],
)
def test_peaks_of_devices(gpu: str, peak: float | None) -> None:
    assert peak_flops(gpu) == peak


@pytest.mark.parametrize("gpu", _PRESETS)
def test_a_preset_has_the_peak_of_its_gpu(gpu: str) -> None:
    name = preset_of(gpu)
    assert name is not None
    assert float(device_preset(name)["bf16_flops"]) == peak_flops(gpu)


def test_gpus_of_the_same_family_have_no_preset() -> None:
    assert preset_of("NVIDIA H100 PCIe") is None
    assert preset_of("NVIDIA A100-PCIE-40GB") is None
