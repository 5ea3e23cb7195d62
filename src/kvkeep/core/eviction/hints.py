"""`Hinted`: puts users' hints about future use before the order of any policy."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvkeep.core.eviction.base import Entry, EvictionPolicy
from kvkeep.core.eviction.queues import AgeQueue

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvkeep.core.returns import Returns

__all__ = ["Hinted"]


class Hinted(EvictionPolicy):
    """Orders entries by hints, and entries without hints by the ``inner`` policy.

    1. Entries that ``died`` are evicted first, the oldest death first.
    2. Then the victims of the inner policy.
    3. Entries that are ``due`` (seconds, by any clock) are evicted last: the latest due time first,
       the least recently used among equals.

    To change a hint, discard the entry, set the field, and add the entry again. This policy has no
    clock: its user clears ``due`` when the time has passed. The inner policy receives all events.

    Cost: one call more than the inner policy; O(log n) for entries with hints.
    """

    def __init__(self, inner: EvictionPolicy) -> None:
        super().__init__()
        self.inner = inner
        self.name = inner.name
        self.portions = inner.portions
        self.sized = inner.sized
        self.awaits = inner.awaits
        self._dead = AgeQueue[float]()
        self._awaited = AgeQueue[tuple[float, int]]()
        self._deaths = 0

    def death(self) -> int:
        """Return the number of the next death, for ``died``."""
        self._deaths += 1
        return self._deaths

    # --- events ------------------------------------------------------------------------------

    def attend(self, returns: Returns, clock: Callable[[], float]) -> None:
        self.inner.attend(returns, clock)

    def stored(self, entry: Entry, priority: int) -> None:
        self.inner.stored(entry, priority)

    def grown(self, entry: Entry) -> None:
        self.inner.grown(entry)

    def hit(self, entry: Entry) -> None:
        self.inner.hit(entry)

    def used(self, entry: Entry) -> None:
        self.inner.used(entry)

    def split(self, upper: Entry, lower: Entry) -> None:
        self.inner.split(upper, lower)

    def inherit(self, parent: Entry, child: Entry) -> None:
        self.inner.inherit(parent, child)

    # --- order -------------------------------------------------------------------------------

    def add(self, entry: Entry) -> None:
        if entry.died:
            self._dead.push(entry, entry.died)
        elif entry.due is not None:
            self._awaited.push(entry, (-entry.due, entry.last_used))
        else:
            self.inner.add(entry)

    def discard(self, entry: Entry) -> None:
        if entry.died:
            self._dead.remove(entry)
        elif entry.due is not None:
            self._awaited.remove(entry)
        else:
            self.inner.discard(entry)

    def pop(self) -> Entry | None:
        """Remove the oldest dead entry, else the inner policy's victim, else the last one due."""
        entry = self._dead.pop()
        if entry is None:
            entry = self.inner.pop()
            if entry is None:
                entry = self._awaited.pop()
        return entry

    def portion(self, entry: Entry) -> int:
        """Return the size of an entry with a hint, else the inner policy's portion."""
        return entry.size if entry.died or entry.due is not None else self.inner.portion(entry)

    def put_back(self, entry: Entry) -> None:
        if entry.died:
            self._dead.put_back(entry, entry.died)
        elif entry.due is not None:
            self._awaited.put_back(entry, (-entry.due, entry.last_used))
        else:
            self.inner.put_back(entry)

    def __len__(self) -> int:
        return len(self._dead) + len(self._awaited) + len(self.inner)

    def describe(self, entry: Entry) -> str:
        """Return the entry's hint, and the inner policy's description."""
        if entry.died:
            return f"dead, {self._deaths - entry.died} died since"
        said = self.inner.describe(entry)
        return f"awaited, {said}" if entry.due is not None else said
