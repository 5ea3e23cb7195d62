"""The cache: a request's life cycle over pages, a prefix index and an eviction policy."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from kvkeep.core.cache.cache import CachedPrefix, PagedCache, RemovedPages
from kvkeep.core.cache.pins import Pin
from kvkeep.core.cache.sequence import Sequence
from kvkeep.core.cache.sessions import Session
from kvkeep.core.cache.stats import CacheStats

if TYPE_CHECKING:
    from kvkeep.core.cache.views import CacheMap, MapNode, NodeView

__all__ = [
 "CacheMap", "CacheStats", "CachedPrefix",
    "MapNode", "NodeView", "PagedCache", "Pin", "RemovedPages",
    "Sequence", "Session",
]  # fmt: skip

_INSPECTION = {
    "CacheMap": "views", "MapNode": "views", "NodeView": "views",
}  # fmt: skip


def __getattr__(name: str) -> object:
    """Import the types for inspecting a cache at first use."""
    if name in _INSPECTION:
        return getattr(import_module(f"kvkeep.core.cache.{_INSPECTION[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
