"""`TieredStore`: blocks by id over memory and the tiers below it."""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple

from kvkeep.core.cost import CostModel
from kvkeep.core.errors import BackendFailed, IllegalStep
from kvkeep.store.tiers.block_prefetch import BlockPrefetch
from kvkeep.store.tiers.buffer import SmallBuffer
from kvkeep.store.tiers.conversations import Conversations
from kvkeep.store.tiers.levels import LevelPins, Levels
from kvkeep.store.tiers.loss_log import LossLog
from kvkeep.store.tiers.moves import Moves, left_until
from kvkeep.store.tiers.reading import Reader, ReadRequest
from kvkeep.store.tiers.removal import Remover
from kvkeep.store.tiers.shared_memory import open_front
from kvkeep.store.tiers.tier import Tier
from kvkeep.store.tiers.tiering import Inclusive, Planner, TieringPolicy
from kvkeep.store.tiers.writing import StoreRequest, Written

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from kvkeep.store.tiers.counters import TierStats
    from kvkeep.store.tiers.loss_log import Loss
    from kvkeep.store.tiers.memory import MemorySpec
    from kvkeep.store.tiers.removal import Removed
    from kvkeep.store.tiers.shared_memory import FrontOrder
    from kvkeep.store.tiers.tier import TierSpec
    from kvkeep.store.tiers.tier_shares import TenantWeights

__all__ = ["ReadBlocks", "TieredStore"]

_RELEARN_S: Final = 10.0
_RELEARN_BLOCKS: Final = 4
_QUEUED_SHARE = 0.75  # of memory that blocks waiting to be written to one tier may take
_LOG = logging.getLogger("kvkeep.tiers")


class ReadBlocks(NamedTuple):
    """The result of a read.

    Attributes:
        blocks: how many leading blocks were delivered.
        exact: how many leading blocks of these are exact.
    """

    blocks: int
    exact: int


