"""`InstanceCosts`: reads what instances have learned of their costs, for the router."""

from __future__ import annotations

import asyncio
import json
import logging
from enum import Enum
from typing import TYPE_CHECKING, Final

from kvkeep.core.cost import CostModel
from kvkeep.core.errors import InvalidValue
from kvkeep.serve.router.upstreams import UpstreamFailed

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvkeep.serve.router.router import PrefixRouter
    from kvkeep.serve.router.upstreams import Upstreams

__all__ = ["CostOutcome", "InstanceCosts"]

log = logging.getLogger("kvkeep.router")

_HEADERS: Final = [(b"connection", b"close"), (b"accept", b"application/json")]
_MOST_BYTES: Final = 1 << 18
_EVERY: Final = 10  # probes from one reading to the next …
_LATER: Final = 60  # … and after one that failed
_SURE: Final = 0.5  # the relative error from which on a cost is not used
PATH = "/kv/cost"


class CostOutcome(Enum):
    """What became of an attempt to read the costs of an instance."""

    LEARNED = "learned"
    UNSURE = "unsure"
    """The instance has not yet computed enough prompts to know."""
    REFUSED = "refused"
    """No answer, an error, or an answer that has no costs."""


class InstanceCosts:
    """Reads ``GET /kv/cost`` of the instances that announce it, every tenth probe.

    What they tell replaces the router's own cost for prompts there. An answer is read up to 256 KiB
    and ``seconds``; what is none of a machine's costs is refused, and counted by ``on_outcome``.
    Answers need no key, so instances that ask for one tell nothing.

    Thread safety: none; for the event loop.
    """

    def __init__(
        self,
        upstreams: Upstreams,
        router: PrefixRouter,
        seconds: float,
        on_outcome: Callable[[str, CostOutcome], None],
    ) -> None:
        self._upstreams = upstreams
        self._router = router
        self._seconds = seconds
        self._on_outcome = on_outcome
        self._due: dict[str, int] = {}  # probes until the next reading

    async def probed(self, name: str, *, answered: bool) -> None:
        """Read the costs of an instance if that is due after this probe."""
        if not answered:
            self._due[name] = 0  # another machine may answer next
            return
        if not self._upstreams.has_cost(name):
            return
        self._due[name] = self._due.get(name, 0) - 1
        if self._due[name] > 0:
            return
        outcome = await self._read(name)
        self._due[name] = _LATER if outcome is CostOutcome.REFUSED else _EVERY
        self._on_outcome(name, outcome)

    def forget(self, name: str) -> None:
        """Forget an instance that is gone."""
        self._due.pop(name, None)

    async def _read(self, name: str) -> CostOutcome:
        try:
            found = json.loads(await self._body(name))
            model = CostModel.of(found)
            error = found.get("error")
            if not (isinstance(error, int | float) and 0 <= error <= _SURE):
                return CostOutcome.UNSURE
            self._router.learn(name, self._router.cost.learned(model))
        except (UpstreamFailed, TimeoutError, InvalidValue, ValueError, RecursionError) as why:
            log.info("no costs are learned from %s: %s", name, type(why).__name__)
            return CostOutcome.REFUSED
        return CostOutcome.LEARNED

    async def _body(self, name: str) -> bytes:
        """Return the answer; raise `InvalidValue` for an error or one that is too long."""
        text = bytearray()
        async with (
            asyncio.timeout(self._seconds),
            self._upstreams.request(name, "GET", PATH, _HEADERS, b"") as response,
        ):
            if response.status_code != 200:
                raise InvalidValue(f"{PATH} says {response.status_code}")
            async for piece in response.aiter_raw():
                text += piece
                if len(text) > _MOST_BYTES:
                    raise InvalidValue(f"{PATH} has more than {_MOST_BYTES:,} bytes")
        return bytes(text)
