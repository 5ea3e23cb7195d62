"""What a look into a cache gives: maps, single runs, and places where tokens stand."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvkeep.core.cache.blocks import Blocks
    from kvkeep.core.extras import Extras
    from kvkeep.core.keys import Namespace
    from kvkeep.core.pages.table import PageArray
    from kvkeep.core.tokens import TokenArray

__all__ = ["CacheMap", "Found", "MapNode", "NodeView"]


@dataclass(frozen=True, slots=True, eq=False)
class MapNode:
    """One node of a `CacheMap`: a run, a namespace, or several small siblings (``hidden``).

    ``id`` is a run's number, which no other run ever has. It belongs to the run's end: it stays as
    long as that is stored, also when the run grows, is split (the front gets another number), or
    loses its tail. Namespaces have negative ids, stable while anything is in them, and hidden nodes
    have some that mean nothing elsewhere. ``parent`` is None on top.

    ``pages`` are its own; of a hidden node, all that it stands for: ``pages`` of all nodes of a map
    sum up to ``CacheMap.pages``. ``below_pages`` and ``below_runs`` count it and all behind it.
    ``holders`` are sequences and hard pins on it, and runs behind it that have any; ``pins`` the
    soft pins that end with it. ``hits`` are the requests that reused it, ``age_s`` the seconds
    since one last did, or was done with it, as its policy has it, exact to a second or so.
    """

    id: int
    parent: int | None
    pages: int
    below_pages: int
    below_runs: int
    holders: int
    pins: int
    hits: int
    age_s: float
    count: int = 0
    """How many siblings a hidden node stands for; 0 for all others."""
    head: TokenArray | None = None
    """Its first tokens, 80 at most; None where the index keeps none."""
    key: bytes = b""
    """The first bytes of its first symbol, where the index keeps no tokens."""
    namespace: Namespace | None = None
    """Of the nodes that are one."""
    blocks: Blocks | None = None
    """Those of a store that end in it; None where nobody asked, or it cannot be said."""

    @property
    def hidden(self) -> bool:
        """It stands for several."""
        return self.count > 0


@dataclass(frozen=True, slots=True, eq=False)
class CacheMap:
    """What a cache holds, its largest subtrees one by one and the rest summed up."""

    page_size: int
    runs: int
    """All that the map stands for."""
    pages: int
    nodes: tuple[MapNode, ...]
    """Parents before children."""


@dataclass(frozen=True, slots=True, eq=False)
class NodeView:
    """One run (or namespace) by its number."""

    node: MapNode
    namespace: Namespace
    path: tuple[int, ...]
    """Ids from the namespace to the node that it hangs from."""
    start: int
    """Pages before it."""
    page_ids: PageArray
    tokens: TokenArray | None
    extras: Extras
    """The digests of the bytes that belong to some of ``tokens``."""
    children: int
    state: str
    """What the eviction policy says of it."""


@dataclass(frozen=True, slots=True, eq=False)
class Found:
    """One place of a search: the run ``id`` is the one in which what was sought ends."""

    id: int
    path: tuple[int, ...]
    """Ids from the namespace to the node that it hangs from."""
    at: int
    """Tokens before it, from the beginning of the prompt."""
    needle: int
    """Which of those that were sought it is."""
    tokens: TokenArray
    """It, with some tokens before and after."""
    before: int
    """How many of ``tokens`` lie before it."""
