"""`Explainer`: follows cache events and requests, and explains why prompts were computed."""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict, deque
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from kvkeep.core.errors import InvalidValue, whole
from kvkeep.core.events import Closed, Evicted, GroupsStored, Opened, Stored
from kvkeep.core.extras import as_extras
from kvkeep.core.tokens import as_row, as_tokens
from kvkeep.observe.explain.answer import Missing
from kvkeep.observe.explain.ledger import Requester
from kvkeep.observe.explain.mirror import Mirror
from kvkeep.observe.explain.summary import ExplainedRequest, add_up, summarise
from kvkeep.observe.usage import RequestAdmitted, RequestEnded, RequestLoaded

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from kvkeep.core.events import Event
    from kvkeep.core.extras import ExtraLike, Extras
    from kvkeep.core.groups import GroupLayout
    from kvkeep.core.keys import Namespace
    from kvkeep.core.public import PublicPrefixes
    from kvkeep.core.tokens import TokenArray, TokensLike
    from kvkeep.observe.explain.answer import ExplainSummary, Explanation
    from kvkeep.observe.usage import RequestEvent
    from kvkeep.store import Miss

__all__ = ["Explainer", "Inbox", "missing"]

_REMOVED = {"cleared": "cleared", "removed": "asked"}
_REFUSED = frozenset({"admission", "answer", "lossy", "unread"})
_DROPPED = {"queue full": "queue_full", "no time": "queue_full"}


def missing(misses: Iterable[Miss], *, waited_s: float | None = None) -> list[Missing]:
    """Convert a store's reports of missing tokens.

    Tokens that the store never had are left out: the explainer finds their reason. ``waited_s`` is
    how long the request waited for the store.
    """
    found = []
    for miss in misses:
        if miss.what == "never":
            continue
        reason, evidence = _converted(miss, miss.detail.partition(": ")[0], waited_s)
        tier = {"tier": miss.tier or None}
        found.append(Missing(miss.start, miss.stop, reason, {**tier, **evidence}))
    return found


def _converted(miss: Miss, word: str, waited_s: float | None) -> tuple[str, dict[str, Any]]:
    """Return reason and evidence, without the tier; ``word`` is the detail before the colon."""
    match miss.what:
        case "evicted":
            return "evicted", {**_eviction(miss, "pressure"), "policy": word}
        case "removed":
            return "evicted", {**_eviction(miss, _REMOVED.get(word, word)), "policy": None}
        case "dropped":
            return "not_admitted", {"why": _DROPPED.get(word, word.replace(" ", "_"))}
        case "refused":
            return "not_admitted", {"why": word if word in _REFUSED else "unknown"}
        case "slower":
            return "not_loaded", {"why": word, "load_s": miss.load_s, "compute_s": miss.compute_s}
        case "damaged":
            return "damaged", {}
        case "late":
            return "tier_unavailable", {"why": "late", "waited_s": waited_s}
        case _:
            why = "breaker" if word == "breaker" else "error"
            return "tier_unavailable", {"why": why, "waited_s": waited_s}


def _eviction(miss: Miss, cause: str) -> dict[str, Any]:
    ago = None if miss.at is None else max(0.0, time.time() - miss.at)
    return {"at": miss.at, "ago_s": ago, "cause": cause, "by": None, "needed_pages": None}


_log = logging.getLogger("kvkeep.explain")
_PAUSE_S = 0.25
Item = TypeVar("Item")


class Inbox(Generic[Item]):
    """Takes items from any thread and calls ``work`` with each, in order.

    ``work`` runs under ``lock``, every quarter of a second in a daemon thread, and in `work_off`.
    Beyond ``most`` items the oldest are dropped and counted in ``lost``. An item on which ``work``
    raises is logged, counted in ``failed``, and dropped.

    Thread safety: all methods. Cost of `put`: below a microsecond.
    """

    def __init__(self, work: Callable[[Item], None], name: str, most: int) -> None:
        self.lost = 0
        self.failed = 0
        self.lock = threading.RLock()
        self._work = work
        self._most = most
        self._items: deque[Item] = deque()
        self._putting = threading.Lock()  # held for an append or a pop alone
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def __len__(self) -> int:
        return len(self._items)

    def put(self, item: Item) -> None:
        """Queue an item."""
        with self._putting:
            if len(self._items) >= self._most:
                self._items.popleft()
                self.lost += 1
            self._items.append(item)

    def work_off(self) -> None:
        """Handle all items queued before this call; wait for a thread that is handling some."""
        with self.lock:
            for _ in range(len(self._items)):
                with self._putting:
                    if not self._items:  # `put` dropped the rest
                        return
                    item = self._items.popleft()
                try:
                    self._work(item)
                except Exception:  # noqa: BLE001 - one bad item must not stop the others
                    self.failed += 1
                    _log.exception("an item of the explainer's queue could not be handled")

    def _run(self) -> None:
        while not self._over.wait(_PAUSE_S):
            self.work_off()

    def close(self) -> None:
        """End the thread. Queued items are handled by the next `work_off`."""
        self._over.set()
        self._thread.join()


