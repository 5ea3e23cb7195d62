"""Eviction policies: which of the evictable pages is evicted first."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvkeep.core.errors import choice
from kvkeep.core.eviction.base import Entry, EvictionPolicy
from kvkeep.core.eviction.basic import LRU, Priority
from kvkeep.core.eviction.returns import ReturnAware

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = [
    "LRU",
    "POLICIES",
    "Entry",
    "EvictionPolicy",
    "Priority",
    "ReturnAware",
    "policy",
    "without_waits",
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


def without_waits() -> list[str]:
    """Return the names of policies for what does not see when requests end."""
    return [name for name, make in POLICIES.items() if not make().awaits]
