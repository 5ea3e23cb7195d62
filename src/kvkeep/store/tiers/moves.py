"""`Moves`: writes of blocks from memory to tiers, and of blocks that leave a level to the next."""

from __future__ import annotations

import logging
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING

from kvkeep.core.errors import BackendFailed

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvkeep.store.tiers.levels import Levels
    from kvkeep.store.tiers.memory import MemoryLease
    from kvkeep.store.tiers.prompt_writes import TierWrites
    from kvkeep.store.tiers.states import Deletion, Operation
    from kvkeep.store.tiers.tier import Tier

__all__ = ["Moves", "left_until"]

_LOG = logging.getLogger("kvkeep.tiers")
_PATIENCE = 0.2  # share of a tier's timeout that the tier above waits for it to take blocks


def _nothing(_saved: bool) -> None:
    pass


class Moves:
    """Moves blocks down: from memory to tiers, and from a tier that evicts them to the next.

    Writes are done by the writer threads of each tier, from memory, which keeps the block
    meanwhile; `BlockStates` has at most one for each block and tier. `Planner` decides what moves.

    Thread safety: all methods. No lock of its own.
    """

    def __init__(self, levels: Levels) -> None:
        self.levels = levels
        self.memory = levels.memory
        self.tiers = levels.tiers
        self.planner = levels.planner
        self.losses = levels.losses

    # --- from memory to a tier -------------------------------------------------------------------

    def write(
        self,
        tier: Tier,
        block: bytes,
        wait: float | None,
        then: Callable[[bool], object] = _nothing,
        prompt: TierWrites | None = None,
    ) -> bool:
        """Queue the write of ``block`` from memory; False if the queue is full or the tier fails.

        Waits for room in the queue for at most ``wait`` seconds, None: without limit. ``then`` is
        called in any case, with whether the tier has the block. KV that is not exact is not queued
        for an exact tier.

        Raises:
            BackendFailed: the memory was closed.
        """

        def again() -> None:
            with suppress(BackendFailed):  # the memory was closed; `write` has called `then`
                self.write(tier, block, 0.0, then)

        try:
            lease = self.memory.lease(block)
        except BackendFailed:
            then(False)
            raise
        operation: Operation | None = None
        try:
            if lease is not None and tier.knows(block) and tier.fits(block, len(lease.payload)):
                tier.counters.count(already=1)
                then(True)
            elif lease is not None and tier.records.refuses(lease.record):
                self.losses.note([block], tier.name, "refused", "lossy")
                then(False)
            else:
                operation = tier.states.queue(block, then, again)
        finally:
            if operation is None and lease is not None:
                lease.release()
        if operation is None:
            return True
        return self._submit(tier, operation, lease, wait, prompt)

    def _submit(
        self,
        tier: Tier,
        operation: Operation,
        lease: MemoryLease | None,
        wait: float | None,
        prompt: TierWrites | None,
    ) -> bool:
        block, holds = operation.block, self.memory.catalogue.holds
        holds.hold(block)

        def free() -> None:
            holds.free(block)
            if lease is not None:
                lease.release()

        def save() -> None:
            try:
                if lease is not None:
                    tier.write(operation, lease.record, prompt)
                else:  # evicted from memory meanwhile
                    saved = tier.knows(block)
                    if not saved:
                        tier.dropped(block, "no time")
                    tier.states.end(operation, saved=saved)
            finally:
                free()

        def drop() -> None:
            self.note_refused(tier, block)
            free()
            tier.states.end(operation, saved=False)

        cost = 0 if lease is None else len(lease.record)
        queued = False
        try:
            queued = not tier.unwritable(block) and tier.writing.submit(save, cost, wait, drop)
        finally:  # also if Ctrl-C ended the wait
            if not queued:
                drop()
        return queued

    def note_refused(self, tier: Tier, block: bytes) -> None:
        """Count and record a block that ``tier`` does not take: it is full, or fails."""
        tier.dropped(block, "breaker" if tier.unwritable(block) else "queue full")

    def move_up(self, tier: Tier, block: bytes) -> None:
        """Delete ``block`` from ``tier`` because memory has it. Runs in a writer thread.

        Does nothing if memory lost the block, or something is done with it in the tier.
        """
        size = tier.catalogue.size(block)
        deletion = tier.states.delete([block], idle=True)
        # In this order: what memory demotes from now on is written again behind the deletion.
        if deletion and block not in self.memory.catalogue:
            with deletion:
                pass
            if size is not None:
                tier.catalogue.add(block, size)
        else:
            tier.remove(deletion)

    # --- out of memory ---------------------------------------------------------------------------

    def demote_ahead(self) -> None:
        """Demote from memory before the room is needed, where the policy asks for it."""
        memory = self.memory
        excess = self.planner.excess(memory.capacity, memory.backend.used() - memory.leaving_bytes)
        if excess:
            for block in memory.leave(excess):
                self._demote(block)

    def _demote(self, block: bytes) -> None:
        """Move ``block``, which `MemoryTier.leave` returned."""
        memory = self.memory
        target, refused = self.planner.below(block, 0)
        tier = None if target is None else self._target(block, target)
        if tier is None:
            self.losses.note([block], memory.name, "evicted", memory.catalogue.policy)
            self._note_admission(block, refused)
            memory.left(block)
        elif tier.states.state(block) is None and tier.knows(block):
            memory.left(block)
        else:

            def moved(saved: bool) -> None:
                self._count(saved)
                memory.left(block)

            self.write(tier, block, 0.0, moved)

    def note_evicted(self, block: bytes) -> None:
        """Record that memory deleted ``block`` at once: lost, unless a tier has it."""
        target, refused = self.planner.below(block, 0)
        if target is None:
            self._note_admission(block, refused)
            return
        tier = self.tiers[target - 1]
        written = tier.states.queued(block, self._count)
        if not written and not tier.knows(block):
            self._count(saved=False)
            self.losses.note([block], tier.name, "dropped", "no time")

    def copy_down(self, until: float | None) -> bool:
        """Write the blocks that memory would demote to tiers; return whether all were saved.

        Waits until ``until`` (monotonic seconds) at most.
        """
        saved = list[bool]()
        for item in self.memory.backend.list():
            if item.block not in self.memory:  # it expired
                continue
            target, _ = self.planner.below(item.block, 0)
            tier = None if target is None else self._target(item.block, target)
            if tier is not None:
                self.write(tier, item.block, left_until(until), saved.append)
        written = [tier.settled(left_until(until)) for tier in self.tiers]
        return all(written) and all(saved)

    def _target(self, block: bytes, level: int) -> Tier | None:
        """Return the tier, at ``level`` or below, that memory demotes ``block`` to.

        Exact ones do not take lossy KV.
        """
        first = self.tiers[level - 1]
        lease = self.memory.lease(block) if self.levels.mixed else None
        if lease is None:
            return first
        below = self.tiers[level - 1 :]
        try:
            return next((tier for tier in below if not tier.records.refuses(lease.record)), None)
        finally:
            lease.release()

    def _count(self, saved: bool) -> None:
        self.memory.counters.count(demotions=int(saved), demotions_dropped=int(not saved))

    def _note_admission(self, block: bytes, level: int | None) -> None:
        """Record that a tier refused ``block``, which it admits after more touches."""
        if level is not None and not self.tiers[level - 1].knows(block):
            self.losses.note([block], self.tiers[level - 1].name, "refused", "admission")

    # --- out of a tier ---------------------------------------------------------------------------

    def evicting(self, source: Tier, victims: Deletion) -> None:
        """Copy ``victims``, which tier ``source`` is about to delete, to a lower tier.

        Reads in this thread, and writes in those of the lower tier. Waits only a share of the
        timeout for all of them: a lower tier that hangs must not stop the one above it.
        """
        if not self.planner.policy.exclusive:
            return
        until = time.monotonic() + _PATIENCE * source.timeout
        ends = [self._move(source, victims, block, until) for block in victims.blocks]
        for end in ends:
            if end is not None:
                end.wait(max(0.0, until - time.monotonic()))

    def _move(
        self, source: Tier, victims: Deletion, block: bytes, until: float
    ) -> threading.Event | None:
        """Begin to move one of ``victims``; return what is set at the end, None if it is over."""
        level, refused = self.planner.below(block, self.tiers.index(source) + 1)
        if level is None:
            self._note_admission(block, refused)
            return None
        below = self.tiers[level - 1 :]
        if not source.codec.exact:  # what it has is not for exact tiers
            below = tuple(tier for tier in below if not tier.codec.exact)
        if not below:
            return None
        target, over = below[0], threading.Event()

        def ended(moved: bool) -> None:
            source.counters.count(demotions=int(moved), demotions_dropped=int(not moved))
            over.set()

        operation = target.states.queue(block, ended)
        if operation is None:  # it is being written there, or deleted
            return None

        def lost() -> None:
            self.losses.note([block], target.name, "dropped", "no time")
            target.states.end(operation, saved=False)

        # In this order: a removal that begins now finds the write, and calls it off.
        if victims.superseded(block) or source.states.hides_space(block):
            target.states.end(operation, saved=False)
            return None
        if target.knows(block):
            target.states.end(operation, saved=True)
            return None
        patience = min(until, time.monotonic() + _PATIENCE * target.timeout)
        stuck = target.unwritable(block) or target.stuck_for() > _PATIENCE * target.timeout
        record = None if stuck or time.monotonic() > until else _fetch(source, block)
        if record is None:
            lost()
            return None
        left = max(0.0, patience - time.monotonic())
        if not target.writing.submit(
            lambda: target.write(operation, record), len(record), left, lost
        ):
            lost()
            return None
        return over


def _fetch(source: Tier, block: bytes) -> memoryview | None:
    """Return the record of ``block``; None if it cannot be read or there is no memory for it.

    Logs a bug instead of raising it, because the caller has to delete the block anyway.
    """
    try:
        return source.fetch(block)
    except Exception:  # noqa: BLE001 - logged
        _LOG.exception("tier %s: reading a block to demote it failed", source.name)
        return None


def left_until(until: float | None) -> float | None:
    """Return the seconds left until ``until`` (monotonic); None if there is no end."""
    return None if until is None else max(0.0, until - time.monotonic())