_MOST_QUEUED = 100_000
_MOST_RUNNING = 10_000


class Explainer:
    """Explains, token by token, why tokens of prompts were computed or reused.

    It follows one `kvkeep.core.cache.PagedCache` with pages of ``page_size`` tokens by its events
    (`see`), and each request: by the events of an engine (`see_request`), or by calls of `opened`
    right after it was opened, `loaded` once loading from a store is over, and `ended` at its end.
    These methods only queue; a separate thread handles the queue, and every query handles the rest
    of it first.

    It remembers the last ``requests``, the tokens of the latest prompts up to ``prompt_tokens``,
    and the state of ``units`` full pages that are not in the cache. ``policy`` is the name of the
    cache's eviction policy, ``reuse`` and ``groups`` what the cache was made with, ``clock`` gives
    unix seconds. Public prefixes are given by `share`.

    Thread safety: all methods. Cost: queueing takes 1 µs an event and 12 µs a request of 8,192
    tokens. Handling a request takes about 0.5 ms if it was cached and 1.3 ms if not (pages of 16
    tokens), a quarter of a millisecond of it hashing. Memory: 200 bytes a unit of long prompts and
    700 of short ones, which share less, 4 … 11 a token of the prompts, and 2 KiB a request: with
    the defaults 150 MB at most.
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
        groups: GroupLayout | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.page_size = whole("page_size", page_size, 1)
        self._most_requests = whole("requests", requests, 1)
        whole("prompt_tokens", prompt_tokens, 1)
        whole("units", units, 1)
        self._clock = clock
        self._reuse = reuse
        self._mirror = Mirror(self.page_size, policy, units, prompt_tokens, groups)
        self._records: OrderedDict[str, ExplainedRequest] = OrderedDict()
        self._running: OrderedDict[str, ExplainedRequest] = OrderedDict()
        self._computed: dict[str, int] = {}
        self._inbox: Inbox[Callable[[], None]] = Inbox(_call, "kvkeep-explain", _MOST_QUEUED)

    def share(self, public: PublicPrefixes) -> None:
        """Explain with the public prefixes of the cache, which may be declared later.

        Call it before the first event: units are named with what tenants share.
        """
        self._mirror.share(public)

    # --- events ------------------------------------------------------------------------------

    def see(self, event: Event) -> None:
        """Follow an event of the cache: a hook for `PagedCache.subscribe`."""
        if isinstance(event, (Stored, GroupsStored, Evicted, Opened, Closed)):
            self._inbox.put(partial(self._mirror.see, event, self._clock()))

    def see_request(self, event: RequestEvent) -> None:
        """Follow an event of a request: an observer for `Engine.observe`."""
        request = event.request
        match event:
            case RequestAdmitted():
                self.opened(
                    request.id,
                    request.prompt,
                    request.namespace,
                    cached=event.cached_tokens,
                    sequence=event.sequence,
                    store=request.store,
                    kind=request.origin.endpoint,
                    session=request.session,
                )
            case RequestLoaded():
                report = event.report
                reasons = missing(report.missing, waited_s=report.seconds)
                self.loaded(request.id, report.sources, reasons)
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
        *,
        cached: int,
        sequence: int | None = None,
        store: bool = True,
        kind: str = "",
        session: str | None = None,
        extra: ExtraLike | None = None,
    ) -> None:
        """Follow request ``id``, just opened: ``cached`` leading tokens came from the pool.

        ``sequence`` is the id of its sequence in the cache; with it, evictions are attributed with
        certainty. With ``store=False`` nothing of the request is kept. The tokens are copied.
        ``extra`` is what `PagedCache.open` got.
        Raises `InvalidValue` for an empty prompt, or more cached tokens than it has.
        """
        row = as_row(tokens)
        self._check(len(row), cached)
        extras = as_extras(extra, len(row))
        requester = Requester(id, store, self._reuse)
        record = ExplainedRequest(requester, self._clock(), namespace, kind, session, len(row), [])
        copy = row.copy()
        self._inbox.put(partial(self._handle_opened, record, copy, extras, cached, sequence))

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
        """Note the tokens loaded from a store, (start, stop, tier), and why others were not.

        A later call replaces an earlier one. An unknown request is ignored.
        """
        self._inbox.put(partial(self._handle_loaded, id, tuple(sources), tuple(missing)))

    def ended(
        self,
        id: str,
        *,
        outcome: str,
        generated: int,
        ttft_s: float | None,
        seconds: float,
    ) -> None:
        """Note the end of request ``id``: "done", or another ``outcome``."""
        self._inbox.put(partial(self._handle_ended, id, outcome, generated, ttft_s, seconds))

    @property
    def lost(self) -> int:
        """Events that were dropped because the queue was full."""
        return self._inbox.lost

    @property
    def failed(self) -> int:
        """Events whose handling failed, which is a bug of this package."""
        return self._inbox.failed

    @property
    def forgotten(self) -> int:
        """Units that were forgotten because there were too many."""
        return self._mirror.ledger.forgotten

    # --- handling the queue ------------------------------------------------------------------

    def _handle_opened(
        self,
        record: ExplainedRequest,
        tokens: TokenArray,
        extras: Extras,
        cached: int,
        sequence: int | None,
    ) -> None:
        id = record.requester.id
        prompt = self._mirror.prompt(tokens, record.namespace, record.requester, extras)
        cached = self._given(tokens, cached)
        record.public = prompt.public * self.page_size
        record.judged = self._mirror.opened(prompt, cached=cached, sequence=sequence, at=record.at)
        record.settle((), ())
        self._records.pop(id, None)
        self._records[id] = record
        if len(self._records) > self._most_requests:
            self._records.popitem(last=False)
        self._running[id] = record
        if len(self._running) > _MOST_RUNNING:  # the end of the oldest was never reported
            oldest = self._running.popitem(last=False)[1]
            oldest.requester.running = False
            self._count(oldest)

    def _handle_loaded(
        self, id: str, sources: Sequence[tuple[int, int, str]], missing: Sequence[Missing]
    ) -> None:
        record = self._running.get(id) or self._records.get(id)
        if record is not None:
            record.settle(sources, missing)

    @staticmethod
    def _given(tokens: TokenArray, cached: int) -> int:
        """Return how many cached tokens were reused: never the last one, which is computed."""
        return min(cached, len(tokens) - 1)

    def _handle_ended(
        self, id: str, outcome: str, generated: int, ttft_s: float | None, seconds: float
    ) -> None:
        record = self._running.pop(id, None)
        if record is not None:
            record.requester.running = False
            record.requester.outcome = outcome
            record.generated, record.ttft_s, record.seconds = generated, ttft_s, seconds
            self._count(record)

    def _count(self, record: ExplainedRequest) -> None:
        """Count computed tokens by reason: at the end of a request, when its spans are final."""
        add_up(record.spans, {}, self._computed)

    # --- queries -----------------------------------------------------------------------------

    def explain(self, id: str) -> Explanation | None:
        """Explain request ``id``, also while it runs; None if it is not remembered."""
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
        stored: int | None = None,
    ) -> Explanation:
        """Explain a prompt as if it were opened now. Changes nothing.

        ``cached`` and ``stored`` are the ``num_tokens`` and ``stored_tokens`` that
        `PagedCache.match` returned, ``sources`` and ``missing`` are a store's reports, as in
        `loaded`, and ``extra`` is what `PagedCache.open` would get. The id of the explanation is
        "". Raises `InvalidValue` for an invalid prompt.
        """
        row = as_tokens(tokens)
        self._check(len(row), cached)
        extras = as_extras(extra, len(row))
        with self._inbox.lock:
            self._inbox.work_off()
            at = self._clock()
            requester = Requester("", store=False, reuse=self._reuse)
            prompt = self._mirror.prompt(row, namespace, requester, extras)
            kept = None if stored is None else self._given(row, stored)
            given = self._given(row, cached)
            judged = self._mirror.judged(prompt, cached=given, stored=kept, at=at)
            public = prompt.public * self.page_size
            record = ExplainedRequest(requester, at, namespace, "", None, len(row), judged, public)
            record.settle(sources, missing)
            return record.explanation()

    def recent(self, last: int = 50) -> list[Explanation]:
        """Explain the last requests, newest first."""
        last = whole("last", last, 0)
        with self._inbox.lock:
            self._inbox.work_off()
            newest = islice(reversed(self._records.values()), last)
            return [record.explanation() for record in newest]

    def summary(self, last: int = 1000) -> ExplainSummary:
        """Sum up the last requests: tokens reused and computed, and the causes by their cost."""
        last = whole("last", last, 0)
        with self._inbox.lock:
            self._inbox.work_off()
            return summarise(islice(reversed(self._records.values()), last))

    def computed(self) -> dict[str, int]:
        """Return the computed tokens by reason, of all ended requests; the counts never fall."""
        with self._inbox.lock:
            self._inbox.work_off()
            return dict(self._computed)

    def close(self) -> None:
        """End the thread. Events queued before can still be queried."""
        self._inbox.close()

    def __repr__(self) -> str:
        return (
            f"<Explainer of {len(self._records)} requests, {len(self._mirror.ledger):,} units, "
            f"{len(self._inbox)} events queued>"
        )


def _call(handle: Callable[[], None]) -> None:
    handle()
