"""The contract suite over both kinds of prefix index."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prefix_suite import PrefixIndexTests

from kvkeep.core.prefix import ChainIndex, Tree

if TYPE_CHECKING:
    from kvkeep.core.eviction import EvictionPolicy


class TestRadixIndex(PrefixIndexTests):
    exact = True

    def make_index(self, page_size: int, policy: EvictionPolicy) -> Tree:
        return Tree(page_size, policy)


class TestChainIndex(PrefixIndexTests):
    def make_index(self, page_size: int, policy: EvictionPolicy) -> ChainIndex:
        return ChainIndex(page_size, policy)
