"""`Trails`: walks along the runs of a tree, and copies of long paths in one piece; `Heads`.

The symbols and pages of a path of many short runs are stored a second time, in one piece each: a
*trail*. So a path that was walked before is matched with one comparison, however it was cut.
`Heads` finds the child of a node whose first page has the longest common prefix with a prompt.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Final, cast

import numpy as np

from kvkeep.core.pages.pool import EMPTY_PAGES, joined

if TYPE_CHECKING:
    from collections.abc import Collection

    from kvkeep.core.pages.pool import PageArray
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
"""Steps of a walk that joins its path. A step takes as long as a comparison of 4 KiB."""

_SINGLE: Final = 8  # runs of a trail that a walk compares one by one, before it searches the trail
_MOST_MOVED: Final = 64  # nodes that a join moves to another trail, for each step of its walk
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
    """Return the bytes that ``run`` is a prefix of: a run that lost its tail is a view of them."""
    if type(run) is bytes:
        return run
    stored = cast("memoryview", run).obj
    assert type(stored) is bytes
    return stored


def common_bytes(part: memoryview, whole: bytes) -> int:
    """Return how many leading bytes ``part`` and ``whole`` share.

    ``part`` is a view of bytes. Cost: 2 µs, and at most three passes over the shared bytes.
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

    The key with the longest common prefix with a given one is its neighbour in this order. Keys lie
    in blocks of some hundred, so adding one moves few. Removals of children are not reported: a key
    without a child is dropped when a search meets it, and all of them once most keys have none.

    Cost: O(log n) comparisons to find and to add, amortised over removals.
    """

    __slots__ = ("_blocks", "_count", "_last")

    def __init__(self) -> None:
        self._blocks: list[list[bytes]] = [[]]
        self._last: list[bytes] = [b""]  # no key of block i is larger than _last[i]
        self._count = 0

    def add(self, key: bytes, present: Collection[bytes]) -> None:
        """Add ``key``; ``present`` are the keys of all children, this one among them."""
        if self._count > 2 * len(present) + _BLOCK:
            self._rebuild(present)
        at = bisect_left(self._last, key)
        if at == len(self._blocks):
            at -= 1
            self._last[at] = key
        block = self._blocks[at]
        index = bisect_left(block, key)
        if index < len(block) and block[index] == key:
            return  # a key that was removed, but not dropped yet, is added again
        block.insert(index, key)
        self._count += 1
        if len(block) > 2 * _BLOCK:
            half = len(block) >> 1
            self._blocks[at : at + 1] = [block[:half], block[half:]]
            self._last.insert(at, block[half - 1])

    def closest(self, key: bytes, present: Collection[bytes]) -> tuple[bytes, int] | None:
        """Return the key of a child with the longest common prefix, and that length in bytes."""
        best: tuple[bytes, int] | None = None
        at = min(bisect_left(self._last, key), len(self._blocks) - 1)
        index = bisect_left(self._blocks[at], key)
        for neighbour in (self._after(at, index, present), self._before(at, index, present)):
            if neighbour is not None:
                common = common_head(key, neighbour)
                if best is None or common > best[1]:
                    best = neighbour, common
        return best

    def _after(self, at: int, index: int, present: Collection[bytes]) -> bytes | None:
        for block in self._blocks[at:]:
            while index < len(block):
                if block[index] in present:
                    return block[index]
                del block[index]
                self._count -= 1
            index = 0
        return None

    def _before(self, at: int, index: int, present: Collection[bytes]) -> bytes | None:
        block = self._blocks[at]
        while True:
            while index > 0:
                index -= 1
                if block[index] in present:
                    return block[index]
                del block[index]
                self._count -= 1
            if at == 0:
                return None
            at -= 1
            block = self._blocks[at]
            index = len(block)

    def _rebuild(self, present: Collection[bytes]) -> None:
        keys = [key for block in self._blocks for key in block if key in present]
        self._blocks = [keys[i : i + _BLOCK] for i in range(0, len(keys), _BLOCK)] or [[]]
        self._last = [block[-1] if block else b"" for block in self._blocks]
        self._count = len(keys)


def _goes_on(symbols: memoryview, run: bytes | memoryview, offset: int) -> bool:
    """Whether ``symbols`` continue with ``run`` at ``offset``; copies neither."""
    part = symbols[offset : offset + len(run)]
    return len(part) == len(run) and stored_bytes(run).startswith(part)


@dataclass(slots=True, eq=False)
class PrefixMatch:
    """The longest cached prefix of a prompt; valid until the index changes."""

    pages: PageArray
    """The full pages, int32, in order."""
    end: Node
    """The node in which the full pages end."""
    end_pages: int
    """Pages of ``end`` that match, from its first one on."""
    more_bytes: int = field(default=0, repr=False)
    """Bytes of symbols that match beyond the full pages, if the match ends inside ``end``."""
    partial_page: int = -1
    """The page of which only the first ``partial_tokens`` tokens match; -1 for none."""
    partial_tokens: int = 0
    source: Node | None = field(default=None, repr=False)
    """The node that stores the partial page."""

    def without_partial(self) -> PrefixMatch:
        """Return the same match without its partial page."""
        return PrefixMatch(self.pages, self.end, self.end_pages, self.more_bytes)

    def node_at(self, page: int) -> Node:
        """Return the node of the ``page``-th full page, from 1. Cost: runs and trails behind it."""
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


class RunTrail:
    """A copy of the symbols and pages of consecutive runs, each the parent of the next."""

    __slots__ = ("_trails", "nodes", "num_bytes", "pages", "run")

    def __init__(self, trails: Trails, nodes: list[Node]) -> None:
        self._trails = trails
        self.nodes = nodes
        self.run: bytes | memoryview = b""
        """The symbols; a view of longer bytes once runs have left at the end."""
        self.pages: PageArray
        self.num_bytes = 0
        """Memory of the symbols and pages: up to twice their size."""

    def put(self, symbols: bytes, pages: PageArray) -> None:
        """Set the symbols and pages of the nodes, copies that the trail alone refers to."""
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

    def index(self, node: Node) -> int:
        """Return the index of one of the nodes. Cost: O(log n)."""
        return bisect_left(self.nodes, node.end, key=_end)

    def at(self, end: int) -> Node:
        """Return the node that stores the ``end``-th page of the path. Cost: O(log n)."""
        return self.nodes[bisect_left(self.nodes, end, key=_end)]

    def common(self, symbols: memoryview) -> tuple[Node, int, int]:
        """Return the node where ``symbols`` differ, the full pages that match, and bytes beyond."""
        unit = self._trails.unit
        count, more = divmod(common_bytes(symbols[: len(self.run)], stored_bytes(self.run)), unit)
        return self.at(self.nodes[0].depth + count), count, more

    def cut_off(self, upper: Node, lower: Node) -> None:
        """Record that ``upper`` takes the first pages of ``lower``, which is one of the nodes."""
        self.nodes.insert(self.index(lower), upper)
        upper.trail = self

    def absorbed(self, upper: Node) -> None:
        """Record that the node behind ``upper``, one of the nodes, took its pages."""
        del self.nodes[self.index(upper)]
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
        """Take out the first ``count`` nodes. Cost: one copy of the rest."""
        if len(self.nodes) - count < 2:
            self.end()
            return
        symbols, pages = self.rest(count)
        for node in self.nodes[:count]:
            node.trail = None
        del self.nodes[:count]
        self.put(symbols, pages)

    def end(self) -> None:
        """Take out all nodes."""
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

    Memory: `num_bytes`, at most twice the symbols and page ids (4 bytes each) of the runs in
    trails, and 8 bytes a run. Thread safety: none; used under the cache's lock.
    """

    def __init__(self, unit: int) -> None:
        self.unit = unit
        """Bytes of symbols per page."""
        self.steps = _STEPS
        """A walk of so many steps joins its path."""
        self.num_bytes = 0

    def follow(  # noqa: PLR0912 - a call would take as long as a step
        self, start: Node, symbols: bytes | memoryview
    ) -> PrefixMatch:
        """Return the longest match of ``symbols`` behind ``start``.

        ``symbols`` are bytes; they are read and not kept. Changes no run, but may join the path.
        Cost: one dictionary probe and one memcmp per step, about 0.3 µs and 20 ps a byte; a path
        that was walked before has few steps. In a trail that matches in part, the first `_SINGLE`
        runs are steps; all further ones together cost as much as about ten steps.
        """
        node, unit = start, self.unit
        offset = more = 0
        parts: list[PageArray] = []
        partly: RunTrail | None = None  # the last trail that matches only in part
        begin = before = 0  # the offset at which it begins, and the parts before it
        inside = 0  # parts that are not the first ones of their trails
        alone = 0  # the first part behind that trail
        if type(symbols) is bytes:
            whole, goes_on = symbols, symbols.startswith
        else:
            whole, goes_on = None, partial(_goes_on, memoryview(symbols))
        while child := node.children.get(
            bytes(symbols[offset : offset + unit])
            if whole is None
            else whole[offset : offset + unit]
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
                    partly, begin, before = trail, offset, len(parts)
                    alone = before + 1
                elif trail is partly and partly is not None:
                    if len(parts) < before + _SINGLE:
                        inside, alone = inside + 1, alone + 1
                    else:
                        inside, alone = inside - _SINGLE + 1, before + 1
                        node, count, more = partly.common(memoryview(symbols)[begin:])
                        parts[before:] = [partly.pages[:count]]
                        end_pages = node.size - (node.end - partly.nodes[0].depth - count)
                        if end_pages < node.size:
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
            end_pages, more = divmod(common_bytes(part, stored_bytes(run)), unit)
            node = child
            parts.append(child.pages[:end_pages])
            break
        else:
            end_pages = node.size
        if len(parts) - alone >= self.steps or len(parts) - inside >= 2 * self.steps:
            self._join(node, end_pages)
        return PrefixMatch(joined(parts), node, end_pages, more)

    def _join(self, end: Node, end_pages: int) -> None:
        """Join the path to ``end``: the runs behind the last trail that matches in part, or all.

        A run that matches in part is left out if it is in no trail: it may be cut there soon, and
        the pages behind the cut are not on the path.
        """
        pieces: list[RunTrail | Node] = []  # from the end up
        fronts: dict[int, int] = {}  # index of a trail that matches in part → its nodes on the path
        node = end if end_pages == end.size or end.trail is not None else end.parent
        while node is not None and node.parent is not None:
            trail = node.trail
            if trail is None:
                pieces.append(node)
                node = node.parent
                continue
            if pieces and trail.nodes[-1] is not node:
                fronts[len(pieces)] = trail.index(node) + 1
            pieces.append(trail)
            node = trail.nodes[0].parent
        alone = next(iter(fronts), len(pieces))
        if alone >= self.steps:
            self._merge(pieces[:alone], {})
        elif len(pieces) >= 2 * self.steps:
            self._merge(pieces, fronts)

    def _merge(self, pieces: list[RunTrail | Node], fronts: dict[int, int]) -> None:
        """Make one trail of ``pieces``, from the end up, at least two.

        ``fronts`` has the number of nodes to take of trails whose front alone is on the path, by
        the index of the piece. Nothing is done if moving nodes would cost more than the walk did.

        One of the trails is extended: the one for which the fewest nodes move to another trail.
        Only nodes that move are visited.
        """
        trails = [
            (piece, fronts.get(at, len(piece.nodes)))
            for at, piece in enumerate(pieces)
            if isinstance(piece, RunTrail)
        ]
        none = RunTrail(self, []), 0
        base, on_path = max([none, *trails], key=lambda pair: 2 * pair[1] - len(pair[0].nodes))
        changes = sum(count for _, count in trails) + len(base.nodes) - 2 * on_path
        if fronts and changes > _MOST_MOVED * len(pieces):
            return
        nodes: list[Node] = []
        moved: list[Node] = []
        symbols: list[bytes | memoryview] = []
        pages: list[PageArray] = []
        for at in range(len(pieces) - 1, -1, -1):
            piece = pieces[at]
            if isinstance(piece, RunTrail):
                count = fronts.get(at, len(piece.nodes))
                part, (run, ids) = piece.nodes[:count], piece.front(count)
            else:
                part, run, ids = [piece], memoryview(piece.run), piece.pages
            nodes += part
            symbols.append(run)
            pages.append(ids)
            if piece is not base:
                moved += part
        path = b"".join(symbols), joined(pages)  # before any change: memory may be short
        for trail, count in trails:
            if trail is not base:
                trail.behind(count)
        if on_path < len(base.nodes):
            rest = base.nodes[on_path:]
            tail = RunTrail(self, rest) if len(rest) > 1 else None
            if tail is not None:
                tail.put(*base.rest(on_path))
            for node in rest:
                node.trail = tail
        for node in moved:
            node.trail = base
        base.nodes = nodes
        base.put(*path)
