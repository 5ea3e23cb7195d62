"""The cache: the life of a request over pages, a prefix index and an eviction policy."""

from __future__ import annotations

from kvkeep.cache.paged import CachedPrefix, PagedCache
from kvkeep.cache.pins import Pin
from kvkeep.cache.sequence import Sequence
from kvkeep.cache.sessions import Session
from kvkeep.cache.stats import CacheStats
from kvkeep.cache.views import CacheMap, Found, MapNode, NodeView

__all__ = [
    "CacheMap", "CacheStats", "CachedPrefix", "Found", "MapNode", "NodeView", "PagedCache", "Pin",
    "Sequence", "Session",
]  # fmt: skip
