"""`Catalogue`: which blocks a tier holds, and in which order they are evicted."""

from __future__ import annotations

import threading
import time
from itertools import islice
from typing import TYPE_CHECKING, Final

from kvkeep.store.tiers.block_table import BlockTable
from kvkeep.store.tiers.eviction_order import OrderedBlock

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterable, Mapping, Sequence

    from kvkeep.core.eviction import EvictionPolicy
    from kvkeep.store.tiers.conversations import BlockWaits
    from kvkeep.store.tiers.packed import PackedRow
    from kvkeep.store.tiers.tier_shares import TenantWeights

__all__ = ["Catalogue", "Filling"]

_AT_ONCE: Final = 1024  # blocks of a listing that are taken over under one lock
_MOST_EXPIRED: Final = 1000  # blocks that are forgotten at once
_ROUNDS: Final = 1 << 16


class Catalogue:
    """Block ids with sizes and last uses, ordered for eviction by policies of the core.

    A use of a prompt counts its blocks last to first (`used`), so that its end is evicted before
    its beginning. A namespace with a quota has a policy of its own, the others share one; of their
    candidates the one used least recently is evicted first. With ``shares`` each tenant has one,
    and tenants above their shares give the victims.

    An ordered block takes about half a kilobyte. ``ordered`` bounds their number: beyond it, the
    next victims of the policies become rows of about a hundred bytes (`Packed`), which are evicted
    before all others, in the order in which they became rows. A row that is used again is ordered
    again. For LRU the order is the same as without the bound, except for blocks
    that were held, pinned or found by a second listing.

    Thread safety: all methods, by one lock under which nothing but policies is called, and which is
    held for at most 1,024 blocks of a listing. Cost: about a microsecond a block.

    Arguments:
        policy: makes the eviction policies.
        ttl: seconds after its last use that a block expires; None: never.
        clock: returns Unix seconds.
        budget: bytes that the tier may hold, if it has a budget.
        ordered: see above; None: all.
        unit: a record takes whole units of so many bytes in the backend; `victims` counts these.
        shares: weights by which tenants share the tier (`TierShares`); None: they do not.

    Attributes:
        holds: keeps blocks from eviction for a while.
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
        self._clock = clock
        self._lock = threading.Lock()
        self._table = BlockTable(policy, budget, ordered, unit, shares)
        self._filling = Filling(self._table, self._lock)
        self.holds = Holds(self._table, self._filling, self._lock)

    # --- queries ---------------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self._table)

    def __contains__(self, block: object) -> bool:
        known = self._known(block)  # type: ignore[arg-type]
        return known is not None and not self._expired(known)

    @property
    def total_bytes(self) -> int:
        """Bytes of all records."""
        return self._table.bytes

    @property
    def policy(self) -> str:
        """The name of the policy of namespaces without a quota."""
        return self._table.order.shared.name

    @property
    def pinned_bytes(self) -> int:
        """Bytes that are pinned now."""
        with self._lock:
            self._table.pins.unpin_expired(self._clock())
            return self._table.pins.bytes

    def size(self, block: bytes) -> int | None:
        """Return the bytes of a record; None if it is unknown."""
        known = self._known(block)
        return None if known is None else known.size

    def has_expired(self, block: bytes) -> bool:
        """Whether ``block`` is known and has expired."""
        known = self._known(block)
        return known is not None and self._expired(known)

    def expired_at(self, block: bytes) -> float | None:
        """Return when ``block`` expired (Unix seconds); None if it is unknown or not expired."""
        known = self._known(block)
        if known is None or not self._expired(known):
            return None
        return max(known.used + (self.ttl or 0.0), known.pinned)

    def leading(self, blocks: Sequence[bytes]) -> int:
        """Return how many leading ``blocks`` are here."""
        plain = self.ttl is None and not len(self._table.packed)
        there: Container[object] = self._table.blocks if plain else self
        for count, block in enumerate(blocks):
            if block not in there:
                return count
        return len(blocks)

    def spaces(self) -> dict[bytes, int]:
        """Return the bytes of each namespace."""
        with self._lock:
            return dict(self._table.spaces)

    def blocks(self, space: bytes | None = None) -> list[bytes]:
        """Return the ids of all blocks, or of those of one namespace."""
        with self._lock:
            known = [*self._table.blocks, *(row.block for row in self._table.packed)]
            return [block for block in known if space is None or block.startswith(space)]

    def may_free(self, needed: int) -> bool:
        """Whether ``needed`` bytes could be freed, if held blocks are freed in time."""
        with self._lock:
            self._table.pins.unpin_expired(self._clock())
            return self._table.taken - self._table.pins.bytes >= needed

    def fits(self, space: bytes) -> int | None:
        """Return how many blocks of average size a namespace may have; None if that is unknown.

        It is unknown without a budget, and while there are no blocks to take an average of.
        """
        with self._lock:
            count = len(self)
            if not count or not self.budget:
                return None
            fit = self.budget * count // self._table.taken
            limit = self._table.order.quotas.get(space)
            return fit if limit is None else min(fit, limit * count // self._table.bytes)

    def now(self) -> float:
        """Return the time of the catalogue's clock, in Unix seconds."""
        return self._clock()

    # --- conversations that wait -----------------------------------------------------------------

    @property
    def awaits(self) -> bool:
        """Whether the policies order by when conversations return."""
        return self._table.order.awaits

    def attend(self, waits: BlockWaits) -> None:
        """Order blocks by ``waits``; call it before any block is added."""
        with self._lock:
            self._table.order.attend(waits)

    def waits_changed(self, blocks: Sequence[bytes]) -> None:
        """Order ``blocks`` of a prompt anew: waits at them began or are over.

        Cost: two to three microseconds a block that is here.
        """
        with self._lock:
            for name in reversed(blocks):
                block = self._table.blocks.get(name)
                if block is not None:
                    self._table.order.awaited(block)

    # --- changes ---------------------------------------------------------------------------------

    def add(self, block: bytes, size: int) -> None:
        """Add or replace ``block`` of ``size`` bytes, last used now."""
        with self._lock:
            self._table.add(block, size, self._clock())
            self.holds.added(block)

    def add_all(self, blocks: Iterable[bytes], size: int) -> None:
        """Add each of ``blocks``, of ``size`` bytes."""
        with self._lock:
            now = self._clock()
            for block in blocks:
                self._table.add(block, size, now)

    def fill(self, found: Iterable[tuple[bytes, int, float]]) -> list[bytes]:
        """Take over a listing of the backend; return the blocks that it lacks. See `Filling`."""
        return self._filling.fill(found)

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
            for name in reversed(blocks):
                block = self._table.ordered(name)
                if block is None:
                    continue
                block.used = now
                block.serial = self._table.next_serial()
                self._table.used(block, stored=stored)
                if not 0.0 <= now - block.noted < grain:  # negative if the clock was set back
                    block.noted = now
                    late.append(name)
        return late

    def unnoted(self) -> list[tuple[bytes, float]]:
        """Return the uses not reported to the backend yet, oldest first; mark them as reported."""
        with self._lock:
            late = [block for block in self._table.blocks.values() if block.used > block.noted]
            late.sort(key=lambda block: block.serial)
            for block in late:
                block.noted = block.used
            return [(block.block, block.used) for block in late]

    def forget(self, block: bytes) -> bool:
        """Remove ``block``; return whether it was known."""
        with self._lock:
            self._filling.forgotten(block)
            return self._table.forget(block)

    def victims(
        self, needed: int, space: bytes | None = None, expired: list[bytes] | None = None
    ) -> list[bytes]:
        """Forget and return blocks of ``needed`` bytes, in eviction order; fewer if none are left.

        If the namespace ``space`` has a quota, only its blocks. If ``expired`` is given, expired
        blocks are appended to it instead of being returned.
        """
        gone: list[bytes] = []
        with self._lock:
            self._table.pins.unpin_expired(self._clock())
            victims = self._table.victims(space)
            while needed > 0:
                victim = next(victims, None)
                if victim is None:
                    break
                self._table.drop(victim)
                self._filling.forgotten(victim.block)
                needed -= self._table.takes(victim.size)
                into = gone if expired is None or not self._expired(victim) else expired
                into.append(victim.block)
        return gone

    def expired(self) -> list[bytes]:
        """Forget and return expired blocks, `_MOST_EXPIRED` of them at most."""
        if self.ttl is None:
            return []
        with self._lock:
            late = (block for block in self._table.blocks.values() if self._expired(block))
            old = [block.block for block in islice(late, _MOST_EXPIRED)]
            for name in old:
                self._table.forget(name)
        for part in self._table.packed.parts():
            if len(old) >= _MOST_EXPIRED:
                break
            with self._lock:
                rows = self._table.packed.sweep(part, self._expired)[: _MOST_EXPIRED - len(old)]
                for row in rows:
                    self._table.forget(row.block)
            old += (row.block for row in rows)
        return old

    def set_quota(self, space: bytes, limit: int) -> None:
        """Limit a namespace to ``limit`` bytes; see `over_quota`."""
        with self._lock:
            self._table.set_quota(space, limit)

    def announce(self, space: bytes, tenant: str | None) -> None:
        """Count a namespace for the share of ``tenant``; None: all tenants share its blocks.

        Does nothing without shares. Call it before the namespace's first block is added; later
        calls regroup its blocks.
        """
        if self._table.order.tenants is not None:
            with self._lock:
                self._table.announce(space, tenant)

    def over_quota(self, space: bytes, more: int) -> int:
        """Return the bytes to evict from a namespace before ``more`` are added; -1: never fits."""
        limit = self._table.order.quotas.get(space)
        if limit is None:
            return 0
        if more > limit:
            return -1
        return max(0, self._table.spaces.get(space, 0) + more - limit)

    def pin(self, blocks: Sequence[bytes], seconds: float, most: int) -> list[bytes]:
        """Pin those of ``blocks`` that are here, in order, for ``seconds``; return the pinned ones.

        Stops before all pins together would cover more than ``most`` bytes.
        """
        until = self._clock() + seconds
        pinned: list[bytes] = []
        with self._lock:
            self._table.pins.unpin_expired(self._clock())
            for name in blocks:
                block = self._table.ordered(name)
                if block is None or self._expired(block):
                    continue
                if not self._table.pins.pin(block, until, most):
                    break
                pinned.append(name)
            self._table.pins.compact()
        return pinned

    def unpin(self, blocks: Sequence[bytes]) -> list[bytes]:
        """End the pins of ``blocks``; return the blocks that were pinned."""
        with self._lock:
            self._table.pins.unpin_expired(self._clock())
            unpinned: list[bytes] = []
            for name in blocks:
                block = self._table.blocks.get(name)
                if block is not None and block.pinned:
                    self._table.pins.unpin(block)
                    unpinned.append(name)
        return unpinned

    def pin_ends(self, blocks: Iterable[bytes]) -> dict[bytes, float]:
        """Return those of ``blocks`` that are pinned, each with the time at which its pin ends."""
        with self._lock:
            self._table.pins.unpin_expired(self._clock())
            known = ((name, self._table.blocks.get(name)) for name in blocks)
            return {name: block.pinned for name, block in known if block and block.pinned}

    def restore_pins(self, blocks: Iterable[bytes], ends: Mapping[bytes, float]) -> None:
        """Let the pins of ``blocks`` be as `pin_ends` returned them; end those it did not."""
        with self._lock:
            for name in blocks:
                block = self._table.blocks.get(name)
                if block is not None and block.pinned:
                    self._table.pins.shorten(block, ends.get(name, 0.0))

    # --- internals that take the lock ------------------------------------------------------------

    def _known(self, block: bytes) -> OrderedBlock | PackedRow | None:
        known = self._table.blocks.get(block)
        if known is not None or not len(self._table.packed):
            return known
        with self._lock:
            return self._table.get(block)

    # --- internals under the lock ----------------------------------------------------------------

    def _expired(self, known: OrderedBlock | PackedRow) -> bool:
        if self.ttl is None:
            return False
        now = self._clock()
        if known.used > now and isinstance(known, OrderedBlock):
            known.used = now  # the clock was set back: the time to live starts again
        return known.used + self.ttl < now and known.pinned < now

    def check(self) -> None:
        """Recount everything; an AssertionError is a bug of kvkeep."""
        with self._lock:
            self._table.check()


