"""The cache: the life of a request over pages, a prefix index and an eviction policy."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from kvkeep.core.cache.paged import CachedPrefix, PagedCache, RemovedPages
from kvkeep.core.cache.pins import Pin
from kvkeep.core.cache.sequence import Sequence
from kvkeep.core.cache.sessions import Session
from kvkeep.core.cache.stats import CacheStats

if TYPE_CHECKING:
    from kvkeep.core.cache.blocks import BlockNames, Blocks
    from kvkeep.core.cache.views import CacheMap, Found, MapNode, NodeView

__all__ = [
    "BlockNames", "Blocks", "CacheMap", "CacheStats", "CachedPrefix", "Found", "MapNode",
    "NodeView", "PagedCache", "Pin", "RemovedPages", "Sequence", "Session",
]  # fmt: skip

_LOOKING = {
    "BlockNames": "blocks", "Blocks": "blocks",
    "CacheMap": "views", "Found": "views", "MapNode": "views", "NodeView": "views",
}  # fmt: skip


def __getattr__(name: str) -> object:
    """What a look into a cache asks and gives is imported by those who look."""
    if name in _LOOKING:
        return getattr(import_module(f"kvkeep.core.cache.{_LOOKING[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
