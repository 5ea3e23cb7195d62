"""`PrefixIndex`: the longest cached prefix of a prompt, and which pages may be evicted."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from itertools import chain, pairwise
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import numpy as np

from kvkeep.core.prefix.heads import common_head, stored_bytes
from kvkeep.core.prefix.marks import Marks
from kvkeep.core.prefix.node import Node, Root, descend
from kvkeep.core.prefix.results import Inserted, PrefixMatch, PrefixRun, joined
from kvkeep.core.prefix.tree import RunTree, tops
from kvkeep.core.tokens import TOKEN_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    import numpy.typing as npt

    from kvkeep.core.eviction import EvictionPolicy
    from kvkeep.core.keys import Namespace
    from kvkeep.core.pages.tables import PageArray
    from kvkeep.core.prefix.owners import Owner, Owners
    from kvkeep.core.prefix.pinned import Pinned
    from kvkeep.core.tokens import TokenArray

    Numbers = npt.NDArray[np.int64]

__all__ = ["Encoder", "PrefixIndex", "Survey", "TreeWalk"]

_children = attrgetter("children")


class Encoder(ABC):
    """Turns the tokens of one sequence into the symbols that an index compares.

    Tokens with extras are given as marks, negative ids of the index's `Marks`. An encoder may
    cache the symbols of leading pages, so `cut` must be called when their tokens change.
    """

    @abstractmethod
    def lookup(self, tokens: TokenArray) -> bytes | memoryview:
        """Return the symbols to match for a prompt of these tokens, maybe in their own memory."""

    @abstractmethod
    def pages(self, tokens: TokenArray, start: int, stop: int) -> bytes:
        """Return the symbols of the full pages ``start`` … ``stop`` of these tokens."""

    @abstractmethod
    def cut(self, pages: int) -> None:
        """Forget all but the first ``pages`` pages: later tokens may differ from now on."""

    @abstractmethod
    def fork(self) -> Encoder:
        """Return an encoder for a sequence that has the same tokens so far."""


class PrefixIndex(ABC):
    """Finds the longest cached prefix of a prompt and keeps the order of eviction.

    The index holds page ids and never touches tensors or reference counts: its owner retains the
    pages it stores and releases those that `evict`, `drop`, `clear` and `evict_below` return. A
    page is stored only while all pages before it are. Namespaces share nothing.

    A **hold** on the end of a path protects the path from eviction. `hold` and `again` give one,
    `insert`, `shorten` and `move` move it, `release` and `drop` end it. `pin` protects a
    path without a sequence.

    Thread safety: none; used under the cache's lock.
    """

    name: str
    exact: bool
    """Symbols are tokens: a page can match in part, and tokens can be read back."""

    def __init__(self, page_size: int, policy: EvictionPolicy, unit: int) -> None:
        self.page_size = page_size
        self.unit = unit
        """Bytes of symbols per page."""
        self.marks = Marks()
        """The marks that stand for tokens with extras."""
        self.tree = RunTree(policy, unit, ordered=self.exact)
        """The runs. For what keeps data beside them; all others use the methods of the index."""
        self._roots = self.tree.roots
        self.pins = self.tree.pins
        """The pins that `pin` set, and how many pages they cover."""

    @abstractmethod
    def encoder(self, namespace: Namespace) -> Encoder:
        """Return an encoder for a new sequence in ``namespace``."""

    @property
    def policy(self) -> EvictionPolicy:
        """The eviction policy; wrapped in `Hinted` once owners are kept."""
        return self.tree.policy

    @property
    def num_pages(self) -> int:
        """Pages stored."""
        return self.tree.num_pages

    @property
    def num_evictable(self) -> int:
        """Pages that could be evicted now: those without holds. Pages with soft pins count."""
        return self.tree.num_evictable

    # --- matching ----------------------------------------------------------------------------

    def match(self, symbols: bytes | memoryview, namespace: Namespace) -> PrefixMatch | None:
        """Return the longest cached prefix; None if nothing is stored in ``namespace``.

        ``symbols`` are bytes, which are not kept. Changes nothing that is stored. Cost: that of
        `Trails.follow`.
        """
        root = self._roots.get(namespace)
        if root is None:
            return None
        match = self.tree.trails.follow(root, symbols)
        if not self.exact:
            return match
        end = match.end
        if match.taken < end.size:
            tokens = match.more // TOKEN_BYTES
            if tokens:
                match.partial_page = int(end.pages[match.taken])
                match.partial_tokens = tokens
                match.source = end
        elif end.children:
            size = len(match.pages) * self.unit
            if size < len(symbols):
                self._match_head(bytes(symbols[size : size + self.unit]), match)
        return match

    def _match_head(self, head: bytes, match: PrefixMatch) -> None:
        """Add the partial page: the first page of the child that shares most with ``head``."""
        node = match.end
        if node.heads is None:
            (key,) = node.children
            found: tuple[bytes, int] | None = key, common_head(head, key)
        else:
            found = node.heads.closest(head, node.children)
        if found is not None and found[1] >= TOKEN_BYTES:
            match.source = node.children[found[0]]
            match.partial_page = int(match.source.pages[0])
            match.partial_tokens = found[1] // TOKEN_BYTES

    # --- holding -----------------------------------------------------------------------------

    def protects(self, match: PrefixMatch | None) -> int:
        """Return how many evictable pages a `hold` of this match would make unevictable.

        Cost: up to the first held ancestor.
        """
        if match is None:
            return 0
        count = 0
        if match.source is not None and not match.source.holders:
            count = 1  # the partial page
        end = held = match.end
        while not held.holders and held.parent is not None:
            held = held.parent
        if held is not end:
            count += end.depth + match.taken - held.end  # hold() splits the last run there
        return count

    def hold(
        self, match: PrefixMatch | None, namespace: Namespace, *, used: bool = True
    ) -> tuple[Node, Node | None]:
        """Hold the full pages of a match, and its partial page if it has one.

        Return both holds. ``used`` counts as a hit on the full pages. For None, the hold is on the
        empty prefix of ``namespace``.
        """
        tree = self.tree
        if match is None:
            root = tree.root(namespace)
            tree.hold(root)
            return root, None
        end = match.end
        if match.taken < end.size:
            end = tree.split(end, match.taken)
        tree.hold(end)
        if used:
            tree.policy.hit(end)
            if end.end:  # nothing is reused of a root
                end.uses += 1
        source = match.source
        if source is not None:
            if source.size > 1:  # protect one page only: the rest of the run stays evictable
                source = tree.split(source, 1)
            tree.hold(source)
        return end, source

    def again(self, hold: Node) -> Node:
        """Return a second hold on the same path, for a fork."""
        hold.holders += 1
        return hold

    def release(self, hold: Node, *, used: bool = True) -> None:
        """End a hold; ``used`` counts as a use of its path.

        After an unused hold, a run that was split for it may be joined again. Cost: up to the
        first ancestor that is held by others.
        """
        if used:
            self.tree.policy.used(hold)
        self.tree.release(hold)
        if not used and len(hold.children) == 1:
            self.tree.rejoin(hold)

    def shorten(self, hold: Node, pages: int) -> Node:
        """Move a hold back so that it covers only the first ``pages`` pages; return it."""
        return self.move(hold, hold, pages)

    def move(self, hold: Node, path: Node, pages: int) -> Node:
        """Move a hold to the first ``pages`` pages of the path to ``path``; return it.

        One of the two paths begins with the other.
        """
        node = path
        while node.parent is not None and node.parent.end >= pages:
            node = node.parent
        if node.end > pages:
            node = self.tree.split(node, pages - (node.end - node.size))
        return self._moved(hold, node)

    def _moved(self, hold: Node, node: Node) -> Node:
        """Move one hold from ``hold`` to ``node``; the move is no use of either."""
        if node is not hold:
            self.tree.hold(node)
            self.release(hold, used=False)
        return node

    # --- storing and removing ----------------------------------------------------------------

    def insert(
        self,
        hold: Node,
        symbols: bytes,
        pages: PageArray,
        priority: int,
        *,
        owner: Owner | None = None,
        namespace: Namespace | None = None,
    ) -> Inserted:
        """Store ``pages`` after the path of ``hold`` and move the hold to their end.

        ``owner`` is the user they are stored for, None for an unnamed one; ``namespace`` is
        theirs, if not the path's.
        """
        assert len(symbols) == len(pages) * self.unit
        tree = self.tree
        match = tree.trails.follow(hold, symbols)
        existing = match.pages
        count = len(existing)
        node = match.end if match.taken == match.end.size else tree.split(match.end, match.taken)
        if tree.owners is not None and (count or owner is None):
            tree.owners.used(node, owner)
        if count < len(pages):
            node = tree.append(
                node,
                symbols[count * self.unit :],
                pages[count:],
                priority,
                owner=owner,
                publisher=hold,
                namespace=namespace,
            )
        self._moved(hold, node)
        node.priority = max(node.priority, priority)  # it is held, so in no queue by priority
        return Inserted(node, existing)

    def evict(self, count: int) -> PageArray:
        """Remove ``count`` pages, or all evictable ones if they are fewer; see `RunTree.evict`."""
        return self.tree.evict(count)

    def drop(self, hold: Node, keep: int) -> PageArray:
        """End a hold and remove its path beyond ``keep`` pages, as far as nothing else needs it."""
        self.release(hold)
        freed: list[PageArray] = []
        node = hold
        while node.end > keep and not node.holders and not node.children and not node.pins:
            parent = node.parent
            assert parent is not None
            count = min(node.size, node.end - keep)
            freed.append(self.tree.remove(node, count))
            node = parent
        return joined(freed)

    def clear(self, namespace: Namespace | None = None) -> PageArray:
        """Remove all pages without holds, pinned or not, of one namespace or of all."""
        if namespace is None:
            return self.evict(self.num_evictable)
        return joined([self.evict_below(top) for top in tops(self._roots, namespace)])

    def evict_below(self, node: Node) -> PageArray:
        """Remove a run and all its descendants, pinned or not, except those that are held."""
        children_first = [below for below, _ in descend(node)][::-1]
        free = [one for one in children_first if not one.holders and one.parent is not None]
        return joined([self.tree.remove(below, below.size) for below in free])

    # --- pins and owners ---------------------------------------------------------------------

    def pin(self, hold: Node, pin: Pinned, *, hard: bool = False) -> None:
        """Set ``pin`` on the path of ``hold``; it stays there wherever the hold moves later.

        A path with a soft pin is evicted last, its tail first. A ``hard`` pin takes over the hold
        itself, so the path is not evicted at all.
        """
        assert hold.holders, "a pin is set while its path is held"
        self.tree.pins.add(hold, pin, hard=hard)

    def unpin(self, pin: Pinned) -> None:
        """Remove a pin, and end the hold of a hard one; do nothing if it is broken."""
        spot = pin.spot
        if spot is None:
            return
        node = spot.node
        if pin in spot.hard:
            self.tree.pins.remove(pin)
            self.release(node)
            return
        queued = not node.children and not node.holders
        if queued:
            self.tree.dequeue(node)
        self.tree.pins.remove(pin)
        if queued:
            self.tree.enqueue(node)

    @property
    def owners(self) -> Owners | None:
        """Which user stored what; None until `keep_owners` is called."""
        return self.tree.owners

    def keep_owners(self) -> Owners:
        """Start to record owners; pages stored before count as shared."""
        return self.tree.keep_owners()

    # --- inspecting --------------------------------------------------------------------------

    def walk(self, columns: Iterable[str], top: Namespace | Node | None = None) -> TreeWalk:
        """Return a walk over all nodes, those of one namespace, or a node and its descendants."""
        if isinstance(top, Node):
            return TreeWalk([top], *columns)
        found = [*self._roots.values()] if top is None else tops(self._roots, top)
        return TreeWalk([*found], *columns)

    @property
    def num_namespaces(self) -> int:
        """Namespaces in which anything is stored or held."""
        return len(self._roots)

    def namespaces(self) -> dict[Namespace, int]:
        """Return the pages stored per namespace. Cost: all nodes."""
        pages = Counter(dict.fromkeys(self._roots, 0))
        for node, _ in chain.from_iterable(map(descend, self._roots.values())):
            pages[node.namespace] += node.size
        return pages

    def runs(self, namespace: Namespace) -> Iterator[PrefixRun]:
        """Yield the runs behind a root depth first, most recently used branches first."""
        root = self._roots.get(namespace)
        marks = self.marks if self.exact else None
        for node, depth in () if root is None else descend(root):
            if node.parent is not None:
                yield PrefixRun.of(node, depth - 1, self.policy, marks)

    def check(self, holds: list[Node]) -> PageArray:
        """Recount everything, given all holds; return the pages stored. Asserts."""
        return check_tree(self.tree, holds)

    def __repr__(self) -> str:
        return f"<{self.name} index, {self.num_pages} pages, {self.num_evictable} evictable>"


def check_tree(tree: RunTree, holds: list[Node]) -> PageArray:
    """Assert every invariant of ``tree``, given all holds on it; return the pages stored."""
    direct = Counter(holds)
    nodes: list[Node] = []
    for namespace, root in tree.roots.items():
        assert root.holders or root.children, f"an empty root of {namespace}"
        assert root.parent is None
        assert root.size == root.end == 0
        _check_children(tree, root, direct.pop(root, 0))
        for node, _ in descend(root):
            if node is not root:
                _check_children(tree, node, direct.pop(node, 0))
                _check_run(tree, node)
                nodes.append(node)
    assert not direct, f"holds on nodes that are not in the tree: {list(direct)}"
    tree.pins.check(nodes)
    if tree.owners is not None:
        tree.owners.check(list(tree.roots.values()))
    _check_trails(tree, nodes)
    pages = joined([node.pages for node in nodes])
    assert len(pages) == tree.num_pages, (len(pages), tree.num_pages)
    free = [node for node in nodes if not node.holders]
    evictable = sum(node.size for node in free)
    assert evictable == tree.num_evictable, (evictable, tree.num_evictable)
    pinned = [bool(node.pins) for node in free if not node.children]
    assert pinned.count(False) == len(tree.policy), (pinned.count(False), len(tree.policy))
    assert pinned.count(True) == len(tree.pinned_leaves)
    return pages


def _check_trails(tree: RunTree, nodes: list[Node]) -> None:
    """Assert that trails have exactly what their nodes store, and that their bytes are counted."""
    trails = {node.trail: None for node in nodes if node.trail is not None}
    counted = 0
    for trail in trails:
        assert len(trail.nodes) > 1, "a trail of one run saves no step"
        assert all(node.trail is trail for node in trail.nodes)
        for upper, lower in pairwise(trail.nodes):
            assert lower.parent is upper, "a trail with a gap"
        assert trail.run == b"".join(node.run for node in trail.nodes)
        assert stored_bytes(trail.run).startswith(trail.run)
        assert (trail.pages == joined([node.pages for node in trail.nodes])).all()
        assert trail.num_bytes <= 2 * (len(trail.run) + trail.pages.nbytes)
        counted += trail.num_bytes
    assert sum(len(trail.nodes) for trail in trails) == sum(
        node.trail is not None for node in nodes
    ), "a trail keeps a run that is not in the tree"
    assert counted == tree.trails.num_bytes, (counted, tree.trails.num_bytes)


def _check_children(tree: RunTree, node: Node, direct: int) -> None:
    held = sum(1 for child in node.children.values() if child.holders)
    assert node.holders == held + direct, f"wrong holders: {node}"
    for key, child in node.children.items():
        assert child.parent is node
        assert child.key == key == bytes(child.run[: tree.unit])
    if tree.ordered and len(node.children) > 1:
        assert node.heads is not None


def _check_run(tree: RunTree, node: Node) -> None:
    assert node.parent is not None
    assert node.size == len(node.pages) > 0
    assert len(node.run) == node.size * tree.unit
    assert stored_bytes(node.run).startswith(node.run)
    assert node.end == node.parent.end + node.size
    assert node.depth == node.parent.end
    above = node.parent.namespace
    assert node.namespace == above or (above.scope and not node.namespace.scope), (
        "a public run behind a private one, or a run of one tenant behind another's"
    )


class TreeWalk:
    """A walk over trees in steps, parents before children, level by level.

    ``columns`` names the node fields to record. The tree may change between two steps: nodes
    evicted before they are visited count as `gone`, nodes stored meanwhile may be missing, and so
    may the new front of a run that is split. A front that is joined with its end before the visit
    appears as the joined run. Without such changes, or with a single step, the result is exact.

    Thread safety: `step` and `find` run under the cache's lock, everything else anywhere. The walk
    keeps visited nodes alive: drop it soon. Cost: about 1 µs a node, bound by memory access.
    """

    def __init__(self, tops: list[Node], *columns: str) -> None:
        self.nodes = list(tops)
        self.columns: dict[str, list[Any]] = {name: [] for name in columns}
        self._readers = [(self.columns[name], attrgetter(name)) for name in columns]
        self._tops = len(tops)
        self._next = 0
        self._counts: list[int] = []  # children of each node

    @property
    def done(self) -> bool:
        """Whether all nodes were visited."""
        return self._next == len(self.nodes)

    def step(self, most: int) -> list[Node]:
        """Visit and return the next nodes, ``most`` at most."""
        start = self._next
        chunk = self.nodes[start : start + most]
        for place in range(max(start, self._tops), start + len(chunk)):
            if self.nodes[place].parent is None:
                self.nodes[place] = chunk[place - start] = _now(self.nodes[place])
        self._next += len(chunk)
        for noted, read in self._readers:
            noted.extend(map(read, chunk))
        below = list(map(_children, chunk))
        self._counts.extend(map(len, below))
        self.nodes.extend(chain.from_iterable(map(dict.values, filter(None, below))))
        return chunk

    def find(self, number: int, most: int) -> Node | None:
        """Visit the next nodes, ``most`` at most; return the one with id ``number`` if it is among
        them.
        """
        for node in self.step(most):
            if node.id == number:
                return node
        return None

    def parents(self) -> Numbers:
        """Return the row of each node's parent, -1 for the tops; never decreasing."""
        assert self.done
        parents = np.full(len(self.nodes), -1)
        parents[self._tops :] = np.repeat(
            np.arange(len(self._counts)), np.array(self._counts, np.int64)
        )
        return parents

    def numbers(self, column: str) -> Numbers:
        """Return a recorded column of integers as an array."""
        return np.array(self.columns[column], np.int64)

    def ids(self) -> Numbers:
        """Return the node ids; needs the columns ``serial`` and ``end``."""
        serials = self.numbers("serial")
        return np.where(self.numbers("end") > 0, serials, -serials)

    def gone(self) -> npt.NDArray[np.bool_]:
        """Return which nodes were evicted when visited; needs ``parent`` and ``end``."""
        orphans = np.array([parent is None for parent in self.columns["parent"]], np.bool_)
        return orphans & (self.numbers("end") > 0)


