"""`EvictionOrder`: which block of a tier is evicted next, by policies for quotas and tenants."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvkeep.core.eviction import Entry, EvictionPolicy, ReturnAware
from kvkeep.core.keys import SPACE_BYTES
from kvkeep.store.tiers.tier_shares import TierShares

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable

    from kvkeep.store.tiers.conversations import BlockWaits
    from kvkeep.store.tiers.packed import PackedRow
    from kvkeep.store.tiers.tier_shares import TenantWeights

__all__ = ["EvictionOrder", "OrderedBlock"]


class OrderedBlock(Entry):
    """A block that a policy orders; `size` is the bytes of its record.

    Attributes:
        used: last use, in Unix seconds; the time to live counts from it.
        serial: number of its last use, over all policies of the tier; orders uses at equal times.
        pinned: end of its pin in Unix seconds; 0 if it is not pinned.
        held: number of writers and requests that need it now.
        noted: the last use that was reported to the backend, in Unix seconds.
        round: number of the last listing that found it.
    """

    __slots__ = ("block", "held", "noted", "pinned", "round", "serial", "used")

    def __init__(self, block: bytes, size: int, used: float, round_: int) -> None:
        super().__init__()
        self.block = block
        self.size = size
        self.used = used
        self.serial = 0
        self.pinned = 0.0
        self.held = 0
        self.noted = used
        self.round = round_

    @property
    def evictable(self) -> bool:
        """Whether it is a candidate of its policy: neither held nor pinned."""
        return not self.held and not self.pinned


class EvictionOrder:
    """The eviction policies of one tier: one for each namespace with a quota, one for the others.

    The policy `returns` finds waits in `BlockWaits`, once `attend` was called; until then, each
    block waits since its last use. Uses are numbered over all policies.

    With ``shares`` each tenant has a policy, and a namespace with a quota counts as a tenant.

    Thread safety: none; the catalogue calls it under its lock.

    Arguments:
        make: makes the policies.
        budget: bytes of the tier, if it has a budget; for shares.
        shares: weights of tenants; None: all namespaces without a quota share one policy.
        oldest_row: returns the oldest packed row of a group (`group_of`); for shares.

    Attributes:
        shared: the policy of namespaces without a quota; with shares, of all.
        own: the policies of namespaces with a quota; with shares, none.
        tenants: the shares; None without.
    """

    def __init__(
        self,
        make: Callable[[], EvictionPolicy],
        budget: int | None,
        shares: TenantWeights | None = None,
        oldest_row: Callable[[Hashable], PackedRow | None] = lambda _group: None,
    ) -> None:
        self.tenants: TierShares | None = None
        if shares is not None:
            self.tenants = TierShares(make, shares, budget, oldest_row)
        self.shared = make() if self.tenants is None else self.tenants
        self.own: dict[bytes, EvictionPolicy] = {}
        self.quotas: dict[bytes, int] = {}
        self.awaits = isinstance(make(), ReturnAware)
        self._waits: BlockWaits | None = None
        self._make = make
        self._moment = 0  # the number of uses so far

    def __len__(self) -> int:
        return len(self.shared) + sum(map(len, self.own.values()))

    def group_of(self, block: bytes) -> Hashable:
        """Return the namespace of ``block`` if it has a quota, else None; with shares its tenant.

        Blocks of one group have one policy, and so have their rows one queue.
        """
        if self.tenants is not None:
            return self.tenants.tenant(block)
        space = block[:SPACE_BYTES]
        return space if space in self.own else None

    def of(self, block: bytes) -> EvictionPolicy:
        """Return the policy that orders ``block``."""
        if not self.own:
            return self.shared
        return self.own.get(block[:SPACE_BYTES], self.shared)

    def attend(self, waits: BlockWaits) -> None:
        """Order by ``waits``; for policies that `awaits`, before the first block is added."""
        assert not len(self), "the waits of blocks that are ordered already"
        self._waits = waits
        first = self.shared if self.tenants is None else self.tenants.first
        for policy in (first, *self.own.values()):
            assert isinstance(policy, ReturnAware)
            policy.attend(waits.returns, waits.clock)

    def _use(self, block: OrderedBlock) -> None:
        self._moment += 1
        block.last_used = self._moment

    def order(self, block: OrderedBlock, hits: int) -> None:
        """Add ``block`` to its policy, with the ``hits`` from before it was packed."""
        policy = self.of(block.block)
        if self.awaits:
            self._wait(block, used=True)
        self._use(block)
        block.hits = hits
        if block.evictable:
            policy.add(block)

    def discard(self, block: OrderedBlock) -> None:
        """Remove ``block`` from the candidates of its policy, if it is one."""
        if block.evictable:
            self.of(block.block).discard(block)

    def restore(self, block: OrderedBlock) -> None:
        """Make ``block`` a candidate again, unless it is still held or pinned."""
        if block.evictable:
            if self.awaits:
                self._wait(block, used=False)
            self.of(block.block).add(block)

    def used(self, block: OrderedBlock, *, stored: bool) -> None:
        """Count a use of ``block``: a hit, unless the request ``stored`` it."""
        policy = self.of(block.block)
        if block.evictable:
            policy.discard(block)
        self._use(block)
        block.hits += not stored
        if block.evictable:
            if self.awaits:
                self._wait(block, used=True)
            policy.add(block)

    def awaited(self, block: OrderedBlock) -> None:
        """Order ``block`` by its waits of this moment: one of them began or is over."""
        if block.evictable:
            policy = self.of(block.block)
            policy.discard(block)
            self._wait(block, used=False)
            policy.add(block)

    def _wait(self, block: OrderedBlock, *, used: bool) -> None:
        """Take over the most valuable wait at ``block``.

        If there is none, it begins to wait when it is ``used``; otherwise its conversation has left
        it behind.
        """
        wait, block.followers = (None, 0) if self._waits is None else self._waits.best(block.block)
        if wait is not None or used:
            block.wait = wait

    def set_quota(self, space: bytes, limit: int, mine: Iterable[OrderedBlock]) -> bool:
        """Limit ``space``, with blocks ``mine``, to ``limit`` bytes; return if groups changed."""
        self.quotas[space] = limit
        if self.tenants is not None:
            return self.tenants.limit(space, limit, mine)
        if space in self.own:
            return False
        policy = self._make()
        policy.join(self.shared)
        for block in sorted(mine, key=lambda block: block.last_used):
            if block.evictable:
                self.shared.discard(block)
                policy.add(block)
        self.own[space] = policy
        return True

    def packing(self, block: bytes) -> Hashable:
        """Return the group whose next victims are to be packed before ``block`` is added."""
        return self.group_of(block) if self.tenants is None else self.tenants.packing()

    def pop(self, group: Hashable) -> OrderedBlock | None:
        """Remove and return the next victim of a group (`group_of`); None if it has none."""
        while True:
            entry = self._pop(group)
            assert entry is None or isinstance(entry, OrderedBlock)
            if entry is None or not self._outlived(entry):
                return entry
            self.of(entry.block).add(entry)

    def _pop(self, group: Hashable) -> Entry | None:
        if self.tenants is not None:
            return self.tenants.pop_of(group)
        return (self.shared if group is None else self.own[group]).pop()  # type: ignore[index]

    def _outlived(self, block: OrderedBlock) -> bool:
        """Take over another wait at ``block`` if it is worth more by now; return whether it is."""
        waits = self._waits
        if waits is None:
            return False
        wait, others = waits.best(block.block)
        known = block.wait
        if wait is None or wait is known or others < 2:
            return False
        if known is not None and not known.over and waits.worth(wait) <= waits.worth(known):
            return False
        block.wait, block.followers = wait, others
        return True

    def put_back(self, block: OrderedBlock) -> None:
        """Undo `pop`."""
        self.of(block.block).put_back(block)
