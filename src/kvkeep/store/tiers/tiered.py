"""`TieredStore`: blocks by id over memory and the tiers below it."""

from __future__ import annotations

import logging
import os
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final

from kvkeep.core.cost import CostModel
from kvkeep.core.errors import BackendFailed, IllegalStep
from kvkeep.store.tiers.buffer import SmallBuffer
from kvkeep.store.tiers.front import open_front
from kvkeep.store.tiers.inexact import InexactBlocks
from kvkeep.store.tiers.levels import LevelPins, Levels
from kvkeep.store.tiers.loss_log import LossLog
from kvkeep.store.tiers.moves import Moves, left_until
from kvkeep.store.tiers.reading import Reader, ReadRequest
from kvkeep.store.tiers.tier import Tier
from kvkeep.store.tiers.tier_returns import TierReturns
from kvkeep.store.tiers.tiering import Inclusive, Planner, TieringPolicy
from kvkeep.store.tiers.writing import StoreRequest, Written

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from kvkeep.store.tiers.block_prefetch import BlockPrefetch
    from kvkeep.store.tiers.counters import TierStats
    from kvkeep.store.tiers.front import FrontMemory, FrontOrder
    from kvkeep.store.tiers.loss_log import Loss
    from kvkeep.store.tiers.memory import MemorySpec
    from kvkeep.store.tiers.tier import TierSpec
    from kvkeep.store.tiers.tier_shares import TenantWeights

__all__ = ["Removed", "TieredStore"]

_RELEARN_S: Final = 10.0
_RELEARN_BLOCKS: Final = 4
_QUEUED_SHARE = 0.75  # of memory that blocks waiting to be written to one tier may take
_LOG = logging.getLogger("kvkeep.tiers")


class TieredReads:
    """The lookups and reads of a `TieredStore`.

    Thread safety: all methods.

    Attributes:
        inexact: the blocks that callers were given and that are not exact: what is stored under
            their names, or behind them, may be made of them.
    """

    def __init__(self, levels: Levels, reader: Reader) -> None:
        self._levels = levels
        self._reader = reader
        self.inexact = InexactBlocks()
        self._closed = False
        self._process = os.getpid()

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

    def knows(self, block: bytes) -> bool:
        """Whether ``block`` is known to be readable from some level; no I/O."""
        self.check_open()
        return self._levels.level_of(block) is not None

    def holders(self, blocks: Sequence[bytes]) -> list[list[int]]:
        """Return the levels known to hold each of ``blocks``, fastest first; no I/O."""
        self.check_open()
        return [self._levels.holders(block) for block in blocks]

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
    ) -> int:
        """Pass the KV of ``blocks`` to ``sink``, in order, up to the first that is missing.

        ``raw_bytes`` are their lengths; a record of another length is a miss. ``sink(i, raw)`` runs
        in this thread while other threads read later blocks; it must copy ``raw``, and raises only
        for bugs. ``levels`` is the result of `locate`, if that was called before. After
        ``deadline`` seconds the read ends with the blocks that have arrived. The name of the tier
        that each block was read from is appended to ``sources``; of KV that is not exact with its
        codec behind it: "s3, int8".

        Returns how many blocks were passed to ``sink``.
        """
        self.check_open()
        until = None if deadline is None else time.monotonic() + deadline
        if levels is None:
            levels = self.locate(blocks, until)
        with self._closed_is_illegal():
            request = ReadRequest(
                self._reader, raw_bytes, sink,
                until=until, cancelled=cancelled, sources=sources, inexact=self.inexact,
            )  # fmt: skip
            count = request.read(blocks, levels)
        if count < len(blocks):
            self.check_open()  # if closed meanwhile, the rest may not be missing
        return count

    def relearn(self, blocks: Sequence[bytes], raw_bytes: Sequence[int], level: int) -> None:
        """Read a few of ``blocks``, which are not worth reading, if that may have changed.

        They are read in the background if nothing was read from their level for ten seconds. It is
        how a tier that was slow for a while becomes worth reading again.
        """
        self.check_open()
        if level and blocks and self._levels.tier(level).reads.age_s > _RELEARN_S:
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
        return self._reader.prefetch(plan, self.check_open, lambda: self._closed)


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
        self._moves = Moves(self._levels)
        self._reader = Reader(self._moves, self.cost.reading(memory.name))
        self._remover = Remover(self._levels, self._reader)
        super().__init__(self._levels, self._reader)
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
            self._moves,
            raw_bytes=raw_bytes, fill=fill, until=until, supersede=self.supersede, exact=exact,
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
        complete = self._moves.copy_down(until)
        flushed: list[bool] = []
        for tier in self.tiers:
            tier.writing.submit(partial(_flush, tier, flushed), 0, left_until(until))
        written = [tier.settled(left_until(until)) for tier in self.tiers]
        complete &= not any(tier.states.defers for tier in self.tiers)
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


