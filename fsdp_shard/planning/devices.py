"""What is known about the devices that a run would have: the settings `device.*`, presets, and this machine's GPU.

Presets are the YAML files in conf/device/, each figure with its source. Imports no torch before it looks at a GPU.
"""

from dataclasses import dataclass, fields

from fsdp_shard.distributed import device_preset
from fsdp_shard.errors import ConfigError
from fsdp_shard.utils import Parsed, parse_size, setting

# The names that torch has for the GPUs of the presets. Others of the same family (PCIe, NVL, 40 GB) have other figures.
_PRESETS = {
    "NVIDIA H100 80GB HBM3": "h100",
    "NVIDIA H200": "h200",
    "NVIDIA B200": "b200",
    "NVIDIA A100-SXM4-80GB": "a100",
    "NVIDIA L40S": "l40s",
    "NVIDIA GeForce RTX 4090": "rtx4090",
}

_LEAST_BYTES = 1000  # fewer are a number whose unit was forgotten


def _size_or_none(size: str | None, name: str) -> int | None:
    if size is None:
        return None
    num_bytes = parse_size(size, name)
    if num_bytes < _LEAST_BYTES:
        raise ConfigError(f"{name}={size} is {num_bytes} bytes; write a unit, such as {size}GB.")
    return num_bytes


@dataclass
class DeviceConfig:
    """The devices that the run would have, with the figures of a preset or of the user."""

    kind: str | None = setting(
        None, "What the devices are. Default: gpu, if any figure but device.host_memory is set.", choices=("gpu", "cpu")
    )
    memory: str | None = setting(None, "Memory of each device, such as 80GiB, to check whether the run fits.")
    bf16_flops: float | None = setting(
        None, "Dense bfloat16 operations per second of a device, such as 989.4e12.", above=0.0
    )
    tf32_flops: float | None = setting(None, "Dense TF32 operations per second (train.tf32=true).", above=0.0)
    fp32_flops: float | None = setting(None, "Float32 operations per second.", above=0.0)
    memory_bandwidth: str | None = setting(
        None, "Bytes per second that a device reads or writes in its memory, such as 3.35TB."
    )
    link_bandwidth: str | None = setting(
        None, "Bytes per second in each direction between a device and others of its machine, such as 450GB."
    )
    network_bandwidth: str | None = setting(
        None, "Bytes per second in each direction between machines, for each device, such as 50GB."
    )
    host_bandwidth: str | None = setting(
        None, "Bytes per second in each direction between a device and host memory, such as 64GB."
    )
    host_memory: str | None = setting(
        None,
        "Host memory of a machine, such as 2TB, to check whether what is offloaded and what saves copy fits.",
    )
    num_per_machine: int | None = setting(
        None, "Number of devices of a machine; fewer if launch.nodes says so.", minimum=1
    )
    disk_write_bandwidth: str | None = setting(None, "Bytes per second that a machine writes to disk, such as 4GB.")
    disk_read_bandwidth: str | None = setting(None, "Bytes per second that a machine reads from disk, such as 6.8GB.")

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
        """`kind`, or `gpu` where it is open and figures are given; None where nothing says what the devices are."""
        names = {item.name for item in fields(self)} - {"kind", "host_memory"}
        is_given = any(getattr(self, name) is not None for name in names)
        return self.kind or ("gpu" if is_given else None)


@dataclass
class AutoDeviceConfig(DeviceConfig):
    """This machine's GPU, if there is a preset for it; else only what is set is known, and nothing is guessed."""


@dataclass
class Hardware(DeviceConfig):
    """The figures of a device and its machine as a plan uses them; `name` is what it is, to print."""

    name: str = ""

    @property
    def flops(self) -> dict[str, float]:
        """Operations per second by precision, of those that are known."""
        found = {precision: getattr(self, f"{precision}_flops") for precision in ("bf16", "tf32", "fp32")}
        return {precision: value for precision, value in found.items() if value is not None}

    @property
    def is_whole(self) -> bool:
        """Whether all is known that the time of any step depends on."""
        rates = (self.memory_bandwidth, self.link_bandwidth, self.network_bandwidth, self.host_bandwidth)
        return len(self.flops) == 3 and None not in (*rates, self.num_per_machine)


def hardware_of(config: DeviceConfig, *, ranks_per_node: int | None = None) -> Hardware:
    """The figures of `config`, with those of this machine's GPU where `device=auto` leaves them open.

    Args:
        config: The settings `device.*`.
        ranks_per_node: Number of ranks on each machine, if the run says so.
    """
    figures = {item.name: value for item in fields(DeviceConfig) if (value := getattr(config, item.name)) is not None}
    name = ""
    if isinstance(config, AutoDeviceConfig) and (gpu := _gpu_name()) in _PRESETS:
        name, figures = gpu, device_preset(_PRESETS[gpu]) | figures
    counts = [count for count in (figures.get("num_per_machine"), ranks_per_node) if count is not None]
    return Hardware(**figures | {"num_per_machine": min(counts, default=None), "name": name})


def check_device(config: DeviceConfig, hardware: Hardware, missing: list[str]) -> None:
    """Raise ConfigError for figures of time that do nothing, because others are not known.

    Args:
        config: The settings `device.*`.
        hardware: What they come to.
        missing: The settings without which there is no time.
    """
    alone = ("kind", "memory", "host_memory")
    given = [item.name for item in fields(config) if item.name not in alone and getattr(config, item.name) is not None]
    if given and missing and not hardware.name:
        value = getattr(config, given[0])
        value = f"{value:g}" if isinstance(value, float) else value
        raise ConfigError(
            f"device.{given[0]}={value} would do nothing, because a time needs "
            f"{', '.join(f'device.{name}' for name in missing)} too; set that, or a preset such as device=h100."
        )


def _gpu_name() -> str:
    """The name of this machine's first GPU; empty if it has none."""
    import torch

    return torch.cuda.get_device_name(0) if torch.cuda.is_available() else ""
