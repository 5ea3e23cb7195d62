"""`as_csv`: reports of tenants as comma-separated values, for requests that want them."""

from __future__ import annotations

import csv
import io
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

__all__ = ["as_csv", "wants_csv"]

_FORMULAS = ("=", "+", "-", "@", "\t", "\r")


def as_csv(rows: Iterable[Mapping[str, Any]]) -> str:
    """Return rows of the same names as text (RFC 4180), the names in the first line.

    A text that a spreadsheet would take for a formula gets an apostrophe in front: clients choose
    the names of tenants. None is empty. Without rows, the text is empty.
    """
    text = io.StringIO()
    writer: csv.DictWriter[str] | None = None
    for row in rows:
        if writer is None:
            writer = csv.DictWriter(text, list(row))
            writer.writeheader()
        writer.writerow({name: _cell(value) for name, value in row.items()})
    return text.getvalue()


def wants_csv(format: str | None, accept: str) -> bool:
    """Whether a request wants a sheet, by its parameter ``format`` or else its header Accept."""
    if format is not None:
        return format == "csv"
    return accept.partition(";")[0].strip().lower() == "text/csv"


def _cell(value: object) -> object:
    if isinstance(value, str) and value.startswith(_FORMULAS):
        return f"'{value}"
    return round(value, 3) if isinstance(value, float) else value
