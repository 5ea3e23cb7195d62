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

from collections import Counter
from typing import TYPE_CHECKING, Final

from kvkeep.core.errors import InvalidValue
from kvkeep.core.pages.pool import EMPTY_PAGES
from kvkeep.core.prefix.node import Coverage, TreeObserver, descend
from kvkeep.core.prefix.policy import AgeQueue

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from kvkeep.core.groups import GroupBoard
    from kvkeep.core.pages.pool import PageArray
    from kvkeep.core.prefix import PrefixMatch, Tree
    from kvkeep.core.prefix.node import Node

__all__ = ["Pin", "PinSet", "Pins"]

_LEAST_PINS: Final = 1024
"""A cache keeps as many pins at a time as it has pages, but at least this many."""


class PinSet:
    """All soft pins at the end of ``node``, or one hard pin, whose ``node`` never changes."""

    __slots__ = ("node", "pins")

    def __init__(self, node: Node) -> None:
        self.node = node
        self.pins: dict[Pin, None] = {}


class Pin:
    """A pinned prefix; made by `PagedCache.pin`, ended by `PagedCache.unpin`.

    When nothing else is left to evict, pages under a soft pin are evicted, tail first, and
    ``num_tokens`` falls. Pages under a hard pin are not, and count against the cache's budget.
    """

    __slots__ = ("_pins", "beside", "expires", "hard", "pin_set")

    def __init__(self, pins: Pins, pin_set: PinSet, *, hard: bool, expires: float | None) -> None:
        self._pins = pins
        self.pin_set: PinSet | None = pin_set  # None once it has ended
        self.hard = hard
        self.expires = expires
        self.beside: PageArray = EMPTY_PAGES  # rows and states that resuming there reads, if hard

    @property
    def active(self) -> bool:
        """Whether it has not ended. A pin ends at the next step of the cache after its time."""
        return self.pin_set is not None

    @property
    def num_tokens(self) -> int:
        """Tokens of the prefix that are still cached; 0 once the pin has ended."""
        node = self._pins.node(self)
        return 0 if node is None else node.end * self._pins.page_size

    @property
    def num_resumable(self) -> int:
        """Tokens of the prefix that a request behind it need not compute.

        Fewer than ``num_tokens`` in a cache with groups of layers whose last checkpoint lies
        earlier; a pin adds one at its end if that needs no state. Cost: as `PagedCache.match`.
        """
        node, board = self._pins.node(self), self._pins.board
        if node is None or board is None:
            return self.num_tokens
        return board.resumable(node) * self._pins.page_size

    def __repr__(self) -> str:
        kind = "hard" if self.hard else "soft"
        return f"<{kind} pin, {self.num_tokens} tokens{'' if self.active else ', ended'}>"


