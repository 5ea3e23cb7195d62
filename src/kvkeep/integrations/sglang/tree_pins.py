"""`TreePins`: prefixes that requests ask SGLang's tree to keep."""

from __future__ import annotations

import heapq
import logging
from typing import TYPE_CHECKING, Final

from kvkeep.core.errors import InvalidValue, whole
from kvkeep.core.prefix.pinned import Pinned

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req

    from kvkeep.core.prefix.node import Node
    from kvkeep.integrations.sglang.symbols import SlotIndex

__all__ = ["TreePins"]

_LOG = logging.getLogger("kvkeep.sglang")
_KINDS: Final = ("soft", "hard")
_REQUESTS: Final = 1000


class _Pin(Pinned):
    __slots__ = ("hard", "hold")

    def __init__(self, *, hard: bool) -> None:
        super().__init__()
        self.hard = hard
        self.hold: Node | None = None


class TreePins:
    """Pins that requests set on their prompt, for a number of further requests.

    A request has ``{"custom_params": {"kvkeep": {"pin": "soft", "requests": 500}}}`` among its
    sampling parameters. A ``soft`` pin is evicted after everything else, a ``hard`` one is not
    evicted; hard pins cover half the memory at most. Both end after that many further requests
    have ended, 1,000 by default: ranks of a server agree on requests, and not on clocks.

    What cannot be pinned is logged and counted, and the request is answered.

    Thread safety: none. Cost: O(log pins) a pinned request.
    """

    def __init__(self, index: SlotIndex, capacity: int) -> None:
        self._index = index
        self._most = max(capacity, 1024)
        self._hard_pages = capacity // 2
        self._ended = 0
        self._expiry: list[tuple[int, int, _Pin]] = []
        self._serial = 0
        self.refused = 0
        """Pins that were asked for and not set."""

    def ended(self, req: Req, hold: Node) -> None:
        """Pin the path of ``hold`` if the request that ends asks for it; end pins that are over."""
        self._ended += 1
        while self._expiry and self._expiry[0][0] <= self._ended:
            self._end(heapq.heappop(self._expiry)[2])
        params = getattr(req.sampling_params, "custom_params", None)
        asked = params.get("kvkeep") if isinstance(params, dict) else None
        if asked is None:
            return
        try:
            hard, requests = self._asked(asked)
            self._set(hold, hard=hard, requests=requests)
        except InvalidValue as error:
            self.refused += 1
            _LOG.warning("request %s is not pinned: %s", req.rid, error)

    def forget_broken(self) -> None:
        """Forget pins whose whole path was evicted."""
        self._index.pins.broken.clear()

    def holds(self) -> list[Node]:
        """Return the holds of hard pins, for a recount."""
        return [pin.spot.node for *_, pin in self._expiry if pin.hard and pin.spot is not None]

    @staticmethod
    def _asked(asked: object) -> tuple[bool, int]:
        if not isinstance(asked, dict):
            raise InvalidValue(f'custom_params["kvkeep"] is {asked!r}; an object is needed')
        if unknown := set(asked) - {"pin", "requests"}:
            raise InvalidValue(f"unknown options {sorted(unknown)}; there are pin and requests")
        kind = asked.get("pin")
        if kind not in _KINDS:
            raise InvalidValue(f'"pin" is {kind!r}; "soft" or "hard" is needed')
        return kind == "hard", whole("requests", asked.get("requests", _REQUESTS), 1)

    def _set(self, hold: Node, *, hard: bool, requests: int) -> None:
        if not hold.end:
            raise InvalidValue("nothing of it is stored, as it is shorter than a page")
        if len(self._expiry) >= self._most:
            raise InvalidValue(f"there are {len(self._expiry)} pins; {self._most} are allowed")
        if hard and self._index.pins.num_hard + hold.end > self._hard_pages:
            raise InvalidValue(
                f"hard pins cover {self._index.pins.num_hard} pages, and {hold.end} more are above "
                f"the limit of {self._hard_pages}"
            )
        pin = _Pin(hard=hard)
        self._index.pin(self._index.again(hold) if hard else hold, pin, hard=hard)
        self._serial += 1
        heapq.heappush(self._expiry, (self._ended + requests, self._serial, pin))

    def _end(self, pin: _Pin) -> None:
        self._index.unpin(pin)
