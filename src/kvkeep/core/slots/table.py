"""`SlotTable`: which slots are empty, idle or running, their tokens and their guards."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kvkeep.core.slots.guards import SlotGuards
from kvkeep.core.slots.rows import TokenRows

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import numpy.typing as npt

    from kvkeep.core.slots.guards import SlotCopy

__all__ = ["SlotTable"]


class SlotTable:
    """The state shared by a `SlotCache` and its leases.

    A slot is empty or idle, one bit each in two ints, else running. Each transition is one method,
    which asserts the state it starts from.

    Thread safety: none. Cost: O(1) a step, a machine word per 30 slots in the bit masks.
    """

    def __init__(self, num_slots: int, max_tokens: int, clock: Callable[[], float]) -> None:
        self.num_slots = num_slots
        self.max_tokens = max_tokens
        self.rows = TokenRows(num_slots, max_tokens)
        self.guards = SlotGuards(clock)
        self.empty = (1 << num_slots) - 1
        self.idle = 0
        self.versions = [0] * num_slots
        self._last_used = np.zeros(num_slots, np.int64)
        self._time = 0

    # -- reading ------------------------------------------------------------------------------

    def is_empty(self, slot: int) -> bool:
        """Whether the slot is free and holds no data."""
        return bool(self.empty >> slot & 1)

    def is_idle(self, slot: int) -> bool:
        """Whether the slot is free and holds data."""
        return bool(self.idle >> slot & 1)

    def is_running(self, slot: int) -> bool:
        """Whether a lease holds the slot."""
        return not (self.empty | self.idle) >> slot & 1

    @property
    def num_running(self) -> int:
        """Slots held by leases."""
        return self.num_slots - self.empty.bit_count() - self.idle.bit_count()

    def lowest_empty(self) -> int | None:
        """Return the lowest empty slot; None if there is none."""
        return (self.empty & -self.empty).bit_length() - 1 if self.empty else None

    def idle_mask(self) -> npt.NDArray[np.bool_]:
        """Return a bool per slot: whether it is idle."""
        packed = np.frombuffer(self.idle.to_bytes((self.num_slots + 7) // 8, "little"), np.uint8)
        return np.unpackbits(packed, count=self.num_slots, bitorder="little").view(np.bool_)

    def idle_by_age(self) -> Iterator[int]:
        """Yield the idle slots, least recently used first; sorts only beyond the first."""
        idle = np.flatnonzero(self.idle_mask())
        if not len(idle):
            return
        used = self._last_used[idle]
        yield int(idle[used.argmin()])
        yield from idle[used.argsort()][1:].tolist()

    # -- steps --------------------------------------------------------------------------------

    def touch(self, slot: int) -> None:
        """Record a use of the slot."""
        self._time += 1
        self._last_used[slot] = self._time

    def take(self, slot: int) -> int:
        """Change empty or idle to running; return the version of the new lease."""
        assert not self.is_running(slot), f"slot {slot} was given out twice"
        self.empty &= ~(1 << slot)
        self.idle &= ~(1 << slot)
        self.versions[slot] += 1
        return self.versions[slot]

    def give_back(self, slot: int, keep: int) -> None:
        """Change running to idle with the first ``keep`` tokens, or to empty."""
        assert self.is_running(slot), f"slot {slot} was given back twice"
        self.guards.give_way(slot, keep)
        self.rows.cut(slot, keep)
        self.idle |= 1 << slot
        self.touch(slot)
        self._empty_if_spent(slot)

    def settle(self, copy: SlotCopy) -> None:
        """End the guard of ``copy``, made or abandoned, on its source."""
        self.guards.done(copy)
        self._empty_if_spent(copy.src)

    def _empty_if_spent(self, slot: int) -> None:
        # A slot whose data was forgotten stays idle until the last copy from it is made: no search
        # finds it, and nothing may overwrite it yet.
        if self.is_idle(slot) and not self.rows.published[slot] and not self.guards.to_copy(slot):
            self.rows.forget(slot)
            self.idle &= ~(1 << slot)
            self.empty |= 1 << slot

    def clear(self) -> None:
        """Make every slot empty; all leases end, as their slots do not run."""
        self.guards.clear()
        for slot in range(self.num_slots):
            self.rows.forget(slot)
        self.empty, self.idle = (1 << self.num_slots) - 1, 0

    def check(self) -> None:
        """Assert, recounting everything, that states, rows and guards agree."""
        rows, guards = self.rows, self.guards
        rows.check()
        assert not self.empty & self.idle, "a slot is empty and idle at once"
        assert (self.empty | self.idle) >> self.num_slots == 0, "a slot that does not exist is free"
        for slot in range(self.num_slots):
            length, published = rows.lengths[slot], int(rows.published[slot])
            if self.is_empty(slot):
                assert length == 0, f"empty slot {slot} holds {length} tokens"
                assert not guards.guarded(slot), f"empty slot {slot} is guarded"
            elif self.is_idle(slot):
                assert length == published, f"idle slot {slot} holds unpublished tokens"
                assert published or guards.to_copy(slot), f"idle slot {slot} should be empty"
        for pin in guards.pins():
            n = len(pin.tokens)
            assert n <= rows.published[pin.slot], f"{pin!r} guards what is not there"
            assert rows.common(pin.slot, pin.namespace, pin.tokens) == n, f"{pin!r}: other tokens"
        targets = [copy.dst for copy in guards.copies()]
        assert len(set(targets)) == len(targets), "two copies into one slot are pending"
        for copy in guards.copies():
            assert copy.src != copy.dst, f"{copy} copies onto itself"
            assert self.is_running(copy.dst), f"{copy}: its target is not running"
            assert 0 <= copy.start < copy.tokens <= rows.lengths[copy.dst], f"{copy} makes no sense"
            assert rows.published[copy.dst] == copy.start, f"{copy} overwrites published tokens"
            source, target = (rows.row(slot, copy.tokens) for slot in (copy.src, copy.dst))
            assert (source == target).all(), f"{copy}: the source was overwritten"
