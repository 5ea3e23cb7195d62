"""Results of a prefix index: matches, inserts, and descriptions of stored runs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from kvkeep.core.tokens import TOKEN_DTYPE

if TYPE_CHECKING:
    from kvkeep.core.eviction import EvictionPolicy
    from kvkeep.core.extras import Extras
    from kvkeep.core.pages.tables import PageArray
    from kvkeep.core.prefix.marks import Marks
    from kvkeep.core.prefix.node import Node
    from kvkeep.core.tokens import TokenArray

__all__ = ["EMPTY_PAGES", "Inserted", "PrefixMatch", "PrefixRun", "joined"]

EMPTY_PAGES: PageArray = np.empty(0, np.int32)
EMPTY_PAGES.flags.writeable = False


def joined(parts: list[PageArray]) -> PageArray:
    """Return one array of all page ids; a single part is returned as it is, not copied."""
    if len(parts) == 1:
        return parts[0]
    return np.concatenate(parts) if parts else EMPTY_PAGES


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
            trail = node.trail
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


class Inserted(NamedTuple):
    """The result of an insert."""

    hold: Node
    """The hold, moved to the end of the inserted pages."""
    existing: PageArray
    """Stored pages, int32, that replace the first of the given pages: same tokens, older."""


class PrefixRun(NamedTuple):
    """One run of the tree, as `PrefixIndex.runs` lists it."""

    depth: int
    """Runs before it on its path."""
    start: int
    """Pages before it on its path."""
    pages: PageArray
    symbols: bytes
    """The symbols that the index compares: int32 tokens and marks, or 32-byte keys."""
    tokens: TokenArray | None
    """Its tokens; None for an index that stores keys."""
    children: int
    holders: int
    pins: int
    """Soft pins at its end."""
    state: str
    """How the eviction policy ranks it, in words."""
    extras: Extras = ()
    """Extras of its tokens; positions count from its first token."""
    points: tuple[int, ...] = ()
    """Pages of its path behind which requests can resume, of a cache with groups of layers."""

    @classmethod
    def of(cls, node: Node, depth: int, policy: EvictionPolicy, marks: Marks | None) -> PrefixRun:
        """Describe ``node``; ``marks`` is None for an index that stores keys."""
        symbols = bytes(node.run)
        tokens: TokenArray | None = None
        extras: Extras = ()
        if marks is not None:
            tokens, extras = marks.plain(np.frombuffer(symbols, TOKEN_DTYPE))
        return cls(
            depth=depth,
            start=node.depth,
            pages=node.pages.copy(),
            symbols=symbols,
            tokens=tokens,
            children=len(node.children),
            holders=node.holders,
            pins=node.pins,
            state=policy.describe(node),
            extras=extras,
            points=node.points,
        )
