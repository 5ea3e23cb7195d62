"""`Trails`: paths of the tree in one piece, so that a deep match is one comparison.

A run lives only while all runs before it do. So the symbols and pages of consecutive runs can be
kept joined: a *trail*. A walk that meets the first run of a trail compares all of it at once, and
goes on behind what matches:

    root ── a ── b ── c ── d ── e ── f      trails: (a b c d e f), (x y z)
                 └── x ── y ── z            a prompt of "a b x y z": half of one, all of another

A run is in one trail at most, so trails never keep more than a second copy of what the index
stores. A walk that needed many steps joins its path: first only runs and trails that it used in
full, which takes nothing from other paths. If it left many trails halfway, their fronts become its
own, and the rests stay trails (the preferred paths of Sleator and Tarjan, "A data structure for
dynamic trees", 1983, with steps in place of single edges).

Trails never change what matches: the node operations that change runs keep them exact.
"""

from __future__ import annotations

from bisect import bisect_left
from operator import attrgetter
from typing import TYPE_CHECKING, Final

from kvkeep.core.prefix.heads import common_bytes
from kvkeep.core.prefix.results import PrefixMatch, joined

if TYPE_CHECKING:
    from kvkeep.core.pages.table import PageArray
    from kvkeep.core.prefix.node import Node

__all__ = ["RunTrail", "Trails"]

_STEPS: Final = 8
"""A walk of so many steps joins its path. A step takes about as long as 4 KiB of comparison."""
_MOST_MOVED: Final = 16  # nodes of fronts, for each step of a walk that takes them over
_end = attrgetter("end")


class RunTrail:
    """The symbols and pages of consecutive runs, each the parent of the next, in one piece."""

    __slots__ = ("_trails", "nodes", "num_bytes", "pages", "size", "symbols")

    def __init__(self, trails: Trails, nodes: list[Node]) -> None:
        self._trails = trails
        self.nodes = nodes
        self.symbols = b""
        self.size = 0
        """Bytes of symbols that are used: the last runs may have left."""
        self.pages: PageArray
        self.num_bytes = 0
        """Bytes that the symbols and pages take, up to twice as much as is used of them."""

    def put(self, symbols: bytes, pages: PageArray) -> None:
        """Set what the nodes store, in memory that is the trail's own."""
        self.symbols, self.size, self.pages = symbols, len(symbols), pages
        self._count(len(symbols) + pages.nbytes)

    def place(self, node: Node) -> int:
        """Return the place of one of the nodes. Cost: O(log n)."""
        return bisect_left(self.nodes, node.end, key=_end)

    def at(self, end: int) -> Node:
        """Return the node of the page before ``end``. Cost: O(log n)."""
        return self.nodes[bisect_left(self.nodes, end, key=_end)]

    def cut_off(self, upper: Node, lower: Node) -> None:
        """Record that ``upper`` takes the first pages of ``lower``, one of the nodes."""
        self.nodes.insert(self.place(lower), upper)
        upper.trail = self

    def absorbed(self, upper: Node) -> None:
        """Record that the node behind ``upper``, one of the nodes, takes its pages."""
        del self.nodes[self.place(upper)]
        upper.trail = None
        if len(self.nodes) < 2:
            self.end()

    def leave(self, last: Node) -> None:
        """Take out the last node, before it changes or leaves the tree. Amortised O(1)."""
        assert self.nodes[-1] is last
        last.trail = None
        self.nodes.pop()
        if len(self.nodes) < 2:
            self.end()
            return
        pages = self.nodes[-1].end - self.nodes[0].depth
        self.size = pages * self._trails.unit
        self.pages = self.pages[:pages]
        if self.num_bytes > 2 * (self.size + self.pages.nbytes):
            self.put(self.symbols[: self.size], self.pages.copy())

    def behind(self, count: int) -> None:
        """Take out the first ``count`` nodes. Cost: one copy of what follows them."""
        pages = self.nodes[count - 1].end - self.nodes[0].depth
        for node in self.nodes[:count]:
            node.trail = None
        del self.nodes[:count]
        if len(self.nodes) < 2:
            self.end()
        else:
            symbols = self.symbols[pages * self._trails.unit : self.size]
            self.put(symbols, self.pages[pages:].copy())

    def end(self) -> None:
        """End the trail: its nodes are in none."""
        for node in self.nodes:
            node.trail = None
        self.nodes = []
        self.symbols, self.size = b"", 0
        self.pages = self.pages[:0].copy()
        self._count(0)

    def _count(self, num_bytes: int) -> None:
        self._trails.num_bytes += num_bytes - self.num_bytes
        self.num_bytes = num_bytes


