"""`PagePool`: reference counts of pages, and the queue of free ones; page tables that grow."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from kvkeep.core.errors import InvalidValue, OutOfPages, told, whole

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy.typing as npt

    PageArray = npt.NDArray[np.int32]

__all__ = [
    "EMPTY_PAGES", "GrowingArray", "PageCopy", "PagePool", "PageTables", "joined", "page_tables",
]  # fmt: skip

_FEW = 8
"""Up to this many ids, a Python loop is faster than NumPy calls of half a microsecond each."""


class PagePool:
    """The fixed set of pages of one device: reference counts and a queue of free pages.

    A page is free at zero references. `retain` and `release` take pages that are distinct, such as
    those of a page table or of a prefix index, and assert that none is free. Pages are reused least
    recently freed first, so stale data survives as long as possible.

    Cost: O(pages in the batch), vectorised; about 7 ns a page and 2.5 µs a call. Thread safety:
    none; the cache that owns the pool holds its lock.
    """

    def __init__(
        self, num_pages: int, make_room: Callable[[int], None] = lambda _count: None
    ) -> None:
        """``make_room(count)`` makes ``count`` pages free if it can, for `take`."""
        self.num_pages = whole("num_pages", num_pages, 1, 2**31 - 1)
        self._make_room = make_room
        self.references = np.zeros(self.num_pages, np.int32)
        self._counts = self.references.data  # reads and writes one of them in half the time
        # A ring: the free pages are the num_free entries from _head on, oldest first.
        self._ring = np.arange(self.num_pages, dtype=np.int32)
        self._head = 0
        self.num_free = self.num_pages

    @property
    def num_used(self) -> int:
        """Pages with references."""
        return self.num_pages - self.num_free

    def take(self, count: int) -> PageArray:
        """Take ``count`` free pages, each with one reference, after making room for them.

        Raises `OutOfPages`, and changes nothing, if too few are free.
        """
        if count > self.num_free:
            self._make_room(count)
        if count > self.num_free:
            raise OutOfPages(count, self.num_free, self.num_pages)
        first = self._ring[self._head : self._head + count]
        if len(first) == count:
            pages = first.copy()
        else:
            pages = np.concatenate((first, self._ring[: count - len(first)]))
        self._head = (self._head + count) % self.num_pages
        self.num_free -= count
        self.references[pages] = 1
        return pages

    def retain(self, pages: PageArray) -> None:
        """Add one reference to each of ``pages``, which are distinct and in use."""
        index = pages.astype(np.intp)
        held = self.references.take(index)
        assert np.count_nonzero(held) == len(held), "a page that is in use is free"
        held += 1
        self.references[index] = held

    def release(self, pages: PageArray) -> int:
        """Drop one reference of each of ``pages``, which are distinct; return how many are free."""
        if len(pages) <= _FEW:
            return self.release_few(pages.tolist())
        index = pages.astype(np.intp)
        held = self.references.take(index)
        assert np.count_nonzero(held) == len(held), "a page that is in use is free"
        held -= 1
        self.references[index] = held
        count = len(held) - int(np.count_nonzero(held))
        if count:
            self._put_back(index if count == len(index) else index[held == 0])
        return count

    def retain_page(self, page: int) -> None:
        """Add one reference to a page that is in use."""
        assert self.references[page] > 0, "a page that is in use is free"
        self.references[page] += 1

    def release_few(self, pages: list[int]) -> int:
        """Drop a reference of each of a few ``pages``; return how many became free."""
        free, counts, ring = self.num_free, self._counts, self._ring
        for page in pages:
            held = counts[page]
            assert held > 0, "a page that is in use is free"
            counts[page] = held - 1
            if held == 1:
                ring[(self._head + self.num_free) % self.num_pages] = page
                self.num_free += 1
        return self.num_free - free

    def _put_back(self, freed: npt.NDArray[np.intp]) -> None:
        tail = (self._head + self.num_free) % self.num_pages
        room = self.num_pages - tail
        self._ring[tail : tail + len(freed)] = freed[:room]
        if len(freed) > room:
            self._ring[: len(freed) - room] = freed[room:]
        self.num_free += len(freed)

    def check(self) -> None:
        """Assert that the free queue holds each free page once, and nothing else."""
        at = (self._head + np.arange(self.num_free)) % self.num_pages
        queued = np.bincount(self._ring[at], minlength=self.num_pages)
        assert (self.references >= 0).all(), "a reference count fell below zero"
        assert ((queued == 1) == (self.references == 0)).all(), "free queue and counts disagree"
        assert queued.max(initial=0) <= 1, "a page is in the free queue twice"


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
