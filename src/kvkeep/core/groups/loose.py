"""`LooseRows`: rows in the tree that no checkpoint needs, oldest first."""

from __future__ import annotations

from collections import OrderedDict
from itertools import islice
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvkeep.core.pages.table import PageArray

__all__ = ["LooseRows"]


class LooseRows:
    """Loose rows by their first pages.

    Rows that a sequence uses, too, are set aside when they are met, and return when it releases
    them. So none is looked at twice. Thread safety: none; under the cache's lock. Cost: O(1) a row.
    """

    __slots__ = ("_aside", "_waiting")

    def __init__(self) -> None:
        self._waiting: OrderedDict[int, None] = OrderedDict()
        self._aside: set[int] = set()

    def __len__(self) -> int:
        return len(self._waiting) + len(self._aside)

    def add(self, firsts: Iterable[int]) -> None:
        """Add rows."""
        self._waiting.update(dict.fromkeys(firsts))

    def discard(self, firsts: Iterable[int]) -> None:
        """Remove rows, as far as they are loose."""
        for first in firsts:
            if first in self._waiting:
                del self._waiting[first]
            else:
                self._aside.discard(first)

    def oldest(self, most: int) -> list[int]:
        """Remove and return the oldest that were not set aside, ``most`` at most."""
        oldest = list(islice(self._waiting, most))
        for first in oldest:
            del self._waiting[first]
        return oldest

    def set_aside(self, firsts: Iterable[int]) -> None:
        """Keep rows that `oldest` returned, and that sequences use, until they are `released`."""
        self._aside.update(firsts)

    def released(self, pages: PageArray) -> None:
        """Record that no sequence uses ``pages`` any more; other pages than of rows are ignored."""
        if self._aside:
            for page in pages.tolist():
                if page in self._aside:
                    self._aside.remove(page)
                    self._waiting[page] = None

    def firsts(self) -> set[int]:
        """Return the first pages of all. Cost: all of them."""
        return self._aside.union(self._waiting)

    def aside(self) -> set[int]:
        """Return the first pages of those set aside, for `check`."""
        return set(self._aside)
