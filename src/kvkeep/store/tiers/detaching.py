"""`Evacuation`: moves the blocks that only one tier has to the others, before it is detached."""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from kvkeep.core.errors import BackendFailed

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvkeep.store.tiers.levels import Levels
    from kvkeep.store.tiers.tier import Tier
    from kvkeep.store.tiers.write_queue import WriteQueue

__all__ = ["Detached", "Evacuation", "close_tier"]

_LOG = logging.getLogger("kvkeep.tiers")
_AT_ONCE = 2  # blocks that are read or written at a time: readers are left to requests
_PER_QUERY = 256  # blocks
_GRACE = 1.0  # seconds
_SLICE = 0.1  # seconds after which a wait looks whether the store is closed


@dataclass(frozen=True, slots=True)
class Detached:
    """The result of detaching a tier.

    Attributes:
        name: of the tier.
        moved: blocks that it alone had, and that another tier has now.
        moved_bytes: of their records, as they were moved.
        left: blocks that no other tier has: there was no room, no time, or they could not be read
            or written. They stay in the detached place, and are missing here.
    """

    name: str
    moved: int
    moved_bytes: int
    left: int


class _Found(NamedTuple):
    """A block of the tier that is detached."""

    block: bytes
    size: int


class Evacuation:
    """Moves what ``source`` alone has to tiers with room, the blocks used last first.

    It copies: nothing is deleted in ``source``, and nothing is evicted elsewhere for it. Memory
    does not count as another tier, since it evicts without asking. Only blocks in the catalogue are
    moved, so none of a place without a budget. Pins go with the blocks.

    Thread safety: `run`, `left` and `result` are for one thread; the moves run in those of tiers.
    Memory: 100 bytes a block of ``source``, and a few records.
    """

    def __init__(
        self, source: Tier, levels: Levels, queue: WriteQueue, closed: Callable[[], bool]
    ) -> None:
        self._source = source
        self._levels = levels
        self._queue = queue
        self._closed = closed
        self._lock = threading.Lock()
        self._slots = threading.Semaphore(_AT_ONCE)
        self._targets: list[Tier] = []
        self._room: dict[str, int | None] = {}  # bytes that are free, by tier; None: no limit
        self._claims: dict[bytes, int] = {}  # blocks that are being read to take room, with bytes
        self._moved: dict[str, list[bytes]] = {}  # by tier
        self._moved_bytes = 0

    def run(self, until: float) -> None:
        """Move until all that fits is moved, or ``until`` (monotonic seconds)."""
        source = self._source
        targets = list(self._levels.active)
        if not source.codec.exact:  # what it has is not for exact tiers
            targets = [one for one in targets if not one.codec.exact]
        self._targets = targets
        self._room = {tier.name: _free(tier, until) for tier in targets}
        running, order = 0, self._only_here(until)
        for block, size in order:
            if not self._fits(size):
                continue
            if not self._slot(until):
                break
            if not self._claim(block, size):  # those under way take the room, or leave it
                if not self._slot(until):
                    self._slots.release()
                    break
                self._slots.release()
                if not self._claim(block, size):
                    self._slots.release()
                    continue
            if source.reading.submit(
                partial(self._move, block, until), given_up=partial(self._give_up, block)
            ):
                running += 1
            else:
                self._give_up(block)
        for _ in range(_AT_ONCE if running else 0):  # wait for the last ones
            if not self._slot(until):
                break
        for tier in targets:
            with self._lock:
                moved = set(self._moved.get(tier.name, ()))
            blocks = [one.block for one in order if one.block in moved]
            self._take_pins(tier, blocks)
            tier.reorder(blocks)

    def left(self, until: float) -> list[bytes]:
        """Return the blocks that no other tier has, as far as these answer until ``until``."""
        return [one.block for one in self._only_here(until)]

    def result(self, left: Sequence[bytes]) -> Detached:
        """Return what became of the tier's blocks, of which ``left`` are nowhere else."""
        with self._lock:
            moved = sum(map(len, self._moved.values()))
            return Detached(self._source.name, moved, self._moved_bytes, len(left))

    def _only_here(self, until: float) -> list[_Found]:
        """Return the blocks that no other tier has, the one used last first."""
        others = self._levels.active
        found = [_Found(*one) for one in self._source.catalogue.by_use()]
        found = [one for one in found if not any(tier.knows(one.block) for tier in others)]
        asked = [tier for tier in others if tier.queried]
        only: list[_Found] = []
        for start in range(0, len(found), _PER_QUERY):
            some = found[start : start + _PER_QUERY]
            for tier in asked:
                here = tier.probe([one.block for one in some], until)
                some = [one for one in some if one.block not in here]
            only += some
        return only

    # --- one block: in a reader thread of the source ----------------------------------------------

    def _slot(self, until: float) -> bool:
        """Wait for one of the moves to end; False at ``until``, or once the store is closed."""
        while not self._closed():
            left = until - time.monotonic()
            if self._slots.acquire(timeout=max(0.0, min(_SLICE, left))):
                return True
            if left <= 0:
                return False
        return False

    def _fits(self, *sizes: int) -> bool:
        """Whether any tier has room for records of all of ``sizes`` (bytes)."""
        for tier in self._targets:
            room = self._room[tier.name]
            if room is None or room >= sum(_padded(tier, size) for size in sizes):
                return True
        return False

    def _claim(self, block: bytes, size: int) -> bool:
        """Claim room for ``block``; False if there may be none beside what others claim."""
        with self._lock:
            if not self._fits(size, *self._claims.values()):
                return False
            self._claims[block] = size
            return True

    def _give_up(self, block: bytes) -> None:
        """End a move that wrote nothing."""
        with self._lock:
            self._claims.pop(block, None)
        self._slots.release()

    def _move(self, block: bytes, until: float) -> None:
        handed_on = False
        mark = self._queue.begin_move(self._source, block)  # whoever deletes it ends the move
        try:
            if mark is not None and not self._source.is_hidden(block):
                record = self._source.fetch(block)
                if record is not None and not self._closed():
                    handed_on = self._hand_on(block, record, mark, until)
        finally:
            if mark is not None:
                self._queue.end_move(block, mark)
            if not handed_on:
                self._give_up(block)

    def _hand_on(self, block: bytes, record: memoryview, mark: object, until: float) -> bool:
        """Queue the write of ``record`` to the first tier with room; return whether it was."""
        target = self._reserve(record, block)
        if target is None:
            return False
        size, begun = len(record), False

        def ended(saved: bool) -> None:
            with self._lock:
                room = self._room[target.name]
                if saved and begun:
                    self._moved.setdefault(target.name, []).append(block)
                    self._moved_bytes += size
                elif room is not None:
                    self._room[target.name] = room + size
            self._slots.release()

        pending = self._queue.begin_demotion(self._source, target, block, ended, mark=mark)
        if pending is None:
            return True  # it is being written there, or deleted: `ended` was called
        begun = True

        def save() -> None:
            saved = False
            try:
                saved = self._queue.start(target, block, pending) and target.save(block, record)
            finally:
                self._queue.end(target, block, pending, saved=saved)

        def lost() -> None:
            self._queue.end(target, block, pending, saved=False)

        wait = max(0.0, min(target.timeout, until - time.monotonic()))
        if not target.writing.submit(save, size, wait, lost):
            lost()
        return True

    def _reserve(self, record: memoryview, block: bytes) -> Tier | None:
        """Return the first tier that takes ``record`` and has room, and count that as taken."""
        with self._lock:
            for tier in self._targets:
                if tier.health.unwritable(block) or tier.records.refuses(record):
                    continue
                room, needed = self._room[tier.name], _padded(tier, len(record))
                if room is None or room >= needed:
                    self._claims.pop(block, None)
                    self._room[tier.name] = None if room is None else room - needed
                    return tier
        return None

    def _take_pins(self, tier: Tier, blocks: Sequence[bytes]) -> None:
        now, most = time.time(), (tier.backend.capacity or 0) // 2
        for block, end in self._source.catalogue.pin_ends(blocks).items():
            tier.catalogue.pin([block], max(0.0, end - now), most)


