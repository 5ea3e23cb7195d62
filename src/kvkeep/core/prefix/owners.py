"""`Owners`: which runs only one user has used, and that user's hints about them.

``owner`` of a node is the only user so far; None stands for several users, or an unnamed one. It
changes from an owner to None and never back, and whoever uses a node uses all nodes before it:

    root ── system prompt (None) ─┬─ A's first turn (A) ── A's second turn (A)
                                  └─ B's first turn (B)

So an owner's nodes are complete ends of branches. Marking all of them dead or suspended walks over
that owner's nodes. A use by another user walks up to the first node without an owner, so it visits
each owned node once at most.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvkeep.core.prefix.node import descend

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvkeep.core.eviction.hints import Hinted
    from kvkeep.core.prefix.node import Node

__all__ = ["Owner", "Owners"]


class Owner:
    """One user of runs, and the living runs that only this user has used.

    ``due`` is when a suspended owner is expected back, else None. What an owner that has ``left``
    stores afterwards is dead at once.
    """

    __slots__ = ("due", "left", "nodes")

    def __init__(self) -> None:
        self.nodes: dict[Node, None] = {}
        self.due: float | None = None
        self.left = False


class Owners:
    """The owners of a tree's nodes, and the order by their hints. The tree reports what happens.

    Descendants of a dead node are dead. Hints change neither what matches nor what may be evicted:
    only the order of eviction.

    Memory: one dictionary entry a node. Thread safety: none; under the cache's lock.
    """

    def __init__(self, policy: Hinted) -> None:
        self._policy = policy
        self.num_dead = 0
        """Pages that are dead and still stored, those of rows and states included."""
        self.num_awaited = 0
        """Pages of suspended owners, and all pages before them."""

    # --- hints -------------------------------------------------------------------------------

    def used(self, hold: Node, owner: Owner | None) -> None:
        """Record that ``owner`` (None: unnamed) uses the path of ``hold``; dead nodes on it revive.

        Cost: up to the first node for which the use changes nothing.
        """
        node = hold
        while node.owner is not None and node.parent is not None:
            if node.owner is not owner:
                self._share(node)
            elif node.died and not owner.left:
                self._change(node, 0, owner.due)
            else:
                return
            node = node.parent

    def kill(self, owner: Owner) -> int:
        """Mark the owner's nodes dead; return how many pages those are.

        Held ones stay until they are released. Cost: the owner's living nodes.
        """
        before = self.num_dead
        for node in list(owner.nodes):
            self._change(node, self._policy.death(), None)
        return self.num_dead - before

    def suspend(self, owner: Owner, due: float) -> int:
        """Suspend an owner until ``due``; return the pages of its own that are kept for it."""
        owner.due = due
        for node in owner.nodes:
            self._change(node, 0, due)
        return sum(node.weight for node in owner.nodes)

    def wake(self, owner: Owner) -> None:
        """End the suspension of an owner."""
        owner.due = None
        for node in owner.nodes:
            self._change(node, 0, None)

    # --- events of the tree ------------------------------------------------------------------

    def born(self, leaf: Node, owner: Owner) -> None:
        """Record that ``owner`` stored ``leaf``, which is in no queue yet."""
        leaf.owner = owner
        owner.nodes[leaf] = None
        dead = owner.left or (leaf.parent is not None and bool(leaf.parent.died))
        self._set(leaf, self._policy.death() if dead else 0, None if dead else owner.due)

    def split(self, upper: Node, lower: Node) -> None:
        """Give ``upper``, the new front of ``lower``, the same owner and hints."""
        upper.suspended = 1 if lower.suspended else 0
        upper.owner, upper.died = lower.owner, lower.died
        if upper.owner is not None and not upper.died:
            upper.owner.nodes[upper] = None
            if lower.due is not None:
                upper.due = lower.due
                upper.suspended += 1

    def rejoined(self, upper: Node) -> None:
        """Record that ``upper`` ends: the run behind it, with the same hints, takes its pages."""
        if upper.owner is not None and not upper.died:
            del upper.owner.nodes[upper]

    def resized(self, node: Node, pages: int) -> None:
        """Record that ``node`` stores ``pages`` more than before, of its own or beside them."""
        if node.died:
            self.num_dead += pages
        if node.suspended:
            self.num_awaited += pages

    def gone(self, leaf: Node) -> None:
        """Record that ``leaf`` is evicted; it is in no queue and still has its parent."""
        if leaf.died:
            self.num_dead -= leaf.weight
        elif leaf.owner is not None:
            if leaf.due is not None:
                self._count_off(leaf)
            del leaf.owner.nodes[leaf]
        leaf.owner = None

    def _share(self, node: Node) -> None:
        """Record that another user uses ``node``, too."""
        owner = node.owner
        assert owner is not None
        self._change(node, 0, None)
        del owner.nodes[node]
        node.owner = None

    def _change(self, node: Node, died: int, due: float | None) -> None:
        """Change the hints of ``node``, and its place in the eviction queue."""
        queued = not (node.children or node.holders or node.pins)
        if queued:
            self._policy.discard(node)
        self._set(node, died, due)
        if queued:
            self._policy.add(node)

    def _set(self, node: Node, died: int, due: float | None) -> None:
        assert node.owner is not None
        if node.died:
            self.num_dead -= node.weight
            node.owner.nodes[node] = None
        if died:
            self.num_dead += node.weight
            del node.owner.nodes[node]
        if due is not None and node.due is None:
            self._count_on(node)
        elif node.due is not None and due is None:
            self._count_off(node)
        node.died, node.due = died, due

    def _count_on(self, node: Node) -> None:
        """Count one more reason to keep ``node`` and all nodes before it."""
        while node.parent is not None:
            node.suspended += 1
            if node.suspended > 1:
                return
            self.num_awaited += node.weight
            node = node.parent

    def _count_off(self, node: Node) -> None:
        while node.parent is not None:
            node.suspended -= 1
            if node.suspended:
                return
            self.num_awaited -= node.weight
            node = node.parent

    def check(self, roots: Sequence[Node]) -> None:
        """Recount everything. Asserts."""
        dead = awaited = 0
        for root in roots:
            for node, _ in descend(root):
                parent = node.parent
                if parent is None:
                    assert node.owner is None
                    continue
                assert parent.owner in {None, node.owner}, (
                    "a node of another owner on an owner's path"
                )
                hinted = node.died or node.due is not None
                assert node.owner is not None or not hinted, "a hint without an owner"
                assert node.died or not parent.died, "a living node follows a dead one"
                assert not (node.died and node.due is not None)
                if node.owner is not None:
                    assert (node in node.owner.nodes) == (not node.died)
                    assert node.due == (None if node.died else node.owner.due)
                suspended = sum(1 for child in node.children.values() if child.suspended)
                waits = node.due is not None
                assert node.suspended == suspended + waits, f"wrong count of suspended: {node}"
                dead += node.weight if node.died else 0
                awaited += node.weight if node.suspended else 0
        assert dead == self.num_dead, (dead, self.num_dead)
        assert awaited == self.num_awaited, (awaited, self.num_awaited)
