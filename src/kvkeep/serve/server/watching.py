"""`Watching`: sees what the engine does for a server's requests, and tells those who explain it."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvkeep.observe.explain import Explainer, Missing
from kvkeep.serve.server.figures import Figures
from kvkeep.serve.server.holdings import Holdings

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from kvkeep.core.cache import PagedCache
    from kvkeep.core.cache import Sequence as OpenSequence
    from kvkeep.observe.telemetry import RequestWatch
    from kvkeep.serve.engine import Delta, Request
    from kvkeep.serve.engine.observe import LoadReport
    from kvkeep.serve.server.figures import ReuseTotals
    from kvkeep.serve.server.worker import Call
    from kvkeep.store import Miss

__all__ = ["Watching", "missing"]

log = logging.getLogger("kvkeep.server")

# What a store says of blocks, in the words of explanations.
_REMOVED = {"cleared": "cleared", "removed": "asked"}
_REFUSED = frozenset({"admission", "answer"})
_DROPPED = {"queue full": "queue_full", "no time": "queue_full"}


@dataclass(slots=True)
class _Watched:
    """A request of the engine that has not ended."""

    name: str
    kind: str
    begun: float
    shares: tuple[ReuseTotals, ...] = ()
    """Where it is counted; nowhere before it is admitted."""
    generated: int = 0
    ttft_s: float | None = None


class Watching:
    """An `Observer` of the engine, and a hook of its cache, for one server.

    ``figures`` and ``holdings`` are always kept; ``explainer`` is None before `start`, and where
    nobody is to ``explain``.
    ``watches`` are told of each request by its name; one that raises is logged once and hurts
    nobody. ``model`` is what requests call it.

    Thread safety: the methods of the observer, `begin` and `came` are for the engine's thread; the
    three that are kept have their own.
    """

    def __init__(
        self,
        cache: PagedCache,
        *,
        explain: bool,
        model: str,
        watches: Sequence[RequestWatch] = (),
    ) -> None:
        self.figures = Figures()
        self.holdings = Holdings(cache)
        self.explainer: Explainer | None = None
        self._cache = cache
        self._explain = explain
        self._model = model
        self._watches = watches
        self._faulty: set[RequestWatch] = set()
        self._watched: dict[int, _Watched] = {}
        self._ends: list[Callable[[], None]] = [cache.subscribe(self.holdings.see)]

    def start(self) -> None:
        """Begin to explain, in a thread of its own."""
        if self._explain:
            cache = self._cache
            self.explainer = explainer = Explainer(cache.page_size, cache.policy, reuse=cache.reuse)
            self._ends += [cache.subscribe(explainer.see), explainer.close]

    def computed_tokens(self) -> dict[str, int]:
        """Reason → tokens that were computed for it since the start; empty with no explainer."""
        return {} if self.explainer is None else self.explainer.computed()

    def close(self) -> None:
        """See no more events. What was seen can still be asked for."""
        for end in self._ends:
            end()
        self._ends.clear()

    # --- in the engine's thread --------------------------------------------------------------

    def begin(self, request: Request, name: str, call: Call) -> None:
        """The engine has taken ``request``, which is called ``name`` and is part of ``call``."""
        self._watched[request.id] = _Watched(name, call.endpoint, time.perf_counter())
        self._tell(
            lambda watch: watch.begun(
                name, kind=call.endpoint, model=self._model, headers=call.headers
            )
        )

    def admitted(self, request: Request, sequence: OpenSequence, match_s: float) -> None:
        """It has its pages; as many of its tokens as the sequence says were in the pool."""
        known = self._watched.get(request.id)
        if known is None:
            return
        prompt, cached = request.prompt, sequence.num_cached
        known.shares = self.figures.opened(
            len(prompt), cached, request.namespace.tenant, request.session, request.turn
        )
        if self.explainer is not None:
            self.explainer.asked(
                known.name,
                prompt,
                request.namespace,
                cached=cached,
                sequence=sequence.id,
                store=request.store,
                kind=known.kind,
                session=request.session,
            )
        self._tell(
            lambda watch: watch.admitted(
                known.name,
                namespace=request.namespace.tenant,
                prompt_tokens=len(prompt),
                cached_tokens=cached,
                match_s=match_s,
            )
        )

    def loaded(self, request: Request, report: LoadReport) -> None:
        """Nothing more comes from the store for it."""
        known = self._watched.get(request.id)
        if known is None:
            return
        self.figures.reused(known.shares, sum(stop - start for start, stop, _ in report.sources))
        if self.explainer is not None:
            gone = missing(report.missing, waited_s=report.seconds)
            self.explainer.loaded(known.name, report.sources, gone)
        self._tell(
            lambda watch: watch.loaded(
                known.name, sources=report.sources, seconds=report.seconds, late=report.late
            )
        )

    def computed(self, request: Request, tokens: int, seconds: float) -> None:
        """A step computed some of its prompt."""
        known = self._watched.get(request.id)
        if known is not None:
            self._tell(lambda watch: watch.computed(known.name, tokens=tokens, seconds=seconds))

    def stored(self, request: Request, tokens: int, seconds: float) -> None:
        """Some of it was handed to the store."""
        known = self._watched.get(request.id)
        if known is not None:
            self._tell(lambda watch: watch.stored(known.name, tokens=tokens, seconds=seconds))

    def came(self, delta: Delta) -> None:
        """What the engine's step has brought for a request: the last of it ends a whole one."""
        known = self._watched.get(delta.request.id)
        if known is None:
            return
        if delta.tokens:
            known.generated += len(delta.tokens)
            if known.ttft_s is None:
                known.ttft_s = time.perf_counter() - known.begun
        done = delta.completion
        if done is not None:
            del self._watched[delta.request.id]
            generated = sum(len(choice.tokens) for choice in done.choices)
            self._end(known, "done", generated, done.ttft_s, done.seconds)

    def ended(self, request: Request, outcome: str) -> None:
        """Nothing more comes of it; what is done comes whole with its last delta."""
        if outcome != "done" and (known := self._watched.pop(request.id, None)) is not None:
            seconds = time.perf_counter() - known.begun
            self._end(known, outcome, known.generated, known.ttft_s, seconds)

    def _end(
        self, known: _Watched, outcome: str, generated: int, ttft_s: float | None, seconds: float
    ) -> None:
        if self.explainer is not None and known.shares:  # nobody heard of who was never admitted
            self.explainer.ended(
                known.name, outcome=outcome, generated=generated, ttft_s=ttft_s, seconds=seconds
            )
        self._tell(
            lambda watch: watch.ended(
                known.name, outcome=outcome, generated=generated, ttft_s=ttft_s
            )
        )

    def _tell(self, tell: Callable[[RequestWatch], None]) -> None:
        for watch in self._watches:
            try:
                tell(watch)
            except Exception:
                if watch not in self._faulty:
                    self._faulty.add(watch)
                    log.exception("%s failed; it is told on", type(watch).__name__)


