"""Lookups of a request's blocks, some of which take longer than a step of the scheduler."""

from __future__ import annotations

import logging
import time
from collections import OrderedDict, deque
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from kvkeep.integrations.load_choice import LoadChooser, LookupPatience, StoredRun
from kvkeep.integrations.options import LOOKUP_S
from kvkeep.integrations.vllm.content import Adapters
from kvkeep.integrations.vllm.groups import BlockReach, keys_of, whole_hashes
from kvkeep.integrations.vllm.kept import log_fault
from kvkeep.integrations.vllm.messages import BlockSpan, Probe, RankLookup, Save

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

    from kvkeep.core.cost import LearnedPrefill
    from kvkeep.integrations.load_choice import LoadDecision, RunCost
    from kvkeep.integrations.vllm.groups import Groups
    from kvkeep.integrations.vllm.kept import SharedStore
    from kvkeep.integrations.vllm.messages import PageLoad, StepPlan, WorkerNews
    from kvkeep.integrations.vllm.options import RequestOptions
    from kvkeep.integrations.vllm.stats import Counts

__all__ = ["BlockLookups", "FollowedRequest", "RequestChoices"]


_THREADS = 4
_RANKS_S = 5.0  # for the answer of workers, which comes with the end of a step


@dataclass(slots=True)
class PendingLookup:
    """A lookup of the blocks ``first`` … ``limit - 1`` that takes longer than one step.

    ``result`` is how far a request is stored, once it is known, and ``runs`` what loading it takes,
    if workers told; ``message`` is the last question to the workers. It is waited for until
    ``until`` (monotonic seconds).
    """

    first: int
    limit: int
    since: float
    until: float
    number: int = 0
    future: Future[BlockReach] | None = None
    message: RankLookup | None = None
    covered: int | None = None
    result: BlockReach | None = None
    runs: Sequence[RunCost] = ()

    def drop(self) -> None:
        """Forget the thread's answer; if no thread has begun, none will."""
        if self.future is not None:
            self.future.cancel()
            self.future = None


