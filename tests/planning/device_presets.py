"""Devices of a plan by the names of their presets."""

from __future__ import annotations

from fsdp_shard.config import PlanConfig, compose_jobs
from fsdp_shard.planning import DeviceConfig
from fsdp_shard.planning.devices import Hardware, hardware_of


def device(*overrides: str) -> DeviceConfig:
    """The device of a plan with these settings."""
    (job,) = compose_jobs(PlanConfig, ["model.path=x", *overrides], "plan")
    return job.config.device


def preset(name: str) -> Hardware:
    """What is known of a device by its preset's name."""
    return hardware_of(device(f"device={name}"))
