"""`ScheduleTimes`: learns what computing prompts costs, from when vLLM plans its steps."""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from kvkeep.core.cost import LearnedPrefill

__all__ = ["ScheduleTimes"]


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
