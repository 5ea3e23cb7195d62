"""`ChunkChoices`: which of a request's stored chunks are worth loading, and which are computed."""

from __future__ import annotations

import logging
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Final

from kvkeep.core.errors import KVKeepError
from kvkeep.integrations.load_choice import LoadChooser, StoredRun
from kvkeep.integrations.load_costs import ProbeEnd, TimedLoads
from kvkeep.integrations.vllm.kept import log_fault

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from vllm.config import VllmConfig

    from kvkeep.core.cost import LearnedPrefill
    from kvkeep.integrations.vllm.kept import OpenStore
    from kvkeep.integrations.vllm.offload.requests import TierRequest
    from kvkeep.integrations.vllm.stats import Counts

__all__ = ["ChunkChoices", "ScheduleTimes"]

_LOG = logging.getLogger("kvkeep.vllm")
_PROBED: Final = 16  # chunks that a probe may read


class ScheduleTimes:
    """Observes steps of which only the plans are seen.

    vLLM plans a step as soon as the one that is ``ahead`` steps before it has ended. So what passed
    between the last two plans is what that step took, as long as there was always something to do:
    some request of it goes on. What a step computed is what its requests have more in the next one.

    Thread safety: none; it belongs to the scheduler's thread.
    """

    def __init__(
        self,
        prefill: LearnedPrefill,
        ahead: int,
        *,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._prefill = prefill
        self._clock = clock
        self._plans: deque[Mapping[str, tuple[int, int]]] = deque(maxlen=ahead + 1)
        self._ahead = ahead
        self._last = 0.0

    def planned(self, places: Mapping[str, tuple[int, int]]) -> None:
        """Note that a step is planned.

        ``places`` are the tokens that each request at work has before it, and those of its prompt.
        """
        now = self._clock()
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
