"""`Shares`: fair shares of the memory for tenants, in front of any policy."""

from __future__ import annotations

import heapq
from math import isfinite
from typing import TYPE_CHECKING

from kvkeep.core.errors import InvalidValue
from kvkeep.core.eviction.base import Entry, EvictionPolicy
from kvkeep.core.eviction.queues import AgeQueue

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from kvkeep.core.keys import Namespace

__all__ = ["MOST_WEIGHT", "Shares", "check_weights"]

MOST_WEIGHT = 1e6
_COMPARED = 8


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

    __slots__ = ("ages", "item", "pages", "policy", "public", "weight")

    def __init__(self, policy: EvictionPolicy, weight: float, *, public: bool) -> None:
        self.policy = policy
        self.weight = weight
        self.public = public
        self.ages = AgeQueue[float]()  # the candidates by last use
        self.pages = 0
        self.item = 0

    @property
    def level(self) -> float:
        """Its pages for each unit of weight."""
        return self.pages / self.weight


class Shares(EvictionPolicy):
    """Fair shares for tenants, by weight; a policy that ``make`` makes orders each tenant's pages.

    A tenant's share is its weight over the weights of all tenants that have pages. Victims are
    pages of tenants that have more than ``guaranteed`` of their share: of these, the tenant with
    the least recently used candidate gives one. So a tenant that floods the memory evicts its own
    pages and what others have beyond their shares, and no page waits unused for a tenant: what one
    leaves, others fill, and it takes its share back as it stores.

    A tenant is an `Entry.namespace`; one that ``weights`` does not name has weight 1. What all
    tenants share (`kvkeep.core.public`) is evicted when nothing else is left. ``guaranteed`` below
    1 releases what a tenant rarely needs: at 1 a small tenant keeps old pages that others would
    use. (`benchmarks/shares.py`)

    Memory: about 2 KiB for each tenant with pages, dropped with its last page, and 100 bytes for
    each candidate. Cost: O(log n) of n tenants for a victim, and for a change of what a tenant
    stores. Of many tenants above their shares, the eight farthest above are compared.
    """

    portions = True  # and `sized`, since pages are counted

    def __init__(
        self,
        make: Callable[[], EvictionPolicy],
        weights: Mapping[str, float] | None = None,
        *,
        guaranteed: float = 0.9,
    ) -> None:
        """Raises `InvalidValue` for a wrong weight, and for a policy with a history."""
        super().__init__()
        if not 0 <= guaranteed <= 1:
            raise InvalidValue(f"guaranteed is {guaranteed!r}; a part of 1 is needed, as 0.9")
        self.guaranteed = guaranteed
        self._make = make
        self.weights = check_weights(weights or {})
        first = make()
        if first.remembers or first.awaits:
            raise InvalidValue(
                f"{first.name} has a history of all prompts, which is not kept by tenant; shares "
                "go with fifo, gdsf, lfu, lru, priority, slru and tlru"
            )
        self.name = f"{first.name}+shares"
        self._size, self._block = 1, 1
        self._least = 1
        self._lanes: dict[Namespace | None, _Lane] = {}
        # A heap of (-level, number, namespace): an item counts while its number is the lane's.
        self._order: list[tuple[float, int, Namespace | None]] = []
        self._items = 0
        self._length = 0
        self._weights = 0.0  # of all lanes but the public ones
        self._spare = 0  # by how many pages the last victim's tenant is above its floor

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
            public = space is not None and bool(space.scope)
            lane = self._lanes[space] = _Lane(policy, weight, public=public)
            self._weights += 0.0 if public else weight
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
        heapq.heappush(self._order, (1.0 if lane.public else -lane.level, lane.item, space))
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
            self._weights -= 0.0 if lane.public else lane.weight
        elif lane.item:
            self._rank(child.namespace, lane)

    # --- order -------------------------------------------------------------------------------

    def add(self, entry: Entry) -> None:
        lane = self._lane(entry)
        self._count(entry, lane)
        lane.policy.add(entry)
        self._added(entry, lane)

    def discard(self, entry: Entry) -> None:
        lane = self._lane(entry)
        lane.policy.discard(entry)
        lane.ages.remove(entry)
        self._length -= 1

    def pop(self) -> Entry | None:
        """Remove a victim of one of the tenants that have most pages for their weights."""
        lane = self._first()
        if lane is None:
            return None
        self._spare = lane.pages
        if not lane.public:
            floor = self.guaranteed * self._size / self._weights
            lane = self._oldest(lane, floor)
            self._spare = int(lane.pages - floor * lane.weight)
        entry = lane.policy.pop()
        assert entry is not None
        lane.ages.remove(entry)
        self._length -= 1
        return entry

    def _oldest(self, first: _Lane, floor: float) -> _Lane:
        """Return the lane with the oldest candidate, of the highest that are above ``floor``.

        That is ``first``, the highest, if no other is above.
        """
        best, age = first, first.ages.oldest
        aside = [heapq.heappop(self._order)]
        while len(aside) < _COMPARED:
            lane = self._first()
            if lane is None or lane.public or lane.level <= floor:
                break
            aside.append(heapq.heappop(self._order))
            oldest = lane.ages.oldest
            assert age is not None
            assert oldest is not None
            if oldest < age:
                best, age = lane, oldest
        for item in aside:
            heapq.heappush(self._order, item)
        return best

    def portion(self, entry: Entry) -> int:
        """Return how many pages to take before its tenant is at its floor; 0.1 % at least."""
        most = self._lane(entry).policy.portion(entry)
        return min(most, max(self._spare, self._least))

    def put_back(self, entry: Entry) -> None:
        lane = self._lane(entry)
        self._count(entry, lane)
        lane.policy.put_back(entry)
        self._added(entry, lane)

    def _added(self, entry: Entry, lane: _Lane) -> None:
        """Note that the policy of ``lane`` has one more candidate."""
        lane.ages.push(entry, entry.last_used)
        self._length += 1
        if not lane.item:
            self._rank(entry.namespace, lane)

    def __len__(self) -> int:
        return self._length

    def describe(self, entry: Entry) -> str:
        """Return the rank of its tenant, and the description by its tenant's policy."""
        lane = self._lane(entry)
        return f"of {lane.pages} pages of its tenant, {lane.policy.describe(entry)}"
