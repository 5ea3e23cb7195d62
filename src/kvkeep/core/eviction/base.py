"""The contract of eviction: an index says what may go, a policy says what goes first."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Entry", "EvictionPolicy"]


class Entry:
    """One run of pages in a prefix index, as a policy sees it.

    The index creates entries and derives its nodes from this class. ``last_used`` and ``stored``
    count the policy's events (larger is later), ``hits`` the requests that reused it, ``priority``
    what its caller asked for, ``size`` its pages, ``depth`` the pages before it. A policy that
    needs to remember more keeps it in ``state``. ``died`` and ``due`` are hints, which
    `kvkeep.core.eviction.hints` orders by: the number of its death, from 1 on, or 0 while it
    lives; a time by any clock, or None.
    """

    __slots__ = (
        "depth", "died", "due", "hits", "last_used", "priority", "size", "state", "stored",
    )  # fmt: skip

    def __init__(self) -> None:
        self.size = 0
        self.depth = 0
        self.died = 0
        self.due: float | None = None
        self.last_used = 0
        self.stored = 0
        self.hits = 0
        self.priority = 0
        self.state: object = None


class EvictionPolicy(ABC):
    """Orders the entries that may be evicted.

    An entry may be evicted while nobody holds it and nothing longer hangs from it: the index then
    `add`s it, and `discard`s it when that ends. `pop` names the next victim. The index takes as
    many pages as it needs from the victim's tail; if the entry outlives that, it is `put_back`.
    When a victim is gone, `inherit` hands what was known of it to its parent, so an entry's record
    counts what happened to everything that ever hung from it, and nothing has to be updated along
    a whole path at each use.

    A policy may own any queues it likes (2Q, ARC); it must name a victim whenever it has one, since
    what is added is all the memory that can be had.

    One that wants to know what was asked for before, also of what went since, sets ``remembers``:
    who serves it then names the blocks of every prompt (`asked`), and says of what is stored
    whether it was ``known``.

    Thread safety: none; called under the cache's lock. Cost asked for: O(log n) a call, and not
    more with more entries than that.
    """

    name: str
    remembers = False
    """It is to be told what is asked for; the keys cost a hash of every prompt."""
    portions = False
    """A victim may be worth keeping but for its tail, and `portion` says how much that is."""
    sized = True
    """What it keeps of an added entry depends on the size or depth of that, so the entry is taken
    out and added again when it loses its front (`split`) or gets it back, which no call announces:
    the front goes, and all that was recorded of it. False saves that, and keeps its place."""
    taken = False
    """An index uses it: a policy orders the entries of one index, not of two."""

    def __init__(self) -> None:
        self._time = 0

    def fit(self, size: int, block: int) -> None:  # noqa: B027 - most have no use for it
        """It serves a memory of ``size`` (in the unit of `Entry.size`), in blocks of ``block``."""

    def asked(self, keys: Sequence[bytes]) -> int:
        """A prompt made of these blocks came; how many of its leading ones are ``known``.

        Keys are chained: one names all that comes before it, too. Called if it `remembers`, when
        the prompt was admitted, before any of it is stored.
        """
        return 0

    def stored(self, entry: Entry, priority: int, *, known: bool = False) -> None:
        """``entry`` was just put in the index (it is held by the sequence that published it).

        ``known``: it was asked for before, and went since. That counts as a hit.
        """
        self._time += 1
        entry.stored = entry.last_used = self._time
        entry.priority = priority
        entry.hits = int(known)

    def grown(self, entry: Entry) -> None:
        """More was stored at the end of ``entry``, by who holds it: its tail is new."""
        self._time += 1
        entry.stored = entry.last_used = self._time

    def hit(self, entry: Entry) -> None:
        """A request reuses ``entry`` and all before it."""
        self._time += 1
        entry.last_used = self._time
        entry.hits += 1

    def used(self, entry: Entry) -> None:
        """A sequence that held ``entry`` is done with it."""
        self._time += 1
        entry.last_used = self._time

    def split(self, upper: Entry, lower: Entry) -> None:
        """``lower`` was cut in two, its front is now ``upper``; hits stay below until inherited."""
        upper.stored = lower.stored
        upper.last_used = lower.last_used
        upper.priority = lower.priority

    def inherit(self, parent: Entry, child: Entry) -> None:
        """``child`` is gone; what used it used ``parent`` too."""
        # Written out: this runs once per victim, and max() would be half its cost.
        if child.last_used > parent.last_used:  # noqa: PLR1730
            parent.last_used = child.last_used
        if child.priority > parent.priority:  # noqa: PLR1730
            parent.priority = child.priority
        parent.hits += child.hits

    @abstractmethod
    def add(self, entry: Entry) -> None:
        """``entry`` may be evicted from now on."""

    @abstractmethod
    def discard(self, entry: Entry) -> None:
        """``entry``, which was added, may not be evicted any more."""

    @abstractmethod
    def pop(self) -> Entry | None:
        """Take out the entry that should go next, or None when there is none."""

    def portion(self, entry: Entry) -> int:
        """How much of the tail of ``entry``, just popped, goes before the policy is asked again.

        All of it, unless the policy takes in `portions`.
        """
        return entry.size

    @abstractmethod
    def put_back(self, entry: Entry) -> None:
        """The entry just popped lost only its tail: it is next again.

        Unless the policy takes in `portions`: it has had what it wanted of this one, it may be.
        """

    @abstractmethod
    def __len__(self) -> int:
        """Entries that may be evicted."""

    @property
    def moment(self) -> int:
        """How much has happened; `Entry.last_used` and `Entry.stored` are such moments."""
        return self._time

    def describe(self, entry: Entry) -> str:
        """What decides over ``entry``, in a few characters, for people who read the tree."""
        return f"used {self._time - entry.last_used} ago, {entry.hits} hits"

    def __repr__(self) -> str:
        return f"<{self.name} eviction, {len(self)} entries may go>"
