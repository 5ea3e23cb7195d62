"""`StepTimes`: learns from the steps of vLLM what computing prompts costs."""

from __future__ import annotations

import time
from collections import OrderedDict
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from kvkeep.core.cost import LearnedPrefill

__all__ = ["StepTimes"]

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
