"""`Mark`: a position to which a sequence can go back, and the state there."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvkeep.core.groups.units import TreeUnits
    from kvkeep.core.pages.table import PageArray

__all__ = ["Mark"]


class Mark:
    """The marked position of one sequence. Thread safety: none; under the cache's lock.

    Attributes:
        position: in tokens; None: there is no mark.
        state: pages with a copy of the state there; None without a mark or states.
    """

    __slots__ = ("_units", "position", "state")

    def __init__(self, units: TreeUnits) -> None:
        self._units = units
        self.position: int | None = None
        self.state: PageArray | None = None

    def set(self, position: int, pages: int, take: Callable[[int], PageArray]) -> None:
        """Mark ``position``, with a state of so many ``pages``; 0: no state.

        Raises what ``take`` raises; the old mark stays then.
        """
        if not pages:
            self.position = position
            return
        if self.state is None or not self._units.is_sole(self.state):
            state = take(pages)  # a fork copies from the old ones
            self.drop()
            self.state = state
        self.position = position

    def drop(self) -> None:
        """Forget the mark."""
        if self.state is not None:
            self._units.release(self.state)
        self.position = self.state = None
