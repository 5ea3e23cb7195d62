"""Prefix indices: the longest cached prefix of a prompt, and which pages may be evicted."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvkeep.core.errors import InvalidValue, did_you_mean, told
from kvkeep.core.prefix.base import PrefixIndex
from kvkeep.core.prefix.chain import ChainIndex
from kvkeep.core.prefix.radix import RadixIndex
from kvkeep.core.prefix.results import PrefixMatch, PrefixRun

if TYPE_CHECKING:
    from kvkeep.core.eviction import EvictionPolicy

__all__ = [
    "INDICES",
    "ChainIndex",
    "PrefixIndex",
    "PrefixMatch",
    "PrefixRun",
    "RadixIndex",
    "index",
]

INDICES: dict[str, type[RadixIndex | ChainIndex]] = {"radix": RadixIndex, "chain": ChainIndex}


def index(name: str, page_size: int, policy: EvictionPolicy) -> PrefixIndex:
    """Return a new, empty index of that name; `InvalidValue` lists the names."""
    given: object = name
    if not isinstance(given, str) or given not in INDICES:
        near = did_you_mean(given, INDICES) if isinstance(given, str) else ""
        raise InvalidValue(f"no prefix index {told(name)}; there are {', '.join(INDICES)}{near}")
    return INDICES[name](page_size, policy)
