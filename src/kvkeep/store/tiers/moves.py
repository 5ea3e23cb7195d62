"""`Moves`: writes of blocks from memory to tiers, and of blocks that leave a level to the next."""

from __future__ import annotations

import logging
import threading
import time
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Self

from kvkeep.core.errors import BackendFailed
from kvkeep.core.keys import SPACE_BYTES
from kvkeep.store.tiers.record import HEADER_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from kvkeep.store.backends.memory import Lease
    from kvkeep.store.tiers.levels import Levels
    from kvkeep.store.tiers.states import Deletion, Operation
    from kvkeep.store.tiers.tier import Tier

__all__ = ["Moves", "PromptWrites", "TierWrites", "left_until"]

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
            raw_bytes = 0 if lease is None else len(lease.record) - HEADER_BYTES
            if lease is not None and tier.knows(block) and tier.fits(block, raw_bytes):
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
        lease: Lease | None,
        wait: float | None,
        prompt: TierWrites | None,
    ) -> bool:
        block, index = operation.block, self.memory.catalogue
        held: list[bytes] = []
        index.hold([block], held)

        def free() -> None:
            index.free(held)
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


class PromptWrites:
    """The writes of one request's prompt, to each tier; the context ends when the last is queued.

    Without its beginning the rest of a prompt is never found. So in each tier, while blocks are
    written to it, the leading blocks that it has are held, and of a prompt larger than the tier the
    beginning has priority (`TierWrites`).

    Thread safety: one thread.
    """

    def __init__(self, moves: Moves, blocks: Sequence[bytes]) -> None:
        self._moves = moves
        self._blocks = blocks
        self._writes: dict[str, TierWrites] = {}

    def begin(self) -> None:
        """Hold leading blocks in all tiers; call it before a block is added to memory.

        The block may cause demotions, and those evict blocks in any tier.
        """
        for tier in self._moves.tiers:
            self._of(tier)

    def write(self, tier: Tier, block: bytes, wait: float) -> bool:
        """Queue the write of ``block`` from memory to ``tier``; see `Moves.write`."""
        writes = self._of(tier)
        return self._moves.write(tier, block, wait, writes.add(block), writes)

    def _of(self, tier: Tier) -> TierWrites:
        if tier.name not in self._writes:
            self._writes[tier.name] = TierWrites(tier, self._blocks)
        return self._writes[tier.name]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for writes in self._writes.values():
            writes.end()


class TierWrites:
    """The writes of a prompt's blocks to one tier.

    The tier's writers work in parallel, so a later block may take the room that an earlier one
    needs: that one waits for the running writes of later blocks and takes their room
    (`make_room`). Behind a block for which there is no room, none is written. At the end the
    prompt's order is recorded in the tier (`Tier.reorder`).

    Thread safety: all methods.
    """

    def __init__(self, tier: Tier, blocks: Sequence[bytes]) -> None:
        self._tier = tier
        self._blocks = blocks
        self._changed = threading.Condition()
        self._added = 0
        self._unended = 1  # writes, and the request itself
        self._stop: int | None = None  # no block behind this position is written
        self._running: set[bytes] = set()
        self._positions: dict[bytes, int] = {}  # of the blocks; made when they are needed
        self._held: dict[bytes, None] = {}
        # Only as many as fit: holding more would leave no room for the first blocks.
        fits = tier.catalogue.fits(blocks[0][:SPACE_BYTES]) if blocks else 0
        held: list[bytes] = []
        try:
            tier.catalogue.hold(blocks[:fits], held)
        finally:
            self._held.update(dict.fromkeys(held))

    def add(self, block: bytes) -> Callable[[bool], None]:
        """Register a write of ``block``; return what is called at its end."""
        with self._changed:
            self._added += 1
            self._unended += 1
            if block not in self._held:
                self._held[block] = None
                self._tier.catalogue.hold_ahead(block)
        return lambda saved: self._ended(block, saved=saved)

    def _ended(self, block: bytes, *, saved: bool) -> None:
        if not saved:
            with self._changed:
                if self._held.pop(block, block) is None:
                    self._tier.catalogue.free([block])
        self.end()

    def end(self) -> None:
        """End one write, or the request; at the last of them, hold nothing any more."""
        with self._changed:
            self._unended -= 1
            if self._unended:
                return
            held, self._held = self._held, {}
        try:
            if self._added > 1:
                self._tier.reorder(self._blocks)
        finally:
            self._tier.catalogue.free(held)

    # --- called by writers -----------------------------------------------------------------------

    @contextmanager
    def writing(self, block: bytes) -> Iterator[None]:
        """Write ``block`` in the ``with`` block, to its end in `BlockStates`."""
        with self._changed:
            self._running.add(block)
        try:
            yield
        finally:
            with self._changed:
                self._running.discard(block)
                self._changed.notify_all()

    def stopped(self, block: bytes) -> bool:
        """Whether ``block`` is not to be written: there was no room for an earlier one."""
        with self._changed:
            return self._stop is not None and self._position(block) > self._stop

    def make_room(self, block: bytes, needed: int) -> bool:
        """Evict blocks behind ``block``, last ones first, for ``needed`` bytes; False if too few.

        Waits for running writes of them, for the tier's timeout at most. If one of those ended, the
        answer is True, too: a write that failed gives its room back. Blocks that are pinned, or
        that others hold, stay. Those behind the first of them, or behind ``block`` if there are too
        few, are not written any more.
        """
        with self._changed:
            at = self._position(block)
            running = {other for other in self._running if self._position(other) > at}
            self._changed.wait_for(lambda: not running & self._running, self._tier.timeout)
            ended = len(running - self._running) > 0
            behind = [other for other in self._held if self._position(other) > at]
            behind.sort(key=self._position, reverse=True)
        gone = self._tier.give_up(behind, needed)
        with self._changed:
            for other in gone:
                self._held.pop(other, None)
            stop = self._position(gone[-1]) - 1 if gone else at
            self._stop = stop if self._stop is None else min(stop, self._stop)
        return ended or len(gone) > 0

    def _position(self, block: bytes) -> int:
        if not self._positions:
            self._positions = {block: at for at, block in enumerate(self._blocks)}
        return self._positions[block]


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
