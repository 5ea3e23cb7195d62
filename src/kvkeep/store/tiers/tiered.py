"""Blocks over several tiers: memory in front, slower and larger places behind it."""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from kvkeep.core.errors import BackendFailed, IllegalStep
from kvkeep.core.keys import SPACE_BYTES
from kvkeep.store.tiers.fates import Fates, Happened
from kvkeep.store.tiers.flight import Flight
from kvkeep.store.tiers.plan import Inclusive, Planner, TieringPolicy
from kvkeep.store.tiers.record import HEADER_BYTES
from kvkeep.store.tiers.workers import Workers

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterator, Mapping, Sequence

    from kvkeep.store.tiers.counters import TierStats
    from kvkeep.store.tiers.front import Front, MemoryLease
    from kvkeep.store.tiers.tier import Tier

__all__ = ["BlockPrefetch", "Removed", "TieredStore", "Written"]

_WINDOW = 16  # blocks read ahead, at most
_PROBES = (1, 16, 64, 256)  # blocks asked for at once: few at first, most prompts are not there
_QUEUED_SHARE = 0.75  # of memory that may wait to be written to a tier; the rest moves on
_NEVER = Happened("", "never", None, "")
_REPLACED_KEPT = 64  # replacements that reads which began before are held against
_PATIENCE = 0.2  # of a tier's timeout that one above it waits for it to take what is evicted


@dataclass(slots=True)
class Written:
    """What became of blocks that were put, by their positions; the rest found no room."""

    kept: list[int] = field(default_factory=list)
    already: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Removed:
    """What was deleted.

    Attributes:
        tiers: ``(name, bytes freed)`` of every tier, fastest first.
        failed: names of the tiers that may have some of it still: they failed, did not answer in
            time, or are left alone. It is not read there any more by this store, until it is
            written anew; others may find it.
    """

    tiers: tuple[tuple[str, int], ...]
    failed: tuple[str, ...] = ()

    @property
    def complete(self) -> bool:
        """Whether nothing of it is left in any tier."""
        return not self.failed

    @property
    def bytes(self) -> int:
        """Bytes freed in all tiers together."""
        return sum(freed for _, freed in self.tiers)


class _Queued:
    """A block that a tier is to write, or is deleting. Its fields are guarded by the store's lock.

    Attributes:
        waiting: told, when it is over, whether the tier has the block. If the tier deletes it just
            now, it is written again for those who wait.
        running: the tier writes it just now.
        over: set when a write that was called off while it ran has ended.
        deleting: the tier deletes it: it is not to be read there.
    """

    __slots__ = ("deleting", "over", "running", "waiting")

    def __init__(self, then: Callable[[bool], None] | None = None, *, deleting: bool = False):
        self.waiting = [] if then is None else [then]
        self.running = False
        self.over: threading.Event | None = None
        self.deleting = deleting


class BlockPrefetch:
    """Blocks on their way into memory, in a thread of the store.

    Once the store is closed it is `done` and can be cancelled; all else raises `IllegalStep`:
    nothing is in memory any more.

    Thread safety: all methods.
    """

    def __init__(self, check_open: Callable[[], object] = lambda: None) -> None:
        self._ready = 0
        self._sources: list[str] = []
        self._over = threading.Event()
        self._cancelled = False
        self._check_open = check_open

    @property
    def done(self) -> bool:
        """Nothing more comes: all is there, or the rest is not to be had."""
        return self._over.is_set()

    @property
    def ready(self) -> int:
        """Leading blocks that arrived."""
        self._check_open()
        return self._ready

    @property
    def sources(self) -> list[str]:
        """The tiers that the blocks which arrived came from."""
        self._check_open()
        return self._sources[: self._ready]

    def wait(self, timeout: float | None = None) -> int:
        """Wait until it is done, ``timeout`` seconds at most; leading blocks that arrived."""
        self._over.wait(timeout)
        self._check_open()
        return self._ready

    def cancel(self) -> None:
        """Start no more reads; what is on its way still arrives."""
        self._cancelled = True


