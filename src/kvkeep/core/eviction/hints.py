"""What users say about the future, in front of any policy: the dead go first, the awaited last."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvkeep.core.eviction.base import Entry, EvictionPolicy
from kvkeep.core.eviction.queues import AgeQueue

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Hinted"]


class Hinted(EvictionPolicy):
    """Three classes of entries, whatever policy is inside.

    Entries that ``died`` go first, the oldest death first. Then goes what the ``inner`` policy
    says. Entries that are ``due`` (seconds, by whatever clock) go when nothing else is left, the
    latest first; of those due at the same time, the least recently used. Who sets either field
    discards the entry before and adds it after; when ``due`` is over is theirs to say, too: this
    policy has no clock.

    The inner policy is told of all that happens, and orders what has no hint.

    Cost: one call more than the inner policy; O(log n) for entries with hints.
    """

    def __init__(self, inner: EvictionPolicy) -> None:
        super().__init__()
        self.inner = inner
        self.name = inner.name
        self.remembers = inner.remembers
        self.portions = inner.portions
        self.sized = inner.sized
        self._dead = AgeQueue[float]()
        self._awaited = AgeQueue[tuple[float, int]]()
        self._deaths = 0

    @property
    def moment(self) -> int:
        """The inner policy's count of events."""
        return self.inner.moment

    def death(self) -> int:
        """The number of the next death: what to set ``died`` to."""
        self._deaths += 1
        return self._deaths

    # --- what happens is the inner policy's business -----------------------------------------

    def fit(self, size: int, block: int) -> None:
        """It serves a memory of ``size``, in blocks of ``block``."""
        self.inner.fit(size, block)

    def asked(self, keys: Sequence[bytes]) -> int:
        """A prompt came; how many of its leading blocks are known."""
        return self.inner.asked(keys)

    def stored(self, entry: Entry, priority: int, *, known: bool = False) -> None:
        """``entry`` was just put in the index."""
        self.inner.stored(entry, priority, known=known)

    def grown(self, entry: Entry) -> None:
        """More was stored at the end of ``entry``."""
        self.inner.grown(entry)

    def hit(self, entry: Entry) -> None:
        """A request reuses ``entry`` and all before it."""
        self.inner.hit(entry)

    def used(self, entry: Entry) -> None:
        """A sequence that held ``entry`` is done with it."""
        self.inner.used(entry)

    def split(self, upper: Entry, lower: Entry) -> None:
        """``lower`` was cut in two, its front is now ``upper``."""
        self.inner.split(upper, lower)

    def inherit(self, parent: Entry, child: Entry) -> None:
        """``child`` is gone; what used it used ``parent`` too."""
        self.inner.inherit(parent, child)

    # --- what goes first ---------------------------------------------------------------------

    def add(self, entry: Entry) -> None:
        """``entry`` may be evicted from now on."""
        if entry.died:
            self._dead.push(entry, entry.died)
        elif entry.due is not None:
            self._awaited.push(entry, (-entry.due, entry.last_used))
        else:
            self.inner.add(entry)

    def discard(self, entry: Entry) -> None:
        """``entry`` may not be evicted any more."""
        if entry.died:
            self._dead.remove(entry)
        elif entry.due is not None:
            self._awaited.remove(entry)
        else:
            self.inner.discard(entry)

    def pop(self) -> Entry | None:
        """Take out the one that died first, else whom the inner policy names, else the awaited."""
        entry = self._dead.pop()
        if entry is None:
            entry = self.inner.pop()
            if entry is None:
                entry = self._awaited.pop()
        return entry

    def portion(self, entry: Entry) -> int:
        """All of what has a hint; else what the inner policy wants."""
        return entry.size if entry.died or entry.due is not None else self.inner.portion(entry)

    def put_back(self, entry: Entry) -> None:
        """The entry just popped lost only its tail."""
        if entry.died:
            self._dead.put_back(entry, entry.died)
        elif entry.due is not None:
            self._awaited.put_back(entry, (-entry.due, entry.last_used))
        else:
            self.inner.put_back(entry)

    def __len__(self) -> int:
        return len(self._dead) + len(self._awaited) + len(self.inner)

    def describe(self, entry: Entry) -> str:
        """What decides over ``entry``: its hint, or what the inner policy says."""
        if entry.died:
            return f"dead, {self._deaths - entry.died} died since"
        said = self.inner.describe(entry)
        return f"awaited, {said}" if entry.due is not None else said
