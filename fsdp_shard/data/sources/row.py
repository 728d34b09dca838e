"""One row of the data, and checks of its columns."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from fsdp_shard.errors import DataError
from fsdp_shard.utils import nearest


class Header(NamedTuple):
    """The columns of data that names them once, and where it does."""

    where: str
    columns: Sequence[str]


class Row(NamedTuple):
    """Values by column, and where the row is, for messages. A document of a plain text file has only `text`."""

    where: str
    values: dict[str, Any]
    is_text: bool = False
    header: Header | None = None


def require_column(row: Row, column: str, setting: str) -> None:
    """Raise DataError unless `row` has `column`; the header is blamed if the columns are named there."""
    where, columns = row.header or (row.where, list(row.values))
    if column not in columns:
        raise DataError(
            f"{where} has no column {column!r}; it has {', '.join(columns) or 'none'}{nearest(column, columns)}. "
            f"Set {setting}."
        )


def text_of(value: object, column: str, where: str, setting: str) -> str:
    """Return `value` as text, null as the empty text; raise DataError for any other type."""
    if value is None:
        return ""
    if not isinstance(value, str):
        raise DataError(f"{where}: column {column!r} holds {type(value).__name__}, expected text. Set {setting}.")
    return value


def document_of(row: Row, column: str) -> str:
    """Return the text of a row: that in `column`, or the document of a plain text file; raise DataError without one."""
    if row.is_text:
        return str(row.values["text"])
    require_column(row, column, "data.text_column")
    return text_of(row.values[column], column, row.where, "data.text_column")
