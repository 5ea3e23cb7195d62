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
from kvkeep.serve.engine.request import BY_ARRIVAL, Answer

if TYPE_CHECKING:
    from kvkeep.core.cache import PagedCache
    from kvkeep.core.groups import GroupLayout, GroupPlan, RowCopy, SequenceGroups, StateCopy
    from kvkeep.serve.engine.offload.offload import Offload
    from kvkeep.serve.engine.params import Limits
    from kvkeep.serve.engine.request import Answer, Request
    from kvkeep.serve.engine.stats import EngineStats

__all__ = ["Chunk", "GroupPasses", "PassPlanner", "Refused", "Scheduler"]


class GroupPasses:
    """The passes of an engine over a cache with groups of layers.

    The scheduler prepares each chunk; the step makes the `copies`, in order, before it computes.
    Thread safety: none.
    """

    def __init__(self, plan: GroupPlan, layout: GroupLayout) -> None:
        self._plan = plan
        self._layout = layout
        self._size = layout.page_size
        self._grid = layout.grid * layout.page_size if layout.state is not None else 1
        self._copies: list[RowCopy | StateCopy] = []

    # --- room ------------------------------------------------------------------------------------

    @property
    def fork_pages(self) -> int:
        """Pages that a fork takes at once."""
        return self._layout.state_pages

    def row_pages(self, tokens: int) -> int:
        """Return how many pages the rows of a sequence of ``tokens`` tokens take at most."""
        base = -(-tokens // self._size)
        return self._plan.pages_for(tokens) - base - self._layout.state_pages

    # --- before a pass ---------------------------------------------------------------------------

    def resumable(self, tokens: int) -> int:
        """Return the last position, ``tokens`` at most, at which a checkpoint can be."""
        return self._layout.floor(tokens // self._size) * self._size

    def expect(self, answer: Answer, position: int) -> None:
        """Plan a checkpoint of ``answer`` at ``position``, where another prompt will go on."""
        _groups(answer).expect(position)

    def stop(self, answer: Answer, stop: int) -> int:
        """Return where a pass up to ``stop`` should end: at a checkpoint, or else on the grid."""
        ends = _groups(answer).stops if answer.request.store else ()
        if ends and ends[0] <= stop:
            return ends[0]
        if stop < answer.num_tokens and (floored := stop // self._grid * self._grid):
            return floored if floored > answer.computed else stop
        return stop

    def shorter(self, answer: Answer, stop: int) -> int | None:
        """Return a shorter pass than up to ``stop``, for less room; None: it fills one page."""
        start, size = answer.computed, self._size
        half = (start + stop) // 2 // size * size
        least = min(stop, (start // size + 1) * size)
        shorter = max(half, least)
        return shorter if shorter < stop else None

    def most_drafts(self, answer: Answer, spare: int) -> int:
        """Return how many of ``spare`` drafts the next pass may verify: none past a checkpoint."""
        if answer.computed != answer.running_sequence.num_tokens:
            return 0  # tokens before are computed again
        ends = _groups(answer).stops if answer.request.store else ()
        return min(spare, ends[0] - answer.computed - 1) if ends else spare

    def is_prepared(self, answer: Answer) -> bool:
        """Whether the pass over all tokens of its sequence is prepared."""
        return _groups(answer).position >= answer.running_sequence.num_tokens

    def prepare(self, answer: Answer, stop: int) -> None:
        """Allocate rows for the tokens up to ``stop``, and note the copies to make before.

        If there are drafts, the position before them is marked. Raises `OutOfPages`.
        """
        groups = _groups(answer)
        ends = groups.stops if answer.request.store else ()
        self._copies += groups.copies()
        if answer.drafts and (copy := groups.mark()) is not None:
            self._copies.append(copy)
        self._copies += groups.reach(stop)
        answer.checkpoint = stop if stop in ends else None

    def copies(self) -> list[RowCopy | StateCopy]:
        """Return the copies to make before the pass, in order, once."""
        copies, self._copies = self._copies, []
        return copies

    # --- after a pass ----------------------------------------------------------------------------

    def ended(self, answer: Answer) -> StateCopy | None:
        """Leave the planned checkpoint of the pass that ended; return the copy to make for it."""
        planned, answer.checkpoint = answer.checkpoint, None
        if planned is None or planned != answer.computed:
            return None
        groups = _groups(answer)
        if not groups.is_tail(planned):  # not worth writing to a store beside that of the end
            answer.trail.checkpoint = planned
        return groups.checkpoint(planned)

    def verified(self, answer: Answer) -> int:
        """Forget the mark before the drafts; return how many tokens are still computed."""
        groups = _groups(answer)
        groups.unmark()
        return groups.position


def _groups(answer: Answer) -> SequenceGroups:
    groups = answer.running_sequence.groups
    assert groups is not None
    return groups


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
                        answer.sequence.miss,
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


class Chunk(NamedTuple):
    """Tokens ``start`` … ``stop - 1`` of an answer's sequence, to be computed in this step.

    The last ``outputs`` of them need logits: none in the middle of a prompt.
    """

    answer: Answer
    start: int
    stop: int
    outputs: int


class PassPlanner:
    """Plans the passes over the running answers of a `Scheduler`.

    Thread safety: none. Cost of a step: O(running).
    """

    def __init__(
        self,
        scheduler: Scheduler,
        limits: Limits,
        passes: GroupPasses | None = None,
        *,
        offload: Offload | None = None,
    ) -> None:
        self._scheduler = scheduler
        self._limits = limits
        self._passes = passes  # None: every layer keeps every token
        self._offload = offload
        self.refused: list[Refused] = []
        """Answers that can never go on, although no other runs; the step ends and clears them."""

    def grow(self) -> list[Answer]:
        """Append the newest token and drafts to each decoding answer's sequence, oldest first.

        Preempts the youngest when pages run out. Returns answers that cannot grow although no
        other is left to preempt: they have reached their greatest length.
        """
        running = self._scheduler.running
        spare = self._limits.step_tokens - sum(answer.decoding for answer in running)
        stuck: list[Answer] = []
        position = 0
        while position < len(running):
            answer = running[position]
            if answer.pending or not self._is_prepared(answer):
                drafted = self._append(answer, spare)
                if drafted is None:
                    victim = running[-1]
                    if len(running) == 1:
                        stuck.append(answer)
                        position += 1
                    else:
                        self._scheduler.preempt(victim)
                    continue
                spare -= drafted
            position += 1
        return stuck

    def _is_prepared(self, answer: Answer) -> bool:
        """Whether nothing is left to do before the pass over the newest token."""
        return self._passes is None or not answer.decoding or self._passes.is_prepared(answer)

    def _append(self, answer: Answer, spare: int) -> int | None:
        """Append the newest token and drafts; return the number of drafts, None if out of pages.

        With groups of layers, also prepare their pass; a call that returned None may be repeated.
        """
        sequence, passes = answer.running_sequence, self._passes
        if answer.pending:
            newest = answer.generated[-1]
            if passes is not None:
                spare = passes.most_drafts(answer, spare)
            drafts = answer.propose(spare)
            # No answer is preempted for drafts: if they do not fit, it goes on without.
            if drafts and self._append_drafts(answer, newest, drafts):
                return len(drafts)
            try:
                sequence.append(newest)
            except OutOfPages:
                return None
        if passes is not None and answer.decoding:
            try:
                passes.prepare(answer, sequence.num_tokens)
            except OutOfPages:
                return None
        return 0

    def _append_drafts(self, answer: Answer, newest: int, drafts: list[int]) -> bool:
        """Append the newest token and ``drafts``; return False, with nothing done, without room."""
        sequence, passes = answer.running_sequence, self._passes
        before = sequence.num_tokens
        try:
            sequence.append([newest, *drafts])
        except OutOfPages:
            return False
        answer.drafts = drafts
        if passes is not None:
            try:
                passes.prepare(answer, sequence.num_tokens)
            except OutOfPages:
                answer.drafts = []
                sequence.truncate(before)
                passes.verified(answer)
                return False
        return True

    def chunks(self) -> list[Chunk]:
        """Return the chunks to compute: newest tokens of decoding answers, then prompts in order.

        A prompt that waits for its load is left out.
        """
        chunks: list[Chunk] = []
        prompts: list[Answer] = []
        budget = self._limits.step_tokens
        loading = set() if self._offload is None else self._offload.waiting(self._scheduler.running)
        for answer in self._scheduler.running:
            sequence = answer.running_sequence
            if not answer.decoding:
                if id(answer) not in loading:
                    prompts.append(answer)
            elif answer.computed < sequence.num_tokens:
                chunk = Chunk(answer, answer.computed, sequence.num_tokens, 1 + len(answer.drafts))
                chunks.append(chunk)
                budget -= chunk.stop - chunk.start
        for answer in prompts:
            if budget <= 0:
                break
            stop = min(answer.computed + budget, answer.num_tokens)
            if self._passes is not None:
                if answer.sequence is None:
                    continue  # preempted for one before it
                found = self._prepared(self._passes, answer, stop)
                if found is None:
                    continue
                stop = found
            outputs = 1 if stop == answer.num_tokens else 0
            chunks.append(Chunk(answer, answer.computed, stop, outputs))
            budget -= stop - answer.computed
        if self._passes is not None:  # some may have been preempted for older ones
            chunks = [chunk for chunk in chunks if chunk.answer.sequence is not None]
        return chunks

    def _prepared(self, passes: GroupPasses, answer: Answer, stop: int) -> int | None:
        """Prepare a pass of ``answer`` up to ``stop``, or a shorter one; return where it ends.

        For the shortest one, younger answers are preempted. None if there is no room; if no other
        answer runs that could leave some, it is refused.
        """
        stop = passes.stop(answer, stop)
        while True:
            try:
                passes.prepare(answer, stop)
            except OutOfPages as error:
                shorter = passes.shorter(answer, stop)
                if shorter is not None:
                    stop = shorter
                elif not self._scheduler.preempt_for(answer):
                    if len(self._scheduler.running) == 1:
                        self.refused.append(Refused(answer, error))
                    return None
            else:
                return stop
