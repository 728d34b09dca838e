"""The devices of a plan: presets with their sources, what is known of this machine, and settings without effect."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest

from fsdp_shard.errors import ConfigError
from fsdp_shard.planning import AutoDeviceConfig, DeviceConfig, devices
from fsdp_shard.planning.devices import Hardware, check_device, hardware_of
from fsdp_shard.utils import shipped_directory
from tests.planning.device_presets import device, preset
from tests.support.runs import run_recipe
from tests.support.tiny import llama_config

PRESETS = ("h100", "h200", "b200", "a100", "l40s", "rtx4090", "cpu")


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_complete_and_say_where_each_figure_is_from(name: str) -> None:
    lines = (shipped_directory("conf") / "device" / f"{name}.yaml").read_text().splitlines()
    found = (re.fullmatch(r"(\w+): [^#]+  # (.{8,})", line) for line in lines)
    figures = [match[1] for match in found if match is not None]
    assert ["kind", *figures] == [item.name for item in fields(DeviceConfig)]
    kind = "kind: cpu" if name == "cpu" else "kind: gpu"
    assert lines[:5] == [lines[0], "defaults:", "  - custom", "  - _self_", kind]
    assert len(lines) == 5 + len(figures)
    hardware = preset(name)
    assert None not in vars(hardware).values()
    assert hardware.flops["bf16"] >= hardware.flops["tf32"] >= hardware.flops["fp32"] > 1e12


def test_figures_that_are_known() -> None:
    """Of dense products: with sparsity, data sheets give twice as many."""
    h100 = preset("h100")
    assert (h100.memory_bytes, h100.memory_bytes_per_second, h100.link_bytes_per_second) == (
        81_559 << 20,
        3350 * 10**9,
        450 * 10**9,
    )
    assert h100.flops == {"bf16": 989.4e12, "tf32": 494.7e12, "fp32": 67e12}
    assert preset("a100").flops["bf16"] == 312e12
    assert preset("4090") == preset("rtx4090")


def test_a_preset_can_be_changed_and_memory_needs_none() -> None:
    assert hardware_of(device("device=h100", "device.memory=96GB")).memory_bytes == 96 * 10**9
    assert hardware_of(device("device.memory=80GB")).memory_bytes == 80 * 10**9
    assert preset("h200").num_per_machine == 8
    assert hardware_of(device("device=h200"), ranks_per_node=4).num_per_machine == 4
    assert hardware_of(device("device=h200"), ranks_per_node=16).num_per_machine == 8
    for overrides, says in (
        (["device=h10"], "h100"),
        (["device=h100", "device.link_bandwidth=fast"], r"device\.link_bandwidth=fast is not a size"),
        (["device=h100", "device.bf16_flops=0"], r"device\.bf16_flops"),
    ):
        with pytest.raises(ConfigError, match=says):
            device(*overrides)


def test_a_preset_says_whether_it_is_a_gpu_whatever_its_figures() -> None:
    for figure in ("memory_bandwidth=400GB", "host_bandwidth=400GB", "memory=6GB"):
        assert device("device=cpu", f"device.{figure}").planned_kind == "cpu"
    assert device("device=h100", "device.host_bandwidth=3.35TB").planned_kind == "gpu"
    assert (device("device.memory=8GB").planned_kind, device("device.host_memory=8GB").planned_kind) == ("gpu", None)
    device("device=cpu", "launch.device=cpu")
    device("device.memory=8GB", "launch.device=cpu")
    for ranks, preset_of, kind in (("cpu", "h100", "gpu"), ("cuda", "cpu", "cpu")):
        with pytest.raises(ConfigError, match=rf"launch\.device={ranks} contradicts device\.kind={kind}"):
            device(f"device={preset_of}", f"launch.device={ranks}")


def test_of_this_machine_only_a_gpu_with_a_preset_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(device(), AutoDeviceConfig)
    monkeypatch.setattr(devices, "_gpu_name", lambda: "")
    assert hardware_of(device()) == Hardware()
    monkeypatch.setattr(devices, "_gpu_name", lambda: "NVIDIA H100 PCIe")
    assert hardware_of(device()) == Hardware()
    monkeypatch.setattr(devices, "_gpu_name", lambda: "NVIDIA H200")
    found = hardware_of(device("device.memory=100GB"))
    assert (found.name, found.memory_bytes, found.flops) == ("NVIDIA H200", 100 * 10**9, preset("h200").flops)
    assert hardware_of(device("device=h100")).memory_bytes == 81_559 << 20


def test_figures_without_effect_are_refused() -> None:
    given = DeviceConfig(link_bandwidth="450GB")
    with pytest.raises(ConfigError, match=r"device\.link_bandwidth=450GB has no effect, .* device\.bf16_flops too"):
        check_device(given, hardware_of(given), ["bf16_flops"])
    check_device(given, hardware_of(given), [])
    check_device(DeviceConfig(memory="80GB"), Hardware(), ["bf16_flops"])


@pytest.mark.long
def test_a_plan_has_a_time_where_the_device_is_known(tmp_path: Path) -> None:
    model = tmp_path / "model"
    llama_config().save_pretrained(model)
    settings = [f"model.path={model}", "launch.ranks=4", "data.sequence_length=32", "shard.replicas=2"]
    known = run_recipe("plan", tmp_path / "known", *settings, "device=4090", "train.steps=7")
    assert known.status == 0, known.err
    step = known.result["step"]
    assert known.result["device_memory_bytes"] == 24_564 << 20
    assert {"compute", "network", "memory"} <= step["time"]["parts"].keys()
    assert step["time"]["bound_by"] == "network"
    assert [(each["collective"], each["over"]) for each in step["sent"]] == [
        ("all-gather", "shard"), ("reduce-scatter", "shard"), ("all-reduce", "replicate"),
    ]  # fmt: skip
    assert "The 7 steps take at least" in known.out
    assert "bound by network" in known.out
    plain = run_recipe("plan", tmp_path / "plain", *settings, "device=custom", "device.memory=80GB")
    assert plain.status == 0, plain.err
    assert plain.result["step"]["flops"] == step["flops"]
    assert plain.result["step"]["time"] is None
    assert "No time of a step" in plain.out
    useless = run_recipe("plan", tmp_path / "useless", *settings, "device=custom", "device.bf16_flops=1e15")
    assert (useless.status, useless.err.count("error: ")) == (2, 1)
    assert "device.bf16_flops=1e+15 has no effect" in useless.err
