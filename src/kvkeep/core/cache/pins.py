"""Pins: prefixes that are evicted last, or not at all.

A pin stands at the end of a run and covers the path to it. When that run is evicted, its pins move
to the end of the run before it; when the first run of a path is evicted, they are broken. All pins
at one place are one `Spot`, which moves as a whole:

    root ── A ── B ── C        two pins at C, one at B: B and C have a spot each
    root ── A ── B             C is evicted: one spot with three pins at B
    root ── A                  B is evicted: the same spot at A
    root                       A is evicted: three pins are broken
"""

from __future__ import annotations

import heapq
from collections import Counter
from typing import TYPE_CHECKING, Final

from kvkeep.core.errors import InvalidValue
from kvkeep.core.prefix.node import Coverage, TreeObserver, descend

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from kvkeep.core.groups import GroupBoard
    from kvkeep.core.pages.tables import PageArray
    from kvkeep.core.prefix import Tree
    from kvkeep.core.prefix.node import Node

__all__ = ["Pin", "Pins", "Spot"]

_LEAST_PINS: Final = 1024
"""A cache keeps as many pins at a time as it has pages, but at least this many."""


class Spot:
    """The soft and the hard pins at the end of ``node``."""

    __slots__ = ("hard", "node", "soft")

    def __init__(self, node: Node) -> None:
        self.node = node
        self.soft: dict[Pin, None] = {}
        self.hard: dict[Pin, None] = {}

    def absorb(self, other: Spot) -> None:
        """Take over all pins of ``other``, soft ones. Cost: its pins."""
        for pin in other.soft:
            pin.spot = self
        self.soft |= other.soft


class Pin:
    """A pinned prefix; made by `PagedCache.pin`, ended by `PagedCache.unpin`.

    When nothing else is left to evict, pages under a soft pin are evicted, tail first, and
    ``num_tokens`` falls. Pages under a hard pin are not, and count against the cache's budget.
    """

    __slots__ = ("_pins", "expires", "groups", "hard", "spot")

    def __init__(self, pins: Pins, spot: Spot, *, hard: bool, expires: float | None) -> None:
        self._pins = pins
        self.spot: Spot | None = spot  # None once it has ended
        self.hard = hard
        self.expires = expires
        self.groups: PageArray | None = None  # pages that resuming there reads, of a hard pin

    @property
    def active(self) -> bool:
        """Whether it has not ended; one whose time is over ends at the next step of the cache."""
        return self.spot is not None

    @property
    def num_tokens(self) -> int:
        """Tokens of the prefix that are still cached; 0 once the pin has ended."""
        return self._pins.pages(self) * self._pins.page_size

    @property
    def num_resumable(self) -> int:
        """Of these, tokens that a request which goes on there need not compute.

        Fewer than ``num_tokens`` in a cache with groups of layers, where the last checkpoint lies
        earlier; a pin adds one at its end if that needs no state. Cost: as `PagedCache.match`.
        """
        return self._pins.resumable(self) * self._pins.page_size

    def __repr__(self) -> str:
        kind = "hard" if self.hard else "soft"
        return f"<{kind} pin, {self.num_tokens} tokens{'' if self.active else ', ended'}>"


