"""`Scheduler`: the answers that wait, and those that run.

    waiting ──admit──▶ running ──(`PassPlanner`)──▶ a forward pass ──▶ …
       ▲                  │
       └────preempt───────┘   the youngest, when pages run out

The scheduler holds no tensors and computes nothing. An answer is admitted by opening a sequence of
the cache for it; every running answer has one. Older requests always come first in growth and
last in preemption, so the oldest can always go on, and every request ends.
"""

from __future__ import annotations

from bisect import insort
from math import ceil
from time import perf_counter
from typing import TYPE_CHECKING, NamedTuple

from kvkeep.core.errors import OutOfPages
from kvkeep.core.tokens import common_length
from kvkeep.observe.usage import Notifier, RequestAdmitted
from kvkeep.serve.engine.answer import BY_ARRIVAL, Answer

if TYPE_CHECKING:
    from kvkeep.core.cache import PagedCache
    from kvkeep.serve.engine.limits import Limits
    from kvkeep.serve.engine.offload.offload import Offload
    from kvkeep.serve.engine.passes import GroupPasses
    from kvkeep.serve.engine.request import Request
    from kvkeep.serve.engine.stats import EngineStats

__all__ = ["Refused", "Scheduler"]

# Waiting answers, from the front of the queue, that are ranked by their cached prefix.
_LOOK_AHEAD = 64
# Steps until admission is tried again after it failed: other users of the cache may free pages.
_PATIENCE = 16


class Refused(NamedTuple):
    """An answer that cannot have its pages although no other runs."""

    answer: Answer
    error: OutOfPages


