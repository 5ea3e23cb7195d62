"""The prefix tree: the longest cached prefix of a prompt, and which pages may be evicted."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvkeep.core.errors import choice
from kvkeep.core.prefix.chain import ChainIndex
from kvkeep.core.prefix.trails import PrefixMatch
from kvkeep.core.prefix.tree import Tree

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvkeep.core.prefix.policy import EvictionPolicy

__all__ = ["INDICES", "ChainIndex", "PrefixMatch", "Tree", "index"]

INDICES: dict[str, type[Tree]] = {"radix": Tree, "chain": ChainIndex}


def index(name: str, page_size: int, policy: EvictionPolicy, clock: Callable[[], float]) -> Tree:
    """Return a new, empty index of that name; `InvalidValue` lists the names."""
    return choice("prefix index", name, INDICES)(page_size, policy, clock)
