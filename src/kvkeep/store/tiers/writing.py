"""`StoreRequest`: puts the blocks of a prompt into memory and queues their writes to the tiers."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import TYPE_CHECKING

from kvkeep.core.keys import SPACE_BYTES
from kvkeep.store.tiers.moves import PromptWrites
from kvkeep.store.tiers.record import BEHIND, EXACT, HEADER_BYTES, mark, origin

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from kvkeep.store.backends.memory import Lease
    from kvkeep.store.tiers.moves import Moves
    from kvkeep.store.tiers.tier import Tier

__all__ = ["StoreRequest", "Written"]

_RUN_BLOCKS = 64  # placed together, at most …
_RUN_BYTES = 64 << 20  # … and for so many bytes …
_RUN_SHARE = 16  # … and in this part of memory, so that blocks are demoted ahead of need


@dataclass(slots=True)
class Written:
    """Positions of newly stored blocks (``kept``) and of blocks stored before (``already``).

    There was no room for the others.
    """

    kept: list[int] = field(default_factory=list)
    already: list[int] = field(default_factory=list)


class _Placement(Enum):
    """The result of placing a block in memory."""

    NEW = auto()
    """No level had it."""
    IN_MEMORY = auto()
    BELOW = auto()
    """It is in a lower tier only, and is not copied up."""
    NOWHERE = auto()
    """There is no room for it."""


class StoreRequest:
    """One request that stores a prompt.

    ``fill(i, raw)`` writes the KV of block ``i``; it is called for blocks that no level has. The
    request waits for room in write queues, and for memory that queued writes hold, until ``until``
    (monotonic seconds). The first ``exact`` blocks are exact: they replace those in memory that are
    not, and the others are not written to exact tiers. Blocks that are stored with another length
    are passed to ``supersede`` first, which deletes them.

    Attributes:
        written: the blocks stored so far.
    """

    def __init__(
        self,
        moves: Moves,
        *,
        raw_bytes: Sequence[int],
        fill: Callable[[int, memoryview], None],
        until: float,
        supersede: Callable[[Sequence[bytes]], object],
        exact: int = sys.maxsize,
    ) -> None:
        self.written = Written()
        self._levels = moves.levels
        self._moves = moves
        self._raw_bytes = raw_bytes
        self._fill = fill
        self._until = until
        self._exact = exact
        self._supersede = supersede
        self._run_exact = True
        self._leases: Sequence[Lease] = ()  # of the run that is being placed
        self._error: BaseException | None = None  # of ``fill``
        self._full: set[str] = set()  # names of tiers whose queue was full
        self._refused: dict[str, list[bytes]] = {}
        self._prompt = PromptWrites(moves, ())

    def store(self, blocks: Sequence[bytes]) -> None:
        """Place ``blocks`` in memory and in the tiers that admit them, as far as there is room."""
        losses, memory = self._levels.losses, self._levels.memory
        try:
            self._store(blocks)
        finally:  # also of what was stored before ``fill`` raised
            for name, refused in self._refused.items():
                losses.note(refused, name, "refused", "admission")
            kept, already = len(self.written.kept), len(self.written.already)
            memory.counters.count(writes=kept, already=already)
        dropped = blocks[kept + already :]
        if dropped:
            size = self._raw_bytes[kept + already] + HEADER_BYTES
            over = memory.catalogue.over_quota(dropped[0][:SPACE_BYTES], size)
            losses.note(dropped, memory.name, "dropped", "quota" if over else "no room")
        memory.counters.count(drops=len(dropped))

    def _store(self, blocks: Sequence[bytes]) -> None:
        """Place ``blocks``; those that only memory has are held until the end.

        Later blocks of a prompt must not evict its beginning, because a prompt is found by its
        leading blocks only.
        """
        index = self._levels.memory.catalogue
        held: list[bytes] = []
        used: list[bytes] = []
        with PromptWrites(self._moves, blocks) as self._prompt:
            try:
                while len(used) < len(blocks):
                    if used:
                        self._moves.demote_ahead()
                    placed, count = self._place(blocks, len(used))
                    run = blocks[len(used) : len(used) + count]
                    admitted = self._levels.planner.store(
                        run, new=placed in (_Placement.NEW, _Placement.NOWHERE)
                    )
                    if placed is _Placement.NOWHERE:
                        break
                    used += run
                    if placed is not _Placement.BELOW:
                        try:
                            index.hold(self._copy_down(run, admitted), held)
                        finally:  # every write that needs the run in memory is queued
                            leases, self._leases = self._leases, ()
                            self._levels.memory.release_all(leases)
                self._levels.used(used, stored=True)
            finally:
                index.free(held)
        self._moves.demote_ahead()  # after all holds: any block may be moved to make room below

    def _place(self, blocks: Sequence[bytes], at: int) -> tuple[_Placement, int]:
        """Place a run of ``blocks`` in memory that begins at position ``at``.

        Return how, and how many blocks it has: at least one. They stay there until their leases
        are released.
        """
        if self._error is not None:
            raise self._error
        memory = self._levels.memory
        run = self._run(blocks, at)
        self._run_exact = at < self._exact
        absent = memory.absent(run)
        self._leases = () if absent else self._usable(memory.lease_all(run), at)
        if self._leases:
            self.written.already += range(at, at + len(self._leases))
            return _Placement.IN_MEMORY, len(self._leases)
        if self._levels.has_another_length(run[0], self._raw_bytes[at]):
            self._supersede(
                [
                    block
                    for block, size in zip(run, self._raw_bytes[at:], strict=False)
                    if self._levels.has_another_length(block, size)
                ]
            )
        new = max(absent, 1)  # 0: its record went meanwhile
        below = self._below(run[:new])
        if run[0] in below:
            self.written.already.append(at)
            return _Placement.BELOW, 1
        self._prompt.begin()
        if below:
            new = next(more for more in range(1, new) if run[more] in below)
        self._leases = self._keep(run[:new], at)
        if not self._leases:
            return _Placement.NOWHERE, 1
        self.written.kept += range(at, at + len(self._leases))
        return _Placement.NEW, len(self._leases)

    def _run(self, blocks: Sequence[bytes], at: int) -> Sequence[bytes]:
        """Return the different blocks from ``at`` on that may be placed together, one at least.

        They are of one namespace: behind a public prefix begins another.
        """
        most = _RUN_BLOCKS if at >= self._exact else min(_RUN_BLOCKS, self._exact - at)
        space = blocks[at][:SPACE_BYTES]
        room = min(_RUN_BYTES, self._levels.memory.capacity // _RUN_SHARE)
        end, seen = at, set[bytes]()
        for block in blocks[at : at + most]:
            room -= self._raw_bytes[end] + HEADER_BYTES
            if seen and (room < 0 or block in seen or not block.startswith(space)):
                break
            seen.add(block)
            end += 1
        return blocks[at:end]

    def _usable(self, leases: Sequence[Lease], at: int) -> Sequence[Lease]:
        """Return the leading leases of records that need not be replaced, from block ``at`` on."""
        end = 0
        for lease, size in zip(leases, self._raw_bytes[at:], strict=False):
            if len(lease.record) - HEADER_BYTES != size:
                break
            if self._run_exact and origin(lease.record) != EXACT:
                break
            end += 1
        if end < len(leases):
            self._levels.memory.release_all(leases[end:])
        return leases[:end]

    def _below(self, run: Sequence[bytes]) -> set[bytes]:
        """Return the blocks of ``run`` that tiers serve: exact tiers, if it is exact."""
        below: set[bytes] = set()
        for tier in self._levels.tiers:
            if tier.codec.exact or not (self._run_exact and self._levels.mixed):
                below |= tier.serving(run)
        return below

    def _keep(self, run: Sequence[bytes], at: int) -> Sequence[Lease]:
        """Fill memory for the blocks of ``run``; return leases on those that found room."""
        memory, raw_bytes = self._levels.memory, self._raw_bytes[at : at + len(run)]
        drafts = memory.reserve_all(run, raw_bytes)
        if not drafts and self._left() and raw_bytes[0] + HEADER_BYTES <= memory.capacity:
            for tier in self._levels.tiers:  # queued writes hold their blocks in memory
                tier.settled(self._left())
            drafts = memory.reserve_all(run, raw_bytes)
        filled = 0
        try:
            for draft in drafts:
                mark(draft.record, EXACT if self._run_exact else BEHIND)
            for raw in [draft.record[HEADER_BYTES:] for draft in drafts]:
                self._fill(at + filled, raw)
                filled += 1
        except BaseException as error:  # noqa: BLE001 - raised later, see below
            self._error = error  # the blocks before this one are kept
        finally:
            for draft in drafts[filled:]:
                memory.discard(draft)
        drafts = drafts[:filled]
        memory.counters.count(written_bytes=sum(len(draft.record) for draft in drafts))
        if not drafts or not memory.commit_all(drafts):
            if self._error is not None:
                raise self._error
            return ()
        return drafts

    def _copy_down(self, run: Sequence[bytes], admitted: Sequence[bool]) -> Sequence[bytes]:
        """Queue writes of a run to tiers; return the blocks that no tier has or will write."""
        exclusive, below = self._levels.planner.policy.exclusive, set[bytes]()
        for tier in self._levels.tiers:
            if exclusive and tier.codec.exact:
                continue  # what it has, too, was moved up: it is about to delete that
            here = tier.known(run)
            below |= here
            if not exclusive:
                missing = [block for block in run if block not in here] if here else run
                below |= self._write(tier, missing, dict(zip(run, admitted, strict=True)))
        return [block for block in run if block not in below]

    def _write(
        self, tier: Tier, blocks: Sequence[bytes], admitted: Mapping[bytes, bool]
    ) -> set[bytes]:
        """Queue the writes of ``blocks`` to ``tier``, which lacks them; return the queued ones."""
        if not blocks:
            return set()
        if tier.codec.exact and not self._run_exact:
            self._levels.losses.note(blocks, tier.name, "refused", "lossy")
            return set()
        writes = [block for block in blocks if admitted[block]]
        if len(writes) < len(blocks):
            refused = self._refused.setdefault(tier.name, [])
            refused += [block for block in blocks if not admitted[block]]
        if tier.name in self._full:  # useless there without the earlier block it dropped
            tier.refused(writes)
            return set()
        queued = self._prompt.write(tier, writes, self._until) if writes else set()
        if len(queued) < len(writes):
            self._full.add(tier.name)
        return queued

    def _left(self) -> float:
        return max(0.0, self._until - time.monotonic())
