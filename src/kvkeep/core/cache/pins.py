"""Pins: prefixes that are evicted last, or not at all.

A pin stands at the end of a run and covers the path to it. When that run is evicted, its pins move
to the end of the run before it; when the first run of a path is evicted, they are broken. All pins
at one place are one `PinSet`, which moves as a whole:

    root ── A ── B ── C        two pins at C, one at B: B and C have a set each
    root ── A ── B             C is evicted: one set with three pins at B
    root ── A                  B is evicted: the same set at A
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
    from kvkeep.core.pages.pool import PageArray
    from kvkeep.core.prefix import Tree
    from kvkeep.core.prefix.node import Node

__all__ = ["Pin", "PinSet", "Pins"]

_LEAST_PINS: Final = 1024
"""A cache keeps as many pins at a time as it has pages, but at least this many."""


class PinSet:
    """The soft and the hard pins at the end of ``node``."""

    __slots__ = ("hard", "node", "soft")

    def __init__(self, node: Node) -> None:
        self.node = node
        self.soft: dict[Pin, None] = {}
        self.hard: dict[Pin, None] = {}

    def absorb(self, other: PinSet) -> None:
        """Take over the pins of ``other``, which are all soft. Cost: its pins."""
        for pin in other.soft:
            pin.pin_set = self
        self.soft |= other.soft


class Pin:
    """A pinned prefix; made by `PagedCache.pin`, ended by `PagedCache.unpin`.

    When nothing else is left to evict, pages under a soft pin are evicted, tail first, and
    ``num_tokens`` falls. Pages under a hard pin are not, and count against the cache's budget.
    """

    __slots__ = ("_pins", "expires", "groups", "hard", "pin_set")

    def __init__(self, pins: Pins, pin_set: PinSet, *, hard: bool, expires: float | None) -> None:
        self._pins = pins
        self.pin_set: PinSet | None = pin_set  # None once it has ended
        self.hard = hard
        self.expires = expires
        self.groups: PageArray | None = None  # pages that resuming there reads, of a hard pin

    @property
    def active(self) -> bool:
        """Whether it has not ended. A pin ends at the next step of the cache after its time."""
        return self.pin_set is not None

    @property
    def num_tokens(self) -> int:
        """Tokens of the prefix that are still cached; 0 once the pin has ended."""
        return self._pins.pages(self) * self._pins.page_size

    @property
    def num_resumable(self) -> int:
        """Tokens of the prefix that a request behind it need not compute.

        Fewer than ``num_tokens`` in a cache with groups of layers whose last checkpoint lies
        earlier; a pin adds one at its end if that needs no state. Cost: as `PagedCache.match`.
        """
        return self._pins.resumable(self) * self._pins.page_size

    def __repr__(self) -> str:
        kind = "hard" if self.hard else "soft"
        return f"<{kind} pin, {self.num_tokens} tokens{'' if self.active else ', ended'}>"


class Pins(TreeObserver):
    """All pins of a cache, and the pages that they cover.

    Thread safety: none; under the cache's lock. Memory: about 350 bytes a pin. Cost: O(log pins)
    for a pin with a time to live, and the uncovered runs of its path; nothing here walks over all
    pins. While runs are evicted, a pin moves to another set O(log pins) times at most.

    Attributes:
        active: the pins that have not ended.
        covered: the pages on their paths.
        hard_covered: those of them on the paths of hard pins.
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
        """Keeps rows and states for pins; None for plain models."""
        self._beside: Counter[int] = Counter()  # page of rows and states → its hard pins
        self.active: dict[Pin, None] = {}
        self.covered = Coverage()
        self.hard_covered = Coverage()
        self._expiry: list[tuple[float, int, Pin]] = []
        self._serial = 0
        self._observing = False  # from the first pin on
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
            needed = (
                self.num_hard_pages
                + self.hard_covered.more(hold)
                + len({*beside} - {*self._beside})
            )
            if needed > self.hard_budget:
                if groups is not None and self.groups is not None:
                    self.groups.release(groups)
                raise InvalidValue(
                    f"hard pins would hold {needed} pages, their budget is {self.hard_budget}; "
                    "unpin something, pin softly, or give the cache a larger hard_pin_pages"
                )
        if not self._observing:
            self._observing = True
            self._tree.observe(self)
        expires = None if ttl is None else self._clock() + ttl
        pin_set = hold.pin_set
        if pin_set is None:
            pin_set = hold.pin_set = PinSet(hold)
            self.covered.add(hold)
        pin = Pin(self, pin_set, hard=hard, expires=expires)
        if hard and not pin_set.hard:
            self.hard_covered.add(hold)
        (pin_set.hard if hard else pin_set.soft)[pin] = None
        pin.groups = groups
        self._beside.update(beside)
        self.active[pin] = None
        if expires is not None:
            self._serial += 1
            heapq.heappush(self._expiry, (expires, self._serial, pin))
        return pin

    def end(self, pin: Pin) -> None:
        """End a pin that has not ended, and the hold of a hard one."""
        pin_set = pin.pin_set
        assert pin_set is not None
        node, tree = pin_set.node, self._tree
        queued = tree.is_candidate(node)
        if queued:
            tree.dequeue(node)
        self._forget(pin)
        del (pin_set.hard if pin.hard else pin_set.soft)[pin]
        if pin.hard and not pin_set.hard:
            self.hard_covered.remove(node)
        if not pin_set.soft and not pin_set.hard:
            node.pin_set = None
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
        pin.pin_set = None
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

    # --- observer of the tree ------------------------------------------------------------------

    def split(self, upper: Node, lower: Node) -> None:
        self.covered.split(upper, lower)
        self.hard_covered.split(upper, lower)

    def joined(self, upper: Node, lower: Node) -> None:
        self.covered.joined(upper)
        self.hard_covered.joined(upper)

    def trimmed(self, leaf: Node, keep: int) -> None:
        self.covered.resized(leaf, keep - leaf.size)

    def gone(self, leaf: Node, parent: Node) -> None:
        """Move the pins of ``leaf`` to ``parent``; at a root they are broken."""
        pin_set: PinSet | None = leaf.pin_set
        if pin_set is None:
            return
        assert not pin_set.hard, "a run with a hard pin was evicted"
        above: PinSet | None = parent.pin_set
        if parent.parent is not None and above is None:
            self.covered.add(parent)
        self.covered.remove(leaf)
        leaf.pin_set = None
        if parent.parent is None:
            self.broken += len(pin_set.soft)
            for pin in pin_set.soft:
                self._forget(pin)
            return
        if above is None:
            above = pin_set
        elif len(above.soft) + len(above.hard) < len(pin_set.soft) and not above.hard:
            pin_set.absorb(above)
            above = pin_set
        else:
            above.absorb(pin_set)
        above.node = parent
        parent.pin_set = above

    # --- figures -------------------------------------------------------------------------------

    def pages(self, pin: Pin) -> int:
        """Return how many pages a pin still covers."""
        if pin.pin_set is None or (pin.expires is not None and self._over(pin.expires)):
            return 0
        return pin.pin_set.node.end

    def resumable(self, pin: Pin) -> int:
        """Return how many pages a request behind the prefix would reuse."""
        pages = self.pages(pin)
        if self.groups is None or not pages or pin.pin_set is None:
            return pages
        return self.groups.resumable(pin.pin_set.node)

    def soft_below(self, top: Node) -> list[Pin]:
        """Return the soft pins that end when the run ``top`` and all behind it are evicted.

        Cost: all descendants.
        """
        free = [
            node.pin_set
            for node, _ in descend(top)
            if not node.holders and node.pin_set is not None
        ]
        return [pin for pin_set in free for pin in pin_set.soft]

    @property
    def num_hard_pages(self) -> int:
        """Pages under hard pins, each counted once; call `expire` first."""
        return self.hard_covered.num_pages + len(self._beside)

    def holds(self) -> list[Node]:
        """Return the holds of hard pins."""
        return [pin.pin_set.node for pin in self.active if pin.hard and pin.pin_set is not None]

    def check(self, nodes: Iterable[Node]) -> None:
        """Recount from all nodes but the roots. Asserts."""
        pin_sets = [node.pin_set for node in nodes if node.pin_set is not None]
        pins = {pin for pin_set in pin_sets for pin in (*pin_set.soft, *pin_set.hard)}
        assert pins == self.active.keys()
        for node in nodes:
            pin_set = node.pin_set
            if pin_set is not None:
                assert pin_set.node is node
                assert all(pin.pin_set is pin_set for pin in (*pin_set.soft, *pin_set.hard))
                assert pin_set.soft or pin_set.hard
        self.covered.check(nodes, lambda node: node.pin_set is not None)
        self.hard_covered.check(
            nodes, lambda node: node.pin_set is not None and bool(node.pin_set.hard)
        )