class TieredStore:
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
        conversations: follows conversations, if the ends of requests are reported.
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
        self._closed = False
        self._process = os.getpid()
        self.tiers = tuple(self._tier(spec) for spec in tiers)
        planner = Planner(self.policy, len(self.tiers))
        self._orders: list[FrontOrder] = [
            self.memory.catalogue, *(tier.catalogue for tier in self.tiers)
        ]  # fmt: skip
        self.conversations = Conversations(self._orders)
        self._levels = Levels(
            self.memory, self.tiers, planner, self.losses, self.conversations.used
        )
        self._moves = Moves(self._levels)
        self._reader = Reader(self._moves, self.cost.reading(memory.name))
        self._remover = Remover(self._levels, self._reader)
        self._pins = LevelPins(self._levels)
        for tier in self.tiers:
            tier.open()

    def _tier(self, spec: TierSpec) -> Tier:
        """Return a tier, not listed yet."""
        tier: Tier = self._open(spec, evicting=lambda victims: self._moves.evicting(tier, victims))
        share = int(self.memory.capacity * _QUEUED_SHARE)
        tier.writing.limit = min(tier.options.queue_bytes or share, share)
        return tier

    def _evicted_from_memory(self, block: bytes) -> None:
        self._moves.note_evicted(block)

    def expect(self, space: bytes) -> None:
        """Make each tier log once if it holds blocks but none of this namespace; see `Tier`."""
        self.check_open()
        for tier in self.tiers:
            tier.expect(space)

    # --- lookups ---------------------------------------------------------------------------------

    def locate(self, blocks: Sequence[bytes], until: float | None = None) -> list[int]:
        """Return the level that each leading block would come from, up to the first missing one.

        Level 0 is memory. Tiers that may hold unknown blocks are queried, each for its timeout at
        most, and until ``until`` (monotonic seconds) at most.
        """
        self.check_open()
        levels = self._levels.locate(blocks, until)
        if len(levels) < len(blocks):
            self.check_open()  # if closed meanwhile, the rest may not be missing
        return levels

    def locate_each(self, blocks: Sequence[bytes], until: float | None = None) -> list[int | None]:
        """Return the level that each of ``blocks`` would come from, None for a missing one.

        As `locate`, in one query a tier; a missing block does not hide those behind it.
        """
        self.check_open()
        levels = self._levels.locate_each(blocks, until)
        if None in levels:
            self.check_open()  # see `locate`
        return levels

    def known(self, blocks: Sequence[bytes]) -> set[bytes]:
        """Return those of ``blocks`` that are known to be readable from some level; no I/O."""
        self.check_open()
        return self._levels.known(blocks)

    def holders(self, blocks: Sequence[bytes]) -> list[list[int]]:
        """Return the levels known to hold each of ``blocks``, fastest first; no I/O."""
        self.check_open()
        return self._levels.holders(blocks)

    def losses_of(self, blocks: Sequence[bytes], since: float | None = None) -> list[Loss | None]:
        """Return why each of ``blocks`` is missing, None where it can be read; no I/O.

        A tier whose circuit breaker is open, or that failed at or after ``since`` (Unix seconds),
        counts as unavailable for the blocks that it may hold.
        """
        self.check_open()
        return self._levels.losses_of(blocks, since)

    # --- reads -----------------------------------------------------------------------------------

    def read(
        self,
        blocks: Sequence[bytes],
        raw_bytes: Sequence[int],
        sink: Callable[[int, memoryview], None],
        *,
        levels: Sequence[int] | None = None,
        deadline: float | None = None,
        cancelled: Callable[[], bool] | None = None,
        sources: list[str] | None = None,
    ) -> ReadBlocks:
        """Pass the KV of ``blocks`` to ``sink``, in order, up to the first that is missing.

        ``raw_bytes`` are their lengths; a record of another length is a miss. ``sink(i, raw)`` runs
        in this thread while other threads read later blocks; it must copy ``raw``, and raises only
        for bugs. ``levels`` is the result of `locate`, if that was called before. After
        ``deadline`` seconds the read ends with the blocks that have arrived. The name of the tier
        that each block was read from is appended to ``sources``; of KV that is not exact with its
        codec behind it: "s3, int8".
        """
        self.check_open()
        until = None if deadline is None else time.monotonic() + deadline
        if levels is None:
            levels = self.locate(blocks, until)
        with self._closed_is_illegal():
            request = ReadRequest(
                self._reader, raw_bytes, sink,
                until=until, cancelled=cancelled, sources=sources,
            )  # fmt: skip
            count = request.read(blocks, levels)
        if count < len(blocks):
            self.check_open()  # if closed meanwhile, the rest may not be missing
        return ReadBlocks(count, min(count, request.exact))

    def relearn(self, blocks: Sequence[bytes], raw_bytes: Sequence[int], level: int) -> None:
        """Read a few of ``blocks``, which are not worth reading, if that may have changed.

        They are read in the background if nothing was read from their level for ten seconds. It is
        how a tier that was slow for a while becomes worth reading again.
        """
        self.check_open()
        if level and blocks and self.tiers[level - 1].reads.age_s > _RELEARN_S:
            self.prefetch(lambda: (blocks[:_RELEARN_BLOCKS], raw_bytes[:_RELEARN_BLOCKS]))

    def prepare_reads(self, raw_bytes: int) -> None:
        """Touch the memory for reads of blocks that do not stay in memory, before the first."""
        self.check_open()
        self._reader.prepare(raw_bytes)

    def prefetch(self, plan: Callable[[], tuple[Sequence[bytes], Sequence[int]]]) -> BlockPrefetch:
        """Read blocks into memory in the background, up to half of memory; return at once.

        ``plan`` returns their ids and raw bytes. It is called in a thread of the store, so it may
        call `locate`, which waits.
        """
        self.check_open()
        return BlockPrefetch(self._reader, plan, self.check_open, lambda: self._closed)

    # --- writes ----------------------------------------------------------------------------------

    def write(
        self,
        blocks: Sequence[bytes],
        raw_bytes: Sequence[int],
        fill: Callable[[int, memoryview], None],
        *,
        wait: float | None = None,
        exact: int | None = None,
    ) -> Written:
        """Store ``blocks``; ``fill(i, raw)`` writes the KV of those that no level has yet.

        With ``exact``, only so many leading ``blocks`` are exact; tiers with an exact codec do not
        take the others.
        Returns when they are in memory; tiers that the policy admits are written in the background.
        From the first block without room on, blocks are dropped. With ``wait``, waits up to that
        many seconds in all, for room in full queues and for the end of all writes.
        """
        self.check_open()
        until = 0.0 if wait is None else time.monotonic() + wait
        request = StoreRequest(
            self._moves,
            raw_bytes=raw_bytes, fill=fill, until=until, supersede=self.supersede,
            exact=sys.maxsize if exact is None else exact,
        )  # fmt: skip
        with self._closed_is_illegal():
            request.store(blocks)
        for tier in self.tiers if wait is not None else ():
            tier.settled(max(0.0, until - time.monotonic()))
        written = request.written
        if len(blocks) > len(written.kept) + len(written.already):
            self.check_open()  # if closed meanwhile, room may not have been lacking
        return written

    def used(self, blocks: Sequence[bytes]) -> None:
        """Record in every level that a request used ``blocks``: they are evicted later."""
        self.check_open()
        if self.policy.admit_after > 1:
            known = self._levels.known(blocks)
            self._levels.planner.read([block for block in blocks if block in known])
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
        """Count a namespace for the share of ``tenant`` in each level; see `Index`."""
        self.check_open()
        for order in self._orders:
            order.announce(space, tenant)

    # --- life cycle ------------------------------------------------------------------------------

    @property
    def inherited(self) -> bool:
        """Whether this process was forked from the one that opened the store."""
        return os.getpid() != self._process

    def check_open(self) -> None:
        """Raise `IllegalStep` if the store is closed, or was opened by the parent process."""
        if self._closed:
            raise IllegalStep("the store is closed")
        if self.inherited:
            raise IllegalStep(
                f"the store was opened by process {self._process}, and this one was forked from "
                "it; open another store here"
            )

    @contextmanager
    def _closed_is_illegal(self) -> Iterator[None]:
        """Raise `IllegalStep` where memory fails because the store was closed meanwhile."""
        try:
            yield
        except BackendFailed:
            self.check_open()
            raise

    def flush(self, timeout: float | None = None) -> bool:
        """Write all blocks that the tiers are to hold, durably; return whether all were in time.

        True promises that every block stored before, and not dropped, is in the tiers.
        """
        self.check_open()
        return self._flush(timeout)

    def _flush(self, timeout: float | None) -> bool:
        until = None if timeout is None else time.monotonic() + timeout
        complete = self._moves.copy_down(until)
        flushed: list[bool] = []
        for tier in self.tiers:
            tier.writing.submit(partial(_flush, tier, flushed), 0, left_until(until))
        written = [tier.settled(left_until(until)) for tier in self.tiers]
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
            complete &= work is tier.reading or tier.settled(left_until(until))
            work.close()
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


def _flush(tier: Tier, flushed: list[bool]) -> None:
    flushed.append(tier.flush())
