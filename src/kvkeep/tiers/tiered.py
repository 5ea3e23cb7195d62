"""Blocks over several tiers: memory in front, slower and larger places behind it."""

from __future__ import annotations

import threading
import time
from collections import deque
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from kvkeep.errors import IllegalStep
from kvkeep.tiers.flight import Flight
from kvkeep.tiers.plan import Inclusive, TieringPolicy, Touches
from kvkeep.tiers.record import HEADER_BYTES
from kvkeep.tiers.workers import Workers

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvkeep.tiers.counters import TierStats
    from kvkeep.tiers.front import Front, Held
    from kvkeep.tiers.tier import Tier

__all__ = ["Prefetch", "TieredStore", "Written"]

_WINDOW = 16  # blocks read ahead, at most
_PROBES = (1, 16, 64, 256)  # blocks asked for at once: few at first, most prompts are not there
_HEADROOM = 0.1  # of memory that is kept free where evicted blocks have to be written first


@dataclass(slots=True)
class Written:
    """What became of blocks that were put, by their positions; the rest found no room."""

    kept: list[int] = field(default_factory=list)
    already: list[int] = field(default_factory=list)


class Prefetch:
    """Blocks on their way into memory, in a thread of the store.

    Thread safety: all methods.
    """

    def __init__(self) -> None:
        self._ready = 0
        self._over = threading.Event()
        self._cancelled = False

    @property
    def done(self) -> bool:
        """Nothing more comes: all is there, or the rest is not to be had."""
        return self._over.is_set()

    @property
    def ready(self) -> int:
        """Leading blocks that arrived."""
        return self._ready

    def wait(self, timeout: float | None = None) -> int:
        """Wait until it is done, ``timeout`` seconds at most; leading blocks that arrived."""
        self._over.wait(timeout)
        return self._ready

    def cancel(self) -> None:
        """Start no more reads; what is on its way still arrives."""
        self._cancelled = True


