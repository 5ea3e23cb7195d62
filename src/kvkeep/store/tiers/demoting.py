"""`Demoter`: moves blocks that have to leave a level one level down, or drops them."""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvkeep.store.tiers.levels import Levels
    from kvkeep.store.tiers.tier import Tier
    from kvkeep.store.tiers.write_queue import WriteQueue

__all__ = ["Demoter", "left_until"]

_LOG = logging.getLogger("kvkeep.tiers")
_PATIENCE = 0.2  # share of a tier's timeout that the tier above waits for it to take a block


class Demoter:
    """Moves blocks that leave a level to the level below it, or drops them, as `Planner` says.

    Thread safety: all methods.
    """

    def __init__(self, levels: Levels, queue: WriteQueue) -> None:
        self._levels = levels
        self._planner = levels.planner
        self._queue = queue

    def demote_ahead(self) -> None:
        """Demote from memory before the room is needed, where the policy asks for it."""
        memory = self._levels.memory
        used = memory.backend.used() - memory.leaving_bytes
        excess = self._planner.excess(memory.capacity, used)
        if excess:
            for block in memory.leave(excess):
                self._from_memory(block)

    def _from_memory(self, block: bytes) -> None:
        """Move ``block``, which `MemoryTier.leave` returned."""
        memory, losses = self._levels.memory, self._levels.losses
        target, refused = self._planner.below(block, 0)
        tier = None if target is None else self._target(block, target)
        if tier is None:
            losses.note([block], memory.name, "evicted", memory.catalogue.policy)
            self._note_refused(block, refused)
            memory.left(block)
            return
        # Ask in this order: a deletion that ends in between is seen by the second question.
        if not self._queue.is_pending(tier, block) and tier.knows(block):
            memory.left(block)
            return

        def moved(saved: bool) -> None:
            self._count(saved)
            memory.left(block)

        self._queue.write(tier, block, 0.0, moved)

    def copy_down(self, until: float | None) -> bool:
        """Write the blocks that memory would demote to tiers; return whether all were saved.

        Waits until ``until`` (monotonic seconds) at most.
        """
        levels, saved = self._levels, list[bool]()
        for item in levels.memory.backend.list():
            if item.block not in levels.memory:  # it expired
                continue
            target, _ = self._planner.below(item.block, 0)
            tier = None if target is None else self._target(item.block, target)
            if tier is not None:
                self._queue.write(tier, item.block, left_until(until), saved.append)
        written = [tier.health.settled(left_until(until)) for tier in levels.tiers]
        return all(written) and all(saved)

    def _target(self, block: bytes, level: int) -> Tier | None:
        """Return the tier, at ``level`` or below, that memory demotes ``block`` to.

        Exact ones do not take lossy KV.
        """
        first = self._levels.tier(level)
        if not self._levels.mixed:
            return first
        lease = self._levels.memory.lease(block)
        if lease is None:
            return first
        below = self._levels.tiers[level - 1 :]
        try:
            return next((tier for tier in below if not tier.records.refuses(lease.record)), None)
        finally:
            lease.release()

    def _count(self, saved: bool) -> None:
        self._levels.memory.counters.count(demotions=int(saved), demotions_dropped=int(not saved))

    def note_evicted(self, block: bytes) -> None:
        """Record that memory deleted ``block`` at once: lost, unless a tier has it."""
        target, refused = self._planner.below(block, 0)
        if target is None:
            self._note_refused(block, refused)
            return
        tier = self._levels.tier(target)
        deleting = self._queue.is_deleting(tier, block)
        if not deleting and self._queue.is_pending(tier, block):
            self._queue.write(tier, block, 0.0, self._count)  # waits for the pending one
        elif deleting or not tier.knows(block):
            self._count(saved=False)
            self._levels.losses.note([block], tier.name, "dropped", "no time")

    def _note_refused(self, block: bytes, level: int | None) -> None:
        """Record that a tier refused ``block``, which it admits after more touches."""
        if level is not None and not self._levels.tier(level).knows(block):
            name = self._levels.tier(level).name
            self._levels.losses.note([block], name, "refused", "admission")

    def from_tier(self, source: Tier, block: bytes) -> None:
        """Copy ``block``, which tier ``source`` is about to delete, to a lower tier.

        Reads in this thread and writes in one of the lower tier. Waits only a share of the timeout:
        a lower tier that hangs must not stop the one above it.
        """
        tiers = self._levels.tiers
        level, refused = self._planner.below(block, tiers.index(source) + 1)
        if level is None:
            self._note_refused(block, refused)
            return
        below = tiers[level - 1 :]
        if not source.codec.exact:  # what it has is not for exact tiers
            below = tuple(tier for tier in below if not tier.codec.exact)
        if not below:
            return
        target = below[0]
        over = threading.Event()

        def ended(moved: bool) -> None:
            source.counters.count(demotions=int(moved), demotions_dropped=int(not moved))
            over.set()

        pending = self._queue.begin_demotion(source, target, block, ended)
        if pending is None:
            return

        def lost() -> None:
            self._levels.losses.note([block], target.name, "dropped", "no time")
            self._queue.end(target, block, pending, saved=False)

        if target.knows(block):
            self._queue.end(target, block, pending, saved=True)
            return
        until = time.monotonic() + _PATIENCE * min(source.timeout, target.timeout)
        stuck = (
            target.health.unwritable(block)
            or target.health.stuck_for() > _PATIENCE * target.timeout
        )
        record = None if stuck else self._fetch(source, block)
        if record is None:
            lost()
            return

        def save() -> None:
            saved = False
            try:
                saved = self._queue.start(target, block, pending) and target.save(block, record)
            finally:
                self._queue.end(target, block, pending, saved=saved)

        left = max(0.0, until - time.monotonic())
        if target.writing.submit(save, len(record), left, lost):
            over.wait(max(0.0, until - time.monotonic()))
        else:
            lost()

    def _fetch(self, source: Tier, block: bytes) -> memoryview | None:
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
