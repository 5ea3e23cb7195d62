"""`SharedRead`: one read of a block from the tiers, however many requests wait for it."""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

from kvkeep.core.errors import BackendFailed
from kvkeep.store.tiers.memory import MemoryLease
from kvkeep.store.tiers.record import HEADER_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvkeep.store.backends.buffers import SpareBuffers
    from kvkeep.store.backends.memory import Draft
    from kvkeep.store.tiers.front import FrontMemory
    from kvkeep.store.tiers.tier import Tier

__all__ = ["SharedRead"]


class SharedRead:
    """Reads a block from the first of ``tiers`` that has it.

    Requests `join` it; the record stays available until all of them have left. If a tier takes
    longer than its timeout, the next tier is tried; a late result of the first, whose thread may
    hang for ever, is discarded.

    ``ended`` is called without a lock held when the read is over, perhaps more than once.

    Thread safety: all methods.

    Arguments:
        buffers: for records that memory does not take.
        stays: whether memory keeps the block.

    Attributes:
        source: the tier that had the block.
    """

    def __init__(
        self,
        memory: FrontMemory,
        block: bytes,
        raw_bytes: int,
        tiers: Sequence[Tier],
        ended: Callable[[SharedRead], None],
        *,
        buffers: SpareBuffers,
        stays: bool = True,
    ) -> None:
        self.block = block
        self.raw_bytes = raw_bytes
        self.stays = stays
        self.source: Tier | None = None
        self._memory = memory
        self._buffers = buffers
        self._tiers = list(tiers)
        self._ended = ended
        self._changed = threading.Condition()
        self._cancelled = False
        self._attempt = 0  # number of the current attempt; results of older ones are discarded
        self._since = time.monotonic()  # requests may wait before `start`
        self._began = False  # whether the attempt runs, not waits for a thread
        self._joined = 0
        self._lease: MemoryLease | None = None
        self._done = False
        self._queued: Tier | None = None  # whose queue of reads counts this one

    # --- called by requests ----------------------------------------------------------------------

    def join(self) -> bool:
        """Take part in the read; return False if it has ended and its record was released."""
        with self._changed:
            if self._done and self._lease is None:
                return False
            self._joined += 1
            return True

    def leave(self) -> None:
        """Undo one `join`. A read that has not begun is skipped when no request is left."""
        with self._changed:
            self._joined -= 1
            lease = self._lease if self._joined == 0 else None
            if lease is not None:
                self._lease = None
            elif not self._joined and not self._began:
                self._unqueue()  # a reader thread will skip it
        if lease is not None:
            lease.release()

    def cancel(self) -> None:
        """Discard the result of the read from now on, because the block is being deleted.

        The block may be in memory already: delete it there afterwards.
        """
        with self._changed:
            self._cancelled = True

    def wait(self, until: float | None) -> MemoryLease | None:
        """Return the record; None if no tier had it, or none by ``until`` (monotonic seconds)."""
        with self._changed:
            while not self._done:
                now = time.monotonic()
                if until is not None and now >= until:
                    return None
                late = self._late_at()
                if now >= late:
                    self._give_up()  # also without tiers: `start` may not have run yet
                    continue
                self._changed.wait(min(late, until if until is not None else late) - now)
            lease = self._lease
        self._ended(self)
        return lease

    def _late_at(self) -> float:
        """Return when the present attempt is given up, under the lock."""
        return self._since + self._tiers[0].timeout if self._tiers else 0.0

    def _unqueue(self) -> None:
        """Wait for no tier any more, under the lock."""
        if self._queued is not None:
            self._queued.reads.queue(-self.raw_bytes)
            self._queued = None

    def _finish(self) -> None:
        """End the read, under the lock, and wake all that wait for it."""
        self._done = True
        self._unqueue()
        self._changed.notify_all()

    # --- called by readers -----------------------------------------------------------------------

    def start(self) -> None:
        """Queue the first attempt, in a reader thread of its tier."""
        with self._changed:
            self._read_next()
            done = self._done
        if done:
            self._ended(self)

    def _read_next(self) -> None:
        """Queue a read in the first tier that accepts it, under the lock; end if none does."""
        self._unqueue()
        while self._tiers:
            tier, self._attempt = self._tiers[0], self._attempt + 1
            self._began = False
            self._since = time.monotonic()
            if tier.unreadable(self.block):  # calls that hang may block the queue
                tier.note_unread()
            elif tier.reading.submit(
                partial(self._read, tier, self._attempt),
                given_up=partial(self._over, tier, self._attempt),
            ):
                self._queued = tier
                tier.reads.queue(self.raw_bytes)
                return
            else:
                tier.note_unread(late="queue full")
            self._tiers.pop(0)
        self._finish()

    def _give_up(self) -> None:
        """Skip the first tier, which took too long, and try the next, under the lock."""
        if self._tiers:
            tier = self._tiers.pop(0)
            tier.note_unread(late="no answer")
            if self._began:
                part = tier.backend.part(self.block)
                tier.breaker.of("read", part).failed(f"no answer in {tier.timeout:g} s")
            else:  # still waiting for a thread: report the hanging calls that occupy all threads
                tier.unreadable(self.block)
        self._read_next()

    def _read(self, tier: Tier, attempt: int) -> None:
        with self._changed:
            if attempt != self._attempt or self._done:
                return
            self._began = True
            self._since = time.monotonic()  # the timeout excludes the wait for a thread
            unwanted = not self._joined
            if unwanted:
                self._finish()
        if unwanted:
            self._ended(self)
            return
        draft: Draft | None = None

        def place() -> memoryview:
            nonlocal draft
            if self.stays:
                with suppress(BackendFailed):  # the memory was closed meanwhile
                    draft = self._memory.reserve(self.block, self.raw_bytes)
            return (
                draft.view
                if draft is not None
                else self._buffers.take(HEADER_BYTES + self.raw_bytes)
            )

        record: memoryview | None = None
        try:
            record = tier.load(self.block, self.raw_bytes, place)
        finally:  # also after an exception: wake waiting requests and free the draft
            self._over(tier, attempt, record, draft)

    def _over(
        self,
        tier: Tier,
        attempt: int,
        record: memoryview | None = None,
        draft: Draft | None = None,
    ) -> None:
        """End an attempt, which has finished or was discarded from the queue."""
        with self._changed:
            self._take(tier, attempt, record, draft)
            over = self._done
        if over:
            self._ended(self)

    def _take(
        self, tier: Tier, attempt: int, record: memoryview | None, draft: Draft | None
    ) -> None:
        """Take the result of an attempt, under the lock; after a miss, try the next tier."""
        current = attempt == self._attempt and not self._done
        if record is None or not current or self._cancelled:
            if draft is not None:
                draft.discard()
            if current and self._cancelled:
                self._finish()
            elif current:
                self._tiers.pop(0)
                self._read_next()
            return
        self._finish()
        lease: MemoryLease | None = None
        try:
            if draft is None:
                lease = MemoryLease(record, buffers=self._buffers)
            else:
                lease = self._memory.commit(draft, self.block)
        except BackendFailed:
            return  # the memory was closed meanwhile
        if lease is None:
            return
        self.source = tier
        if self._joined:
            self._lease = lease
        else:
            lease.release()
