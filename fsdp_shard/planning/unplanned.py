"""Settings that change the memory of a run but are not planned."""

from collections.abc import Callable, Mapping
from typing import Any

from fsdp_shard.utils import in_yaml

# Name -> the value for which the plan is complete, and why other values are not planned.
_UNPLANNED: Mapping[str, tuple[Any, str]] = {
    "loss": (None, "a custom loss"),
    "model.kernels": ("none", "fused kernels keep less than what is planned"),
    "shard.compile": (False, "a compiler decides what is kept"),
    "train.neftune_alpha": (None, "the noise"),
    "train.profile": ([], "profiling takes memory of its own"),
}


def unplanned_settings(value_of: Callable[[str], Any]) -> list[str]:
    """The settings that are not planned, each as `name=value (reason)`.

    Args:
        value_of: Returns the value of a setting by name; None if there is none.
    """
    found = []
    for name, (default, reason) in _UNPLANNED.items():
        value = value_of(name)
        if value is not None and value != default:
            found.append(f"{name}={in_yaml(value)} ({reason})")
    return found


def setting_at(config: object, name: str) -> Any:
    """The value of a config's setting by its dotted name; None if the config does not have it."""
    value: Any = config
    for part in name.split("."):
        value = getattr(value, part, None)
    return value