class Scheduler:
    """The waiting and the running answers of an engine, each in order of arrival.

    Thread safety: none. Cost of a step: O(running); admission adds one cache lookup for each of
    the first 64 waiting answers, when the batch has room.
    """

    def __init__(
        self,
        cache: PagedCache,
        limits: Limits,
        stats: EngineStats,
        offload: Offload | None,
        *,
        notifier: Notifier | None = None,
        passes: GroupPasses | None = None,
    ) -> None:
        self.requests: dict[int, Request] = {}
        """Requests that have not ended, by id."""
        self.waiting: list[Answer] = []
        self.running: list[Answer] = []
        self._cache = cache
        self._limits = limits
        self._stats = stats
        self._offload = offload
        self._notifier = notifier or Notifier()
        self._passes = passes  # None: every layer keeps every token
        self._watermark = ceil(limits.watermark * cache.num_pages)
        self._blocked = 0  # steps without admission, unless an answer frees pages

    # --- coming and going --------------------------------------------------------------------

    def enter(self, request: Request) -> None:
        """Queue a new request."""
        self.requests[request.id] = request
        for answer in request.live:
            self.wait(answer)

    def leave(self, request: Request) -> None:
        """Remove a request and all its answers."""
        del self.requests[request.id]
        for answer in request.live:
            self.remove(answer)
        request.live = []

    def wait(self, answer: Answer) -> None:
        """Queue an answer, which has no sequence."""
        insort(self.waiting, answer, key=BY_ARRIVAL)

    def run(self, answer: Answer) -> None:
        """Add ``answer``, which has a sequence, to the running answers."""
        assert answer.sequence is not None
        insort(self.running, answer, key=BY_ARRIVAL)

    def remove(self, answer: Answer) -> None:
        """Remove ``answer`` and free its pages; pages that it published stay cached."""
        if self._offload is not None:
            self._offload.cancel(answer)
        if answer.sequence is None:
            self.waiting.remove(answer)
            return
        self.running.remove(answer)
        if self._offload is not None and answer.finish_reason is None:
            self._offload.leave(answer)
        answer.sequence.close(ended=answer.ended)
        answer.sequence = None
        self._blocked = 0

    def preempt_for(self, answer: Answer) -> bool:
        """Preempt the youngest answer if it is younger than ``answer``; return whether it was."""
        victim = self.running[-1]
        if victim.order <= answer.order:
            return False
        self.preempt(victim)
        return True

    def preempt(self, answer: Answer) -> None:
        """Move ``answer`` back to the queue; pages that stay cached are not computed again."""
        if self._offload is not None:
            self._offload.leave(answer, resumes=True)
        self.remove(answer)
        answer.computed, answer.drafts = 0, []
        self.wait(answer)
        self._stats.preempted += 1

    # --- admission ---------------------------------------------------------------------------

    def admit(self) -> Refused | None:
        """Open sequences for waiting answers, as far as batch and pages allow.

        Returns an answer that can never run: no answer runs, and sequences outside this engine
        hold the pages it needs.
        """
        if self._offload is not None:
            self._offload.prefetch(self.waiting)
        if self._blocked and self.running:
            self._blocked -= 1
            return None
        slots = self._limits.max_running - sum(answer.slots for answer in self.running)
        if not self.waiting or slots <= 0:
            return None
        for answer in self._ranked():
            if self._computed_by_another(answer):
                continue
            if answer.slots > slots:
                break
            if self._offload is not None:
                self._offload.look_up(answer)
            try:
                self._open(answer)
            except OutOfPages as error:
                self._blocked = _PATIENCE
                return None if self.running else Refused(answer, error)
            slots -= answer.slots
            self._now_running(answer)
        return None

    def _ranked(self) -> list[Answer]:
        """Return the front of the queue: urgent answers, then by longest cached prefix."""
        if len(self.waiting) == 1:
            return self.waiting.copy()
        front = self.waiting[:_LOOK_AHEAD]
        urgent = [answer for answer in front if self._is_urgent(answer)]
        others = [answer for answer in front if not self._is_urgent(answer)]
        if len(others) > 1:
            cached = {id(answer): self._cached(answer) for answer in others}
            others.sort(key=lambda answer: -cached[id(answer)])  # stable: equals by arrival
        return urgent + others

    def _is_urgent(self, answer: Answer) -> bool:
        return bool(answer.generated) or answer.overtaken >= self._limits.max_overtaken

    def _cached(self, answer: Answer) -> int:
        # The last token is computed in any case.
        return self._cache.match(answer.tokens()[:-1], answer.request.namespace).num_tokens

    def _computed_by_another(self, answer: Answer) -> bool:
        """Whether a running answer will publish more of this prompt than is cached.

        Waiting for that answer costs no time: this one would compute the tokens no sooner.
        """
        if not self._cache.reuse:
            return False
        mine = answer.tokens()
        namespace, size = answer.request.namespace, self._cache.page_size
        shared, first = 0, None
        for other in self.running:
            request = other.request
            if not other.decoding and request.store and request.namespace == namespace:
                common = self._reusable(common_length(mine, request.prompt), len(mine))
                if common > max(other.computed, shared):
                    shared, first = common, other
        if first is None or self._is_urgent(answer):
            return False
        if shared - self._cached(answer) < size:
            return False
        if self._passes is not None:
            self._passes.expect(first, shared)
        if not answer.deferred:
            answer.deferred = True
            self._stats.deferred += 1
        return True

    def _reusable(self, common: int, tokens: int) -> int:
        """Return how much of ``common`` first tokens a prompt of ``tokens`` can reuse."""
        if self._passes is None:
            size = self._cache.page_size
            return common // size * size
        return self._passes.resumable(min(common, tokens - 1))

    def _open(self, answer: Answer) -> None:
        request = answer.request
        reserve = 0
        if self.running:
            # Each running answer soon needs a page more, and each answer of this one its own.
            reserve = self._watermark + len(self.running) + answer.slots - 1
            if self._passes is not None:
                reserve += self._passes.row_pages(answer.num_tokens)
                reserve += self._passes.fork_pages * (answer.slots - 1)
        observed = bool(self._notifier.observers)
        began = perf_counter() if observed else 0.0
        answer.sequence = self._cache.open(
            answer.tokens(),
            request.namespace,
            reserve=reserve,
            session=request.session,
        )
        answer.computed = answer.sequence.num_cached
        if request.cached_tokens is None:
            request.cached_tokens = answer.sequence.num_cached
            self._stats.prompt_tokens += len(request.prompt)
            self._stats.cached_tokens += request.cached_tokens
            if answer.load is not None:
                answer.load.is_first = True
            if observed:
                self._notifier.emit(
                    RequestAdmitted(
                        request.record,
                        answer.sequence.id,
                        request.cached_tokens,
                        perf_counter() - began,
                    )
                )

    def _now_running(self, answer: Answer) -> None:
        at = self.waiting.index(answer)
        for other in self.waiting[:at]:
            other.overtaken += 1
        del self.waiting[at]
        self.run(answer)
        if self._offload is not None:
            self._offload.admitted(answer)
