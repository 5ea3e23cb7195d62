"""The hooks of the contract suite: how to make the index under test."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from prefix_driver import IndexDriver

from kvkeep.core.eviction import LRU

if TYPE_CHECKING:
    from kvkeep.core.eviction import EvictionPolicy
    from kvkeep.core.prefix import Tree

__all__ = ["PrefixHooks", "pages_of"]


class PrefixHooks:
    """The methods that a subclass of the suite overrides, and the fixture built on them."""

    exact = False
    """The index finds pages that match only in part."""

    def make_index(self, page_size: int, policy: EvictionPolicy) -> Tree:
        """A new, empty index."""
        raise NotImplementedError("say how to make the index that is to be tested")

    def make_driver(self, page_size: int, policy: EvictionPolicy | None = None) -> IndexDriver:
        """Return a driver of a new index, by default with LRU."""
        index = self.make_index(page_size, LRU() if policy is None else policy)
        return IndexDriver(index, exact=self.exact)

    @pytest.fixture(params=[1, 2, 3, 16], ids="pages of {}".format)
    def driver(self, request: pytest.FixtureRequest) -> IndexDriver:
        """An empty index, at several page sizes."""
        return self.make_driver(request.param)


def pages_of(driver: IndexDriver, *pages: int) -> list[int]:
    """Tokens of full pages: each number given stands for one page of its own."""
    size = driver.index.page_size
    return [token for page in pages for token in (*[7] * (size - 1), page)]
