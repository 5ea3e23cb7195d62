"""ReturnAware: evict what is least worth keeping until its conversation returns."""

from __future__ import annotations

import heapq
import math
from typing import TYPE_CHECKING, Final

from kvkeep.core.eviction.base import Entry, EvictionPolicy
from kvkeep.core.eviction.queues import AgeQueue
from kvkeep.core.returns import AGES, BUCKETS, Returns, Wait, bucket_of

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["ReturnAware"]

_LEFT: Final = (-1, 0, 0)
_MOST_SHARED: Final = 3  # octaves: a run that eight conversations may need is not worth more

Place = tuple[int, int, int]
"""Class of the wait, octaves above what the class is worth, bucket of its age."""


class ReturnAware(EvictionPolicy):
    """Evicts the run that is worth least until the next request of its conversation comes.

    The worth is learned online, by class and age of the wait (`kvkeep.core.returns.Returns`). Runs
    that a conversation has left behind go first, oldest first. A run that several conversations
    wait behind is worth as much as all of them, up to eight. Runs of equal worth go in the order of
    their last use; a run that no wait is known of counts as one of the most general class.

    Entries wait in one queue per class, factor and age bucket, oldest first. They move to the next
    queue as they age.

    Cost: O(log n) an entry, for each half octave of its age, and O(queues) after each time that
    something was learned. A hit costs nothing.
    """

    name = "returns"
    sized = False
    awaits = True
    advised = True

    def __init__(self) -> None:
        super().__init__()
        self.returns = Returns()
        """What is learned; the cache's own once it is attended."""
        self.clock: Callable[[], float] = lambda: self._time
        """Seconds; without a cache, the number of events."""
        self._version = -1
        self._queues: dict[Place, AgeQueue[float]] = {}
        self._order: list[tuple[float, Place]] = []  # a heap of worths; each queue is in it once …
        self._idle: set[Place] = set()  # … but those that were empty when they came first
        self._aged = 0.0
        self._length = 0
        self._popped = _LEFT
        self._popped_wait: Wait | None = None

    def attend(self, returns: Returns, clock: Callable[[], float]) -> None:
        self.returns, self.clock = returns, clock

    # --- queues ------------------------------------------------------------------------------

    def add(self, entry: Entry) -> None:
        wait = entry.wait
        if wait is None:
            wait = entry.wait = self.unknown()
        self._push(entry, wait.since, self._placed(wait, entry.followers))
        self._length += 1

    def discard(self, entry: Entry) -> None:
        assert entry.place is not None
        self._queues[entry.place].remove(entry)
        self._length -= 1

    def pop(self) -> Entry | None:
        """Remove the oldest entry of the queue that is worth least."""
        if not self._length:
            return None
        place = self._first()
        entry = self._queues[place].pop()
        assert entry is not None
        self._length -= 1
        self._popped, self._popped_wait = place, entry.wait
        return entry

    def least(self) -> float | None:
        """Return what the next victim is worth, in returns a second."""
        return self._worth(self._first()) if self._length else None

    def _first(self) -> Place:
        """Return the place of the next victim; there is one."""
        now = self.clock()
        if abs(now - self._aged) >= AGES[1]:
            self._age(now)
        if self.returns.due:
            self.returns.learn(now)
        if self._version != self.returns.version:
            self._rank()
        order, queues = self._order, self._queues
        while not len(queues[order[0][1]]):
            self._idle.add(heapq.heappop(order)[1])
        return order[0][1]

    def put_back(self, entry: Entry) -> None:
        """Make the entry just popped the next victim of its queue."""
        assert entry.wait is not None
        if entry.wait is not self._popped_wait or entry.wait.over != (self._popped == _LEFT):
            # Its tail took a wait along.
            self.add(entry)
            return
        queue = self._queues[self._popped]  # it was not removed: the entry came from it
        queue.put_back(entry, entry.wait.since)
        entry.place = self._popped
        self._length += 1

    def __len__(self) -> int:
        return self._length

    # --- worth -------------------------------------------------------------------------------

    def unknown(self) -> Wait:
        """Return a wait of the most general class, which begins now."""
        return Wait(0, self.clock(), 0, (), self.returns.tenant(None))

    def worth_of(self, wait: Wait, followers: int) -> float:
        """Return the worth of a run that ``wait`` and as many as ``followers`` wait for."""
        return self._worth(self._placed(wait, followers))

    def _placed(self, wait: Wait, followers: int) -> Place:
        if wait.over:
            return _LEFT
        octaves = wait.tenant.octaves
        if followers > 1:
            octaves += min(_MOST_SHARED, followers.bit_length() - 1)
        return wait.kind, octaves, bucket_of(self.clock() - wait.since)

    def _push(self, entry: Entry, since: float, place: Place) -> None:
        (self._queues.get(place) or self._begun(place)).push(entry, since)
        entry.place = place

    def _begun(self, place: Place) -> AgeQueue[float]:
        """Return the queue of ``place``, and order it if it is new or was idle."""
        queue = self._queues.get(place)
        if queue is None:
            queue = self._queues[place] = AgeQueue()
        elif place in self._idle:
            self._idle.discard(place)
        else:
            return queue
        heapq.heappush(self._order, (self._worth(place), place))
        return queue

    def _worth(self, place: Place) -> float:
        kind, octaves, bucket = place
        return -1.0 if place == _LEFT else self.returns.worth(kind, bucket) * 2.0**octaves

    def _rank(self) -> None:
        """Order the queues by what was learned."""
        self._version = self.returns.version
        for place in self._idle:
            del self._queues[place]
        self._idle.clear()
        self._order = [(self._worth(place), place) for place in self._queues]
        heapq.heapify(self._order)

    def _age(self, now: float) -> None:
        """Move entries that grew older: once per bucket that an entry lives to see."""
        self._aged = now
        for place in list(self._queues):
            kind, octaves, bucket = place
            queue = self._queues[place]
            if place == _LEFT or bucket == BUCKETS - 1 or not len(queue):
                continue
            older = queue.pop_until(now - AGES[bucket + 1])
            begin = -math.inf if bucket + 2 == BUCKETS else now - AGES[bucket + 2]
            if any(since <= begin for _, since in older):  # nothing was evicted for long
                for entry, since in older:
                    self._push(entry, since, (kind, octaves, bucket_of(now - since)))
            elif older:
                next_place = kind, octaves, bucket + 1
                push = self._begun(next_place).push
                for entry, since in older:
                    push(entry, since)
                    entry.place = next_place

    def describe(self, entry: Entry) -> str:
        wait = entry.wait
        if wait is None:
            return super().describe(entry)
        if wait.over:
            return "left behind by its conversation"
        age, worth = self.clock() - wait.since, self.worth_of(wait, entry.followers)
        return f"waits for {age:.3g} s, worth {worth:.3g} returns/s"
