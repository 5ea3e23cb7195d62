"""`Moves`: writes of blocks from memory to tiers, and of blocks that leave a level to the next."""

from __future__ import annotations

import logging
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Self

from kvkeep.core.errors import BackendFailed
from kvkeep.store.tiers.record import EXACT, HEADER_BYTES, origin

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvkeep.store.backends.memory import Lease
    from kvkeep.store.tiers.levels import Levels
    from kvkeep.store.tiers.prompt_writes import TierWrites
    from kvkeep.store.tiers.shared_memory import FrontMemory
    from kvkeep.store.tiers.states import Deletion, Operation
    from kvkeep.store.tiers.tier import Tier

__all__ = ["Moves", "PromptWrites", "left_until"]

_LOG = logging.getLogger("kvkeep.tiers")
_PIECE_BLOCKS = 8  # that one writer writes one after another, at most …
_PIECE_BYTES = 8 << 20  # … and so many bytes, unless it is one block
_PATIENCE = 0.2  # share of a tier's timeout that the tier above waits for it to take blocks


def _nothing(_block: bytes, _saved: bool) -> None:
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
        blocks: Sequence[bytes],
        until: float | None,
        then: Callable[[bytes, bool], object] = _nothing,
        prompt: TierWrites | None = None,
    ) -> set[bytes]:
        """Queue the writes of ``blocks`` from memory; return those that the tier has or will have.

        Waits for room in the queue until ``until`` (monotonic seconds) at most, None: without
        limit. From the first block without room on, or that the tier fails to take, none is queued.
        KV that is not exact is not queued for an exact tier. ``then`` is called for each block in
        any case, with whether the tier has it.

        Raises:
            BackendFailed: the memory was closed.
        """
        coming: set[bytes] = set()
        at = 0
        try:
            while at < len(blocks):
                leases = self.memory.lease_all(blocks[at:])
                run = blocks[at : at + max(1, len(leases))]
                at += len(run)
                if leases:
                    coming |= self._write(
                        tier, dict(zip(run, leases, strict=True)), until, then, prompt
                    )
                else:  # evicted from memory meanwhile
                    known = bool(tier.known(run))
                    if known:
                        coming.update(run)
                    else:
                        tier.dropped(run, "no time")
                    then(run[0], known)
        finally:
            for block in blocks[at:]:
                then(block, False)
        return coming

    def _write(
        self,
        tier: Tier,
        leases: dict[bytes, Lease],
        until: float | None,
        then: Callable[[bytes, bool], object],
        prompt: TierWrites | None,
    ) -> set[bytes]:
        coming = set(leases)
        wanted = dict(leases)
        pieces: list[_Piece] = []
        try:
            known, exact = tier.known([*leases]), tier.codec.exact
            for block, lease in leases.items():
                if block in known and tier.fits(block, len(lease.record) - HEADER_BYTES):
                    tier.counters.count(already=1)
                elif exact and origin(lease.record) != EXACT:
                    self.losses.note([block], tier.name, "refused", "lossy")
                    coming.discard(block)
                else:
                    continue
                del wanted[block]
                then(block, block in coming)
            again = partial(self._write_again, tier, then)
            operations = tier.states.queue(wanted, then, again, held=prompt is not None)
            pieces = self._pieces(tier, operations, leases, prompt)
        finally:
            if leases:
                self.memory.release_all(list(leases.values()))
        failing = set(tier.unwritable([operation.block for operation in operations]))
        try:
            while pieces and failing.isdisjoint(pieces[0].blocks):
                piece = pieces[0]
                cost = sum([len(lease.record) for lease in piece.leases])
                if not tier.writing.submit(piece.run, cost, left_until(until), piece.drop):
                    break
                del pieces[0]
        finally:  # also if Ctrl-C ended the wait
            for piece in pieces:
                coming.difference_update(piece.blocks)
                piece.drop()
        return coming

    def _pieces(
        self,
        tier: Tier,
        operations: Sequence[Operation],
        leases: dict[bytes, Lease],
        prompt: TierWrites | None,
    ) -> list[_Piece]:
        """Divide writes among the writers; ``leases`` of their blocks are taken out."""
        if not operations:
            return []
        blocks = [operation.block for operation in operations]
        mine = [leases.pop(block) for block in blocks]
        largest = max(len(lease.record) for lease in mine)
        room = min(_PIECE_BYTES, tier.writing.limit // _PIECE_BLOCKS) // largest
        most = max(1, min(_PIECE_BLOCKS, -(-len(blocks) // tier.options.writers), room))
        held: list[bytes] = []
        self.memory.catalogue.hold(blocks, held)
        pieces: list[_Piece] = []
        for at in range(0, len(blocks), most):
            end = at + most
            of = held[at:end] if held == blocks else [b for b in blocks[at:end] if b in held]
            pieces.append(_Piece(self.memory, tier, operations[at:end], mine[at:end], of, prompt))
        return pieces

    def _write_again(self, tier: Tier, then: Callable[[bytes, bool], object], block: bytes) -> None:
        with suppress(BackendFailed):  # the memory was closed; `write` has called `then`
            self.write(tier, [block], 0.0, then)

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
        elif tier.states.state(block) is None and tier.known([block]):
            memory.left(block)
        else:
            self.write(tier, [block], 0.0, self._moved)

    def note_evicted(self, block: bytes) -> None:
        """Record that memory deleted ``block`` at once: lost, unless a tier has it."""
        target, refused = self.planner.below(block, 0)
        if target is None:
            self._note_admission(block, refused)
            return
        tier = self.tiers[target - 1]
        written = tier.states.queued(block, self._count)
        if not written and not tier.known([block]):
            self._count(block, saved=False)
            self.losses.note([block], tier.name, "dropped", "no time")

    def copy_down(self, until: float | None) -> bool:
        """Write the blocks that memory would demote to tiers; return whether all were saved.

        Waits until ``until`` (monotonic seconds) at most.
        """
        moved: dict[bytes, bool] = {}
        asked = 0
        for item in self.memory.backend.list():
            if item.block not in self.memory:  # it expired
                continue
            target, _ = self.planner.below(item.block, 0)
            tier = None if target is None else self._target(item.block, target)
            if tier is not None:
                asked += 1
                self.write(tier, [item.block], until, moved.__setitem__)
        written = [tier.settled(left_until(until)) for tier in self.tiers]
        return all(written) and len(moved) == asked and all(moved.values())

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
            exact = origin(lease.record) == EXACT
            return next((tier for tier in below if exact or not tier.codec.exact), None)
        finally:
            lease.release()

    def _moved(self, block: bytes, saved: bool) -> None:
        self._count(block, saved)
        self.memory.left(block)

    def _count(self, _block: bytes, saved: bool) -> None:
        self.memory.counters.count(demotions=int(saved), demotions_dropped=int(not saved))

    def _note_admission(self, block: bytes, level: int | None) -> None:
        """Record that a tier refused ``block``, which it admits after more touches."""
        if level is not None and not self.tiers[level - 1].known([block]):
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

        def ended(_block: bytes, moved: bool) -> None:
            source.counters.count(demotions=int(moved), demotions_dropped=int(not moved))
            over.set()

        operations = target.states.queue([block], ended)
        if not operations:  # it is being written there, or deleted
            return None
        (operation,) = operations

        def lost() -> None:
            self.losses.note([block], target.name, "dropped", "no time")
            target.states.end(operation, saved=False)

        # In this order: a removal that begins now finds the write, and calls it off.
        if victims.superseded(block) or source.states.hides_space(block):
            target.states.end(operation, saved=False)
            return None
        if target.known([block]):
            target.states.end(operation, saved=True)
            return None
        patience = min(until, time.monotonic() + _PATIENCE * target.timeout)
        stuck = target.unwritable([block]) or target.stuck_for() > _PATIENCE * target.timeout
        record = None if stuck or time.monotonic() > until else _fetch(source, block)
        if record is None:
            lost()
            return None
        left = max(0.0, patience - time.monotonic())
        if not target.writing.submit(
            lambda: target.write(operations, [record]), len(record), left, lost
        ):
            lost()
            return None
        return over


@dataclass(slots=True)
class _Piece:
    """Writes of a few blocks to one tier, one after another in one of its writers.

    Memory keeps the blocks until its end. Then each write has ended, too.
    """

    memory: FrontMemory
    tier: Tier
    operations: Sequence[Operation]
    leases: Sequence[Lease]
    held: Sequence[bytes]
    prompt: TierWrites | None

    @property
    def blocks(self) -> list[bytes]:
        return [operation.block for operation in self.operations]

    def run(self) -> None:
        try:
            self.tier.write(self.operations, [lease.record for lease in self.leases], self.prompt)
        finally:
            self._free()

    def drop(self) -> None:
        self.tier.refused(self.blocks)
        self._free()
        for operation in self.operations:
            self.tier.states.end(operation, saved=False)

    def _free(self) -> None:
        self.memory.catalogue.free(self.held)
        self.memory.release_all(self.leases)


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
            if tier.name not in self._writes:
                self._writes[tier.name] = tier.prompt(self._blocks)

    def write(self, tier: Tier, blocks: Sequence[bytes], until: float) -> set[bytes]:
        """Queue the writes of ``blocks`` from memory to ``tier``; see `Moves.write`."""
        self.begin()
        writes = self._writes[tier.name]
        writes.add(blocks)
        return self._moves.write(tier, blocks, until, writes.ended, writes)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for writes in self._writes.values():
            writes.end()


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
