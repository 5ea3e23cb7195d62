"""The contract of eviction: the tree decides what may be evicted, a policy decides the order."""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from collections import OrderedDict
from typing import TYPE_CHECKING, Generic, TypeVar

from kvkeep.core.errors import InvalidValue
from kvkeep.core.prefix.node import Entry, TreeObserver

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable
    from typing import Any, Self

    import numpy.typing as npt

    from kvkeep.core.keys import Namespace
    from kvkeep.core.prefix.node import Node

__all__ = ["LRU", "AgeQueue", "EvictionPolicy", "Priority", "QueuePolicy"]

Age = TypeVar("Age", float, tuple[float, float])


class EvictionPolicy(TreeObserver, ABC):
    """Orders the entries that may be evicted. A policy needs the five abstract methods.

    *Candidates.* An entry is a candidate while it has no holders and no descendants: the tree
    `add`s it when that begins and `discard`s it when that ends. `pop` returns the next victim, one
    while there are candidates. The tree removes pages from the victim's tail, as many as it needs
    (`portion` may allow fewer at a time); an entry that keeps some is `put_back`. An entry that is
    discarded and added again without a use keeps its place in the order.

    *Events.* A policy that needs them overrides methods of `TreeObserver`, for the runs of a cache,
    and `opened`, `closed`, `forked` and `dropped`, for its requests. Recency, hits and priority
    need no events: the tree sets them in the entry, and the run before a removed one inherits them.

    A policy for the blocks of a tier gets no events. An entry's ``last_used``, ``hits`` and
    ``priority`` change only while it is no candidate, its ``size`` at any time.

    Thread safety: none; called under the cache's lock, in the middle of an operation that cannot be
    undone: no call raises. Each call should cost O(log n) at most.
    """

    name: str
    attached = False
    """Whether it orders the runs of a tree."""

    # --- candidates ------------------------------------------------------------------------------

    @abstractmethod
    def add(self, entry: Entry) -> None:
        """Make ``entry`` a candidate."""

    @abstractmethod
    def discard(self, entry: Entry) -> None:
        """Remove ``entry`` from the candidates."""

    @abstractmethod
    def pop(self) -> Entry | None:
        """Remove and return the next victim; None without candidates."""

    @abstractmethod
    def put_back(self, entry: Entry) -> None:
        """Make the entry just popped a candidate again: the next victim, unless ranks changed."""

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of candidates."""

    def portion(self, entry: Entry, most: int) -> int:
        """Return how many pages of ``entry``, just popped, to remove now: 1 … ``most``."""
        del entry
        return most

    def peek(self) -> Entry | None:
        """Return the entry that `pop` would return."""
        entry = self.pop()
        if entry is not None:
            self.put_back(entry)
        return entry

    def least(self) -> float | None:
        """Return the worth of the next victim, to compare tenants by; None: by its last use."""
        return None

    def describe(self, entry: Entry, moment: int) -> str:
        """Return what orders ``entry``, in a few words; ``moment`` is the present `Tree.moment`."""
        return f"used {moment - entry.last_used} ago, {entry.hits} hits"

    # --- events ----------------------------------------------------------------------------------

    def attach(self, tree: Any, clock: Callable[[], float]) -> None:
        """Begin to order the runs of ``tree``, once; ``clock`` gives seconds.

        Raises:
            InvalidValue: the policy orders the runs of another tree.
        """
        del tree, clock
        if self.attached:
            raise InvalidValue(f"{self!r} serves another cache; make a policy for each")
        self.attached = True

    def join(self, first: Self) -> None:
        """Share with ``first`` what both learn: they order parts of one memory."""

    def opened(
        self,
        request: Hashable,
        node: Node,
        namespace: Namespace,
        tokens: int,
        following: Callable[[], bytes],
    ) -> tuple[float, int] | None:
        """A prompt of ``tokens`` in ``namespace`` matches up to the end of ``node``.

        ``following`` returns the symbols of its next page, b"" if it has none. Returns the seconds
        since the conversation's last request ended, and its requests so far; None if unknown.
        """
        return None

    def closed(self, request: Hashable, node: Node, row: npt.NDArray[Any], ended: Any) -> None:
        """A request ended; its pages up to the end of ``node`` stay cached.

        ``row`` has the tokens of its prompt and its answer; ``ended`` says how it ended
        (`kvkeep.core.returns.Ended`), None if unknown.
        """

    def forked(self, request: Hashable, fork: Hashable) -> None:
        """``fork`` has the same tokens as ``request`` so far."""

    def dropped(self, request: Hashable) -> None:
        """A request ended, and the pages that it computed are dropped."""

    def check(self) -> None:
        """Assert the invariants of the policy's records."""

    def __repr__(self) -> str:
        return f"<{self.name} eviction, {len(self)} candidates>"