class BlockLookups:
    """Finds how far requests are stored.

    With the store in the same process, known blocks are found at once, and threads query shared
    tiers. Otherwise the workers look them up, with the plan of the next step.

    Thread safety: none; it belongs to the scheduler's thread.
    """

    def __init__(
        self,
        groups: Groups,
        shared: SharedStore | None,
        counts: Counts,
        *,
        ranks: int,
    ) -> None:
        self._groups = groups
        self._shared = shared
        self._counts = counts
        self._ranks = ranks
        self._patience = LookupPatience(LOOKUP_S)
        self._answers: deque[tuple[float, float]] = deque()  # seconds and share of each, by threads
        self._threads = ThreadPoolExecutor(_THREADS, "kvkeep lookup")
        self._number = 0
        self._pending: dict[int, PendingLookup] = {}  # lookups by workers, by number
        self._found: dict[int, list[BlockReach]] = {}  # by number, the results of ranks so far
        self._messages: list[RankLookup] = []

    def reach(
        self, followed: FollowedRequest, first: int, limit: int, saves_s: float | None = None
    ) -> BlockReach | None:
        """Return how far the request is stored; None: not known yet.

        Loading all of it would save ``saves_s``; None: that is unknown. After
        `LOOKUP_S`, or when waiting takes longer than it brings, returns how far it is known to be
        stored.
        """
        while self._answers:
            self._patience.answered(*self._answers.popleft())
        lookup = followed.lookup
        if lookup is None or (lookup.first, lookup.limit) != (first, limit):
            hashes = followed.hashes(0, limit)
            if self._shared is not None:
                self._shared.delete_expired()
                known = self._groups.reach(hashes, first, self._shared.knows)
                if known.end == limit or not self._shared.must_ask:
                    return known
                patience = self._patience.seconds(saves_s)
                if not patience and not self._patience.due():
                    self._counts.add(skipped_lookups=1)
                    return known
            else:  # every lookup is one of workers, and most of its time is that of a step
                patience = _RANKS_S
            lookup = followed.lookup = self._start(followed, hashes, first, limit)
            lookup.until = lookup.since + patience
        if lookup.future is not None and lookup.future.done():
            failed = lookup.future.exception() is not None
            lookup.result = BlockReach(first, first) if failed else lookup.future.result()
        if lookup.result is not None:
            return lookup.result
        if time.monotonic() < lookup.until:
            return None
        if lookup.until > lookup.since:
            self._counts.add(late_lookups=1)
            lookup.drop()
        else:  # it goes on, to see what lookups take now
            self._counts.add(skipped_lookups=1)
            lookup.future = None
        lookup.result = BlockReach(first, first)
        if self._shared is not None:
            hashes = followed.hashes(0, limit)
            lookup.result = self._groups.reach(hashes, first, self._shared.knows)
        return lookup.result

    def runs(self, followed: FollowedRequest, first: int, end: int) -> Sequence[RunCost]:
        """Return what loading the blocks ``first`` … ``end - 1`` of the request takes, in pieces.

        Empty if that is not known.
        """
        if self._shared is not None:
            return self._shared.runs(followed.hashes(0, end), first, end)
        runs = () if followed.lookup is None else followed.lookup.runs
        return [run._replace(end=min(run.end, end)) for run in runs if run.end > first]

    def _start(
        self, followed: FollowedRequest, hashes: Sequence[bytes], first: int, limit: int
    ) -> PendingLookup:
        now = time.monotonic()
        lookup = PendingLookup(first, limit, now, now)
        if self._shared is not None:
            lookup.future = self._threads.submit(self._query, self._shared, list(hashes), first)
            lookup.future.add_done_callback(log_fault)
            return lookup
        self._number += 1
        lookup.number = self._number
        self._pending[lookup.number] = lookup
        self._ask(
            lookup, RankLookup(followed.request.request_id, lookup.number, first, list(hashes))
        )
        return lookup

    def _ask(self, lookup: PendingLookup, message: RankLookup) -> None:
        lookup.message = message
        self._messages.append(message)

    def _query(self, shared: SharedStore, hashes: list[bytes], first: int) -> BlockReach:
        """In a thread: look the blocks up, in shared tiers too."""
        began, found = time.monotonic(), first
        until = began + LOOKUP_S

        def count(keys: list[bytes]) -> int:
            return shared.lookup(keys, max(0.0, until - time.monotonic()))

        try:
            reach = self._groups.reach(hashes, first, count)
            found = reach.end
            return reach
        finally:
            share = (found - first) / max(1, len(hashes) - first)
            self._answers.append((time.monotonic() - began, share))
            shared.news.set()

    def take_messages(self) -> list[RankLookup]:
        """Return and forget the lookups that were not yet sent to the workers."""
        messages, self._messages = self._messages, []
        return messages

    def receive(self, results: WorkerNews) -> None:
        """Take results of workers; a block counts as stored if all ranks have it."""
        for number, found in results.found.items():
            lookup = self._pending.get(number)
            if lookup is None:
                continue
            all_found = self._found.setdefault(number, [])
            all_found += found
            lookup.runs = max([lookup.runs, *results.runs.get(number, ())], key=_total_s)
            if len(all_found) < self._ranks:
                continue
            end = min(reach.end for reach in all_found)
            if lookup.covered is None:
                lookup.covered = min(reach.covered for reach in all_found)
            differ = any(reach.end != end for reach in all_found)
            if differ and end > lookup.first and not self._groups.resumes_anywhere:
                # The other ranks may have no window or state there: all are asked again.
                del self._found[number]
                message = lookup.message
                assert message is not None
                hashes = message.hashes[:end]
                lookup.runs = ()
                self._ask(lookup, RankLookup(message.request, number, lookup.first, hashes))
                continue
            lookup.result = BlockReach(end, max(end, lookup.covered))
            self.forget(lookup)

    def forget(self, lookup: PendingLookup) -> None:
        """Ignore later results of a lookup."""
        self._pending.pop(lookup.number, None)
        self._found.pop(lookup.number, None)
        lookup.drop()

    def close(self) -> None:
        """Cancel the lookups that have not begun."""
        self._threads.shutdown(wait=False, cancel_futures=True)


def _total_s(runs: Sequence[RunCost]) -> float:
    return sum(run.seconds or 0.0 for run in runs)


