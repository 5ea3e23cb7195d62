"""`simulate_loop`: a trace through `PagedCache`, on an engine that takes time to compute.

    arrive ──▶ queue ──admit──▶ prefill ──first token──▶ decode ──▶ end
                 ▲                 one at a time            │
                 └─────────────── pages are freed ◀─────────┘

It measures the effect of hits on users: seconds until the first token.
"""

from __future__ import annotations

import heapq
import time
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING

from kvkeep.bench.replay.jobs import RequestTimes, calls_of
from kvkeep.bench.replay.simulate import Stage
from kvkeep.core.errors import OutOfPages

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvkeep.bench.replay.jobs import Calls
    from kvkeep.bench.replay.outcome import Outcome
    from kvkeep.bench.replay.workload import Workload
    from kvkeep.core.cache import Sequence
    from kvkeep.core.cost import PrefillCost
    from kvkeep.core.eviction import EvictionPolicy
    from kvkeep.core.groups import GroupLayout

__all__ = ["simulate_loop"]


def simulate_loop(
    workload: Workload,
    capacity_tokens: int,
    policy: str | EvictionPolicy = "lru",
    *,
    cost: PrefillCost,
    page_tokens: int | None = None,
    users: int | None = None,
    groups: GroupLayout | None = None,
    progress: Callable[[int], None] | None = None,
) -> Outcome:
    """Replay ``workload`` through one pool of ``capacity_tokens``, with computing times.

    Requests arrive at their times in the trace, and queue. The first is admitted when no other
    prompt is being computed, fewer than 32 requests run, and the pool has pages for its prompt and
    answer. Computing the tokens that are not cached takes the
    time given by ``cost``; then the prompt is published, the first token is there, and the answer
    is generated beside others at ``cost``'s rate. The request holds its pages until it ends. A
    prompt larger than the pool is refused; an answer is cut at the end of the pool.

    With ``users`` each of the users goes through one session of the trace after the other (a closed
    loop): the next request of a session arrives after the end of the last, with the pause of the
    trace, so that a slow answer delays all that follows; `Jobs` says what sub-agents and their
    callers wait for. A request without a session is a session of its own.

    ``latency`` of the outcome has seconds of the requests that were not refused: ``ttft_s`` (from
    arrival to the first token), ``queue_s`` (to admission) and ``total_s`` (to the last token),
    each with mean, p50, p90 and p99; ``prefill_s``, the time of computing prompts, and
    ``saved_s``, the time that hits saved; ``span_s`` from the first arrival to the last end;
    ``utilisation``, the share of it spent on prompts. With sessions it also has ``jobs``, the
    number of jobs (a session with the sub-agents that it called), and for these, refused requests
    included, ``job_s``, from the first arrival to the last token. All else is as in `simulate`.

    Cost: about 50 µs per request more than `simulate`.
    """
    calls = calls_of(workload, users)
    begun = time.perf_counter()
    stage = Stage(
        workload,
        capacity_tokens,
        policy,
        page_tokens=page_tokens,
        groups=groups,
    )
    outcome = _Loop(stage, calls, cost).run(progress)
    outcome.seconds = time.perf_counter() - begun
    return outcome


# --- the engine ----------------------------------------------------------------------------------

# Events, in their order at equal times: pages are freed before others are admitted.
_ENDS, _COMPUTED, _ARRIVES = range(3)
_MAX_RUNNING = 32


