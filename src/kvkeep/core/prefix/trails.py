"""`Trails`: walks along the runs of a tree, and copies of long paths in one piece; `Heads`.

A path of many short runs is kept joined a second time, as a *trail*: its symbols and pages in one
piece each. So a prompt that was walked before is followed with one comparison, however its path was
cut. `Heads` finds the child of a node whose first page shares most with a prompt.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Final, cast

import numpy as np

from kvkeep.core.pages.tables import EMPTY_PAGES, joined

if TYPE_CHECKING:
    from collections.abc import Collection

    from kvkeep.core.pages.tables import PageArray
    from kvkeep.core.prefix.node import Node

__all__ = [
    "Heads",
    "PrefixMatch",
    "RunTrail",
    "Trails",
    "common_bytes",
    "common_head",
    "stored_bytes",
]

_STEPS: Final = 8
"""A walk of so many steps joins its path. A step takes about as long as 4 KiB of comparison."""

_SINGLE: Final = 8  # runs of a trail that a walk follows one by one before it looks for its place
_MOST_MOVED: Final = 64  # nodes, for each step of a walk that takes fronts of trails over
_end = attrgetter("end")

_BLOCK = 512
_STEP = 1024  # bytes


def common_head(left: bytes, right: bytes) -> int:
    """Return how many leading bytes two short byte strings share."""
    length = min(len(left), len(right))
    differs = int.from_bytes(left[:length], "little") ^ int.from_bytes(right[:length], "little")
    if not differs:
        return length
    return ((differs & -differs).bit_length() - 1) >> 3


def stored_bytes(run: bytes | memoryview) -> bytes:
    """Return the bytes that ``run`` is the first of: a run that lost its tail is a view of them."""
    if type(run) is bytes:
        return run
    stored = cast("memoryview", run).obj
    assert type(stored) is bytes
    return stored


def common_bytes(part: memoryview, whole: bytes) -> int:
    """Return how many leading bytes ``part``, of bytes, and ``whole`` share.

    Cost: 2 µs, and at most three passes over those.
    """
    length = min(len(part), len(whole))
    if length < len(whole) and whole.startswith(part):
        return length
    low, step = 0, _STEP
    while low < length:
        high = min(low + step, length)
        if whole.startswith(part[low:high], low):
            low, step = high, step * 4
            continue
        while high - low > _STEP:
            middle = (low + high) >> 1
            if whole.startswith(part[low:middle], low):
                low = middle
            else:
                high = middle
        given = np.frombuffer(part, np.uint8, high - low, low)
        return low + int((given != np.frombuffer(whole, np.uint8, high - low, low)).argmax())
    return length


class Heads:
    """The keys of a node's children in lexicographic order.

    The key that shares the longest head with a given one is its neighbour in this order. Keys lie
    in blocks of some hundred, so adding one moves few. Removals of children are not reported: a key
    without a child is dropped when a search meets it. Once most keys have none, all are dropped.

    Cost: O(log n) comparisons to find and to add, amortised over removals.
    """

    __slots__ = ("_blocks", "_count", "_last")

    def __init__(self) -> None:
        self._blocks: list[list[bytes]] = [[]]
        self._last: list[bytes] = [b""]  # no key of block i is larger than _last[i]
        self._count = 0

    def add(self, key: bytes, alive: Collection[bytes]) -> None:
        """Add ``key``; ``alive`` are the children's present keys, this one among them."""
        if self._count > 2 * len(alive) + _BLOCK:
            self._rebuild(alive)
        at = bisect_left(self._last, key)
        if at == len(self._blocks):
            at -= 1
            self._last[at] = key
        block = self._blocks[at]
        place = bisect_left(block, key)
        if place < len(block) and block[place] == key:
            return  # a key that was removed, but not dropped yet, is added again
        block.insert(place, key)
        self._count += 1
        if len(block) > 2 * _BLOCK:
            half = len(block) >> 1
            self._blocks[at : at + 1] = [block[:half], block[half:]]
            self._last.insert(at, block[half - 1])

    def closest(self, key: bytes, alive: Collection[bytes]) -> tuple[bytes, int] | None:
        """Return the living key with the longest head in common, and its length in bytes."""
        best: tuple[bytes, int] | None = None
        at = min(bisect_left(self._last, key), len(self._blocks) - 1)
        place = bisect_left(self._blocks[at], key)
        for neighbour in (self._after(at, place, alive), self._before(at, place, alive)):
            if neighbour is not None:
                common = common_head(key, neighbour)
                if best is None or common > best[1]:
                    best = neighbour, common
        return best

    def _after(self, at: int, place: int, alive: Collection[bytes]) -> bytes | None:
        for block in self._blocks[at:]:
            while place < len(block):
                if block[place] in alive:
                    return block[place]
                del block[place]
                self._count -= 1
            place = 0
        return None

    def _before(self, at: int, place: int, alive: Collection[bytes]) -> bytes | None:
        block = self._blocks[at]
        while True:
            while place > 0:
                place -= 1
                if block[place] in alive:
                    return block[place]
                del block[place]
                self._count -= 1
            if at == 0:
                return None
            at -= 1
            block = self._blocks[at]
            place = len(block)

    def _rebuild(self, alive: Collection[bytes]) -> None:
        keys = [key for block in self._blocks for key in block if key in alive]
        self._blocks = [keys[i : i + _BLOCK] for i in range(0, len(keys), _BLOCK)] or [[]]
        self._last = [block[-1] if block else b"" for block in self._blocks]
        self._count = len(keys)


