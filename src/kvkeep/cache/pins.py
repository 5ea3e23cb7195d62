"""Pins: prefixes that are asked to stay, so far as memory allows."""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING, Any

from kvkeep.errors import InvalidValue

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvkeep.prefix import PrefixIndex

__all__ = ["Pin", "PinBoard"]


class Pin:
    """A prefix that is kept; made by `PagedCache.pin`, ended by `PagedCache.unpin`.

    A soft pin gives way, tail first, when nothing else is left to evict: ``num_tokens`` then falls.
    A hard pin does not, and counts against the cache's budget for them.
    """

    __slots__ = ("_board", "_hold", "_pages", "active", "expires", "hard")

    def __init__(
        self, board: PinBoard, hold: Any, pages: int, *, hard: bool, expires: float | None
    ) -> None:
        self._board = board
        self._hold = hold
        self._pages = pages
        self.hard = hard
        self.expires = expires
        self.active = True

    @property
    def num_tokens(self) -> int:
        """Tokens of the prefix that are still kept; 0 once the pin has ended or given way."""
        return self._board.pages(self) * self._board.page_size

    def __repr__(self) -> str:
        kind = "hard" if self.hard else "soft"
        return f"<{kind} pin, {self.num_tokens} tokens{'' if self.active else ', ended'}>"


class PinBoard:
    """All pins of a cache. Thread safety: none; under the cache's lock."""

    def __init__(
        self, index: PrefixIndex[Any], hard_budget: int, clock: Callable[[], float]
    ) -> None:
        self._index = index
        self.page_size = index.page_size
        self.hard_budget = hard_budget
        self._clock = clock
        self.pins: dict[Pin, None] = {}
        self._expiry: list[tuple[float, int, Pin]] = []
        self._serial = 0
        self.expired = 0
        self._broken = 0  # what the index had counted when gone pins were last looked for

    def add(self, hold: Any, ttl: float | None, *, hard: bool) -> Pin:
        """Pin the path of ``hold``, which passes to a hard pin and is released by a soft one."""
        if hard:
            needed = self._index.covered([*self.hard_holds(), hold])
            if needed > self.hard_budget:
                raise InvalidValue(
                    f"hard pins would hold {needed} pages, their budget is {self.hard_budget}; "
                    "unpin something, pin softly, or give the cache a larger hard_pin_pages"
                )
        else:
            self._index.pin(hold)
        expires = None if ttl is None else self._clock() + ttl
        pin = Pin(self, hold, self._index.length(hold), hard=hard, expires=expires)
        self.pins[pin] = None
        if expires is not None:
            self._serial += 1
            heapq.heappush(self._expiry, (expires, self._serial, pin))
        return pin

    def end(self, pin: Pin) -> None:
        """End a pin that has not ended."""
        del self.pins[pin]
        pin.active = False
        if len(self._expiry) > 2 * len(self.pins) + 64:  # mostly pins that ended before their time
            self._expiry = [item for item in self._expiry if item[2].active]
            heapq.heapify(self._expiry)
        if pin.hard:
            self._index.release(pin._hold)
        else:
            self._index.unpin(pin._hold)

    def expire(self) -> None:
        """End the pins whose time is over, and those whose prefix had to give way entirely."""
        if self._broken != self._index.pins_broken:
            self._broken = self._index.pins_broken
            for pin in [pin for pin in self.pins if not self._index.length(pin._hold)]:
                self.end(pin)
        while self._expiry and (not self._expiry[0][2].active or self._over(self._expiry[0][0])):
            pin = heapq.heappop(self._expiry)[2]
            if pin.active:
                self.end(pin)
                self.expired += 1

    def _over(self, when: float) -> bool:
        return self._clock() >= when

    def pages(self, pin: Pin) -> int:
        """Pages that a pin still keeps."""
        if not pin.active or (pin.expires is not None and self._over(pin.expires)):
            return 0
        return min(pin._pages, self._index.length(pin._hold))

    def hard_holds(self) -> list[Any]:
        """The holds of hard pins."""
        return [pin._hold for pin in self.pins if pin.hard]

    def soft_at(self, number: int) -> list[Pin]:
        """The soft pins that end with the run of this id."""
        index = self._index
        return [pin for pin in self.pins if not pin.hard and index.pinned(pin._hold) == number]

    def soft_below(self, place: Any) -> list[Pin]:
        """The soft pins whose last run goes when ``place`` and all behind it is evicted."""
        index = self._index
        return [pin for pin in self.pins if not pin.hard and index.would_go(pin._hold, place)]

    def covered(self, *, hard_only: bool = False) -> int:
        """Pages that pins keep, each counted once."""
        holds = [pin._hold for pin in self.pins if self.pages(pin) and (pin.hard or not hard_only)]
        return self._index.covered(holds)
