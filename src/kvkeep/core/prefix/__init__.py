"""Prefix indices: the longest cached prefix of a prompt, and which pages may be evicted."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvkeep.core.errors import choice
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
    return choice("prefix index", name, INDICES)(page_size, policy)
