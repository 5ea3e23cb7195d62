"""`TaggedPages`: KV memory for tests, in which each slot names the prefix it was computed for."""

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
    """Return a number for the KV of each token, which depends on all tokens up to it."""
    tag = hash(as_namespace(namespace))
    out = [tag := hash((tag, token)) for token in tokens]
    return np.array(out, np.int64)


class TaggedPages:
    """Replaces an engine's KV memory: ``num_pages`` × ``page_size`` slots, one tag each.

    A slot holds the tag of a whole prefix, as KV depends on it, so the right token after a wrong
    prefix is detected. Unwritten slots hold garbage, never zeros.
    """

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.page_size = page_size
        self.slots = np.zeros((num_pages, page_size), np.int64)
        self._garbage = 0
        self.scribble(range(num_pages))

    def scribble(self, pages: Iterable[int]) -> None:
        """Overwrite whole pages with new, unique garbage."""
        for page in pages:
            self._garbage -= 1
            self.slots[page] = self._garbage

    def copy(self, copy: PageCopy) -> None:
        """Perform a `PageCopy`, as an engine does."""
        self.slots[copy.dst, : copy.tokens] = self.slots[copy.src, : copy.tokens]

    def write(
        self, table: npt.NDArray[np.int32], start: int, computed: npt.NDArray[np.int64]
    ) -> None:
        """Write tags for the positions from ``start`` on into the pages of ``table``."""
        at = np.arange(start, start + len(computed))
        self.slots[table[at // self.page_size], at % self.page_size] = computed

    def read(self, table: npt.NDArray[np.int32], length: int) -> npt.NDArray[np.int64]:
        """Return the tags of the first ``length`` positions of the page table ``table``."""
        return self.slots[table].reshape(-1)[:length]
