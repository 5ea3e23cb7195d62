"""`RequestChoices`: which stored blocks the requests of vLLM load, and which are computed."""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from typing import TYPE_CHECKING, Final

from kvkeep.integrations.load_choice import LoadChooser, StoredRun
from kvkeep.integrations.vllm.keys import keys_of
from kvkeep.integrations.vllm.messages import Probe

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import SchedulerOutput

    from kvkeep.core.cost import LearnedPrefill
    from kvkeep.integrations.vllm.groups import Groups
    from kvkeep.integrations.vllm.lookups import BlockLookups
    from kvkeep.integrations.vllm.messages import PageLoad, StepPlan, WorkerNews
    from kvkeep.integrations.vllm.requests import FollowedRequest
    from kvkeep.integrations.vllm.stats import Counts

__all__ = ["RequestChoices", "StepTimes"]

_LOG = logging.getLogger("kvkeep.vllm")
_PROBED: Final = 16  # blocks that a probe may read


_MOST: Final = 64  # steps under way that are remembered


class StepTimes:
    """Observes steps from when they are planned until their results are there.

    Where steps overlap, as vLLM plans one while another runs, a step counts from the end of the one
    before it. So nothing has to be synchronised. Only steps with tokens of prompts teach.

    Thread safety: none; it belongs to the scheduler's thread.
    """

    def __init__(
        self, prefill: LearnedPrefill, *, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._prefill = prefill
        self._clock = clock
        self._under_way: OrderedDict[int, tuple[float, tuple[tuple[int, int], ...]]] = OrderedDict()
        self._last_end = 0.0

    def planned(self, step: int, pieces: Iterable[tuple[int, int]]) -> None:
        """Note that ``step`` is planned; ``pieces`` are its tokens, if it is to teach.

        A piece is (start, stop) of one request.
        """
        self._under_way[step] = self._clock(), tuple(pieces)
        if len(self._under_way) > _MOST:
            self._under_way.popitem(last=False)

    def ended(self, step: int) -> None:
        """Note that the results of ``step`` are there; steps before it have ended, too."""
        now = self._clock()
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
