"""Eviction policies: which of the pages that may go, goes first."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvkeep.errors import InvalidValue
from kvkeep.eviction.adaptive import Adaptive
from kvkeep.eviction.arc import ARC
from kvkeep.eviction.base import Entry, EvictionPolicy
from kvkeep.eviction.fifo import FIFO
from kvkeep.eviction.gdsf import GDSF
from kvkeep.eviction.lfu import LFU
from kvkeep.eviction.lru import LRU
from kvkeep.eviction.priority import Priority
from kvkeep.eviction.reuse import Reuse
from kvkeep.eviction.s3fifo import S3FIFO
from kvkeep.eviction.slru import SLRU
from kvkeep.eviction.tlru import TLRU
from kvkeep.eviction.twoq import TwoQ

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
    "Reuse",
    "TwoQ",
    "policy",
]

POLICIES: dict[str, Callable[[], EvictionPolicy]] = {
    "lru": LRU,
    "lfu": LFU,
    "fifo": FIFO,
    "slru": SLRU,
    "priority": Priority,
    "2q": TwoQ,
    "adaptive": Adaptive,
    "arc": ARC,
    "s3fifo": S3FIFO,
    "gdsf": GDSF,
    "tlru": TLRU,
    "reuse": Reuse,
}
"""Every policy by its name."""


def policy(name: str | EvictionPolicy) -> EvictionPolicy:
    """The policy of that name, or the policy object itself; `InvalidValue` lists the names."""
    if isinstance(name, EvictionPolicy):
        return name
    if name not in POLICIES:
        raise InvalidValue(f"no eviction policy {name!r}; there are {', '.join(POLICIES)}")
    return POLICIES[name]()
