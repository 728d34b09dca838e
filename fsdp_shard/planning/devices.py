"""The devices that a run would use: the settings `device.*`, presets, and this machine's GPU.

Presets are the YAML files in conf/device/; each figure cites its source. Imports no torch until it queries a GPU.
"""

from dataclasses import dataclass, fields

from fsdp_shard.distributed import device_preset, preset_of
from fsdp_shard.errors import ConfigError
from fsdp_shard.utils import Parsed, parse_size, setting

_LEAST_BYTES = 1000  # fewer mean a forgotten unit


def _size_or_none(size: str | None, name: str) -> int | None:
    if size is None:
        return None
    num_bytes = parse_size(size, name)
    if num_bytes < _LEAST_BYTES:
        raise ConfigError(f"{name}={size} is {num_bytes} bytes; write a unit, such as {size}GB.")
    return num_bytes


@dataclass
class DeviceConfig:
    """The devices of the planned run, with the figures of a preset or of the user."""

    kind: str | None = setting(
        None,
        "Kind of the devices. Default: gpu, if any figure other than device.host_memory is set.",
        choices=("gpu", "cpu"),
    )
    memory: str | None = setting(None, "Memory per device, such as 80GiB, to check whether the run fits.")
    bf16_flops: float | None = setting(
        None, "Dense bfloat16 operations per second per device, such as 989.4e12.", above=0.0
    )
    tf32_flops: float | None = setting(None, "Dense TF32 operations per second (train.tf32=true).", above=0.0)
    fp32_flops: float | None = setting(None, "Float32 operations per second.", above=0.0)
    memory_bandwidth: str | None = setting(None, "Memory bandwidth of a device in bytes per second, such as 3.35TB.")
    link_bandwidth: str | None = setting(
        None, "Bytes per second in each direction between devices of a machine, per device, such as 450GB."
    )
    network_bandwidth: str | None = setting(
        None, "Bytes per second in each direction between machines, per device, such as 50GB."
    )
    host_bandwidth: str | None = setting(
        None, "Bytes per second in each direction between a device and host memory, such as 64GB."
    )
    host_memory: str | None = setting(
        None,
        "Host memory per machine, such as 2TB, to check whether offloaded state and the copies of saves fit.",
    )
    num_per_machine: int | None = setting(
        None, "Number of devices per machine; fewer if launch.nodes requires it.", minimum=1
    )
    disk_write_bandwidth: str | None = setting(
        None, "Disk write bandwidth of a machine in bytes per second, such as 4GB."
    )
    disk_read_bandwidth: str | None = setting(
        None, "Disk read bandwidth of a machine in bytes per second, such as 6.8GB."
    )

    memory_bytes = Parsed("memory", _size_or_none)
    memory_bytes_per_second = Parsed("memory_bandwidth", _size_or_none)
    link_bytes_per_second = Parsed("link_bandwidth", _size_or_none)
    network_bytes_per_second = Parsed("network_bandwidth", _size_or_none)
    host_memory_bytes = Parsed("host_memory", _size_or_none)
    host_bytes_per_second = Parsed("host_bandwidth", _size_or_none)
    disk_write_bytes_per_second = Parsed("disk_write_bandwidth", _size_or_none)
    disk_read_bytes_per_second = Parsed("disk_read_bandwidth", _size_or_none)

    @property
    def planned_kind(self) -> str | None:
        """`kind`, or `gpu` if it is not set but figures are; None if nothing identifies the devices."""
        names = {item.name for item in fields(DeviceConfig)} - {"kind", "host_memory"}
        is_given = any(getattr(self, name) is not None for name in names)
        return self.kind or ("gpu" if is_given else None)


@dataclass
class AutoDeviceConfig(DeviceConfig):
    """This machine's GPU, if there is a preset for it; otherwise only the explicit settings, without guesses."""


@dataclass
class Hardware(DeviceConfig):
    """The figures of a device and its machine that a plan uses; `name` is for display."""

    name: str = ""

    @property
    def flops(self) -> dict[str, float]:
        """The known operations per second, by precision."""
        found = {precision: getattr(self, f"{precision}_flops") for precision in ("bf16", "tf32", "fp32")}
        return {precision: value for precision, value in found.items() if value is not None}

    @property
    def is_whole(self) -> bool:
        """Whether every figure that step times depend on is known."""
        rates = (self.memory_bandwidth, self.link_bandwidth, self.network_bandwidth, self.host_bandwidth)
        return len(self.flops) == 3 and None not in (*rates, self.num_per_machine)


def hardware_of(config: DeviceConfig, *, ranks_per_node: int | None = None) -> Hardware:
    """Return the figures of `config`, completed by this machine's GPU with `device=auto`.

    Args:
        config: The settings `device.*`.
        ranks_per_node: Number of ranks per machine, if the run sets it.
    """
    figures = {item.name: value for item in fields(DeviceConfig) if (value := getattr(config, item.name)) is not None}
    name = ""
    if isinstance(config, AutoDeviceConfig) and (preset := preset_of(gpu := _gpu_name())):
        name, figures = gpu, device_preset(preset) | figures
    counts = [count for count in (figures.get("num_per_machine"), ranks_per_node) if count is not None]
    return Hardware(**figures | {"num_per_machine": min(counts, default=None), "name": name})


def check_device(config: DeviceConfig, hardware: Hardware, missing: list[str]) -> None:
    """Raise ConfigError for time figures that have no effect because others are missing.

    Args:
        config: The settings `device.*`.
        hardware: The resulting hardware.
        missing: The missing settings that the time requires.
    """
    alone = ("kind", "memory", "host_memory")
    given = [item.name for item in fields(config) if item.name not in alone and getattr(config, item.name) is not None]
    if given and missing and not hardware.name:
        value = getattr(config, given[0])
        value = f"{value:g}" if isinstance(value, float) else value
        raise ConfigError(
            f"device.{given[0]}={value} has no effect, because a time needs "
            f"{', '.join(f'device.{name}' for name in missing)} too; set that, or a preset such as device=h100."
        )


def _gpu_name() -> str:
    """The name of this machine's first GPU; empty if there is none."""
    import torch

    return torch.cuda.get_device_name(0) if torch.cuda.is_available() else ""
