"""Queues of entries ordered by age, and two kinds of policy built from them."""

from __future__ import annotations

import heapq
from abc import abstractmethod
from collections import OrderedDict
from typing import Any, Generic, TypeVar

from kvkeep.core.eviction.base import Entry, EvictionPolicy

__all__ = ["AgeQueue", "LevelPolicy", "QueuePolicy"]

Age = TypeVar("Age", float, tuple[float, int])


class AgeQueue(Generic[Age]):
    """Entries ordered by the age they were pushed with, oldest first.

    Most pushes have the largest age so far (the last used entry becomes evictable last) or the
    smallest (a parent whose last child was just evicted is about as old as that child). Both take
    O(1) at the ends of a linked list. Other entries go to a heap, at O(log n). An entry removed
    from the heap leaves a dead item, which is dropped when it surfaces or when dead items prevail.
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
        """The age of the entry that `pop` would return; None if empty."""
        line = self._line
        first = line[next(iter(line))] if line else None
        if not self._between:
            return first
        heap = self._heap
        while self._between.get(heap[0][2]) != heap[0][1]:
            heapq.heappop(heap)
        return heap[0][0] if first is None else min(first, heap[0][0])

    def push(self, entry: Entry, age: Age) -> None:
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

    def remove(self, entry: Entry) -> None:
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
            return line.popitem(last=False)[0]
        entry = heapq.heappop(heap)[2]
        del self._between[entry]
        return entry

    def pop_until(self, age: Age) -> list[tuple[Entry, Age]]:
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
    """A policy with one queue. The age of an entry must not change while it is in the queue."""

    def __init__(self) -> None:
        super().__init__()
        self._queue = AgeQueue[Any]()

    @abstractmethod
    def age(self, entry: Entry) -> float | tuple[float, int]:
        """Return the sort key of the queue; the smallest is evicted first.

        Among equal ages, an entry that was removed and added again comes last.
        """

    def add(self, entry: Entry) -> None:
        self._queue.push(entry, self.age(entry))

    def discard(self, entry: Entry) -> None:
        self._queue.remove(entry)

    def pop(self) -> Entry | None:
        return self._queue.pop()

    def put_back(self, entry: Entry) -> None:
        """Make the entry just popped the next victim, before others of its age."""
        self._queue.put_back(entry, self.age(entry))

    def __len__(self) -> int:
        return len(self._queue)


class LevelPolicy(EvictionPolicy):
    """A policy with a queue per level: the lowest level first, least recently used within it."""

    def __init__(self) -> None:
        super().__init__()
        self._queues: dict[int, AgeQueue[float]] = {}
        self._levels: list[int] = []  # a heap of the levels that have a queue
        self._length = 0

    @abstractmethod
    def level(self, entry: Entry) -> int:
        """Return the level of ``entry``; the lowest is evicted first."""

    def add(self, entry: Entry) -> None:
        level = self.level(entry)
        entry.state = level  # its queue, even if level() returns another by now
        queue = self._queues.get(level)
        if queue is None:
            queue = self._queues[level] = AgeQueue[float]()
            heapq.heappush(self._levels, level)
        queue.push(entry, entry.last_used)
        self._length += 1

    def discard(self, entry: Entry) -> None:
        assert isinstance(entry.state, int)
        self._queues[entry.state].remove(entry)
        self._length -= 1

    def pop(self) -> Entry | None:
        """Remove and return the least recently used entry of the lowest level."""
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