class Filling:
    """Takes over listings into ``table``, under ``lock``, for at most 1,024 blocks at a time.

    Thread safety: `fill`, of which one call runs at a time; call `forgotten` under the lock.
    """

    def __init__(self, table: BlockTable, lock: threading.Lock) -> None:
        self._table = table
        self._lock = lock
        self._running = threading.Lock()
        self._gone: set[bytes] | None = None  # blocks forgotten while a listing goes on

    def forgotten(self, block: bytes) -> None:
        """Record that ``block`` was forgotten: a listing that goes on must not add it again."""
        if self._gone is not None:
            self._gone.add(block)

    def fill(self, found: Iterable[tuple[bytes, int, float]]) -> list[bytes]:
        """Take over a listing of the backend: (block, bytes, last use). Return the blocks it lacks.

        Known blocks keep their place in the order and get the later time of use. New blocks follow
        them, ordered by last use. Known blocks that are not listed are forgotten. Blocks added
        during the listing stay; blocks forgotten during it stay forgotten. If ``found`` raises, the
        blocks before that are taken over and none are forgotten.

        Listed blocks are known, and may be evicted, before ``found`` ends. Concurrent calls wait.
        """
        with self._running:
            with self._lock:
                self._table.round = (self._table.round + 1) % _ROUNDS
                self._table.packed.begin_listing()
                self._gone = set()
            try:
                items = iter(found)
                while some := sorted(islice(items, _AT_ONCE), key=lambda item: item[2]):
                    with self._lock:
                        for block, size, used in some:
                            self._table.list(
                                block, size, used, forgotten=block in (self._gone or ())
                            )
            finally:
                with self._lock:
                    self._gone = None
                self._order_listed()
            return self._not_listed()

    def _order_listed(self) -> None:
        """Unpack the newest listed blocks, as many as may be ordered."""
        with self._lock:
            self._table.packed.end_listing()
            newest = self._table.packed.newest(self._table.most_ordered)
        for start in range(0, len(newest), _AT_ONCE):
            with self._lock:
                for block in newest[start : start + _AT_ONCE]:
                    self._table.ordered(block)

    def _not_listed(self) -> list[bytes]:
        """Forget and return the blocks that the last listing did not find."""
        with self._lock:
            gone = [
                one.block for one in self._table.blocks.values() if one.round != self._table.round
            ]
            for block in gone:
                self._table.forget(block)
        for part in self._table.packed.parts():
            with self._lock:
                rows = self._table.packed.sweep(part, lambda row: row.round != self._table.round)
                for row in rows:
                    self._table.forget(row.block)
            gone += (row.block for row in rows)
        return gone