@dataclass(slots=True)
class FollowedRequest:
    """A request, from its arrival until vLLM has finished it.

    Attributes:
        adapter: digest of its LoRA weights.
        public: the hashes of its leading blocks in a public prefix, in place of vLLM's.
        saved: number of leading blocks that were considered for saving.
        loaded: number of preemptions before the last load; -1: never loaded.
        hit: the blocks, from … to, last reported to vLLM as loadable.
        local: tokens in vLLM's own prefix cache at its last lookup.
        placed: the step in which the request got its pages; -1: none.
        judged: number of complete blocks when it was last decided which of them to save.
        held: the step until which none of its blocks are saved.
        ran: number of preemptions when it ran last; -1: it never did.
        states: the ends of blocks at which it had states that were saved or loaded.
        lookup: the pending lookup, if any.
        choice: what to load of what was last found, if that was compared with computing.
        found: the block up to which it was last found.
        began: whether it ever had pages.
    """

    request: Request
    options: RequestOptions
    adapter: bytes | None = None
    public: Sequence[bytes] = ()
    saved: int = 0
    judged: int = 0
    loaded: int = -1
    hit: tuple[int, int] = (0, 0)
    local: int = 0
    placed: int = -1
    held: int = 0
    ran: int = -1
    states: set[int] = field(default_factory=set)
    lookup: PendingLookup | None = None
    choice: LoadDecision | None = None
    found: int = 0
    began: bool = False

    def forget_store(self) -> None:
        """Forget what of the request is stored: everything was deleted."""
        self.lookup = None
        self.saved = self.judged = 0
        self.states.clear()

    def hashes(self, first: int, end: int) -> Sequence[bytes]:
        """Return the hashes of these blocks, with the digest of the LoRA weights mixed in."""
        hashes: Sequence[bytes] = self.request.block_hashes[first:end]
        public = self.public[first : first + len(hashes)]
        if public:
            hashes = [*public, *whole_hashes(hashes[len(public) :])]
        return hashes if self.adapter is None else Adapters.mixed(hashes, self.adapter)

    def saves(self, spans: list[BlockSpan]) -> list[Save]:
        """Return what to save of ``spans``. Public blocks are all tenants', so they have no ttl."""
        ttl = self.options.ttl
        if ttl is None or not self.public:
            return [Save(spans, ttl)] if spans else []
        saves = []
        for span in spans:
            shared = {*keys_of(self.hashes(0, len(self.public)), span.group)}
            public = [at for at, key in enumerate(span.keys) if key in shared]
            private = [at for at, key in enumerate(span.keys) if key not in shared]
            if public:
                saves.append(Save([span.only(public)]))
            if private:
                saves.append(Save([span.only(private)], ttl))
        return saves


_LOG = logging.getLogger("kvkeep.vllm")
_PROBED: Final = 16  # blocks that a probe may read


_MOST: Final = 64  # steps under way that are remembered


class StepTimes:
    """Observes steps from when they are planned until their results are there.

    Where steps overlap, as vLLM plans one while another runs, a step counts from the end of the one
    before it. So nothing has to be synchronised. Only steps with tokens of prompts teach.

    Thread safety: none; it belongs to the scheduler's thread.
    """

    def __init__(self, prefill: LearnedPrefill) -> None:
        self._prefill = prefill
        self._under_way: OrderedDict[int, tuple[float, tuple[tuple[int, int], ...]]] = OrderedDict()
        self._last_end = 0.0

    def planned(self, step: int, pieces: Iterable[tuple[int, int]]) -> None:
        """Note that ``step`` is planned; ``pieces`` are its tokens, if it is to teach.

        A piece is (start, stop) of one request.
        """
        self._under_way[step] = time.perf_counter(), tuple(pieces)
        if len(self._under_way) > _MOST:
            self._under_way.popitem(last=False)

    def ended(self, step: int) -> None:
        """Note that the results of ``step`` are there; steps before it have ended, too."""
        now = time.perf_counter()
        while self._under_way:
            number, (planned, pieces) = next(iter(self._under_way.items()))
            if number > step:
                break
            del self._under_way[number]
            if number == step:
                if pieces:
                    self._prefill.observe(pieces, now - max(planned, self._last_end))
                self._last_end = now


