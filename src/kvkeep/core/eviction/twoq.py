"""2Q: what was asked for once goes before what was asked for again."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvkeep.core.errors import InvalidValue
from kvkeep.core.eviction.history import History
from kvkeep.core.eviction.queues import OncePolicy

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["TwoQ"]


class TwoQ(OncePolicy):
    """Two queues by last use: entries on probation, which nobody asked for again, and the others.

    Probation may have ``probation`` of the memory; what is beyond goes first, then the least
    recently used of the others. It remembers ``remembered`` times as many blocks as there is room
    for, so that what comes back after it went is not on probation again. (Johnson, Shasha: 2Q,
    1994; theirs has a first-in-first-out probation, and remembers half as much as there is room.)
    """

    name = "2q"
    remembers = True
    advised = True

    def __init__(self, probation: float = 0.1, remembered: float = 4.0) -> None:
        super().__init__()
        if not 0 <= probation <= 1:
            raise InvalidValue(f"the share on probation lies in 0 … 1, got {probation}")
        if not remembered >= 0:
            raise InvalidValue(f"what is remembered is a number of memories, got {remembered}")
        self.probation: float | None = probation
        """Share of the memory; None: no order but that of last use."""
        self.remembered = remembered
        self._size = 0
        self._history = History(1)

    def fit(self, size: int, block: int) -> None:
        """It serves a memory of ``size``, in blocks of ``block``."""
        self._size = size
        self._history = History(int(self.remembered * size / block))

    def asked(self, keys: Sequence[bytes]) -> int:
        """A prompt came; how many of its leading blocks were asked for lately."""
        return self._history.asked(keys)

    def beyond(self) -> int:
        """By how much probation exceeds its share; without one, whether the oldest is there."""
        if self.probation is not None:
            return self._once_size - int(self.probation * self._size)
        once, again = self._once.oldest, self._again.oldest
        older = once is not None and (again is None or once <= again)
        return self._once_size if older else 0