class AgeQueue(Generic[Age]):
    """Entries, or other hashable things, by the age they were pushed with, oldest first.

    Most pushes have the largest age so far (the last used entry becomes evictable last) or the
    smallest (a parent whose last child was just evicted is about as old as that child). Both take
    O(1) at the ends of a linked list. Other entries go to a heap, at O(log n). An entry removed
    from the heap leaves a stale item, which is dropped at the top, or when most items are stale.
    """

    __slots__ = ("_between", "_heap", "_line", "_pushed")

    def __init__(self) -> None:
        self._line: OrderedDict[Any, Age] = OrderedDict()
        self._heap: list[tuple[Age, int, Any]] = []
        self._between: dict[Any, int] = {}  # entry → serial number of its heap item
        self._pushed = 0

    def __len__(self) -> int:
        return len(self._line) + len(self._between)

    def __contains__(self, entry: object) -> bool:
        return entry in self._line or entry in self._between

    @property
    def oldest(self) -> Age | None:
        """The age of the entry that `pop` would return; None if empty."""
        line = self._line
        first = line[next(iter(line))] if line else None
        if not self._between:
            return first
        heap = self._heap
        while self._between.get(heap[0][2]) != heap[0][1]:
            heapq.heappop(heap)
        return heap[0][0] if first is None else min(first, heap[0][0])

    @property
    def newest(self) -> Age | None:
        """The largest age, but for those in the heap; None without others."""
        return self._line[next(reversed(self._line))] if self._line else None

    def push(self, entry: Any, age: Age) -> None:
        """Add an entry that is not in the queue."""
        line = self._line
        if not line or age >= line[next(reversed(line))]:
            line[entry] = age
        elif age <= line[next(iter(line))]:
            line[entry] = age
            line.move_to_end(entry, last=False)
        else:
            self._pushed += 1
            self._between[entry] = self._pushed
            heapq.heappush(self._heap, (age, self._pushed, entry))

    def put_back(self, entry: Entry, age: Age) -> None:
        """Add the entry just popped, in front of others of its age."""
        self._line[entry] = age
        self._line.move_to_end(entry, last=False)

    def remove(self, entry: Any) -> None:
        """Remove an entry that is in the queue."""
        if self._line.pop(entry, None) is None:
            del self._between[entry]
            if len(self._heap) > 2 * len(self._between) + 64:
                self._heap = [item for item in self._heap if self._between.get(item[2]) == item[1]]
                heapq.heapify(self._heap)

    def pop(self) -> Entry | None:
        """Remove and return the oldest entry; None if empty."""
        line = self._line
        if not self._between:
            return line.popitem(last=False)[0] if line else None
        heap = self._heap
        while self._between.get(heap[0][2]) != heap[0][1]:
            heapq.heappop(heap)
        if line and line[next(iter(line))] <= heap[0][0]:
            entry: Entry | None = line.popitem(last=False)[0]
        else:
            entry = heapq.heappop(heap)[2]
            del self._between[entry]
        return entry

    def peek(self) -> Entry | None:
        """Return the entry that `pop` would return."""
        line, age = self._line, self.oldest
        if not self._between:
            return next(iter(line), None)
        entry: Entry = self._heap[0][2]
        return next(iter(line)) if line and line[next(iter(line))] == age else entry

    def pop_until(self, age: Age) -> list[tuple[Any, Age]]:
        """Remove and return the entries of this age and older ones, with their ages."""
        line, old = self._line, []
        for entry, pushed in line.items():
            if pushed > age:
                break
            old.append((entry, pushed))
        for entry, _ in old:
            del line[entry]
        while self._between:
            pushed, serial, entry = self._heap[0]
            if self._between.get(entry) == serial:
                if pushed > age:
                    break
                del self._between[entry]
                old.append((entry, pushed))
            heapq.heappop(self._heap)
        return old


class QueuePolicy(EvictionPolicy):
    """Evicts the entry with the smallest `age`; among equals, the least recently used."""

    def __init__(self) -> None:
        self._queue = AgeQueue[tuple[float, float]]()

    @abstractmethod
    def age(self, entry: Entry) -> float:
        """Return the number that orders ``entry``. It is asked for when ``entry`` is added."""

    def add(self, entry: Entry) -> None:
        self._queue.push(entry, (self.age(entry), entry.last_used))

    def discard(self, entry: Entry) -> None:
        self._queue.remove(entry)

    def pop(self) -> Entry | None:
        return self._queue.pop()

    def put_back(self, entry: Entry) -> None:
        self._queue.put_back(entry, (self.age(entry), entry.last_used))

    def __len__(self) -> int:
        return len(self._queue)


class LRU(EvictionPolicy):
    """Evicts the entry that was used least recently. A use of a prompt uses all its prefixes."""

    name = "lru"

    def __init__(self) -> None:
        self._queue = AgeQueue[float]()
        if type(self) is LRU:  # a call less for each victim, and for each entry that is held
            queue = self._queue
            self.pop, self.peek, self.discard = queue.pop, queue.peek, queue.remove  # type: ignore[method-assign]

    def add(self, entry: Entry) -> None:
        self._queue.push(entry, entry.last_used)

    def discard(self, entry: Entry) -> None:
        self._queue.remove(entry)

    def pop(self) -> Entry | None:
        return self._queue.pop()

    def put_back(self, entry: Entry) -> None:
        self._queue.put_back(entry, entry.last_used)

    def __len__(self) -> int:
        return len(self._queue)


class Priority(EvictionPolicy):
    """Evicts the entry published with the lowest priority; among equals, the least recently used.

    A prefix has the highest priority of everything that was published through it.
    """

    name = "priority"

    def __init__(self) -> None:
        self._queues: dict[int, AgeQueue[float]] = {}
        self._levels: list[int] = []  # a heap of the priorities that have a queue
        self._length = 0

    def add(self, entry: Entry) -> None:
        level = entry.rank = entry.priority
        queue = self._queues.get(level)
        if queue is None:
            queue = self._queues[level] = AgeQueue[float]()
            heapq.heappush(self._levels, level)
        queue.push(entry, entry.last_used)
        self._length += 1

    def discard(self, entry: Entry) -> None:
        self._queues[entry.rank].remove(entry)
        self._length -= 1

    def pop(self) -> Entry | None:
        """Remove and return the least recently used entry of the lowest priority."""
        while self._levels:
            entry = self._queues[self._levels[0]].pop()
            if entry is not None:
                self._length -= 1
                return entry
            del self._queues[heapq.heappop(self._levels)]
        return None

    def put_back(self, entry: Entry) -> None:
        self.add(entry)

    def __len__(self) -> int:
        return self._length
