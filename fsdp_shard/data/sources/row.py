"""One row of the data, and checks of its columns."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from fsdp_shard.errors import DataError
from fsdp_shard.utils import nearest


class Header(NamedTuple):
    """The columns of a file with a header, and where the header is."""

    where: str
    columns: Sequence[str]


class Row(NamedTuple):
    """Values by column, and the row's location for messages. A document of a plain text file has only `text`."""

    where: str
    values: dict[str, Any]
    is_text: bool = False
    header: Header | None = None


def require_columns(row: Row, wanted: Mapping[str, str], advice: str = "") -> None:
    """Raise DataError unless `row` has all columns; the error names the header if there is one.

    Args:
        row: The row.
        wanted: The columns, by the settings that name them.
        advice: Other possible causes than these settings.
    """
    where, columns = row.header or (row.where, list(row.values))
    if missing := {setting: column for setting, column in wanted.items() if column not in columns}:
        names = [f"{column!r}{nearest(column, columns)}" for column in missing.values()]
        raise DataError(
            f"{where} has no column {' and no '.join(names)}; it has {', '.join(columns) or 'none'}. "
            f"Set {' and '.join(missing)}{advice}."
        )


def text_of(value: object, column: str, where: str, setting: str) -> str:
    """Return `value` as text, null as the empty text; raise DataError for any other type."""
    if value is None:
        return ""
    if not isinstance(value, str):
        raise DataError(f"{where}: column {column!r} holds {type(value).__name__}, expected text. Set {setting}.")
    return value


def document_of(row: Row, column: str) -> str:
    """Return the text of a row, from `column` or from a plain text file; raise DataError without one."""
    if row.is_text:
        return str(row.values["text"])
    others = ", or data.kind=chat, instruction or pairs if the rows are such"
    require_columns(row, {"data.text_column": column}, others)
    return text_of(row.values[column], column, row.where, "data.text_column")
