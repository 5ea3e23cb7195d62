"""`Shares`: fair shares of the memory for tenants, in front of any policy."""

from __future__ import annotations

import heapq
from math import isfinite
from typing import TYPE_CHECKING

from kvkeep.core.errors import InvalidValue
from kvkeep.core.eviction.base import Entry, EvictionPolicy

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from kvkeep.core.keys import Namespace

__all__ = ["MOST_WEIGHT", "Shares", "check_weights"]

MOST_WEIGHT = 1e6


def check_weights(weights: Mapping[str, float]) -> dict[str, float]:
    """Return the weights of tenants; `InvalidValue` for one that is not above 0 … 1,000,000."""
    for tenant, weight in weights.items():
        if isinstance(weight, bool) or not isfinite(weight) or not 0 < weight <= MOST_WEIGHT:
            raise InvalidValue(
                f"the share of {tenant!r} is {weight!r}; a weight above 0, at most "
                f"{MOST_WEIGHT:.0f}, is needed"
            )
    return {tenant: float(weight) for tenant, weight in weights.items()}


class _Lane:
    """The candidates of one namespace, in the order of a policy of its own.

    ``pages`` are all that it stores, held ones included. ``item`` numbers its newest item in the
    queue of lanes; 0 while it has no candidates.
    """

    __slots__ = ("item", "pages", "policy", "weight")

    def __init__(self, policy: EvictionPolicy, weight: float) -> None:
        self.policy = policy
        self.weight = weight
        self.pages = 0
        self.item = 0

    @property
    def level(self) -> float:
        """Its pages for each unit of weight; the lane with the highest level gives a victim."""
        return self.pages / self.weight