class Pins(TreeObserver):
    """All pins of a cache, and the pages that they cover: in memory of about 350 bytes each.

    Thread safety: none; under the cache's lock. Cost: O(log pins) for a pin with a time to live,
    and the uncovered runs of its path; nothing here walks over all pins. While runs are evicted, a
    pin moves to another spot O(log pins) times at most.

    Attributes:
        active: the pins that have not ended.
        covered: the pages on their paths.
        kept: those on the paths of hard pins.
        expired: pins whose time was over, so far.
        broken: soft pins whose path was evicted as a whole, so far.
    """

    def __init__(
        self, tree: Tree, num_pages: int, hard_budget: int, clock: Callable[[], float]
    ) -> None:
        self._tree = tree
        self.page_size = tree.page_size
        self.most = max(_LEAST_PINS, num_pages)
        self.hard_budget = hard_budget
        self._clock = clock
        self.groups: GroupBoard | None = None
        """What pins keep beside pages; None for plain models."""
        self._beside: Counter[int] = Counter()  # pages of rows and states → hard pins that keep it
        self.active: dict[Pin, None] = {}
        self.covered = Coverage()
        self.kept = Coverage()
        self._expiry: list[tuple[float, int, Pin]] = []
        self._serial = 0
        self._follows = False  # the tree, from the first pin on
        self.expired = 0
        self.broken = 0

    def add(self, hold: Node, ttl: float | None, *, hard: bool) -> Pin:
        """Pin the path of ``hold``: a hard pin takes over the hold, a soft one does not.

        `InvalidValue` beyond the number of pins or the budget for hard pins.
        """
        if len(self.active) >= self.most:
            raise InvalidValue(
                f"{self.most} pins are set, as many as this cache keeps; unpin some, or give "
                "them a ttl after which they end by themselves"
            )
        groups = None if self.groups is None else self.groups.pinned(hold, hard=hard)
        beside = [] if groups is None else groups.tolist()
        if hard:
            needed = self.num_hard_pages + self.kept.more(hold) + len({*beside} - {*self._beside})
            if needed > self.hard_budget:
                if groups is not None and self.groups is not None:
                    self.groups.release(groups)
                raise InvalidValue(
                    f"hard pins would hold {needed} pages, their budget is {self.hard_budget}; "
                    "unpin something, pin softly, or give the cache a larger hard_pin_pages"
                )
        if not self._follows:
            self._follows = True
            self._tree.observe(self)
        expires = None if ttl is None else self._clock() + ttl
        spot = hold.spot
        if spot is None:
            spot = hold.spot = Spot(hold)
            self.covered.add(hold)
        pin = Pin(self, spot, hard=hard, expires=expires)
        if hard and not spot.hard:
            self.kept.add(hold)
        (spot.hard if hard else spot.soft)[pin] = None
        pin.groups = groups
        self._beside.update(beside)
        self.active[pin] = None
        if expires is not None:
            self._serial += 1
            heapq.heappush(self._expiry, (expires, self._serial, pin))
        return pin

    def end(self, pin: Pin) -> None:
        """End a pin that has not ended, and the hold of a hard one."""
        spot = pin.spot
        assert spot is not None
        node, tree = spot.node, self._tree
        queued = tree.is_candidate(node)
        if queued:
            tree.dequeue(node)
        self._forget(pin)
        del (spot.hard if pin.hard else spot.soft)[pin]
        if pin.hard and not spot.hard:
            self.kept.remove(node)
        if not spot.soft and not spot.hard:
            node.spot = None
            self.covered.remove(node)
        if pin.hard:
            tree.release(node)
        elif queued:
            tree.enqueue(node)
        if self.groups is not None and pin.groups is not None:
            self._beside -= Counter(pin.groups.tolist())
            self.groups.release(pin.groups)
            self.groups.unpinned(node)
            pin.groups = None

    def _forget(self, pin: Pin) -> None:
        pin.spot = None
        del self.active[pin]
        if len(self._expiry) > 2 * len(self.active) + 64:  # most entries are of ended pins
            self._expiry = [item for item in self._expiry if item[2].active]
            heapq.heapify(self._expiry)

    def expire(self) -> None:
        """End the pins whose time is over."""
        while self._expiry and (not self._expiry[0][2].active or self._over(self._expiry[0][0])):
            pin = heapq.heappop(self._expiry)[2]
            if pin.active:
                self.end(pin)
                self.expired += 1

    def _over(self, when: float) -> bool:
        return self._clock() >= when

    # --- what the tree tells -------------------------------------------------------------------

    def split(self, upper: Node, lower: Node) -> None:
        self.covered.split(upper, lower)
        self.kept.split(upper, lower)

    def joined(self, upper: Node, lower: Node) -> None:
        self.covered.joined(upper)
        self.kept.joined(upper)

    def trimmed(self, leaf: Node, keep: int) -> None:
        self.covered.resized(leaf, keep - leaf.size)

    def gone(self, leaf: Node, parent: Node) -> None:
        """Move the pins of ``leaf`` to ``parent``; at a root they are broken."""
        spot: Spot | None = leaf.spot
        if spot is None:
            return
        assert not spot.hard, "a run with a hard pin was evicted"
        above: Spot | None = parent.spot
        if parent.parent is not None and above is None:
            self.covered.add(parent)
        self.covered.remove(leaf)
        leaf.spot = None
        if parent.parent is None:
            self.broken += len(spot.soft)
            for pin in spot.soft:
                self._forget(pin)
            return
        if above is None:
            above = spot
        elif len(above.soft) + len(above.hard) < len(spot.soft) and not above.hard:
            spot.absorb(above)
            above = spot
        else:
            above.absorb(spot)
        above.node = parent
        parent.spot = above

    # --- figures -------------------------------------------------------------------------------

    def pages(self, pin: Pin) -> int:
        """Return how many pages a pin still covers."""
        if pin.spot is None or (pin.expires is not None and self._over(pin.expires)):
            return 0
        return pin.spot.node.end

    def resumable(self, pin: Pin) -> int:
        """Return how many pages a request that goes on at the end of a pin would reuse."""
        pages = self.pages(pin)
        if self.groups is None or not pages or pin.spot is None:
            return pages
        return self.groups.resumable(pin.spot.node)

    def soft_below(self, top: Node) -> list[Pin]:
        """Return the soft pins that end when the run ``top`` and all behind it are evicted.

        Cost: all descendants.
        """
        free = [node.spot for node, _ in descend(top) if not node.holders and node.spot is not None]
        return [pin for spot in free for pin in spot.soft]

    @property
    def num_hard_pages(self) -> int:
        """Pages that hard pins keep, each counted once; call `expire` first."""
        return self.kept.num_pages + len(self._beside)

    def holds(self) -> list[Node]:
        """Return the holds of hard pins."""
        return [pin.spot.node for pin in self.active if pin.hard and pin.spot is not None]

    def check(self, nodes: Iterable[Node]) -> None:
        """Recount from all nodes but the roots. Asserts."""
        spots = [node.spot for node in nodes if node.spot is not None]
        pins = {pin for spot in spots for pin in (*spot.soft, *spot.hard)}
        assert pins == self.active.keys()
        for node in nodes:
            spot = node.spot
            if spot is not None:
                assert spot.node is node
                assert all(pin.spot is spot for pin in (*spot.soft, *spot.hard))
                assert spot.soft or spot.hard
        self.covered.check(nodes, lambda node: node.spot is not None)
        self.kept.check(nodes, lambda node: node.spot is not None and bool(node.spot.hard))
