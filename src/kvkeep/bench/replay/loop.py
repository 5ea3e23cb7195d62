"""`simulate_loop`: a trace through the real `PagedCache` on an engine that takes its time.

    arrive ──▶ queue ──admit──▶ prefill ──first token──▶ decode ──▶ end
                 ▲                 one at a time            │
                 └────────── its pages are free again ◀─────┘

What a hit is worth here is what a user gets: seconds until the first token.
"""

from __future__ import annotations

import heapq
import time
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING

from kvkeep.bench.replay.calls import calls_of
from kvkeep.bench.replay.latency import RequestTimes
from kvkeep.bench.replay.simulate import Stage
from kvkeep.core.errors import OutOfPages, whole

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvkeep.bench.replay.calls import Calls
    from kvkeep.bench.replay.costs import PrefillCost
    from kvkeep.bench.replay.outcome import Outcome
    from kvkeep.bench.replay.workload import Workload
    from kvkeep.core.cache import Sequence
    from kvkeep.core.eviction import EvictionPolicy

__all__ = ["simulate_loop"]


def simulate_loop(
    workload: Workload,
    capacity_tokens: int,
    policy: str | EvictionPolicy = "lru",
    *,
    cost: PrefillCost,
    page_tokens: int | None = None,
    prefix: str = "radix",
    sessions: bool = False,
    max_running: int = 32,
    users: int | None = None,
    speed: float = 1.0,
    progress: Callable[[int], None] | None = None,
) -> Outcome:
    """Replay ``workload`` through one pool of ``capacity_tokens``, in the time that it would take.

    Requests come at their times in the trace, ``speed`` times as fast, and wait in line. Whoever
    is first is admitted when no other prompt is computed, fewer than ``max_running`` requests run,
    and there is room for its prompt and its answer; what is not cached of it then takes what
    ``cost`` says. It is published, the first token is there, and the answer goes on beside others
    at ``cost``'s pace. All pages are in use until it ends. A prompt that is larger than the pool
    is refused; an answer is cut where the pool ends.

    With ``users`` requests do not come at their times: so many users each go through one session
    of the trace after the other. The next request of a session comes after the one before has
    ended, and then as much later as it was in the trace (divided by ``speed``); a request that
    belongs to no session is one by itself.

    ``latency`` of the outcome has seconds, of requests that were not refused: ``ttft_s`` (from
    coming to the first token), ``queue_s`` (to being admitted) and ``total_s`` (to the last token),
    each with mean, p50, p90 and p99; ``prefill_s``, what was computed, and ``saved_s``, what hits
    saved; ``span_s`` from the first coming to the last end, of which prompts were computed for
    ``utilisation``; ``rows`` is a histogram of ``ttft_s``. Times in all else of the outcome are
    those of this clock. What is not told here is as in `simulate`.

    Cost: some 50 µs a request more than `simulate`.
    """
    whole("max_running", max_running, 1)
    calls = calls_of(workload, users, speed)
    begun = time.perf_counter()
    stage = Stage(
        workload,
        capacity_tokens,
        policy,
        page_tokens=page_tokens,
        prefix=prefix,
        sessions=sessions,
    )
    outcome = _Loop(stage, calls, cost, max_running).run(progress)
    outcome.seconds = time.perf_counter() - begun
    return outcome


# --- the engine ----------------------------------------------------------------------------------

# What happens, in this order where it is at one time: room is made before it is asked for.
_ENDED, _COMPUTED, _COMES = range(3)


