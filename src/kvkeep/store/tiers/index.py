"""`Index`: which blocks a place holds, and in which order they are evicted."""

from __future__ import annotations

import threading
import time
from itertools import islice, repeat
from math import inf
from typing import TYPE_CHECKING, Final

import numpy as np

from kvkeep.core.eviction import ReturnAware
from kvkeep.core.keys import SPACE_BYTES
from kvkeep.store.tiers.cold_blocks import by_use, ids_of, rows_of
from kvkeep.store.tiers.tier_shares import IndexedBlock, TierShares

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Hashable, Iterable, Mapping, Sequence

    from kvkeep.core.eviction import EvictionPolicy
    from kvkeep.store.tiers.block_waits import BlockWaits
    from kvkeep.store.tiers.cold_blocks import ColdBlock, Rows
    from kvkeep.store.tiers.tier_shares import TenantWeights, TierLane

__all__ = ["Index"]

_AT_ONCE: Final = 1024  # blocks of a listing that are added under one hold of the lock
_MOST_EXPIRED: Final = 1000  # blocks that are forgotten at once
_ROUNDS: Final = 255
_COOLED: Final = 32  # blocks that become cold at once


class Index:
    """Block ids with sizes and last uses, ordered for eviction by a policy of the core.

    A use of a prompt counts its blocks last to first (`used`), so that its end is evicted before
    its beginning. Held and pinned blocks are not evicted. With ``shares`` each tenant has a policy,
    and tenants above their shares give the victims. A namespace with a quota has a policy of its
    own, too; of the candidates of several policies the one worth least is evicted, or the one used
    least recently.

    A block takes about half a kilobyte. ``ordered`` bounds the number of these: beyond it, the next
    victims of the policy become cold, at 75 to 100 bytes each (`ColdBlocks`). Cold blocks are
    evicted before all others of their policy, in the order in which they became cold; one that is
    used, held or pinned is ordered by the policy again.

    Thread safety: all methods, by one lock, under which no other is taken but that of the learner
    of the policy `returns`. It is held for 1,024 blocks of a listing, and for up to 30 ms where a
    million cold blocks are moved. Cost: about a microsecond a block.

    Arguments:
        policy: makes the eviction policies.
        ttl: seconds after its last use that a block expires; None: never.
        clock: returns Unix seconds.
        budget: bytes that the place may hold, if it has a budget.
        ordered: see above; None: all.
        unit: a record takes whole units of so many bytes in the backend; `victims` counts these.
        shares: weights by which tenants share the place; None: they do not.
    """

    def __init__(
        self,
        policy: Callable[[], EvictionPolicy],
        *,
        ttl: float | None = None,
        clock: Callable[[], float] = time.time,
        budget: int | None = None,
        ordered: int | None = None,
        unit: int = 1,
        shares: TenantWeights | None = None,
    ) -> None:
        self.ttl = ttl
        self.unit = unit
        self.budget = budget
        self.total_bytes = 0
        """Bytes of all records."""
        self._clock = clock
        self._ordered = ordered
        self._lock = threading.Lock()  # all that follows
        self._blocks: dict[bytes, IndexedBlock] = {}
        self._shares = TierShares(policy, shares, budget)
        self._cold = 0  # blocks of `_shares` that are cold
        self._waiting: BlockWaits | None = None
        self._taken = 0  # bytes of all records in whole units
        self._spaces: dict[bytes, tuple[int, int]] = {}  # bytes of each namespace, and in units
        self._quotas: dict[bytes, int] = {}
        self._coming: dict[bytes, int] = {}  # bytes reserved by namespace
        self._uses = 0  # so far: the order of uses at equal times
        self._pinned_bytes = 0
        self._pinned: dict[bytes, IndexedBlock] = {}
        self._unpin_at = inf  # no pin ends before
        self._ahead: dict[bytes, int] = {}  # holds of blocks that are not added yet
        self._filling = threading.Lock()  # one listing at a time; taken before the other lock
        self._round = 1  # the number of the last listing
        self._gone: set[bytes] | None = None  # blocks forgotten while a listing goes on
        first = self._shares.first
        self.policy = self._shares.name if self._shares.fair else first.name
        """The name of the policy."""
        self.awaits = isinstance(first, ReturnAware)
        """Whether the policy orders by when conversations return."""

    # --- queries ---------------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self._blocks) + self._cold

    def __contains__(self, block: object) -> bool:
        entry = self._get(block)  # type: ignore[arg-type]
        return entry is not None and not self._expired(entry)

    @property
    def pinned_bytes(self) -> int:
        """Bytes that are pinned now."""
        with self._lock:
            self._unpin_ended()
            return self._pinned_bytes

    def size(self, block: bytes) -> int | None:
        """Return the bytes of a record; None if it is unknown."""
        entry = self._get(block)
        return None if entry is None else entry.size

    def expired_at(self, block: bytes) -> float | None:
        """Return when ``block`` expired (Unix seconds); None if it is unknown or not expired."""
        entry = self._get(block)
        if entry is None or not self._expired(entry):
            return None
        return max(entry.used + (self.ttl or 0.0), entry.pinned)

    def leading(self, blocks: Sequence[bytes]) -> int:
        """Return how many leading ``blocks`` are here."""
        there = self._there
        for count, block in enumerate(blocks):
            if block not in there:
                return count
        return len(blocks)

    def among(self, blocks: Iterable[bytes]) -> set[bytes]:
        """Return those of ``blocks`` that are here."""
        there = self._there
        return {block for block in blocks if block in there}

    @property
    def _there(self) -> Container[bytes]:
        """What has the blocks that are here: their dict, where that is enough."""
        return self._blocks if self.ttl is None and not self._cold else self

    def spaces(self) -> dict[bytes, int]:
        """Return the bytes of each namespace."""
        with self._lock:
            return {space: size for space, (size, _) in self._spaces.items()}

    def blocks(self, space: bytes = b"") -> list[bytes]:
        """Return the ids of all blocks, or of those of one namespace."""
        with self._lock:
            cold = [row.block for lane in self._shares.lanes() for row in lane.cold]
            return [block for block in (*self._blocks, *cold) if block.startswith(space)]

    def may_free(self, needed: int) -> bool:
        """Whether ``needed`` bytes could be freed, if held blocks are freed in time."""
        with self._lock:
            self._unpin_ended()
            return self._taken - self._pinned_bytes >= needed

    def fits(self, space: bytes) -> int | None:
        """Return how many blocks of average size a namespace may have; None if that is unknown.

        It is unknown without a budget, and while there are no blocks to take an average of.
        """
        with self._lock:
            count = len(self)
            if not count or not self.budget:
                return None
            fit = self.budget * count // self._taken
            limit = self._quotas.get(space)
            return fit if limit is None else min(fit, limit * count // self.total_bytes)

    def now(self) -> float:
        """Return the time of the index's clock, in Unix seconds."""
        return self._clock()

    # --- changes ---------------------------------------------------------------------------------

    def add(self, block: bytes, size: int) -> None:
        """Add or replace ``block`` of ``size`` bytes, last used now."""
        with self._lock:
            self._add(block, size)

    def add_reserved(self, blocks: Sequence[bytes], sizes: Sequence[int]) -> None:
        """`add` blocks of one namespace whose bytes were reserved; see `reserve`."""
        with self._lock:
            self._unreserve(blocks[0][:SPACE_BYTES], sum(sizes))
            for block, size in zip(blocks, sizes, strict=True):
                self._add(block, size)

    def forget(self, block: bytes) -> bool:
        """Remove ``block``; return whether it was known."""
        with self._lock:
            return self._forget(block)

    def used(
        self, blocks: Sequence[bytes], grain: float = 30.0, *, stored: bool = False
    ) -> list[bytes]:
        """Record a use of the ``blocks`` of a prompt; if it ``stored`` them it is no hit.

        Returns the blocks, last to first, whose use should be reported to the backend (`touch`):
        those whose last reported use is at least ``grain`` seconds old.
        """
        now = self._clock()
        late = []
        with self._lock:
            for block in reversed(blocks):
                entry = self._ordered_block(block)
                if entry is None:
                    continue
                self._dequeue(entry)
                entry.used = now
                entry.hits += not stored
                self._use(entry)
                if not 0.0 <= now - entry.noted < grain:  # negative if the clock was set back
                    entry.noted = now
                    late.append(block)
        return late

    def unnoted(self) -> list[tuple[bytes, float]]:
        """Return the uses not reported to the backend yet, oldest first; mark them as reported."""
        with self._lock:
            late = [entry for entry in self._blocks.values() if entry.used > entry.noted]
            late.sort(key=lambda entry: entry.last_used)
            for entry in late:
                entry.noted = entry.used
            return [(entry.block, entry.used) for entry in late]

    def victims(
        self, needed: int, space: bytes | None = None, expired: list[bytes] | None = None
    ) -> list[bytes]:
        """Forget and return blocks of ``needed`` bytes, in eviction order; fewer if none are left.

        If the namespace ``space`` has a quota, only its blocks. If ``expired`` is given, expired
        blocks are appended to it instead of being returned.
        """
        gone: list[bytes] = []
        with self._lock:
            self._unpin_ended()
            if space is not None and space in self._quotas:
                lane = self._shares.lane(space)
                lanes = iter(()) if lane is None else repeat(lane)
            else:
                lanes = self._shares.givers()
            while needed > 0:
                lane = next(lanes, None)
                entry = None if lane is None else self._pop(lane)
                if entry is None:
                    break
                self._drop(entry)
                needed -= self._takes(entry.size)
                into = gone if expired is None or not self._expired(entry) else expired
                into.append(entry.block)
        return gone

    def expired(self) -> list[bytes]:
        """Forget and return expired blocks, 1,000 at most."""
        if self.ttl is None:
            return []
        with self._lock:
            late = (block for block, entry in self._blocks.items() if self._expired(entry))
            old = list(islice(late, _MOST_EXPIRED))
            since = self._clock() - self.ttl
            for lane in self._shares.lanes():
                if len(old) < _MOST_EXPIRED:
                    old += lane.cold.unused_since(since, _MOST_EXPIRED - len(old))
            for block in old:
                self._forget(block)
        return old

    def fill(self, found: Iterable[tuple[bytes, int, float]]) -> list[bytes]:
        """Take over a listing of the backend: (block, bytes, last use). Return the blocks it lacks.

        Known blocks keep their place in the order and get the later time of use. New blocks follow
        the cold ones, ordered by last use; the newest are not cold. Known blocks that are not
        listed are forgotten. Blocks added during the listing stay; blocks forgotten during it stay
        forgotten. If ``found`` raises, the blocks before that are taken over and none are
        forgotten.

        The blocks are known once ``found`` ends. Concurrent calls wait. Memory: 69 bytes a block
        meanwhile.
        """
        with self._filling:
            with self._lock:
                self._round = self._round % _ROUNDS + 1
                self._gone = set()
            listed = bytearray()
            try:
                rows_of(found, self._round, listed)
            finally:
                self._list(by_use(listed))
            with self._lock:
                here = self._blocks.values()
                unseen = [entry.block for entry in here if entry.round != self._round]
                for lane in self._shares.lanes():
                    unseen += lane.cold.not_listed(self._round)
            gone: list[bytes] = []
            for start in range(0, len(unseen), _AT_ONCE):
                with self._lock:
                    for block in unseen[start : start + _AT_ONCE]:
                        entry = self._look(block)
                        if entry is not None and entry.round != self._round:  # not added meanwhile
                            self._forget(block)
                            gone.append(block)
        return gone

    # --- holds and pins --------------------------------------------------------------------------

    def hold(self, blocks: Iterable[bytes], held: list[bytes]) -> None:
        """Keep ``blocks`` from eviction until `free` was called as often, also if added anew.

        Those that are known are appended to ``held``, one by one, so that a caller that is
        interrupted knows what to free.
        """
        with self._lock:
            held.extend(block for block in blocks if self._hold(block))

    def hold_ahead(self, blocks: Iterable[bytes]) -> None:
        """`hold` blocks; those that are unknown from the moment at which they are added."""
        with self._lock:
            for block in blocks:
                if not self._hold(block):
                    self._ahead[block] = self._ahead.get(block, 0) + 1

    def free(self, blocks: Iterable[bytes]) -> None:
        """Undo one hold of each of ``blocks``."""
        with self._lock:
            for block in blocks:
                ahead = self._ahead.pop(block, 0)
                if ahead > 1:
                    self._ahead[block] = ahead - 1
                entry = None if ahead else self._blocks.get(block)
                if entry is not None and entry.held:
                    entry.held -= 1
                    self._enqueue(entry)

    def give_up(self, blocks: Iterable[bytes], needed: int) -> list[bytes]:
        """Forget the first of ``blocks`` that together free ``needed`` bytes; return them.

        The caller has held each once, which ends. Blocks that others hold too, or that are pinned,
        are skipped.
        If the rest is smaller than ``needed``, nothing is forgotten.
        """
        gone: list[bytes] = []
        with self._lock:
            for block in blocks:
                entry = self._blocks.get(block)
                if entry is not None and entry.held == 1 and not entry.pinned:
                    gone.append(block)
                    needed -= self._takes(entry.size)
                    if needed <= 0:
                        break
            if needed > 0:
                return []
            for block in gone:
                entry = self._blocks[block]
                entry.held = 0  # the caller's
                self._drop(entry)
        return gone

    def pin(self, blocks: Sequence[bytes], seconds: float, most: int) -> list[bytes]:
        """Pin those of ``blocks`` that are here, in order, for ``seconds``; return the pinned ones.

        Stops before all pins together would cover more than ``most`` bytes.
        """
        until = self._clock() + seconds
        pinned: list[bytes] = []
        with self._lock:
            self._unpin_ended()
            for block in blocks:
                entry = self._ordered_block(block)
                if entry is None or self._expired(entry):
                    continue
                if not entry.pinned:
                    if self._pinned_bytes + entry.size > most:
                        break
                    self._dequeue(entry)
                    self._pinned_bytes += entry.size
                self._pin(entry, max(entry.pinned, until))
                pinned.append(block)
        return pinned

    def unpin(self, blocks: Sequence[bytes]) -> list[bytes]:
        """End the pins of ``blocks``; return the blocks that were pinned."""
        with self._lock:
            return [entry.block for entry in self._pinned_of(blocks) if self._unpin(entry)]

    def pin_ends(self, blocks: Iterable[bytes]) -> dict[bytes, float]:
        """Return those of ``blocks`` that are pinned, each with the time at which its pin ends."""
        with self._lock:
            return {entry.block: entry.pinned for entry in self._pinned_of(blocks)}

    def restore_pins(self, blocks: Iterable[bytes], ends: Mapping[bytes, float]) -> None:
        """Let the pins of ``blocks`` be as `pin_ends` returned them; end those it did not."""
        with self._lock:
            for entry in self._pinned_of(blocks):
                end = ends.get(entry.block, 0.0)
                if not end:
                    self._unpin(entry)
                elif end < entry.pinned:
                    self._pin(entry, end)

    # --- quotas and shares -----------------------------------------------------------------------

    def set_quota(self, space: bytes, limit: int) -> None:
        """Limit a namespace to ``limit`` bytes; see `over_quota`."""
        with self._lock:
            self._quotas[space] = limit
            self._regroup(space, self._shares.limited(space))

    def quota(self, space: bytes) -> int | None:
        """Return the bytes that a namespace is limited to; None: it is not."""
        return self._quotas.get(space)

    def over_quota(self, space: bytes, more: int) -> int:
        """Return the bytes to evict from a namespace before ``more`` are added.

        Reserved bytes count. -1: ``more`` do not fit beside them.
        """
        limit = self._quotas.get(space)
        if limit is None:
            return 0
        more += self._coming.get(space, 0)
        return -1 if more > limit else max(0, self._spaces.get(space, (0, 0))[0] + more - limit)

    def reserve(self, space: bytes, more: int) -> int:
        """Reserve ``more`` bytes in the quota of a namespace if they fit; return `over_quota`.

        They count until `add_reserved` or `unreserve`.
        """
        with self._lock:
            over = self.over_quota(space, more)
            if not over:
                self._coming[space] = self._coming.get(space, 0) + more
            return over

    def unreserve(self, space: bytes, more: int) -> None:
        """Give up ``more`` reserved bytes."""
        with self._lock:
            self._unreserve(space, more)

    def announce(self, space: bytes, tenant: str | None) -> None:
        """Count a namespace for the share of ``tenant``; None: all tenants share its blocks.

        Does nothing without shares. Call it before the namespace's first block is added; later
        calls regroup its blocks, at the cost of a pass over all.
        """
        with self._lock:
            if self._shares.fair:
                self._regroup(space, self._shares.announced(space, tenant, self._spaces))

    # --- conversations that wait -----------------------------------------------------------------

    def attend(self, waiting: BlockWaits) -> None:
        """Order blocks by who waits for them; for policies that `awaits`, before any block."""
        with self._lock:
            assert not len(self), "the waits of blocks that are ordered already"
            self._waiting = waiting
            first = self._shares.first
            assert isinstance(first, ReturnAware)
            first.attend(waiting.returns, waiting.clock)

    def waits_changed(self, blocks: Sequence[bytes]) -> None:
        """Order ``blocks`` of a prompt anew: waits at them began or are over.

        Cost: two to three microseconds a block that is here.
        """
        with self._lock:
            for block in reversed(blocks):
                entry = self._blocks.get(block)
                if entry is not None:
                    self._dequeue(entry)
                    self._enqueue(entry)

    # --- internals, under the lock ---------------------------------------------------------------

    def _add(self, block: bytes, size: int) -> None:
        entry = self._ordered_block(block)
        now = self._clock()
        if entry is None:
            lane = self._shares.lane_for(block)
            self._count(lane, block, size, self._takes(size))
            self._insert(IndexedBlock(block, size, now, self._round, lane))
        else:
            self._dequeue(entry)
            more = self._takes(size) - self._takes(entry.size)
            self._count(entry.lane, block, size - entry.size, more)
            if entry.pinned:
                self._pinned_bytes += size - entry.size
            entry.size, entry.used, entry.noted = size, now, now
            entry.round = self._round
            self._use(entry)
        if self._ahead:
            for _ in range(self._ahead.pop(block, 0)):
                self._hold(block)

    def _unreserve(self, space: bytes, more: int) -> None:
        rest = self._coming.pop(space) - more
        if rest:
            self._coming[space] = rest

    def _get(self, block: bytes) -> IndexedBlock | ColdBlock | None:
        """Return what is known of a block. Takes the lock itself, where there are cold ones."""
        entry = self._blocks.get(block)
        if entry is not None or not self._cold:
            return entry
        with self._lock:
            return self._look(block)

    def _look(self, block: bytes) -> IndexedBlock | ColdBlock | None:
        entry = self._blocks.get(block)
        if entry is not None or not self._cold:
            return entry
        lane = self._shares.lane(block)
        return None if lane is None else lane.cold.get(block)

    def _expired(self, entry: IndexedBlock | ColdBlock) -> bool:
        if self.ttl is None:
            return False
        now = self._clock()
        if entry.used > now and isinstance(entry, IndexedBlock):
            entry.used = now  # the clock was set back: the time to live starts again
        return entry.used + self.ttl < now and entry.pinned < now

    def _ordered_block(self, block: bytes) -> IndexedBlock | None:
        """Return the entry of a block, which is not cold any longer; None if it is unknown."""
        entry = self._blocks.get(block)
        lane = None if entry is not None or not self._cold else self._shares.lane(block)
        if lane is None:
            return entry
        row = lane.cold.take(block)
        if row is None:
            return None
        self._cold -= 1
        return self._insert(IndexedBlock(block, row.size, row.used, row.round, lane))

    def _insert(self, entry: IndexedBlock) -> IndexedBlock:
        """Order a new entry; if there are too many, others become cold."""
        if self._ordered is not None and len(self._blocks) >= self._ordered:
            lane = self._shares.cooled(entry.lane)
            for _ in range(min(_COOLED, 1 + self._ordered // 16)):
                other = self._pop_ordered(lane)
                if other is None:
                    break
                lane.cold.add(other.block, other.size, other.used, other.round)
                self._cold += 1
                del self._blocks[other.block]
        self._blocks[entry.block] = entry
        self._use(entry)
        return entry

    def _use(self, entry: IndexedBlock) -> None:
        """Make an entry, which is no candidate, the one used last."""
        self._uses += 1
        entry.last_used = self._uses
        if self.awaits:
            entry.wait = None  # it begins to wait now, unless a conversation waits there
        self._enqueue(entry)

    def _enqueue(self, entry: IndexedBlock) -> None:
        """Make an entry a candidate for eviction, unless it is held or pinned."""
        if entry.held or entry.pinned:
            return
        if self._waiting is not None:
            wait, entry.followers = self._waiting.best(entry.block)
            entry.wait = entry.wait if wait is None else wait
        lane = entry.lane
        lane.policy.add(entry)
        if not lane.item:
            self._shares.ranked(lane)

    def _dequeue(self, entry: IndexedBlock) -> None:
        """End that an entry is a candidate, if it is one."""
        if not entry.held and not entry.pinned:
            entry.lane.policy.discard(entry)

    def _pop(self, lane: TierLane) -> IndexedBlock | None:
        """Remove the next victim of a lane from the order; return it, None if there is none."""
        row = lane.cold.pop()
        if row is None:
            return self._pop_ordered(lane)
        self._cold -= 1
        return IndexedBlock(row.block, row.size, row.used, row.round, lane)

    def _pop_ordered(self, lane: TierLane) -> IndexedBlock | None:
        while True:
            entry = lane.policy.pop()
            assert entry is None or isinstance(entry, IndexedBlock)
            if entry is None or self._waiting is None or not self._waiting.outlives(entry):
                return entry
            lane.policy.add(entry)

    def _drop(self, entry: IndexedBlock) -> None:
        """Forget an entry that is in no order any longer."""
        self._blocks.pop(entry.block, None)
        if entry.held:
            self._ahead[entry.block] = self._ahead.get(entry.block, 0) + entry.held
        if self._gone is not None:
            self._gone.add(entry.block)
        if self._pinned.pop(entry.block, None):
            self._pinned_bytes -= entry.size
        self._count(entry.lane, entry.block, -entry.size, -self._takes(entry.size))

    def _forget(self, block: bytes) -> bool:
        if self._gone is not None:
            self._gone.add(block)
        entry = self._blocks.get(block)
        if entry is not None:
            self._dequeue(entry)
            self._drop(entry)
            return True
        lane = self._shares.lane(block) if self._cold else None
        row = None if lane is None else lane.cold.take(block)
        if lane is not None and row is not None:
            self._cold -= 1
            self._count(lane, block, -row.size, -self._takes(row.size))
        return row is not None

    def _hold(self, block: bytes) -> bool:
        entry = self._ordered_block(block)
        if entry is None:
            return False
        self._dequeue(entry)
        entry.held += 1
        return True

    def _pin(self, entry: IndexedBlock, until: float) -> None:
        entry.pinned = until
        self._pinned[entry.block] = entry
        self._unpin_at = min(self._unpin_at, until)

    def _unpin(self, entry: IndexedBlock) -> bool:
        """End the pin of an entry; return whether it had one."""
        if not entry.pinned:
            return False
        self._pinned_bytes -= entry.size
        del self._pinned[entry.block]
        entry.pinned = 0.0
        self._enqueue(entry)
        return True

    def _unpin_ended(self) -> None:
        """End the pins whose time is over. Cost: a pass over all pins where one may end."""
        if self._pinned and self._unpin_at <= (now := self._clock()):
            for entry in [entry for entry in self._pinned.values() if entry.pinned <= now]:
                self._unpin(entry)
            self._unpin_at = min((entry.pinned for entry in self._pinned.values()), default=inf)

    def _pinned_of(self, blocks: Iterable[bytes]) -> list[IndexedBlock]:
        self._unpin_ended()
        entries = map(self._pinned.get, blocks)
        return [entry for entry in entries if entry is not None]

    def _list(self, rows: Rows) -> None:
        """Take over a listing in the order of last uses; let the policy order the newest blocks."""
        news = [rows[:0]]
        for start in range(0, len(rows), _AT_ONCE):
            with self._lock:
                news += self._list_some(rows[start : start + _AT_ONCE], len(rows) - start)
        with self._lock:
            self._gone = None
        new = by_use(np.concatenate(news))[-(self._ordered or len(rows) or 1) :]
        for start in range(0, len(new), _AT_ONCE):
            with self._lock:
                for block in ids_of(new[start : start + _AT_ONCE]):
                    self._ordered_block(block)

    def _list_some(self, rows: Rows, rest: int) -> list[Rows]:
        """Take over some rows of a listing, of which ``rest`` are left; return the new ones."""
        cold: dict[TierLane, dict[bytes, int]] = {}
        blocks, gone, lane, space = self._blocks, self._gone, None, b""
        for at, (block, used) in enumerate(zip(ids_of(rows), rows["used"].tolist(), strict=True)):
            entry = blocks.get(block)
            if entry is not None:
                entry.round = self._round
                if used > entry.used:
                    entry.used = entry.noted = used
            elif not gone or block not in gone or self._look(block) is not None:
                if lane is None or not block.startswith(space):
                    lane, space = self._shares.lane_for(block), block[:SPACE_BYTES]
                cold.setdefault(lane, {})[block] = at
        news = []
        for lane, places in cold.items():
            new = lane.cold.see(rows[list(places.values())])
            if len(new):
                lane.cold.extend(new, len(new) * rest // len(rows))
                self._count_listed(lane, new)
                news.append(new)
        return news

    def _count_listed(self, lane: TierLane, rows: Rows) -> None:
        """Count the new blocks of a listing."""
        self._cold += len(rows)
        spaces = rows["block"][:, : SPACE_BYTES // 8]
        while len(rows):  # most are of one namespace
            mine = (spaces == spaces[0]).all(axis=1)
            sizes = rows["size"][mine].astype(np.int64)
            taken = int((-(-sizes // self.unit)).sum()) * self.unit
            self._count(lane, spaces[0].tobytes(), int(sizes.sum()), taken)
            rows, spaces = rows[~mine], spaces[~mine]

    def _regroup(self, space: bytes, owner: Hashable) -> None:
        """Let another owner have a namespace."""
        shares = self._shares
        before = shares.owner(space)
        shares.own(space, owner)  # it may not be in the table yet
        taken = self._spaces.get(space, (0, 0))[1]
        if before == owner or not taken:
            return
        source, lane = shares.lane_of(before), shares.lane_of(owner)
        mine = [entry for entry in self._blocks.values() if entry.block.startswith(space)]
        for entry in mine:
            self._dequeue(entry)
        lane.cold.extend(source.cold.split(space))
        for one, more in ((lane, taken), (source, -taken)):
            one.size += more
            shares.level_changed(one, more)
        for entry in sorted(mine, key=lambda entry: entry.last_used):
            entry.lane = lane
            self._enqueue(entry)

    def _takes(self, size: int) -> int:
        """Return ``size`` in whole units of the backend."""
        return -(-size // self.unit) * self.unit

    def _count(self, lane: TierLane, block: bytes, more: int, taken: int) -> None:
        """Count bytes of a block, or of a namespace, that came or went, and in whole units."""
        space = block[:SPACE_BYTES]
        self.total_bytes += more
        self._taken += taken
        size, of_space = self._spaces.get(space, (0, 0))
        if size + more:
            self._spaces[space] = size + more, of_space + taken
        else:
            del self._spaces[space]
        lane.size += taken
        if self._shares.fair:
            self._shares.level_changed(lane, taken)

    def check(self) -> None:
        """Recount everything; an AssertionError is a bug of kvkeep."""
        with self._lock:
            entries, lanes = self._blocks.values(), self._shares.lanes()
            for lane in lanes:
                lane.cold.check()
            rows = [row for lane in lanes for row in lane.cold]
            assert len(rows) == self._cold
            assert not self._blocks.keys() & {row.block for row in rows}
            spaces: dict[bytes, tuple[int, int]] = {}
            every: list[IndexedBlock | ColdBlock] = [*entries, *rows]
            for one in every:
                space = one.block[:SPACE_BYTES]
                size, taken = spaces.get(space, (0, 0))
                spaces[space] = size + one.size, taken + self._takes(one.size)
            assert spaces == self._spaces
            assert self.total_bytes == sum(size for size, _ in spaces.values())
            assert self._taken == sum(taken for _, taken in spaces.values())
            assert self._pinned == {one.block: one for one in entries if one.pinned}
            assert self._pinned_bytes == sum(one.size for one in self._pinned.values())
            candidates = [one for one in entries if not one.held and not one.pinned]
            in_units = {space: taken for space, (_, taken) in spaces.items()}
            self._shares.recount(candidates, in_units)
