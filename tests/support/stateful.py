"""An object with a state of any kind, as schedulers, scalers and loaders have."""

from __future__ import annotations

from typing import Any


class Stateful:
    """Returns `state` as its state dict, and takes over another one."""

    def __init__(self, state: Any) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state