def missing(fates: Iterable[Miss], *, waited_s: float | None = None) -> list[Missing]:
    """What a store says of tokens that it did not give, as an explainer takes it.

    What the store never heard of is left out: that is for the explainer to say. ``waited_s`` is
    how long the request waited for it.
    """
    said = []
    for fate in fates:
        if fate.what == "never":
            continue
        reason, evidence = _said(fate, fate.detail.partition(": ")[0], waited_s)
        said.append(Missing(fate.start, fate.stop, reason, {"tier": fate.tier or None, **evidence}))
    return said


def _said(fate: Miss, word: str, waited_s: float | None) -> tuple[str, dict[str, Any]]:
    """The reason, and its evidence besides the tier; ``word`` is what the fate's detail is."""
    match fate.what:
        case "evicted":
            return "evicted", {**_gone(fate, "pressure"), "policy": word}
        case "removed":
            return "evicted", {**_gone(fate, _REMOVED.get(word, word)), "policy": None}
        case "dropped":
            return "not_admitted", {"why": _DROPPED.get(word, word.replace(" ", "_"))}
        case "refused":
            return "not_admitted", {"why": word if word in _REFUSED else "unknown"}
        case "damaged":
            return "damaged", {}
        case "late":
            return "tier_unavailable", {"why": "late", "waited_s": waited_s}
        case _:
            why = "breaker" if word == "breaker" else "error"
            return "tier_unavailable", {"why": why, "waited_s": waited_s}


def _gone(fate: Miss, cause: str) -> dict[str, Any]:
    ago = None if fate.at is None else max(0.0, time.time() - fate.at)
    return {"at": fate.at, "ago_s": ago, "cause": cause, "by": None, "needed_pages": None}
