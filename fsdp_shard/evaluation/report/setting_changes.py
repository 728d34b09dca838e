"""Which settings of a run have changed where it was resumed, as `trainer.json` of a step records it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

_ABSENT = "not set"


class SettingChange(NamedTuple):
    """A setting that was `before` until `step`, and `after` from then on, as YAML writes them."""

    step: int
    name: str
    before: str
    after: str


def changes_in(state: Mapping[str, Any]) -> list[SettingChange] | None:
    """The changes of settings up to a step, ascending; None if its state does not record them, as older ones do not."""
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
    """The value of each setting; of one that has changed, all values: `0.003 until step 7, then 1e-06`.

    Args:
        settings: The settings now, by name.
        changes: What has changed in them; None if that is not known.
        shown: What is shown of a value, given the name of its setting.
    """
    before: dict[str, list[str]] = {}
    for change in changes or ():
        text = f"{shown(change.name, change.before)} until step {change.step:,}"
        before.setdefault(change.name, []).append(text)
    names = dict.fromkeys((*settings, *before))
    last = {name: shown(name, settings.get(name, _ABSENT)) for name in names}
    return {name: ", ".join([*before[name], f"then {last[name]}"]) if name in before else last[name] for name in names}
