"""One preallocated region of memory, given out in extents and taken back."""

from __future__ import annotations

from bisect import bisect_left, insort

import numpy as np

from kvkeep.core.errors import InvalidValue, whole
from kvkeep.store.backends.base import ALIGNMENT
from kvkeep.store.backends.buffers import aligned

__all__ = ["Arena"]


class Arena:
    """``size`` bytes of memory, from which extents are allocated and to which they are freed.

    Extents begin at multiples of `ALIGNMENT` and take whole multiples of it. The smallest free
    extent that is large enough is used (best fit), so one that was freed serves the next request of
    its size, and memory that nobody has touched yet is touched last. Neighbours that are both free
    are one extent.

    The memory is mapped, not touched: it costs what has been written to so far.

    Notes
    -----
    Thread safety: none. Cost: `allocate` and `free` take O(log n) steps, and move as many numbers
    as there are different sizes of free extents, of which there are few: 23,170 at most in 1 TiB.

    Attributes:
        size: in bytes, a multiple of `ALIGNMENT`.
        free_bytes: bytes that are free, in one piece or in many.
        buffer: the whole region, writable. Who wants to pin it does so here.
    """

    def __init__(self, size: int) -> None:
        """Map ``size`` bytes, rounded down to a multiple of `ALIGNMENT`.

        Raises:
            InvalidValue: ``size`` is less than `ALIGNMENT`, or more than the system will map.
        """
        self.size = whole("the size of an arena in bytes", size, ALIGNMENT)
        self.size -= self.size % ALIGNMENT
        self.free_bytes = 0
        try:
            self.buffer = aligned(self.size)
        except (OSError, OverflowError) as error:
            raise InvalidValue(
                f"an arena of {size} bytes is more than the system gives ({error}); take less"
            ) from error
        self._taken: dict[int, int] = {}  # offset → bytes
        # Free extents, by where they begin and end (to join neighbours) and by how long they are.
        self._starts: dict[int, int] = {}  # offset → bytes
        self._ends: dict[int, int] = {}  # offset behind the end → offset
        self._by_size: dict[int, dict[int, None]] = {}  # bytes → offsets, last freed last
        self._sizes: list[int] = []  # the keys of `_by_size` in order
        self._add(0, self.size)

    @staticmethod
    def extent(size: int) -> int:
        """How many bytes an extent for ``size`` bytes takes: at least one `ALIGNMENT`."""
        return max(-(-size // ALIGNMENT), 1) * ALIGNMENT

    @property
    def largest(self) -> int:
        """Bytes of the largest free extent: the most that `allocate` can give at once."""
        return self._sizes[-1] if self._sizes else 0

    def allocate(self, size: int) -> int | None:
        """Take an extent for ``size`` bytes; its offset, or None when no free one is as large."""
        wanted = self.extent(size)
        at = bisect_left(self._sizes, wanted)
        if at == len(self._sizes):
            return None
        found = self._sizes[at]
        offset = next(reversed(self._by_size[found]))  # freed last: likely still in a CPU cache
        self._remove(offset, found)
        if found > wanted:
            self._add(offset + wanted, found - wanted)
        self._taken[offset] = wanted
        return offset

    def free(self, offset: int, size: int) -> None:
        """Give back the extent that was allocated at ``offset`` for ``size`` bytes."""
        length = self._taken.pop(offset, 0)
        assert length == self.extent(size), f"{size} bytes at {offset} were not allocated"
        before = self._ends.get(offset)
        if before is not None:
            self._remove(before, offset - before)
            offset, length = before, length + offset - before
        behind = self._starts.get(offset + length)
        if behind is not None:
            self._remove(offset + length, behind)
            length += behind
        self._add(offset, length)

    def view(self, offset: int, size: int) -> memoryview:
        """``size`` writable bytes from ``offset`` on."""
        return self.buffer[offset : offset + size]

    def touch(self) -> None:
        """Take all of the memory from the system now. Only before the first `allocate`.

        Later, whoever writes to a page first waits for it: with huge pages as long as for the
        copy itself, in a virtual machine whose host has to find the memory ten times as long.
        """
        assert not self._taken, "an arena is touched before it is used"
        np.frombuffer(self.buffer, np.uint8)[::ALIGNMENT] = 0  # other threads run meanwhile

    def close(self) -> None:
        """Let go of the memory, which goes with the last view of it. What is free stays so."""
        self.buffer = memoryview(b"")

    def check(self) -> None:
        """Assert that free and taken extents tile the arena, and that no two free ones touch."""
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
        """A free extent, whose neighbours are not free."""
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
