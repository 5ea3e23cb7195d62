"""`Arena`: one preallocated region of memory, allocated and freed in extents."""

from __future__ import annotations

from bisect import bisect_left, insort

import numpy as np

from kvkeep.core.errors import InvalidValue, reason, whole
from kvkeep.store.backends.base import ALIGNMENT
from kvkeep.store.backends.buffers import aligned

__all__ = ["Arena"]


class Arena:
    """A best-fit allocator over ``size`` bytes of mapped memory.

    Extents begin at multiples of `ALIGNMENT` and take whole multiples of it. The smallest free
    extent that is large enough is used, so a freed extent serves the next request of its size, and
    untouched memory is used last. Adjacent free extents are merged.

    The memory is mapped, not touched: only pages that were written take physical memory.

    Thread safety: none. Cost: `allocate` and `free` take O(log n) steps, plus moving one number per
    distinct size of free extents, of which 1 TiB can have 23,170 at most.

    Attributes:
        size: bytes, a multiple of `ALIGNMENT`.
        free_bytes: free bytes in all extents together.
        buffer: the whole region, writable; for callers that pin it.
    """

    def __init__(self, size: int) -> None:
        """Map ``size`` bytes, rounded down to a multiple of `ALIGNMENT`.

        Raises:
            InvalidValue: ``size`` is less than `ALIGNMENT`, or more than the system maps.
        """
        self.size = whole("the size of an arena in bytes", size, ALIGNMENT)
        self.size -= self.size % ALIGNMENT
        self.free_bytes = 0
        try:
            self.buffer = aligned(self.size)
        except (OSError, OverflowError) as error:
            raise InvalidValue(
                f"an arena of {size} bytes is more than the system gives ({reason(error)}); "
                "take less"
            ) from error
        self._taken: dict[int, int] = {}  # offset → bytes
        # Free extents by begin and end, to merge neighbours, and by size.
        self._starts: dict[int, int] = {}  # offset → bytes
        self._ends: dict[int, int] = {}  # end → offset
        self._by_size: dict[int, dict[int, None]] = {}  # bytes → offsets, last freed last
        self._sizes: list[int] = []  # the keys of `_by_size` in order
        self._add(0, self.size)

    @staticmethod
    def extent(size: int) -> int:
        """Return the bytes that an extent for ``size`` bytes takes: at least one `ALIGNMENT`."""
        return max(-(-size // ALIGNMENT), 1) * ALIGNMENT

    @property
    def largest(self) -> int:
        """Bytes of the largest free extent: the most that `allocate` can take."""
        return self._sizes[-1] if self._sizes else 0

    def allocate(self, size: int) -> int | None:
        """Allocate ``size`` bytes; return the offset, None if no free extent is large enough."""
        wanted = self.extent(size)
        at = bisect_left(self._sizes, wanted)
        if at == len(self._sizes):
            return None
        found = self._sizes[at]
        offset = next(reversed(self._by_size[found]))  # last freed: likely still in a CPU cache
        self._remove(offset, found)
        if found > wanted:
            self._add(offset + wanted, found - wanted)
        self._taken[offset] = wanted
        return offset

    def free(self, offset: int, size: int) -> None:
        """Free the extent that was allocated at ``offset`` for ``size`` bytes."""
        length = self._taken.pop(offset, 0)
        assert length == self.extent(size), f"{size} bytes at {offset} were not allocated"
        before = self._ends.get(offset)
        if before is not None:
            self._remove(before, offset - before)
            offset, length = before, length + offset - before
        after = self._starts.get(offset + length)
        if after is not None:
            self._remove(offset + length, after)
            length += after
        self._add(offset, length)

    def view(self, offset: int, size: int) -> memoryview:
        """Return ``size`` writable bytes at ``offset``."""
        return self.buffer[offset : offset + size]

    def touch(self) -> None:
        """Make the system provide all physical memory now. Only before the first `allocate`.

        Otherwise the first write to each page waits for that: with huge pages as long as the copy
        itself takes, ten times as long in a virtual machine whose host has to find the memory.
        """
        assert not self._taken, "an arena is touched before it is used"
        np.frombuffer(self.buffer, np.uint8)[::ALIGNMENT] = 0  # releases the GIL

    def close(self) -> None:
        """Drop the memory, which is unmapped with the last view of it."""
        self.buffer = memoryview(b"")

    def check(self) -> None:
        """Assert that extents tile the arena, and that no two free ones are adjacent."""
        extents = [(offset, size, "taken") for offset, size in self._taken.items()]
        extents += [(offset, size, "free") for offset, size in self._starts.items()]
        extents.sort()
        end, last = 0, "taken"
        for offset, size, state in extents:
            assert offset == end, f"{self!r}: an extent begins at {offset}, the last ended at {end}"
            assert size > 0, f"{self!r}: {size} bytes at {offset}"
            assert size % ALIGNMENT == 0, f"{self!r}: {size} bytes at {offset}"
            assert (last, state) != ("free", "free"), f"{self!r}: two free extents meet at {offset}"
            end, last = offset + size, state
        assert end == self.size, f"{self!r}: the last extent ends at {end}"
        assert self._ends == {at + size: at for at, size in self._starts.items()}, repr(self)
        assert self._sizes == sorted(self._by_size), repr(self)
        by_size = {at: size for size, offsets in self._by_size.items() for at in offsets}
        assert by_size == self._starts, repr(self)
        assert all(self._by_size.values()), repr(self)
        assert self.free_bytes == sum(self._starts.values()), repr(self)

    def _add(self, offset: int, size: int) -> None:
        """Add a free extent whose neighbours are taken."""
        self._starts[offset] = size
        self._ends[offset + size] = offset
        if size not in self._by_size:
            self._by_size[size] = {}
            insort(self._sizes, size)
        self._by_size[size][offset] = None
        self.free_bytes += size

    def _remove(self, offset: int, size: int) -> None:
        del self._starts[offset]
        del self._ends[offset + size]
        same = self._by_size[size]
        del same[offset]
        if not same:
            del self._by_size[size]
            del self._sizes[bisect_left(self._sizes, size)]
        self.free_bytes -= size

    def __repr__(self) -> str:
        return (
            f"<Arena {self.size} bytes, {self.free_bytes} free in {len(self._starts)} extents, "
            f"{self.largest} in one>"
        )
