"""Places that a user names for modules. Pure. A block is not divided, and blocks with tied parameters get one place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from fsdp_shard.errors import PlanError
from fsdp_shard.inference.config import Device
from fsdp_shard.inference.device_map.device_plan import DevicePlan, device_name, is_streamed
from fsdp_shard.inference.device_map.tied_groups import Unit, checked_plan
from fsdp_shard.utils import nearest

if TYPE_CHECKING:
    from fsdp_shard.models import Block


def place_by_name(
    units: Sequence[Unit], mapping: Mapping[str, Device], budgets: Mapping[Device, int], prefetch: int
) -> DevicePlan:
    blocks = [block for unit in units for block in unit.blocks]
    _check_keys(blocks, mapping)
    gpus = [device for device in mapping.values() if isinstance(device, int)]
    main: Device = min(gpus) if gpus else "cpu"
    placement: dict[int, Device] = {}
    for unit in units:
        found = {block.fqn: _lookup(block.fqn, mapping) for block in unit.blocks}
        devices = {device for device in found.values() if device is not None}
        if not devices:
            raise PlanError(
                f"device_map names no device for {', '.join(unit.fqns)}; add it, or one for '*' as the rest."
            )
        if len(devices) > 1:
            where = ", ".join(f"{fqn}: {device_name(d)}" for fqn, d in found.items() if d is not None)
            raise PlanError(f"device_map divides blocks that share tied parameters ({where}); give them one device.")
        device = devices.pop()
        placement[id(unit)] = main if unit.pinned and is_streamed(device, main) else device
    return checked_plan(units, placement, main, budgets, prefetch)


def _check_keys(blocks: Sequence[Block], mapping: Mapping[str, Device]) -> None:
    known = [block.fqn for block in blocks]
    for key in mapping:
        if key == "" or any(_covers(key, fqn) for fqn in known):
            continue
        inside = next((block for block in blocks if not block.direct and _covers(block.fqn, key)), None)
        if inside is not None:
            raise PlanError(
                f"device_map has {key}, which would divide the block {inside.fqn} ({inside.cls}); name the block."
            )
        raise PlanError(f"device_map has {key}, which is no module with parameters{nearest(key, known)}.")


def _lookup(fqn: str, mapping: Mapping[str, Device]) -> Device | None:
    """The device of the longest key that covers `fqn`."""
    keys = [key for key in mapping if _covers(key, fqn)]
    return mapping[max(keys, key=len)] if keys else None


def _covers(key: str, fqn: str) -> bool:
    return key in ("", fqn) or fqn.startswith(key + ".")