class Holds:
    """The holds on blocks of ``table``; a block may be held several times.

    Thread safety: all methods but `added`, by the catalogue's ``lock``.
    """

    def __init__(self, table: BlockTable, filling: Filling, lock: threading.Lock) -> None:
        self._table = table
        self._filling = filling
        self._lock = lock
        self._ahead: dict[bytes, int] = {}  # holds of blocks that are not added yet

    def hold(self, block: bytes) -> bool:
        """Keep ``block`` from eviction until `free` was called as often; False if it is unknown."""
        with self._lock:
            return self._hold(block)

    def ahead(self, block: bytes) -> None:
        """`hold` a block; if it is unknown, from the moment at which it is added."""
        with self._lock:
            if not self._hold(block):
                self._ahead[block] = self._ahead.get(block, 0) + 1

    def hold_all(self, blocks: Iterable[bytes], held: list[bytes]) -> None:
        """`hold` each of ``blocks``; those that are known are appended to ``held``, one by one.

        So a caller that is interrupted knows what to free.
        """
        with self._lock:
            held.extend(block for block in blocks if self._hold(block))

    def free(self, block: bytes) -> None:
        """Undo one `hold` or `ahead`; does nothing if ``block`` was forgotten meanwhile."""
        with self._lock:
            self._free(block)

    def free_all(self, blocks: Iterable[bytes]) -> None:
        """`free` each of ``blocks``."""
        with self._lock:
            for block in blocks:
                self._free(block)

    def give_up(self, blocks: Iterable[bytes], needed: int) -> list[bytes]:
        """Forget the first of ``blocks`` that together free ``needed`` bytes; return them.

        The caller has held each once. Blocks that others hold too, or that are pinned, are skipped.
        If the rest is smaller than ``needed``, nothing is forgotten.
        """
        gone: list[bytes] = []
        with self._lock:
            for block in blocks:
                known = self._table.blocks.get(block)
                if known is not None and known.held == 1 and not known.pinned:
                    gone.append(block)
                    needed -= self._table.takes(known.size)
                    if needed <= 0:
                        break
            if needed > 0:
                return []
            for block in gone:
                self._filling.forgotten(block)
                self._table.forget(block)
        return gone

    def added(self, block: bytes) -> None:
        """Begin the holds that were taken ahead of ``block``; call it under the lock."""
        for _ in range(self._ahead.pop(block, 0)):
            self._hold(block)

    def _hold(self, name: bytes) -> bool:
        block = self._table.ordered(name)
        if block is None:
            return False
        self._table.order.discard(block)
        block.held += 1
        return True

    def _free(self, name: bytes) -> None:
        ahead = self._ahead.pop(name, 0)
        if ahead:
            if ahead > 1:
                self._ahead[name] = ahead - 1
            return
        block = self._table.blocks.get(name)
        if block is not None and block.held:
            block.held -= 1
            self._table.order.restore(block)
