"""Shares the result of a run's check on one rank of a machine with its other ranks, which need not repeat it.

A check sets the settings that depend on others, and locates the model, so that of a thousand ranks only few query the
hub.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from fsdp_shard import config as configs
from fsdp_shard.checkpoint import Location
from fsdp_shard.utils import Derived, walk

C = TypeVar("C", bound=configs.RunConfig)


class MachineCheck(Generic[C]):
    """A check of a config whose result can be sent to other processes of this machine.

    Args:
        check: Checks a config; it may set settings, and locates `config.source`.
    """

    def __init__(self, check: Callable[[C], None]) -> None:
        self._check = check

    def check(self, config: C) -> str:
        """Check `config`; return the settings that the check changed, and the model's location, as JSON."""
        before = {name: value for name, _, value in walk(config)}
        self._check(config)
        changed = {name: value for name, _, value in walk(config) if value != before[name]}
        kept = getattr(type(config), "source", None)  # of two commands
        source: Location | None = kept.kept(config) if isinstance(kept, Derived) else None
        return json.dumps({"settings": changed, "source": source and source.to_json()})

    def accept(self, config: C, settled: str) -> None:
        """Apply to `config` a result of `check` from another process of this machine."""
        found: dict[str, Any] = json.loads(settled)
        for name, value in found["settings"].items():
            *sections, last = name.split(".")
            owner: Any = config
            for section in sections:
                owner = getattr(owner, section)
            setattr(owner, last, value)
        if found["source"] is not None:
            config.source = Location.from_json(found["source"])  # type: ignore[attr-defined]  # as above
