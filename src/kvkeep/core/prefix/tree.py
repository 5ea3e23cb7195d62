"""`RunTree`: a radix tree whose edges are runs of pages, and which of them may be evicted.

The tree compares *symbols*, a fixed number of bytes per page: the page's tokens (`RadixIndex`) or
its 32-byte block key (`ChainIndex`). A run is one `bytes`, so following an edge costs one
dictionary probe and one memcmp, however long the edge is.

    root ── "system prompt", 12 pages ─┬─ "first question", 3 pages
     (one per namespace)               └─ "second question", 4 pages ── "its follow-up", 2 pages

Three decisions make eviction cheap:

- A hold is counted on its node and upwards only to the first ancestor that is held already. So
  a node with ``holders == 0`` can be evicted, and no path is walked twice.
- Only leaves without holders are in the eviction policy; evicting one makes its parent the next
  candidate. So tails are evicted first, and nothing is ever searched.
- A use is recorded where it ends, and passed to the parent when a child is evicted
  (`EvictionPolicy.inherit`). So a use of a long path does not walk it.
"""

from __future__ import annotations

from bisect import bisect_left
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Final, cast

from kvkeep.core.errors import InvalidValue
from kvkeep.core.eviction.hints import Hinted
from kvkeep.core.eviction.queues import AgeQueue
from kvkeep.core.prefix.heads import Heads, common_bytes, stored_bytes
from kvkeep.core.prefix.node import Node, Root
from kvkeep.core.prefix.owners import Owners
from kvkeep.core.prefix.pinned import Pins
from kvkeep.core.prefix.results import EMPTY_PAGES, PrefixMatch, joined
from kvkeep.core.prefix.waits import Waits
from kvkeep.core.public import public_namespace

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvkeep.core.eviction import EvictionPolicy
    from kvkeep.core.keys import Namespace
    from kvkeep.core.pages.tables import PageArray
    from kvkeep.core.prefix.owners import Owner
    from kvkeep.core.returns import Returns

__all__ = ["RunTrail", "RunTree", "Trails", "TreeListener", "tops"]

_STEPS: Final = 8
"""A walk of so many steps joins its path. A step takes about as long as 4 KiB of comparison."""

_SINGLE: Final = 8  # runs of a trail that a walk follows one by one before it looks for its place
_MOST_MOVED: Final = 64  # nodes, for each step of a walk that takes fronts of trails over
_end = attrgetter("end")


class TreeListener:
    """Base class of what keeps data beside the pages of nodes; every method does nothing.

    Called in the middle of an operation and under the cache's lock: it must not change the tree.
    """

    def stored(self, leaf: Node) -> None:
        """``leaf``, a new node, is in the tree."""

    def grown(self, node: Node, pages: int) -> None:
        """``node`` got ``pages`` more at its end."""

    def split(self, upper: Node, lower: Node) -> None:
        """``upper``, a new node, took the first pages of ``lower``."""

    def rejoined(self, upper: Node, lower: Node) -> None:
        """``lower`` took back the pages of ``upper``, which is gone."""

    def trimming(self, leaf: Node, keep: int) -> None:
        """``leaf`` is about to lose its pages behind the first ``keep``; at 0 it goes itself."""


_GROW_PAGES = 128
"""A leaf shorter than this grows in place when its only holder publishes more. So a conversation or
a long decode becomes a few long runs, not one per publish, and no publish copies more than this."""


