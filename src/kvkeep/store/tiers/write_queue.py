"""`WriteQueue`: what each tier is about to write or delete, block by block."""

from __future__ import annotations

import threading
from contextlib import suppress
from typing import TYPE_CHECKING

from kvkeep.core.errors import BackendFailed

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvkeep.store.tiers.front import FrontMemory
    from kvkeep.store.tiers.loss_log import LossLog
    from kvkeep.store.tiers.tier import Tier

__all__ = ["Pending", "WriteQueue"]


class Pending:
    """An unfinished write or deletion of one block in one tier, guarded by the queue's lock.

    Attributes:
        waiting: callbacks of a write, called at its end with whether the tier has the block. Those
            of a deletion belong to writes that are queued when it ends.
        running: whether the write has begun.
        over: event that is set at the end, if it was called off while it ran; else None.
        deleting: whether it is a deletion; the block must not be read from the tier then.
    """

    __slots__ = ("deleting", "over", "running", "waiting")

    def __init__(self, then: Callable[[bool], None] | None = None, *, deleting: bool = False):
        self.waiting = [] if then is None else [then]
        self.running = False
        self.over: threading.Event | None = None
        self.deleting = deleting


class WriteQueue:
    """Writes and deletions under way, at most one for each block and tier.

    Writes are done by the writer threads of each tier, from memory, which keeps the block
    meanwhile.

    Thread safety: all methods. Callbacks run without the lock.
    """

    def __init__(self, memory: FrontMemory, losses: LossLog) -> None:
        self._memory = memory
        self._losses = losses
        self._lock = threading.Lock()
        self._pending: dict[tuple[bytes, str], Pending] = {}

    def __len__(self) -> int:
        return len(self._pending)

    def is_pending(self, tier: Tier, block: bytes) -> bool:
        """Whether ``tier`` is about to write or delete ``block``."""
        with self._lock:  # `move_out` decides and marks what it deletes in one step
            return (block, tier.name) in self._pending

    def is_deleting(self, tier: Tier, block: bytes) -> bool:
        """Whether ``tier`` is about to delete ``block``."""
        with self._lock:
            return self._is_deleting(tier, block)

    def _is_deleting(self, tier: Tier, block: bytes) -> bool:
        pending = self._pending.get((block, tier.name))
        return pending is not None and pending.deleting

    @property
    def waits_for_deletions(self) -> bool:
        """Whether a write waits until its tier has deleted an older record."""
        with self._lock:
            return any(one.deleting and one.waiting for one in self._pending.values())

    # --- writes ----------------------------------------------------------------------------------

    def write(
        self,
        tier: Tier,
        block: bytes,
        wait: float | None,
        then: Callable[[bool], None] | None = None,
    ) -> bool:
        """Queue the write of ``block`` from memory; False if the queue is full or the tier fails.

        Waits for room in the queue for at most ``wait`` seconds, None: without limit. ``then`` is
        called in any case, with whether the tier has the block. KV that is not exact is not queued
        for an exact tier.

        Raises:
            BackendFailed: the memory was closed.
        """
        pending = self._begin(tier, block, then)
        if pending is None:
            return True
        memory = self._memory
        try:
            lease = memory.lease(block)
        except BackendFailed:
            self.end(tier, block, pending, saved=False)
            raise
        if lease is not None and tier.records.refuses(lease.record):
            lease.release()
            self.end(tier, block, pending, saved=False)
            self._losses.note([block], tier.name, "refused", "lossy")
            return True
        memory.catalogue.hold([block], [])

        def done(saved: bool) -> None:
            if lease is not None:
                lease.release()
            memory.catalogue.free([block])
            self.end(tier, block, pending, saved=saved)

        def save() -> None:
            saved = False
            try:
                if lease is None:  # evicted from memory meanwhile
                    saved = tier.knows(block)
                    if not saved:
                        self.note_dropped(tier, block, "no time")
                elif self.start(tier, block, pending):
                    saved = tier.save(block, lease.record)
            finally:
                done(saved)

        def drop() -> None:
            self.note_refused(tier, block)
            done(saved=False)

        cost = 0 if lease is None else len(lease.record)
        taken = False
        try:
            taken = not tier.health.unwritable(block) and tier.writing.submit(
                save, cost, wait, drop
            )
        finally:  # also if Ctrl-C ended the wait
            if not taken:
                drop()
        return taken

    def _begin(
        self, tier: Tier, block: bytes, then: Callable[[bool], None] | None
    ) -> Pending | None:
        """Return a new pending write; None if one is pending, to which ``then`` was added."""
        key = (block, tier.name)
        with self._lock:
            before = self._pending.get(key)
            if before is None:
                self._pending[key] = before = Pending(then)
                return before
            before.waiting += [then] if then is not None else []
            return None

    def begin_demotion(
        self,
        source: Tier,
        target: Tier,
        block: bytes,
        then: Callable[[bool], None],
    ) -> Pending | None:
        """Return a new pending write of a block that ``source`` evicts, or None.

        None if the block is being written to ``target`` already: ``then`` is called with True. Also
        None if ``source`` deletes or hides it, or ``target`` is deleting it, so that the demotion
        does not bring it back: ``then`` is called with False.
        """
        key = (block, target.name)
        with self._lock:
            before = self._pending.get(key)
            deleting = self._is_deleting(source, block) or source.is_hidden(block)
            if before is None and not deleting:
                self._pending[key] = pending = Pending(then)
                return pending
        then(before is not None and not before.deleting)
        return None

    def start(self, tier: Tier, block: bytes, pending: Pending) -> bool:
        """Mark a write as running; False if it was called off."""
        with self._lock:
            pending.running = self._pending.get((block, tier.name)) is pending
            return pending.running

    def end(self, tier: Tier, block: bytes, pending: Pending, *, saved: bool) -> None:
        """End a write, finished or cancelled, and call its callbacks."""
        key = (block, tier.name)
        with self._lock:
            if self._pending.get(key) is pending:  # else a deletion has replaced it
                del self._pending[key]
            pending.running = False
            waiting, pending.waiting = pending.waiting, []
            over = pending.over
        for then in waiting:
            then(saved)
        if over is not None:
            over.set()

    def note_refused(self, tier: Tier, block: bytes) -> None:
        """Count and record a block that ``tier`` does not take: it is full, or fails."""
        why = "breaker" if tier.health.unwritable(block) else "queue full"
        self.note_dropped(tier, block, why)

    def note_dropped(self, tier: Tier, block: bytes, why: str) -> None:
        """Count and record a block that ``tier`` did not write."""
        tier.counters.count(drops=1)
        self._losses.note([block], tier.name, "dropped", why)

    # --- deletions -------------------------------------------------------------------------------

    def move_out(self, tier: Tier, block: bytes) -> None:
        """Delete ``block`` from ``tier`` because memory has it. Runs in a writer thread.

        Does nothing if memory lost the block, or a write or deletion of it is pending.
        """
        key = (block, tier.name)
        with self._lock:
            if key in self._pending or block not in self._memory.catalogue:
                return
            pending = self._pending[key] = Pending(deleting=True)
        try:
            tier.remove([block])
        finally:
            self.deleted(tier, block, pending)

    def deleted(self, tier: Tier, block: bytes, pending: Pending) -> None:
        """End a deletion, and queue the writes that waited for it."""
        key = (block, tier.name)
        with self._lock:
            if self._pending.get(key) is pending:
                del self._pending[key]
            waiting, pending.waiting = pending.waiting, []
            over = pending.over
        if over is not None:
            over.set()
        for then in waiting:
            with suppress(BackendFailed):  # the memory was closed; `write` has called `then`
                self.write(tier, block, 0.0, then)

    def call_off(
        self, tier: Tier, blocks: Sequence[bytes]
    ) -> tuple[dict[bytes, Pending], list[threading.Event]]:
        """Replace pending operations on ``blocks`` by deletions; return these, and events.

        Queued writes are cancelled. There is an event for each running write or deletion, set when
        it ends: delete after all of them, else a write brings its block back. Later writes wait for
        the deletion. Call `deleted` for each block afterwards.
        """
        given_up: list[Callable[[bool], None]] = []
        deletions: dict[bytes, Pending] = {}
        running: list[threading.Event] = []
        with self._lock:
            for block in blocks:
                key = (block, tier.name)
                before = self._pending.get(key)
                if before is not None:
                    given_up += before.waiting
                    before.waiting = []
                    if before.running or before.deleting:
                        before.over = before.over or threading.Event()
                        running.append(before.over)
                self._pending[key] = deletions[block] = Pending(deleting=True)
        for then in given_up:
            then(False)
        return deletions, running

    def pending(self, space: bytes) -> list[bytes]:
        """Return the blocks of a namespace with a write or deletion under way in any tier."""
        with self._lock:
            return list({block: None for block, _ in self._pending if block.startswith(space)})
