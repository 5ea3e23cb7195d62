"""The cache: the life of a request over pages, a prefix index and an eviction policy."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from kvkeep.cache.paged import CachedPrefix, PagedCache, RemovedPages
from kvkeep.cache.pins import Pin
from kvkeep.cache.sequence import Sequence
from kvkeep.cache.sessions import Session
from kvkeep.cache.stats import CacheStats

if TYPE_CHECKING:
    from kvkeep.cache.blocks import BlockNames, Blocks
    from kvkeep.cache.views import CacheMap, Found, MapNode, NodeView

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
        return getattr(import_module(f"kvkeep.cache.{_LOOKING[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
