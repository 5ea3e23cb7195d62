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
    from kvkeep.core.cache.inspector import CacheMap, MapNode, NodeView

__all__ = [
 "CacheMap", "CacheStats", "CachedPrefix",
    "MapNode", "NodeView", "PagedCache", "Pin", "RemovedPages",
    "Sequence", "Session",
]  # fmt: skip


def __getattr__(name: str) -> object:
    """Import the types for inspecting a cache at first use."""
    if name in {"CacheMap", "MapNode", "NodeView"}:
        return getattr(import_module("kvkeep.core.cache.inspector"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
