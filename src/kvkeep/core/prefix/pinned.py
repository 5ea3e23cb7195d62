"""`Pinned`: a pin as the index sees it, and `Pins`: where the pins of a tree stand.

A pin stands at the end of a run and covers the path to it. When that run is evicted, its pins move
to the end of the run before it; when the first run of a path is evicted, they are broken. All pins
at one place are one `Spot`, which moves as a whole:

    root ── A ── B ── C        two pins at C, one at B: B and C have a spot each
    root ── A ── B             C is evicted: one spot with three pins at B
    root ── A                  B is evicted: the same spot at A
    root                       A is evicted: three pins are broken
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvkeep.core.prefix.node import descend

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvkeep.core.prefix.node import Node

__all__ = ["Pinned", "Pins", "Spot", "soft_pins_below"]


class Pinned:
    """One pin, as the index sees it; the cache derives its pins from this class."""

    __slots__ = ("spot",)

    def __init__(self) -> None:
        self.spot: Spot | None = None
        """The spot that it is at; None before it is set, and after it was broken or removed."""

    @property
    def num_pages(self) -> int:
        """Pages on its path that are still stored; 0 when it is broken or was removed."""
        return 0 if self.spot is None else self.spot.node.end


class Spot:
    """The soft and the hard pins at the end of ``node``."""

    __slots__ = ("hard", "node", "soft")

    def __init__(self, node: Node) -> None:
        self.node = node
        self.soft: dict[Pinned, None] = {}
        self.hard: dict[Pinned, None] = {}

    def __len__(self) -> int:
        return len(self.soft) + len(self.hard)

    def absorb(self, other: Spot) -> None:
        """Take over all pins of ``other``. Cost: its pins."""
        for pin in (*other.soft, *other.hard):
            pin.spot = self
        self.soft |= other.soft
        self.hard |= other.hard


class Pins:
    """All pins of a tree, and the pages that they cover, each counted once.

    ``Node.covered`` is 1 for pins at the node, and 1 more for each covered child; ``Node.kept`` is
    the same for hard pins alone. So a pin is counted upwards only to the first node that is covered
    already.

    Thread safety: none. Cost: a step for each uncovered node on the path. While runs are evicted, a
    pin moves to another spot O(log pins) times at most.
    """

    def __init__(self) -> None:
        self.num_pages = 0
        """Pages on the paths of all pins."""
        self.num_hard = 0
        """Pages on the paths of hard pins."""
        self.num_broken = 0
        """Soft pins that eviction has broken since the start."""
        self.broken: list[Pinned] = []
        """Broken pins that the owner of the index has not collected yet."""

    def add(self, node: Node, pin: Pinned, *, hard: bool) -> None:
        """Set ``pin`` at the end of ``node``."""
        assert pin.spot is None
        spot = node.spot
        if spot is None:
            spot = node.spot = Spot(node)
            self._cover(node)
        if not hard:
            spot.soft[pin] = None
            node.pins += 1
        else:
            if not spot.hard:
                self._keep(node)
            spot.hard[pin] = None
        pin.spot = spot

    def remove(self, pin: Pinned) -> None:
        """Remove a pin that is set."""
        spot = pin.spot
        assert spot is not None
        node = spot.node
        pin.spot = None
        if pin in spot.soft:
            del spot.soft[pin]
            node.pins -= 1
        else:
            del spot.hard[pin]
            if not spot.hard:
                self._unkeep(node)
        if not len(spot):
            node.spot = None
            self._uncover(node)

    def pass_on(self, leaf: Node, parent: Node) -> None:
        """Move the pins of ``leaf``, which is evicted, to ``parent``; at a root they are broken."""
        spot = leaf.spot
        assert spot is not None
        assert not spot.hard, "a run with a hard pin was evicted"
        leaf.spot = None
        self.num_pages -= leaf.size
        if parent.parent is None:
            for pin in spot.soft:
                pin.spot = None
            self.broken += spot.soft
            self.num_broken += len(spot.soft)
            return
        parent.pins += len(spot.soft)
        own = parent.spot
        if own is None:  # one covered child less, one own pin more
            spot.node = parent
            parent.spot = spot
            return
        parent.covered -= 1
        if len(own) < len(spot):
            own, spot = spot, own
            own.node = parent
            parent.spot = own
        own.absorb(spot)

    def split(self, upper: Node, lower: Node) -> None:
        """Count for ``upper``, the new front of ``lower``; the pins stay at the end."""
        upper.covered = 1 if lower.covered else 0
        upper.kept = 1 if lower.kept else 0

    def trimmed(self, leaf: Node, pages: int) -> None:
        """Record that a covered leaf lost its last ``pages`` pages."""
        assert not leaf.kept
        self.num_pages -= pages

    def would_keep(self, node: Node) -> int:
        """Return the pages that hard pins would cover with one more at ``node``."""
        pages = self.num_hard
        above: Node | None = node
        while above is not None and not above.kept:
            pages += above.size
            above = above.parent
        return pages

    def _cover(self, node: Node) -> None:
        while node.parent is not None:
            node.covered += 1
            if node.covered > 1:
                return
            self.num_pages += node.size
            node = node.parent

    def _uncover(self, node: Node) -> None:
        while node.parent is not None:
            node.covered -= 1
            if node.covered:
                return
            self.num_pages -= node.size
            node = node.parent

    def _keep(self, node: Node) -> None:
        while node.parent is not None:
            node.kept += 1
            if node.kept > 1:
                return
            self.num_hard += node.size
            node = node.parent

    def _unkeep(self, node: Node) -> None:
        while node.parent is not None:
            node.kept -= 1
            if node.kept:
                return
            self.num_hard -= node.size
            node = node.parent

    def check(self, nodes: Iterable[Node]) -> None:
        """Recount from all nodes except the roots. Asserts."""
        covered = kept = 0
        for node in nodes:
            spot = node.spot
            children = node.children.values()
            hard = 0 if spot is None else bool(spot.hard)
            assert node.covered == (spot is not None) + sum(bool(c.covered) for c in children)
            assert node.kept == hard + sum(bool(child.kept) for child in children)
            assert node.pins == (0 if spot is None else len(spot.soft))
            if spot is not None:
                assert len(spot)
                assert spot.node is node
                assert all(pin.spot is spot for pin in (*spot.soft, *spot.hard))
            covered += node.size if node.covered else 0
            kept += node.size if node.kept else 0
        assert covered == self.num_pages, (covered, self.num_pages)
        assert kept == self.num_hard, (kept, self.num_hard)
        assert all(pin.spot is None for pin in self.broken)


def soft_pins(node: Node) -> list[Pinned]:
    """Return the soft pins at the end of ``node``."""
    return [] if node.spot is None else list(node.spot.soft)


def soft_pins_below(top: Node) -> list[Pinned]:
    """Return the soft pins that `PrefixIndex.evict_below` of ``top`` breaks or moves up.

    Cost: all descendants.
    """
    return [pin for node, _ in descend(top) if not node.holders for pin in soft_pins(node)]
