"""The cache: the life of a request over pages, a prefix index and an eviction policy."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvkeep.cache.paged import CachedPrefix, PagedCache
from kvkeep.cache.pins import Pin
from kvkeep.cache.sequence import Sequence
from kvkeep.cache.sessions import Session
from kvkeep.cache.stats import CacheStats

if TYPE_CHECKING:
    from kvkeep.cache.views import CacheMap, Found, MapNode, NodeView

__all__ = [
    "CacheMap", "CacheStats", "CachedPrefix", "Found", "MapNode", "NodeView", "PagedCache", "Pin",
    "Sequence", "Session",
]  # fmt: skip

_VIEWS = {"CacheMap", "Found", "MapNode", "NodeView"}


def __getattr__(name: str) -> object:
    """What a look into a cache gives is imported by those who look."""
    if name in _VIEWS:
        from kvkeep.cache import views  # noqa: PLC0415

        return getattr(views, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
