"""Eviction policies: which of the evictable pages is evicted first."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvkeep.core.errors import InvalidValue, did_you_mean, told
from kvkeep.core.eviction.adaptive import Adaptive
from kvkeep.core.eviction.arc import ARC
from kvkeep.core.eviction.base import Entry, EvictionPolicy
from kvkeep.core.eviction.fifo import FIFO
from kvkeep.core.eviction.gdsf import GDSF
from kvkeep.core.eviction.lfu import LFU
from kvkeep.core.eviction.lru import LRU
from kvkeep.core.eviction.priority import Priority
from kvkeep.core.eviction.returns import ReturnAware
from kvkeep.core.eviction.reuse import Reuse
from kvkeep.core.eviction.s3fifo import S3FIFO
from kvkeep.core.eviction.slru import SLRU
from kvkeep.core.eviction.tlru import TLRU
from kvkeep.core.eviction.twoq import TwoQ

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = [
    "ARC",
    "FIFO",
    "GDSF",
    "LFU",
    "LRU",
    "POLICIES",
    "S3FIFO",
    "SLRU",
    "TLRU",
    "Adaptive",
    "Entry",
    "EvictionPolicy",
    "Priority",
    "ReturnAware",
    "Reuse",
    "TwoQ",
    "policy",
    "without_waits",
]

POLICIES: dict[str, Callable[[], EvictionPolicy]] = {
    "lru": LRU,
    "lfu": LFU,
    "fifo": FIFO,
    "slru": SLRU,
    "priority": Priority,
    "2q": TwoQ,
    "s3fifo": S3FIFO,
    "arc": ARC,
    "gdsf": GDSF,
    "tlru": TLRU,
    "reuse": Reuse,
    "returns": ReturnAware,
    "adaptive": Adaptive,
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
    return [name for name, make in POLICIES.items() if not make().needs_waits]
