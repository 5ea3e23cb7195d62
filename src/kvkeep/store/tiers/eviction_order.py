"""`EvictionOrder`: which block of a tier is evicted next, by policies for quotas and tenants."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Final

from kvkeep.core.eviction import Entry, EvictionPolicy
from kvkeep.core.keys import SPACE_BYTES
from kvkeep.store.tiers.tier_shares import TierShares

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Sequence

    from kvkeep.store.tiers.block_waits import BlockWaits
    from kvkeep.store.tiers.packed import PackedRow
    from kvkeep.store.tiers.tier_shares import TenantWeights

__all__ = ["EvictionOrder", "OrderedBlock"]

_REMEMBERED: Final = 4  # length of `_known_again`, in blocks over those that the budget holds


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

    Policies with a history (`EvictionPolicy.remembers`) are fitted to ``budget`` bytes once the
    size of a block is known, and learn of requests from then on; without a budget, never.

    Policies that need waits (`EvictionPolicy.needs_waits`) find them in `BlockWaits`, once `attend`
    was called; until then, each block waits since its last use.

    With ``shares`` each tenant has a policy, and a namespace with a quota counts as a tenant.

    Thread safety: none; the catalogue calls it under its lock.

    Arguments:
        make: makes the policies.
        budget: bytes of the tier, if it has a budget.
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
        self.remembers = self.shared.remembers and budget is not None
        self.awaits = self.shared.needs_waits
        self._waits: BlockWaits | None = None
        self._make = make
        self._budget = budget
        self._fitted = 0  # bytes of the blocks that the policies are fit for; 0: none yet
        self._known_again: OrderedDict[bytes, None] = OrderedDict()

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

    def requested(self, blocks: Sequence[bytes]) -> None:
        """Record a request of ``blocks``, before any of them is added."""
        if not self._fitted:
            return
        tenants, last = self.tenants, blocks[-1]  # the first ones may be public
        policy = self.of(last) if tenants is None else tenants.history(last)
        # The key alone: it is hashed over its namespace as well, and is evenly spread.
        known = policy.requested([block[SPACE_BYTES:] for block in blocks])
        again = self._known_again
        for block in blocks[known:]:
            again.pop(block, None)
        for block in blocks[:known]:
            again[block] = None
            again.move_to_end(block)
        most = _REMEMBERED * (self._budget or 0) // self._fitted
        while len(again) > most:
            again.popitem(last=False)

    def fit(self, size: int) -> None:
        """Fit policies with a history to blocks of ``size`` bytes, if that is new.

        The first size may be that of a short tail, so a size twice as large or more fits them anew.
        """
        if not self.remembers or size < 2 * self._fitted:
            return
        self._fitted = size
        self.shared.fit(self._budget or 0, size)
        for space, policy in self.own.items():
            policy.fit(self.quotas[space], size)

    def attend(self, waits: BlockWaits) -> None:
        """Order by ``waits``; for policies that `awaits`, before the first block is added."""
        assert not len(self), "the waits of blocks that are ordered already"
        self._waits = waits
        for policy in (self.shared, *self.own.values()):
            policy.attend(waits.returns, waits.clock)

    def order(self, block: OrderedBlock, hits: int) -> None:
        """Add ``block`` to its policy, with the ``hits`` from before it was packed."""
        policy = self.of(block.block)
        if self.awaits:
            self._wait(block, used=True)
        policy.stored(block, 0, known=hits > 0 or block.block in self._known_again)
        if hits:
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

    def used(self, block: OrderedBlock, *, new: bool) -> None:
        """Count a use of ``block``: a hit, unless the request stored it (``new``)."""
        policy = self.of(block.block)
        count = policy.used if new else policy.hit
        if block.evictable:
            policy.discard(block)
            count(block)
            if self.awaits:
                self._wait(block, used=True)
            policy.add(block)
        else:
            count(block)

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
        if self.remembers and self._fitted:
            policy.fit(limit, self._fitted)
        if self._waits is not None:
            policy.attend(self._waits.returns, self._waits.clock)
        blocks = list(mine)
        for block in blocks:
            if block.evictable:
                self.shared.discard(block)
        # The new policy's event clock starts at 0: replay the past events in their order.
        for block in sorted(blocks, key=lambda block: block.stored):
            hits = block.hits
            policy.stored(block, block.priority, known=hits > 0)
            block.hits = hits
        for block in sorted(blocks, key=lambda block: block.serial):
            policy.used(block)
            if block.evictable:
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
