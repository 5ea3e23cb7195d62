"""`LoadCosts`: what loads from a store into an engine take, end to end, by tier."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvkeep.core.cost import CostModel
    from kvkeep.store import BlockStore

__all__ = ["LoadCosts", "LoadPace", "ProbeEnd", "Read", "RunCost"]

_PROBE_S: Final = 0.25  # what a probe should take at most, as far as is known
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


class LoadCosts:
    """Reads blocks from ``store`` for an engine, and learns in ``cost`` what that takes.

    That is more than what a tier takes: blocks are decoded, copied into the engine's pages, and
    pass through the store's threads. Bytes are those in the engine.

    Thread safety: all methods.
    """

    def __init__(self, store: BlockStore, cost: CostModel) -> None:
        self._store = store
        self._probes = 0
        self.cost = cost

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
        """Read blocks as `BlockStore.read` does, until they come too slowly; learn from it."""
        runs = self._store.sources(keys)
        meter = _Meter(self.cost, runs, sizes)
        began = time.monotonic()
        late = False

        def ends() -> bool:
            nonlocal late
            late = _is_slow(meter.arrived, len(keys), time.monotonic() - began, pace.compute_s)
            return late or cancelled()

        def take(at: int, raw: memoryview) -> None:
            sink(at, raw)
            meter.came()

        count = 0
        try:
            count = self._store.read(
                keys, sizes, take, deadline=max(0.0, pace.until - began), cancelled=ends
            )
        finally:
            late = late or time.monotonic() >= pace.until
            meter.close(late=late)
        failed = ""
        if late and count < len(keys):
            failed, news = meter.stopped_in
            failed = "" if news else failed
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
        while count > 1 and learned.seconds(sum(sizes[start : start + count])) > _PROBE_S:
            count -= 1
        if count < 1:
            return ProbeEnd(tier, 0.0, 0.0, came=False)
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


class _Meter:
    """Observes one read: each run of blocks from one tier is a transfer."""

    def __init__(
        self, cost: CostModel, runs: Sequence[tuple[int, str]], sizes: Sequence[int]
    ) -> None:
        self._tiers = [(tier, cost.reading(tier).known) for _, tier in runs]
        self._runs = [(end, cost.reading(tier)) for end, tier in runs]
        self._sizes = sizes
        self._at = self._start = 0
        self.arrived = 0
        self._begin()

    def _begin(self) -> None:
        if self._at < len(self._runs):
            self._runs[self._at][1].begin()

    def came(self) -> None:
        """Note that a block has come."""
        self.arrived += 1
        if self._at < len(self._runs) and self.arrived == self._runs[self._at][0]:
            self._end(moved=True)
            self._at += 1
            self._start = self.arrived
            self._begin()

    @property
    def stopped_in(self) -> tuple[str, bool]:
        """The tier of the block that did not come, and whether blocks from it are news of it."""
        at = next((at for at, (end, _) in enumerate(self._runs) if end > self.arrived), -1)
        tier, known = self._tiers[at]
        return tier, not known and self.arrived > self._start

    def _end(self, *, moved: bool) -> None:
        nbytes = sum(self._sizes[self._start : self.arrived]) if moved else 0
        self._runs[self._at][1].end(nbytes or None)

    def close(self, *, late: bool) -> None:
        """End the observation; a run that ends early teaches only if it was ``late``."""
        if self._at < len(self._runs):
            self._end(moved=late)
            self._at = len(self._runs)
