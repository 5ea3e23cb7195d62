"""The cache: the life of a request over pages, a prefix index and an eviction policy."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvkeep.cache.paged import CachedPrefix, PagedCache
from kvkeep.cache.pins import Pin
from kvkeep.cache.sequence import Sequence
from kvkeep.cache.sessions import Session
from kvkeep.cache.stats import CacheStats

if TYPE_CHECKING:
    from kvkeep.cache.blocks import BlockNames, Blocks
    from kvkeep.cache.views import CacheMap, Found, MapNode, NodeView

__all__ = [
    "BlockNames", "Blocks", "CacheMap", "CacheStats", "CachedPrefix", "Found", "MapNode",
    "NodeView", "PagedCache", "Pin", "Sequence", "Session",
]  # fmt: skip

_VIEWS = {"CacheMap", "Found", "MapNode", "NodeView"}
_BLOCKS = {"BlockNames", "Blocks"}


def __getattr__(name: str) -> object:
    """What a look into a cache asks and gives is imported by those who look."""
    if name in _VIEWS:
        from kvkeep.cache import views  # noqa: PLC0415

        return getattr(views, name)
    if name in _BLOCKS:
        from kvkeep.cache import blocks  # noqa: PLC0415

        return getattr(blocks, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