class Shares(EvictionPolicy):
    """Evicts from the tenant that has most pages for its weight, in the order of a policy.

    A tenant's share is its weight over the weights of all tenants that have pages. No page waits
    unused for a tenant: what one does not fill, others fill, and it takes its share back as it
    stores. A tenant that floods the memory is above its share, and so evicts its own pages, by a
    policy that ``make`` makes for each tenant. (This is max-min fairness.)

    A tenant is an `Entry.namespace`; one that ``weights`` does not name has weight 1. What all
    tenants share (`kvkeep.core.public`) is evicted when nothing else is left.

    Memory: about 1.5 KiB for each tenant with pages, dropped with its last page. Cost: O(log n) of
    n tenants for a victim, and for a change of what a tenant stores. A victim's tail goes only
    until the next tenant has most, but 0.1 % of the memory at least.
    """

    portions = True  # and `sized`, since pages are counted

    def __init__(
        self, make: Callable[[], EvictionPolicy], weights: Mapping[str, float] | None = None
    ) -> None:
        super().__init__()
        self._make = make
        self.weights = check_weights(weights or {})
        first = make()
        if first.remembers:
            raise InvalidValue(
                f"{first.name} has a history of all prompts, which is not kept by tenant; shares "
                "go with fifo, gdsf, lfu, lru, priority, s3fifo, slru and tlru"
            )
        self.name = f"{first.name}+shares"
        self._size, self._block = 1, 1
        self._least = 1
        self._lanes: dict[Namespace | None, _Lane] = {}
        # A heap of (-level, number, namespace): an item counts while its number is the lane's.
        self._order: list[tuple[float, int, Namespace | None]] = []
        self._items = 0
        self._length = 0
        self._spare = 0  # by how many pages the last victim's tenant is above the next

    def pages(self) -> dict[Namespace | None, int]:
        """Return the pages that each tenant stores."""
        return {space: lane.pages for space, lane in self._lanes.items()}

    # --- lanes -------------------------------------------------------------------------------

    def _lane(self, entry: Entry) -> _Lane:
        space = entry.namespace
        lane = self._lanes.get(space)
        if lane is None:
            policy = self._make()
            policy.fit(self._size, self._block)
            weight = 1.0 if space is None else self.weights.get(space.tenant, 1.0)
            lane = self._lanes[space] = _Lane(policy, weight)
        return lane

    def _count(self, entry: Entry, lane: _Lane) -> None:
        """Count what ``entry`` gained or lost since it was counted."""
        change = entry.size - entry.counted
        if change:
            entry.counted = entry.size
            lane.pages += change
            if lane.item:
                self._rank(entry.namespace, lane)

    def _rank(self, space: Namespace | None, lane: _Lane) -> None:
        """Put a lane with candidates to its present place in the queue."""
        self._items += 1
        lane.item = self._items
        public = space is not None and bool(space.scope)
        heapq.heappush(self._order, (1.0 if public else -lane.level, lane.item, space))
        if len(self._order) > 4 * len(self._lanes) + 64:
            self._order = [item for item in self._order if self._is_newest(item)]
            heapq.heapify(self._order)

    def _is_newest(self, item: tuple[float, int, Namespace | None]) -> bool:
        lane = self._lanes.get(item[2])
        return lane is not None and lane.item == item[1]

    def _first(self) -> _Lane | None:
        """Return the lane with the highest level, of those with candidates."""
        while self._order:
            item = self._order[0]
            if self._is_newest(item):
                lane = self._lanes[item[2]]
                if len(lane.policy):
                    return lane
                lane.item = 0
            heapq.heappop(self._order)
        return None

    # --- events ------------------------------------------------------------------------------

    def fit(self, size: int, block: int) -> None:
        """Receive the size of the memory; every tenant's policy is told all of it."""
        self._size, self._block = size, block
        self._least = max(1, size >> 10)
        for lane in self._lanes.values():
            lane.policy.fit(size, block)

    def _timed(self, lane: _Lane) -> EvictionPolicy:
        """Return a lane's policy, whose clock is that of all."""
        policy = lane.policy
        moment = max(self._time, policy.moment)
        policy.begin_at(moment)
        self._time = moment + 1
        return policy

    def stored(self, entry: Entry, priority: int, *, known: bool = False) -> None:
        lane = self._lane(entry)
        self._timed(lane).stored(entry, priority, known=known)
        self._count(entry, lane)

    def grown(self, entry: Entry) -> None:
        lane = self._lane(entry)
        self._timed(lane).grown(entry)
        self._count(entry, lane)

    def hit(self, entry: Entry) -> None:
        if entry.counted:
            self._timed(self._lane(entry)).hit(entry)
        else:  # a root, which stores nothing
            super().hit(entry)

    def used(self, entry: Entry) -> None:
        if entry.counted:
            self._timed(self._lane(entry)).used(entry)
        else:
            super().used(entry)

    def split(self, upper: Entry, lower: Entry) -> None:
        self._lane(lower).policy.split(upper, lower)
        upper.counted = upper.size
        lower.counted -= upper.size

    def inherit(self, parent: Entry, child: Entry) -> None:
        lane = self._lane(child)
        lane.policy.inherit(parent, child)
        lane.pages -= child.counted
        child.counted = 0
        if not lane.pages:
            del self._lanes[child.namespace]
        elif lane.item:
            self._rank(child.namespace, lane)

    # --- order -------------------------------------------------------------------------------

    def add(self, entry: Entry) -> None:
        lane = self._lane(entry)
        self._count(entry, lane)
        lane.policy.add(entry)
        self._length += 1
        if not lane.item:
            self._rank(entry.namespace, lane)

    def discard(self, entry: Entry) -> None:
        self._lane(entry).policy.discard(entry)
        self._length -= 1

    def pop(self) -> Entry | None:
        """Remove the victim of the tenant with most pages for its weight."""
        lane = self._first()
        if lane is None:
            return None
        entry = lane.policy.pop()
        assert entry is not None
        self._length -= 1
        heapq.heappop(self._order)
        lane.item = 0
        other = self._first()
        if len(lane.policy):
            self._rank(entry.namespace, lane)
        self._spare = lane.pages
        if other is not None and not _is_public(entry):
            self._spare -= int(other.level * lane.weight)
        return entry

    def portion(self, entry: Entry) -> int:
        """Return how many pages to take before another tenant has most."""
        most = self._lane(entry).policy.portion(entry)
        return min(most, max(self._spare, self._least))

    def put_back(self, entry: Entry) -> None:
        lane = self._lane(entry)
        self._count(entry, lane)
        lane.policy.put_back(entry)
        self._length += 1
        if not lane.item:
            self._rank(entry.namespace, lane)

    def __len__(self) -> int:
        return self._length

    def describe(self, entry: Entry) -> str:
        """Return the rank of its tenant, and the description by its tenant's policy."""
        lane = self._lane(entry)
        return f"{lane.level:.0f} pages a share, {lane.policy.describe(entry)}"


def _is_public(entry: Entry) -> bool:
    return entry.namespace is not None and bool(entry.namespace.scope)
