"""`RequestWatch`: follows the requests of an engine's scheduler, for a `WatchSink`."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple

from kvkeep.observe.explain.inbox import Inbox

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvkeep.core.extras import Extras
    from kvkeep.core.keys import Namespace
    from kvkeep.integrations.watch_sink import WatchSink
    from kvkeep.observe.usage import Outcome, RequestRecord
    from kvkeep.store import Miss

    Misses = Callable[[], Sequence[Miss]]

__all__ = ["RequestWatch", "WatchedLoad", "WatchedRequest"]

_MOST_QUEUED: Final = 20_000


class WatchedLoad(NamedTuple):
    """What a load brought: (start, stop, tier) of the tokens that came, after ``seconds``.

    ``late``: the engine did not wait for the rest.
    """

    sources: tuple[tuple[int, int, str], ...] = ()
    seconds: float = 0.0
    late: bool = False


@dataclass(slots=True, eq=False)
class WatchedRequest:
    """A request from its arrival to its end.

    Attributes:
        id: the engine's name for it.
        number: of its sequence, unique.
        prompt: its tokens; nobody changes them.
        namespace: what its KV depends on besides tokens.
        arrived: Unix seconds.
        store: False: its KV is not kept in tiers.
        extra: what belongs to some of its tokens, as images do: (position, bytes).
        local: leading tokens that the engine's own cache had at the last lookup …
        cached: … and when the request was admitted.
        admitted: whether it has pages.
        first_token_s: seconds from its arrival to its first token; None: there is none yet.
        turn: how often it lost its pages.
        table: its pages, in order.
        told: how many leading pages were told to be full.
        loading: the tokens that are loaded now, from … to; None: none.
        record, extras, reused: the sink's, in its thread.
    """

    id: str
    number: int
    prompt: Sequence[int]
    namespace: Namespace
    arrived: float
    store: bool = True
    extra: Sequence[tuple[int, bytes]] = ()
    local: int = 0
    cached: int = 0
    admitted: bool = False
    first_token_s: float | None = None
    turn: int = 0
    table: list[int] = field(default_factory=list)
    told: int = 0
    loading: tuple[int, int] | None = None
    record: RequestRecord | None = None
    extras: Extras = ()
    reused: int = 0


class RequestWatch:
    """Tells a sink what happens to requests, and to the pages that they get.

    An engine's cache does not say what it evicts. But a page that is given to a request had been
    evicted at the latest then, so `admitted` and `grown` tell of that.

    Thread safety: the engine's thread; `settle` any. Cost: 1 to 3 µs a call, the rest is done by
    the sink in a thread of its own. Events beyond 20,000 that wait are dropped, and counted in
    ``lost``.
    """

    def __init__(
        self, sink: WatchSink, page_tokens: int, *, clock: Callable[[], float] = time.time
    ) -> None:
        self._sink = sink
        self._size = page_tokens
        self._clock = clock
        self._numbered = 0
        self._requests: dict[str, WatchedRequest] = {}
        self._unanswered: dict[str, WatchedRequest] = {}  # admitted, and without a token
        self._inbox: Inbox[Callable[[], None]] = Inbox(_call, "kvkeep watch", _MOST_QUEUED)
        self._waiting = 0

    # --- the engine's thread ---------------------------------------------------------------------

    def arrived(
        self,
        id: str,
        prompt: Sequence[int],
        namespace: Namespace,
        *,
        at: float,
        store: bool = True,
        extra: Sequence[tuple[int, bytes]] = (),
    ) -> None:
        """Follow a new request. One without tokens is ignored, and so is all that follows."""
        if not prompt:
            return
        self._numbered += 1
        one = WatchedRequest(id, self._numbered, prompt, namespace, at, store, extra)
        self._requests[id] = one
        self._waiting += 1

    def found(self, id: str, cached: int) -> None:
        """Note how many leading tokens the engine's own cache has of a request."""
        one = self._requests.get(id)
        if one is not None:
            one.local = cached

    def admitted(
        self,
        id: str,
        table: Sequence[int],
        *,
        others: Sequence[int] = (),
        loading: tuple[int, int] | None = None,
        misses: Misses | None = None,
        turn: int = 0,
    ) -> None:
        """Note that a request has got its pages.

        A later call notes more pages of the same request, or new ones after a preemption.

        Arguments:
            table: its pages; those of the cached tokens come first.
            others: pages that it got besides, for other layers.
            loading: the tokens that are loaded from a store, from … to.
            misses: returns why tokens are not loaded; called by the sink.
            turn: how often it lost its pages.
        """
        one = self._requests.get(id)
        if one is None:
            return
        first = not one.admitted
        if first or turn != one.turn:
            held = one.told = one.local // self._size
        else:
            held = len(one.table)
        new = [*table[held:], *others]
        one.table, one.turn = list(table), turn
        if not first:
            if new:
                self._put(self._sink.taken, new)
            return
        one.admitted = True
        self._waiting -= 1
        self._unanswered[id] = one
        one.cached, one.loading = one.local, loading
        self._put(self._sink.admitted, one, new)
        if loading is None:
            self._put(self._sink.loaded, one, WatchedLoad(), misses)

    def grown(self, id: str, pages: Sequence[int], others: Sequence[int] = ()) -> None:
        """Note that a running request got more pages."""
        one = self._requests.get(id)
        if one is not None:
            one.table += pages
        if pages or others:
            self._put(self._sink.taken, [*pages, *others])

    def loaded(self, id: str, load: WatchedLoad, misses: Misses | None = None) -> None:
        """Note that the load of a request is over."""
        one = self._requests.get(id)
        if one is not None and one.loading is not None:
            one.loading = None
            self._put(self._sink.loaded, one, load, misses)

    @property
    def unanswered(self) -> Sequence[WatchedRequest]:
        """Admitted requests without a token, for `computed` and `answering`."""
        return tuple(self._unanswered.values())

    def loading(self, id: str) -> tuple[int, int] | None:
        """Return the tokens of a request that are loaded now, from … to; None: none."""
        one = self._requests.get(id)
        return None if one is None else one.loading

    def computed(self, one: WatchedRequest, tokens: int) -> None:
        """Note that the KV of the first ``tokens`` of a request is there after this step."""
        if tokens >= len(one.prompt):
            self._tell_stored(one, len(one.prompt) // self._size, ())

    def answering(self, one: WatchedRequest) -> None:
        """Note that the first token of a request is there."""
        self._unanswered.pop(one.id, None)
        if one.first_token_s is None:
            one.first_token_s = max(0.0, self._clock() - one.arrived)
            self._put(self._sink.answering, one)

    def ended(
        self,
        id: str,
        outcome: Outcome,
        *,
        answer: Sequence[int] = (),
        computed: int = 0,
        kept: int = 0,
    ) -> None:
        """Note the end of a request.

        ``answer`` are its generated tokens, ``computed`` the tokens whose KV is in its pages, and
        ``kept`` those that were given to the store.
        """
        one = self._requests.pop(id, None)
        if one is None:
            return
        if not one.admitted:
            self._waiting -= 1
        elif len(answer):
            self.answering(one)
        self._unanswered.pop(id, None)
        whole = min(computed, len(one.prompt) + len(answer)) // self._size
        self._tell_stored(one, whole, answer)
        seconds = max(0.0, self._clock() - one.arrived)
        self._put(self._sink.ended, one, outcome, len(answer), seconds, kept)

    def cleared(self) -> None:
        """Note that the engine's own cache was emptied."""
        self._put(self._sink.cleared)

    def _tell_stored(self, one: WatchedRequest, pages: int, answer: Sequence[int]) -> None:
        """Tell that the first ``pages`` pages of a request are full, as far as it was not told."""
        first, last = one.told, min(pages, len(one.table))
        if last <= first:
            return
        one.told = last
        parent = one.table[first - 1] if first else -1
        self._put(self._sink.stored, one, first, parent, one.table[first:last], tuple(answer))

    def _put(self, handle: Callable[..., None], *said: object) -> None:
        self._inbox.put(partial(handle, *said))

    # --- any thread ------------------------------------------------------------------------------

    @property
    def running(self) -> int:
        """Requests that have pages."""
        return len(self._requests) - self._waiting

    @property
    def waiting(self) -> int:
        """Requests that wait for pages."""
        return self._waiting

    @property
    def lost(self) -> int:
        """Events that were dropped, or whose handling failed."""
        return self._inbox.lost + self._inbox.failed

    def settle(self) -> None:
        """Handle all events that happened so far."""
        self._inbox.work_off()

    def close(self) -> None:
        """End the thread. What happened before can still be settled."""
        self._inbox.close()


def _call(handle: Callable[[], None]) -> None:
    handle()
