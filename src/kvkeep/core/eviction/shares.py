"""`Shares`: fair shares of the memory for tenants, in front of any policy."""

from __future__ import annotations

import heapq
from fractions import Fraction
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from kvkeep.core.errors import InvalidValue
from kvkeep.core.prefix.policy import EvictionPolicy

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Mapping

    import numpy.typing as npt

    from kvkeep.core.keys import Namespace
    from kvkeep.core.prefix.node import Entry, Node

__all__ = ["MOST_WEIGHT", "Lane", "ShareClaim", "Shares", "check_weights"]

LEAST_WEIGHT: Final = 0.001
MOST_WEIGHT: Final = 1e6
_COMPARED: Final = 8


class ShareClaim(NamedTuple):
    """What a tenant may claim of a memory.

    Attributes:
        weight: of its share.
        public: whether all tenants share what it stores; that is evicted last.
    """

    weight: float = 1.0
    public: bool = False


class Lane:
    """The candidates of one tenant that stores something, in the order of a policy of its own.

    ``size`` is all that it stores, held entries included, in the unit of `Entry.size`. ``item``
    numbers its newest item in the queue of lanes; 0 while it is in none.
    """

    __slots__ = ("claim", "item", "policy", "size", "tenant")

    def __init__(self, tenant: Hashable, policy: EvictionPolicy, claim: ShareClaim) -> None:
        self.tenant = tenant
        self.policy = policy
        self.claim = claim
        self.size = 0
        self.item = 0

    @property
    def level(self) -> float:
        """Its size for each unit of weight."""
        return self.size / self.claim.weight

    @property
    def place(self) -> float:
        """What orders it among the lanes: the highest level first, public ones last."""
        return 1.0 if self.claim.public else -self.level


def check_weights(weights: Mapping[str, float]) -> dict[str, float]:
    """Return the weights of tenants; `InvalidValue` for one that is not 0.001 … 1,000,000."""
    for tenant, weight in weights.items():
        number: object = weight
        if (
            isinstance(number, bool)
            or not isinstance(number, int | float)
            or not LEAST_WEIGHT <= number <= MOST_WEIGHT
        ):
            raise InvalidValue(
                f"the share of {tenant!r} is {weight!r}; a weight from {LEAST_WEIGHT} to "
                f"{MOST_WEIGHT:.0f} is needed"
            )
    return {tenant: float(weight) for tenant, weight in weights.items()}