def _now(front: Node) -> Node:
    """Return the run that ``front`` was joined into, still its only child; else ``front``."""
    while front.parent is None and front.children:
        (front,) = front.children.values()
    return front


class Survey:
    """A tree as columns: one row a node, parents first; roots are rows without pages.

    ``parents`` are rows, -1 for the tops. Rows that are ``gone`` count for nothing. Of a run that
    was joined with its front after the front was visited, the front's pages count once. ``below_…``
    are sums over a node and all descendants: of pages, of runs (roots are none), of uses, of pages
    of groups. With the columns `GROUPS`, ``points`` are the checkpoints of each node; else there
    are none.
    """

    COLUMNS = ("parent", "end", "serial", "size", "holders", "pins", "uses")
    GROUPS = ("group_pages", "points")

    def __init__(self, walk: TreeWalk) -> None:
        self.nodes = walk.nodes
        self.parents = walk.parents()
        self.gone = walk.gone()
        self.ids = walk.ids()
        self.holders = walk.numbers("holders")
        self.pins = walk.numbers("pins")
        ends, inner = walk.numbers("end"), self.parents >= 0
        begun = np.where(inner, ends[self.parents], ends - walk.numbers("size"))
        self.sizes = np.where(self.gone, 0, np.clip(ends - begun, 0, walk.numbers("size")))
        self.below_pages = self.sizes.copy()
        self.below_runs = (self.sizes > 0).astype(np.int64)
        self.below_uses = np.where(self.gone, 0, walk.numbers("uses"))
        self.points: list[tuple[int, ...]] | None = walk.columns.get("points")
        grouped = self.points is not None
        self.group_pages = (
            np.where(self.gone, 0, walk.numbers("group_pages"))
            if grouped
            else np.zeros_like(self.sizes)
        )
        self.below_groups = self.group_pages.copy()
        for start, stop in reversed(self._levels()):
            above = self.parents[start:stop]
            summed = [self.below_pages, self.below_runs, self.below_uses]
            for sums in [*summed, self.below_groups] if grouped else summed:
                np.add.at(sums, above, sums[start:stop])

    def _levels(self) -> list[tuple[int, int]]:
        """Return the rows of each level below the tops, as (start, stop)."""
        levels: list[tuple[int, int]] = []
        start, stop = 0, int(np.searchsorted(self.parents, 0))
        while stop < len(self.parents):
            start, stop = stop, int(np.searchsorted(self.parents, stop))
            levels.append((start, stop))
        return levels

    def largest(self, count: int) -> Numbers:
        """Return the rows of the ``count`` largest subtrees, ascending, closed towards the tops.

        A subtree is no larger than the one that contains it, whose row comes first.
        """
        rows = np.argsort(-self.below_pages, kind="stable")[:count]
        rows = rows[~self.gone[rows]]
        rows.sort()
        return rows

    def heads(self, rows: Numbers, size: int) -> list[bytes]:
        """Return the first ``size`` bytes of symbols of some rows; call it under the lock."""
        return [bytes(self.nodes[row].run[:size]) for row in rows.tolist()]

    def namespace(self, row: int) -> Namespace | None:
        """Return the namespace of a row that is a root; None for other rows."""
        node = self.nodes[row]
        return node.namespace if isinstance(node, Root) else None
