"""`Lanes`: a policy for each tenant of a memory, and which tenant has most for its weight."""

from __future__ import annotations

import heapq
from collections import OrderedDict
from typing import TYPE_CHECKING, Final

from kvkeep.core.eviction.queues import AgeQueue

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from kvkeep.core.eviction.base import EvictionPolicy
    from kvkeep.core.keys import Namespace
    from kvkeep.core.returns import Returns

__all__ = ["Lane", "Lanes"]

_MOST_ABSENT: Final = 64  # tenants without pages whose histories are kept


class Lane:
    """The candidates of one namespace, in the order of a policy of its own.

    ``pages`` are all that it stores, held ones included. ``item`` numbers its newest item in the
    queue of lanes; 0 while it has no candidates. ``fitted`` is the memory that its policy was told.
    """

    __slots__ = ("ages", "fitted", "item", "pages", "policy", "public", "weight")

    def __init__(self, policy: EvictionPolicy, weight: float, *, public: bool) -> None:
        self.policy = policy
        self.weight = weight
        self.public = public
        self.ages = AgeQueue[float]()  # the candidates by last use
        self.pages = 0
        self.fitted = 0
        self.item = 0

    @property
    def level(self) -> float:
        """Its pages for each unit of weight."""
        return self.pages / self.weight


class Lanes:
    """The lanes of tenants with pages, ordered by level, and the histories of some without.

    A policy with a history is told its tenant's share of the memory, and told anew when that has
    doubled or halved. Histories of tenants without pages are kept for one memory at most, and for
    64 tenants. Cost: O(log n) of n tenants to `rank` one. Thread safety: none.
    """

    def __init__(self, make: Callable[[], EvictionPolicy], weights: Mapping[str, float]) -> None:
        self._make = make
        self._named = weights
        self._size, self._block = 1, 1
        self._attended: tuple[Returns, Callable[[], float]] | None = None
        self._lanes: dict[Namespace | None, Lane] = {}
        self._absent: OrderedDict[Namespace | None, Lane] = OrderedDict()  # without pages
        self._absent_size = 0  # what they are fitted to
        # A heap of (-level, number, namespace): an item counts while its number is the lane's.
        self._order: list[tuple[float, int, Namespace | None]] = []
        self._items = 0
        self.weights = 0.0
        """Of all lanes with pages but the public ones."""

    def __len__(self) -> int:
        return len(self._lanes)

    def items(self) -> Iterator[tuple[Namespace | None, Lane]]:
        """Return the tenants with pages and their lanes."""
        return iter(self._lanes.items())

    # --- tenants -----------------------------------------------------------------------------

    def fit(self, size: int, block: int) -> None:
        """Receive the size of the memory and of a block."""
        self._size, self._block = size, block
        self._absent.clear()
        self._absent_size = 0
        for lane in self._lanes.values():
            lane.fitted = 0
            self._fit(lane, self.weights - lane.weight)

    def attend(self, returns: Returns, clock: Callable[[], float]) -> None:
        """Let all policies learn together of waits."""
        self._attended = returns, clock
        for lane in (*self._lanes.values(), *self._absent.values()):
            lane.policy.attend(returns, clock)

    def stores(self, space: Namespace | None) -> Lane:
        """Return the lane of a tenant that has pages, or gets some now."""
        lane = self._lanes.get(space)
        if lane is None:
            lane = self._lanes[space] = self._returned(space)
            self.weights += 0.0 if lane.public else lane.weight
        return lane

    def asks(self, space: Namespace | None) -> Lane:
        """Return the lane of a tenant whose prompt is to be recorded, with or without pages."""
        lane = self._lanes.get(space)
        if lane is not None:
            self._fit(lane, self.weights - lane.weight)
            return lane
        lane = self._returned(space)
        self._leave(space, lane)
        return lane

    def emptied(self, space: Namespace | None) -> None:
        """Record that a tenant has no pages any longer."""
        lane = self._lanes.pop(space)
        self.weights -= 0.0 if lane.public else lane.weight
        lane.item = 0
        if lane.policy.remembers:
            self._leave(space, lane)

    def _returned(self, space: Namespace | None) -> Lane:
        """Return the lane of a tenant without pages, which is no longer kept as such."""
        lane = self._absent.pop(space, None)
        if lane is not None:
            self._absent_size -= lane.fitted
            return lane
        weight = 1.0 if space is None else self._named.get(space.tenant, 1.0)
        lane = Lane(self._make(), weight, public=space is not None and bool(space.scope))
        self._fit(lane, self.weights)
        if self._attended is not None:
            lane.policy.attend(*self._attended)
        return lane

    def _leave(self, space: Namespace | None, lane: Lane) -> None:
        """Keep the history of a tenant without pages, and forget others if there are too many."""
        self._absent[space] = lane
        self._absent_size += lane.fitted
        while len(self._absent) > _MOST_ABSENT or self._absent_size > max(self._size, lane.fitted):
            self._absent_size -= self._absent.popitem(last=False)[1].fitted

    def _fit(self, lane: Lane, others: float) -> None:
        """Tell a policy with a history its tenant's share of the memory, others all of it.

        ``others`` is the weight of all other tenants with pages.
        """
        size = self._size
        if lane.policy.remembers and not lane.public:
            size = max(1, int(size * lane.weight / (max(0.0, others) + lane.weight)))
        if not lane.fitted or not lane.fitted <= 2 * size <= 4 * lane.fitted:
            lane.fitted = size
            lane.policy.fit(size, self._block)

    # --- order -------------------------------------------------------------------------------

    def rank(self, space: Namespace | None, lane: Lane) -> None:
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

    def first(self) -> Lane | None:
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

    def highest(self, count: int, floor: float) -> list[Lane]:
        """Return the lane with the highest level, and the next ones above ``floor``.

        At most ``count`` in all; there is one with candidates. Public ones do not count.
        """
        found: list[Lane] = []
        aside = []
        while len(found) < count:
            lane = self.first()
            if lane is None or (found and (lane.public or lane.level <= floor)):
                break
            found.append(lane)
            aside.append(heapq.heappop(self._order))
        for item in aside:
            heapq.heappush(self._order, item)
        return found
