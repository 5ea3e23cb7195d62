"""`TimedLoads`: what loads from a store into an engine take, by tier; and those that end early."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvkeep.store import BlockStore

__all__ = ["LoadPace", "ProbeEnd", "Read", "RunCost", "TimedLoads"]

_PROBE_S: Final = 0.25  # what a probe should take at most, or twice what one block should
_PROBE_BLOCKS: Final = (1, 2, 4, 8, 16)  # in turn: reads of several blocks overlap
_PROBE_END_S: Final = 2.0
_EARLY: Final = 0.1  # of the seconds of computing, after which a load is compared with it
_SLOWER: Final = 1.2  # multiples of the pace of computing at which a load ends


class RunCost(NamedTuple):
    """Keys up to ``end`` are in ``tier``; ``seconds``: expected to load them, None: unknown."""

    end: int
    tier: str
    seconds: float | None
    error: float


class LoadPace(NamedTuple):
    """When a load ends early: at ``until`` (monotonic seconds), or when it falls behind.

    It falls behind if its blocks come more slowly than computing them would go, ``compute_s`` for
    all of them; 0: that is not known.
    """

    until: float
    compute_s: float = 0.0


class Read(NamedTuple):
    """What a read has brought: leading blocks.

    ``late``: more would have come too slowly. ``failed``: the tier that then was slower than what
    is known of it, or from which nothing came; "": none.
    """

    blocks: int
    late: bool
    failed: str


class ProbeEnd(NamedTuple):
    """A probe of ``tier`` that has ended, after ``seconds``; ``came``: with blocks."""

    tier: str
    seconds: float
    expected: float
    came: bool


class TimedLoads:
    """What loads from ``store`` take, and loads that end when they take too long.

    Thread safety: all methods.
    """

    def __init__(self, store: BlockStore) -> None:
        self._store = store
        self._probes = 0
        self.cost = store.cost

    def runs(self, keys: Sequence[bytes], nbytes: Sequence[int]) -> list[RunCost]:
        """Return in which tiers ``keys`` lie, in runs, and what it takes to load them.

        ``nbytes`` are the bytes that are loaded for each key.
        """
        found, start = [], 0
        for end, tier in self._store.sources(keys):
            learned = self.cost.reading(tier)
            seconds = learned.seconds(sum(nbytes[start:end])) if learned.known else None
            found.append(RunCost(end, tier, seconds, learned.error if learned.observations else 0))
            start = end
        return found

    def read(
        self,
        keys: Sequence[bytes],
        sizes: Sequence[int],
        sink: Callable[[int, memoryview], None],
        pace: LoadPace,
        cancelled: Callable[[], bool],
    ) -> Read:
        """Read blocks as `BlockStore.read` does, until they come too slowly."""
        runs = self._store.sources(keys)
        unknown = {tier for _, tier in runs if not self.cost.reading(tier).known}
        arrived, began, slow = 0, time.monotonic(), False

        def ends() -> bool:
            nonlocal slow
            slow = _is_slow(arrived, len(keys), time.monotonic() - began, pace.compute_s)
            return slow or cancelled()

        def take(at: int, raw: memoryview) -> None:
            nonlocal arrived
            sink(at, raw)
            arrived += 1

        count = self._store.read(
            keys, sizes, take, deadline=max(0.0, pace.until - began), cancelled=ends
        )
        late, failed = slow or time.monotonic() >= pace.until, ""
        if late and count < len(keys):
            start = 0
            for end, tier in runs:
                if count < end:
                    # What has come of an unknown tier is news enough.
                    failed = "" if tier in unknown and count > start else tier
                    break
                start = end
        return Read(count, late, failed)

    def probe(self, tier: str, keys: Sequence[bytes], sizes: Sequence[int]) -> ProbeEnd:
        """Read a few of ``keys`` from ``tier`` for no request. Takes two seconds at most."""
        start = 0
        for end, name in self._store.sources(keys):
            if name == tier:
                break
            start = end
        learned, most = self.cost.reading(tier), 1
        if learned.known:
            most = _PROBE_BLOCKS[self._probes % len(_PROBE_BLOCKS)]
            self._probes += 1
        count = min(most, len(keys) - start)
        if count < 1:
            return ProbeEnd(tier, 0.0, 0.0, came=False)
        longest = max(_PROBE_S, 2 * learned.seconds(sizes[start]))
        while count > 1 and learned.seconds(sum(sizes[start : start + count])) > longest:
            count -= 1
        expected = learned.seconds(sum(sizes[start : start + count]))
        copy = bytearray(max(sizes[start : start + count]))

        def take(_at: int, raw: memoryview) -> None:
            copy[: len(raw)] = raw

        began = time.monotonic()
        read = self.read(
            keys[start : start + count], sizes[start : start + count], take,
            LoadPace(began + _PROBE_END_S), lambda: False,
        )  # fmt: skip
        return ProbeEnd(tier, time.monotonic() - began, expected, came=read.blocks > 0)


def _is_slow(arrived: int, blocks: int, seconds: float, compute_s: float) -> bool:
    """Whether blocks come more slowly than computing goes."""
    if not arrived or seconds < _EARLY * compute_s:
        return False
    return seconds * blocks > _SLOWER * compute_s * arrived and compute_s > 0
