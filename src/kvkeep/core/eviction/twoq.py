"""2Q: entries requested once are evicted before entries requested again."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvkeep.core.errors import InvalidValue
from kvkeep.core.eviction.history import History
from kvkeep.core.eviction.queues import OncePolicy

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["TwoQ"]


class TwoQ(OncePolicy):
    """Two LRU queues: entries on probation, which were requested once, and all others.

    Probation has a share ``probation`` of the memory; what exceeds it is evicted first, then the
    least recently used of the others. The history covers ``remembered`` times as many blocks as the
    memory holds, so what is requested again after its eviction is not on probation. (Johnson,
    Shasha: 2Q, 1994. Theirs has a FIFO as probation, and a history of half the memory.)
    """

    name = "2q"
    remembers = True
    advised = True

    def __init__(self, probation: float = 0.1, remembered: float = 4.0) -> None:
        super().__init__()
        if not 0 <= probation <= 1:
            raise InvalidValue(f"probation is a share in 0 … 1, got {probation}")
        if not remembered >= 0:
            raise InvalidValue(f"remembered is a number of memories, 0 or more, got {remembered}")
        self.probation: float | None = probation
        """Share of the memory. None disables probation: then it is LRU."""
        self.remembered = remembered
        self._size = 0
        self._history = History(1)

    def fit(self, size: int, block: int) -> None:
        self._size = size
        self._history = History(int(self.remembered * size / block))

    def requested(self, keys: Sequence[bytes]) -> int:
        return self._history.requested(keys)

    def excess(self) -> int:
        """Return the excess of probation; with LRU, all of it if it has the oldest entry."""
        if self.probation is not None:
            return self._once_size - int(self.probation * self._size)
        once, again = self._once.oldest, self._again.oldest
        older = once is not None and (again is None or once <= again)
        return self._once_size if older else 0
