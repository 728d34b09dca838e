"""Paths in a model card: without directories, which would reveal the setup of a machine.

Addresses (s3://bucket/data, hf://datasets/org/name) are shown without their query, which may sign a request; only
`file:` addresses are paths.
"""

from __future__ import annotations

import ast
import re
from typing import Any

from fsdp_shard.checkpoint import AVERAGE, CHECKPOINTS
from fsdp_shard.utils import in_yaml

_LONGEST = 10_000  # characters of a setting; the card shows at most a few hundred
_ADDRESS = re.compile(r"(?!file:)[A-Za-z][\w+.-]*://")
# Settings, or keys in them, that are paths whatever they look like.
_NAMES = re.compile(r"(.*[._])?(path|paths|dir|file|files|chat_template|loss|resume|remote)")
_BEGINS_AS_PATH = re.compile(r"\s*(file:|~|\.{0,2}/)")
# Text that begins like this inside other text, up to the last slash before a quote or separator.
_IN_TEXT = re.compile(r"(?<![\w:/.~])(?:file:)?(?:~[\w.-]*|\.{1,2})?/(?:[^'\"`,;\[\]{}\n/]*/)*(?=[^\s'\"/])")
_STEP = re.compile(rf"[^/]+/{CHECKPOINTS}/step-\d+(/{AVERAGE})?$")  # a run's step, meaningless without the run's name
_PIECE = re.compile(r"[^'\"`,;\[\]{}\n\s]+")


def shown_setting(name: str, value: str) -> str:
    """A setting as the card shows it.

    Args:
        name: Its dotted name.
        value: Its value in Python notation; each item of lists and maps is checked.
    """
    value = value[:_LONGEST]
    if value.strip()[:1] not in ("[", "{"):
        return str(_shown_value(name, value))
    try:
        return in_yaml(_shown_value(name, ast.literal_eval(value.strip())))
    except (ValueError, SyntaxError, MemoryError, RecursionError):  # not a list or map, or partly hidden
        return _PIECE.sub(lambda piece: last_part(piece[0]), value)


def last_part(path: str) -> str:
    """The last part of a path; for a run's step, from the run's name on; for an address, without its query."""
    bare = path.strip().strip("'\"")
    bare = bare.partition("?")[0] if "://" in bare else bare
    if _ADDRESS.match(bare) and "::" not in bare:
        return bare
    bare = bare.rstrip("/")
    step = _STEP.search(bare)
    return (step[0] if step else bare.rpartition("/")[2]).removeprefix("file:") or "/"


def without_directories(value: str) -> str:
    """The text without the directories of its paths."""
    return _IN_TEXT.sub(".../", value[:_LONGEST])


def _shown_value(name: str, value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _shown_value(str(key), item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_shown_value(name, item) for item in value]
    if not isinstance(value, str):
        return value
    is_path = _NAMES.fullmatch(name) is not None or _BEGINS_AS_PATH.match(value) is not None
    return last_part(value) if is_path or _ADDRESS.match(value) else without_directories(value)