def _goes_on(symbols: memoryview, run: bytes | memoryview, offset: int) -> bool:
    """Whether ``symbols`` go on with ``run`` from ``offset`` on; copies neither."""
    part = symbols[offset : offset + len(run)]
    return len(part) == len(run) and stored_bytes(run).startswith(part)


@dataclass(slots=True, eq=False)
class PrefixMatch:
    """The longest cached prefix of a prompt; valid until the index changes."""

    pages: PageArray
    """The full pages, int32, in order."""
    end: Node
    """The node in which the full pages end. For the index."""
    taken: int
    """Pages of ``end`` that match."""
    more: int = field(default=0, repr=False)
    """Bytes of symbols that agree beyond them, if the match ends inside ``end``. For the index."""
    partial_page: int = -1
    """The page of which only the first ``partial_tokens`` tokens match; -1 for none."""
    partial_tokens: int = 0
    source: Node | None = field(default=None, repr=False)
    """The node that stores the partial page. For the index."""

    def without_partial(self) -> PrefixMatch:
        """Return the same match without its partial page."""
        return PrefixMatch(self.pages, self.end, self.taken, self.more)

    def node_at(self, page: int) -> Node:
        """Return the node in which page ``page - 1`` lies, of the full pages that match.

        Cost: the runs and trails behind it.
        """
        node = self.end
        while node.depth >= page:
            trail: RunTrail | None = node.trail
            first = node if trail is None else trail.nodes[0]
            if trail is not None and first.depth < page:
                return trail.at(page)
            assert first.parent is not None
            node = first.parent
        return node

    def first(self, pages: int) -> PrefixMatch:
        """Return the match of the first ``pages`` full pages, at least one."""
        node = self.node_at(pages)
        return PrefixMatch(self.pages[:pages], node, pages - node.depth)

    def first_node(self, page: int = 0) -> Node | None:
        """Return the node in which the path goes on behind page ``page``, where a run ends.

        None if no full page behind it matches.
        """
        return self.node_at(page + 1) if len(self.pages) > page else None


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
                elif trail is left and left is not None:
                    if len(parts) < before + _SINGLE:
                        inside, alone = inside + 1, alone + 1
                    else:
                        inside, alone = inside - _SINGLE + 1, before + 1
                        node, count, more = left.common(memoryview(symbols)[begin:])
                        parts[before:] = [left.pages[:count]]
                        taken = node.size - (node.end - left.nodes[0].depth - count)
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
