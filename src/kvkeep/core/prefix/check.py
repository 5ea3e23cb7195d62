"""Recount a `RunTree` from scratch: every counter, queue and link."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from typing import TYPE_CHECKING

from kvkeep.core.prefix.heads import stored_bytes
from kvkeep.core.prefix.node import descend
from kvkeep.core.prefix.results import joined

if TYPE_CHECKING:
    from kvkeep.core.pages.tables import PageArray
    from kvkeep.core.prefix.node import Node
    from kvkeep.core.prefix.tree import RunTree

__all__ = ["check_tree"]


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
