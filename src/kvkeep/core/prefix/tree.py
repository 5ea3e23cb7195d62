"""`Tree`: a radix tree whose edges are runs of pages: the longest cached prefix of a prompt.

The tree compares *symbols*, a fixed number of bytes per page: the page's tokens, or its 32-byte
block key (`kvkeep.core.prefix.chain`). A run is one `bytes`, so following an edge costs one
dictionary probe and one memcmp, however long the edge is.

    root ── "system prompt", 12 pages ─┬─ "first question", 3 pages
     (one per namespace)               └─ "second question", 4 pages ── "its follow-up", 2 pages

Three decisions make eviction cheap:

- A hold is counted on its node and upwards only to the first ancestor that is held already. So
  a node with ``holders == 0`` can be evicted, and no path is walked twice.
- Only leaves without holders are candidates; evicting one makes its parent the next. So tails are
  evicted first, and no victim is searched for.
- A use is recorded where it ends, and its parent inherits it when the run is evicted. So a use of
  a long path does not walk it.
"""

from __future__ import annotations

import time
from collections import Counter
from contextlib import contextmanager
from itertools import chain, pairwise
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np

from kvkeep.core.pages.pool import joined
from kvkeep.core.prefix.marks import Marks
from kvkeep.core.prefix.node import Node, Root, TreeObserver, descend
from kvkeep.core.prefix.policy import AgeQueue, EvictionPolicy
from kvkeep.core.prefix.trails import Heads, PrefixMatch, Trails, common_head, stored_bytes
from kvkeep.core.public import public_namespace
from kvkeep.core.tokens import TOKEN_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from kvkeep.core.keys import Namespace
    from kvkeep.core.pages.pool import PageArray
    from kvkeep.core.tokens import TokenArray

__all__ = ["Encoder", "Inserted", "Tree"]

_GROW_PAGES = 128
"""A leaf shorter than this grows in place when its only holder publishes more. So a conversation or
a long decode becomes a few long runs, not one per publish, and no publish copies more than this."""
_SHORT = 1 << 16  # bytes: steps along a copy are faster, and a copy takes less than that saves


class Encoder:
    """Turns the tokens of one sequence into the symbols that a tree compares: here, their bytes.

    Marks, negative ids of the tree's `Marks`, stand for tokens with extras. An encoder may cache
    the symbols of leading pages, so `cut` must be called before their tokens change.
    """

    __slots__ = ("_page_size",)

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size

    def lookup(self, tokens: TokenArray) -> bytes | memoryview:
        """Return the symbols of a prompt, to match it; they may be a view of ``tokens``."""
        if tokens.nbytes <= _SHORT or not tokens.flags.c_contiguous:
            return tokens.tobytes()
        return tokens.view(np.uint8).data

    def pages(self, tokens: TokenArray, start: int, stop: int) -> bytes:
        """Return the symbols of the full pages ``start`` … ``stop`` of these tokens."""
        return tokens[start * self._page_size : stop * self._page_size].tobytes()

    def cut(self, pages: int) -> None:
        """Forget all but the first ``pages`` pages: later tokens may differ from now on."""

    def fork(self) -> Encoder:
        """Return an encoder for a sequence that has the same tokens so far."""
        return self


class Inserted(NamedTuple):
    """The result of an insert."""

    hold: Node
    """The hold, moved to the end of the inserted pages."""
    existing: PageArray
    """Stored pages, int32, that replace the first of the given pages: same tokens, older."""


