"""`TierShares`: fair shares of a tier for tenants, whose blocks are told by their space."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from kvkeep.core.eviction.shares import ShareClaim, Shares, check_weights
from kvkeep.core.keys import SPACE_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping

    from kvkeep.core.eviction import Entry, EvictionPolicy
    from kvkeep.core.eviction.shares import Lane
    from kvkeep.store.tiers.cold_blocks import ColdBlock
    from kvkeep.store.tiers.index import IndexedBlock

__all__ = ["TenantWeights", "TierShares"]

_MOST_SPACES: Final = 1 << 14  # announced ones, beyond which those without blocks are forgotten


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


class _Owner(NamedTuple):
    """Who has one share: a tenant by name, or a ``space`` with a quota or of an unknown tenant."""

    name: str | None
    space: bytes | None
    announced: bool = True


_REST: Final = _Owner("", None)  # all spaces without a quota, where tenants have no shares


class TierShares(Shares):
    """`Shares` of a tier, in bytes that blocks take there, cold ones included.

    Blocks name a space only; `announced` says whose it is. All spaces of a tenant have one share
    together. A space that was not announced, such as one that a listing found, counts as a tenant
    of weight 1. A space with a quota counts as a tenant of its own, with the weight of its tenant.
    Without ``shares`` all other spaces are one owner, and the next victim is the least valuable of
    all owners' candidates.

    Thread safety: none; the index calls it under its lock. Memory, beside that of `Shares`: 400
    bytes for each space.

    Arguments:
        make: makes the policy of each owner.
        shares: the weights.
        budget: bytes of the tier; without, no tenant is below its share.
        oldest_cold: returns the oldest cold block of an owner, None if it has none. These are
            evicted before the candidates of its policy.
    """

    def __init__(
        self,
        make: Callable[[], EvictionPolicy],
        shares: TenantWeights | None,
        budget: int | None,
        oldest_cold: Callable[[Hashable], ColdBlock | None],
    ) -> None:
        self.fair = shares is not None
        if shares is None:
            super().__init__(make, guaranteed=0.0)
        else:
            super().__init__(make, shares.weights)
        self._oldest_cold = oldest_cold
        self._owners: dict[bytes, _Owner] = {}  # of announced spaces, and those with quotas
        self._most = _MOST_SPACES
        self.fit(budget or 1)
        for space, name in () if shares is None else shares.spaces.items():
            self.own(space, self.announced(space, name, ()))

    # --- owners ------------------------------------------------------------------------------

    def owner(self, block: bytes) -> _Owner:
        """Return the owner of ``block``, or of a space."""
        space = block[:SPACE_BYTES]
        owner = self._owners.get(space)
        if owner is not None:
            return owner
        return _Owner(None, space, announced=False) if self.fair else _REST

    def own(self, space: bytes, owner: Hashable) -> None:
        """Let ``owner`` have a space."""
        assert isinstance(owner, _Owner)
        self._owners[space] = owner

    def announced(self, space: bytes, name: str | None, stored: Collection[bytes]) -> _Owner:
        """Return the owner of a space of the tenant ``name``; ``stored`` are spaces with blocks.

        None stands for what all tenants share.
        """
        if len(self._owners) >= self._most:
            self._owners = {
                known: owner
                for known, owner in self._owners.items()
                if known in stored or owner.space is not None or owner.name in self.weights
            }
            self._most = max(_MOST_SPACES, 2 * len(self._owners))
        before = self._owners.get(space)
        limited = before is not None and before.space is not None
        return _Owner(name, space if limited else None)

    def limited(self, space: bytes) -> _Owner:
        """Return the owner of a space with a quota."""
        return self.owner(space)._replace(space=space)

    def spaces_of(self, owner: Hashable) -> tuple[Collection[bytes], bool]:
        """Return the spaces of an owner; or True, and those of all others."""
        assert isinstance(owner, _Owner)
        if owner.space is not None:
            return (owner.space,), False
        if not self.fair:
            return self._owners, True
        return [space for space, one in self._owners.items() if one == owner], False

    def _claim_of(self, tenant: Hashable) -> ShareClaim:
        assert isinstance(tenant, _Owner)
        if not tenant.announced:
            return ShareClaim()
        if tenant.name is None:
            return ShareClaim(public=True)
        return ShareClaim(self.weights.get(tenant.name, 1.0))

    # --- order -------------------------------------------------------------------------------

    def resize(self, owner: Hashable, change: int) -> None:
        """Count a change of the bytes that the blocks of ``owner`` take."""
        if not change:
            return
        lane = self._lane(owner)
        lane.size += change
        if not lane.size:
            self._emptied(lane)
        elif change > 0 or not lane.item:  # it may have cold blocks alone
            self._rank(lane)

    def givers(self) -> Iterator[Hashable]:
        """Yield the owner that gives each next victim.

        Between two of them the victim leaves, and nothing else changes. So victims in a row of one
        owner cost one comparison of owners.
        """
        while lanes := self._givers():
            lane, rival = lanes[0], None
            if len(lanes) > 1:
                ranks = sorted((self._keep(lane), at) for at, lane in enumerate(lanes))
                lane, rival = lanes[ranks[0][1]], ranks[1][0]
            yield lane.tenant
            if rival is not None:
                floor = self._floor()
                while lane.item and lane.level > floor and self._first_of(lane) <= rival:
                    yield lane.tenant

    def _first_of(self, lane: Lane) -> tuple[float, Any]:
        """Return `_keep` of a lane, or the greatest value if it has no candidates."""
        return self._keep(lane) if self._has_candidates(lane) else (inf, inf)

    def pop_of(self, owner: Hashable) -> Entry | None:
        """Remove and return the next victim of an owner's policy; None if that has none."""
        lane = self._lanes.get(owner)
        return None if lane is None else self._pop_of(lane)

    def cooled(self, block: bytes) -> Hashable:
        """Return the owner whose next victims become cold before ``block`` is added."""
        lanes = [lane for lane in self._givers() if len(lane.policy)]
        return min(lanes, key=super()._keep).tenant if lanes else self.owner(block)

    def _has_candidates(self, lane: Lane) -> bool:
        return super()._has_candidates(lane) or self._oldest_cold(lane.tenant) is not None

    def _age_of(self, entry: Entry) -> tuple[float, float]:
        block: IndexedBlock = entry  # type: ignore[assignment]
        return block.used, block.last_used

    def _keep(self, lane: Lane) -> tuple[float, Any]:
        row = self._oldest_cold(lane.tenant)
        return super()._keep(lane) if row is None else (0.0, (row.used, 0.0))

    def recount(self, candidates: Iterable[Entry], taken: Mapping[bytes, int]) -> None:
        """Recount everything; ``taken`` are the bytes of each space. May raise AssertionError."""
        sizes: dict[Hashable, int] = {}
        for space, size in taken.items():
            sizes[self.owner(space)] = sizes.get(self.owner(space), 0) + size
        assert sizes == {owner: lane.size for owner, lane in self._lanes.items()}
        counts: dict[Hashable, int] = dict.fromkeys(sizes, 0)
        for entry in candidates:
            counts[entry.namespace] += 1
        for owner, lane in self._lanes.items():
            assert counts[owner] == len(lane.policy) == len(lane.ages)
            assert lane.item or not self._has_candidates(lane)
            assert lane.claim == self._claim_of(owner)
        assert len(self) == sum(counts.values())
