"""`TierShares`: whose blocks leave a tier: fair shares for tenants, and namespaces with quotas."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import repeat
from math import inf
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from kvkeep.core.eviction import Entry
from kvkeep.core.eviction.shares import Lane, ShareClaim, Shares, check_weights
from kvkeep.core.keys import SPACE_BYTES
from kvkeep.store.tiers.cold_blocks import ColdBlocks

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping

    from kvkeep.core.eviction import EvictionPolicy

__all__ = ["IndexedBlock", "TenantWeights", "TierLane", "TierShares"]

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


_MOST: Final = (inf, 0.0, 0)  # behind all ranks of victims
_REST: Final = _Owner("", None)  # all spaces without a quota, where tenants have no shares


class IndexedBlock(Entry):
    """A block that a policy orders; `size` is the bytes of its record.

    Attributes:
        used: last use, in Unix seconds; the time to live counts from it.
        noted: the last use that was reported to the backend.
        pinned: end of its pin, in Unix seconds; 0 if it is not pinned.
        held: number of writers and requests that need it now.
        lane: whose policy orders it.
        round: number of the last listing that found it.
    """

    __slots__ = ("block", "held", "lane", "noted", "pinned", "round", "used")

    def __init__(self, block: bytes, size: int, used: float, round_: int, lane: TierLane) -> None:
        super().__init__()
        self.block = block
        self.lane = lane
        self.size = size
        self.used = self.noted = used
        self.pinned = 0.0
        self.held = 0
        self.round = round_


class TierLane(Lane):
    """The blocks of one owner: a policy orders them, but for the cold ones, which go before."""

    __slots__ = ("cold",)

    def __init__(self, tenant: Hashable, policy: EvictionPolicy, claim: ShareClaim) -> None:
        super().__init__(tenant, policy, claim)
        self.cold = ColdBlocks()


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
    """

    _lane_type = TierLane
    _lanes: dict[Hashable, TierLane]  # type: ignore[assignment]

    def __init__(
        self, make: Callable[[], EvictionPolicy], shares: TenantWeights | None, budget: int | None
    ) -> None:
        super().__init__(make, None if shares is None else shares.weights)
        self.fair = shares is not None
        self._owners: dict[bytes, _Owner] = {}  # of announced spaces, and those with quotas
        self._most = _MOST_SPACES
        self.fit(budget or 1)
        if shares is None:  # most tiers have one lane, which needs no policy beside the first
            self._lanes[_REST] = TierLane(_REST, self.first, ShareClaim())
            self._lanes[_REST].item = 1
            return
        self.name = f"{self.first.name}+shares"
        for space, name in shares.spaces.items():
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

    def _claim_of(self, tenant: Hashable) -> ShareClaim:
        assert isinstance(tenant, _Owner)
        if not tenant.announced:
            return ShareClaim()
        if tenant.name is None:
            return ShareClaim(public=True)
        return ShareClaim(self.weights.get(tenant.name, 1.0))

    # --- lanes -------------------------------------------------------------------------------

    def lanes(self) -> list[TierLane]:
        """Return the lanes of all owners; without shares also of those that store nothing."""
        return list(self._lanes.values())

    def lane(self, block: bytes) -> TierLane | None:
        """Return the lane of ``block``, None if its owner has none."""
        return self._lanes.get(self.owner(block) if self.fair or self._owners else _REST)

    def lane_for(self, block: bytes) -> TierLane:
        """Return the lane of ``block``; its owner has one from now on."""
        lane = self.lane(block)
        return self._new_lane(self.owner(block)) if lane is None else lane

    def lane_of(self, owner: Hashable) -> TierLane:
        """Return the lane of an owner, who has one from now on."""
        return self._lanes.get(owner) or self._new_lane(owner)

    def _new_lane(self, owner: Hashable) -> TierLane:
        lane = self._lane(owner)
        assert isinstance(lane, TierLane)
        lane.item = 0 if self.fair else 1  # numbers rank lanes, where these have shares
        return lane

    def level_changed(self, lane: TierLane, change: int) -> None:
        """Rank a lane whose ``size`` changed anew; one that stores nothing any longer goes."""
        if self.fair and change:
            if not lane.size:
                self._emptied(lane)
            elif change > 0 or not lane.item:  # it may have cold blocks alone
                self._rank(lane)

    def ranked(self, lane: TierLane) -> None:
        """Rank a lane that has a candidate again."""
        self._rank(lane)

    # --- order -------------------------------------------------------------------------------

    def givers(self) -> Iterator[TierLane]:
        """Yield the lane that gives each next victim.

        Between two of them the victim leaves, and nothing else changes. So victims in a row of one
        owner cost one comparison of owners.
        """
        return self._choose() if self.fair or len(self._lanes) > 1 else repeat(self._lanes[_REST])

    def _choose(self) -> Iterator[TierLane]:
        while True:
            lanes: Iterable[Any] = self._givers() if self.fair else self._lanes.values()
            least = rival = _MOST
            giver: TierLane | None = None
            for lane in lanes:
                rank = self._first_of(lane)
                if rank is not None and rank < least:
                    least, rival, giver = rank, least, lane
                elif rank is not None and rank < rival:
                    rival = rank
            if giver is None:
                return
            yield giver
            if rival is _MOST:
                continue
            floor = self._floor() * giver.claim.weight if self.fair else 0.0
            while giver.size > floor and (rank := self._first_of(giver)) and rank <= rival:
                yield giver

    def _first_of(self, lane: TierLane) -> tuple[float, float, int] | None:
        """Return what ranks the next victim of a lane, the least first; None if it has none."""
        row = lane.cold.oldest()
        if row is not None:
            return 0.0, row.used, 0
        worth = lane.policy.least()
        if worth is not None:
            return worth, 0.0, 0
        entry = lane.policy.peek()
        assert entry is None or isinstance(entry, IndexedBlock)
        if entry is None:
            return None
        # With quotas alone the order of uses decides, which a listing does not change.
        return 0.0, entry.used if self.fair else inf, entry.last_used

    def cooled(self, lane: TierLane) -> TierLane:
        """Return the lane whose next victims become cold before a block of ``lane`` is added."""
        if not self.fair:
            return lane
        lanes = [one for one in self._givers() if len(one.policy)]
        return min(lanes, key=self._keep) if lanes else lane  # type: ignore[return-value]

    def _has_candidates(self, lane: Lane) -> bool:
        return len(lane.policy) > 0 or len(lane.cold) > 0  # type: ignore[attr-defined]

    def recount(self, candidates: Iterable[IndexedBlock], taken: Mapping[bytes, int]) -> None:
        """Recount everything; ``taken`` are the bytes of each space. May raise AssertionError."""
        sizes: dict[Hashable, int] = {}
        for space, size in taken.items():
            sizes[self.owner(space)] = sizes.get(self.owner(space), 0) + size
        assert sizes == {owner: lane.size for owner, lane in self._lanes.items() if lane.size}
        counts: dict[Hashable, int] = dict.fromkeys(self._lanes, 0)
        for entry in candidates:
            assert self.lane(entry.block) is entry.lane
            counts[entry.lane.tenant] += 1
        for owner, lane in self._lanes.items():
            assert counts[owner] == len(lane.policy)
            assert lane.item or not self._has_candidates(lane)
            assert lane.claim == self._claim_of(owner) or owner == _REST
            assert all(self.owner(row.block) == owner for row in lane.cold)
