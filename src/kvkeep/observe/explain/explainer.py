"""`Explainer`: the last requests, each with what pool and store told of its prompt."""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict, deque
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING

from kvkeep.core.errors import InvalidValue, whole
from kvkeep.core.extras import as_extras, signed
from kvkeep.core.public import PublicPrefixes
from kvkeep.core.tokens import as_row, as_tokens
from kvkeep.observe.explain.history import History, Record
from kvkeep.observe.explain.reasons import STORE_KNOWS, PoolReasons, of_store
from kvkeep.observe.explain.sentences import sentence_of
from kvkeep.observe.explain.spans import REASONS, Explanation, Span, complete, painted
from kvkeep.observe.explain.summary import summarise
from kvkeep.observe.usage import LoadReport, RequestAdmitted, RequestEnded, RequestLoaded

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvkeep.core.events import PrefixMiss
    from kvkeep.core.extras import ExtraLike
    from kvkeep.core.groups import GroupLayout
    from kvkeep.core.keys import Namespace
    from kvkeep.core.tokens import TokenArray, TokensLike
    from kvkeep.observe.explain.summary import ExplainSummary
    from kvkeep.observe.usage import RequestEvent

__all__ = ["Explainer"]

_log = logging.getLogger("kvkeep.explain")
_PAUSE_S = 0.25
_MOST_QUEUED = 100_000
_MOST_RUNNING = 10_000
_MOST_SPANS = 50_000
_NOTHING = LoadReport()