class Pins(TreeObserver):
    """All pins of a cache, and the pages that they cover.

    Thread safety: none; under the cache's lock. Memory: 350 to 570 bytes a pin. Cost: O(log pins)
    for a pin with a time to live, and the uncovered runs of its path; nothing here walks over all
    pins. While runs are evicted, a pin moves to another set O(log pins) times at most.

    Attributes:
        board: keeps rows and states for pins; None for plain models.
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
        self.board: GroupBoard | None = None
        self._beside: Counter[int] = Counter()  # page of rows and states → its hard pins
        self.active: dict[Pin, None] = {}
        self.covered = Coverage()
        self.hard_covered = Coverage()
        self._expiry = AgeQueue[float]()  # pins with a time to live
        self._observing = False  # from the first pin on
        self.expired = 0
        self.broken = 0

    def allow(self, match: PrefixMatch, *, hard: bool) -> None:
        """Raise `InvalidValue` beyond the number of pins, or the budget for hard ones."""
        if len(self.active) >= self.most:
            raise InvalidValue(
                f"{self.most} pins are set, as many as this cache keeps; unpin some, or give "
                "them a ttl after which they end by themselves"
            )
        if hard:
            end = match.end
            behind = 0 if end in self.hard_covered else end.size - match.end_pages
            self._afford(self.hard_covered.more(end) - behind)

    def _afford(self, pages: int) -> None:
        """Raise `InvalidValue` if hard pins cannot hold so many ``pages`` more."""
        needed = self.num_hard_pages + pages
        if needed > self.hard_budget:
            raise InvalidValue(
                f"hard pins would hold {needed} pages, their budget is {self.hard_budget}; "
                "unpin something, pin softly, or give the cache a larger hard_pin_pages"
            )

    def add(self, hold: Node, ttl: float | None, *, hard: bool) -> Pin:
        """Pin the path of ``hold``, as `allow` lets: a hard pin takes over the hold, no soft one.

        `InvalidValue` if the rows and states beside it exceed the budget for hard pins.
        """
        beside = EMPTY_PAGES if self.board is None else self.board.pinned(hold, hard=hard)
        if hard and self.board is not None:
            new = sum(page not in self._beside for page in {*beside.tolist()})
            try:
                self._afford(self.hard_covered.more(hold) + new)
            except InvalidValue:
                self.board.release(beside)
                raise
        if not self._observing:
            self._observing = True
            for observer in (self.covered, self.hard_covered, self):
                self._tree.observe(observer)
        pin_set = PinSet(hold) if hard else self._soft(hold)
        if hard:
            self.covered.add(hold)
            self.hard_covered.add(hold)
        expires = None if ttl is None else self._clock() + ttl
        pin = Pin(self, pin_set, hard=hard, expires=expires)
        pin.beside = beside
        pin_set.pins[pin] = None
        self._beside.update(beside.tolist())
        self.active[pin] = None
        if expires is not None:
            self._expiry.push(pin, expires)
        return pin

    def _soft(self, node: Node) -> PinSet:
        """Return the set of the soft pins at the end of ``node``, a new one if there is none."""
        if node.pin_set is None:
            node.pin_set = PinSet(node)
            self.covered.add(node)
        pin_set: PinSet = node.pin_set
        return pin_set

    def end(self, pin: Pin) -> None:
        """End a pin that has not ended, and the hold of a hard one."""
        pin_set = pin.pin_set
        assert pin_set is not None
        node = pin_set.node
        self._forget(pin)
        del pin_set.pins[pin]
        if not pin_set.pins:
            self.covered.remove(node)
        if pin.hard:
            self.hard_covered.remove(node)
            self._tree.release(node)
        elif not pin_set.pins:
            with self._tree.reordering([node]):
                node.pin_set = None
        if self.board is not None:
            for page in pin.beside.tolist():
                self._beside[page] -= 1
                if not self._beside[page]:
                    del self._beside[page]
            self.board.release(pin.beside)
            self.board.unpinned(node)
            pin.beside = EMPTY_PAGES

    def _forget(self, pin: Pin) -> None:
        pin.pin_set = None
        del self.active[pin]
        if pin in self._expiry:
            self._expiry.remove(pin)

    def expire(self) -> None:
        """End the pins whose time is over."""
        if not self.active or not self._expiry:
            return
        for pin, _ in self._expiry.pop_until(self._clock()):
            self.end(pin)
            self.expired += 1

    def gone(self, leaf: Node, parent: Node) -> None:
        """Move the pins of ``leaf`` to ``parent``; at a root they are broken."""
        pin_set: PinSet | None = leaf.pin_set
        if pin_set is None:
            return
        if parent.parent is None:
            self.broken += len(pin_set.pins)
            for pin in pin_set.pins:
                self._forget(pin)
        else:
            few, many = sorted((pin_set, self._soft(parent)), key=lambda each: len(each.pins))
            for pin in few.pins:
                pin.pin_set = many
            many.pins |= few.pins
            many.node, parent.pin_set = parent, many
        self.covered.remove(leaf)
        leaf.pin_set = None

    # --- figures -------------------------------------------------------------------------------

    def node(self, pin: Pin) -> Node | None:
        """Return the run at whose end a pin stands; None once its time is over."""
        pin_set = pin.pin_set
        if pin_set is None or (pin.expires is not None and self._clock() >= pin.expires):
            return None
        return pin_set.node

    def soft_below(self, top: Node) -> list[Pin]:
        """Return the soft pins that end when the run ``top`` and all behind it are evicted.

        Cost: all descendants.
        """
        free = [node for node, _ in descend(top) if not node.holders and node.pin_set is not None]
        return [pin for node in free for pin in node.pin_set.pins]

    @property
    def num_hard_pages(self) -> int:
        """Pages under hard pins, each counted once; call `expire` first."""
        return self.hard_covered.num_pages + len(self._beside)

    def holds(self) -> list[Node]:
        """Return the holds of hard pins."""
        return [pin.pin_set.node for pin in self.active if pin.hard and pin.pin_set is not None]

    def check(self, nodes: Iterable[Node]) -> None:
        """Recount from all nodes but the roots. Asserts."""
        hard = Counter(self.holds())
        soft = {pin for node in nodes if node.pin_set is not None for pin in node.pin_set.pins}
        assert soft == {pin for pin in self.active if not pin.hard}
        for pin in self.active:
            assert pin.pin_set is not None
            assert pin in pin.pin_set.pins
            assert pin.hard or pin.pin_set.node.pin_set is pin.pin_set
        assert all(node.pin_set is None or node.pin_set.pins for node in nodes)
        self.covered.check(nodes, lambda node: hard[node] + (node.pin_set is not None))
        self.hard_covered.check(nodes, lambda node: hard[node])
