"""Pins: prefixes that are evicted last, or not at all."""

from __future__ import annotations

import heapq
from collections import Counter
from typing import TYPE_CHECKING, Any, cast

from kvkeep.core.errors import InvalidValue
from kvkeep.core.prefix.pinned import Pinned, soft_pins_below

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvkeep.core.groups import SequenceGroups
    from kvkeep.core.groups.units import PinnedGroups
    from kvkeep.core.prefix import PrefixIndex

__all__ = ["Pin", "PinBoard"]


class Pin(Pinned):
    """A pinned prefix; made by `PagedCache.pin`, ended by `PagedCache.unpin`.

    When nothing else is left to evict, pages under a soft pin are evicted, tail first, and
    ``num_tokens`` falls. Pages under a hard pin are not, and count against the cache's budget.
    """

    __slots__ = ("_board", "active", "expires", "groups", "hard", "hold")

    def __init__(self, board: PinBoard, hold: Any, *, hard: bool, expires: float | None) -> None:
        super().__init__()
        self._board = board
        self.hold = hold if hard else None  # used by the index
        self.groups: SequenceGroups | None = None  # what resuming there needs, of a hard pin
        self.hard = hard
        self.expires = expires
        self.active = True

    @property
    def num_tokens(self) -> int:
        """Tokens of the prefix that are still cached; 0 once the pin has ended."""
        return self._board.pages(self) * self._board.page_size

    @property
    def num_resumable(self) -> int:
        """Of these, tokens that a request which goes on there need not compute.

        Fewer than ``num_tokens`` in a cache with groups of layers, where the last checkpoint lies
        earlier; a pin adds one at its end if that needs no state. Cost: as `PagedCache.match`.
        """
        return self._board.resumable(self) * self._board.page_size

    def __repr__(self) -> str:
        kind = "hard" if self.hard else "soft"
        return f"<{kind} pin, {self.num_tokens} tokens{'' if self.active else ', ended'}>"


class PinBoard:
    """All pins of a cache: ``most`` at a time, in memory of about 350 bytes each.

    Thread safety: none; under the cache's lock. Cost: O(log pins) for a pin with a time to live,
    besides the index's cost; nothing here walks over all pins.
    """

    def __init__(
        self, index: PrefixIndex, hard_budget: int, most: int, clock: Callable[[], float]
    ) -> None:
        self._index = index
        self.page_size = index.page_size
        self.hard_budget = hard_budget
        self.most = most
        self._clock = clock
        self.groups: PinnedGroups | None = None
        """What pins keep beside pages; None for plain models."""
        self._kept: Counter[int] = Counter()  # pages of rows and states → hard pins that keep them
        self.pins: dict[Pin, None] = {}
        self._expiry: list[tuple[float, int, Pin]] = []
        self._serial = 0
        self.expired = 0

    def add(self, hold: Any, ttl: float | None, *, hard: bool) -> Pin:
        """Pin the path of ``hold``: a hard pin takes over the hold, a soft one does not.

        `InvalidValue` beyond the number of pins or the budget for hard pins.
        """
        if len(self.pins) >= self.most:
            raise InvalidValue(
                f"{self.most} pins are set, as many as this cache keeps; unpin some, or give "
                "them a ttl after which they end by themselves"
            )
        groups, kept = None, []
        if self.groups is not None:
            if hard:
                groups = self.groups.keep(hold)
                kept = self.groups.pages(groups)
            else:
                self.groups.mark(hold)
        if hard:
            needed = self._index.pins.would_keep(hold) + len({*self._kept, *kept})
            if needed > self.hard_budget:
                if groups is not None:
                    groups.close()
                raise InvalidValue(
                    f"hard pins would hold {needed} pages, their budget is {self.hard_budget}; "
                    "unpin something, pin softly, or give the cache a larger hard_pin_pages"
                )
        expires = None if ttl is None else self._clock() + ttl
        pin = Pin(self, hold, hard=hard, expires=expires)
        self._index.pin(hold, pin, hard=hard)
        pin.groups = groups
        self._kept.update(kept)
        self.pins[pin] = None
        if expires is not None:
            self._serial += 1
            heapq.heappush(self._expiry, (expires, self._serial, pin))
        return pin

    def end(self, pin: Pin) -> None:
        """End a pin that has not ended."""
        del self.pins[pin]
        pin.active = False
        if len(self._expiry) > 2 * len(self.pins) + 64:  # most entries are of ended pins
            self._expiry = [item for item in self._expiry if item[2].active]
            heapq.heapify(self._expiry)
        node = None if pin.spot is None else pin.spot.node
        self._index.unpin(pin)
        pin.hold = None
        if self.groups is None:
            return
        if pin.groups is not None:
            self._kept -= Counter(self.groups.pages(pin.groups))
            pin.groups.close()
            pin.groups = None
        if node is not None:
            self.groups.unpinned(node)

    def expire(self) -> None:
        """End the pins whose time is over, and those whose prefix was evicted entirely."""
        broken = self._index.pins.broken
        while broken:
            self.end(cast("Pin", broken.pop()))
        while self._expiry and (not self._expiry[0][2].active or self._over(self._expiry[0][0])):
            pin = heapq.heappop(self._expiry)[2]
            if pin.active:
                self.end(pin)
                self.expired += 1

    def _over(self, when: float) -> bool:
        return self._clock() >= when

    def pages(self, pin: Pin) -> int:
        """Return how many pages a pin still covers."""
        if not pin.active or (pin.expires is not None and self._over(pin.expires)):
            return 0
        return pin.num_pages

    def resumable(self, pin: Pin) -> int:
        """Return how many pages a request that goes on at the end of a pin would reuse."""
        pages = self.pages(pin)
        if self.groups is None or not pages or pin.spot is None:
            return pages
        return self.groups.resumable(pin.spot.node)

    def hard_groups(self) -> list[SequenceGroups]:
        """Return what hard pins keep of groups of layers."""
        return [pin.groups for pin in self.pins if pin.groups is not None]

    def hard_holds(self) -> list[Any]:
        """Return the holds of hard pins."""
        return [pin.hold for pin in self.pins if pin.hard]

    def soft_below(self, place: Any) -> list[Pin]:
        """Return the soft pins that end when the run ``place`` and all behind it are evicted."""
        return cast("list[Pin]", soft_pins_below(place))

    @property
    def num_pages(self) -> int:
        """Pages under pins, each counted once; call `expire` first."""
        return self._index.pins.num_pages

    @property
    def num_hard_pages(self) -> int:
        """Pages that hard pins keep, each counted once; call `expire` first."""
        return self._index.pins.num_hard + len(self._kept)