class RunTree:
    """Nodes, their holders, and the leaves that may be evicted.

    ``unit`` is the number of symbol bytes per page. ``ordered`` keeps the keys of siblings in
    order (`Heads`), for an index that matches parts of pages.

    Thread safety: none; used under the cache's lock.
    """

    def __init__(self, policy: EvictionPolicy, unit: int, *, ordered: bool) -> None:
        if policy.taken:
            raise InvalidValue(f"{policy!r} serves another cache; make a policy for each")
        policy.taken = True
        self.policy = policy
        self.unit = unit
        self.roots: dict[Namespace, Root] = {}
        self.num_pages = 0
        self.num_evictable = 0
        """Pages of nodes without holders."""
        self.pins = Pins()
        self.owners: Owners | None = None
        self.waits: Waits | None = None
        """Where conversations wait; None if the policy does not order by that."""
        self.pinned_leaves = AgeQueue[float]()
        """Leaves without holders that have soft pins: evicted after all that the policy orders."""
        self.ordered = ordered
        self.listener: TreeListener | None = None
        self.trails = Trails(unit)
        self._serial = 0  # of the newest node

    def keep_owners(self) -> Owners:
        """Start to record owners; pages stored before count as shared."""
        if self.owners is None:
            if not isinstance(self.policy, Hinted):
                self.policy = Hinted(self.policy)
            self.owners = Owners(self.policy)
        return self.owners

    def keep_waits(self, returns: Returns, clock: Callable[[], float], page_size: int) -> Waits:
        """Start to record where conversations wait, by a clock in seconds."""
        if self.waits is None:
            self.waits = Waits(self, returns, clock, page_size)
            self.policy.attend(returns, clock)
        return self.waits

    def root(self, namespace: Namespace) -> Root:
        """Return the root of a namespace, made if there is none."""
        root = self.roots.get(namespace)
        if root is None:
            self._serial += 1
            root = self.roots[namespace] = Root(namespace, self._serial)
        return root

    def remove_if_empty(self, root: Node) -> None:
        """Remove a root without children and holders."""
        assert isinstance(root, Root)
        if not root.children and not root.holders:
            del self.roots[root.namespace]

    # --- holders and candidates for eviction -------------------------------------------------

    def hold(self, node: Node) -> None:
        """Protect the path to ``node``. Cost: up to the first ancestor that is held already."""
        held = node
        while not held.holders and held.parent is not None:
            held.holders = 1
            held = held.parent
        held.holders += 1
        if held is not node:
            self.num_evictable -= node.end - held.end
            if not node.children:
                self.dequeue(node)

    def release(self, node: Node) -> None:
        """End one hold on ``node``. Cost: up to the first ancestor that is held by others."""
        held = node
        while held.holders == 1 and held.parent is not None:
            held.holders = 0
            held = held.parent
        assert held.holders > 0, "released more often than held"
        held.holders -= 1
        if held is not node:
            self.num_evictable += node.end - held.end
            if not node.children:
                self.enqueue(node)
        if not held.holders:
            self.remove_if_empty(held)

    def enqueue(self, leaf: Node) -> None:
        """Make a leaf without holders a candidate for eviction."""
        if leaf.pins:
            self.pinned_leaves.push(leaf, leaf.last_used)
        else:
            self.policy.add(leaf)

    def dequeue(self, leaf: Node) -> None:
        """Undo `enqueue`; call it before the leaf's pins change."""
        if leaf.pins:
            self.pinned_leaves.remove(leaf)
        else:
            self.policy.discard(leaf)

    # --- storing -----------------------------------------------------------------------------

    def append(
        self,
        node: Node,
        symbols: bytes,
        pages: PageArray,
        priority: int,
        *,
        owner: Owner | None,
        publisher: Node,
        namespace: Namespace | None = None,
    ) -> Node:
        """Store pages behind ``node`` and return the node in which they end.

        They extend ``node`` itself if only the ``publisher``'s hold protects it and it is short.
        ``namespace`` is whose they are, by default that of ``node``.
        """
        self.num_pages += len(pages)
        if (
            node is publisher
            and node.holders == 1
            and not node.children
            and not node.pins
            and node.parent is not None
            and node.size < _GROW_PAGES
            and node.owner is owner
            and (namespace is None or namespace == node.namespace)
        ):
            node.grow(symbols, pages)
            if self.owners is not None:
                self.owners.resized(node, len(pages))
            if self.listener is not None:
                self.listener.grown(node, len(pages))
            self.policy.grown(node)
            return node
        if not node.children and not node.holders and node.parent is not None:
            self.dequeue(node)
        self._serial += 1
        leaf = Node(node, symbols, pages.copy(), self.unit, self._serial)
        if namespace is not None:
            leaf.namespace = namespace
        self._attach(node, leaf)
        if self.listener is not None:
            self.listener.stored(leaf)
        self.policy.stored(leaf, priority)
        self.num_evictable += leaf.size
        if owner is not None:
            assert self.owners is not None
            self.owners.born(leaf, owner)
        self.enqueue(leaf)
        return leaf

    def _attach(self, node: Node, child: Node) -> None:
        node.children[child.key] = child
        if not self.ordered or len(node.children) < 2:
            return
        if node.heads is None:
            node.heads = Heads()
            for key in node.children:
                node.heads.add(key, node.children)
        else:
            node.heads.add(child.key, node.children)

    def split(self, node: Node, at: int) -> Node:
        """Cut a run before its page ``at``; return the new front, ``node`` remains the end."""
        assert 0 < at < node.size
        parent = node.parent
        assert parent is not None
        # The queue of pinned leaves orders by last use alone, so a pinned leaf keeps its place.
        requeued = self.policy.sized and not (node.children or node.holders or node.pins)
        if requeued:
            self.dequeue(node)
        self._serial += 1
        front = bytes(node.run[: at * self.unit])
        upper = Node(parent, front, node.pages[:at].copy(), self.unit, self._serial)
        upper.namespace = node.namespace
        self.policy.split(upper, node)
        if node.covered:
            self.pins.split(upper, node)
        upper.holders = 1 if node.holders else 0
        node.cut_off(upper, self.unit)
        if self.owners is not None:
            self.owners.split(upper, node)
        if self.listener is not None:
            self.listener.split(upper, node)
        if requeued:
            self.enqueue(node)
        return upper

    def rejoin(self, upper: Node) -> None:
        """Undo a split that was made for a hold, which ended without a use.

        Without this, most prompts that share a first token by chance would leave two runs each.
        Runs are joined only where nothing distinguishes them: no hold, pin, use or owner of the
        front alone. A longer run than `_GROW_PAGES` stays cut, to bound the bytes copied.
        """
        parent = upper.parent
        (lower,) = upper.children.values()
        if (
            parent is None
            or upper.holders > bool(lower.holders)
            or upper.spot is not None
            or upper.hits
            or upper.uses
            or upper.last_used > lower.last_used
            or upper.priority > lower.priority
            or upper.owner is not lower.owner
            or upper.wait is not None
            or upper.gone is not None
            or (upper.died, upper.due) != (lower.died, lower.due)
            or (upper.namespace is not lower.namespace and upper.namespace != lower.namespace)
            or upper.size + lower.size > _GROW_PAGES
        ):
            return
        requeued = self.policy.sized and not (lower.children or lower.holders or lower.pins)
        if requeued:
            self.dequeue(lower)
        if self.owners is not None:
            self.owners.rejoined(upper)
        lower.absorb(upper)
        if self.listener is not None:
            self.listener.rejoined(upper, lower)
        if requeued:
            self.enqueue(lower)

    # --- removing ----------------------------------------------------------------------------

    def evict(self, count: int) -> PageArray:
        """Remove ``count`` pages, or all evictable ones if they are fewer; return their ids.

        Pages go from the tails of the leaves that the policy names, and from leaves with soft
        pins when no others are left. Cost: about 1.5 µs a run, whatever is stored.
        """
        count = min(count, self.num_evictable)
        freed: list[PageArray] = []
        pop = cast("Callable[[], Node | None]", self.policy.pop)
        portions = self.policy.portions
        left = count
        while left:
            leaf = pop()
            most = left
            if leaf is None:
                leaf = cast("Node | None", self.pinned_leaves.pop())
                assert leaf is not None, "evictable pages that are in no queue"
            elif portions:
                most = min(left, self.policy.portion(leaf))
                assert most > 0, "the policy takes no page of its own victim"
            if leaf.size > most:
                freed.append(self._trim(leaf, most))
                if leaf.pins:
                    self.enqueue(leaf)
                else:
                    self.policy.put_back(leaf)
                left -= most
                continue
            left -= leaf.size
            freed.append(leaf.pages)
            self._unlink(leaf)
        self.num_pages -= count
        self.num_evictable -= count
        return joined(freed)

    def evict_leaf(self, choose: Callable[[Node, int], int]) -> PageArray | None:
        """Remove pages of the policy's next victim; return their ids, None if it names none.

        ``choose(leaf, portion)`` returns how many pages to remove from its tail, given how many the
        policy would; for 0 the leaf stays.
        """
        leaf = cast("Node | None", self.policy.pop())
        if leaf is None:
            return None
        portion = self.policy.portion(leaf) if self.policy.portions else leaf.size
        gone = self._cut_tail(leaf, choose(leaf, portion))
        if leaf.in_tree:
            self.policy.put_back(leaf)
        return gone

    def evict_pinned_leaf(self, choose: Callable[[Node, int], int]) -> PageArray | None:
        """Do as `evict_leaf` with the least recently used leaf that has soft pins."""
        leaf = cast("Node | None", self.pinned_leaves.pop())
        if leaf is None:
            return None
        gone = self._cut_tail(leaf, choose(leaf, leaf.size))
        if leaf.in_tree:
            self.enqueue(leaf)
        return gone

    def _cut_tail(self, leaf: Node, count: int) -> PageArray:
        """Remove the last ``count`` pages, at most all, of a leaf that is in no queue."""
        count = min(count, leaf.size)
        self.num_pages -= count
        self.num_evictable -= count
        if count < leaf.size:
            return self._trim(leaf, count)
        self._unlink(leaf)
        return leaf.pages

    def remove(self, leaf: Node, count: int) -> PageArray:
        """Remove the last ``count`` pages of a leaf without holders, pinned or not."""
        self.dequeue(leaf)
        self.num_pages -= count
        self.num_evictable -= count
        if count < leaf.size:
            gone = self._trim(leaf, count)
            self.enqueue(leaf)
            return gone
        self._unlink(leaf)
        return leaf.pages

    def _trim(self, leaf: Node, count: int) -> PageArray:
        if self.owners is not None:
            self.owners.resized(leaf, -count)
        if leaf.covered:
            self.pins.trimmed(leaf, count)
        if self.listener is not None:
            self.listener.trimming(leaf, leaf.size - count)
        if self.waits is not None:
            self.waits.trimming(leaf)
        return leaf.trim(count, self.unit)

    def _unlink(self, leaf: Node) -> None:
        """Remove a leaf that is in no queue; its parent may become a candidate."""
        parent = leaf.parent
        assert parent is not None
        if self.listener is not None:
            self.listener.trimming(leaf, 0)
        if self.owners is not None:
            self.owners.gone(leaf)
        leaf.leave_trail()
        leaf.parent = None
        if leaf.pins:
            self.pins.pass_on(leaf, parent)  # before the parent is queued: pins choose its queue
        del parent.children[leaf.key]
        self.policy.inherit(parent, leaf)
        if self.waits is not None:
            self.waits.evicted(leaf, parent)
        parent.uses += leaf.uses
        if parent.children:
            return
        parent.heads = None
        if parent.parent is None:
            self.remove_if_empty(parent)
        elif not parent.holders:
            self.enqueue(parent)


def tops(roots: dict[Namespace, Root], namespace: Namespace) -> list[Node]:
    """Return the nodes in which the paths of ``namespace`` begin: its root, if there is one.

    Also its private runs behind public prefixes. Cost: the public runs, and as many private
    ones as follow them directly.
    """
    root = roots.get(namespace)
    found: list[Node] = [] if root is None else [root]
    public = roots.get(public_namespace(namespace))
    if public is None or public is root:
        return found
    ahead: list[Node] = [public]
    while ahead:
        for child in ahead.pop().children.values():
            if child.namespace.scope:
                ahead.append(child)
            elif child.namespace == namespace:
                found.append(child)
    return found


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
