"""Which chunks of a request are stored.

vLLM asks about one chunk at a time, and again in every step. The first question of a step is
answered for all chunks behind it, too, so that the others cost a look into a dict.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Final

from vllm.v1.kv_offload.base import LookupResult

from kvkeep.core.errors import KVKeepError
from kvkeep.integrations.load_choice import LoadChooser, ProbeEnd, StoredRun, TimedLoads
from kvkeep.integrations.options import LOOKUP_S
from kvkeep.integrations.vllm.kept import log_fault
from kvkeep.integrations.vllm.offload.requests import PendingQuery, QueryAnswer, group_of

if TYPE_CHECKING:
    import threading
    from collections.abc import Collection, Mapping, Sequence

    from vllm.config import VllmConfig
    from vllm.v1.kv_offload.base import OffloadKey, ReqContext

    from kvkeep.core.cost import LearnedPrefill
    from kvkeep.integrations.vllm.kept import OpenStore
    from kvkeep.integrations.vllm.offload.requests import TierRequest
    from kvkeep.integrations.vllm.stats import Counts

__all__ = ["ChunkChoices", "ChunkLookups"]


_THREADS = 4


class ChunkLookups:
    """Finds the stored chunks of requests. Known ones are found at once; threads ask shared tiers.

    ``whole`` are the groups whose layers see all tokens: there no chunk is of use without all
    before it. ``chunk_tokens`` are the tokens of a chunk, by group. ``news`` is set when an answer
    has come. ``choices`` compares loading with computing; without, all that is stored is loaded.

    Thread safety: none; it belongs to the scheduler's thread. Cost: below a microsecond a chunk.
    """

    def __init__(
        self,
        store: OpenStore,
        counts: Counts,
        *,
        whole: frozenset[int],
        chunk_tokens: Mapping[int, int],
        news: threading.Event,
        choices: ChunkChoices | None = None,
    ) -> None:
        self._choices = choices
        self._store = store
        self._counts = counts
        self._whole = whole
        self._chunk_tokens = chunk_tokens
        self._news = news
        self._threads = ThreadPoolExecutor(_THREADS, "kvkeep lookup")
        self._step = 0

    def next_step(self) -> None:
        """Forget all results: in the next step more, or less, may be stored."""
        self._step += 1

    def find(self, request: TierRequest, key: OffloadKey, ctx: ReqContext) -> LookupResult:
        """Return whether a chunk is stored; RETRY while shared tiers are asked."""
        if request.step != self._step:
            request.step = self._step
            request.found = dict.fromkeys(request.failed, LookupResult.MISS)
            if request.queries:
                self._take_answers(request)
        result = request.found.get(key)
        if result is None:
            self._look(request, key, ctx)
            result = request.found[key]
        return result

    def _look(self, request: TierRequest, key: OffloadKey, ctx: ReqContext) -> None:
        """Find results for ``key`` and for chunks behind it, for all if its group has a window."""
        group, found = group_of(key), request.found
        tokens = self._chunk_tokens.get(group, 0)
        end = ctx.get_offload_key_position(key)
        keys = request.chunks(ctx, group, tokens) if tokens and end is not None else []
        at = end // tokens - 1 if keys and end is not None else 0
        if not 0 <= at < len(keys) or keys[at] != key:
            keys, at = [key], 0  # one inside a chunk, or a vLLM that names no others
        if group not in self._whole:
            self._look_at_each(request, keys, group)
        else:
            self._look_ahead(request, keys[at:], group, at)
        for failed in request.failed:
            if failed in found:
                found[failed] = LookupResult.MISS

    def _look_ahead(
        self, request: TierRequest, keys: list[OffloadKey], group: int, first: int
    ) -> None:
        """Find results for ``keys``, up to the first that is missing, or not worth loading.

        ``first`` is the number of the first one.
        """
        blocks = request.names(keys, group)
        count = self._store.knows(blocks)
        while count < len(blocks) and blocks[count] in request.answered:
            count += 1
        tokens = self._chunk_tokens.get(group, 0)
        if count and self._choices is not None and tokens:
            worth = self._choices.worth(request, blocks[:count], group, first)
            if worth < count:
                request.found.update(dict.fromkeys(keys[:worth], LookupResult.HIT))
                request.found.update(dict.fromkeys(keys[worth:], LookupResult.MISS))
                return
        request.found.update(dict.fromkeys(keys[:count], LookupResult.HIT))
        if count == len(keys):
            return
        result = self._unknown(request, blocks[count:], first_missing_ends=True)
        if result is LookupResult.RETRY:
            request.found.update(dict.fromkeys(keys[count:], result))
        else:
            request.found[keys[count]] = result

    def _look_at_each(self, request: TierRequest, keys: list[OffloadKey], group: int) -> None:
        """Find results for all of ``keys``."""
        blocks = request.names(keys, group)
        found = request.found
        found.update(dict.fromkeys(keys, LookupResult.HIT))
        unknown = [at for at in self._store.unknown(blocks) if blocks[at] not in request.answered]
        if unknown:
            result = self._unknown(
                request, [blocks[at] for at in unknown], first_missing_ends=False
            )
            found.update(dict.fromkeys([keys[at] for at in unknown], result))

    def _unknown(
        self, request: TierRequest, blocks: list[bytes], *, first_missing_ends: bool
    ) -> LookupResult:
        """Return what to say of ``blocks``, none of which is known; ask shared tiers about them."""
        if any(blocks[0] in query.blocks for query in request.queries):
            return LookupResult.RETRY
        new = [block for block in blocks if block not in request.asked]
        if blocks[0] in request.asked or not new or not self._store.must_ask:
            return LookupResult.MISS
        request.asked.update(new)
        future = self._threads.submit(self._query, new, first_missing_ends=first_missing_ends)
        future.add_done_callback(log_fault)
        request.queries.append(PendingQuery(frozenset(new), time.monotonic(), future))
        return LookupResult.RETRY

    def _query(self, blocks: list[bytes], *, first_missing_ends: bool) -> QueryAnswer:
        """In a thread: find those of ``blocks`` that are stored, in shared tiers too."""
        began, found = time.monotonic(), blocks[:0]
        try:
            if first_missing_ends:
                found = blocks[: self._store.lookup(blocks, LOOKUP_S)]
            else:
                there = self._store.lookup_each(blocks, LOOKUP_S)
                found = [block for block, stored in zip(blocks, there, strict=True) if stored]
        except KVKeepError:
            pass
        finally:
            self._news.set()
        return QueryAnswer(found, time.monotonic() - began >= LOOKUP_S)

    def _take_answers(self, request: TierRequest) -> None:
        """Take the answers that came; give up queries that take longer than `LOOKUP_S`."""
        waiting = []
        for query in request.queries:
            if query.future.done():
                if query.future.exception() is None:
                    answer = query.future.result()
                    request.answered.update(answer.found)
                    self._counts.add(late_lookups=int(answer.late))
            elif time.monotonic() - query.since < LOOKUP_S:
                waiting.append(query)
            else:
                query.future.cancel()  # if no thread has begun it
                self._counts.add(late_lookups=1)
        request.queries = waiting

    def forget(self, request: TierRequest) -> None:
        """Cancel the queries of a request that has ended, unless they have begun."""
        for query in request.queries:
            query.future.cancel()
        request.queries = []

    def close(self) -> None:
        """Cancel the queries that have not begun."""
        self._threads.shutdown(wait=False, cancel_futures=True)


_LOG = logging.getLogger("kvkeep.vllm")
_PROBED: Final = 16  # chunks that a probe may read


class ScheduleTimes:
    """Observes steps of which only the plans are seen.

    vLLM plans a step as soon as the one that is ``ahead`` steps before it has ended. So what passed
    between the last two plans is what that step took, as long as there was always something to do:
    some request of it goes on. What a step computed is what its requests have more in the next one.

    Thread safety: none; it belongs to the scheduler's thread.
    """

    def __init__(self, prefill: LearnedPrefill, ahead: int) -> None:
        self._prefill = prefill
        self._plans: deque[Mapping[str, tuple[int, int]]] = deque(maxlen=ahead + 1)
        self._ahead = ahead
        self._last = 0.0

    def planned(self, places: Mapping[str, tuple[int, int]]) -> None:
        """Note that a step is planned.

        ``places`` are the tokens that each request at work has before it, and those of its prompt.
        """
        now = time.perf_counter()
        took, self._last = now - self._last, now
        self._plans.append(places)
        if len(self._plans) <= self._ahead:
            return
        before, after = self._plans[0], self._plans[1]
        pieces = [
            (start, after[request][0])
            for request, (start, _) in before.items()
            if request in after and after[request][0] > start
        ]
        prompts = any(start < before[one][1] for one, (start, _) in before.items())
        # One that is not there any more may have been computed as well: then too little is known.
        if pieces and prompts and len(pieces) == len(before) and places:
            self._prefill.observe(pieces, took)


class ChunkChoices:
    """Compares loading with computing, for a tier below vLLM's offloading.

    vLLM tells a tier neither what a step computes nor what it takes: both are seen in the requests
    that the connector follows. ``divisible``: part of what is stored is of use.

    Thread safety: none; it belongs to the scheduler's thread. Cost: a microsecond for each request
    in a step.
    """

    def __init__(
        self,
        store: OpenStore,
        config: VllmConfig,
        counts: Counts,
        *,
        sizes: Mapping[int, int],
        chunk_tokens: Mapping[int, int],
        divisible: bool,
    ) -> None:
        self._store = store
        self._counts = counts
        self._sizes = sizes
        self._chunk_tokens = chunk_tokens
        self._divisible = divisible
        self._costs = TimedLoads(store.store)
        self._chooser = LoadChooser(
            self._costs.cost.prefill,
            pass_tokens=config.scheduler_config.max_num_batched_tokens,
        )
        self._times = ScheduleTimes(self._costs.cost.prefill, config.max_concurrent_batches)
        self._prober = ThreadPoolExecutor(1, "kvkeep probe")
        self._probed: deque[ProbeEnd] = deque()
        self._ahead = 0.0  # seconds of computing that requests at work wait for

    def worth(self, request: TierRequest, names: Sequence[bytes], group: int, at: int) -> int:
        """Return how many of the stored chunks ``names``, from the request's chunk ``at`` on, pay.

        The others are computed sooner than they are loaded.
        """
        tokens = self._chunk_tokens[group]
        start = at * tokens
        runs = self._costs.runs(names, [self._sizes[group]] * len(names))
        known = request.request
        length = start + len(names) * tokens + 1 if known is None else known.num_tokens
        choice = self._chooser.choose(
            start,
            length,
            [StoredRun(start + run.end * tokens, *run[1:]) for run in runs],
            divisible=self._divisible,
            compute_free_s=self._ahead,
        )
        count = max(0, choice.tokens - start) // tokens
        request.patience, request.compute_s = choice.patience, choice.compute_s
        request.slower = None
        if count < len(names):
            request.slower = (choice.refused, (len(names) - count) * tokens)
            request.refused = (group, list(names[count : count + _PROBED]))
        return count

    def step(self, live: Mapping[str, TierRequest], begun: Collection[str]) -> None:
        """End a step; ``begun`` are the requests that are computed for the first time in it."""
        while self._probed:
            end = self._probed.popleft()
            self._chooser.probed(end.tier, end.seconds, in_time=end.came, expected=end.expected)
        for request_id in begun:
            request = live.get(request_id)
            if request is not None and request.slower is not None:
                self._refused(request)
        self._ahead, places = 0.0, {}
        for request_id, request in live.items():
            found = request.request if request.computed else None
            if found is not None:
                there, prompt = found.num_computed_tokens, found.num_prompt_tokens
                places[request_id] = there, prompt
                if there < prompt:
                    self._ahead += self._chooser.compute_s(there, prompt)
        self._times.planned(places)

    def _refused(self, request: TierRequest) -> None:
        """Count what a request does not load, and begin a probe if one is due."""
        assert request.slower is not None
        tier, tokens = request.slower
        request.slower = None
        self._counts.add(slower_requests=1, slower_tokens=tokens)
        if self._chooser.take_probe(tier):
            self._prober.submit(self._probe, tier, *request.refused).add_done_callback(log_fault)

    def _probe(self, tier: str, group: int, names: Sequence[bytes]) -> None:
        """In a thread: read a few chunks, for no request."""
        end = ProbeEnd(tier, 0.0, 0.0, came=False)
        try:
            end = self._costs.probe(tier, names, [self._sizes[group]] * len(names))
        except KVKeepError as error:
            _LOG.warning("a probe of %s failed: %s", tier, error)
        finally:
            self._probed.append(end)

    def came_late(self, tier: str) -> None:
        """Note that a load from ``tier`` ended late: others wait for a probe."""
        self._chooser.came_late(tier)

    def close(self) -> None:
        """Begin no more probes."""
        self._prober.shutdown(wait=False, cancel_futures=True)