def _padded(tier: Tier, size: int) -> int:
    """Return the bytes that a record of ``size`` bytes takes in a tier, in its whole units."""
    unit = tier.backend.unit
    return -(-size // unit) * unit


def _free(tier: Tier, until: float) -> int | None:
    """Return the bytes that a tier has free; None: it has no budget, 0: it does not answer.

    A reader thread asks: a place that hangs is waited for until its timeout, and ``until``.
    """
    capacity = tier.backend.capacity
    if capacity is None:
        return None
    found: list[int | None] = []
    over = threading.Event()

    def ask() -> None:
        try:
            found.append(tier.backend.used())
        except (BackendFailed, OSError) as error:
            _LOG.info("tier %s: %s", tier.name, error)
        finally:
            over.set()

    if not tier.reading.submit(ask, given_up=over.set):
        return 0
    over.wait(max(0.0, min(tier.timeout, until - time.monotonic())))
    if not found:
        return 0
    used = tier.catalogue.total_bytes if found[0] is None else found[0]
    return max(0, capacity - used - tier.writing.cost)


def close_tier(tier: Tier, until: float, closed: Callable[[], bool]) -> None:
    """Make a tier's writes durable, end its threads, and close its backend.

    Waits until ``until`` (monotonic seconds), or a second if that is later, but not for calls that
    hang, nor once the store is ``closed()``; and then for the backend to close, for its timeout at
    most, or half a second.
    """
    until = max(until, time.monotonic() + min(_GRACE, tier.timeout))
    tier.writing.submit(tier.flush, 0)
    for work in (tier.writing, tier.reading):
        while not closed():
            left = min(until - time.monotonic(), tier.timeout - work.longest)
            if left <= 0 or work.wait(min(_SLICE, left)):
                break
    for work in (tier.reading, tier.writing):
        work.close(0.0)
    for work in (tier.reading, tier.writing):  # running calls end within the timeout, or it hangs
        work.join(max(0.0, min(until - time.monotonic(), tier.timeout - work.longest)))
    # Closing a backend that hangs may hang, too: do it in a daemon thread.
    closing = threading.Thread(target=tier.close, name=f"kvkeep {tier.name}", daemon=True)
    closing.start()
    closing.join(max(0.5, min(tier.timeout, until - time.monotonic())))
