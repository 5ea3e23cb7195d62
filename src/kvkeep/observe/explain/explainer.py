"""`Explainer`: is told what happens, and says why a prompt was computed."""

from __future__ import annotations

import time
from collections import OrderedDict
from dataclasses import dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING

from kvkeep.core.errors import InvalidValue, whole
from kvkeep.core.events import Closed, Evicted, Opened, Stored
from kvkeep.core.extras import as_extras
from kvkeep.core.tokens import as_row, as_tokens
from kvkeep.observe.explain.answer import ExplainSummary, Explanation, Totals
from kvkeep.observe.explain.fates import Asker
from kvkeep.observe.explain.inbox import Inbox
from kvkeep.observe.explain.mirror import Mirror
from kvkeep.observe.explain.record import RequestRecord
from kvkeep.observe.explain.summary import add_up, summarise

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvkeep.core.events import Event
    from kvkeep.core.extras import ExtraLike, Extras
    from kvkeep.core.keys import Namespace
    from kvkeep.core.tokens import TokenArray, TokensLike
    from kvkeep.observe.explain.answer import Missing

__all__ = ["Explainer"]

_MOST_TOLD = 100_000
_MOST_RUNNING = 10_000
_MOST_NAMESPACES = 10_000


@dataclass(frozen=True, slots=True, eq=False)
class _Happened:
    at: float
    event: Event


@dataclass(frozen=True, slots=True, eq=False)
class _Asked:
    at: float
    id: str
    tokens: TokenArray
    namespace: Namespace
    cached: int
    sequence: int | None
    store: bool
    kind: str
    session: str | None
    extras: Extras


@dataclass(frozen=True, slots=True, eq=False)
class _Loaded:
    id: str
    sources: tuple[tuple[int, int, str], ...]
    missing: tuple[Missing, ...]


@dataclass(frozen=True, slots=True, eq=False)
class _Ended:
    id: str
    outcome: str
    generated: int
    ttft_s: float | None
    seconds: float


_Told = _Happened | _Asked | _Loaded | _Ended


