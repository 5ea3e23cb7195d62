"""`LooseRows`: rows in the tree that no checkpoint needs, oldest first."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvkeep.core.groups.kept import Rows
    from kvkeep.core.pages.table import PageArray
    from kvkeep.core.prefix.node import Node

__all__ = ["LooseRows"]


class LooseRows:
    """Loose rows by their first page, with the node that stores each.

    Rows that a sequence uses, too, are set aside when they are met, and return when it releases
    them. So none is looked at twice. Thread safety: none; under the cache's lock. Cost: O(1) a row.
    """

    __slots__ = ("_aside", "_waiting")

    def __init__(self) -> None:
        self._waiting: OrderedDict[int, Node] = OrderedDict()
        self._aside: dict[int, Node] = {}

    def __len__(self) -> int:
        return len(self._waiting) + len(self._aside)

    def add(self, firsts: Iterable[int], node: Node) -> None:
        """Add rows of ``node``."""
        self._waiting.update(dict.fromkeys(firsts, node))

    def discard(self, firsts: Iterable[int]) -> None:
        """Remove rows, as far as they are loose."""
        for first in firsts:
            if self._waiting.pop(first, None) is None:
                self._aside.pop(first, None)

    def moved(self, tables: Iterable[Rows], node: Node) -> None:
        """Record that ``node`` stores the rows of ``tables`` now; they keep their places."""
        for rows in tables:
            for first in rows[:, 0].tolist():
                if first in self._waiting:
                    self._waiting[first] = node
                elif first in self._aside:
                    self._aside[first] = node

    def oldest(self) -> tuple[int, Node] | None:
        """Remove and return the oldest that was not set aside."""
        return self._waiting.popitem(last=False) if self._waiting else None

    def set_aside(self, first: int, node: Node) -> None:
        """Keep a row that `oldest` returned, and that a sequence uses, until it is `released`."""
        self._aside[first] = node

    def released(self, pages: PageArray) -> None:
        """Record that no sequence uses ``pages`` any more; other pages than of rows are ignored."""
        if self._aside:
            for page in pages.tolist():
                node = self._aside.pop(page, None)
                if node is not None:
                    self._waiting[page] = node

    def firsts(self) -> set[int]:
        """Return the first pages of all. Cost: all of them."""
        return {*self._waiting, *self._aside}

    def aside(self) -> set[int]:
        """Return the first pages of those set aside, for `check`."""
        return set(self._aside)