class _Writing:
    """Blocks of one prompt on their way to tiers: a tier that got all has them in its order.

    It notes them as they are written, the beginning first. That would be what goes first, and
    without it the rest is not found. So a tier that has the beginning from before does not let it
    go for the rest either, however long ago it was used. Of a prompt that is longer than the tier,
    that is as much as fits.

    Thread safety: all methods.
    """

    def __init__(self, tiers: Sequence[Tier], blocks: Sequence[bytes]) -> None:
        self._tiers = {tier.name: tier for tier in tiers}
        self._blocks = blocks
        self._lock = threading.Lock()
        self._count: dict[str, int] = {}
        self._left: dict[str, int] = {}
        self._kept: dict[str, list[bytes]] = {}
        self.full: set[str] = set()
        """Names of tiers whose queue was full: what comes behind that block is of no use there."""
        self.refused: dict[str, list[bytes]] = {}
        """Blocks that a tier, by its name, would take if they were asked for more often."""

    def one_more(self, tier: Tier, block: bytes) -> Callable[[bool], None]:
        """Another block goes to ``tier``; what to call when it is over."""
        self._begin(tier)
        with self._lock:
            self._count[tier.name] += 1
            self._left[tier.name] += 1

        def over(saved: bool) -> None:
            if saved:
                self._keep(tier, [block])
            self._over(tier.name)

        return over

    def begin(self) -> None:
        """A block comes to memory, and what goes down for it may push out others in any tier."""
        for tier in self._tiers.values():
            self._begin(tier)

    def _begin(self, tier: Tier) -> None:
        with self._lock:
            if tier.name in self._left:
                return
            self._count[tier.name], self._kept[tier.name], self._left[tier.name] = 0, [], 1
        # What is behind those that fit must not keep out the beginning.
        fits = tier.catalogue.fits(self._blocks[0][:SPACE_BYTES])
        self._keep(tier, self._blocks[:fits])

    def _keep(self, tier: Tier, blocks: Sequence[bytes]) -> None:
        """Have ``tier`` keep what it has of ``blocks`` until it has the others, too."""
        tier.catalogue.hold_all(blocks, self._kept[tier.name])

    def end(self) -> None:
        """No more come."""
        for name in list(self._left):
            self._over(name)

    def note_refused(self, fates: Fates) -> None:
        """Remember which blocks were ``refused``."""
        for name, blocks in self.refused.items():
            fates.note(blocks, name, "refused", "admission")

    def _over(self, name: str) -> None:
        with self._lock:
            self._left[name] -= 1
            over = not self._left[name]
        if over:
            if self._count[name] > 1:
                self._tiers[name].reorder(self._blocks)
            self._tiers[name].catalogue.free_all(self._kept.pop(name))


