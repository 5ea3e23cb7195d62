"""`FetchBack`: fetches blocks of waiting conversations back, in the background.

It also writes down what memory evicts next.
"""

from __future__ import annotations

import math
import threading
import time
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

from kvkeep.core.errors import BackendFailed
from kvkeep.store.tiers.fetching import PAUSE, FetchMoves
from kvkeep.store.tiers.memory import MemoryTier
from kvkeep.store.tiers.planner import HEADROOM
from kvkeep.store.tiers.record import HEADER_BYTES
from kvkeep.store.tiers.shared_read import SharedRead

if TYPE_CHECKING:
    from kvkeep.store.tiers.fetching import FetchPlanner
    from kvkeep.store.tiers.levels import Levels
    from kvkeep.store.tiers.planner import Copy
    from kvkeep.store.tiers.reading import Reader
    from kvkeep.store.tiers.tier import Tier
    from kvkeep.store.tiers.tier_returns import TierReturns
    from kvkeep.store.tiers.write_queue import WriteQueue

__all__ = ["FetchBack", "open_fetch_back"]

_IDLE_READERS = 2  # of a tier: one is taken, the other is left to requests
_PAUSES = 5  # that writes of a round take at most; then it is time for fetches
_LATE = 60.0  # seconds after a dropped demotion in which blocks are written ahead
_OTHERS = 1  # writes of a tier that wait or run, besides one of ours: the last one ends just now


class FetchBack(FetchMoves):
    """Fetches in rounds, one block at a time, by one thread that starts with the first request.

    A round begins after the end of a request or when `FetchPlanner.due`, a second after the last
    one at the earliest. It ends where a tier has not two idle readers, fails or hangs, so requests
    never wait for a fetch; and where evicted blocks have to be written down first, once half of the
    memory that is kept free for that is taken. Then, if a demotion was dropped in the last minute,
    it writes such blocks ahead, for five seconds at most, as long as the tier writes nothing else
    and does not fail.

    Thread safety: all methods.
    """

    def __init__(
        self, fetches: FetchPlanner, levels: Levels, memory: MemoryTier, reader: Reader
    ) -> None:
        super().__init__(fetches, levels.planner, memory.catalogue)
        self._levels = levels
        self._front = memory
        self._reader = reader
        self._queue: WriteQueue = reader.queue
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._awake = False
        self._closed = False
        self._running = False
        self._until = math.inf  # when to write no more in this round
        self._dropped = 0  # demotions, as seen last
        self._late_until = -math.inf

    def wake(self) -> None:
        """Begin a round soon: a request has ended."""
        with self._changed:
            if self._closed:
                return
            self._awake = True
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name="kvkeep fetch back", daemon=True
                )
                self._thread.start()
            self._changed.notify_all()

    @property
    def idle(self) -> bool:
        """Whether no round runs."""
        return not self._running

    def close(self) -> None:
        """Begin no more fetches."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def join(self, timeout: float) -> bool:
        """After `close`: wait for the running fetch, ``timeout`` s at most; return if it ended."""
        if self._thread is None:
            return True
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while self._wait():
            try:
                with suppress(BackendFailed):  # the memory was closed meanwhile
                    self.fetch_back()
                    if self._is_late():
                        self._until = time.monotonic() + _PAUSES * PAUSE
                        self.write_ahead()
            finally:
                self._running = False
            with self._changed:
                self._changed.wait_for(lambda: self._closed, PAUSE)

    def _wait(self) -> bool:
        """Wait until a round is to begin; return False once closed."""
        with self._changed:
            left = self.fetches.left()
            self._changed.wait_for(
                lambda: self._closed or self._awake,
                None if left == math.inf else left,
            )
            self._running = not self._closed
            self._awake = False
            return self._running

    def _is_late(self) -> bool:
        """Whether memory dropped a demotion lately, because its tier could not take it in time.

        Elsewhere copies would only take room.
        """
        dropped, now = self._front.counters.demotions_dropped, time.monotonic()
        if dropped > self._dropped:
            self._dropped, self._late_until = dropped, now + _LATE
        return now < self._late_until

    # --- the steps of a round --------------------------------------------------------------------

    def level_of(self, block: bytes) -> int | None:
        return self._levels.level_of(block)

    def has_copy(self, block: bytes) -> bool:
        return any(
            tier.knows(block) or tier.is_hidden(block) or self._queue.is_pending(tier, block)
            for tier in self._levels.tiers
        )

    def has_room(self, size: int) -> bool:
        used = self._front.backend.used() - self._front.leaving_bytes + size
        if used > self._front.capacity:
            return False
        return not self._planner.excess(self._front.capacity, used)

    def fetch(self, block: bytes, level: int, size: int) -> bool:
        tier = self._levels.tier(level)
        if self._closed or not self._allowed(tier, size):
            return False
        read = self._reader.start(block, size - HEADER_BYTES, level)
        if not isinstance(read, SharedRead):
            read.release()
            return False  # a request has just read it
        try:
            # A tier of no answer is given up within its timeout, then the others are asked.
            read.wait(time.monotonic() + tier.timeout)
        finally:
            read.leave()
        return block in self._front

    def copy(self, move: Copy) -> bool:
        tier, block = self._levels.tier(move.target), move.block
        if self._closed or time.monotonic() > self._until:
            return False
        if tier.writing.unfinished > _OTHERS or tier.health.unwritable(block):
            return False
        written: list[bool] = []
        over = threading.Event()

        def ended(saved: bool) -> None:
            written.append(saved)
            over.set()

        if self._queue.write_ahead(tier, block, ended):
            over.wait(tier.timeout)
        if written != [True]:
            return False
        self._front.counters.count(written_ahead=1)
        return True

    def move_out(self, block: bytes, level: int) -> None:
        tier = self._levels.tier(level)
        if tier.codec.exact:  # else its copy stays: see `Reader`
            tier.writing.submit(partial(self._queue.move_out, tier, block))

    def _allowed(self, tier: Tier, size: int) -> bool:
        """Whether a fetch delays no request."""
        if tier.options.readers - tier.reading.unfinished < _IDLE_READERS:
            return False
        memory = self._front
        if not self._planner.excess(memory.capacity, memory.capacity):
            return True  # nothing is written when it is evicted
        return memory.backend.used() + size <= memory.capacity * (1 - HEADROOM / 2)


def open_fetch_back(returns: TierReturns, levels: Levels, reader: Reader) -> FetchBack | None:
    """Return what fetches for the conversations of ``returns``; None if nothing is to be fetched.

    It is woken when they begin to wait.
    """
    memory = levels.memory
    if returns.fetches is None or not isinstance(memory, MemoryTier):
        return None
    back = FetchBack(returns.fetches, levels, memory, reader)
    returns.noted = back.wake
    return back
