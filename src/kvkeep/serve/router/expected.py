"""`ExpectedReturns`: sums over the conversations that wait, for people and for metrics."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from kvkeep.serve.router.conversations import ConversationTable

__all__ = ["ExpectedReturns", "WaitingSums"]

_SOON_S: Final = 60.0
_FEW: Final = 1000
_PAUSE_S: Final = 1.0


@dataclass(slots=True)
class WaitingSums:
    """Conversations that wait: how many, how many of them are back within a minute, their prompts.

    ``expected`` is a sum of chances, ``tokens`` one of lengths.
    """

    waiting: int = 0
    expected: float = 0.0
    tokens: int = 0

    def add(self, chance: float, tokens: int) -> None:
        """Count one more."""
        self.waiting += 1
        self.expected += chance
        self.tokens += tokens

    def as_dict(self) -> dict[str, Any]:
        """Return the sums as JSON."""
        return {
            "waiting": self.waiting,
            "expected": round(self.expected, 2),
            "tokens": self.tokens,
        }


@dataclass(slots=True)
class _Sums:
    total: WaitingSums = field(default_factory=WaitingSums)
    stops: dict[str, WaitingSums] = field(default_factory=dict)
    homes: dict[str, WaitingSums] = field(default_factory=dict)


class ExpectedReturns:
    """Adds up conversations that wait, by the end of the last answer and by instance.

    Names no client. Cost: 2 µs a conversation; of more than 1,000 at most once a second, so a
    client that asks all the time does not slow down others. Thread safety: none; for the event
    loop.
    """

    def __init__(
        self, table: ConversationTable, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.table = table
        self._clock = clock
        self._at = 0.0
        self._sums: _Sums | None = None

    def _current(self) -> _Sums:
        now = self._clock()
        if self._sums is not None and now < self._at + _PAUSE_S and len(self.table) > _FEW:
            return self._sums
        sums = _Sums()
        for own, chance in self.table.expected(_SOON_S):
            for one in (
                sums.total,
                sums.stops.setdefault(own.stop, WaitingSums()),
                sums.homes.setdefault(own.home, WaitingSums()),
            ):
                one.add(chance, own.tokens)
        self._at, self._sums = now, sums
        return sums

    @property
    def total(self) -> WaitingSums:
        """The sums of all conversations."""
        return self._current().total

    def figures(self, instances: Iterable[str]) -> dict[str, Any]:
        """Return all that is known as JSON, by the way in which answers ended, and by instance."""
        table, sums, nothing = self.table, self._current(), WaitingSums()
        return {
            "followed": len(table),
            "waiting": sums.total.waiting,
            "forgotten": table.forgotten,
            "returned": dict(table.returned),
            "stops": {
                stop: {
                    "ended": counts.ended,
                    "returned": counts.returned,
                    **sums.stops.get(stop, nothing).as_dict(),
                }
                for stop, counts in table.stops.items()
            },
            "instances": {name: sums.homes.get(name, nothing).as_dict() for name in instances},
        }
