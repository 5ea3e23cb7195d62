"""`page_tables`: the page tables of a batch as one padded array, for attention kernels."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from kvkeep.core.errors import InvalidValue, told, whole

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from kvkeep.core.pages.table import PageArray

__all__ = ["PageTables", "page_tables"]

_INT32 = np.iinfo(np.int32)


class PageTables(NamedTuple):
    """The page tables of a batch."""

    pages: npt.NDArray[np.int32]
    """[rows, width]: page ids in order, then padding."""
    lengths: npt.NDArray[np.int32]
    """[rows]: pages of each row, without padding."""


def page_tables(
    tables: Sequence[PageArray],
    *,
    pad: int = 0,
    out: npt.NDArray[np.int32] | None = None,
) -> PageTables:
    """Return the page ids of several sequences as one int32 array [rows, most pages].

    ``tables`` are arrays of page ids, such as ``[sequence.pages for sequence in batch]``; ``pad``
    fills the end of shorter ones. With ``out``, an int32 array [rows or more, pages or more], only
    the lengths are allocated: all of ``out`` is written, unused rows with ``pad``, and the result
    is its first rows at full width. So a buffer that a captured graph reads is always complete.

    Call it for each step: `Sequence.publish` may exchange pages anywhere in a table. Raises
    `InvalidValue` for a single row in place of several, and for an ``out`` that is too small or of
    another type. Thread safety: that of the sequences. Cost: one copy, about 0.5 µs a row and 0.1
    ns a byte.
    """
    pad = whole("pad", pad, int(_INT32.min), int(_INT32.max))
    try:
        lengths = np.fromiter(map(len, tables), np.int32, len(tables))
    except Exception as error:  # a stranger's row
        raise InvalidValue(
            f"tables is {told(tables)}; rows of page ids are needed, as [sequence.pages]"
        ) from error
    width = int(lengths.max(initial=0))
    if out is None:
        pages = np.empty((len(tables), width), np.int32)
    else:
        pages = _checked(out, len(tables), width)
        pages[len(tables) :] = pad
        pages = pages[: len(tables)]
    for row, table, length in zip(pages, tables, lengths.tolist(), strict=True):
        try:
            row[:length] = table
        except Exception as error:
            raise InvalidValue(
                f"a row of tables is {told(table)}; page ids are needed, as sequence.pages"
            ) from error
        row[length:] = pad
    return PageTables(pages, lengths)


def _checked(out: npt.NDArray[np.int32], rows: int, width: int) -> npt.NDArray[np.int32]:
    given: object = out
    if not isinstance(given, np.ndarray) or given.dtype != np.int32 or given.ndim != 2:
        array = given if isinstance(given, np.ndarray) else None
        what = type(given).__name__ if array is None else f"{array.dtype} {array.shape}"
        raise InvalidValue(f"out is {what}; a writable int32 array [rows, pages] is needed")
    if not out.flags.writeable:
        raise InvalidValue("out is read-only; a writable int32 array [rows, pages] is needed")
    if out.shape[0] < rows or out.shape[1] < width:
        raise InvalidValue(
            f"out has room for {out.shape[0]} rows of {out.shape[1]} pages; "
            f"{rows} rows of {width} are needed"
        )
    return out
