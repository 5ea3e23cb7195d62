"""`Holdings`: how many pages of the cache are whose, from its events."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import numpy as np

from kvkeep.core.events import Evicted, Stored

if TYPE_CHECKING:
    import numpy.typing as npt

    from kvkeep.core.cache import PagedCache
    from kvkeep.core.events import Event
    from kvkeep.core.keys import Namespace

    PageArray = npt.NDArray[np.int32]

__all__ = ["Holdings"]

_NOBODY = 0


class Holdings:
    """Counts the stored pages of each namespace, without a pass over the tree.

    Begins with what the cache holds. Memory: 4 bytes a page and a little for each namespace that
    has any. Cost: a few microseconds an event.

    Thread safety: `see` is a hook, which the cache calls one at a time; `pages` may be called from
    any thread, and is right as of some moment just gone.
    """

    def __init__(self, cache: PagedCache) -> None:
        self._owners = np.zeros(cache.num_pages, np.int32)
        self._names: dict[int, Namespace] = {}
        self._numbers: dict[Namespace, int] = {}
        self._pages: Counter[Namespace] = Counter()
        self._last = _NOBODY
        for space in cache.namespaces():
            for run in cache.runs(space):
                self._stored(space, run.pages)

    def see(self, event: Event) -> None:
        """Take in an event of the cache."""
        if isinstance(event, Stored):
            self._stored(event.namespace, event.pages)
        elif isinstance(event, Evicted):
            self._evicted(event.pages)

    def pages(self, namespace: Namespace) -> int:
        """Stored pages of a namespace."""
        return self._pages.get(namespace, 0)

    def _stored(self, namespace: Namespace, pages: PageArray) -> None:
        number = self._numbers.get(namespace)
        if number is None:
            self._last += 1
            number = self._numbers[namespace] = self._last
            self._names[number] = namespace
        self._owners[pages] = number
        self._pages[namespace] += len(pages)

    def _evicted(self, pages: PageArray) -> None:
        numbers, counts = np.unique(self._owners[pages], return_counts=True)
        self._owners[pages] = _NOBODY
        for number, count in zip(numbers.tolist(), counts.tolist(), strict=True):
            namespace = self._names.get(number)
            if namespace is None:
                continue
            self._pages[namespace] -= count
            if self._pages[namespace] <= 0:
                del self._pages[namespace], self._numbers[namespace], self._names[number]
