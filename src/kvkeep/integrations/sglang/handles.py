"""`PathHandle`: what SGLang keeps of a match, and locks."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvkeep.core.keys import Namespace
    from kvkeep.core.prefix.node import Node
    from kvkeep.integrations.sglang.slot_tree import SlotTree

__all__ = ["PathHandle"]


class PathHandle:
    """A stored prefix: the first ``pages`` pages of a path in ``tree``.

    Attributes:
        tree: the tree that has stored it.
        namespace: its namespace.
        tokens: tokens that begin with those of the prefix, to match them again.
        pages: its pages.
        node: the node in which it ended when it was made; None if nothing was stored there.
        evictions: how often the tree had evicted by then.
        hold: its protection from eviction while ``locks`` is not zero.
        counted: whether its request is counted.
        number: of the sequence for which it was locked; 0 if requests are not explained.
    """

    __slots__ = (
        "counted", "evictions", "hold", "locks", "namespace", "node", "number", "pages", "tokens",
        "tree",
    )  # fmt: skip

    def __init__(
        self,
        tree: SlotTree,
        namespace: Namespace,
        tokens: Sequence[int],
        pages: int = 0,
        node: Node | None = None,
    ) -> None:
        self.tree = tree
        self.namespace = namespace
        self.tokens = tokens
        self.pages = pages
        self.node = node
        self.evictions = tree.evictions
        self.hold: Node | None = None
        self.locks = 0
        self.counted = False
        self.number = 0

    def end(self) -> Node | None:
        """Return the node in which the prefix ends now; None if it has to be matched again.

        Cost: the splits since it was made.
        """
        node = self.hold
        if node is None:
            node = self.node if self.evictions == self.tree.evictions else None
        if node is None or not node.in_tree:  # in no tree: evicted, or joined with another
            return None
        while node.depth >= self.pages and node.parent is not None:
            node = node.parent
        return node if node.end >= self.pages else None

    def __repr__(self) -> str:
        return f"<PathHandle of {self.pages} pages, {self.locks} locks>"
