"""`Lanes`: a policy for each tenant of a memory, and which tenant has most for its weight."""

from __future__ import annotations

import heapq
from fractions import Fraction
from typing import TYPE_CHECKING, NamedTuple

from kvkeep.core.eviction.queues import AgeQueue

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterator

    from kvkeep.core.eviction.base import EvictionPolicy
    from kvkeep.core.returns import Returns

__all__ = ["Lane", "Lanes", "ShareClaim"]


class ShareClaim(NamedTuple):
    """What a tenant may claim of a memory.

    Attributes:
        weight: of its share.
        public: whether all tenants share what it stores; that is evicted last.
        most: what it may store at most, in the unit of `Entry.size`; None: all.
    """

    weight: float = 1.0
    public: bool = False
    most: int | None = None


class Lane:
    """The candidates of one tenant, in the order of a policy of its own.

    ``size`` is all that it stores, held entries included, in the unit of `Entry.size`. ``item``
    numbers its newest item in the queue of lanes; 0 while it has no candidates.
    """

    __slots__ = ("ages", "claim", "item", "policy", "size", "tenant")

    def __init__(self, tenant: Hashable, policy: EvictionPolicy, claim: ShareClaim) -> None:
        self.tenant = tenant
        self.policy = policy
        self.claim = claim
        self.ages = AgeQueue[float]()  # the candidates by last use
        self.size = 0
        self.item = 0

    @property
    def level(self) -> float:
        """Its size for each unit of weight."""
        return self.size / self.claim.weight

    @property
    def weight(self) -> float:
        """Its part of the weights of all lanes; 0 for the public one."""
        return 0.0 if self.claim.public else self.claim.weight


def _place(lane: Lane) -> float:
    return 1.0 if lane.claim.public else -lane.level


class Lanes:
    """The lanes of tenants that store something, by level.

    Cost: O(log n) of n tenants to `rank` one. Thread safety: none.

    Arguments:
        make: makes the policy of a tenant.
        claim_of: returns the claim of a tenant; see `reclaim`.
        aside: whether a tenant without candidates in its policy has others elsewhere.
    """

    def __init__(
        self,
        make: Callable[[], EvictionPolicy],
        claim_of: Callable[[Hashable], ShareClaim],
        aside: Callable[[Hashable], bool] = lambda _tenant: False,
    ) -> None:
        self._make = make
        self._claim_of = claim_of
        self._aside = aside
        self._attended: tuple[Returns, Callable[[], float]] | None = None
        self._lanes: dict[Hashable, Lane] = {}
        # A heap of (-level, number, tenant): an item counts while its number is the lane's. Its
        # level may be too high, until it comes first.
        self._order: list[tuple[float, int, Hashable]] = []
        self._items = 0
        self._sum = Fraction()  # of weights, exactly: a float would drift as tenants come and go
        self.weights = 0.0
        """The weights of all lanes that store something but the public ones."""

    def __len__(self) -> int:
        return len(self._lanes)

    def _weigh(self, change: float) -> None:
        """Add a lane's weight to those of all, or subtract it."""
        self._sum += Fraction(change)
        self.weights = float(self._sum)

    def __iter__(self) -> Iterator[Lane]:
        """Return the lanes of tenants that store something."""
        return iter(self._lanes.values())

    def get(self, tenant: Hashable) -> Lane | None:
        """Return the lane of a tenant; None if it stores nothing."""
        return self._lanes.get(tenant)

    # --- tenants -----------------------------------------------------------------------------

    def attend(self, returns: Returns, clock: Callable[[], float]) -> None:
        """Let all policies learn together of waits."""
        self._attended = returns, clock
        for lane in self._lanes.values():
            lane.policy.attend(returns, clock)

    def stores(self, tenant: Hashable) -> Lane:
        """Return the lane of a tenant that stores something, or does so now."""
        lane = self._lanes.get(tenant)
        if lane is None:
            lane = self._lanes[tenant] = Lane(tenant, self._make(), self._claim_of(tenant))
            if self._attended is not None:
                lane.policy.attend(*self._attended)
            self._weigh(lane.weight)
        return lane

    def emptied(self, tenant: Hashable) -> None:
        """Record that a tenant stores nothing any longer."""
        lane = self._lanes.pop(tenant)
        self._weigh(-lane.weight)
        lane.item = 0

    def reclaim(self, tenant: Hashable) -> None:
        """Take over the claim of a tenant, which has changed."""
        lane = self._lanes.get(tenant)
        if lane is not None:
            self._weigh(-lane.weight)
            lane.claim = self._claim_of(tenant)
            self._weigh(lane.weight)
            self.rank(lane)

    # --- order -------------------------------------------------------------------------------

    def rank(self, lane: Lane) -> None:
        """Put a lane with candidates to its present place in the queue.

        Call it after its first candidate came, and after its level rose.
        """
        self._items += 1
        lane.item = self._items
        heapq.heappush(self._order, (_place(lane), lane.item, lane.tenant))
        if len(self._order) > 4 * len(self._lanes) + 64:
            self._order = [item for item in self._order if self._is_newest(item)]
            heapq.heapify(self._order)

    def _is_newest(self, item: tuple[float, int, Hashable]) -> bool:
        lane = self._lanes.get(item[2])
        return lane is not None and lane.item == item[1]

    def first(self) -> Lane | None:
        """Return the lane with the highest level, of those with candidates."""
        while self._order:
            item = self._order[0]
            if self._is_newest(item):
                lane = self._lanes[item[2]]
                if len(lane.policy) or self._aside(lane.tenant):
                    place = _place(lane)
                    if place <= item[0]:
                        return lane
                    heapq.heapreplace(self._order, (place, *item[1:]))
                    continue
                lane.item = 0
            heapq.heappop(self._order)
        return None

    def highest(self, count: int, floor: float) -> list[Lane]:
        """Return the lane with the highest level, and the next ones above ``floor``.

        At most ``count`` in all; there is one with candidates. Public ones do not count.
        """
        found: list[Lane] = []
        kept = []
        while len(found) < count:
            lane = self.first()
            if lane is None or (found and (lane.claim.public or lane.level <= floor)):
                break
            found.append(lane)
            kept.append(heapq.heappop(self._order))
        for item in kept:
            heapq.heappush(self._order, item)
        return found