class RequestChoices:
    """Compares loading with computing, for the scheduler's side.

    Learns the cost of computing from steps, and the speed of tiers from what workers tell. Loads
    under way share the tiers, and prompts that are being computed the engine: a request waits for
    both.

    Thread safety: none; it belongs to the scheduler's thread. Cost: a microsecond for each request
    that is followed, once a step in which something is found.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        prefill: LearnedPrefill,
        groups: Groups,
        lookups: BlockLookups,
        counts: Counts,
    ) -> None:
        pass_tokens = vllm_config.scheduler_config.max_num_batched_tokens
        self._chooser = LoadChooser(prefill, pass_tokens=pass_tokens)
        self._steps = StepTimes(prefill)
        self._always_timed = vllm_config.max_concurrent_batches > 1
        self._groups = groups
        self._lookups = lookups
        self._counts = counts
        self._loading: dict[str, tuple[float, float]] = {}  # request → its begin, and expected end
        self._ahead: float | None = None  # seconds of computing that requests with pages wait for

    # --- choices ---------------------------------------------------------------------------------

    def saves_s(self, tokens: int, computed: int, limit: int) -> float | None:
        """Return the seconds that loading a prompt up to block ``limit`` saves; None: unknown."""
        return self._chooser.saves_s(computed, limit * self._groups.block_tokens, tokens)

    def best_end(
        self,
        followed: FollowedRequest,
        computed: int,
        first: int,
        end: int,
        others: Mapping[str, FollowedRequest],
    ) -> int:
        """Return the block up to which to load the found ones, ``first`` … ``end - 1``."""
        size = self._groups.block_tokens
        runs = self._lookups.runs(followed, first, end)
        if not runs:
            return end
        if self._ahead is None:
            self._ahead = sum(map(self._compute_s, others.values()))
        now = time.monotonic()
        last = max((ends for _, ends in self._loading.values()), default=now)
        choice = self._chooser.choose(
            computed,
            followed.request.num_tokens,
            [StoredRun(run.end * size, run.tier, run.seconds, run.error) for run in runs],
            divisible=self._groups.resumes_anywhere,
            compute_free_s=self._ahead,
            load_free_s=max(0.0, last - now),
        )
        followed.choice, followed.found = choice, end
        return max(first, choice.tokens // size)

    def _compute_s(self, followed: FollowedRequest) -> float:
        """Return the seconds until the prompt of a request is computed, if vLLM is at it."""
        request = followed.request
        if followed.placed < 0 or request.request_id in self._loading:
            return 0.0
        there = max(request.num_computed_tokens, followed.local)
        if there >= request.num_prompt_tokens:
            return 0.0
        return self._chooser.compute_s(there, request.num_prompt_tokens)

    def placed(self, followed: FollowedRequest, external: int, plan: StepPlan) -> None:
        """Count what a request that has pages now does not load, and begin a probe if one is due.

        ``external`` tokens are loaded.
        """
        choice, followed.choice = followed.choice, None
        if not external and self._ahead is not None:
            self._ahead += self._compute_s(followed)
        if choice is None:
            return
        request, size = followed.request, self._groups.block_tokens
        begin = (followed.local + external) // size
        tokens = min(followed.found * size, request.num_tokens - 1) - begin * size
        if not choice.refused or tokens <= 0:
            followed.choice = choice if external else None
            return
        self._counts.add(slower_requests=1, slower_tokens=tokens)
        _LOG.debug(
            "request %s computes %d stored tokens: loading all that is stored of it would take "
            "%.1f ms, computing %.1f ms",
            request.request_id, tokens, choice.load_s * 1e3, choice.compute_s * 1e3,
        )  # fmt: skip
        if self._chooser.take_probe(choice.refused):
            end = min(followed.found, begin + _PROBED)
            group = self._groups.counted
            keys = keys_of(followed.hashes(begin, end), group)
            plan.probes.append(Probe(choice.refused, group, keys))
        followed.choice = choice if external else None

    def loading(self, followed: FollowedRequest, load: PageLoad) -> None:
        """Bound a load that is planned now."""
        choice, followed.choice = followed.choice, None
        now = time.monotonic()
        expected = 0.0 if choice is None else choice.load_s
        self._loading[load.request] = now, now + expected
        if choice is not None:
            load.patience, load.compute_s = choice.patience, choice.compute_s

    def finished(self, request: str) -> None:
        """Forget a request that has ended."""
        self._loading.pop(request, None)

    # --- steps -----------------------------------------------------------------------------------

    def planned(
        self, step: int, output: SchedulerOutput, followed: Mapping[str, FollowedRequest]
    ) -> bool:
        """Note that a step is planned; return whether its end has to be reported."""
        self._ahead = None
        pieces, prompts = [], False
        for request_id, scheduled in output.num_scheduled_tokens.items():
            one = followed.get(request_id)
            if one is None:
                prompts = False  # of one that is not followed, nothing is known
                break
            start = one.request.num_computed_tokens
            pieces.append((start, start + scheduled))
            prompts |= start < one.request.num_prompt_tokens
        self._steps.planned(step, pieces if prompts else ())
        return bool(pieces) and (prompts or self._always_timed)

    def receive(self, news: WorkerNews) -> None:
        """Learn from what workers tell."""
        if news.step >= 0:
            self._steps.ended(news.step)
        for request, end in news.loads.items():
            begun = self._loading.pop(request, None)
            if end.failed:
                self._chooser.came_late(end.failed)
            elif begun is not None:
                self._chooser.handed_over(max(0.0, time.monotonic() - begun[0] - end.seconds))
        for probe in news.probes:
            self._chooser.probed(
                probe.tier, probe.seconds, in_time=probe.came, expected=probe.expected
            )
