"""One block on its way up: read once, however many wait for it."""

from __future__ import annotations

import threading
import time
from functools import partial
from typing import TYPE_CHECKING

from kvkeep.core.errors import BackendFailed
from kvkeep.store.tiers.front import MemoryLease

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvkeep.store.backends.memory import Draft
    from kvkeep.store.tiers.front import Front
    from kvkeep.store.tiers.tier import Tier

__all__ = ["Flight"]


class Flight:
    """A block being read from the first of ``tiers`` that gives it.

    Who wants it joins; the record stays available until all who joined have left. A tier that
    takes longer than its timeout is given up for this block and the next one asked: its thread may
    hang for ever and what it brings is thrown away.

    ``landed`` is called, without any lock held, when it is over; more than once perhaps.

    Thread safety: all methods.
    """

    def __init__(
        self,
        front: Front,
        block: bytes,
        raw_bytes: int,
        tiers: Sequence[Tier],
        landed: Callable[[Flight], None],
    ) -> None:
        self.block = block
        self.raw_bytes = raw_bytes
        self.source: Tier | None = None
        """The tier that gave it."""
        self.stays = True
        """Whether it stays in memory; set before `start`."""
        self._called_off = False
        self._front = front
        self._tiers = list(tiers)
        self._changed = threading.Condition()
        self._attempt = 0  # counts up; what an older attempt brings is thrown away
        self._since = time.monotonic()  # who joins may wait before it was started
        self._began = False  # the attempt has a thread
        self._joined = 0
        self._held: MemoryLease | None = None
        self._done = False
        self._landed = landed

    # --- those who wait --------------------------------------------------------------------------

    def join(self) -> bool:
        """Want it, too; False when it is too late for that."""
        with self._changed:
            if self._done and self._held is None:
                return False
            self._joined += 1
            return True

    def leave(self) -> None:
        """Want it no longer, or be done with it. Nobody left: it need not be read any more."""
        with self._changed:
            self._joined -= 1
            held = self._held if self._joined == 0 else None
            if held is not None:
                self._held = None
        if held is not None:
            held.release()

    def call_off(self) -> None:
        """The block is being deleted: what was read of it is handed to nobody from now on.

        It may be in memory already: who deletes it there does so after this.
        """
        with self._changed:
            self._called_off = True

    def wait(self, until: float | None) -> MemoryLease | None:
        """The record, or None when no tier gave it, or not ``until`` (monotonic seconds)."""
        with self._changed:
            while not self._done:
                now = time.monotonic()
                late = self._since + self._tiers[0].timeout if self._tiers else now
                if until is not None and now >= until:
                    return None
                if now >= late:
                    self._give_up()  # of no tiers at all, too: it may not have been started yet
                    continue
                self._changed.wait(min(late, until if until is not None else late) - now)
            held = self._held
        self._landed(self)
        return held

    # --- those who read --------------------------------------------------------------------------

    def start(self) -> None:
        """Ask the first tier."""
        with self._changed:
            self._ask()
            done = self._done
        if done:
            self._landed(self)

    def _ask(self) -> None:
        """Under the lock: have the first tier's threads read it; nobody left to ask: done."""
        while self._tiers:
            tier, self._attempt = self._tiers[0], self._attempt + 1
            self._began = False
            self._since = time.monotonic()
            if tier.unread(self.block):  # not to wait for a thread, which may hang, to be told so
                tier.counters.count(skipped_calls=1)
                tier.failed("unavailable", "breaker")
            elif tier.reading.submit(
                partial(self._read, tier, self._attempt),
                given_up=partial(self._ended, tier, self._attempt),
            ):
                return
            else:
                tier.counters.count(late=1)  # its queue is full
                tier.failed("late", "queue full")
            self._tiers.pop(0)
        self._done = True
        self._changed.notify_all()

    def _give_up(self) -> None:
        """Under the lock: the first tier, if there is one, took too long."""
        if self._tiers:
            tier = self._tiers.pop(0)
            tier.counters.count(late=1)
            tier.failed("late", "no answer")
            if self._began:
                part = tier.backend.part(self.block)
                tier.breaker.of("read", part).failed(f"no answer in {tier.timeout:g} s")
            else:  # it waits for a thread: what counts are the calls that hang
                tier.unread(self.block)
        self._ask()

    def _read(self, tier: Tier, attempt: int) -> None:
        with self._changed:
            if attempt != self._attempt or self._done:
                return
            self._began = True
            self._since = time.monotonic()  # it waited for a thread: that is not the place's fault
            cancelled = self._done = not self._joined
        if not cancelled:
            draft: Draft | None = None

            def place() -> memoryview:
                nonlocal draft
                if self.stays:
                    draft = self._front.reserve(self.block, self.raw_bytes)
                return draft.view if draft is not None else self._front.buffer(self.raw_bytes)

            record: memoryview | None = None
            try:
                record = tier.load(self.block, self.raw_bytes, place)
            finally:  # whatever it raised: nobody is to wait for it, nor its draft to keep room
                self._ended(tier, attempt, record, draft)
        else:
            self._landed(self)

    def _ended(
        self,
        tier: Tier,
        attempt: int,
        record: memoryview | None = None,
        draft: Draft | None = None,
    ) -> None:
        """A tier answered, or never will."""
        with self._changed:
            self._came(tier, attempt, record, draft)
            over = self._done
        if over:
            self._landed(self)

    def _came(
        self, tier: Tier, attempt: int, record: memoryview | None, draft: Draft | None
    ) -> None:
        """Under the lock: a tier answered."""
        mine = attempt == self._attempt and not self._done
        if record is None or not mine or self._called_off:
            if draft is not None:
                draft.discard()
            if mine and self._called_off:
                self._done = True
                self._changed.notify_all()
            elif mine:
                self._tiers.pop(0)
                self._ask()
            return
        self._done = True
        self._changed.notify_all()
        try:
            held = MemoryLease(record) if draft is None else self._front.commit(draft, self.block)
        except BackendFailed:
            return  # memory was closed meanwhile
        self.source = tier
        if self._joined:
            self._held = held
        else:
            held.release()
