"""Eviction policies: which of the evictable pages is evicted first."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvkeep.core.errors import InvalidValue, did_you_mean, told
from kvkeep.core.eviction.base import Entry, EvictionPolicy
from kvkeep.core.eviction.lru import LRU
from kvkeep.core.eviction.priority import Priority
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
    given: object = name
    if not isinstance(given, str) or given not in POLICIES:
        near = did_you_mean(given, POLICIES) if isinstance(given, str) else ""
        raise InvalidValue(
            f"no eviction policy {told(name)}; there are {', '.join(POLICIES)}{near}"
        )
    return POLICIES[name]()


def without_waits() -> list[str]:
    """Return the names of policies for what does not see when requests end."""
    return [name for name, make in POLICIES.items() if not make().awaits]
