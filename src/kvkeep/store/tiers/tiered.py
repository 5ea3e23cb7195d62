"""`TieredStore`: blocks by id over memory and the tiers below it."""

from __future__ import annotations

import threading
import time
from functools import partial
from typing import TYPE_CHECKING

from kvkeep.core.cost import CostModel
from kvkeep.store.tiers.buffer import SmallBuffer
from kvkeep.store.tiers.demoting import Demoter, left_until
from kvkeep.store.tiers.front import open_front
from kvkeep.store.tiers.levels import LevelPins, Levels
from kvkeep.store.tiers.loss_log import LossLog
from kvkeep.store.tiers.reading import Reader
from kvkeep.store.tiers.removing import Removed, Remover
from kvkeep.store.tiers.tier import Tier
from kvkeep.store.tiers.tier_returns import TierReturns
from kvkeep.store.tiers.tiered_reads import TieredReads
from kvkeep.store.tiers.tiering import Inclusive, Planner, TieringPolicy
from kvkeep.store.tiers.write_queue import WriteQueue
from kvkeep.store.tiers.writing import StoreRequest, Written

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from kvkeep.store.tiers.counters import TierStats
    from kvkeep.store.tiers.front import FrontOrder
    from kvkeep.store.tiers.memory import MemorySpec
    from kvkeep.store.tiers.tier import TierSpec
    from kvkeep.store.tiers.tier_shares import TenantWeights

__all__ = ["TieredStore"]

_QUEUED_SHARE = 0.75  # of memory that blocks waiting to be written to one tier may take