@dataclass(frozen=True, slots=True)
class Removed:
    """The result of a removal.

    Attributes:
        tiers: ``(name, bytes freed)`` of every tier, fastest first.
        failed: names of the tiers that may still hold some of the blocks: they failed, did not
            answer in time, or their circuit breaker is open. This store does not read these blocks
            there until they are written anew; other processes may find them.
    """

    tiers: tuple[tuple[str, int], ...]
    failed: tuple[str, ...] = ()

    @property
    def complete(self) -> bool:
        """Whether no tier holds any of the blocks."""
        return not self.failed

    @property
    def bytes(self) -> int:
        """Bytes freed in all tiers together."""
        return sum(freed for _, freed in self.tiers)


class Remover:
    """Deletes blocks, or a whole namespace, by request.

    Running reads of these blocks return nothing, queued writes are cancelled, and running writes
    are waited for. Each tier deletes in a thread of its own. The call waits for a tier as long as
    that makes progress: for the tier's timeout behind each record that it lists, and each thousand
    that it deletes. After `close`, no deletion makes another call.

    Thread safety: all methods.
    """

    def __init__(self, levels: Levels, reader: Reader) -> None:
        self._levels = levels
        self._reader = reader
        self._closed = threading.Event()
        self._running: dict[_Removal, None] = {}  # those whose threads have not ended

    def remove(self, blocks: Sequence[bytes]) -> Removed:
        """See `TieredStore.remove`."""
        memory, losses = self._levels.memory, self._levels.losses
        blocks = list(dict.fromkeys(blocks))
        there = [block for block in blocks if self._levels.level_of(block) is not None]
        # Writes first: a read that begins afterwards skips tiers that delete the block.
        removals = [self._removal(tier, blocks) for tier in self._levels.tiers]
        self._reader.cancel(blocks)
        try:
            # Memory first: else a tier could get a deleted block again from memory.
            in_memory, failed = _from_memory(memory, lambda: blocks)
        finally:
            for removal in removals:
                removal.start()
            removed = self._await(removals)
        losses.note(there, memory.name, "removed", "removed")
        return Removed((in_memory, *removed.tiers), (*failed, *removed.failed))

    def clear(self, space: bytes) -> Removed:
        """See `TieredStore.clear`."""
        memory, losses = self._levels.memory, self._levels.losses
        # In this order, nothing brings an old block back: no read of one begins in a tier that
        # hides it, and none ends in memory; then no write of one begins from memory, which has
        # none; at last, those that have begun are called off.
        numbers = [tier.states.clear(space) for tier in self._levels.tiers]
        self._reader.cancel(self._reader.under_way(space))
        mine: list[bytes] = []

        def listed() -> list[bytes]:
            mine.extend(one.block for one in memory.backend.list() if one.block.startswith(space))
            return mine

        in_memory, failed = _from_memory(memory, listed)
        losses.note(mine, memory.name, "removed", "cleared")
        removals = [
            self._removal(tier, tier.states.under_way(space), (space, number))
            for tier, number in zip(self._levels.tiers, numbers, strict=True)
        ]
        for removal in removals:
            removal.start()
        removed = self._await(removals)
        return Removed((in_memory, *removed.tiers), (*failed, *removed.failed))

    def _removal(
        self, tier: Tier, blocks: Sequence[bytes], space: tuple[bytes, int] | None = None
    ) -> _Removal:
        removal = _Removal(tier, blocks, space, closed=self._closed, running=self._running)
        self._running[removal] = None
        return removal

    def _await(self, removals: Sequence[_Removal]) -> Removed:
        for removal in removals:
            removal.wait()
        return Removed(
            tuple((one.tier.name, one.freed) for one in removals),
            tuple(one.tier.name for one in removals if not one.complete),
        )

    def close(self) -> None:
        """Begin no more calls of any tier, and end all waits."""
        self._closed.set()
        for removal in list(self._running):
            removal.give_up()

    def join(self, timeout: float) -> bool:
        """Wait for the calls that run, ``timeout`` seconds at most; return whether all ended."""
        until = time.monotonic() + timeout
        for removal in list(self._running):
            left = min(removal.tier.timeout, until - time.monotonic())  # else it hangs
            removal.join(max(0.0, left))
        return not self._running