class Tree:
    """Finds the longest cached prefix of a prompt, and evicts what nothing holds.

    The tree holds page ids and never touches tensors or reference counts. `insert` takes over the
    caller's references to the pages that it stores; `evict`, `drop`, `clear` and `evict_below`
    return pages whose references the caller releases. A page is stored only while all pages before
    it are. Namespaces share nothing.

    A **hold** is one count in `Node.holders` of the run where a path ends, and protects that path
    from eviction; the methods take and return the run. `hold` and `retain` make a hold, `insert`
    and `move` move it, `release` and `drop` end it. The **user** of a path is a session, or None.

    Candidates for eviction are in four queues, which are emptied in this order: runs whose owner
    has ended, those that the policy orders, those whose owner is expected back, and those under
    soft pins (`Node.pin_set`). An owner has a ``hint``, a number that orders its runs among those
    of its kind, unless the policy does: then it is None; and it has ``ended``, or has not.

    Memory: 4 bytes a token, 4 a page, and about 600 bytes a run. Up to twice the bytes of tokens
    and pages again for paths with a trail (`kvkeep.core.prefix.trails`). Thread safety:
    none; used under the cache's lock.

    Args:
        page_size: tokens of a page.
        policy: orders the candidates of this tree alone.
        clock: gives seconds, for the policy.
        unit: bytes of symbols per page, of a tree that compares other things than tokens.

    Attributes:
        exact: symbols are tokens: a page can match in part, and tokens can be read back.
        roots: by namespace.
        num_pages: pages stored.
        num_evictable: pages without holds; those under soft pins count.
        moment: the number of uses and inserts so far, the clock of `Node.last_used`.
    """

    name = "radix"

    def __init__(
        self,
        page_size: int,
        policy: EvictionPolicy,
        clock: Callable[[], float] = time.monotonic,
        *,
        unit: int | None = None,
    ) -> None:
        self.page_size = page_size
        self.policy = policy
        self.exact = unit is None
        self.unit = page_size * TOKEN_BYTES if unit is None else unit
        self._encoder = Encoder(page_size)
        self.marks = Marks()
        """The marks that stand for tokens with extras."""
        self.roots: dict[Namespace, Root] = {}
        self.num_pages = 0
        self.num_evictable = 0
        self.moment = 0
        self.trails = Trails(self.unit)
        self._serial = 0  # of the newest node
        self._dead = AgeQueue[tuple[float, float]]()
        self._awaited = AgeQueue[tuple[float, float]]()
        self._pinned = AgeQueue[tuple[float, float]]()
        self._hinted = False  # whether any run was dead or awaited so far
        # Methods of observers, by event:
        self._born: list[Callable[[Node, int], None]] = []
        self._split: list[Callable[[Node, Node], None]] = []
        self._joined: list[Callable[[Node, Node], None]] = []
        self._used: list[Callable[[Node, Any], None]] = []
        self._trimmed: list[Callable[[Node, int], None]] = []
        self._gone: list[Callable[[Node, Node], None]] = []
        self._resized: list[Callable[[Node, int], None]] = []
        policy.attach(self, clock)
        self.observe(policy)
        self._takes_all = type(policy).portion is EvictionPolicy.portion

    def encoder(self, namespace: Namespace) -> Encoder:
        """Return an encoder for a new sequence in ``namespace``."""
        del namespace  # one encoder serves all sequences: token bytes depend on nothing else
        return self._encoder

    def observe(self, observer: TreeObserver) -> None:
        """Call the methods that ``observer`` overrides, from now on."""
        for name in ("born", "split", "joined", "used", "trimmed", "gone", "resized"):
            if getattr(type(observer), name) is not getattr(TreeObserver, name):
                getattr(self, f"_{name}").append(getattr(observer, name))

    def resized(self, node: Node, pages: int) -> None:
        """Call `TreeObserver.resized` of all observers."""
        for notify in self._resized:
            notify(node, pages)

    def root(self, namespace: Namespace) -> Root:
        """Return the root of a namespace. A missing one is made."""
        root = self.roots.get(namespace)
        if root is None:
            self._serial += 1
            root = self.roots[namespace] = Root(namespace, self._serial)
        return root

    def _remove_if_empty(self, root: Node) -> None:
        """Remove a root without children and holders."""
        if not root.children and not root.holders:
            del self.roots[root.namespace]

    # --- matching ----------------------------------------------------------------------------

    def match(self, symbols: bytes | memoryview, namespace: Namespace) -> PrefixMatch | None:
        """Return the longest cached prefix; None if nothing is stored in ``namespace``.

        ``symbols`` are bytes, which are not kept. Changes nothing that is stored. Cost: that of
        `Trails.follow`.
        """
        root = self.roots.get(namespace)
        if root is None:
            return None
        match = self.trails.follow(root, symbols)
        if not self.exact:
            return match
        end = match.end
        if match.end_pages < end.size:
            tokens = match.more_bytes // TOKEN_BYTES
            if tokens:
                match.partial_page = int(end.pages[match.end_pages])
                match.partial_tokens = tokens
                match.source = end
        elif end.children:
            size = len(match.pages) * self.unit
            if size < len(symbols):
                self._match_head(bytes(symbols[size : size + self.unit]), match)
        return match

    def _match_head(self, head: bytes, match: PrefixMatch) -> None:
        """Add the partial page: the first page of the child with the longest prefix of ``head``."""
        node = match.end
        if node.heads is None:
            (key,) = node.children
            nearest: tuple[bytes, int] | None = key, common_head(head, key)
        else:
            nearest = node.heads.closest(head, node.children)
        if nearest is not None and nearest[1] >= TOKEN_BYTES:
            match.source = node.children[nearest[0]]
            match.partial_page = int(match.source.pages[0])
            match.partial_tokens = nearest[1] // TOKEN_BYTES

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
            count += end.depth + match.end_pages - held.end  # hold() splits the last run there
        return count

    def hold(
        self,
        match: PrefixMatch | None,
        namespace: Namespace,
        *,
        used: bool = True,
        owner: Any = None,
    ) -> tuple[Node, Node | None]:
        """Hold the full pages of a match, and its partial page if it has one.

        Return both holds. ``used`` counts a hit on the full pages, by the user ``owner``. If
        ``match`` is None, the hold is on the root of ``namespace``.
        """
        if match is None:
            root = self.root(namespace)
            root.holders += 1
            return root, None
        end = match.end
        if match.end_pages < end.size:
            end = self.split(end, match.end_pages)
        self._protect(end)
        if used:
            self.hit(end, owner)
        source = match.source
        if source is not None:
            if source.size > 1:  # protect one page only: the rest of the run stays evictable
                source = self.split(source, 1)
            self._protect(source)
        return end, source

    def hit(self, node: Node, owner: Any = None) -> None:
        """Count a request that reuses the path of ``node``, which is no candidate."""
        self.moment += 1
        node.last_used = self.moment
        if node.end:  # a root has no pages
            node.hits += 1
        for notify in self._used:
            notify(node, owner)

    def touch(self, node: Node) -> None:
        """Count a use of the path of ``node`` without a request."""
        with self.reordering([node]):
            self.moment += 1
            node.last_used = self.moment

    def _protect(self, node: Node) -> None:
        """Add a hold. Cost: up to the first ancestor that is held already."""
        held = node
        while not held.holders and held.parent is not None:
            held.holders = 1
            held = held.parent
        held.holders += 1
        if held is not node:
            self.num_evictable -= node.end - held.end
            if not node.children:
                self.dequeue(node)

    def retain(self, hold: Node) -> Node:
        """Make a second hold on the same path and return it."""
        hold.holders += 1
        return hold

    def release(self, hold: Node, *, used: bool = True) -> None:
        """End a hold; ``used`` counts as a use of its path.

        After an unused hold, a run that was split for it may be joined again. Cost: up to the
        first ancestor that is held by others.
        """
        if used:
            self.moment += 1
            hold.last_used = self.moment
        held = hold
        while held.holders == 1 and held.parent is not None:
            held.holders = 0
            held = held.parent
        assert held.holders > 0, "released more often than held"
        held.holders -= 1
        if held is not hold:
            self.num_evictable += hold.end - held.end
            if not hold.children:
                self.enqueue(hold)
        if not held.holders:
            self._remove_if_empty(held)
        if not used and len(hold.children) == 1:
            self._join(hold)

    def move(self, hold: Node, path: Node, pages: int) -> Node:
        """Move a hold to the first ``pages`` pages of the path to ``path``; return it.

        One of the paths of ``hold`` and ``path`` begins with the other.
        """
        node = path
        while node.parent is not None and node.parent.end >= pages:
            node = node.parent
        if node.end > pages:
            node = self.split(node, pages - (node.end - node.size))
        return self._moved(hold, node)

    def _moved(self, hold: Node, node: Node) -> Node:
        """Move one hold from ``hold`` to ``node``, which counts no use."""
        if node is not hold:
            self._protect(node)
            self.release(hold, used=False)
        return node

    # --- candidates ----------------------------------------------------------------------------

    @staticmethod
    def is_candidate(node: Node) -> bool:
        """Whether ``node`` is in a queue: a leaf without holders."""
        return not node.children and not node.holders and node.parent is not None

    def _queue(self, leaf: Node) -> AgeQueue[tuple[float, float]] | None:
        """Return the queue of a candidate; None if that is the policy's."""
        if leaf.pin_set is not None:
            return self._pinned
        owner = leaf.owner
        if owner is None or owner.hint is None:
            return None
        self._hinted = True
        return self._dead if owner.ended else self._awaited

    def enqueue(self, leaf: Node) -> None:
        """Make a leaf without holders a candidate."""
        queue = self._queue(leaf)
        if queue is None:
            self.policy.add(leaf)
        else:
            hint = 0 if queue is self._pinned else leaf.owner.hint
            queue.push(leaf, (hint, leaf.last_used))

    def dequeue(self, leaf: Node) -> None:
        """Undo `enqueue`."""
        queue = self._queue(leaf)
        if queue is None:
            self.policy.discard(leaf)
        else:
            queue.remove(leaf)

    @contextmanager
    def reordering(self, nodes: Iterable[Node]) -> Iterator[None]:
        """Inside, what orders ``nodes`` among the candidates may change: pins, owners, uses."""
        queued = [node for node in nodes if self.is_candidate(node)]
        for node in queued:
            self.dequeue(node)
        yield
        for node in queued:
            self.enqueue(node)

    def _put_back(self, leaf: Node) -> None:
        """Make the victim, which lost only its tail, the next of its queue."""
        if self._queue(leaf) is None:
            self.policy.put_back(leaf)
        else:
            self.enqueue(leaf)  # it is the oldest, so it comes first again

    def _next(self) -> Node | None:
        """Remove and return the next victim without pins; None if there is none."""
        leaf = self._dead.pop() or self.policy.pop() or self._awaited.pop()
        return cast("Node | None", leaf)

    def _most(self, leaf: Node, most: int) -> int:
        """Return how many pages of a victim to remove before the next one is chosen."""
        return most if self._queue(leaf) is not None else self.policy.portion(leaf, most)

    # --- storing -------------------------------------------------------------------------------

    def insert(
        self,
        hold: Node,
        symbols: bytes,
        pages: PageArray,
        priority: int,
        *,
        owner: Any = None,
        namespace: Namespace | None = None,
    ) -> Inserted:
        """Store ``pages`` after the path of ``hold`` and move the hold to their end.

        Of these, pages that are stored already are not stored again (`Inserted.existing`).
        ``owner`` is the user they are stored for; ``namespace`` is theirs, if not the path's.
        """
        assert len(symbols) == len(pages) * self.unit
        match = self.trails.follow(hold, symbols)
        existing = match.pages
        count = len(existing)
        node = (
            match.end
            if match.end_pages == match.end.size
            else self.split(match.end, match.end_pages)
        )
        if count:
            for notify in self._used:
                notify(node, owner)
        if count < len(pages):
            new = symbols[count * self.unit :], pages[count:]
            self.num_pages += len(pages) - count
            if node is hold and self._may_grow(node, priority, owner, namespace):
                node.grow(*new)
                self._stored(node, len(new[1]))
            else:
                node = self._append(node, *new, priority, owner=owner, namespace=namespace)
        self._moved(hold, node)
        node.priority = max(node.priority, priority)  # it is held, so in no queue
        return Inserted(node, existing)

    def _may_grow(self, node: Node, priority: int, owner: Any, namespace: Namespace | None) -> bool:
        """Whether pages behind ``node``, which their publisher holds, are to extend its run."""
        return (
            node.holders == 1
            and not node.children
            and node.size < _GROW_PAGES
            and not node.pins
            and node.priority <= priority  # else the new pages would have that of the old ones
            and node.parent is not None
            and node.owner is owner
            and (namespace is None or namespace == node.namespace)
        )

    def _stored(self, node: Node, pages: int) -> None:
        self.moment += 1
        node.last_used = self.moment
        for notify in self._born:
            notify(node, pages)

    def _append(
        self,
        node: Node,
        symbols: bytes,
        pages: PageArray,
        priority: int,
        *,
        owner: Any,
        namespace: Namespace | None,
    ) -> Node:
        """Store pages behind ``node`` as a new leaf; return it."""
        if self.is_candidate(node):
            self.dequeue(node)
        self._serial += 1
        leaf = Node(node, symbols, pages.copy(), self.unit, self._serial)
        leaf.priority = priority
        leaf.owner = owner
        if namespace is not None:
            leaf.namespace = namespace
        children = node.children
        children[leaf.key] = leaf
        if self.exact and len(children) > 1:
            if node.heads is None:
                node.heads = Heads()
                for key in children:
                    node.heads.add(key, children)
            else:
                node.heads.add(leaf.key, children)
        self.num_evictable += leaf.size
        self._stored(leaf, leaf.size)
        self.enqueue(leaf)
        return leaf

    def split(self, node: Node, at: int) -> Node:
        """Cut a run before its page ``at``; return the new front. ``node`` stays the end."""
        assert 0 < at < node.size
        self._serial += 1
        front = bytes(node.run[: at * self.unit])
        upper = Node(node.parent, front, node.pages[:at].copy(), self.unit, self._serial)
        upper.namespace, upper.owner = node.namespace, node.owner
        upper.last_used, upper.priority = node.last_used, node.priority
        upper.holders = 1 if node.holders else 0
        node.cut_off(upper, self.unit)
        for notify in self._split:
            notify(upper, node)
        return upper

    def _join(self, upper: Node) -> None:
        """Join ``upper`` with its only child, if nothing distinguishes them.

        That undoes a split for a hold that ended without a use: else most prompts that share a
        first token by chance would leave two runs each. The front alone must have no hold, pin,
        hit, wait or owner. A run longer than `_GROW_PAGES` stays cut, to bound the bytes copied.
        """
        (lower,) = upper.children.values()
        if (
            upper.parent is None
            or upper.size + lower.size > _GROW_PAGES
            or upper.holders > bool(lower.holders)
            or upper.hits
            or upper.last_used > lower.last_used
            or upper.priority > lower.priority
            or upper.owner is not lower.owner
            or upper.pin_set is not None
            or upper.wait is not None
            or upper.returns is not None
            or (upper.namespace is not lower.namespace and upper.namespace != lower.namespace)
        ):
            return
        lower.absorb(upper)
        for notify in self._joined:
            notify(upper, lower)

    # --- removing ------------------------------------------------------------------------------

    def evict(self, count: int) -> PageArray:
        """Remove ``count`` pages, or all evictable ones if they are fewer; return their ids.

        Leaves lose their tails in the order of the queues. Cost: about 1.5 µs a run.
        """
        more = count = count if count < self.num_evictable else self.num_evictable
        freed: list[PageArray] = []
        pop = self._next if self._hinted else self.policy.pop
        while more:
            leaf: Any = pop() or self._next() or self._pinned.pop()  # a Node, but for the type
            assert leaf is not None, "evictable pages that are in no queue"
            most = more if self._takes_all else self._most(leaf, more)
            if leaf.size > most:
                freed.append(self._trim(leaf, most))
                self._put_back(leaf)
                more -= most
                continue
            more -= leaf.size
            freed.append(leaf.pages)
            self._unlink(leaf)
        self.num_pages -= count
        self.num_evictable -= count
        return joined(freed)

    def evict_leaf(
        self, choose: Callable[[Node, int], int], *, pinned: bool = False
    ) -> PageArray | None:
        """Remove pages of the next victim; return their ids, None if there is none.

        ``choose(leaf, portion)`` returns how many pages to remove from its tail, 0 for none;
        ``portion`` is the policy's number. ``pinned``: take the next victim under a soft pin.
        """
        leaf = cast("Node | None", self._pinned.pop()) if pinned else self._next()
        if leaf is None:
            return None
        pages = self._cut_tail(leaf, choose(leaf, self._most(leaf, leaf.size)))
        if leaf.in_tree:
            self._put_back(leaf)
        return pages

    def remove(self, leaf: Node, count: int) -> PageArray:
        """Remove the last ``count`` pages of a candidate, pinned or not."""
        self.dequeue(leaf)
        pages = self._cut_tail(leaf, count)
        if leaf.in_tree:
            self.enqueue(leaf)
        return pages

    def _cut_tail(self, leaf: Node, count: int) -> PageArray:
        """Remove the last ``count`` pages, at most all, of a leaf that is in no queue."""
        count = min(count, leaf.size)
        self.num_pages -= count
        self.num_evictable -= count
        if count < leaf.size:
            return self._trim(leaf, count)
        self._unlink(leaf)
        return leaf.pages

    def _trim(self, leaf: Node, count: int) -> PageArray:
        self._serial += 1
        leaf.stable_id = self._serial
        for notify in self._trimmed:
            notify(leaf, leaf.size - count)
        return leaf.trim(count, self.unit)

    def _unlink(self, leaf: Node) -> None:
        """Remove a leaf that is in no queue; its parent may become a candidate."""
        parent = leaf.parent
        assert parent is not None
        for notify in self._gone:
            notify(leaf, parent)
        if leaf.trail is not None:
            leaf.trail.leave(leaf)
        leaf.parent = None
        del parent.children[leaf.key]
        # Written out: this runs once per victim, and max() would be half its cost.
        if leaf.last_used > parent.last_used:  # noqa: PLR1730
            parent.last_used = leaf.last_used
        if leaf.priority > parent.priority:  # noqa: PLR1730
            parent.priority = leaf.priority
        parent.hits += leaf.hits
        if parent.children:
            return
        parent.heads = None
        if parent.parent is None:
            self._remove_if_empty(parent)
        elif not parent.holders:
            self.enqueue(parent)

    def drop(self, hold: Node, keep: int) -> PageArray:
        """End a hold; remove its path behind ``keep`` pages, up to what is held or pinned."""
        self.release(hold)
        freed: list[PageArray] = []
        node = hold
        while node.end > keep and self.is_candidate(node) and node.pin_set is None:
            parent = node.parent
            assert parent is not None
            freed.append(self.remove(node, min(node.size, node.end - keep)))
            node = parent
        return joined(freed)

    def clear(self, namespace: Namespace | None = None) -> PageArray:
        """Remove all pages without holds, pinned or not, of one namespace or of all."""
        if namespace is None:
            return self.evict(self.num_evictable)
        return joined([self.evict_below(top) for top in self.tops(namespace)])

    def evict_below(self, node: Node) -> PageArray:
        """Remove a run and its descendants, pinned or not, except those on held paths."""
        children_first = [run for run, _ in descend(node)][::-1]
        free = [run for run in children_first if not run.holders and run.parent is not None]
        return joined([self.remove(run, run.size) for run in free])

    # --- inspecting ----------------------------------------------------------------------------

    def tops(self, namespace: Namespace) -> list[Node]:
        """Return the nodes in which the paths of ``namespace`` begin.

        These are its root, if there is one, and its private runs behind public prefixes. Cost: the
        public runs, and the private ones that follow them directly.
        """
        root = self.roots.get(namespace)
        starts: list[Node] = [] if root is None else [root]
        public = self.roots.get(public_namespace(namespace))
        if public is None or public is root:
            return starts
        ahead: list[Node] = [public]
        while ahead:
            for child in ahead.pop().children.values():
                if child.namespace.scope:
                    ahead.append(child)
                elif child.namespace == namespace:
                    starts.append(child)
        return starts

    def describe(self, node: Node) -> str:
        """Return how ``node`` is ranked among the candidates, in a few words."""
        hinted = node.owner is not None and node.owner.hint is not None
        if hinted and node.owner.ended:
            return "dead"
        ranked = self.policy.describe(node, self.moment)
        return f"awaited, {ranked}" if hinted else ranked

    def namespaces(self) -> dict[Namespace, int]:
        """Return the pages stored per namespace. Cost: all nodes."""
        pages = Counter(dict.fromkeys(self.roots, 0))
        for node, _ in chain.from_iterable(map(descend, self.roots.values())):
            pages[node.namespace] += node.size
        return pages

    def check(self, holds: list[Node]) -> PageArray:
        """Recount everything, given all holds; return the pages stored. Asserts."""
        direct = Counter(holds)
        nodes: list[Node] = []
        for namespace, root in self.roots.items():
            assert root.holders or root.children, f"an empty root of {namespace}"
            assert root.parent is None
            assert root.size == root.end == 0
            for node, _ in descend(root):
                self._check_children(node, direct.pop(node, 0))
                if node is not root:
                    self._check_run(node)
                    nodes.append(node)
        assert not direct, f"holds on nodes that are not in the tree: {list(direct)}"
        self._check_trails(nodes)
        pages = joined([node.pages for node in nodes])
        assert len(pages) == self.num_pages, (len(pages), self.num_pages)
        evictable = sum(node.size for node in nodes if not node.holders)
        assert evictable == self.num_evictable, (evictable, self.num_evictable)
        leaves = [node for node in nodes if self.is_candidate(node)]
        counts = Counter(id(self._queue(leaf)) for leaf in leaves)
        assert len(self.policy) == counts[id(None)], (len(self.policy), counts[id(None)])
        for queue in (self._dead, self._awaited, self._pinned):
            assert len(queue) == counts[id(queue)], (len(queue), counts[id(queue)])
        self.policy.check()
        return pages

    def _check_children(self, node: Node, direct: int) -> None:
        held = sum(1 for child in node.children.values() if child.holders)
        assert node.holders == held + direct, f"wrong holders: {node}"
        for key, child in node.children.items():
            assert child.parent is node
            assert child.key == key == bytes(child.run[: self.unit])
        if self.exact and len(node.children) > 1:
            assert node.heads is not None

    def _check_run(self, node: Node) -> None:
        assert node.parent is not None
        assert node.size == len(node.pages) > 0
        assert len(node.run) == node.size * self.unit
        assert stored_bytes(node.run).startswith(node.run)
        assert node.end == node.parent.end + node.size
        assert node.depth == node.parent.end
        above = node.parent.namespace
        assert node.namespace == above or (above.scope and not node.namespace.scope), (
            "a public run behind a private one, or a run of one tenant behind another's"
        )

    def _check_trails(self, nodes: list[Node]) -> None:
        """Assert that trails have exactly what their nodes store, and that bytes are counted."""
        trails = {node.trail: None for node in nodes if node.trail is not None}
        counted = 0
        for trail in trails:
            assert len(trail.nodes) > 1, "a trail of one run saves no step"
            assert all(node.trail is trail for node in trail.nodes)
            for upper, lower in pairwise(trail.nodes):
                assert lower.parent is upper, "a trail with a gap"
            assert trail.run == b"".join(node.run for node in trail.nodes)
            assert stored_bytes(trail.run).startswith(trail.run)
            assert np.array_equal(trail.pages, joined([node.pages for node in trail.nodes]))
            assert trail.num_bytes <= 2 * (len(trail.run) + trail.pages.nbytes)
            counted += trail.num_bytes
        assert sum(len(trail.nodes) for trail in trails) == sum(
            node.trail is not None for node in nodes
        ), "a trail keeps a run that is not in the tree"
        assert counted == self.trails.num_bytes, (counted, self.trails.num_bytes)

    def __repr__(self) -> str:
        return f"<{self.name} index, {self.num_pages} pages, {self.num_evictable} evictable>"
