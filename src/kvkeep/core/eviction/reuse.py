"""Reuse: evict the entry least likely to be requested soon, as learned from past requests."""

from __future__ import annotations

import math
from collections import OrderedDict
from typing import TYPE_CHECKING, Final

import numpy as np

from kvkeep.core.errors import InvalidValue
from kvkeep.core.eviction.base import Entry, EvictionPolicy
from kvkeep.core.eviction.history import History
from kvkeep.core.eviction.queues import AgeQueue

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

__all__ = ["Hazards", "Reuse"]

# Ages in events, by powers of two; ages below 2 ** _YOUNG share a bucket.
_YOUNG: Final = 5
BUCKETS: Final = 22
"""Classes of age."""
HITS: Final = 4
"""Classes of hits: 0, 1, 2, and 3 or more."""
# Least size of the sample, as a share of the blocks and in blocks, to keep its error small.
_SAMPLED: Final = 0.1
_LEAST: Final = 1000
# Half-life of the counts, in requested blocks over blocks in memory.
_HALF_LIFE: Final = 8.0


class Reuse(EvictionPolicy):
    """Evicts the entry least likely to be requested within ``horizon`` turnovers of the memory.

    The probability is counted online: of the blocks with so many hits that were not requested for
    so long, how many returned, and when. A sample of all blocks is followed by key, so evicted ones
    are covered too. Entries wait in one queue per number of hits (to 3) and power of two of age,
    oldest first. They move between queues as they age, and victims come from the queue with the
    lowest counted probability. Without any prompts reported, the rank is hits over age (hyperbolic
    caching).

    An entry that returns after its eviction has a hit if it is among the last ``remembered``
    memories' worth of blocks. Memory: about 300 bytes for each of these. Cost: about 1 µs a block
    of every prompt, and up to 72 queues to look into for a victim.
    """

    name = "reuse"
    remembers = True

    def __init__(self, horizon: float = 0.5, remembered: float = 4.0) -> None:
        super().__init__()
        if not horizon > 0:
            raise InvalidValue(
                f"horizon is a number of turnovers of the memory above 0, got {horizon}"
            )
        if not remembered >= 0:
            raise InvalidValue(f"remembered is a number of memories, 0 or more, got {remembered}")
        self.horizon = horizon
        self.remembered = remembered
        self._size = 0
        self._below = 0
        self.history = History(1)
        """The blocks that were requested lately."""
        self._watched: OrderedDict[bytes, tuple[int, int]] = OrderedDict()  # last request, hits
        self._most = 0
        self._left = self._round = 1
        self._fade = 1.0
        self._hazards = Hazards()
        self._stored = 0.0  # pages stored since `_since`; it fades, as `_events` does
        self._events = 0.0
        self._since = 0
        self._queues = [[AgeQueue[float]() for _ in range(BUCKETS)] for _ in range(HITS)]
        self.ranks = self._ranked(math.inf)
        """Hits and age bucket of each queue, least likely to be reused first."""
        self._order_queues()
        self._aged = 0
        self._length = 0

    def fit(self, size: int, block: int) -> None:
        self._size = size
        blocks = max(1, size // block)
        self.history = History(int(self.remembered * blocks))
        self.watch(min(1.0, max(_SAMPLED, _LEAST / blocks)), blocks)

    def watch(self, share: float, blocks: int) -> None:
        """Sample ``share`` of the keys, for a memory of ``blocks`` blocks."""
        self._below = max(1, round(share * 65_536))
        self._most = max(1, round(share * blocks * self.remembered))
        self._left = self._round = max(_LEAST // 2, round(share * blocks))
        self._fade = 0.5 ** (self._round / (_HALF_LIFE * share * blocks))

    def requested(self, keys: Sequence[bytes]) -> int:
        below, watched, now = self._below, self._watched, self._time
        for key in keys:
            if int.from_bytes(key[:2]) >= below:
                continue
            self._left -= 1
            last, hits = watched.pop(key, (now, -1))
            if hits >= 0:
                self._hazards.ended(now - last, hits, reused=True)
            watched[key] = now, min(hits + 1, HITS - 1)
            if len(watched) > self._most:
                last, hits = watched.popitem(last=False)[1]
                self._hazards.ended(now - last, hits, reused=False)
        if self._left < 0:
            self._left = self._round
            self._learn()
        return self.history.requested(keys)

    def _learn(self) -> None:
        """Rank the queues by the counts so far."""
        fade = self._fade
        self._events = fade * self._events + self._time - self._since
        self._since = self._time
        turnover = self._size * self._events / max(self._stored, 1.0)
        self._stored *= fade
        living = self._hazards.copy()
        for last, hits in self._watched.values():
            living.ended(self._time - last, hits, reused=False)
        self._rank(self.horizon * turnover, living)
        self._hazards.fade(fade)

    def _rank(self, horizon: float, seen: Hazards) -> None:
        """Rank the queues by what was ``seen``."""
        self.ranks = self._ranked(horizon, seen)
        self._order_queues()

    def follow(self, other: Reuse) -> None:
        """Take over the clock and the ranks of ``other``."""
        self._time = other._time
        if self.ranks is not other.ranks:
            self.ranks = other.ranks
            self._order_queues()

    def _order_queues(self) -> None:
        self._order = [self._queues[hits][bucket] for hits, bucket in self.ranks]
        self._places = {queue: place for place, queue in enumerate(self._order)}
        self._first = 0  # all queues before this one are empty

    def _ranked(self, horizon: float, seen: Hazards | None = None) -> list[tuple[int, int]]:
        seen = seen or self._hazards
        ranks = [
            (chance, -bucket, hits)  # of equals, the oldest
            for hits in range(HITS)
            for bucket, chance in enumerate(seen.chances(hits, horizon))
        ]
        return [(hits, -bucket) for _, bucket, hits in sorted(ranks)]

    # --- queues ----------------------------------------------------------------------------------

    def stored(self, entry: Entry, priority: int, *, known: bool = False) -> None:
        """Record a new entry, and count its pages: they give the turnover of the memory."""
        super().stored(entry, priority, known=known)
        self._stored += entry.size

    def add(self, entry: Entry) -> None:
        bucket = bucket_of(self._time - entry.last_used)
        queue = self._queues[min(entry.hits, HITS - 1)][bucket]
        self._push(queue, entry)
        entry.state = queue
        self._length += 1

    def _push(self, queue: AgeQueue[float], entry: Entry) -> None:
        queue.push(entry, entry.last_used)
        place = self._places[queue]
        if place < self._first:  # noqa: PLR1730 - min() costs more
            self._first = place

    def discard(self, entry: Entry) -> None:
        _queue_of(entry).remove(entry)
        self._length -= 1

    def pop(self) -> Entry | None:
        """Remove the oldest entry of the first queue in the learned order."""
        if not self._length:
            return None
        if self._time - self._aged >= 1 << _YOUNG:
            self._age()
        order, first = self._order, self._first
        while (entry := order[first].pop()) is None:
            first += 1
        self._first = first
        self._length -= 1
        return entry

    def _age(self) -> None:
        """Move entries that grew older: at most once per bucket that an entry lives to see."""
        self._aged = now = self._time
        for queues in self._queues:
            for bucket in range(BUCKETS - 1):
                queue, until = queues[bucket], now - (1 << (bucket + _YOUNG))
                while (oldest := queue.oldest) is not None and oldest <= until:
                    entry = queue.pop()
                    assert entry is not None
                    older = queues[bucket_of(now - entry.last_used)]
                    self._push(older, entry)
                    entry.state = older

    def put_back(self, entry: Entry) -> None:
        """Make the entry just popped the oldest of its queue again."""
        self._push(_queue_of(entry), entry)
        self._length += 1

    def __len__(self) -> int:
        return self._length


class Hazards:
    """Counts how often blocks return, by their class and the time since their last request.

    A class is a row: the hits of a block, unless the user of the counts has finer ones.
    """

    def __init__(self, rows: int = HITS) -> None:
        self._came = [[0.0] * BUCKETS for _ in range(rows)]
        self._ended = [[0.0] * BUCKETS for _ in range(rows)]
        self._inside = [[0.0] * BUCKETS for _ in range(rows)]

    def __len__(self) -> int:
        return len(self._came)

    def ended(self, age: int, row: int, *, reused: bool) -> None:
        """Count a block of class ``row``, ``reused`` at ``age`` or followed no further."""
        bucket = bucket_of(age)
        self._ended[row][bucket] += 1
        self._inside[row][bucket] += age - start_of(bucket)
        if reused:
            self._came[row][bucket] += 1

    def rates(
        self, row: int, prior: Sequence[float] | None = None, weight: float = 1.0
    ) -> list[float]:
        """Return reuses per event, for each bucket of age.

        Every bucket starts with ``weight`` imaginary reuses at the rate of ``prior``, by default of
        hits over age, so nothing that was never observed counts as impossible.
        """
        if prior is None:
            prior = [0.1 * (1 + row) / start_of(bucket + 1) for bucket in range(BUCKETS)]
        rates = [0.0] * BUCKETS
        older = 0.0
        for bucket in range(BUCKETS - 1, -1, -1):
            width = start_of(bucket + 1) - start_of(bucket)
            watched = older * width + self._inside[row][bucket]
            came = self._came[row][bucket]
            rates[bucket] = (came + weight) / (watched + weight / prior[bucket])
            older += self._ended[row][bucket]
        return rates

    def chances(self, hits: int, horizon: float) -> list[float]:
        """Return for each bucket the probability of a reuse within ``horizon`` events.

        The age at the start is the middle of the bucket.

        With an infinite horizon, return the rates.
        """
        middles = [(start_of(at) + start_of(at + 1)) / 2 for at in range(BUCKETS)]
        return chances_of(self.rates(hits), horizon, middles)

    def merged(self, rows: int) -> Hazards:
        """Return the counts with as many classes as ``rows``, each of adjacent ones here."""
        other = Hazards(rows)
        each = len(self) // rows
        for table, finer in (
            (other._came, self._came),
            (other._ended, self._ended),
            (other._inside, self._inside),
        ):
            for row in range(rows):
                columns = zip(*finer[row * each : (row + 1) * each], strict=True)
                table[row] = [sum(column) for column in columns]
        return other

    def fade(self, factor: float) -> None:
        """Multiply all counts by ``factor``."""
        for table in (self._came, self._ended, self._inside):
            for row in table:
                row[:] = [factor * count for count in row]

    def copy(self) -> Hazards:
        """Return an independent copy."""
        other = Hazards(len(self))
        other._came = [row.copy() for row in self._came]
        other._ended = [row.copy() for row in self._ended]
        other._inside = [row.copy() for row in self._inside]
        return other


def chances_of(rates: Sequence[float], horizon: float, ages: Sequence[float]) -> list[float]:
    """Return the probabilities of a reuse within ``horizon`` events, for an age in each bucket.

    ``rates`` are reuses per event by bucket; with an infinite horizon, they are returned.
    """
    if math.isinf(horizon):
        return [*rates]
    at = np.asarray(ages, np.float64)
    before = np.concatenate(([0.0], np.cumsum(np.asarray(rates)[:-1] * _WIDTHS[:-1])))

    def expected(age: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Return the reuses up to an age, each bucket at its rate."""
        over: npt.NDArray[np.float64] = rates[-1] * np.maximum(0.0, age - _STARTS[-1])
        return over + np.interp(age, _STARTS, before)

    chances: list[float] = (-np.expm1(expected(at) - expected(at + horizon))).tolist()
    return chances


def bucket_of(age: int) -> int:
    """Return the bucket of an age in events."""
    bucket = (age >> _YOUNG).bit_length()
    return bucket if bucket < BUCKETS else BUCKETS - 1


def start_of(bucket: int) -> int:
    """Return the least age of a bucket."""
    return (1 << (bucket + _YOUNG)) >> 1 if bucket else 0


_STARTS: Final = np.array([start_of(bucket) for bucket in range(BUCKETS)], np.float64)
_WIDTHS: Final = np.diff([*_STARTS, float(start_of(BUCKETS))])


def _queue_of(entry: Entry) -> AgeQueue[float]:
    assert isinstance(entry.state, AgeQueue)
    return entry.state
