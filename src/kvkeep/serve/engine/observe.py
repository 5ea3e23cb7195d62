"""Who watches an engine at work: when requests are admitted, loaded, computed, stored, and end.

admitted ──▶ loaded (with a store) ──▶ computed, stored … ──▶ ended
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

if TYPE_CHECKING:
    from kvkeep.core.cache import Sequence
    from kvkeep.serve.engine.request import Request
    from kvkeep.serve.engine.stats import EngineStats
    from kvkeep.store import Miss

__all__ = ["EngineWatch", "LoadReport", "Observer", "Outcome"]

_log = logging.getLogger(__name__)

Outcome = Literal["done", "aborted", "failed"]


@dataclass(frozen=True, slots=True)
class LoadReport:
    """What came of one request's prompt from the store, and why the rest did not.

    Attributes:
        asked: tokens that were wanted: those behind what the pool had, without the prompt's last
            one, which is computed in any case. 0 where they are less than a page, which nobody asks
            for, and of a request that ended while it was loaded only what had come.
        sources: ``(start, stop, tier)`` of tokens that came, in order; ``tier`` is where they were
            found when they were sought, or read since.
        missing: what else was wanted, in order and without gaps: ``sources`` and ``missing``
            together are tokens ``pool`` … ``pool + asked - 1``.
        seconds: from when it was sought to the last piece, or to the answer that there is none.
        late: whether some of it was left because it took too long.
    """

    asked: int = 0
    sources: tuple[tuple[int, int, str], ...] = ()
    missing: tuple[Miss, ...] = ()
    seconds: float = 0.0
    late: bool = False


class Observer(Protocol):
    """Is told what happens to the requests of an `Engine`, in the engine's thread.

    It has to be quick: everybody waits for it. What it raises is logged once a kind, counted in
    ``EngineStats.observer_errors``, and hurts no request.
    """

    def admitted(self, request: Request, sequence: Sequence, match_s: float) -> None:
        """``request`` runs for the first time; ``sequence.num_cached`` came from the pool.

        ``match_s`` seconds is what finding that and taking pages took.
        """

    def loaded(self, request: Request, report: LoadReport) -> None:
        """Nothing more comes from the store for a request that was admitted, or nothing ever did.

        Once a request; not called by an engine without a store.
        """

    def computed(self, request: Request, tokens: int, seconds: float) -> None:
        """A step computed so many tokens of the request's prompt.

        ``seconds`` is its share of the step, by tokens. Who is computed again, after its pages were
        taken away, is told of again.
        """

    def stored(self, request: Request, tokens: int, seconds: float) -> None:
        """So many tokens of it were handed to the store, which took the engine so long."""

    def ended(self, request: Request, outcome: Outcome) -> None:
        """Nothing more comes of a request: once for each that was added, admitted or not."""


class EngineWatch:
    """The observer of an engine, if it has one, for all parts of it. Thread safety: none.

    Who tells it something asks whether ``observer`` is None before it gathers what there is.
    """

    def __init__(self, did: EngineStats, observer: Observer | None = None) -> None:
        self.observer = observer
        self._did = did
        self._logged: set[tuple[str, type[Exception]]] = set()

    def admitted(self, request: Request, sequence: Sequence, match_s: float) -> None:
        """See `Observer`; so are those that follow."""
        self._tell("admitted", request, sequence, match_s)

    def loaded(self, request: Request, report: LoadReport) -> None:
        """A request has what the store gives."""
        self._tell("loaded", request, report)

    def computed(self, request: Request, tokens: int, seconds: float) -> None:
        """Tokens of a prompt were computed."""
        self._tell("computed", request, tokens, seconds)

    def stored(self, request: Request, tokens: int, seconds: float) -> None:
        """Tokens were handed to the store."""
        self._tell("stored", request, tokens, seconds)

    def ended(self, request: Request, outcome: Outcome) -> None:
        """A request is over."""
        self._tell("ended", request, outcome)

    def _tell(self, what: str, *told: object) -> None:
        if self.observer is not None:
            try:
                getattr(self.observer, what)(*told)
            except Exception as error:  # noqa: BLE001 - who watches must not hurt who is watched
                self._failed(what, error)

    def _failed(self, what: str, error: Exception) -> None:
        self._did.observer_errors += 1
        kind = (what, type(error))
        if kind not in self._logged:
            self._logged.add(kind)
            _log.error("an observer failed when it was told what was %s", what, exc_info=error)