class _Loop:
    """One replay. Each request arrives once; then it is refused, or computed and ended once."""

    def __init__(self, stage: Stage, calls: Calls, cost: PrefillCost) -> None:
        self._stage = stage
        self._work = stage.workload
        self._calls = calls
        self._cost = cost
        self._events = [(when, _ARRIVES, number) for when, number in calls.first()]
        heapq.heapify(self._events)
        self._queue: deque[int] = deque()
        self._running: dict[int, Sequence] = {}
        self._answered: dict[int, int] = {}  # length of a sequence with the known answer
        self._computing = False
        self._over = 0
        self._times = RequestTimes(len(self._work))

    def run(self, progress: Callable[[int], None] | None) -> Outcome:
        """Process events until none is left."""
        done = 0
        while self._events:
            now, kind, number = heapq.heappop(self._events)
            self._stage.watch.now = now
            if kind == _ARRIVES:
                self._times.came[number] = now
                self._queue.append(number)
            elif kind == _COMPUTED:
                self._computed(number, now)
            else:
                self._ended(number, now)
            if not self._events or self._events[0][:2] >= (now, _ARRIVES):
                self._admit(now)  # all events that free pages now are processed
            if progress is not None and self._over - done >= 100:
                done = self._over
                progress(done)
        assert not self._queue, "a request waits, but no event is left"
        assert not self._running, "a request runs, but no event is left"
        outcome = self._stage.done()
        outcome.latency = self._times.latency(self._work)
        return outcome

    def _admit(self, now: float) -> None:
        """Admit requests in order, as long as there is room."""
        while self._queue and not self._computing and len(self._running) < _MAX_RUNNING:
            number = self._queue[0]
            prompt, reserve = self._pages(number)
            if prompt > self._stage.pages - self._stage.reserved(number, state=True):
                self._stage.refuse(number)
                self._follow(number, now)
            else:
                try:
                    sequence, hit = self._stage.open(number, reserve)
                except OutOfPages:
                    # A request that fits into the pool has room when no other runs.
                    assert self._running, "an empty pool has room for one request"
                    return
                self._begin(number, now, sequence, hit)
            self._queue.popleft()

    def _pages(self, number: int) -> tuple[int, int]:
        """Return the pages of a prompt, and the further pages of its answer, cut at the pool."""
        size = self._stage.paging.size
        pages = self._stage.pages - self._stage.reserved(number, state=True)
        whole_units = self._stage.paging.whole_units(int(self._work.tokens[number]))
        prompt = -(-self._stage.length(number) // size)
        # A known answer follows the whole units; a page behind them may be another request's.
        begin = whole_units // size if len(self._work.answer(number)) else prompt
        end = -(-self._stage.length(number, answered=True) // size)
        return prompt, max(0, min(end - begin, pages - prompt))

    def _begin(self, number: int, now: float, sequence: Sequence, hit: int) -> None:
        if self._stage.paging.page_tokens is None:
            sequence.truncate(self._stage.length(number))  # frees the page of the padding token
        tokens = int(self._work.tokens[number])
        seconds = self._times.begin(number, now, self._cost, hit, tokens)
        self._running[number] = sequence
        self._computing = True
        heapq.heappush(self._events, (now + seconds, _COMPUTED, number))

    def _computed(self, number: int, now: float) -> None:
        """Publish the prompt and take the pages of the answer, which are held from now on."""
        stage, sequence = self._stage, self._running[number]
        keep = bool(self._work.store[number])
        stage.compute_prompt(number, sequence, publish=keep)
        # The pages were reserved on admission, and no request was admitted since. They are missing
        # only if the pool cannot hold them, or if others hold the pages behind the whole units.
        with suppress(OutOfPages):
            if len(self._work.answer(number)):
                self._answered[number] = stage.append_answer(number, sequence)
                stage.compute_answer(sequence, checkpoints=keep)
            stage.fill(number, sequence)
        self._computing = False
        self._times.first[number] = now
        seconds = self._cost.decode_s(int(self._work.output_tokens[number]))
        heapq.heappush(self._events, (now + seconds, _ENDS, number))

    def _ended(self, number: int, now: float) -> None:
        sequence = self._running.pop(number)
        answered = self._answered.pop(number, None)
        if answered is not None and self._work.store[number]:
            sequence.publish(answered)
        self._stage.close(number, sequence)
        self._stage.look()
        self._follow(number, now)

    def _follow(self, number: int, now: float) -> None:
        """End request ``number``, and let the requests that wait for its answer arrive."""
        self._over += 1
        self._times.last[number] = now
        for when, other in self._calls.after(number, now):
            heapq.heappush(self._events, (when, _ARRIVES, other))
