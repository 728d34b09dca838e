"""The settings that changed when a run was resumed, as recorded in a step's `trainer.json`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

_ABSENT = "not set"


class SettingChange(NamedTuple):
    """A setting with the value `before` until `step`, and `after` from then on, in YAML notation."""

    step: int
    name: str
    before: str
    after: str


def changes_in(state: Mapping[str, Any]) -> list[SettingChange] | None:
    """The setting changes up to a step, ascending; None if its state, from an older version, does not record them."""
    rows = state.get("changed_settings")
    if not isinstance(rows, list) or not all(_is_change(row) for row in rows):
        return None
    return [SettingChange(*row) for row in rows]


def _is_change(row: object) -> bool:
    return isinstance(row, list) and [type(value) for value in row] == [int, str, str, str]


def courses(
    settings: Mapping[str, str],
    changes: Sequence[SettingChange] | None,
    shown: Callable[[str, str], str] = lambda _, value: value,
) -> dict[str, str]:
    """The value of each setting; for a changed one, all values: `0.003 until step 7, then 1e-06`.

    Args:
        settings: The current settings, by name.
        changes: Their changes; None if unknown.
        shown: Returns the displayed value, given the setting's name and value.
    """
    before: dict[str, list[str]] = {}
    for change in changes or ():
        text = f"{shown(change.name, change.before)} until step {change.step:,}"
        before.setdefault(change.name, []).append(text)
    names = dict.fromkeys((*settings, *before))
    last = {name: shown(name, settings.get(name, _ABSENT)) for name in names}
    return {name: ", ".join([*before[name], f"then {last[name]}"]) if name in before else last[name] for name in names}