class Explainer:
    """Explains, token by token, why prompts were computed or not.

    It follows one `kvkeep.core.cache.PagedCache` of pages of ``page_size`` tokens by its events
    (`see`), and is told of each request: `asked` right after it was opened, `loaded` once a store
    gave what it had, `ended` at its end. These four only put something into a queue; a thread of
    its own works that off, and so does every question, before it is answered.

    It remembers the last ``requests``, the tokens of the prompts asked last up to
    ``prompt_tokens``, and of ``units`` full pages that are not in the cache what became of them.
    ``policy`` is the name of the cache's eviction policy, ``reuse`` what it was made with, and
    ``clock`` gives unix seconds.

    Thread safety: all of it. Cost: of telling, 1 µs an event and 12 µs a request of 8,192 tokens.
    Working one off takes about 0.5 ms if it was cached and 1.3 ms if it was not (pages of 16
    tokens), a quarter of a millisecond of it hashing. Memory: 200 bytes a unit of long prompts and
    700 of short ones, which share less, 4 … 11 a token of the prompts, 2 KiB a request, and 1 KiB
    each of the last 10,000 namespaces: with the defaults 160 MB at most.
    """

    def __init__(
        self,
        page_size: int,
        policy: str = "lru",
        *,
        requests: int = 1000,
        prompt_tokens: int = 4_000_000,
        units: int = 131_072,
        reuse: bool = True,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.page_size = whole("page_size", page_size, 1)
        self._most_requests = whole("requests", requests, 1)
        whole("prompt_tokens", prompt_tokens, 1)
        whole("units", units, 1)
        self._clock = clock
        self._reuse = reuse
        self._mirror = Mirror(self.page_size, policy, units, prompt_tokens)
        self._records: OrderedDict[str, RequestRecord] = OrderedDict()
        self._running: OrderedDict[str, RequestRecord] = OrderedDict()
        self._totals: OrderedDict[Namespace, Totals] = OrderedDict()
        self._computed: dict[str, int] = {}
        self._inbox: Inbox[_Told] = Inbox(self._understand, "kvkeep-explain", _MOST_TOLD)

    # --- being told --------------------------------------------------------------------------

    def see(self, event: Event) -> None:
        """The cache's hook: `PagedCache.subscribe` it."""
        if isinstance(event, (Stored, Evicted, Opened, Closed)):
            self._inbox.put(_Happened(self._clock(), event))

    def asked(
        self,
        id: str,
        tokens: TokenArray,
        namespace: Namespace,
        *,
        cached: int,
        sequence: int | None = None,
        store: bool = True,
        kind: str = "",
        session: str | None = None,
        extra: ExtraLike | None = None,
    ) -> None:
        """Request ``id`` was just opened: ``cached`` leading tokens came from the pool.

        ``sequence`` is its sequence's id in the cache: with it, evictions are attributed for
        certain. With ``store=False`` nothing of it is kept. The tokens are copied. ``extra`` is
        what was given to `PagedCache.open`.
        Raises `InvalidValue` for an empty prompt, or more cached tokens than it has.
        """
        row = as_row(tokens)
        self._check(len(row), cached)
        extras = as_extras(extra, len(row))
        copy = row.copy()
        self._inbox.put(
            _Asked(
                self._clock(), id, copy, namespace, cached, sequence, store, kind, session, extras
            )
        )

    @staticmethod
    def _check(tokens: int, cached: int) -> None:
        if not tokens:
            raise InvalidValue("a prompt has at least one token, got none")
        if not 0 <= cached <= tokens:
            raise InvalidValue(f"cached is {cached!r}; 0 … {tokens} tokens of the prompt can be")

    def loaded(
        self,
        id: str,
        sources: Sequence[tuple[int, int, str]],
        missing: Sequence[Missing],
    ) -> None:
        """What came from a store: (start, stop, tier); and why the rest did not.

        The last word counts, if there are several. Of an unknown request nothing is kept.
        """
        self._inbox.put(_Loaded(id, tuple(sources), tuple(missing)))

    def ended(
        self,
        id: str,
        *,
        outcome: str,
        generated: int,
        ttft_s: float | None,
        seconds: float,
    ) -> None:
        """Request ``id`` came to its end: "done", or another ``outcome``."""
        self._inbox.put(_Ended(id, outcome, generated, ttft_s, seconds))

    @property
    def lost(self) -> int:
        """What was told and dropped, because more came than could be worked off."""
        return self._inbox.lost

    @property
    def failed(self) -> int:
        """What was told and could not be understood: faults of this room, which it survives."""
        return self._inbox.failed

    @property
    def forgotten(self) -> int:
        """Units that were forgotten, because there were too many."""
        return self._mirror.ledger.forgotten

    # --- working it off ----------------------------------------------------------------------

    def _understand(self, told: _Told) -> None:
        match told:
            case _Happened(at, event):
                self._mirror.see(event, at)
            case _Asked():
                self._was_asked(told)
            case _Loaded():
                self._was_loaded(told)
            case _Ended():
                self._has_ended(told)

    def _was_asked(self, told: _Asked) -> None:
        asker = Asker(told.id, told.store, self._reuse)
        prompt = self._mirror.prompt(told.tokens, told.namespace, asker, told.extras)
        judged = self._mirror.asked(
            prompt, cached=self._given(told.tokens, told.cached), sequence=told.sequence, at=told.at
        )
        tokens = len(told.tokens)
        record = RequestRecord(
            asker, told.at, told.namespace, told.kind, told.session, tokens, judged
        )
        self._records.pop(told.id, None)
        self._records[told.id] = record
        if len(self._records) > self._most_requests:
            self._records.popitem(last=False)
        self._running[told.id] = record
        if len(self._running) > _MOST_RUNNING:  # nobody told of its end
            oldest = self._running.popitem(last=False)[1]
            oldest.asker.running = False
            self._count(oldest)

    @staticmethod
    def _given(tokens: TokenArray, cached: int) -> int:
        """The last token is always computed."""
        return min(cached, len(tokens) - 1)

    def _was_loaded(self, told: _Loaded) -> None:
        record = self._running.get(told.id) or self._records.get(told.id)
        if record is not None:
            record.settle(told.sources, told.missing)

    def _has_ended(self, told: _Ended) -> None:
        record = self._running.pop(told.id, None)
        if record is not None:
            record.asker.running = False
            record.asker.outcome = told.outcome
            record.generated = told.generated
            record.ttft_s, record.seconds = told.ttft_s, told.seconds
            self._count(record)

    def _count(self, record: RequestRecord) -> None:
        """Add what became of a request to its namespace's totals: at its end, when that is sure."""
        space = record.namespace
        before = self._totals.pop(space, None) or Totals(space, 0, 0, {}, {})
        add_up(record.spans, before.reused, before.computed)
        add_up(record.spans, {}, self._computed)
        self._totals[space] = Totals(
            space,
            before.requests + 1,
            before.prompt_tokens + record.tokens,
            before.reused,
            before.computed,
        )
        if len(self._totals) > _MOST_NAMESPACES:
            self._totals.popitem(last=False)

    # --- questions ---------------------------------------------------------------------------

    def explain(self, id: str) -> Explanation | None:
        """What became of request ``id``, also while it runs; None if it is not remembered."""
        with self._inbox.lock:
            self._inbox.work_off()
            record = self._records.get(id)
            return None if record is None else record.explanation()

    def prompt(
        self,
        tokens: TokensLike,
        namespace: Namespace,
        cached: int,
        *,
        sources: Sequence[tuple[int, int, str]] = (),
        missing: Sequence[Missing] = (),
        extra: ExtraLike | None = None,
    ) -> Explanation:
        """What would become of a prompt if it were asked now. Changes nothing.

        ``cached`` leading tokens are in the pool, says `PagedCache.match`; ``sources`` and
        ``missing`` are what a store says, as in `loaded`, and ``extra`` what `PagedCache.open`
        would be given. The id is "", as no request has it.
        Raises `InvalidValue` for what is no prompt.
        """
        row = as_tokens(tokens)
        self._check(len(row), cached)
        extras = as_extras(extra, len(row))
        with self._inbox.lock:
            self._inbox.work_off()
            at = self._clock()
            asker = Asker("", store=False, reuse=self._reuse)
            prompt = self._mirror.prompt(row, namespace, asker, extras)
            judged = self._mirror.judged(prompt, cached=self._given(row, cached), at=at)
            record = RequestRecord(asker, at, namespace, "", None, len(row), judged)
            record.settle(sources, missing)
            return record.explanation()

    def recent(self, last: int = 50) -> list[Explanation]:
        """The last requests, newest first."""
        last = whole("last", last, 0)
        with self._inbox.lock:
            self._inbox.work_off()
            newest = islice(reversed(self._records.values()), last)
            return [record.explanation() for record in newest]

    def summary(self, last: int = 1000) -> ExplainSummary:
        """What the last requests reused and computed, and for which causes, the dearest first."""
        last = whole("last", last, 0)
        with self._inbox.lock:
            self._inbox.work_off()
            return summarise(islice(reversed(self._records.values()), last))

    def namespaces(self) -> list[Totals]:
        """What all requests of each namespace reused and computed, the largest first.

        Since the beginning, of the 10,000 namespaces that were asked last. A request counts once
        it has ended.
        """
        with self._inbox.lock:
            self._inbox.work_off()
            found = [
                replace(one, reused=dict(one.reused), computed=dict(one.computed))
                for one in self._totals.values()
            ]
        return sorted(found, key=lambda one: -one.prompt_tokens)

    def computed(self) -> dict[str, int]:
        """Reason → tokens that were computed for it, of all requests that have ended.

        Since the beginning; these numbers never fall, as counters must not.
        """
        with self._inbox.lock:
            self._inbox.work_off()
            return dict(self._computed)

    def close(self) -> None:
        """End the thread. What was told before can still be asked for."""
        self._inbox.close()

    def __repr__(self) -> str:
        return (
            f"<Explainer of {len(self._records)} requests, {len(self._mirror.ledger):,} units, "
            f"{len(self._inbox)} to be worked off>"
        )
