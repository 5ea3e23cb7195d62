"""`PagePool`: reference counts of pages, and the queue of free ones."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kvkeep.core.errors import OutOfPages, whole

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy.typing as npt

    from kvkeep.core.pages.tables import PageArray

__all__ = ["PagePool"]

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
