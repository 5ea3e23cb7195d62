"""`BlockTable`: the known blocks of a tier, ordered by policies or packed, and their bytes."""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING, Final

from kvkeep.core.keys import SPACE_BYTES
from kvkeep.store.tiers.eviction_order import EvictionOrder, OrderedBlock
from kvkeep.store.tiers.packed import Packed, PackedRow

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterator, Mapping

    from kvkeep.core.eviction import EvictionPolicy
    from kvkeep.store.tiers.tier_shares import TenantWeights

__all__ = ["BlockTable", "TierPins"]

_PACKED_AT_ONCE: Final = 32


class BlockTable:
    """Blocks by id: as objects that policies order, and beyond ``ordered`` of them as packed rows.

    Thread safety: none; the catalogue calls it under its lock.

    Attributes:
        bytes: of all records.
        taken: the same in whole units of the backend.
        spaces: bytes by namespace.
        round: the number of the last listing.
    """

    def __init__(
        self,
        policy: Callable[[], EvictionPolicy],
        budget: int | None,
        ordered: int | None,
        unit: int,
        shares: TenantWeights | None = None,
    ) -> None:
        self.blocks: dict[bytes, OrderedBlock] = {}
        self.order = EvictionOrder(policy, budget, shares, self._oldest_row)
        self.packed = Packed(self.order.group_of)
        self.pins = TierPins(self.blocks, self.order)
        self.bytes = 0
        self.taken = 0
        self.spaces: dict[bytes, int] = {}
        self.round = 0
        self._ordered = ordered
        self._unit = unit
        self._serial = 0

    def __len__(self) -> int:
        return len(self.blocks) + len(self.packed)

    @property
    def most_ordered(self) -> int:
        """How many blocks the policies may order."""
        return len(self.packed) if self._ordered is None else self._ordered

    def get(self, name: bytes) -> OrderedBlock | PackedRow | None:
        """Return the entry of a block; None if it is unknown."""
        return self.blocks.get(name) or self.packed.get(name)

    def ordered(self, name: bytes) -> OrderedBlock | None:
        """Return the object of a block, made from its row if it was packed; None if unknown."""
        block = self.blocks.get(name)
        if block is not None:
            return block
        row = self.packed.take(name)
        if row is None:
            return None
        return self._insert(OrderedBlock(name, row.size, row.used, row.round), row.hits)

    def add(self, name: bytes, size: int, used: float) -> OrderedBlock:
        """Add or replace a block, as used at ``used``."""
        block = self.ordered(name)
        if block is None:
            self._count(name, None, size)
            return self._insert(OrderedBlock(name, size, used, self.round), 0)
        self.order.discard(block)  # replaced: the record may have another size
        self._count(name, block.size, size)
        if block.pinned:
            self.pins.bytes += size - block.size
        block.size = size
        block.used = block.noted = used
        block.round = self.round
        return self._insert(block, block.hits)

    def list(self, name: bytes, size: int, used: float, *, forgotten: bool) -> None:
        """Take over a block that a listing found, unless it was ``forgotten`` meanwhile."""
        known = self.blocks.get(name)
        if known is not None:
            known.round = self.round
            if used > known.used:
                known.used = known.noted = used
        elif not self.packed.seen(name, used, self.round) and not forgotten:
            self.packed.add(name, size, used, 0, self.round)
            self._count(name, None, size)

    def next_serial(self) -> int:
        """Return the next number in the order of uses."""
        self._serial += 1
        return self._serial

    def forget(self, name: bytes) -> bool:
        """Remove a block; return whether it was known."""
        block = self.blocks.get(name)
        if block is not None:
            self.order.discard(block)
            self.drop(block)
            return True
        row = self.packed.take(name)
        if row is None:
            return False
        self._count(name, row.size, None)
        return True

    def announce(self, space: bytes, tenant: str | None) -> None:
        """Count a namespace for the share of ``tenant``, if there are shares."""
        tenants = self.order.tenants
        if tenants is not None and tenants.announce(space, tenant, self.ordered_of(space)):
            self.packed.regroup()

    def set_quota(self, space: bytes, limit: int) -> None:
        """Limit a namespace to ``limit`` bytes."""
        if self.order.set_quota(space, limit, self.ordered_of(space)):
            self.packed.regroup()

    def ordered_of(self, space: bytes) -> Iterator[OrderedBlock]:
        """Yield the blocks of a namespace that policies order. Cost: a pass over all of these."""
        return (block for block in self.blocks.values() if block.block.startswith(space))

    def drop(self, block: OrderedBlock) -> None:
        """Remove a block that its policy has already popped or discarded."""
        if self.blocks.pop(block.block, None) is None:
            self.packed.take(block.block)
        self._count(block.block, block.size, None)
        if block.pinned:
            self.pins.bytes -= block.size

    def used(self, block: OrderedBlock, *, stored: bool) -> None:
        """Count a use of ``block``; see `EvictionOrder.used`."""
        self.order.used(block, stored=stored)

    def takes(self, size: int) -> int:
        """Return ``size`` in whole units of the backend."""
        return -(-size // self._unit) * self._unit

    def victims(self, space: bytes | None) -> Iterator[OrderedBlock]:
        """Pop and yield the next victims of ``space``, if it has a quota, else of all.

        `drop` each before the next; nothing else may change meanwhile.
        """
        victim: OrderedBlock | None
        if self.order.tenants is None or (space is not None and space in self.order.quotas):
            while (victim := self._next_victim(space)) is not None:
                yield victim
            return
        for tenant in self.order.tenants.givers():
            victim = self._candidate(tenant)
            assert victim is not None
            yield victim

    def _next_victim(self, space: bytes | None) -> OrderedBlock | None:
        """Pop the next victim of ``space``, if it has a quota, else of all; None if none."""
        if space is not None and space in self.order.quotas:
            return self._candidate(self.order.group_of(space))
        oldest = self._candidate(None)
        for own in self.order.own:
            other = self._candidate(own)
            if other is None:
                continue
            if oldest is None:
                oldest = other
            elif self._age(other) < self._age(oldest):
                self._put_back(oldest)
                oldest = other
            else:
                self._put_back(other)
        return oldest

    def _candidate(self, group: Hashable) -> OrderedBlock | None:
        """Return the next victim of a group: its oldest row, else the block that is popped."""
        row = self.packed.oldest(group)
        if row is not None:
            return OrderedBlock(row.block, row.size, row.used, row.round)
        return self.order.pop(group)

    def _oldest_row(self, group: Hashable) -> PackedRow | None:
        return self.packed.oldest(group)

    def _age(self, block: OrderedBlock) -> tuple[bool, float]:
        """Return the sort key of candidates from different policies; the smallest is evicted."""
        ordered = block.block in self.blocks
        return (True, block.serial) if ordered else (False, block.used)

    def _put_back(self, block: OrderedBlock) -> None:
        if block.block in self.blocks:  # a packed candidate was only read, not popped
            self.order.put_back(block)

    def _insert(self, block: OrderedBlock, hits: int) -> OrderedBlock:
        """Add ``block`` to its policy, and pack others if there are too many."""
        if self._ordered is not None and len(self.blocks) >= self._ordered:
            self._pack(self.order.packing(block.block))
        self.blocks[block.block] = block
        block.serial = self.next_serial()
        self.order.order(block, hits)
        return block

    def _pack(self, group: Hashable) -> None:
        """Pop the next victims of ``group`` and turn them into rows."""
        for _ in range(min(_PACKED_AT_ONCE, 1 + (self._ordered or 0) // 16)):
            block = self.order.pop(group)
            if block is None:
                return
            self.packed.add(block.block, block.size, block.used, block.hits, block.round)
            del self.blocks[block.block]

    def _count(self, name: bytes, before: int | None, after: int | None) -> None:
        """Count a block whose bytes change; None: it is not here."""
        taken, takes = self.takes(before or 0), self.takes(after or 0)
        if self.order.tenants is not None:
            blocks = (after is not None) - (before is not None)
            self.order.tenants.count(name, takes - taken, blocks)
        before, after = before or 0, after or 0
        self.bytes += after - before
        self.taken += takes - taken
        space = name[:SPACE_BYTES]
        held = self.spaces.get(space, 0) + after - before
        if held:
            self.spaces[space] = held
        else:
            self.spaces.pop(space, None)

    def check(self) -> None:
        """Recount everything; an AssertionError is a bug of kvkeep."""
        self.packed.check()
        rows = list(self.packed)
        assert not self.blocks.keys() & {row.block for row in rows}
        known: list[OrderedBlock | PackedRow] = [*self.blocks.values(), *rows]
        assert self.bytes == sum(one.size for one in known)
        assert self.taken == sum(self.takes(one.size) for one in known)
        pinned = [block for block in self.blocks.values() if block.pinned]
        assert self.pins.bytes == sum(block.size for block in pinned)
        spaces: dict[bytes, int] = {}
        for one in known:
            space = one.block[:SPACE_BYTES]
            spaces[space] = spaces.get(space, 0) + one.size
        assert spaces == self.spaces
        assert len(self.order) == sum(one.evictable for one in self.blocks.values())
        if self.order.tenants is not None:
            self.order.tenants.recount(self.blocks.values(), rows, self.takes)


_MANY: Final = 1024  # heap entries, beyond which stale ones are dropped


class TierPins:
    """Pins of blocks, and the bytes they protect.

    Thread safety: none; the catalogue calls it under its lock.
    """

    def __init__(
        self,
        blocks: Mapping[bytes, OrderedBlock],
        order: EvictionOrder,
    ) -> None:
        self.bytes = 0
        self._blocks = blocks
        self._order = order
        self._ends: list[tuple[float, bytes]] = []  # a heap of (end, block); some are stale
        self._many = _MANY

    def __len__(self) -> int:
        return len(self._ends)

    def pin(self, block: OrderedBlock, until: float, most: int) -> bool:
        """Pin ``block``; return False if all pins would cover more than ``most`` bytes."""
        if not block.pinned:
            if self.bytes + block.size > most:
                return False
            self._order.discard(block)
            self.bytes += block.size
        block.pinned = max(block.pinned, until)
        heapq.heappush(self._ends, (until, block.block))
        return True

    def unpin(self, block: OrderedBlock) -> None:
        """End the pin of ``block``."""
        self.bytes -= block.size
        block.pinned = 0.0
        self._order.restore(block)

    def shorten(self, block: OrderedBlock, until: float) -> None:
        """Let the pin of ``block`` end at ``until``; 0: now."""
        if not until:
            self.unpin(block)
        elif until < block.pinned:
            block.pinned = until
            heapq.heappush(self._ends, (until, block.block))

    def unpin_expired(self, now: float) -> None:
        """End all pins whose time is over at ``now``."""
        while self._ends and self._ends[0][0] <= now:
            block = self._blocks.get(heapq.heappop(self._ends)[1])
            if block is not None and block.pinned and block.pinned <= now:
                self.unpin(block)

    def compact(self) -> None:
        """Drop the stale entries of extended and ended pins from the heap, once there are many."""
        if len(self._ends) <= self._many:
            return
        names = {block for _, block in self._ends}
        pinned = (found for name in names if (found := self._blocks.get(name)) and found.pinned)
        self._ends = [(block.pinned, block.block) for block in pinned]
        heapq.heapify(self._ends)
        self._many = max(_MANY, 2 * len(self._ends))