class Shares(EvictionPolicy):
    """Fair shares for tenants, by weight; a policy that ``make`` makes orders each tenant's pages.

    A tenant's share is its weight over the weights of all tenants that have pages. Victims are
    pages of tenants that have more than ``guaranteed`` of their share: of these, the tenant whose
    next victim is worth least gives one (`EvictionPolicy.least`), or the one whose is the least
    recently used one. So a tenant that floods the memory evicts its own
    pages and what others have beyond their shares, and no page waits unused for a tenant: what one
    leaves, others fill, and it takes its share back as it stores.

    A tenant is an `Entry.namespace`; one that ``weights`` does not name has weight 1. What all
    tenants share (`kvkeep.core.public`) is evicted when nothing else is left. ``guaranteed`` below
    1 releases what a tenant rarely needs: at 1 a small tenant keeps old pages that others would
    use.

    The policies of all tenants learn together (`EvictionPolicy.join`), as without shares. The first
    one that was made orders nothing, and is told of requests.

    Memory: about 2 KiB for each tenant with pages, dropped with its last page. Cost: O(log n) of n
    tenants for a victim, and for a change of what a tenant stores. Of many tenants above their
    shares, the eight farthest above are compared.
    """

    _lane_type: type[Lane] = Lane

    def __init__(
        self,
        make: Callable[[], EvictionPolicy],
        weights: Mapping[str, float] | None = None,
        *,
        guaranteed: float = 0.9,
    ) -> None:
        """Raises `InvalidValue` for a wrong weight."""
        if not 0 <= guaranteed <= 1:
            raise InvalidValue(f"guaranteed is {guaranteed!r}; a part of 1 is needed, as 0.9")
        self.guaranteed = guaranteed
        self.weights = check_weights(weights or {})
        self.first = make()
        self.name = f"{self.first.name}+shares"
        self._make = make
        self._size = self._least = 1
        self._lanes: dict[Hashable, Lane] = {}
        # A heap of (place, number, lane): an item counts while its number is the lane's. Its place
        # may be too high, until it comes first.
        self._order: list[tuple[float, int, Lane]] = []
        self._items = 0
        # Of all lanes but the public ones. A sum of floats would drift as tenants come and go.
        self._exact_weight, self._weight = Fraction(), 0.0
        self._length = 0
        self._spare = 0  # by how many pages the last victim's tenant is above its floor

    def pages(self) -> dict[Hashable, int]:
        """Return the pages that each tenant stores."""
        return {lane.tenant: lane.size for lane in self._lanes.values()}

    # --- tenants, which tiers tell by other means --------------------------------------------

    def _claim_of(self, tenant: Hashable) -> ShareClaim:
        """Return the claim of a tenant, an `Entry.namespace`."""
        if tenant is None:
            return ShareClaim()
        space: Namespace = tenant  # type: ignore[assignment]
        return ShareClaim(self.weights.get(space.tenant, 1.0), bool(space.scope))

    def _has_candidates(self, lane: Lane) -> bool:
        return len(lane.policy) > 0

    def _age_of(self, entry: Entry) -> Any:
        """Return the last use of a candidate, by a clock of all tenants."""
        return entry.last_used

    # --- lanes -------------------------------------------------------------------------------

    def _lane(self, tenant: Hashable) -> Lane:
        """Return the lane of a tenant that stores something, or does so now."""
        lane = self._lanes.get(tenant)
        if lane is None:
            policy = self._make()
            policy.join(self.first)
            lane = self._lanes[tenant] = self._lane_type(tenant, policy, self._claim_of(tenant))
            self._weigh(lane.claim, 1)
        return lane

    def _lane_of(self, entry: Entry) -> Lane:
        return self._lane(entry.namespace)

    def _emptied(self, lane: Lane) -> None:
        """Forget the lane of a tenant that stores nothing any longer."""
        del self._lanes[lane.tenant]
        lane.item = 0
        self._weigh(lane.claim, -1)

    def _weigh(self, claim: ShareClaim, sign: int) -> None:
        if not claim.public:
            self._exact_weight += sign * Fraction(claim.weight)
            self._weight = float(self._exact_weight)

    def _rank(self, lane: Lane) -> None:
        """Put a lane to its present place in the queue.

        Call it after its first candidate came, and after its level rose.
        """
        self._items += 1
        lane.item = self._items
        heapq.heappush(self._order, (lane.place, lane.item, lane))
        if len(self._order) > 4 * len(self._lanes) + 64:
            self._order = [item for item in self._order if item[2].item == item[1]]
            heapq.heapify(self._order)

    def _pop_first(self) -> tuple[float, int, Lane] | None:
        """Remove and return the item of the lane that is first, of those with candidates."""
        while self._order:
            place, number, lane = item = heapq.heappop(self._order)
            if lane.item != number:
                continue
            if not self._has_candidates(lane):
                lane.item = 0
            elif lane.place > place:
                heapq.heappush(self._order, (lane.place, number, lane))
            else:
                return item
        return None

    def _floor(self) -> float:
        """Return the level up to which tenants keep what they have; there is one, not public."""
        return self.guaranteed * self._size / self._weight

    def _givers(self) -> list[Lane]:
        """Return the lanes of tenants, one of which gives the next victim.

        Of those above their floors the eight highest, else the highest; without candidates, none.
        """
        lanes: list[Lane] = []
        items = []
        while len(lanes) < _COMPARED and (item := self._pop_first()):
            items.append(item)
            lane = item[2]
            if lanes and (lane.claim.public or lane.level <= self._floor()):
                break
            lanes.append(lane)
        for item in items:
            heapq.heappush(self._order, item)
        return lanes

    # --- events ------------------------------------------------------------------------------

    def fit(self, size: int) -> None:
        """Receive the size of the memory, in the unit of `Entry.size`."""
        self._size = size
        self._least = max(1, size >> 10)

    def attach(self, tree: Any, clock: Callable[[], float]) -> None:
        super().attach(tree, clock)
        self.first.attach(tree, clock)

    def born(self, node: Node, pages: int) -> None:
        lane = self._lane_of(node)
        lane.policy.born(node, pages)
        lane.size += pages
        if lane.item:
            self._rank(lane)

    def split(self, upper: Node, lower: Node) -> None:
        self._lane_of(lower).policy.split(upper, lower)

    def joined(self, upper: Node, lower: Node) -> None:
        self._lane_of(lower).policy.joined(upper, lower)

    def used(self, node: Node, owner: Any) -> None:
        if node.size:  # a root stores nothing
            self._lane_of(node).policy.used(node, owner)

    def trimmed(self, leaf: Node, keep: int) -> None:
        lane = self._lane_of(leaf)
        lane.policy.trimmed(leaf, keep)
        lane.size -= leaf.size - keep

    def gone(self, leaf: Node, parent: Node) -> None:
        lane = self._lane_of(leaf)
        lane.policy.gone(leaf, parent)
        lane.size -= leaf.size
        if not lane.size:
            self._emptied(lane)

    def opened(
        self,
        request: Hashable,
        node: Node,
        namespace: Namespace,
        tokens: int,
        following: Callable[[], bytes],
    ) -> tuple[float, int] | None:
        return self.first.opened(request, node, namespace, tokens, following)

    def closed(self, request: Hashable, node: Node, row: npt.NDArray[Any], ended: Any) -> None:
        self.first.closed(request, node, row, ended)

    def forked(self, request: Hashable, fork: Hashable) -> None:
        self.first.forked(request, fork)

    def dropped(self, request: Hashable) -> None:
        self.first.dropped(request)

    def check(self) -> None:
        self.first.check()

    # --- order -------------------------------------------------------------------------------

    def add(self, entry: Entry) -> None:
        lane = self._lane_of(entry)
        lane.policy.add(entry)
        self._added(entry, lane)

    def discard(self, entry: Entry) -> None:
        lane = self._lane_of(entry)
        lane.policy.discard(entry)
        self._length -= 1

    def pop(self) -> Entry | None:
        """Remove a victim of one of the tenants that have most pages for their weights."""
        lanes = self._givers()
        if not lanes:
            return None
        lane = lanes[0] if len(lanes) == 1 else min(lanes, key=self._keep)
        spare = 0.0 if lane.claim.public else self._floor() * lane.claim.weight
        self._spare = int(lane.size - spare)
        return self._pop_of(lane)

    def _pop_of(self, lane: Lane) -> Entry | None:
        """Remove and return the next victim of a lane; None if its policy has none."""
        entry = lane.policy.pop()
        if entry is not None:
            self._length -= 1
        return entry

    def _keep(self, lane: Lane) -> tuple[float, Any]:
        """Return what the next victim of a lane is worth, and its last use if that is unknown."""
        worth = lane.policy.least()
        if worth is not None:
            return worth, 0
        entry = lane.policy.peek()
        assert entry is not None
        return 0.0, self._age_of(entry)

    def portion(self, entry: Entry, most: int) -> int:
        """Return how many pages to take before its tenant is at its floor; 0.1 % at least."""
        most = self._lane_of(entry).policy.portion(entry, most)
        return min(most, max(self._spare, self._least))

    def put_back(self, entry: Entry) -> None:
        lane = self._lane_of(entry)
        lane.policy.put_back(entry)
        self._added(entry, lane)

    def _added(self, entry: Entry, lane: Lane) -> None:
        """Note that the policy of ``lane`` has one more candidate."""
        self._length += 1
        if not lane.item:
            self._rank(lane)

    def __len__(self) -> int:
        return self._length

    def describe(self, entry: Entry, moment: int) -> str:
        """Return the rank of its tenant, and the description by its tenant's policy."""
        lane = self._lane_of(entry)
        return f"of {lane.size} pages of its tenant, {lane.policy.describe(entry, moment)}"
