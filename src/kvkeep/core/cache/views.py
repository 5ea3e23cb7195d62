"""Results of inspecting a cache: maps and single runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvkeep.core.extras import Extras
    from kvkeep.core.keys import Namespace
    from kvkeep.core.pages.pool import PageArray
    from kvkeep.core.tokens import TokenArray

__all__ = ["CacheMap", "MapNode", "NodeView"]


@dataclass(frozen=True, slots=True, eq=False)
class MapNode:
    """One node of a `CacheMap`: a run, a namespace, or several small siblings (``hidden``).

    ``id`` is a run's number, which no other run ever has. The number belongs to the run's end: it
    stays while that is stored, also when the run grows, is split (the front gets another number),
    or loses its tail. Namespaces have negative ids, stable while they hold pages; ids of hidden
    nodes are valid in this map only. ``parent`` is None for top nodes.

    ``pages`` are the node's own; for a hidden node, those of all runs it stands for, so that
    ``pages`` of all nodes of a map sum up to ``CacheMap.pages``. ``below_pages`` and ``below_runs``
    include everything behind the node. ``group_pages`` are those of rows and states
    beside them, in a cache with groups of layers. ``holders`` are sequences and hard
    pins on the run, and runs behind it that have any; ``pins`` the soft pins that end with it.
    ``hits`` are the requests that reused the run.
    """

    id: int
    parent: int | None
    pages: int
    below_pages: int
    below_runs: int
    holders: int
    pins: int
    hits: int
    count: int = 0
    """Siblings that a hidden node stands for; 0 for all other nodes."""
    head: TokenArray | None = None
    """The first tokens, 80 at most; None if the index keeps no tokens."""
    key: bytes = b""
    """The first bytes of the first block key, if the index keeps no tokens."""
    namespace: Namespace | None = None
    """The namespace that the node stands for; None for other nodes."""
    group_pages: int = 0
    checkpoints: tuple[int, ...] = ()
    """Positions in the run at which requests can resume, in tokens from the prompt's start; empty
    in a plain cache. Without states they may resume elsewhere, too, while the rows are there."""

    @property
    def hidden(self) -> bool:
        """Whether the node stands for several siblings."""
        return self.count > 0


@dataclass(frozen=True, slots=True, eq=False)
class CacheMap:
    """The content of a cache: its largest subtrees one by one, the rest summed up."""

    page_size: int
    runs: int
    """Runs in the mapped part of the cache, hidden ones included."""
    pages: int
    nodes: tuple[MapNode, ...]
    """Parents before children."""
    group_pages: int = 0
    """Pages of rows and states, which ``pages`` does not count."""


@dataclass(frozen=True, slots=True, eq=False)
class NodeView:
    """One run (or namespace), by its number."""

    node: MapNode
    namespace: Namespace
    path: tuple[int, ...]
    """Ids from the namespace down to the parent."""
    start: int
    """Pages before the run."""
    page_ids: PageArray
    tokens: TokenArray | None
    extras: Extras
    """The digests of the bytes that belong to some of ``tokens``."""
    children: int
    state: str
    """The eviction policy's description of the run."""