class TieredStore:
    """Raw blocks by id, over `Front` and any number of `Tier`.

    ``notes`` are of namespaces, by space (`kvkeep.store.tiers.notes`); tiers note them beside the
    blocks.

    Nothing here raises because a place fails or is slow: a read is shorter, a write is dropped and
    counted. `policy` says what moves where.

    Thread safety: all methods. Cost: a few µs a block in memory, besides the copy, which is the
    caller's; everything slow is done by threads of the tiers, but for `remove` and `clear`. A
    forked process has none of these threads: there every method but `stats` and `close` raises
    `IllegalStep`.
    """

    def __init__(
        self,
        front: Front,
        tiers: Sequence[Tier],
        policy: TieringPolicy | None = None,
        *,
        notes: Mapping[bytes, bytes] | None = None,
    ) -> None:
        self.front = front
        self.tiers = list(tiers)
        self.policy = policy or Inclusive()
        self._planner = Planner(self.policy, len(self.tiers))
        self._lock = threading.Lock()
        self._flights: dict[bytes, Flight] = {}
        self._queued: dict[tuple[bytes, str], _Queued] = {}
        self._clearing: list[bytes] = []  # namespaces, or b"" for all, that are being deleted
        self._replaced: deque[tuple[int, frozenset[bytes]]] = deque(maxlen=_REPLACED_KEPT)
        self._replacements = 0
        self._prefetching = Workers("prefetch", 4, 256)
        self._closed = False
        self._process = os.getpid()
        self.fates = Fates([front.name, *(tier.name for tier in self.tiers)])
        front.fates = self.fates
        places: list[Front | Tier] = [front, *self.tiers]
        self._ending = [place for place in places if place.catalogue.ttl is not None]
        front.evicted = self._evicted_above
        share = int(front.capacity * _QUEUED_SHARE)
        for level, tier in enumerate(self.tiers, start=1):
            tier.demote = partial(self._demote_below, level)
            tier.fates = self.fates
            tier.notes = {} if notes is None else notes
            tier.writing.limit = min(tier.options.queue_bytes or share, share)
            tier.open()
        for tier in self.tiers:
            tier.trim()

    def look_for(self, space: bytes) -> None:
        """Have tiers log, once, that they have blocks and none of this namespace; see `Tier`."""
        self.check_open()
        for tier in self.tiers:
            tier.look_for(space)

    # --- finding ---------------------------------------------------------------------------------

    def locate(self, blocks: Sequence[bytes], until: float | None = None) -> list[int]:
        """The level that each of ``blocks`` would come from, up to the first that is nowhere.

        0 is memory. Places that may hold more than is known are asked about what is not known:
        one question of at most their timeout each, not beyond ``until`` (monotonic seconds), and
        none where all is known.
        """
        self.check_open()
        levels = self._locate(blocks, until)
        if len(levels) < len(blocks):
            self.check_open()  # what is missing may be so because it was closed meanwhile
        return levels

    def _locate(self, blocks: Sequence[bytes], until: float | None = None) -> list[int]:
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
        for tier in self.tiers:
            if not tier.asked and tier.breaker.any_blocks("read", "lookup"):
                tier.counters.count(skipped_calls=1)
        return levels

    def knows(self, block: bytes) -> bool:
        """Whether ``block`` is somewhere, without asking anybody."""
        self.check_open()
        return self._level_of(block) is not None

    def holders(self, blocks: Sequence[bytes]) -> list[list[int]]:
        """The levels, rising, that each of ``blocks`` is known to be at; asks nobody."""
        self.check_open()
        tiers = list(enumerate(self.tiers, start=1))
        front = self.front
        return [
            [
                *([0] if block in front else []),
                *(level for level, tier in tiers if tier.knows(block)),
            ]
            for block in blocks
        ]

    def _level_of(self, block: bytes) -> int | None:
        if block in self.front:
            return 0
        for level, tier in enumerate(self.tiers, start=1):
            if tier.serves(block):
                return level
        return None

    def _probe(self, blocks: Sequence[bytes], at: int, until: float | None) -> dict[int, int]:
        """Ask shared places, faster ones first; each about what those before it do not have."""
        found: dict[int, int] = {}
        for level, tier in enumerate(self.tiers, start=1):
            if tier.asked:
                count = tier.probe(blocks[len(found) :], until)
                for _ in range(count):
                    found[at + len(found)] = level
            if len(found) == len(blocks):
                break
        return found

    def fates_of(
        self, blocks: Sequence[bytes], since: float | None = None
    ) -> list[Happened | None]:
        """What became of each block; None where it is known to be somewhere that can be read.

        A tier that failed ``since`` (Unix seconds), or is left alone now, counts as unavailable
        for what it may hold. Asks nobody.
        """
        self.check_open()
        well: list[Tier] = []
        away: list[tuple[Tier, Happened]] = []
        for tier in self.tiers:
            trouble = tier.trouble(since)
            if trouble is None:
                well.append(tier)
            else:
                away.append((tier, trouble))
        return [self._fate(block, well, away) for block in blocks]

    def _fate(
        self, block: bytes, well: list[Tier], away: list[tuple[Tier, Happened]]
    ) -> Happened | None:
        if block in self.front or any(tier.knows(block) for tier in well):
            return None
        last = self.fates.of(block)
        for tier, trouble in away:
            # Of what it lost itself it has no more, whether it answers or not.
            if trouble.detail == "breaker" and not tier.unread(block):
                continue  # another part of the place is left alone
            if tier.hides(block) and (last is None or last.tier != tier.name or tier.knows(block)):
                return trouble
        for place in self._ending:
            ended = place.catalogue.ended(block)
            if ended is not None:
                return Happened(place.name, "removed", ended, "ttl")
        return last or _NEVER

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
        sources: list[str] | None = None,
    ) -> int:
        """Hand the raw bytes of ``blocks`` to ``sink``, in order, up to the first that is missing.

        ``raw_bytes`` are their lengths; a record of another length is a bad one. ``sink(i, raw)``
        runs in this thread while later blocks are read in others; it must copy, and not raise but
        for faults. ``levels`` are what `locate` said, if it was asked before. ``deadline`` seconds
        from now it ends with what arrived. ``sources`` is given the names of the tiers
        that they came from.

        Returns how many blocks were handed over.
        """
        self.check_open()
        until = None if deadline is None else time.monotonic() + deadline
        if levels is None:
            levels = self.locate(blocks, until)
        if levels:
            self._asked(blocks[: len(levels)], raw_bytes[0])
        with self._closed_is_illegal():
            count = self._read(
                blocks, raw_bytes, sink, levels, until=until, cancelled=cancelled, sources=sources
            )
            writing = _Writing(self.tiers, blocks)
            try:
                for block in blocks[:count]:
                    self._asked_for(block, writing)
            finally:
                writing.end()
        if count < len(blocks):
            self.check_open()  # it was not closed meanwhile: the rest is really missing
        return count

    def _read(
        self,
        blocks: Sequence[bytes],
        raw_bytes: Sequence[int],
        sink: Callable[[int, memoryview], None],
        levels: Sequence[int],
        *,
        until: float | None = None,
        cancelled: Callable[[], bool] | None = None,
        sources: list[str] | None = None,
    ) -> int:
        ahead: deque[Flight | MemoryLease] = deque()
        # What comes up must not push out what the same prompt has in memory.
        mixed = any(levels) and not all(levels)
        above = [block for block, level in zip(blocks, levels, strict=False) if mixed and not level]
        for block in above:
            self.front.catalogue.hold(block)
        count = started = 0
        replacements = self._replacements
        try:
            while count < len(levels):
                if replacements != self._replacements and self._overtaken(blocks, replacements):
                    break  # what follows is new, and what was handed over is not
                if cancelled is not None and cancelled():
                    break
                limit = self._window(raw_bytes[count])
                while started < len(levels) and len(ahead) < limit:
                    ahead.append(self._start(blocks[started], raw_bytes[started], levels[started]))
                    started += 1
                waiting = ahead[0]
                held = self._await(waiting, until)
                if held is None:
                    break
                if len(held.payload) != raw_bytes[count]:
                    break  # only in memory, under a key that says otherwise: whoever put it lied
                if sources is not None:
                    sources.append(self._source(waiting))
                sink(count, held.payload)
                _let_go(ahead.popleft())
                count += 1
        finally:
            for left in ahead:
                _let_go(left)
            for block in above:
                self.front.catalogue.free(block)
        self._used(blocks[:count])
        self._recheck(blocks[count : len(levels)])
        return count

    def _recheck(self, blocks: Sequence[bytes]) -> None:
        """Of blocks that were located one was gone: the others may be, too."""
        for tier in self.tiers if blocks else ():
            tier.recheck(blocks)

    def _window(self, raw_bytes: int) -> int:
        """Blocks to read ahead: at most half of memory, so that others have some, too."""
        fit = self.front.capacity // 2 // (raw_bytes + HEADER_BYTES)
        return max(2, min(_WINDOW, fit))

    def _start(self, block: bytes, raw_bytes: int, level: int) -> Flight | MemoryLease:
        held = self.front.lease(block)
        if held is not None:
            return held
        with self._lock:
            flight = self._flights.get(block)
            if flight is not None and flight.join():
                return flight
            held = self.front.lease(block)  # its flight may just have landed
            if held is not None:
                return held
            places = [
                tier
                for tier in self.tiers
                if tier.may_have(block) and not self._deletes(tier, block)
            ]
            # Where it was found first; the others, should that place fail. What was in memory,
            # and has left it since, comes from the fastest.
            if level:
                places.sort(key=lambda tier: tier is not self.tiers[level - 1])
            flight = Flight(self.front, block, raw_bytes, places, self._landed)
            flight.join()
            flight.stays = bool(places) and self._planner.promotes(
                1 + self.tiers.index(places[0]), block
            )
            self._flights[block] = flight
        flight.start()
        return flight

    def _deletes(self, tier: Tier, block: bytes) -> bool:
        """Under the lock: whether ``tier`` is about to delete ``block``."""
        queued = self._queued.get((block, tier.name))
        if queued is not None and queued.deleting:
            return True
        return any(block.startswith(space) for space in self._clearing)

    def _overtaken(self, blocks: Sequence[bytes], since: int) -> bool:
        """Whether one of ``blocks`` was replaced after the replacement number ``since``."""
        with self._lock:
            newer = [replaced for number, replaced in self._replaced if number > since]
            lost = self._replacements - since > len(newer)
        return lost or any(not replaced.isdisjoint(blocks) for replaced in newer)

    def _source(self, came: Flight | MemoryLease) -> str:
        tier = came.source if isinstance(came, Flight) else None
        return self.front.name if tier is None else tier.name

    def _await(self, waiting: Flight | MemoryLease, until: float | None) -> MemoryLease | None:
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
            leaves = tier is not None and self._planner.leaves(1 + self.tiers.index(tier))
        if tier is not None and flight.stays and flight.block in self.front:
            if leaves:
                tier.writing.submit(partial(self._leave, tier, flight.block))
            self._demote_ahead()

    def _leave(self, tier: Tier, block: bytes) -> None:
        """Take ``block`` away from ``tier`` because memory has it: in a thread of the tier.

        It may be on its way back already. Whoever wants it written while it is being deleted has
        it queued again.
        """
        mark = (block, tier.name)
        with self._lock:
            if mark in self._queued or block not in self.front.catalogue:
                return
            queued = self._queued[mark] = _Queued(deleting=True)
        try:
            tier.remove([block])
        finally:
            self._deleted(tier, block, queued)

    def _deleted(self, tier: Tier, block: bytes, queued: _Queued) -> None:
        """``tier`` deleted ``block``: whoever wants it written meanwhile has it queued again."""
        mark = (block, tier.name)
        with self._lock:
            if self._queued.get(mark) is queued:
                del self._queued[mark]
            waiting, queued.waiting = queued.waiting, []
            over = queued.over
        if over is not None:
            over.set()
        for then in waiting:
            with suppress(BackendFailed):  # memory was closed, and it was told so
                self._queue(tier, block, 0.0, then)

    def _asked(self, blocks: Sequence[bytes], raw_bytes: int) -> None:
        """A prompt came, ``blocks`` of it found or to be put: tell who watches that."""
        if self._planner.due():
            room = self._room(raw_bytes + HEADER_BYTES)
            with self._lock:
                self._planner.fit(room)
        with self._lock:
            self._planner.asked(blocks)
        self.front.catalogue.asked(blocks)
        for tier in self.tiers:
            tier.catalogue.asked(blocks)

    def _room(self, record_bytes: int) -> list[int | None]:
        """Blocks that each tier has room for, if they are as large as those it holds.

        As ``record_bytes`` where it holds none; None where there is no budget.
        """
        room: list[int | None] = []
        capacities = [self.front.capacity, *(tier.backend.capacity for tier in self.tiers)]
        catalogues = [self.front.catalogue, *(tier.catalogue for tier in self.tiers)]
        for capacity, catalogue in zip(capacities, catalogues, strict=True):
            held = len(catalogue)
            size = catalogue.total_bytes // held if held else record_bytes
            room.append(None if capacity is None else capacity // max(1, size))
        return room

    def _asked_for(self, block: bytes, writing: _Writing) -> None:
        """Count it, and write the block to the tiers that admit it from this time on."""
        with self._lock:
            new = self._planner.read(block)
        for level in new:
            tier = self.tiers[level - 1]
            if not tier.knows(block) and block in self.front:
                self._queue(tier, block, 0.0, writing.one_more(tier, block))

    def prefetch(self, plan: Callable[[], tuple[Sequence[bytes], Sequence[int]]]) -> BlockPrefetch:
        """Bring blocks into memory, as far as half of it holds them; returns at once.

        ``plan`` gives ids and raw bytes; it is called in a thread of the store and may `locate`.
        """
        self.check_open()
        handle = BlockPrefetch(self.check_open)

        def bring() -> None:
            try:
                if not self._closed and not handle._cancelled:
                    blocks, sizes = plan()
                    fit = self._fit(sizes)
                    blocks, sizes = blocks[:fit], sizes[:fit]

                    def arrived(at: int, raw: memoryview) -> None:
                        del raw
                        if blocks[at] in self.front:
                            handle._ready = at + 1
                        else:  # memory had no room for it
                            handle._cancelled = True

                    self._read(
                        blocks,
                        sizes,
                        arrived,
                        self._locate(blocks),
                        cancelled=lambda: handle._cancelled or self._closed,
                        sources=handle._sources,
                    )
            finally:
                handle._over.set()

        if not self._prefetching.submit(bring, given_up=handle._over.set):
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
        be made the rest is dropped. With ``wait``, full queues are waited for, up to so many
        seconds in all, and so is the end of all writing.
        """
        self.check_open()
        until = 0.0 if wait is None else time.monotonic() + wait
        written = Written()
        writing = _Writing(self.tiers, blocks)
        alone: list[bytes] = []  # only in memory: what follows must not push out its own beginning
        if blocks:
            self._asked(blocks, raw_bytes[0])
        try:
            with self._closed_is_illegal():
                for at, block in enumerate(blocks):
                    with self._lock:
                        touches = self._planner.put(block)
                    held = self.front.lease(block)
                    if held is not None or any(tier.serves(block) for tier in self.tiers):
                        written.already.append(at)
                    else:
                        writing.begin()
                        held = self._keep(at, block, raw_bytes[at], fill, until)
                        if held is None:
                            self.fates.note(blocks[at:], self.front.name, "dropped", "no room")
                            break
                        written.kept.append(at)
                    if held is not None:
                        try:
                            if not self._write_below(block, touches, until, writing):
                                self.front.catalogue.hold(block)
                                alone.append(block)
                        finally:
                            held.release()
                        self._demote_ahead()  # a long prompt needs more than what is kept free
            kept, already = len(written.kept), len(written.already)
            self._used(blocks[: kept + already], {blocks[at] for at in written.kept})
        finally:
            for block in alone:
                self.front.catalogue.free(block)
            writing.end()
        writing.note_refused(self.fates)
        self._demote_ahead()
        self.front.counters.count(writes=kept, already=already, drops=len(blocks) - kept - already)
        for tier in self.tiers if wait is not None else ():
            tier.settled(_left(until))
        if len(blocks) > kept + already:
            self.check_open()  # it was not closed meanwhile: there is really no room
        return written

    def _keep(
        self,
        at: int,
        block: bytes,
        raw_bytes: int,
        fill: Callable[[int, memoryview], None],
        until: float,
    ) -> MemoryLease | None:
        draft = self.front.reserve(block, raw_bytes)
        if draft is None and _left(until) and raw_bytes + HEADER_BYTES <= self.front.capacity:
            for tier in self.tiers:  # what waits to be written holds memory
                tier.settled(_left(until))
            draft = self.front.reserve(block, raw_bytes)
        if draft is None:
            return None
        with draft:
            fill(at, draft.view[HEADER_BYTES:])
            self.front.counters.count(written_bytes=len(draft.view))
            return self.front.commit(draft, block)

    def _write_below(self, block: bytes, touches: int, until: float, writing: _Writing) -> bool:
        """Have the tiers that admit ``block`` write it; whether one has it, or will."""
        below = False
        for level, tier in enumerate(self.tiers, start=1):
            with self._lock:
                admitted = self._planner.admits(level, touches)
                later = not admitted and self._planner.ever_admits(level)
            if tier.knows(block):
                below = True
            elif not admitted:
                if later:
                    writing.refused.setdefault(tier.name, []).append(block)
            elif tier.name in writing.full:
                self._dropped(tier, block, "queue full")
            elif self._queue(tier, block, _left(until), writing.one_more(tier, block)):
                below = True
            else:
                writing.full.add(tier.name)
        return below

    def _queue(
        self,
        tier: Tier,
        block: bytes,
        wait: float | None,
        then: Callable[[bool], None] | None = None,
    ) -> bool:
        """Have ``tier`` write ``block`` from memory; False when its queue is full, or it is away.

        A full queue is waited for, ``wait`` seconds at most, None: as long as it takes. ``then`` is
        told, in any case, whether the tier has it.
        """
        mark = (block, tier.name)
        with self._lock:
            before = self._queued.get(mark)
            if before is not None:
                before.waiting += [then] if then is not None else []
                return True
            queued = self._queued[mark] = _Queued(then)
        try:
            held = self.front.lease(block)
        except BackendFailed:  # memory was closed
            self._ended(tier, block, queued, saved=False)
            raise
        self.front.catalogue.hold(block)

        def done(saved: bool) -> None:
            if held is not None:
                held.release()
            self.front.catalogue.free(block)
            self._ended(tier, block, queued, saved=saved)

        def save() -> None:
            saved = wrote = False
            try:
                if held is None:  # it left memory meanwhile
                    saved = tier.knows(block)
                    if not saved:
                        self._dropped(tier, block, "no time")
                elif self._begins(tier, block, queued):
                    saved = wrote = tier.save(block, held.record, hold=True)
            finally:
                done(saved)
                if wrote:  # those who waited for it may hold it for longer
                    tier.catalogue.free(block)

        def drop() -> None:
            self._dropped(tier, block, "breaker" if tier.is_away(block) else "queue full")
            done(saved=False)

        cost = 0 if held is None else len(held.record)
        taken = False
        try:
            taken = not tier.is_away(block) and tier.writing.submit(save, cost, wait, drop)
        finally:  # Ctrl-C while it waited, too
            if not taken:
                drop()
        return taken

    def _begins(self, tier: Tier, block: bytes, queued: _Queued) -> bool:
        """Whether the block is still to be written; if so its write runs from here on."""
        with self._lock:
            queued.running = self._queued.get((block, tier.name)) is queued
            return queued.running

    def _ended(self, tier: Tier, block: bytes, queued: _Queued, *, saved: bool) -> None:
        """A write is over, or was given up: tell those who wait for it."""
        mark = (block, tier.name)
        with self._lock:
            if self._queued.get(mark) is queued:  # else it is being deleted
                del self._queued[mark]
            queued.running = False
            told, queued.waiting = queued.waiting, []
            over = queued.over
        for one in told:
            one(saved)
        if over is not None:
            over.set()

    def _dropped(self, tier: Tier, block: bytes, why: str) -> None:
        tier.counters.count(drops=1)
        self.fates.note([block], tier.name, "dropped", why)

    # --- making room -----------------------------------------------------------------------------

    def _demote_ahead(self) -> None:
        """Write evicted blocks down before their room is needed, where the policy wants that."""
        used = self.front.backend.used() - self.front.leaving_bytes
        with self._lock:
            excess = self._planner.excess(self.front.capacity, used)
        if excess:
            for block in self.front.leave(excess):
                self._demote(block)

    def _demote(self, block: bytes) -> None:
        """Move ``block``, which is to leave memory, to where it goes, if it goes anywhere."""
        with self._lock:
            level = self._planner.demotes(0, block)
            tier = None if level is None else self.tiers[level - 1]
            known = tier is None or (
                tier.knows(block) and (block, tier.name) not in self._queued  # it may be leaving
            )
        if tier is None:
            self.fates.note([block], self.front.name, "evicted", self.front.catalogue.policy)
            self._not_worth_it(0, block)
        if tier is None or known:
            self.front.gone(block)
            return

        def moved(saved: bool) -> None:
            self.front.counters.count(demotions=int(saved), demotions_dropped=int(not saved))
            self.front.gone(block)

        self._queue(tier, block, 0.0, moved)

    def _evicted_above(self, block: bytes) -> None:
        """A block had to leave memory at once."""
        with self._lock:
            level = self._planner.demotes(0, block)
        if level is None:
            self._not_worth_it(0, block)
        elif not self.tiers[level - 1].knows(block):
            self.front.counters.count(demotions_dropped=1)
            self.fates.note([block], self.tiers[level - 1].name, "dropped", "no time")

    def _not_worth_it(self, level: int, block: bytes) -> None:
        """``block`` went from tier ``level`` for good: note it where others would have moved on."""
        with self._lock:
            target = self._planner.ever_demotes(level)
        if target is not None and not self.tiers[target - 1].knows(block):
            self.fates.note([block], self.tiers[target - 1].name, "refused", "admission")

    def _demote_below(self, level: int, block: bytes) -> None:
        """A block has to leave tier ``level``: copy it one down, in threads of both.

        A slow place holds up the one above only a little: one that hangs would take it along.
        """
        with self._lock:
            target = self._planner.demotes(level, block)
        if target is None:
            self._not_worth_it(level, block)
            return
        source, tier = self.tiers[level - 1], self.tiers[target - 1]
        over = threading.Event()

        def ended(moved: bool) -> None:
            source.counters.count(demotions=int(moved), demotions_dropped=int(not moved))
            over.set()

        with self._lock:
            before = self._queued.get((block, tier.name))
            leaves = self._deletes(source, block)  # `tier` may have done so before
            if before is None and not leaves:
                queued = self._queued[block, tier.name] = _Queued(ended)
        if before is not None or leaves:
            # From memory, or it is being deleted: then it is not to come back from here.
            ended(moved=before is not None and not before.deleting)
            return

        def lost() -> None:
            self.fates.note([block], tier.name, "dropped", "no time")
            self._ended(tier, block, queued, saved=False)

        if tier.knows(block):
            self._ended(tier, block, queued, saved=True)
            return
        patience = time.monotonic() + _PATIENCE * min(source.timeout, tier.timeout)
        stuck = tier.is_away(block) or tier.stuck_for() > _PATIENCE * tier.timeout
        # What could not be deleted there must not be spread.
        record = None if stuck or source.is_hidden(block) else source.fetch(block)
        if record is None:
            lost()
            return

        def save() -> None:
            saved = False
            try:
                saved = self._begins(tier, block, queued) and tier.save(block, record)
            finally:
                self._ended(tier, block, queued, saved=saved)

        if tier.writing.submit(save, len(record), _left(patience), lost):
            over.wait(_left(patience))
        else:
            lost()

    def used(self, blocks: Sequence[bytes]) -> None:
        """A prompt used ``blocks``, wherever it found them: they stay longer, in every tier."""
        self.check_open()
        self._used(blocks)

    def _used(self, blocks: Sequence[bytes], new: Container[bytes] = ()) -> None:
        if blocks:
            self.front.catalogue.used(blocks, new=new)
            for tier in self.tiers:
                tier.used(blocks, new)

    # --- by request ------------------------------------------------------------------------------

    def pin(self, blocks: Sequence[bytes], seconds: float) -> int:
        """Keep leading ``blocks`` from eviction, in every tier that has them; how many are.

        Pins hold at most half of a tier.
        """
        self.check_open()
        pinned = set(self.front.catalogue.pin(blocks, seconds, self.front.capacity // 2))
        for tier in self.tiers:
            pinned.update(tier.catalogue.pin(blocks, seconds, (tier.backend.capacity or 0) // 2))
        return next((at for at, block in enumerate(blocks) if block not in pinned), len(blocks))

    def unpin(self, blocks: Sequence[bytes]) -> int:
        """Let ``blocks`` be evicted again; how many were pinned somewhere."""
        self.check_open()
        unpinned = set(self.front.catalogue.unpin(blocks))
        for tier in self.tiers:
            unpinned.update(tier.catalogue.unpin(blocks))
        return len(unpinned)

    def remove(self, blocks: Sequence[bytes]) -> Removed:
        """Delete ``blocks`` everywhere, on their way up and down, pinned or not.

        Tiers do it beside each other, and each is waited for as long as its timeout allows. When
        this returns, no read that begins afterwards has them from a tier that did not fail.
        What others write or read meanwhile in this store comes after the deletion.
        """
        self.check_open()
        blocks = list(dict.fromkeys(blocks))
        there = [block for block in blocks if self._level_of(block) is not None]
        works = self._call_off(blocks)
        try:
            # Memory first: a tier that is done could be given the old again from there.
            freed = [(self.front.name, self.front.remove(blocks))]
        finally:
            for work in works:
                work.start()
            for work in works:
                work.wait()
        self.fates.note(there, self.front.name, "removed", "removed")
        freed += [(work.tier.name, work.freed) for work in works]
        return Removed(tuple(freed), tuple(work.tier.name for work in works if not work.good))

    def supersede(self, blocks: Sequence[bytes]) -> Removed:
        """`remove`, before ``blocks`` are written anew with other bytes.

        A read that began before ends where it is: what it hands over is all old.
        """
        removed = self.remove(blocks)
        with self._lock:
            self._replacements += 1
            self._replaced.append((self._replacements, frozenset(blocks)))
        return removed

    def clear(self, space: bytes | None = None) -> Removed:
        """Delete a namespace, or everything that can be listed.

        It waits for every place, in the thread that calls.
        """
        self.check_open()
        within = space or b""
        with self._lock:
            self._clearing.append(within)
            flights = [block for block in self._flights if block.startswith(within)]
            queued = [block for block, _ in self._queued if block.startswith(within)]
        freed: list[tuple[str, int]] = []
        failed: list[str] = []
        try:
            for work in (works := self._call_off(list(dict.fromkeys([*flights, *queued])))):
                work.start()
            mine = [item.block for item in self.front.backend.list()]
            mine = [block for block in mine if block.startswith(within)]
            freed.append((self.front.name, self.front.remove(mine)))
            self.fates.note(mine, self.front.name, "removed", "cleared")
            for work in works:
                work.wait()
                count, good = work.tier.clear(space)
                freed.append((work.tier.name, count + work.freed))
                if not (good and work.good):
                    failed.append(work.tier.name)
        finally:
            with self._lock:
                self._clearing.remove(within)
        return Removed(tuple(freed), tuple(failed))

    def _call_off(self, blocks: Sequence[bytes]) -> list[_Removal]:
        """Have ``blocks`` not come back from where they are on their way to; what deletes them.

        Reads under way hand them to nobody, writes that wait are given up. Writes that run are
        waited for by the removal, else they would bring the block back behind it. New writes wait
        for the removal.
        """
        told: list[Callable[[bool], None]] = []
        works = [_Removal(self, tier, blocks) for tier in self.tiers]
        with self._lock:
            for block in blocks:
                flight = self._flights.pop(block, None)
                if flight is not None:
                    flight.call_off()
                for work in works:
                    mark = (block, work.tier.name)
                    before = self._queued.get(mark)
                    if before is not None:
                        told += before.waiting
                        before.waiting = []
                        if before.running or before.deleting:
                            before.over = before.over or threading.Event()
                            work.running.append(before.over)
                    self._queued[mark] = work.marks[block] = _Queued(deleting=True)
        for then in told:
            then(False)
        return works

    def set_quota(self, space: bytes, limit: int) -> None:
        """A namespace may hold ``limit`` bytes in each tier that has a budget."""
        self.check_open()
        self.front.catalogue.set_quota(space, limit)
        for tier in self.tiers:
            tier.catalogue.set_quota(space, limit)

    def flush(self, timeout: float | None = None) -> bool:
        """Have every tier hold, durably, what it is to hold; False: not all of it in time.

        True promises that what was put before and not dropped is in the slower tiers.
        """
        self.check_open()
        return self._flush(timeout)

    def _flush(self, timeout: float | None) -> bool:
        until = None if timeout is None else time.monotonic() + timeout
        good = self._settle(until)
        flushed: list[bool] = []
        for tier in self.tiers:
            tier.writing.submit(partial(_flush, tier, flushed), 0, _left(until))
        written = [tier.settled(_left(until)) for tier in self.tiers]
        with self._lock:  # blocks that wait for a tier to have deleted what it had of them
            good &= not any(one.deleting and one.waiting for one in self._queued.values())
        return good and all(written) and flushed == [True] * len(self.tiers)

    def _settle(self, until: float | None) -> bool:
        """Copy down what lies in memory alone and would be lost with it; whether all of it was."""
        saved: list[bool] = []
        for item in self.front.backend.list():
            with self._lock:
                level = self._planner.demotes(0, item.block)
            if level is not None:
                self._queue(self.tiers[level - 1], item.block, _left(until), saved.append)
        written = [tier.settled(_left(until)) for tier in self.tiers]
        return all(written) and all(saved)

    def close(self, timeout: float = 10.0) -> bool:
        """Flush, ``timeout`` seconds at most, and give everything back; whether all was written.

        A second call does nothing, nor does one in a forked process: all of it is its parent's.
        """
        if self.inherited:
            return True
        with self._lock:
            if self._closed:
                return True
            self._closed = True
        until = time.monotonic() + timeout
        self._prefetching.close(0.0)
        good = self._flush(timeout)
        threads = [(tier, work) for tier in self.tiers for work in (tier.reading, tier.writing)]
        for tier, work in threads:
            good &= work is tier.reading or tier.settled(_left(until))
            work.close(0.0)
        for tier, work in threads:  # what is on its way ends in time, unless its place hangs
            work.join(min(_left(until) or 0.0, tier.timeout - work.longest))
        self._prefetching.join(_left(until) or 0.0)
        for tier in self.tiers:
            # A place that hangs may do so here as well; it is left to itself then.
            closing = threading.Thread(target=tier.close, name=f"kvkeep {tier.name}", daemon=True)
            closing.start()
            closing.join(max(0.5, _left(until) or 0.0))
        self.front.backend.close()
        return good

    def stats(self) -> list[TierStats]:
        """All tiers at this moment, fastest first."""
        return [self.front.stats(), *(tier.stats() for tier in self.tiers)]

    def check(self) -> None:
        """Recount; for when nothing is on its way. An AssertionError is a fault of kvkeep."""
        if not self._closed:  # its memory has been given back
            self.front.check()
        for tier in self.tiers:
            tier.catalogue.check()

    @property
    def closed(self) -> bool:
        """Whether it was closed, or is being closed."""
        return self._closed

    @property
    def inherited(self) -> bool:
        """Whether this process was forked from the one that opened it."""
        return os.getpid() != self._process

    def check_open(self) -> None:
        """Raise `IllegalStep` once it was closed, and in a forked process."""
        if self._closed:
            raise IllegalStep("the store is closed")
        if self.inherited:
            raise IllegalStep(
                f"the store was opened by process {self._process}, and this one was forked from "
                "it; open another store here"
            )

    @contextmanager
    def _closed_is_illegal(self) -> Iterator[None]:
        """Raise `IllegalStep` where memory fails because the store was closed meanwhile."""
        try:
            yield
        except BackendFailed:
            self.check_open()
            raise


class _Removal:
    """Deletes blocks of one tier in a thread of its own: a place that hangs keeps it, and no more.

    Attributes:
        marks: what stands in the store's queue for each block as long as it lasts.
        running: set one by one when what the tier did with these blocks before has ended.
        freed: bytes.
        good: nothing is left in the tier.
    """

    def __init__(self, store: TieredStore, tier: Tier, blocks: Sequence[bytes]) -> None:
        self.tier = tier
        self.marks: dict[bytes, _Queued] = {}
        self.running: list[threading.Event] = []
        self.freed = 0
        self.good = False
        self._store = store
        self._blocks = blocks
        self._over = threading.Event()
        self._until = 0.0

    def start(self) -> None:
        """Begin."""
        self._until = time.monotonic() + self.tier.removal_patience(len(self._blocks))
        if not self._blocks:
            self.good = True
            self._over.set()
            return
        name = f"kvkeep {self.tier.name} deleter"
        threading.Thread(target=self._delete, name=name, daemon=True).start()

    def wait(self) -> None:
        """Wait for the end, as long as the tier may take; what it has not done then failed."""
        if not self._over.wait(_left(self._until)):
            self.tier.hide(self._blocks)

    def _delete(self) -> None:
        try:
            for over in self.running:
                over.wait()
            self.freed, left = self.tier.remove(self._blocks)
            self.good = not left
        finally:
            for block, queued in self.marks.items():
                self._store._deleted(self.tier, block, queued)
            self._over.set()


def _flush(tier: Tier, flushed: list[bool]) -> None:
    flushed.append(tier.flush())


def _let_go(waiting: Flight | MemoryLease) -> None:
    if isinstance(waiting, Flight):
        waiting.leave()
    else:
        waiting.release()


def _left(until: float | None) -> float | None:
    return None if until is None else max(0.0, until - time.monotonic())
