"""Eviction policies: which of the evictable pages is evicted first."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvkeep.core.errors import choice
from kvkeep.core.eviction.returns import ReturnAware
from kvkeep.core.prefix.node import Entry
from kvkeep.core.prefix.policy import LRU, AgeQueue, EvictionPolicy, Priority, QueuePolicy

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = [
    "LRU",
    "POLICIES",
    "AgeQueue",
    "Entry",
    "EvictionPolicy",
    "Priority",
    "QueuePolicy",
    "ReturnAware",
    "policy",
]

POLICIES: dict[str, Callable[[], EvictionPolicy]] = {
    "lru": LRU,
    "priority": Priority,
    "returns": ReturnAware,
}
"""Every policy by its name. A policy of your own that you add here can be named everywhere."""


def policy(name: str | EvictionPolicy) -> EvictionPolicy:
    """Return a new policy of that name, or the given policy; `InvalidValue` lists the names."""
    if isinstance(name, EvictionPolicy):
        return name
    return choice("eviction policy", name, POLICIES)()
