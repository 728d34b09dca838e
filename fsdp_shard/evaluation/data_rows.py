"""Data rows in an evaluation's messages and files."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from fsdp_shard.utils import format_count


def skipped_lines(skipped: Sequence[tuple[str, str]], what: str = "row", most: int = 3) -> list[str]:
    """Return a line for each reason why something is skipped, with its first cases.

    Args:
        skipped: The position of each skipped case, and the reason.
        what: The noun for the cases.
        most: Maximum number of cases to name.
    """
    lines = []
    for reason, count in Counter(reason for _, reason in skipped).items():
        wheres = [where for where, its in skipped if its == reason][:most]
        named = ", ".join(wheres) + (", ..." if count > most else "")
        lines.append(f"left out: {f'{format_count(count, what)} {reason}'.rstrip()} ({named})")
    return lines


def first_fields(index: int, where: str, name: str | int | None) -> dict[str, Any]:
    """The first fields of a row of predictions.jsonl or documents.jsonl."""
    return {"index": index, "where": where, **({} if name is None else {"name": name})}