class TieredStore(TieredReads):
    """Raw blocks by id, over memory and any number of tiers, fastest first.

    A `Planner` decides the moves of blocks between levels; a `Reader`, a `StoreRequest` for each
    prompt, a `Demoter` and a `Remover` perform them. No method raises because a tier fails or is
    slow: a read is shorter, a write is dropped and counted.

    Thread safety: all methods. Cost: a few µs a block in memory besides the copy, which the caller
    makes; slow work is done by threads of the tiers, except for `remove` and `clear`. In a forked
    process, which has no such threads, all methods but `stats` and `close` raise `IllegalStep`.

    Arguments:
        memory, tiers: the memory, and the tiers below it, fastest first.
        policy: decides which level holds a block; `Inclusive` unless given.
        notes: of the store's namespaces, by space (`kvkeep.store.tiers.notes`), for all tiers.
        shares: weights by which tenants share each level with a budget; None: they do not.
        cost: learns what reads and writes of each level take; a new model unless given.

    Attributes:
        tiers: those below memory, fastest first.
        names: of all levels, fastest first; memory is the first.
        returns: follows conversations, if the ends of requests are reported.
    """

    def __init__(
        self,
        memory: MemorySpec,
        tiers: Sequence[TierSpec],
        policy: TieringPolicy | None = None,
        *,
        notes: Mapping[bytes, bytes] | None = None,
        shares: TenantWeights | None = None,
        cost: CostModel | None = None,
    ) -> None:
        self.cost = CostModel() if cost is None else cost
        self.policy = policy or Inclusive()
        self.names = (memory.name, *(tier.name for tier in tiers))
        self.losses = LossLog(self.names)
        warning = SmallBuffer(memory.name, memory.backend.capacity or 0)
        self.losses.dropping = lambda tier, why: warning.dropped(tier, why) if tiers else None
        self.memory = open_front(memory, self.losses, self._evicted_from_memory, shares)
        self._open = partial(Tier, losses=self.losses, notes=notes, shares=shares, cost=self.cost)
        self._lock = threading.Lock()  # of `close`
        self.tiers = tuple(self._tier(spec) for spec in tiers)
        planner = Planner(self.policy, len(self.tiers))
        self._orders: list[FrontOrder] = [
            self.memory.catalogue, *(tier.catalogue for tier in self.tiers)
        ]  # fmt: skip
        self.returns = TierReturns(self._orders)
        self._levels = Levels(self.memory, self.tiers, planner, self.losses, self.returns.used)
        self._queue = WriteQueue(self.memory, self.losses)
        self._demoter = Demoter(self._levels, self._queue)
        self._reader = Reader(
            self._levels, self._queue, self._demoter, self.cost.reading(memory.name)
        )
        self._remover = Remover(self._levels, self._queue, self._reader)
        super().__init__(self._levels, self._reader)
        self._pins = LevelPins(self._levels)
        for tier in self.tiers:
            tier.open()

    def _tier(self, spec: TierSpec) -> Tier:
        """Return a tier, not listed yet."""
        tier: Tier = self._open(spec, evicting=lambda block: self._demoter.from_tier(tier, block))
        share = int(self.memory.capacity * _QUEUED_SHARE)
        tier.writing.limit = min(tier.options.queue_bytes or share, share)
        return tier

    def _evicted_from_memory(self, block: bytes) -> None:
        self._demoter.note_evicted(block)

    def expect(self, space: bytes) -> None:
        """Make each tier log once if it holds blocks but none of this namespace; see `Tier`."""
        self.check_open()
        for tier in self.tiers:
            tier.expect(space)

    # --- writes ----------------------------------------------------------------------------------

    def write(
        self,
        blocks: Sequence[bytes],
        raw_bytes: Sequence[int],
        fill: Callable[[int, memoryview], None],
        *,
        wait: float | None = None,
        before: Sequence[bytes] = (),
        exact: int | None = None,
    ) -> Written:
        """Store ``blocks``; ``fill(i, raw)`` writes the KV of those that no level has yet.

        ``before`` are the prompt's blocks before them: behind one in `inexact` nothing is exact.
        With ``exact``, so many leading ``blocks`` are, whatever `inexact` has.
        Returns when they are in memory; tiers that the policy admits are written in the background.
        From the first block without room on, blocks are dropped. With ``wait``, waits up to that
        many seconds in all, for room in full queues and for the end of all writes.
        """
        self.check_open()
        until = 0.0 if wait is None else time.monotonic() + wait
        if exact is None:
            exact = self.inexact.exact(before, blocks)
        request = StoreRequest(
            self._levels, self._queue, self._demoter,
            raw_bytes=raw_bytes, fill=fill, until=until, supersede=self.supersede, exact=exact,
        )  # fmt: skip
        with self._closed_is_illegal():
            request.store(blocks)
        for tier in self.tiers if wait is not None else ():
            tier.health.settled(max(0.0, until - time.monotonic()))
        written = request.written
        if len(blocks) > len(written.kept) + len(written.already):
            self.check_open()  # if closed meanwhile, room may not have been lacking
        return written

    def used(self, blocks: Sequence[bytes]) -> None:
        """Record in every level that a prompt used ``blocks``: they are evicted later."""
        self.check_open()
        self._levels.used(blocks)

    @property
    def pins(self) -> LevelPins:
        """The pins of blocks in all levels. Raises `IllegalStep` after the store is closed."""
        self.check_open()
        return self._pins

    def remove(self, blocks: Sequence[bytes]) -> Removed:
        """Delete ``blocks`` from every level, also while they move between levels, pinned or not.

        Tiers delete in parallel; the call waits for each while it makes progress. A read that
        begins afterwards gets none of the blocks from a tier that did not fail. Writes and reads
        that begin during the deletion take effect after it.
        """
        self.check_open()
        removed = self._remover.remove(blocks)
        if not removed.complete:
            self.check_open()  # closed meanwhile
        return removed

    def supersede(self, blocks: Sequence[bytes]) -> Removed:
        """Delete ``blocks`` before they are written anew with other bytes; see `remove`.

        Reads that began before end early, so no read mixes old and new bytes.
        """
        removed = self.remove(blocks)
        self._reader.note_replaced(blocks)
        return removed

    def clear(self, space: bytes) -> Removed:
        """Delete a namespace, whose blocks are found no more from now on, but those written since.

        Tiers list and delete in parallel; the call waits for each while it makes progress, and for
        its timeout at most without. A tier that fails serves none of the old blocks until this
        store is closed; what is left there is found by other processes, and after a restart.
        """
        self.check_open()
        removed = self._remover.clear(space)
        if not removed.complete:
            self.check_open()  # closed meanwhile
        return removed

    def set_quota(self, space: bytes, limit: int) -> None:
        """Limit a namespace to ``limit`` bytes in each level that has a budget."""
        self.check_open()
        for order in self._orders:
            order.set_quota(space, limit)

    def announce(self, space: bytes, tenant: str | None) -> None:
        """Count a namespace for the share of ``tenant`` in each level; see `Catalogue`."""
        self.check_open()
        for order in self._orders:
            order.announce(space, tenant)

    # --- life cycle ------------------------------------------------------------------------------

    def flush(self, timeout: float | None = None) -> bool:
        """Write all blocks that the tiers are to hold, durably; return whether all were in time.

        True promises that every block stored before, and not dropped, is in the tiers.
        """
        self.check_open()
        return self._flush(timeout)

    def _flush(self, timeout: float | None) -> bool:
        until = None if timeout is None else time.monotonic() + timeout
        complete = self._demoter.copy_down(until)
        flushed: list[bool] = []
        for tier in self.tiers:
            tier.writing.submit(partial(_flush, tier, flushed), 0, left_until(until))
        written = [tier.health.settled(left_until(until)) for tier in self.tiers]
        complete &= not self._queue.waits_for_deletions
        return complete and all(written) and flushed == [True] * len(self.tiers)

    def close(self, timeout: float = 10.0) -> bool:
        """Flush, ``timeout`` seconds at most, and close every tier; return whether all was written.

        A second call does nothing, nor does one in a forked process: the parent owns the store.
        """
        if self.inherited:
            return True
        with self._lock:
            if self._closed:
                return True
            self._closed = True
        until = time.monotonic() + timeout
        self._reader.close()
        self._remover.close()
        complete = self._flush(timeout)
        threads = [(tier, work) for tier in self.tiers for work in (tier.reading, tier.writing)]
        for tier, work in threads:
            complete &= work is tier.reading or tier.health.settled(left_until(until))
            work.close(0.0)
        for tier, work in threads:  # running calls end within the timeout, or the backend hangs
            work.join(min(left_until(until) or 0.0, tier.timeout - work.longest))
        self._reader.join(left_until(until) or 0.0)
        self._remover.join(left_until(until) or 0.0)
        for tier in self.tiers:
            # Closing a backend that hangs may hang, too: do it in a daemon thread.
            closing = threading.Thread(target=tier.close, name=f"kvkeep {tier.name}", daemon=True)
            closing.start()
            closing.join(max(0.5, left_until(until) or 0.0))
        self.memory.backend.close()
        return complete

    def stats(self) -> list[TierStats]:
        """Return the figures of all levels at this moment, fastest first."""
        return [self.memory.stats(), *(tier.stats() for tier in self.tiers)]

    def bytes_of(self, space: bytes) -> dict[str, int]:
        """Return by tier the bytes of a namespace's records, where they are counted.

        The memory in front, and tiers without a budget, are left out. Does no I/O.
        """
        self.check_open()
        tiers = [tier for tier in self.tiers if tier.indexed]
        return {tier.name: tier.catalogue.spaces().get(space, 0) for tier in tiers}

    def check(self) -> None:
        """Recount everything while the store is idle; an AssertionError is a bug of kvkeep."""
        if not self._closed:  # else the arena has been freed
            self.memory.check()
        for tier in self.tiers:
            tier.catalogue.check()

    @property
    def idle(self) -> bool:
        """Whether no block is being read, written or deleted, and no prefetch waits or runs."""
        return self._reader.idle and not len(self._queue)


def _flush(tier: Tier, flushed: list[bool]) -> None:
    flushed.append(tier.flush())
