"""`RequestRecord` and the events in the life of a request: frozen, each emitted once.

begun ──▶ admitted ──▶ loaded (with a store), computed, stored … ──▶ ended

A prompt is computed while it is loaded, so the events between come in any order. A request that is
aborted while it waits ends without being admitted.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvkeep.core.events import PrefixMiss
    from kvkeep.core.keys import Namespace
    from kvkeep.core.tokens import TokenArray
    from kvkeep.store import Miss

__all__ = [
    "LoadReport",
    "Notifier",
    "Outcome",
    "PromptComputed",
    "PromptStored",
    "RequestAdmitted",
    "RequestBegun",
    "RequestEnded",
    "RequestEvent",
    "RequestLoaded",
    "RequestObserver",
    "RequestOrigin",
    "RequestRecord",
]

Outcome = Literal["done", "aborted", "failed"]


@dataclass(frozen=True, slots=True)
class RequestOrigin:
    """The origin of a request: the id of its answer, the endpoint, and the HTTP headers."""

    id: str
    endpoint: str = ""
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    """HTTP headers; names are in lower case."""


@dataclass(frozen=True, slots=True, eq=False)
class RequestRecord:
    """A request as it was added to an engine; all its events refer to this one object."""

    origin: RequestOrigin
    prompt: TokenArray
    namespace: Namespace
    session: str | None = None
    store: bool = True
    """False: the request publishes nothing."""

    @property
    def id(self) -> str:
        """The id of its answer."""
        return self.origin.id


@dataclass(frozen=True, slots=True)
class LoadReport:
    """The result of loading one request's prompt from the store.

    Attributes:
        sources: ``(start, stop, tier)`` of tokens that came, in order; ``tier`` had them at the
            lookup, or was read since. KV that is not exact has its codec behind it: "s3, int8".
        missing: the other tokens, in order. ``sources`` and ``missing`` together cover the tokens
            behind those of the pool once, without the prompt's last one, which is computed in any
            case; either may lie before the other. Both are empty if that is less than a page; of a
            request that ended while it was loaded, they cover only the tokens that had come.
        seconds: from the lookup to the last block, or to the result that there is none.
        late: whether tokens were left out because loading took too long.
    """

    sources: tuple[tuple[int, int, str], ...] = ()
    missing: tuple[Miss, ...] = ()
    seconds: float = 0.0
    late: bool = False

    @property
    def tokens(self) -> int:
        """Tokens that came from the store."""
        return sum(stop - start for start, stop, _ in self.sources)


@dataclass(frozen=True, slots=True, eq=False)
class RequestBegun:
    """An engine queued the request."""

    request: RequestRecord


@dataclass(frozen=True, slots=True, eq=False)
class RequestAdmitted:
    """The request runs for the first time: ``cached_tokens`` of its prompt came from the pool.

    ``sequence`` is the id of its sequence in the cache, and ``miss`` says why the rest is computed.
    The lookup and the allocation of pages took ``match_s`` seconds.
    """

    request: RequestRecord
    sequence: int
    cached_tokens: int
    match_s: float = 0.0
    miss: PrefixMiss | None = None


@dataclass(frozen=True, slots=True, eq=False)
class RequestLoaded:
    """Loading from the store is over; once per admitted request of an engine with a store."""

    request: RequestRecord
    report: LoadReport


@dataclass(frozen=True, slots=True, eq=False)
class PromptComputed:
    """A step computed ``tokens`` of the prompt; ``seconds`` is their share of the step.

    Tokens that are computed again, after a preemption, are reported again.
    """

    request: RequestRecord
    tokens: int
    seconds: float


@dataclass(frozen=True, slots=True, eq=False)
class PromptStored:
    """``tokens`` of the request were handed to the store, which took the engine ``seconds``."""

    request: RequestRecord
    tokens: int
    seconds: float


@dataclass(frozen=True, slots=True, eq=False)
class RequestEnded:
    """The request ended: once per request, admitted or not.

    ``generated`` tokens were handed out; ``ttft_s`` and ``seconds`` run from `RequestBegun` to the
    first token (None without one) and to the end.
    """

    request: RequestRecord
    outcome: Outcome
    generated: int
    ttft_s: float | None
    seconds: float


RequestEvent = (
    RequestBegun | RequestAdmitted | RequestLoaded | PromptComputed | PromptStored | RequestEnded
)
RequestObserver = Callable[[RequestEvent], None]
"""Called in the engine's thread, which waits for the call: an observer must be quick. It ignores
events of requests whose earlier events it has not seen."""


_log = logging.getLogger(__name__)


class Notifier:
    """Calls each of ``observers`` with each event, in order.

    An observer that raises is logged once per kind of event and error, counted in ``errors``, and
    called for the next event. Emitters check ``observers`` before they gather what an event needs.

    Thread safety: none; one thread emits.
    """

    def __init__(self, *observers: RequestObserver) -> None:
        self.observers = observers
        self.errors = 0
        self._logged: set[tuple[RequestObserver, type[RequestEvent], type[Exception]]] = set()

    def emit(self, event: RequestEvent) -> None:
        """Call all observers with ``event``."""
        for observer in self.observers:
            try:
                observer(event)
            except Exception as error:  # noqa: BLE001 - an observer's fault must not hurt requests
                self._failed(observer, event, error)

    def _failed(self, observer: RequestObserver, event: RequestEvent, error: Exception) -> None:
        self.errors += 1
        kind = (observer, type(event), type(error))
        if kind not in self._logged:
            self._logged.add(kind)
            name = type(getattr(observer, "__self__", observer)).__name__
            _log.error("observer %s failed on %s", name, type(event).__name__, exc_info=error)
