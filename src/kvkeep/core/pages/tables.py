"""`GrowingArray`, `PageCopy`: a page table that grows; `page_tables`: those of a batch."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from kvkeep.core.errors import InvalidValue, told, whole

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    PageArray = npt.NDArray[np.int32]

__all__ = ["EMPTY_PAGES", "GrowingArray", "PageCopy", "PageTables", "joined", "page_tables"]

EMPTY_PAGES: PageArray = np.empty(0, np.int32)
EMPTY_PAGES.flags.writeable = False


def joined(parts: list[PageArray]) -> PageArray:
    """Return one array of all page ids; a single part is returned as it is, not copied."""
    if len(parts) == 1:
        return parts[0]
    return np.concatenate(parts) if parts else EMPTY_PAGES


class PageCopy(NamedTuple):
    """Copy the first ``tokens`` tokens of page ``src`` to page ``dst``, in every layer."""

    src: int
    dst: int
    tokens: int


class GrowingArray:
    """A 1-D int32 array: amortised O(1) append, O(1) cut."""

    __slots__ = ("_array", "_length")

    def __init__(self, values: npt.NDArray[np.int32]) -> None:
        self._array = values.copy()
        self._length = len(values)

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, at: int) -> int:
        return int(self._array[at])

    @property
    def values(self) -> npt.NDArray[np.int32]:
        """The values: a view for the owner, valid until the next change."""
        return self._array[: self._length]

    def view(self) -> npt.NDArray[np.int32]:
        """Return the values as a read-only view, valid until the next change."""
        view = self._array[: self._length]
        view.flags.writeable = False
        return view

    def append(self, value: int) -> None:
        """Append one value."""
        if self._length == len(self._array):
            self._grow(self._length + 1)
        self._array[self._length] = value
        self._length += 1

    def extend(self, values: npt.NDArray[np.int32]) -> None:
        """Append an array of values."""
        length = self._length + len(values)
        if length > len(self._array):
            self._grow(length)
        self._array[self._length : length] = values
        self._length = length

    def cut(self, length: int) -> None:
        """Keep the first ``length`` values."""
        assert 0 <= length <= self._length
        self._length = length

    def _grow(self, length: int) -> None:
        grown = np.empty(max(length, len(self._array) * 3 // 2 + 16), np.int32)
        grown[: self._length] = self._array[: self._length]
        self._array = grown


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
