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
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Final

from kvkeep.core.prefix.heads import common_bytes, stored_bytes
from kvkeep.core.prefix.results import EMPTY_PAGES, PrefixMatch, joined

if TYPE_CHECKING:
    from kvkeep.core.pages.tables import PageArray
    from kvkeep.core.prefix.node import Node

__all__ = ["RunTrail", "Trails"]

_STEPS: Final = 8
"""A walk of so many steps joins its path. A step takes about as long as 4 KiB of comparison."""
_SINGLE: Final = 8  # runs of a trail that a walk follows one by one before it looks for its place
_MOST_MOVED: Final = 64  # nodes, for each step of a walk that takes fronts of trails over
_end = attrgetter("end")


def _goes_on(symbols: memoryview, run: bytes | memoryview, offset: int) -> bool:
    """Whether ``symbols`` go on with ``run`` from ``offset`` on; copies neither."""
    part = symbols[offset : offset + len(run)]
    return len(part) == len(run) and stored_bytes(run).startswith(part)


class RunTrail:
    """The symbols and pages of consecutive runs, each the parent of the next, in one piece."""

    __slots__ = ("_trails", "nodes", "num_bytes", "pages", "run")

    def __init__(self, trails: Trails, nodes: list[Node]) -> None:
        self._trails = trails
        self.nodes = nodes
        self.run: bytes | memoryview = b""
        """The symbols; a view of bytes that begin with them once the last runs have left."""
        self.pages: PageArray
        self.num_bytes = 0
        """Bytes that the symbols and pages take, up to twice as much as is used of them."""

    def put(self, symbols: bytes, pages: PageArray) -> None:
        """Set what the nodes store, in memory that is the trail's own."""
        self.run, self.pages = symbols, pages
        self._count(len(symbols) + pages.nbytes)

    def front(self, count: int) -> tuple[memoryview, PageArray]:
        """Return the symbols and pages of the first ``count`` nodes."""
        pages = self.nodes[count - 1].end - self.nodes[0].depth
        return memoryview(self.run)[: pages * self._trails.unit], self.pages[:pages]

    def rest(self, count: int) -> tuple[bytes, PageArray]:
        """Return a copy of the symbols and pages behind the first ``count`` nodes."""
        pages = self.nodes[count - 1].end - self.nodes[0].depth
        return bytes(self.run[pages * self._trails.unit :]), self.pages[pages:].copy()

    def place(self, node: Node) -> int:
        """Return the place of one of the nodes. Cost: O(log n)."""
        return bisect_left(self.nodes, node.end, key=_end)

    def at(self, end: int) -> Node:
        """Return the node of the page before ``end``. Cost: O(log n)."""
        return self.nodes[bisect_left(self.nodes, end, key=_end)]

    def common(self, symbols: memoryview) -> tuple[Node, int, int]:
        """Return how much of its front ``symbols`` begin with: the last node of it, and pages.

        Also the bytes of symbols of one page more.
        """
        unit = self._trails.unit
        count, more = divmod(common_bytes(symbols[: len(self.run)], stored_bytes(self.run)), unit)
        return self.at(self.nodes[0].depth + count), count, more

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
        self.run, self.pages = self.front(len(self.nodes))
        if self.num_bytes > 2 * (len(self.run) + self.pages.nbytes):
            self.put(bytes(self.run), self.pages.copy())

    def behind(self, count: int) -> None:
        """Take out the first ``count`` nodes. Cost: one copy of what follows them."""
        if len(self.nodes) - count < 2:
            self.end()
            return
        symbols, pages = self.rest(count)
        for node in self.nodes[:count]:
            node.trail = None
        del self.nodes[:count]
        self.put(symbols, pages)

    def end(self) -> None:
        """End the trail: its nodes are in none."""
        for node in self.nodes:
            node.trail = None
        self.nodes = []
        self.run, self.pages = b"", EMPTY_PAGES
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

    def follow(  # noqa: PLR0912 - a call would take as long as a step
        self, start: Node, symbols: bytes | memoryview
    ) -> PrefixMatch:
        """Return the full pages behind ``start`` that are stored of ``symbols``.

        ``symbols`` are bytes; they are read and not kept. Changes no run, but may join the path.
        Cost: one dictionary probe and one memcmp per step, about 0.3 µs and 20 ps a byte; a path
        that was walked before has few steps. Where a prompt leaves a trail, its first runs are
        steps, and further ones together cost as much as some ten.
        """
        node, unit = start, self.unit
        offset = more = 0
        parts: list[PageArray] = []
        left: RunTrail | None = None  # the prompt leaves it: where that begins, and parts before
        begin = before = 0
        inside = 0  # parts that are not the first ones of their trails
        alone = 0  # the first part behind the last trail that the prompt left
        if type(symbols) is bytes:
            own, goes_on = symbols, symbols.startswith
        else:
            own, goes_on = None, partial(_goes_on, memoryview(symbols))
        while child := node.children.get(
            bytes(symbols[offset : offset + unit]) if own is None else own[offset : offset + unit]
        ):
            trail = child.trail
            if trail is not None:
                if trail.nodes[0] is child:
                    run = trail.run
                    if goes_on(run, offset):
                        node = trail.nodes[-1]
                        parts.append(trail.pages)
                        offset += len(run)
                        continue
                    left, begin, before = trail, offset, len(parts)
                    alone = before + 1
                elif trail is left:
                    if len(parts) < before + _SINGLE:
                        inside, alone = inside + 1, alone + 1
                    else:
                        inside, alone = inside - _SINGLE + 1, before + 1
                        node, count, more = trail.common(memoryview(symbols)[begin:])
                        parts[before:] = [trail.pages[:count]]
                        taken = node.size - (node.end - trail.nodes[0].depth - count)
                        if taken < node.size:
                            break
                        offset, more = begin + count * unit, 0
                        continue
            run = child.run
            if goes_on(run, offset):
                node = child
                parts.append(child.pages)
                offset += len(run)
                continue
            part = memoryview(symbols)[offset : offset + len(run)]
            taken, more = divmod(common_bytes(part, stored_bytes(run)), unit)
            node = child
            parts.append(child.pages[:taken])
            break
        else:
            taken = node.size
        if len(parts) - alone >= self.steps or len(parts) - inside >= 2 * self.steps:
            self._join(node, taken)
        return PrefixMatch(joined(parts), node, taken, more)

    def _join(self, end: Node, taken: int) -> None:
        """Join the path to ``end``: what is behind the last trail that it left, or all of it.

        A run that matches in part is left out if it is in no trail: it may be cut there soon, and
        what is behind the cut is not on the path.
        """
        pieces: list[RunTrail | Node] = []  # from the end up
        left: dict[int, int] = {}  # of a trail left halfway: its place, and nodes used
        node = end if taken == end.size or end.trail is not None else end.parent
        while node is not None and node.parent is not None:
            trail = node.trail
            if trail is None:
                pieces.append(node)
                node = node.parent
                continue
            if pieces and trail.nodes[-1] is not node:
                left[len(pieces)] = trail.place(node) + 1
            pieces.append(trail)
            node = trail.nodes[0].parent
        alone = next(iter(left), len(pieces))
        if alone >= self.steps:
            self._merge(pieces[:alone], {})
        elif len(pieces) >= 2 * self.steps:
            self._merge(pieces, left)

    def _merge(self, pieces: list[RunTrail | Node], left: dict[int, int]) -> None:
        """Make one trail of ``pieces``, from the end up, at least two.

        ``left`` has the nodes to take of trails of which only the front is taken, by place. Nothing
        is done if moving these would cost more than the walk did.

        The trail is kept that makes the fewest nodes change their trail, and only those are
        visited: all that are not in it, and what is behind its own front.
        """
        trails = [
            (piece, left.get(at, len(piece.nodes)))
            for at, piece in enumerate(pieces)
            if isinstance(piece, RunTrail)
        ]
        none = RunTrail(self, []), 0
        kept, on_path = max([none, *trails], key=lambda one: 2 * one[1] - len(one[0].nodes))
        changes = sum(count for _, count in trails) + len(kept.nodes) - 2 * on_path
        if left and changes > _MOST_MOVED * len(pieces):
            return
        nodes: list[Node] = []
        moved: list[Node] = []
        symbols: list[bytes | memoryview] = []
        pages: list[PageArray] = []
        for at in range(len(pieces) - 1, -1, -1):
            piece = pieces[at]
            if isinstance(piece, RunTrail):
                count = left.get(at, len(piece.nodes))
                own, (run, ids) = piece.nodes[:count], piece.front(count)
            else:
                own, run, ids = [piece], memoryview(piece.run), piece.pages
            nodes += own
            symbols.append(run)
            pages.append(ids)
            if piece is not kept:
                moved += own
        path = b"".join(symbols), joined(pages)  # before any change: memory may be short
        for trail, count in trails:
            if trail is not kept:
                trail.behind(count)
        if on_path < len(kept.nodes):
            self._part(kept, on_path)
        for node in moved:
            node.trail = kept
        kept.nodes = nodes
        kept.put(*path)

    def _part(self, trail: RunTrail, count: int) -> None:
        """Put what is behind the first ``count`` nodes of a trail into one of its own."""
        nodes = trail.nodes[count:]
        rest = RunTrail(self, nodes) if len(nodes) > 1 else None
        if rest is not None:
            rest.put(*trail.rest(count))
        for node in nodes:
            node.trail = rest