class TieredStore:
    """Raw blocks by id, over `Front` and any number of `Tier`.

    Nothing here raises because a place fails or is slow: a read is shorter, a write is dropped and
    counted. `policy` says what moves where.

    Thread safety: all methods. Cost: a few µs a block in memory, besides the copy, which is the
    caller's; everything slow is done by threads of the tiers.
    """

    def __init__(
        self, front: Front, tiers: Sequence[Tier], policy: TieringPolicy | None = None
    ) -> None:
        self.front = front
        self.tiers = list(tiers)
        self.policy = policy or Inclusive()
        self._touches = Touches()
        self._lock = threading.Lock()
        self._flights: dict[bytes, Flight] = {}
        self._queued: set[tuple[bytes, str]] = set()  # blocks that a tier is to write
        self._prefetching = Workers("prefetch", 4, 256)
        self._closed = False
        front.evicted = self._evicted_above
        for level, tier in enumerate(self.tiers, start=1):
            tier.demote = partial(self._demote_below, level)
            tier.open()

    # --- finding ---------------------------------------------------------------------------------

    def locate(self, blocks: Sequence[bytes], until: float | None = None) -> list[int]:
        """The level that each of ``blocks`` would come from, up to the first that is nowhere.

        0 is memory. Places that may hold more than is known are asked about what is not known:
        one question of at most their timeout each, not beyond ``until`` (monotonic seconds), and
        none where all is known.
        """
        levels: list[int] = []
        probed: dict[int, int] = {}  # position → level, of what was asked for
        asked = 0
        while len(levels) < len(blocks):
            at = len(levels)
            level = self._level_of(blocks[at])
            if level is None:
                level = probed.get(at)
            if level is None:
                upto = at + _PROBES[min(asked, len(_PROBES) - 1)]
                asked += 1
                probed |= self._probe(blocks[at:upto], at, until)
                level = probed.get(at)
            if level is None:
                break
            levels.append(level)
        return levels

    def knows(self, block: bytes) -> bool:
        """Whether ``block`` is somewhere, without asking anybody."""
        return self._level_of(block) is not None

    def _level_of(self, block: bytes) -> int | None:
        if block in self.front:
            return 0
        for level, tier in enumerate(self.tiers, start=1):
            if tier.knows(block):
                return level
        return None

    def _probe(self, blocks: Sequence[bytes], at: int, until: float | None) -> dict[int, int]:
        """Ask shared places, faster ones first; each about what those before it do not have."""
        found: dict[int, int] = {}
        for level, tier in enumerate(self.tiers, start=1):
            if tier.backend.shared or not tier.indexed:
                count = tier.probe(blocks[len(found) :], until)
                for _ in range(count):
                    found[at + len(found)] = level
            if len(found) == len(blocks):
                break
        return found

    # --- reading ---------------------------------------------------------------------------------

    def read(
        self,
        blocks: Sequence[bytes],
        raw_bytes: Sequence[int],
        sink: Callable[[int, memoryview], None],
        *,
        levels: Sequence[int] | None = None,
        deadline: float | None = None,
        cancelled: Callable[[], bool] | None = None,
    ) -> int:
        """Hand the raw bytes of ``blocks`` to ``sink``, in order, up to the first that is missing.

        ``raw_bytes`` are their lengths; a record of another length is a bad one. ``sink(i, raw)``
        runs in this thread while later blocks are read in others; it must copy, and not raise but
        for faults. ``levels`` are what `locate` said, if it was asked before. ``deadline`` seconds
        from now it ends with what arrived.

        Returns how many blocks were handed over.
        """
        self._check_open()
        until = None if deadline is None else time.monotonic() + deadline
        ahead: deque[Flight | Held] = deque()
        if levels is None:
            levels = self.locate(blocks, until)
        count = started = 0
        try:
            while count < len(levels):
                if cancelled is not None and cancelled():
                    break
                limit = self._window(raw_bytes[count])
                while started < len(levels) and len(ahead) < limit:
                    ahead.append(self._start(blocks[started], raw_bytes[started], levels[started]))
                    started += 1
                held = self._await(ahead[0], until)
                if held is None:
                    break
                if len(held.payload) != raw_bytes[count]:
                    break  # only in memory, under a key that says otherwise: whoever put it lied
                sink(count, held.payload)
                _let_go(ahead.popleft())
                count += 1
        finally:
            for waiting in ahead:
                _let_go(waiting)
        self._used(blocks[:count])
        if count < len(levels):  # where one block is gone, others may be
            for tier in self.tiers:
                tier.recheck(blocks[count : len(levels)])
        return count

    def _window(self, raw_bytes: int) -> int:
        """Blocks to read ahead: at most half of memory, so that others have some, too."""
        fit = self.front.capacity // 2 // (raw_bytes + HEADER_BYTES)
        return max(2, min(_WINDOW, fit))

    def _start(self, block: bytes, raw_bytes: int, level: int) -> Flight | Held:
        held = self.front.lease(block)
        if held is not None:
            return held
        with self._lock:
            flight = self._flights.get(block)
            if flight is not None and flight.join():
                return flight
            places = [tier for tier in self.tiers if tier.may_have(block)]
            # Where it was found first; the others, should that place fail.
            places.sort(key=lambda tier: tier is not self.tiers[level - 1])
            flight = Flight(self.front, block, raw_bytes, places, self._landed)
            flight.join()
            touches = self._touches.count(block) + 1
            flight.stays = bool(places) and self.policy.promotes(
                1 + self.tiers.index(places[0]), touches
            )
            self._flights[block] = flight
        flight.start()
        return flight

    def _await(self, waiting: Flight | Held, until: float | None) -> Held | None:
        if not isinstance(waiting, Flight):
            self.front.counters.count(hits=1, read_bytes=len(waiting.record))
            return waiting
        return waiting.wait(until)

    def _landed(self, flight: Flight) -> None:
        """A flight is over: the block is in memory now, or was nowhere."""
        with self._lock:
            if self._flights.get(flight.block) is not flight:
                return
            del self._flights[flight.block]
        tier = flight.source
        if tier is not None and flight.stays and flight.block in self.front:
            if self.policy.leaves(1 + self.tiers.index(tier)):
                tier.writing.submit(partial(tier.remove, [flight.block]))
            self._demote_ahead()

    def prefetch(self, plan: Callable[[], tuple[Sequence[bytes], Sequence[int]]]) -> Prefetch:
        """Bring blocks into memory, as far as half of it holds them; returns at once.

        ``plan`` gives ids and raw bytes; it is called in a thread of the store and may `locate`.
        """
        self._check_open()
        handle = Prefetch()

        def arrived(at: int, raw: memoryview) -> None:
            del raw
            handle._ready = at + 1

        def bring() -> None:
            try:
                if not self._closed and not handle._cancelled:
                    blocks, sizes = plan()
                    fit = self._fit(sizes)
                    self.read(
                        blocks[:fit], sizes[:fit], arrived, cancelled=lambda: handle._cancelled
                    )
            finally:
                handle._over.set()

        if not self._prefetching.submit(bring):
            handle._over.set()
        return handle

    def _fit(self, raw_bytes: Sequence[int]) -> int:
        room = self.front.capacity // 2
        for count, size in enumerate(raw_bytes):
            room -= size + HEADER_BYTES
            if room < 0:
                return count
        return len(raw_bytes)

    # --- writing ---------------------------------------------------------------------------------

    def write(
        self,
        blocks: Sequence[bytes],
        raw_bytes: Sequence[int],
        fill: Callable[[int, memoryview], None],
        *,
        wait: float | None = None,
    ) -> Written:
        """Keep ``blocks``; ``fill(i, raw)`` writes the bytes of those that are not here yet.

        It returns when memory has them; slower tiers follow, as the policy says. When no room can
        be made the rest is dropped. With ``wait``, a full queue is waited for, up to so many
        seconds in each tier, and so is the end of all writing.
        """
        self._check_open()
        written = Written()
        for at, block in enumerate(blocks):
            with self._lock:
                touches = self._touches.touch(block)
            held = self.front.lease(block)
            if held is not None or any(tier.knows(block) for tier in self.tiers):
                written.already.append(at)
            else:
                held = self._keep(at, block, raw_bytes[at], fill, wait)
                if held is None:
                    break
                written.kept.append(at)
            if held is not None:
                self._write_below(block, held, touches, wait)
                held.release()
        kept, already = len(written.kept), len(written.already)
        self._used(blocks[: kept + already])
        self._demote_ahead()
        self.front.counters.count(writes=kept, already=already, drops=len(blocks) - kept - already)
        if wait is not None:
            for tier in self.tiers:
                tier.writing.wait(wait)
        return written

    def _keep(
        self,
        at: int,
        block: bytes,
        raw_bytes: int,
        fill: Callable[[int, memoryview], None],
        wait: float | None,
    ) -> Held | None:
        draft = self.front.reserve(block, raw_bytes)
        if draft is None and wait is not None and raw_bytes + HEADER_BYTES <= self.front.capacity:
            for tier in self.tiers:  # what waits to be written holds memory
                tier.writing.wait(wait)
            draft = self.front.reserve(block, raw_bytes)
        if draft is None:
            return None
        with draft:
            fill(at, draft.view[HEADER_BYTES:])
            self.front.counters.count(written_bytes=len(draft.view))
            return self.front.commit(draft, block)

    def _write_below(self, block: bytes, held: Held, touches: int, wait: float | None) -> None:
        for level, tier in enumerate(self.tiers, start=1):
            with self._lock:
                admitted = self.policy.admits(level, touches)
            if admitted and not tier.knows(block):
                self._queue(tier, block, wait)

    def _queue(
        self,
        tier: Tier,
        block: bytes,
        wait: float | None,
        then: Callable[[bool], None] | None = None,
    ) -> bool:
        """Have ``tier`` write ``block`` from memory; False when its queue is full."""
        mark = (block, tier.name)
        with self._lock:
            if mark in self._queued:
                return True
            self._queued.add(mark)
        held = self.front.lease(block)
        self.front.catalogue.hold(block)

        def save() -> None:
            saved = False
            try:
                if held is not None:
                    saved = tier.save(block, held.record)
            finally:
                done(saved)

        def done(saved: bool) -> None:
            if held is not None:
                held.release()
            self.front.catalogue.free(block)
            with self._lock:
                self._queued.discard(mark)
            if then is not None:
                then(saved)

        cost = 0 if held is None else len(held.record)
        if tier.writing.submit(save, cost, wait or 0.0):
            return True
        tier.counters.count(drops=1)
        done(saved=False)
        return False

    # --- making room -----------------------------------------------------------------------------

    def _demote_ahead(self) -> None:
        """Write evicted blocks down before their room is needed, where the policy wants that."""
        with self._lock:
            if self.policy.demotes(0, 1 << 30) is None:
                return
        low = int(self.front.capacity * (1 - _HEADROOM))
        excess = self.front.backend.used() - low
        if excess > 0:
            for block in self.front.leaving(excess):
                if not self._demote(block):
                    self.front.remove([block])

    def _demote(self, block: bytes, wait: float | None = None) -> bool:
        """Move ``block`` from memory to where it goes; False when it just goes."""
        with self._lock:
            level = self.policy.demotes(0, self._touches.count(block))
        if level is None or level > len(self.tiers):
            return False
        tier = self.tiers[level - 1]

        def moved(saved: bool) -> None:
            self.front.counters.count(
                demotions=int(saved), demotions_dropped=int(not saved), evictions=1
            )
            self.front.backend.delete([block])

        if tier.knows(block):
            self.front.counters.count(evictions=1)
            self.front.backend.delete([block])
            return True
        return self._queue(tier, block, wait, moved)

    def _evicted_above(self, block: bytes) -> None:
        """A block had to leave memory at once."""
        with self._lock:
            level = self.policy.demotes(0, self._touches.count(block))
        if level is None or level > len(self.tiers) or self.tiers[level - 1].knows(block):
            return
        self.front.counters.count(demotions_dropped=1)

    def _demote_below(self, level: int, block: bytes) -> bool:
        """A block has to leave tier ``level``: copy it one down, in the thread that calls."""
        with self._lock:
            target = self.policy.demotes(level, self._touches.count(block))
        if target is None or target > len(self.tiers):
            return False
        source, tier = self.tiers[level - 1], self.tiers[target - 1]
        moved = tier.knows(block) or source.copy_to(tier, block)
        source.counters.count(demotions=int(moved), demotions_dropped=int(not moved))
        return moved

    def _used(self, blocks: Sequence[bytes]) -> None:
        if blocks:
            self.front.catalogue.used(blocks)
            for tier in self.tiers:
                tier.used(blocks)

    # --- by request ------------------------------------------------------------------------------

    def pin(self, blocks: Sequence[bytes], seconds: float) -> int:
        """Keep leading ``blocks`` from eviction, in every tier that has them; how many are.

        Pins hold at most half of a tier.
        """
        return max(
            catalogue.pin(blocks, seconds, capacity // 2)
            for catalogue, capacity in [
                (self.front.catalogue, self.front.capacity),
                *((tier.catalogue, tier.backend.capacity or 0) for tier in self.tiers),
            ]
        )

    def unpin(self, blocks: Sequence[bytes]) -> int:
        """Let ``blocks`` be evicted again; how many were pinned somewhere."""
        return max(
            catalogue.unpin(blocks)
            for catalogue in [self.front.catalogue, *(tier.catalogue for tier in self.tiers)]
        )

    def remove(self, blocks: Sequence[bytes]) -> int:
        """Delete ``blocks`` everywhere; bytes freed."""
        return self.front.remove(blocks) + sum(tier.remove(blocks) for tier in self.tiers)

    def clear(self, space: bytes | None = None) -> int:
        """Delete a namespace, or everything that can be listed; bytes freed."""
        mine = [item.block for item in self.front.backend.list()]
        freed = self.front.remove([block for block in mine if block.startswith(space or b"")])
        return freed + sum(tier.clear(space) for tier in self.tiers)

    def set_quota(self, space: bytes, limit: int) -> None:
        """A namespace may hold ``limit`` bytes in each tier that has a budget."""
        self.front.catalogue.set_quota(space, limit)
        for tier in self.tiers:
            tier.catalogue.set_quota(space, limit)

    def flush(self, timeout: float | None = None) -> bool:
        """Have every tier hold, durably, what it is to hold; False: not all of it in time.

        True promises that what was put before and not dropped is in the slower tiers.
        """
        until = None if timeout is None else time.monotonic() + timeout
        good = self._settle(until)
        flushed: list[bool] = []
        for tier in self.tiers:
            tier.writing.submit(partial(_flush, tier, flushed), 0)
        written = [tier.writing.wait(_left(until)) for tier in self.tiers]
        return good and all(written) and flushed == [True] * len(self.tiers)

    def _settle(self, until: float | None) -> bool:
        """Copy down what lies in memory alone and would be lost with it."""
        for item in self.front.backend.list():
            with self._lock:
                touches = self._touches.count(item.block)
                level = self.policy.demotes(0, touches)
            if level is not None and level <= len(self.tiers):
                self._queue(self.tiers[level - 1], item.block, _left(until))
        written = [tier.writing.wait(_left(until)) for tier in self.tiers]
        return all(written)

    def close(self, timeout: float = 10.0) -> bool:
        """Flush, ``timeout`` seconds at most, and give everything back; whether all was written.

        A second call does nothing.
        """
        with self._lock:
            if self._closed:
                return True
            self._closed = True
        until = time.monotonic() + timeout
        self._prefetching.close(0.0)
        good = self.flush(timeout)
        for tier in self.tiers:
            good &= tier.writing.close(_left(until) or 0.0)
            tier.reading.close(0.0)
            tier.close()
        self.front.backend.close()
        return good

    def stats(self) -> list[TierStats]:
        """All tiers at this moment, fastest first."""
        return [self.front.stats(), *(tier.stats() for tier in self.tiers)]

    def check(self) -> None:
        """Recount; for when nothing is on its way. An AssertionError is a fault of kvkeep."""
        self.front.backend.check()
        for catalogue in [self.front.catalogue, *(tier.catalogue for tier in self.tiers)]:
            catalogue.check()
        known = set(self.front.catalogue.blocks())
        there = {item.block for item in self.front.backend.list()}
        assert known == there, f"{len(known ^ there)} blocks are in memory or its catalogue only"

    def _check_open(self) -> None:
        if self._closed:
            raise IllegalStep("the store is closed")


def _flush(tier: Tier, flushed: list[bool]) -> None:
    flushed.append(tier.flush())


def _let_go(waiting: Flight | Held) -> None:
    if isinstance(waiting, Flight):
        waiting.leave()
    else:
        waiting.release()


def _left(until: float | None) -> float | None:
    return None if until is None else max(0.0, until - time.monotonic())
