"""`TaggedPages`: KV memory for tests, in which every slot knows the prefix it was computed for."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kvkeep.core.keys import as_namespace

if TYPE_CHECKING:
    from collections.abc import Iterable

    import numpy.typing as npt

    from kvkeep.core.keys import NamespaceLike
    from kvkeep.core.pages import PageCopy

__all__ = ["TaggedPages", "tags"]


def tags(tokens: Iterable[int], namespace: NamespaceLike = "") -> npt.NDArray[np.int64]:
    """What stands for the KV of each token: a number that depends on all tokens before it too."""
    tag = hash(as_namespace(namespace))
    out = [tag := hash((tag, token)) for token in tokens]
    return np.array(out, np.int64)


class TaggedPages:
    """Stands for an engine's KV memory: ``num_pages`` × ``page_size`` slots, one tag each.

    KV depends on the whole prefix, so a slot holds the tag of a prefix, not just a token: the right
    token after the wrong prefix is found out. Nothing is ever empty: what nobody wrote is garbage.
    """

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.page_size = page_size
        self.slots = np.zeros((num_pages, page_size), np.int64)
        self._garbage = 0
        self.scribble(range(num_pages))

    def scribble(self, pages: Iterable[int]) -> None:
        """Overwrite whole pages with garbage that was never seen before."""
        for page in pages:
            self._garbage -= 1
            self.slots[page] = self._garbage

    def copy(self, copy: PageCopy) -> None:
        """Do what an engine does for a `PageCopy`."""
        self.slots[copy.dst, : copy.tokens] = self.slots[copy.src, : copy.tokens]

    def write(
        self, table: npt.NDArray[np.int32], start: int, computed: npt.NDArray[np.int64]
    ) -> None:
        """Write the tags of the tokens from position ``start`` on, at the places of ``table``."""
        at = np.arange(start, start + len(computed))
        self.slots[table[at // self.page_size], at % self.page_size] = computed

    def read(self, table: npt.NDArray[np.int32], length: int) -> npt.NDArray[np.int64]:
        """The tags of the first ``length`` positions of a sequence with this page table."""
        return self.slots[table].reshape(-1)[:length]
