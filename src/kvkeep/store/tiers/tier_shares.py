"""`TierShares`: fair shares of a tier for tenants, whose blocks are told by their space."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf
from typing import TYPE_CHECKING, Final

from kvkeep.core.eviction.shares import ShareClaim, Shares, check_weights
from kvkeep.core.keys import SPACE_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping

    from kvkeep.core.eviction import Entry, EvictionPolicy
    from kvkeep.core.eviction.shares import Lane
    from kvkeep.store.tiers.eviction_order import OrderedBlock
    from kvkeep.store.tiers.packed import PackedRow

__all__ = ["TenantWeights", "TierShares", "TierTenant"]

_MOST_SPACES: Final = 1 << 14  # known spaces, beyond which those without blocks are forgotten
_PACKED_OF: Final = 32  # tenants that are compared to choose whose blocks are packed


@dataclass(frozen=True, slots=True)
class TenantWeights:
    """The weights of a store's tenants by name, and the spaces of tenants that are known early.

    A tenant that ``weights`` does not name has weight 1. A space with the name None holds what all
    tenants share. Raises `InvalidValue` for a wrong weight.
    """

    weights: Mapping[str, float]
    spaces: Mapping[bytes, str | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_weights(self.weights)


class TierTenant:
    """A tenant of a tier, which is compared by identity.

    Attributes:
        name: as announced; None for what all tenants share, and for unknown tenants.
        known: whether it was announced.
        claim: its weight, and its quota if it has one.
        spaces: how many spaces count for it.
        blocks: how many blocks it has in the tier, held and packed ones included.
    """

    __slots__ = ("blocks", "claim", "known", "name", "spaces")

    def __init__(self, name: str | None, claim: ShareClaim, *, known: bool) -> None:
        self.name = name
        self.known = known
        self.claim = claim
        self.spaces = 0
        self.blocks = 0

    def __repr__(self) -> str:
        return f"<TierTenant {self.name!r}, {self.blocks} blocks, {self.claim}>"


class _Space:
    """A space: whose it is, and what it has in the tier."""

    __slots__ = ("blocks", "bytes", "tenant")

    def __init__(self, tenant: TierTenant) -> None:
        self.tenant = tenant
        self.blocks = 0
        self.bytes = 0
        tenant.spaces += 1


class TierShares(Shares):
    """`Shares` of a tier, in bytes that blocks take there.

    Blocks name a space only; `announce` tells whose it is. All spaces of a tenant have one share
    together. A space that was not announced, such as one that
    a listing found, counts as a tenant of weight 1. A space with a quota counts as a tenant of its
    own, with the weight of its tenant.

    The table counts what tenants store (`count`), packed rows included. Of the candidates of a
    tenant, its rows come before those of its policy. Last uses are compared in Unix seconds, which
    rows have as well.

    Thread safety: none; the catalogue calls it under its lock. Memory, beside that of `Shares`: 400
    bytes for each space.

    Arguments:
        make: makes the policy of each tenant.
        shares: the weights.
        budget: bytes of the tier; without, no tenant is below its share.
        oldest_row: returns the oldest packed row of a tenant, None if it has none.
    """

    def __init__(
        self,
        make: Callable[[], EvictionPolicy],
        shares: TenantWeights,
        budget: int | None,
        oldest_row: Callable[[Hashable], PackedRow | None],
    ) -> None:
        self._oldest_row = oldest_row
        super().__init__(make, shares.weights)
        self._spaces: dict[bytes, _Space] = {}
        self._named: dict[str | None, TierTenant] = {}  # announced ones without a quota
        self._most = _MOST_SPACES
        self._turn: list[Lane] = []  # lanes to compare when blocks are packed next
        self.fit(budget or 1)
        for space, name in shares.spaces.items():
            self.announce(space, name, ())

    # --- tenants -----------------------------------------------------------------------------

    def tenant(self, block: bytes) -> TierTenant:
        """Return the tenant that ``block`` counts for."""
        space = block[:SPACE_BYTES]
        known = self._spaces.get(space)
        return (known or self._begun(space)).tenant

    def announce(self, space: bytes, name: str | None, mine: Iterable[OrderedBlock]) -> bool:
        """Count a space, whose ordered blocks are ``mine``, for the tenant ``name``.

        None stands for what all tenants share. Returns whether blocks count for another tenant now;
        then the groups of packed rows have changed. Cost: O(log n) of n tenants, unless the space
        and the tenant have blocks already, or the space was another tenant's: then O(blocks).
        """
        one = self._spaces.get(space) or self._begun(space)
        claim = ShareClaim(1.0 if name is None else self.weights.get(name, 1.0), name is None)
        limit, named = one.tenant.claim.most, self._named.get(name)
        if limit is None and named is not None:
            return one.tenant is not named and self._move(one, named, mine)
        if one.tenant.known and limit is None:  # it was announced as another's
            named = self._named[name] = TierTenant(name, claim, known=True)
            return self._move(one, named, mine)
        one.tenant.name, one.tenant.known = name, True
        if limit is None:
            self._named[name] = one.tenant
        self._claims(one.tenant, claim._replace(most=limit))
        return False

    def limit(self, space: bytes, most: int, mine: Iterable[OrderedBlock]) -> bool:
        """Give a space a quota of ``most`` bytes, and a policy of its own; see `announce`."""
        one = self._spaces.get(space) or self._begun(space)
        tenant, claim = one.tenant, one.tenant.claim._replace(most=most)
        if tenant.spaces > 1:
            return self._move(one, TierTenant(tenant.name, claim, known=tenant.known), mine)
        self._unname(tenant)
        self._claims(tenant, claim)
        return False

    def _unname(self, tenant: TierTenant) -> None:
        """Let the next space that is announced by the name begin another tenant."""
        if self._named.get(tenant.name) is tenant:  # one with a quota may have the same name
            del self._named[tenant.name]

    def _claims(self, tenant: TierTenant, claim: ShareClaim) -> None:
        tenant.claim = claim
        lane = self._lanes.get(tenant)
        if lane is not None:
            self._weigh(lane.claim, -1)
            lane.claim = claim
            self._weigh(claim, 1)
            self._rank(lane)

    def _begun(self, space: bytes) -> _Space:
        """Return the record of a space that was unknown."""
        if len(self._spaces) >= self._most:
            self._forget_some()
        one = self._spaces[space] = _Space(TierTenant(None, ShareClaim(), known=False))
        return one

    def _forget_some(self) -> None:
        """Forget spaces without blocks, except those of tenants with a weight or a quota."""
        for space, one in list(self._spaces.items()):
            tenant = one.tenant
            if not one.blocks and tenant.claim == ShareClaim() and tenant.name not in self.weights:
                del self._spaces[space]
                tenant.spaces -= 1
                if not tenant.spaces:
                    self._unname(tenant)
        self._most = max(_MOST_SPACES, 2 * len(self._spaces))

    def _move(self, one: _Space, into: TierTenant, mine: Iterable[OrderedBlock]) -> bool:
        """Count a space for another tenant; return whether it has blocks."""
        before, one.tenant = one.tenant, into
        before.spaces -= 1
        into.spaces += 1
        if not before.spaces:
            self._unname(before)
        if not one.blocks:
            return False
        old, new, blocks = self._lane(before), self._lane(into), list(mine)
        for block in blocks:
            if block.evictable:
                old.policy.discard(block)
                old.ages.remove(block)
                self._length -= 1
        before.blocks -= one.blocks
        into.blocks += one.blocks
        self._resize(old, -one.bytes)
        self._resize(new, one.bytes)
        for block in sorted(blocks, key=lambda block: block.last_used):
            if block.evictable:
                new.policy.add(block)
                self._added(block, new)
        return True

    # --- bytes -------------------------------------------------------------------------------

    def count(self, block: bytes, change: int, number: int) -> None:
        """Count a change of the bytes that ``block`` takes, and of the ``number`` of blocks."""
        space = block[:SPACE_BYTES]
        one = self._spaces.get(space) or self._begun(space)
        lane = self._lane(one.tenant)
        one.bytes += change
        one.blocks += number
        one.tenant.blocks += number
        self._resize(lane, change)

    def _resize(self, lane: Lane, change: int) -> None:
        lane.size += change
        tenant: TierTenant = lane.tenant  # type: ignore[assignment]
        if not tenant.blocks:
            self._emptied(lane)
        elif change > 0 or not lane.item:  # it may have packed rows alone
            self._rank(lane)

    # --- order -------------------------------------------------------------------------------

    def givers(self) -> Iterator[TierTenant]:
        """Yield the tenant that gives each next victim.

        Between two of them the victim leaves, and nothing else changes. So victims in a row of one
        tenant cost one comparison of tenants.
        """
        while lanes := self._givers():
            lane, rival = lanes[0], None
            if len(lanes) > 1:
                kept = sorted((self._keep(lane), at) for at, lane in enumerate(lanes))
                lane, rival = lanes[kept[0][1]], kept[1][0]
            yield lane.tenant  # type: ignore[misc]
            if rival is not None:
                floor = self._floor()
                while lane.item and lane.level > floor and self._first_of(lane) <= rival:
                    yield lane.tenant  # type: ignore[misc]

    def _first_of(self, lane: Lane) -> tuple[float, float]:
        """Return `_keep` of a lane, or the greatest value if it has no candidates."""
        return self._keep(lane) if self._has_candidates(lane) else (inf, inf)

    def pop_of(self, tenant: Hashable) -> Entry | None:
        """Remove and return the next victim of a tenant's policy; None if that has none."""
        lane = self._lanes.get(tenant)
        return None if lane is None else self._pop_of(lane)

    def packing(self) -> TierTenant | None:
        """Return a tenant whose next candidates are to be packed; None without candidates.

        Of 32 tenants in turn, that whose next candidate is worth least and was used longest ago.
        """
        self._turn = self._turn or [lane for lane in self._lanes.values() if len(lane.policy)]
        some, self._turn = self._turn[-_PACKED_OF:], self._turn[:-_PACKED_OF]
        lanes = [lane for lane in some if len(lane.policy)]
        if not lanes:
            return None
        return min(lanes, key=super()._keep).tenant  # type: ignore[return-value]

    def _tenant_of(self, entry: Entry) -> TierTenant:
        block: OrderedBlock = entry  # type: ignore[assignment]
        return self._spaces[block.block[:SPACE_BYTES]].tenant

    def _claim_of(self, tenant: Hashable) -> ShareClaim:
        assert isinstance(tenant, TierTenant)
        return tenant.claim

    def _has_candidates(self, lane: Lane) -> bool:
        return super()._has_candidates(lane) or self._oldest_row(lane.tenant) is not None

    def _age_of(self, entry: Entry) -> float:
        block: OrderedBlock = entry  # type: ignore[assignment]
        return block.used

    def _keep(self, lane: Lane) -> tuple[float, float]:
        row = self._oldest_row(lane.tenant)
        return super()._keep(lane) if row is None else (0.0, row.used)

    def recount(
        self,
        blocks: Iterable[OrderedBlock],
        rows: Iterable[PackedRow],
        takes: Callable[[int], int],
    ) -> None:
        """Recount everything; an AssertionError is a bug of kvkeep."""
        found: dict[TierTenant, list[int]] = {}
        waiting: dict[TierTenant, int] = {}
        for block in blocks:
            tenant = self._tenant_of(block)
            found.setdefault(tenant, []).append(takes(block.size))
            waiting[tenant] = waiting.get(tenant, 0) + block.evictable
        for row in rows:
            tenant = self.tenant(row.block)
            found.setdefault(tenant, []).append(takes(row.size))
            waiting.setdefault(tenant, 0)
        lanes = self._lanes
        assert lanes.keys() == found.keys()
        for tenant, sizes in found.items():
            lane = lanes[tenant]
            assert (lane.size, tenant.blocks) == (sum(sizes), len(sizes))
            assert waiting[tenant] == len(lane.policy) == len(lane.ages)
            assert lane.claim == tenant.claim
            assert lane.item or not self._has_candidates(lane)
        assert len(self) == sum(waiting.values())
        held: dict[TierTenant, list[int]] = {}
        for one in self._spaces.values():
            total = held.setdefault(one.tenant, [0, 0, 0])
            total[0] += one.bytes
            total[1] += one.blocks
            total[2] += 1
        for tenant, total in held.items():
            size = lanes[tenant].size if tenant in lanes else 0
            assert total == [size, tenant.blocks, tenant.spaces]
        weights = sum(lane.claim.weight for lane in lanes.values() if not lane.claim.public)
        assert abs(self._weight - weights) <= 1e-6 * (1 + weights)