class Trails:
    """The trails of one tree, and walks along them.

    ``steps`` is the number of steps from which a walk joins its path.

    Memory: `num_bytes`, at most twice the symbols and page ids (4 bytes each) of the runs in
    trails, and 8 bytes a run. Thread safety: none; used under the cache's lock.
    """

    def __init__(self, unit: int, steps: int = _STEPS) -> None:
        self.unit = unit
        """Bytes of symbols per page."""
        self.steps = steps
        self.num_bytes = 0

    def follow(self, start: Node, symbols: bytes | memoryview) -> PrefixMatch:
        """Return the full pages behind ``start`` that are stored of ``symbols``.

        ``symbols`` are bytes; they are read and not kept. Changes no run, but may join the path.
        Cost: one dictionary probe and one memcmp per step, about 0.5 µs and 20 ps a byte; a path
        that was walked before has few steps.
        """
        node, unit = start, self.unit
        taken, offset, more = node.size, 0, 0
        parts: list[PageArray] = []
        view = memoryview(symbols)
        while child := node.children.get(bytes(view[offset : offset + unit])):
            trail = child.trail
            if trail is None or trail.nodes[0] is not child:  # the start lies inside a trail
                trail, stored, pages, size = None, child.front, child.pages, child.size * unit
            else:
                stored, pages, size = trail.symbols, trail.pages, trail.size
            part = view[offset : offset + size]
            # The stored bytes begin with those of the prompt, which need no copy for that.
            agree = stored.startswith(part)
            if agree and len(part) == size:
                node = child if trail is None else trail.nodes[-1]
                taken = node.size
                parts.append(pages)
                offset += size
                continue
            more = len(part) if agree else common_bytes(part, stored)
            count = more // unit
            stop = child.depth + count
            node = child if trail is None else trail.at(stop)
            taken = stop - node.depth
            parts.append(pages[:count])
            if taken < node.size:
                more -= count * unit
                break
            offset += count * unit
            more = 0
        if len(parts) >= self.steps:
            self._join(node)
        return PrefixMatch(joined(parts), node, taken, more)

    def _join(self, end: Node) -> None:
        """Join the path to ``end``: what is behind the last trail that it left, or all of it."""
        pieces: list[RunTrail | Node] = []  # from the end up
        left: list[tuple[int, int]] = []  # of a trail left halfway: its place, and nodes used
        node: Node | None = end
        while node is not None and node.parent is not None:
            trail = node.trail
            if trail is None:
                pieces.append(node)
                node = node.parent
                continue
            if pieces and trail.nodes[-1] is not node:
                left.append((len(pieces), trail.place(node) + 1))
            pieces.append(trail)
            node = trail.nodes[0].parent
        alone = left[0][0] if left else len(pieces)
        if alone >= self.steps:
            self._merge(pieces[:alone], {})
        elif len(pieces) >= 2 * self.steps:
            fronts = dict(left)
            # Else moving them would cost more than the walk did.
            if sum(fronts.values()) <= _MOST_MOVED * len(pieces):
                self._merge(pieces, fronts)

    def _merge(self, pieces: list[RunTrail | Node], left: dict[int, int]) -> None:
        """Make one trail of ``pieces``, from the end up, at least two.

        ``left`` has the nodes to take of trails of which only the front is taken, by place.

        The trail with the most nodes is kept, and only other nodes are visited.
        """
        trails = [(at, piece) for at, piece in enumerate(pieces) if isinstance(piece, RunTrail)]
        whole = [trail for at, trail in trails if at not in left]
        kept = max(whole, key=lambda trail: len(trail.nodes), default=None) or RunTrail(self, [])
        nodes: list[Node] = []
        moved: list[Node] = []
        symbols: list[bytes | memoryview] = []
        pages: list[PageArray] = []
        for at in range(len(pieces) - 1, -1, -1):
            piece = pieces[at]
            if not isinstance(piece, RunTrail):
                own, run, ids = [piece], piece.run, piece.pages
            elif at in left:
                own = piece.nodes[: left[at]]
                ids = piece.pages[: own[-1].end - own[0].depth]
                run = memoryview(piece.symbols)[: len(ids) * self.unit]
            else:
                own, run, ids = piece.nodes, piece.symbols, piece.pages
                if piece.size < len(run):
                    run = memoryview(run)[: piece.size]
            nodes += own
            symbols.append(run)
            pages.append(ids)
            if piece is not kept:
                moved += own
        for at, trail in trails:
            if at in left:
                trail.behind(left[at])
        for one in whole:
            if one is not kept:
                one.end()
        for node in moved:
            node.trail = kept
        kept.nodes = nodes
        kept.put(b"".join(symbols), joined(pages))