class _Loop:
    """One replay. Each request comes once; then it is refused, or computed once and ends once."""

    def __init__(self, stage: Stage, calls: Calls, cost: PrefillCost, max_running: int) -> None:
        self._stage = stage
        self._work = stage.workload
        self._calls = calls
        self._cost = cost
        self._max_running = max_running
        self._events = [(when, _COMES, number) for when, number in calls.first()]
        heapq.heapify(self._events)
        self._queue: deque[int] = deque()
        self._running: dict[int, Sequence] = {}
        self._answered: dict[int, int] = {}  # how long a sequence is with what is known of it
        self._computing = False
        self._over = 0
        self._times = RequestTimes(len(self._work))

    def run(self, progress: Callable[[int], None] | None) -> Outcome:
        """Until nothing happens any more."""
        done = 0
        while self._events:
            now, kind, number = heapq.heappop(self._events)
            self._stage.watch.now = now
            if kind == _COMES:
                self._times.came[number] = now
                self._queue.append(number)
            elif kind == _COMPUTED:
                self._computed(number, now)
            else:
                self._ended(number, now)
            if not self._events or self._events[0][:2] >= (now, _COMES):
                self._admit(now)  # whatever ends now has made room
            if progress is not None and self._over - done >= 100:
                done = self._over
                progress(done)
        assert not self._queue, "somebody waits, and nothing will happen"
        assert not self._running, "somebody runs, and nothing will happen"
        outcome = self._stage.done()
        outcome.latency = self._times.latency()
        outcome.timeline = self._times.timeline()
        return outcome

    def _admit(self, now: float) -> None:
        """Let whoever is first begin, if it may."""
        while self._queue and not self._computing and len(self._running) < self._max_running:
            number = self._queue[0]
            prompt, reserve = self._pages(number)
            if prompt > self._stage.pages:
                self._stage.refuse(number)
                self._follow(number, now)
            else:
                try:
                    sequence, hit = self._stage.open(number, reserve)
                except OutOfPages:
                    # Alone, whatever is no larger than the pool has room.
                    assert self._running, "there is room for one"
                    return
                self._begin(number, now, sequence, hit)
            self._queue.popleft()
            outcome = self._stage.watch.outcome
            self._times.seen(now, outcome.blocks, outcome.hit_blocks)

    def _pages(self, number: int) -> tuple[int, int]:
        """Of its prompt, and how many more its answer takes; an answer is cut at the pool's end."""
        size, pages = self._stage.paging.size, self._stage.pages
        whole_units = self._stage.paging.whole_units(int(self._work.tokens[number]))
        prompt = -(-self._stage.length(number) // size)
        # A known answer follows the whole units; what is behind them may stay another's.
        begin = whole_units // size if len(self._work.answer(number)) else prompt
        end = -(-self._stage.length(number, answered=True) // size)
        return prompt, max(0, min(end - begin, pages - prompt))

    def _begin(self, number: int, now: float, sequence: Sequence, hit: int) -> None:
        if self._stage.paging.page_tokens is None:
            sequence.truncate(self._stage.length(number))  # nobody's token gives its page back
        tokens, cost, times = int(self._work.tokens[number]), self._cost, self._times
        # The last token is computed in any case: it is what the answer follows.
        seconds = cost.prefill_s(min(hit, tokens - 1), tokens)
        times.began[number] = now
        times.prefill[number] = seconds
        times.saved[number] = cost.prefill_s(0, tokens) - seconds
        self._running[number] = sequence
        self._computing = True
        heapq.heappush(self._events, (now + seconds, _COMPUTED, number))

    def _computed(self, number: int, now: float) -> None:
        """The prompt can be reused, and the answer begins: all its pages are in use from now on."""
        stage, sequence = self._stage, self._running[number]
        if self._work.store[number]:
            stage.publish(number, sequence)
        # There is room: it was asked for at first, and nobody began since. But for what the pool
        # cannot hold, and where others have what lies behind the whole units.
        with suppress(OutOfPages):
            if len(self._work.answer(number)):
                self._answered[number] = stage.append_answer(number, sequence)
            stage.fill(number, sequence)
        self._computing = False
        self._times.first[number] = now
        seconds = self._cost.decode_s(int(self._work.output_tokens[number]))
        heapq.heappush(self._events, (now + seconds, _ENDED, number))

    def _ended(self, number: int, now: float) -> None:
        sequence = self._running.pop(number)
        answered = self._answered.pop(number, None)
        keep = bool(self._work.store[number])
        if keep and answered is not None:
            sequence.publish(answered)
        sequence.close(keep=keep)
        self._follow(number, now)

    def _follow(self, number: int, now: float) -> None:
        """Request ``number`` is over: who comes next?"""
        self._over += 1
        self._times.last[number] = now
        following = self._calls.after(number, now)
        if following is not None:
            when, other = following
            heapq.heappush(self._events, (when, _COMES, other))
