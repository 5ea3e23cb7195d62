"""`WatchSink`: makes events of what `RequestWatch` tells, for explanations and usage."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kvkeep.core.events import Closed, Evicted, Opened, Stored
from kvkeep.core.extras import as_extras, extras_between
from kvkeep.core.tokens import TOKEN_DTYPE
from kvkeep.observe.usage import (
    LoadReport,
    PromptComputed,
    PromptStored,
    RequestAdmitted,
    RequestEnded,
    RequestLoaded,
    RequestOrigin,
    RequestRecord,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvkeep.core.events import Event
    from kvkeep.integrations.request_watch import Misses, WatchedLoad, WatchedRequest
    from kvkeep.observe.explain import Explainer
    from kvkeep.observe.usage import Outcome, RequestEvent, RequestObserver, UsageTable

__all__ = ["WatchSink"]


class WatchSink:
    """Tells an explainer, a usage table and other observers of the requests of an engine.

    The pages of the engine's own cache are mirrored by what requests fill them with, and who gets
    them next; so an eviction is known when the page is given away, and not before.

    Thread safety: none; one call at a time. Memory: a bit a page, and what the observers have.

    Arguments:
        explainer: explains the requests.
        usage: counts them; its ``pages`` are those of the mirror.
        observers: get the events of requests, too.
        num_pages: of the engine.
        prefill_s: returns the expected seconds of computing tokens from … to of a prompt.
    """

    def __init__(
        self,
        explainer: Explainer,
        usage: UsageTable,
        observers: Sequence[RequestObserver],
        *,
        num_pages: int,
        prefill_s: Callable[[int, int], float],
    ) -> None:
        self._explainer = explainer
        self._usage = usage
        self._observers = (usage.see, *observers)
        self._size = explainer.page_size
        self._prefill_s = prefill_s
        self._full = np.zeros(num_pages, bool)  # pages that hold what was told of as stored
        self.requests = 0
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.loaded_tokens = 0
        self.generated_tokens = 0
        self.evicted_pages = 0

    @property
    def full_pages(self) -> int:
        """Pages with tokens that can be reused, as far as is known."""
        return int(self._full.sum())

    def taken(self, pages: Sequence[int], reason: str = "pressure") -> None:
        """Note that these pages were given to a request: what they had is gone."""
        row = np.array(pages, np.int32)
        row = row[row < len(self._full)]
        gone = row[self._full[row]]
        if len(gone):
            self._full[gone] = False
            if reason == "pressure":
                self.evicted_pages += len(gone)
            self._tell_pages(Evicted(gone, reason))

    def cleared(self) -> None:
        """Note that the engine's own cache was emptied."""
        self.taken(np.flatnonzero(self._full).tolist(), "cleared")

    def admitted(self, one: WatchedRequest, pages: Sequence[int]) -> None:
        """Note that a request begins, for which the engine took ``pages``."""
        prompt = np.array(one.prompt, TOKEN_DTYPE)
        cached = one.reused = min(one.cached, len(prompt) - 1)
        one.extras = as_extras(one.extra, len(prompt))
        one.record = RequestRecord(RequestOrigin(one.id), prompt, one.namespace, store=one.store)
        self.requests += 1
        self.prompt_tokens += len(prompt)
        self.cached_tokens += cached
        self.taken(pages)
        self._explainer.see(Opened(one.number, one.namespace, len(prompt), cached))
        # The pool keeps what a request computes, also if the tiers are not to.
        self._explainer.opened(
            one.id, prompt, one.namespace, cached=cached, sequence=one.number, extra=one.extra
        )
        self._tell(RequestAdmitted(one.record, one.number, cached))

    def loaded(self, one: WatchedRequest, load: WatchedLoad, misses: Misses | None) -> None:
        """Note what came from a store, and why the rest did not."""
        if one.record is None:
            return
        missing = () if misses is None else tuple(misses())
        last = len(one.record.prompt) - 1  # is computed in any case
        sources = tuple(
            (start, min(stop, last), tier) for start, stop, tier in load.sources if start < last
        )
        report = LoadReport(last - one.reused, sources, missing, load.seconds, load.late)
        one.reused += report.tokens
        self.loaded_tokens += report.tokens
        self.cached_tokens += report.tokens
        event = RequestLoaded(one.record, report)
        self._explainer.see_request(event)
        self._tell(event)

    def stored(
        self,
        one: WatchedRequest,
        first: int,
        parent: int,
        pages: Sequence[int],
        answer: Sequence[int],
    ) -> None:
        """Note that these pages, from page ``first`` of the request on, are full."""
        if one.record is None:
            return
        row = np.array(pages, np.int32)
        # Page 0 is none, and pages behind a window hold nothing.
        usable = (row > 0) & (row < len(self._full))
        row = row[: len(row) if usable.all() else int(np.argmin(usable))]
        if not len(row):
            return
        start, stop = first * self._size, (first + len(row)) * self._size
        tokens = one.record.prompt[start:stop]
        if len(tokens) < stop - start:
            said = np.array(answer, TOKEN_DTYPE)
            tokens = np.concatenate((one.record.prompt, said))[start:stop]
        self.taken(row.tolist(), "dropped")  # none, unless events were lost
        self._full[row] = True
        extras = extras_between(one.extras, start, stop)
        self._tell_pages(Stored(one.number, one.namespace, parent, row, tokens, extras))

    def answering(self, one: WatchedRequest) -> None:
        """Note that the first token of a request is there."""
        if one.record is None or one.first_token_s is None:
            return
        prompt, reused, seconds = len(one.record.prompt), one.reused, one.first_token_s
        self._usage.note_first_token(seconds, prompt_tokens=prompt, reused_tokens=reused)
        event = PromptComputed(one.record, prompt - reused, self._prefill_s(reused, prompt))
        self._tell(event)

    def ended(
        self, one: WatchedRequest, outcome: Outcome, generated: int, seconds: float, kept: int
    ) -> None:
        """Note the end of a request."""
        if one.record is None:
            return
        self.generated_tokens += generated
        if kept:
            self._tell(PromptStored(one.record, kept, 0.0))
        event = RequestEnded(one.record, outcome, generated, one.first_token_s, seconds)
        self._explainer.see_request(event)
        self._tell(event)
        self._explainer.see(Closed(one.number, len(one.prompt) + generated, one.told))

    def _tell(self, event: RequestEvent) -> None:
        for observer in self._observers:
            observer(event)

    def _tell_pages(self, event: Event) -> None:
        self._usage.pages.see(event)
        self._explainer.see(event)
