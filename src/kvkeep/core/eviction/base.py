"""The contract of eviction: the index decides what may be evicted, a policy decides the order."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvkeep.core.keys import Namespace
    from kvkeep.core.returns import Returns, Wait

__all__ = ["Entry", "EvictionPolicy"]


class Entry:
    """One run of pages in a prefix index, as a policy sees it.

    The index creates entries; its nodes derive from this class.
    """

    __slots__ = (
        "counted", "depth", "died", "due", "followers", "hits", "last_used", "namespace",
        "place", "priority", "size", "state", "stored", "wait",
    )  # fmt: skip

    def __init__(self) -> None:
        self.size = 0  # its pages
        self.counted = 0  # those that `kvkeep.core.eviction.shares` has counted for its namespace
        self.depth = 0  # pages before it
        self.stored = 0  # when it was stored, in events of the policy: larger is later
        self.last_used = 0  # likewise
        self.hits = 0  # requests that reused it
        self.priority = 0  # given by its caller
        self.namespace: Namespace | None = None  # whose KV it is; None if the index does not tell
        self.state: object = None  # for the policy's own use
        # Hints, which `kvkeep.core.eviction.hints` orders by:
        self.died = 0  # the number of its death, from 1 on; 0 while it lives
        self.due: float | None = None  # when its owner expects to reuse it, by any clock
        # For policies that know when conversations return:
        self.wait: Wait | None = None  # of the conversation whose last request ended here
        self.followers = 0  # waiting conversations whose runs behind this one were evicted
        self.place: tuple[int, int, int] | None = None  # in their queues


class EvictionPolicy(ABC):
    """Orders the entries that may be evicted.

    An entry is a candidate while it has no holders and no descendants: the index `add`s it when
    that begins and `discard`s it when that ends. `pop` names the next victim. The index takes as
    many pages as it needs from the victim's tail; an entry that keeps some is `put_back`. When an
    entry is removed, `inherit` passes its record to the parent. So a record covers everything that
    ever followed the entry, and a use never updates a whole path.

    A policy may keep any queues it likes, but `pop` must return an entry while it has one.

    A policy whose class attributes are set right works everywhere once it is in
    `kvkeep.core.eviction.POLICIES`.

    Thread safety: none; called under the cache's lock, in the middle of an operation that cannot be
    undone: no call raises. Each call should cost O(log n) at most.
    """

    name: str
    portions = False
    """Whether the policy may evict only the tail of a victim; the index then calls `portion`."""
    sized = True
    """Whether its queues depend on `Entry.size` or `Entry.depth`. The index then removes and adds
    entries that are split or joined again; with False they keep their places, which is cheaper."""
    by_recency = False
    """Whether it orders by priority, time of storage and last use alone. Then a running request,
    whose pages cannot be evicted, may store them one by one or all at the end alike."""
    advised = False
    """Whether `kvkeep plan` tries it, because it does well without settings and priorities."""
    awaits = False
    """Whether it orders by `Entry.wait`, so that it is for caches that follow the ends of requests
    alone. These call `attend`."""
    taken = False
    """Whether an index uses it already. A policy orders the entries of one index only."""

    def __init__(self) -> None:
        self._time = 0

    def attend(self, returns: Returns, clock: Callable[[], float]) -> None:  # noqa: B027 - for few
        """Receive what learns when conversations return, and the clock of waits, in seconds."""

    def stored(self, entry: Entry, priority: int) -> None:
        """Record a new entry, held by the sequence that published it."""
        self._time += 1
        entry.stored = entry.last_used = self._time
        entry.priority = priority
        entry.hits = 0

    def grown(self, entry: Entry) -> None:
        """Record that the holder of ``entry`` appended pages to it."""
        self._time += 1
        entry.stored = entry.last_used = self._time

    def hit(self, entry: Entry) -> None:
        """Record that a request reuses ``entry`` and all before it."""
        self._time += 1
        entry.last_used = self._time
        entry.hits += 1

    def used(self, entry: Entry) -> None:
        """Record that a sequence which held ``entry`` ended."""
        self._time += 1
        entry.last_used = self._time

    def split(self, upper: Entry, lower: Entry) -> None:
        """Initialise ``upper``, the new front of ``lower``; hits stay below until inherited."""
        upper.stored = lower.stored
        upper.last_used = lower.last_used
        upper.priority = lower.priority

    def inherit(self, parent: Entry, child: Entry) -> None:
        """Add the record of ``child``, which was removed, to its parent's."""
        # Written out: this runs once per victim, and max() would be half its cost.
        if child.last_used > parent.last_used:  # noqa: PLR1730
            parent.last_used = child.last_used
        if child.priority > parent.priority:  # noqa: PLR1730
            parent.priority = child.priority
        parent.hits += child.hits

    @abstractmethod
    def add(self, entry: Entry) -> None:
        """Make ``entry`` a candidate."""

    @abstractmethod
    def discard(self, entry: Entry) -> None:
        """Remove ``entry`` from the candidates."""

    @abstractmethod
    def pop(self) -> Entry | None:
        """Remove and return the next victim; None without candidates."""

    def least(self) -> float | None:
        """Return what the next victim is worth, if policies of several tenants can compare it.

        None: they compare the ages of their entries.
        """
        return None

    def portion(self, entry: Entry) -> int:
        """Return how many pages of ``entry``, just popped, to evict before the next `pop`.

        Only called for a policy with `portions`; at least 1.
        """
        return entry.size

    @abstractmethod
    def put_back(self, entry: Entry) -> None:
        """Make the entry just popped, which lost only its tail, a candidate again.

        It is the next victim, unless the policy has `portions`.
        """

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of candidates."""

    @property
    def moment(self) -> int:
        """The number of events so far, the clock of `Entry.last_used` and `Entry.stored`."""
        return self._time

    def begin_at(self, moment: int) -> None:
        """Set the clock: policies that order parts of one memory count the same events."""
        self._time = moment

    def describe(self, entry: Entry) -> str:
        """Return what ``entry`` is ranked by, in a few words."""
        return f"used {self._time - entry.last_used} ago, {entry.hits} hits"

    def __repr__(self) -> str:
        return f"<{self.name} eviction, {len(self)} candidates>"
