"""Rows of the data in what an evaluation says and writes."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from fsdp_shard.utils import format_count


def left_out_lines(left_out: Sequence[tuple[str, str]], what: str = "row", most: int = 3) -> list[str]:
    """Return a line for each reason for which something is left out, with the first of them.

    Args:
        left_out: Where each is, and why it is left out.
        what: What they are.
        most: How many are named.
    """
    lines = []
    for reason, count in Counter(reason for _, reason in left_out).items():
        wheres = [where for where, its in left_out if its == reason][:most]
        named = ", ".join(wheres) + (", ..." if count > most else "")
        lines.append(f"left out: {f'{format_count(count, what)} {reason}'.rstrip()} ({named})")
    return lines


def described(index: int, where: str, name: str | int | None) -> dict[str, Any]:
    """The beginning of a row of predictions.jsonl or documents.jsonl."""
    return {"index": index, "where": where, **({} if name is None else {"name": name})}
