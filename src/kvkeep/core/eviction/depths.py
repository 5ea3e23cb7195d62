"""`Depths`: the order of eviction by learned chances of reuse, by hits and place in the prompt."""

from __future__ import annotations

import math
from bisect import bisect_right
from typing import TYPE_CHECKING, Final

from kvkeep.core.eviction.base import Entry, EvictionPolicy
from kvkeep.core.eviction.queues import AgeQueue
from kvkeep.core.eviction.reuse import BUCKETS, HITS, Hazards, bucket_of, chances_of, start_of

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["CLASSES", "Depths", "chances_by_class", "class_of"]

# Blocks before a block at which its class of depth changes.
_DEPTHS: Final = (4, 16, 64, 256)
CLASSES: Final = HITS * (len(_DEPTHS) + 1)
"""Classes of blocks: by hits, and in each by depth."""
# Independent returns that outweigh the prior of a class.
_EVIDENCE: Final = 4.0
# Events for which a class stays chosen at most.
_PERIOD: Final = 32


def class_of(hits: int, before: int) -> int:
    """Return the class of a block with so many ``hits`` and blocks ``before`` it."""
    return min(hits, HITS - 1) * (len(_DEPTHS) + 1) + bisect_right(_DEPTHS, before)


def chances_by_class(seen: Hazards, horizon: float, together: float) -> list[list[float]]:
    """Return for each class the chance of a reuse within ``horizon`` events, by age.

    Column ``b`` is for the least age of bucket ``b``; the last one is for all that is older. With
    age the chances only fall. Blocks of a prompt return together: ``together`` at a time on
    average, and so many count as one observation. A class with few of them has the chances of its
    hits, and those have the chances of all blocks, in proportion to their requests: without
    evidence the order is that of requests over age.
    """
    weight = _EVIDENCE * together
    all_rates = seen.merged(1).rates(0)
    by_hits = seen.merged(HITS)
    ages = [start_of(bucket) for bucket in range(BUCKETS)]
    table = []
    for hits in range(HITS):
        prior = by_hits.rates(hits, [(1 + hits) * rate for rate in all_rates], weight)
        for row in range(hits * len(seen) // HITS, (hits + 1) * len(seen) // HITS):
            chances = chances_of(seen.rates(row, prior, weight), horizon, ages)
            for bucket in range(1, BUCKETS):
                chances[bucket] = min(chances[bucket - 1 : bucket + 1])
            table.append([*chances, chances[-1]])
    return table


class Depths(EvictionPolicy):
    """Evicts the oldest entry of the class whose oldest entry has the least chance of a reuse.

    Classes are by hits and by the place of an entry's end in its prompt, in blocks. Within a class
    it is LRU; if all classes have the same chances, it is LRU altogether. Of a run that spans
    several classes, the tail goes first. ``chances`` come from outside (`chances_by_class`).

    Cost: about 1 µs for most victims, and 0.5 µs a class that has entries for some.
    """

    name = "depths"
    portions = True

    def __init__(self) -> None:
        super().__init__()
        self._block = 1
        self._queues = [AgeQueue[float]() for _ in range(CLASSES)]
        self._rows: dict[Entry, int] = {}  # the class of each entry when it was added
        self._row, self._limit, self._until = 0, 0.0, 0
        self.chances: Sequence[Sequence[float]] = chances_by_class(
            Hazards(CLASSES), float("inf"), 1.0
        )
        """Chance of a reuse, by class and bucket of age."""

    def fit(self, size: int, block: int) -> None:
        self._block = block

    def at(self, now: int) -> None:
        """Set the clock."""
        self._time = now

    def _class(self, entry: Entry) -> int:
        return class_of(entry.hits, (entry.depth + entry.size - 1) // self._block)

    def add(self, entry: Entry) -> None:
        row = self._rows[entry] = self._class(entry)
        self._queues[row].push(entry, entry.last_used)

    def discard(self, entry: Entry) -> None:
        self._queues[self._rows.pop(entry)].remove(entry)

    def pop(self) -> Entry | None:
        """Remove the oldest entry of the class in which that is worth least.

        A class that was chosen stays so for some events, while its oldest entry is worth no more
        than the oldest one of any other class was.
        """
        if not self._rows:
            return None
        row = self._row
        if self._time >= self._until or self._chance(row) >= self._limit:
            row = self._choose()
        entry = self._queues[row].pop()
        assert entry is not None
        del self._rows[entry]
        return entry

    def _choose(self) -> int:
        least = second = math.inf
        found = 0
        for row in range(CLASSES):
            chance = self._chance(row)
            if chance < least:
                least, second, found = chance, least, row
            elif chance < second:
                second = chance
        self._row, self._limit, self._until = found, second, self._time + _PERIOD
        return found

    def _chance(self, row: int) -> float:
        """Return the chance of the oldest entry of a class; more than any if there is none."""
        oldest = self._queues[row].oldest
        if oldest is None:
            return math.inf
        age = self._time - int(oldest)
        bucket = bucket_of(age)
        line, start = self.chances[row], start_of(bucket)
        part = min(1.0, (age - start) / (start_of(bucket + 1) - start))
        return line[bucket] + part * (line[bucket + 1] - line[bucket])

    def portion(self, entry: Entry) -> int:
        """Return the pages of its last class of depth."""
        before = (entry.depth + entry.size - 1) // self._block
        depth = bisect_right(_DEPTHS, before)
        first = _DEPTHS[depth - 1] * self._block if depth else 0
        return entry.size - max(0, first - entry.depth)

    def put_back(self, entry: Entry) -> None:
        self.add(entry)

    def __len__(self) -> int:
        return len(self._rows)
