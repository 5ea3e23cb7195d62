"""`Owners`: which runs of a tree one user alone has used, and what that user says of them.

A node's ``owner`` is who alone has ever used it; None stands for several, or for somebody who did
not say. It only ever goes from an owner to None, and whoever uses a node uses all before it:

    root ── system prompt (None) ─┬─ A's first turn (A) ── A's second turn (A)
                                  └─ B's first turn (B)

So an owner's nodes are whole ends of branches. To say of all of them that they are dead, or that
they are awaited, is a walk over that owner's nodes; to note that somebody else has come is a walk
up to the first node that has no owner, and that happens to each node once.
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
    """Somebody who uses runs, and the living ones that nobody else has used.

    ``due`` is when an owner who is away will be back, None otherwise. What an owner who has
    ``left`` stores from then on is dead from the beginning.
    """

    __slots__ = ("due", "left", "nodes")

    def __init__(self) -> None:
        self.nodes: dict[Node, None] = {}
        self.due: float | None = None
        self.left = False


class Owners:
    """Keeps the owners of a tree's nodes, and their hints in order. The tree tells what happens.

    What hangs from a dead node is dead. Nothing here changes what is found, or what may go: only
    what goes first.

    Memory: one dictionary entry a node. Thread safety: none; under the cache's lock.
    """

    def __init__(self, policy: Hinted) -> None:
        self._policy = policy
        self.num_dead = 0
        """Pages that died and are still there."""
        self.num_awaited = 0
        """Pages of owners who will be back, with all before them: those stay as long as these."""

    # --- what owners say ---------------------------------------------------------------------

    def used(self, hold: Node, owner: Owner | None) -> None:
        """``owner`` (None: somebody) uses the path of ``hold``, which brings it back to life.

        Cost: up to the first node that is known to be used so.
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

    def kill(self, owner: Owner, path: Node | None = None) -> int:
        """The owner's nodes are dead, but for those on ``path``; returns how many pages that is.

        Those that somebody holds stay as long as that lasts. Cost: the owner's living nodes.
        """
        kept: set[Node] = set()
        while path is not None and path.owner is owner:
            kept.add(path)
            path = path.parent
        if len(kept) == len(owner.nodes):
            return 0
        before = self.num_dead
        for node in [node for node in owner.nodes if node not in kept]:
            self._change(node, self._policy.death(), None)
        return self.num_dead - before

    def suspend(self, owner: Owner, due: float) -> int:
        """The owner is away until ``due``; returns the pages of its own that are kept for that."""
        owner.due = due
        for node in owner.nodes:
            self._change(node, 0, due)
        return sum(node.size for node in owner.nodes)

    def wake(self, owner: Owner) -> None:
        """The owner is away no more."""
        owner.due = None
        for node in owner.nodes:
            self._change(node, 0, None)

    # --- what happens in the tree ------------------------------------------------------------

    def born(self, leaf: Node, owner: Owner) -> None:
        """``owner`` stored ``leaf``, which is in no queue yet."""
        leaf.owner = owner
        owner.nodes[leaf] = None
        dead = owner.left or (leaf.parent is not None and bool(leaf.parent.died))
        self._set(leaf, self._policy.death() if dead else 0, None if dead else owner.due)

    def split(self, upper: Node, lower: Node) -> None:
        """``lower`` was cut in two, its front is now ``upper``."""
        upper.sleepers = 1 if lower.sleepers else 0
        upper.owner, upper.died = lower.owner, lower.died
        if upper.owner is not None and not upper.died:
            upper.owner.nodes[upper] = None
            if lower.due is not None:
                upper.due = lower.due
                upper.sleepers += 1

    def rejoined(self, upper: Node) -> None:
        """``upper`` goes: it is the front of the run behind it again, which has the same hints."""
        if upper.owner is not None and not upper.died:
            del upper.owner.nodes[upper]

    def resized(self, node: Node, pages: int) -> None:
        """``node`` has so many pages more than it had."""
        if node.died:
            self.num_dead += pages
        if node.sleepers:
            self.num_awaited += pages

    def gone(self, leaf: Node) -> None:
        """``leaf`` goes, and is in no queue any more; it still has its parent."""
        if leaf.died:
            self.num_dead -= leaf.size
        elif leaf.owner is not None:
            if leaf.due is not None:
                self._count_off(leaf)
            del leaf.owner.nodes[leaf]
        leaf.owner = None

    def _share(self, node: Node) -> None:
        """Others use ``node`` too."""
        owner = node.owner
        assert owner is not None
        self._change(node, 0, None)
        del owner.nodes[node]
        node.owner = None

    def _change(self, node: Node, died: int, due: float | None) -> None:
        """Give ``node`` other hints, and its place by them if it is in a queue."""
        queued = not (node.children or node.holders or node.pins)
        if queued:
            self._policy.discard(node)
        self._set(node, died, due)
        if queued:
            self._policy.add(node)

    def _set(self, node: Node, died: int, due: float | None) -> None:
        assert node.owner is not None
        if node.died:
            self.num_dead -= node.size
            node.owner.nodes[node] = None
        if died:
            self.num_dead += node.size
            del node.owner.nodes[node]
        if due is not None and node.due is None:
            self._count_on(node)
        elif node.due is not None and due is None:
            self._count_off(node)
        node.died, node.due = died, due

    def _count_on(self, node: Node) -> None:
        """One more reason why ``node`` stays, and with it all before it."""
        while node.parent is not None:
            node.sleepers += 1
            if node.sleepers > 1:
                return
            self.num_awaited += node.size
            node = node.parent

    def _count_off(self, node: Node) -> None:
        while node.parent is not None:
            node.sleepers -= 1
            if node.sleepers:
                return
            self.num_awaited -= node.size
            node = node.parent

    # --- looking -----------------------------------------------------------------------------

    def check(self, roots: Sequence[Node]) -> None:
        """Recount everything and assert that it agrees."""
        dead = awaited = 0
        for root in roots:
            for node, _ in descend(root):
                parent = node.parent
                if parent is None:
                    assert node.owner is None
                    continue
                assert parent.owner in {None, node.owner}, "an owner's path has another's node"
                hinted = node.died or node.due is not None
                assert node.owner is not None or not hinted, "a hint of nobody's"
                assert node.died or not parent.died, "something lives on what is dead"
                assert not (node.died and node.due is not None)
                if node.owner is not None:
                    assert (node in node.owner.nodes) == (not node.died)
                    assert node.due == (None if node.died else node.owner.due)
                sleepers = sum(1 for child in node.children.values() if child.sleepers)
                waits = node.due is not None
                assert node.sleepers == sleepers + waits, f"wrong sleepers: {node}"
                dead += node.size if node.died else 0
                awaited += node.size if node.sleepers else 0
        assert dead == self.num_dead, (dead, self.num_dead)
        assert awaited == self.num_awaited, (awaited, self.num_awaited)