class Explainer:
    """Explains, token by token, why tokens of prompts were computed or reused.

    Each request of a `kvkeep.core.cache.PagedCache` with pages of ``page_size`` tokens is reported:
    by the events of an engine (`see_request`), or by calls of `opened`, `loaded` and `ended`. The
    reasons are those that cache and store told at the miss. ``policy``, ``groups``, ``public`` and
    ``reuse`` are the cache's; ``clock`` gives unix seconds, ``cache_clock`` is the cache's clock.

    It remembers the last ``requests``, fewer if they have more than 50,000 spans together, and the
    tokens of the latest prompts up to ``prompt_tokens``, by which it finds what a prompt that was
    not cached has in common with others. Reports are queued, and handled by a separate thread four
    times a second and by each query.

    Thread safety: all methods. Cost: a report takes about a microsecond, and a request has three;
    handling one that missed takes 1 ms at 8,192 tokens, and seconds at a million. Memory: 4 bytes a
    token of the prompts, up to 20 KiB a request, and 300 bytes a span: 50 MB with the defaults.
    """

    def __init__(
        self,
        page_size: int,
        policy: str = "lru",
        *,
        groups: GroupLayout | None = None,
        public: PublicPrefixes | None = None,
        reuse: bool = True,
        requests: int = 1000,
        prompt_tokens: int = 4_000_000,
        clock: Callable[[], float] = time.time,
        cache_clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.page_size = whole("page_size", page_size, 1)
        self.requests = whole("requests", requests, 1)
        self.history = History(whole("prompt_tokens", prompt_tokens, 1))
        self.lost = 0
        """Reports that were dropped because the queue was full."""
        self.failed = 0
        """Reports whose handling failed, which is a bug of this package."""
        self._clock, self._cache_clock = clock, cache_clock
        self._public = PublicPrefixes() if public is None else public
        self._reasons = PoolReasons(self.history, self.page_size, policy, groups, reuse=reuse)
        self._records: OrderedDict[str, Record] = OrderedDict()
        self._spans = 0  # of `_records`
        self._running: OrderedDict[str, Record] = OrderedDict()
        self._by_sequence: dict[int, Record] = {}
        self._computed: dict[str, int] = {}
        self._reports: deque[Callable[[], None]] = deque()
        self._queue = threading.Lock()  # guards `_reports` and `lost`, for an append or a pop alone
        self._lock = threading.RLock()  # guards all else; taken before `_queue`
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvkeep-explain", daemon=True)
        self._thread.start()

    # --- reports -----------------------------------------------------------------------------

    def see_request(self, event: RequestEvent) -> None:
        """Follow an event of a request: an observer for `Engine.observe`."""
        request = event.request
        match event:
            case RequestAdmitted():
                record = Record(
                    request.id, self._clock(), request.namespace, len(request.prompt),
                    request.prompt, request.prompt, request.origin.endpoint, request.session,
                    request.store, event.sequence,
                )  # fmt: skip
                self._put(partial(self._open, record, event.miss))
            case RequestLoaded():
                self.loaded(request.id, event.report)
            case RequestEnded():
                self.ended(
                    request.id,
                    outcome=event.outcome,
                    generated=event.generated,
                    ttft_s=event.ttft_s,
                    seconds=event.seconds,
                )

    def opened(
        self,
        id: str,
        tokens: TokenArray,
        namespace: Namespace,
        miss: PrefixMiss | None,
        *,
        sequence: int | None = None,
        store: bool = True,
        kind: str = "",
        session: str | None = None,
        extra: ExtraLike | None = None,
    ) -> None:
        """Report request ``id``, just opened: ``miss`` is `Sequence.miss`.

        ``sequence`` is the id of its sequence in the cache, by which others name it. With
        ``store=False`` nothing of the request is published. The tokens are copied. ``extra`` is
        what `PagedCache.open` got. Raises `InvalidValue` for an empty prompt.
        """
        record = self._record(id, as_row(tokens).copy(), namespace, extra)
        record.kind, record.session = kind, session
        record.store, record.sequence = store, sequence
        self._put(partial(self._open, record, miss))

    def loaded(self, id: str, report: LoadReport) -> None:
        """Report the tokens of request ``id`` loaded from a store, and why others were not.

        A later call replaces an earlier one. A request that is unknown, or has ended, is ignored.
        """
        self._put(partial(self._load, id, report))

    def ended(
        self, id: str, *, outcome: str, generated: int, ttft_s: float | None, seconds: float
    ) -> None:
        """Report the end of request ``id``: "done", or another ``outcome``."""
        self._put(partial(self._end, id, outcome, generated, ttft_s, seconds))

    def _record(
        self, id: str, row: TokenArray, namespace: Namespace, extra: ExtraLike | None
    ) -> Record:
        if not len(row):
            raise InvalidValue("a prompt has at least one token, got none")
        compared = row if extra is None else signed(row, as_extras(extra, len(row)))
        return Record(id, self._clock(), namespace, len(row), compared, row)

    def _put(self, report: Callable[[], None]) -> None:
        with self._queue:
            if len(self._reports) >= _MOST_QUEUED:
                self._reports.popleft()
                self.lost += 1
            self._reports.append(report)

    # --- handling the queue ------------------------------------------------------------------

    def _run(self) -> None:
        while not self._over.wait(_PAUSE_S):
            self._work_off()

    def _work_off(self) -> None:
        """Handle all reports of before this call; wait for a thread that is handling some."""
        with self._lock:
            for _ in range(len(self._reports)):
                with self._queue:
                    if not self._reports:  # `_put` dropped the rest
                        return
                    report = self._reports.popleft()
                try:
                    report()
                except Exception:  # noqa: BLE001 - one bad report must not stop the others
                    self.failed += 1
                    _log.exception("a report on a request could not be handled")

    def _open(self, record: Record, miss: PrefixMiss | None) -> None:
        self._judge(record, miss)
        settle(record, _NOTHING)
        self.history.add(record)
        self._end(record.id, None, 0, None, 0.0)  # if that of an earlier one was never reported
        self._forget(record.id)
        self._records[record.id] = record
        self._spans += len(record.spans)
        self._bound()
        self._running[record.id] = record
        if record.sequence is not None:
            self._by_sequence[record.sequence] = record
        if len(self._running) > _MOST_RUNNING:  # the end of the oldest was never reported
            self._end(next(iter(self._running)), None, 0, None, 0.0)

    def _bound(self) -> None:
        """Forget the oldest requests beyond the bounds, but never the latest."""
        while (count := len(self._records)) > 1 and (
            count > self.requests or self._spans > _MOST_SPANS
        ):
            self._forget(next(iter(self._records)))

    def _forget(self, id: str) -> None:
        if (record := self._records.pop(id, None)) is not None:
            self._spans -= len(record.spans)
            self.history.forget(record)

    def _judge(self, record: Record, miss: PrefixMiss | None) -> None:
        """Set the spans of a record as the pool told."""
        assert record.row is not None
        self.history.prepare(record)
        if self._public.rows:
            record.public = self._public.length(record.row, self.page_size)
        other = None if miss is None else self._by_sequence.get(miss.sequence)
        offset = self._clock() - self._cache_clock()
        record.judged = self._reasons.spans(record, miss, other, offset)

    def _load(self, id: str, report: LoadReport) -> None:
        if (record := self._running.get(id)) is not None:
            before = len(record.spans)
            settle(record, report)
            if id in self._records:  # it is the same
                self._spans += len(record.spans) - before
                self._bound()

    def _end(
        self, id: str, outcome: str | None, generated: int, ttft_s: float | None, seconds: float
    ) -> None:
        record = self._running.pop(id, None)
        if record is None:
            return
        if record.sequence is not None:
            self._by_sequence.pop(record.sequence, None)
        record.outcome, record.generated = outcome, generated
        record.ttft_s, record.seconds = ttft_s, seconds
        for span in record.spans:  # final now
            if span.reason is not None:
                self._computed[span.reason] = self._computed.get(span.reason, 0) + span.tokens

    # --- queries -----------------------------------------------------------------------------

    def explain(self, id: str) -> Explanation | None:
        """Explain request ``id``, also while it runs; None if it is not remembered."""
        with self._lock:
            self._work_off()
            record = self._records.get(id)
            return None if record is None else explanation(record)

    def prompt(
        self,
        tokens: TokensLike,
        namespace: Namespace,
        miss: PrefixMiss | None,
        report: LoadReport = _NOTHING,
        *,
        extra: ExtraLike | None = None,
    ) -> Explanation:
        """Explain a prompt as if it were opened now. Changes nothing.

        ``miss`` is that of `PagedCache.match` for all tokens but the last, ``report`` is what would
        be loaded from a store, and ``extra`` is what `PagedCache.open` would get. The id of the
        explanation is "". Raises `InvalidValue` for an invalid prompt.
        """
        record = self._record("", as_tokens(tokens), namespace, extra)
        with self._lock:
            self._work_off()
            self._judge(record, miss)
            settle(record, report)
            return explanation(record)

    def recent(self, last: int = 50) -> list[Explanation]:
        """Explain the last requests, newest first."""
        last = whole("last", last, 0)
        with self._lock:
            self._work_off()
            return [
                explanation(record) for record in islice(reversed(self._records.values()), last)
            ]

    def summary(self, last: int = 1000) -> ExplainSummary:
        """Sum up the last requests: tokens reused and computed, and the causes by their cost."""
        last = whole("last", last, 0)
        with self._lock:
            self._work_off()
            return summarise(islice(reversed(self._records.values()), last), self._clock())

    def computed(self) -> dict[str, int]:
        """Return the computed tokens by reason, of all ended requests; the counts never fall."""
        with self._lock:
            self._work_off()
            return dict(self._computed)

    def close(self) -> None:
        """End the thread. Past reports can still be queried."""
        self._over.set()
        self._thread.join()

    def __repr__(self) -> str:
        return f"<Explainer of {len(self._records)} requests, {len(self._reports)} reports queued>"


def settle(record: Record, report: LoadReport) -> None:
    """Set the spans of a record: what the pool told, and over it what a store loaded and told."""
    last = record.tokens - 1  # is always computed
    told = (of_store(miss, record.at, report.seconds) for miss in report.missing)
    spans = painted(record.judged, (one for one in told if one is not None), STORE_KNOWS)
    came = (Span(start, min(stop, last), tier, None) for start, stop, tier in report.sources)
    spans = painted(spans, came, {*REASONS})
    if report.late and not report.missing:  # the lookup was not waited for
        evidence = {"tier": None, "why": "late", "waited_s": report.seconds}
        late = Span(0, last, None, "tier_unavailable", evidence)
        spans = painted(spans, [late], STORE_KNOWS)
    record.spans = complete(spans, record.tokens, record.public)


def explanation(record: Record) -> Explanation:
    """Return the explanation of a request as it is now."""
    return Explanation(
        record.id, record.at, record.namespace, record.kind, record.session, record.tokens,
        record.spans, record.generated, record.ttft_s, record.seconds, record.outcome,
        sentence_of(record.spans, record.tokens),
    )  # fmt: skip
