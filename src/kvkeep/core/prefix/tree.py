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

from typing import TYPE_CHECKING, cast

from kvkeep.core.errors import InvalidValue
from kvkeep.core.eviction.hints import Hinted
from kvkeep.core.eviction.queues import AgeQueue
from kvkeep.core.prefix.heads import Heads
from kvkeep.core.prefix.node import Node, Root
from kvkeep.core.prefix.owners import Owners
from kvkeep.core.prefix.pinned import Pins
from kvkeep.core.prefix.results import joined
from kvkeep.core.prefix.trails import Trails
from kvkeep.core.prefix.waits import Waits
from kvkeep.core.public import public_namespace

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvkeep.core.eviction import EvictionPolicy
    from kvkeep.core.keys import Namespace
    from kvkeep.core.pages.tables import PageArray
    from kvkeep.core.prefix.owners import Owner
    from kvkeep.core.returns import Returns

__all__ = ["RunTree", "TreeListener", "tops"]


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
