"""`TreeListener`: hears of every change of a tree's runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvkeep.core.prefix.node import Node

__all__ = ["TreeListener"]


class TreeListener:
    """Base class of what keeps data beside the pages of nodes; every method does nothing.

    Called in the middle of an operation and under the cache's lock: it must not change the tree.
    """

    def stored(self, leaf: Node) -> None:
        """``leaf``, a new node, is in the tree."""

    def grown(self, node: Node, pages: int) -> None:
        """``node`` got ``pages`` more at its end."""

    def split(self, upper: Node, lower: Node) -> None:
        """``upper``, a new node, took the first pages of ``lower``."""

    def rejoined(self, upper: Node, lower: Node) -> None:
        """``lower`` took back the pages of ``upper``, which is gone."""

    def trimming(self, leaf: Node, keep: int) -> None:
        """``leaf`` is about to lose its pages behind the first ``keep``; at 0 it goes itself."""