def _from_memory(
    memory: FrontMemory, blocks: Callable[[], Sequence[bytes]]
) -> tuple[tuple[str, int], list[str]]:
    """Delete ``blocks()`` from memory; return its name, the bytes freed, and it if it failed."""
    try:
        return (memory.name, memory.remove(blocks())), []
    except BackendFailed as error:  # only memory that processes share can fail
        _LOG.info("tier %s: %s", memory.name, error)
        return (memory.name, 0), [memory.name]


class _Removal:
    """The deletion of blocks from one tier, and of a namespace that it hides, if one is given.

    Attributes:
        freed: bytes freed so far.
        complete: whether none of the blocks is left in the tier.
    """

    def __init__(
        self,
        tier: Tier,
        blocks: Sequence[bytes],
        space: tuple[bytes, int] | None,
        *,
        closed: threading.Event,
        running: dict[_Removal, None],
    ) -> None:
        self.tier = tier
        self.freed = 0
        self.complete = False
        self._space = space
        self._closed = closed
        self._running = running
        self._deletion = tier.states.delete(blocks)
        self._over = threading.Event()
        self._progress = 0.0
        self._thread = threading.Thread(
            target=self._delete, name=f"kvkeep {tier.name} deleter", daemon=True
        )

    def start(self) -> None:
        """Start a thread that deletes the blocks."""
        self._progress = time.monotonic()
        if self._deletion or self._space is not None:
            self._thread.start()
        else:
            self.complete = True
            self._ended()

    def wait(self) -> None:
        """Wait while the deletion makes progress; blocks possibly left are not found."""
        while not self._over.is_set():
            left = self._progress + self.tier.timeout - time.monotonic()
            if left <= 0 or self._closed.is_set():
                return
            self._over.wait(left)

    def give_up(self) -> None:
        """Wake the call that waits."""
        self._over.set()

    def join(self, timeout: float) -> None:
        """Wait for the thread to end, ``timeout`` seconds at most."""
        if self._thread.is_alive():
            self._thread.join(timeout)

    def _proceed(self) -> bool:
        self._progress = time.monotonic()
        return not self._closed.is_set()

    def _delete(self) -> None:
        try:
            self.freed, complete = self.tier.remove(self._deletion, self._proceed)
            if self._proceed() and self._space is not None:
                freed, whole = self.tier.clear(*self._space, self._proceed)
                self.freed += freed
                complete &= whole
            self.complete = complete and not self._closed.is_set()
        finally:
            self._ended()

    def _ended(self) -> None:
        self._running.pop(self, None)
        self._over.set()
