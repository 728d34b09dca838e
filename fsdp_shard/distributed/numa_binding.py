"""Decides whether ranks are bound to the processors near their GPU, and describes why they are not."""

import os
import shutil
from pathlib import Path

from fsdp_shard.distributed.config import LaunchConfig
from fsdp_shard.distributed.hardware import count_gpus

_NODES = Path("/sys/devices/system/node")


def can_bind() -> bool:
    """Return whether torch can bind ranks: it requires the program numactl, although it does not run it."""
    return shutil.which("numactl") is not None


def wants_binding(settings: LaunchConfig) -> bool:
    """Return whether ranks started here should be bound, if possible."""
    binding, num_gpus = settings.numa_binding, 0 if settings.device == "cpu" else count_gpus()
    return binding != "none" and num_gpus >= (1 if binding == "node" else 2)


def describe_unbound(settings: LaunchConfig) -> list[str]:
    """On a rank that our launcher started, report that a missing program prevents the binding, if that matters."""
    from fsdp_shard.distributed.process_group import ATTEMPT

    has_one_node = len(list(_NODES.glob("node[0-9]*"))) < 2
    if ATTEMPT not in os.environ or has_one_node or can_bind() or not wants_binding(settings):
        return []
    return [
        f"launch.numa_binding={settings.numa_binding} binds no rank to the processors near its GPU: the program "
        f"numactl is not installed (apt-get install numactl)"
    ]
