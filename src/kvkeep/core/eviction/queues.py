"""Queues of entries in order of age, and the three kinds of policy that are made of them."""

from __future__ import annotations

import heapq
from abc import abstractmethod
from collections import OrderedDict
from typing import Any, Generic, TypeVar

from kvkeep.core.eviction.base import Entry, EvictionPolicy

__all__ = ["AgeQueue", "LevelPolicy", "OncePolicy", "QueuePolicy"]

Age = TypeVar("Age", float, tuple[float, int])


class AgeQueue(Generic[Age]):
    """Entries, oldest first, each with the age it was pushed with.

    Ages mostly come rising (what was used last becomes evictable last), and a parent that is left
    alone by the eviction of its last child is about as old as that child: both ends of a linked
    list take these in O(1). Only what belongs in between goes to a heap, at O(log n), and what is
    removed from there stays as a dead item until it surfaces or outnumbers the living.
    """

    __slots__ = ("_between", "_heap", "_line", "_pushed")

    def __init__(self) -> None:
        self._line: OrderedDict[Entry, Age] = OrderedDict()
        self._heap: list[tuple[Age, int, Entry]] = []
        self._between: dict[Entry, int] = {}  # entry → the serial number of its living heap item
        self._pushed = 0

    def __len__(self) -> int:
        return len(self._line) + len(self._between)

    def __contains__(self, entry: object) -> bool:
        return entry in self._line or entry in self._between

    @property
    def oldest(self) -> Age | None:
        """The age of what `pop` would give."""
        line, heap = self._line, self._heap
        first = line[next(iter(line))] if line else None
        if not self._between:
            return first
        while self._between.get(heap[0][2]) != heap[0][1]:
            heapq.heappop(heap)
        return heap[0][0] if first is None else min(first, heap[0][0])

    def push(self, entry: Entry, age: Age) -> None:
        """Put in an entry that is not there."""
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
        """Put in the entry that was just popped: it goes before others of its age, too."""
        self._line[entry] = age
        self._line.move_to_end(entry, last=False)

    def remove(self, entry: Entry) -> None:
        """Take out an entry that is there."""
        if self._line.pop(entry, None) is None:
            del self._between[entry]
            if len(self._heap) > 2 * len(self._between) + 64:
                self._heap = [item for item in self._heap if self._between.get(item[2]) == item[1]]
                heapq.heapify(self._heap)

    def pop(self) -> Entry | None:
        """Take out the oldest entry, or None when there is none."""
        line = self._line
        if not self._between:
            return line.popitem(last=False)[0] if line else None
        heap = self._heap
        while self._between.get(heap[0][2]) != heap[0][1]:
            heapq.heappop(heap)
        if line and line[next(iter(line))] <= heap[0][0]:
            return line.popitem(last=False)[0]
        entry = heapq.heappop(heap)[2]
        del self._between[entry]
        return entry


class QueuePolicy(EvictionPolicy):
    """A policy with one queue, ordered by an age that does not change while an entry is in it."""

    def __init__(self) -> None:
        super().__init__()
        self._queue = AgeQueue[Any]()

    @abstractmethod
    def age(self, entry: Entry) -> float | tuple[float, int]:
        """What the queue is ordered by, smallest first.

        Where two entries are equal, what was held for a moment goes behind the other.
        """

    def add(self, entry: Entry) -> None:
        """``entry`` may be evicted from now on."""
        self._queue.push(entry, self.age(entry))

    def discard(self, entry: Entry) -> None:
        """``entry`` may not be evicted any more."""
        self._queue.remove(entry)

    def pop(self) -> Entry | None:
        """Take out the oldest entry."""
        return self._queue.pop()

    def put_back(self, entry: Entry) -> None:
        """The entry just popped is next again, before others of its age, too."""
        self._queue.put_back(entry, self.age(entry))

    def __len__(self) -> int:
        return len(self._queue)


class LevelPolicy(EvictionPolicy):
    """A policy with a queue per level: lowest level first, least recently used within it."""

    def __init__(self) -> None:
        super().__init__()
        self._queues: dict[int, AgeQueue[float]] = {}
        self._levels: list[int] = []  # a heap of the levels that have a queue
        self._length = 0

    @abstractmethod
    def level(self, entry: Entry) -> int:
        """The level of ``entry``, lowest goes first."""

    def add(self, entry: Entry) -> None:
        """``entry`` may be evicted from now on."""
        level = self.level(entry)
        entry.state = level  # where to find it again, whatever happens to what level() reads
        queue = self._queues.get(level)
        if queue is None:
            queue = self._queues[level] = AgeQueue[float]()
            heapq.heappush(self._levels, level)
        queue.push(entry, entry.last_used)
        self._length += 1

    def discard(self, entry: Entry) -> None:
        """``entry`` may not be evicted any more."""
        assert isinstance(entry.state, int)
        self._queues[entry.state].remove(entry)
        self._length -= 1

    def pop(self) -> Entry | None:
        """Take out the least recently used entry of the lowest level."""
        while self._levels:
            entry = self._queues[self._levels[0]].pop()
            if entry is not None:
                self._length -= 1
                return entry
            del self._queues[heapq.heappop(self._levels)]
        return None

    def put_back(self, entry: Entry) -> None:
        """The entry just popped is next again."""
        self.add(entry)

    def __len__(self) -> int:
        return self._length


class OncePolicy(EvictionPolicy):
    """A policy with two queues by last use: what was asked for once, and what was asked for again.

    The first may have so much; what is beyond that goes first, then the second, then all of it.
    """

    portions = True

    def __init__(self) -> None:
        super().__init__()
        self._once = AgeQueue[float]()
        self._again = AgeQueue[float]()
        self._once_size = 0
        self._beyond = 0  # by how much the first queue had too much before the last `pop`

    @abstractmethod
    def beyond(self) -> int:
        """By how much what was asked for once exceeds what it may have; 0 or less: not at all."""

    def add(self, entry: Entry) -> None:
        """``entry`` may be evicted from now on."""
        if entry.hits:
            self._again.push(entry, entry.last_used)
        else:
            self._once.push(entry, entry.last_used)
            self._once_size += entry.size

    def discard(self, entry: Entry) -> None:
        """``entry`` may not be evicted any more."""
        if entry in self._once:
            self._once.remove(entry)
            self._once_size -= entry.size
        else:
            self._again.remove(entry)

    def pop(self) -> Entry | None:
        """Take out the oldest of the first queue if it has too much, else of the second."""
        self._beyond = self.beyond()
        entry = None if self._beyond > 0 else self._again.pop()
        if entry is None:
            entry = self._once.pop()
            if entry is None:
                return self._again.pop()
            self._once_size -= entry.size
        return entry

    def portion(self, entry: Entry) -> int:
        """What is too much of it in the first queue; all of it in the second."""
        if entry.hits or self._beyond <= 0:
            return entry.size
        return min(self._beyond, entry.size)

    def put_back(self, entry: Entry) -> None:
        """The entry just popped lost only its tail: it is the oldest of its queue."""
        self.add(entry)

    def __len__(self) -> int:
        return len(self._once) + len(self._again)
