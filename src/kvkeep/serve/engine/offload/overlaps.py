"""`Overlaps`: decides, before each pass, what is computed of prompts whose KV is loaded."""

from __future__ import annotations

import time
from math import ceil
from typing import TYPE_CHECKING, Final

from kvkeep.core.cost import LEAST_GAIN, LoadablePrompt, LoadProgress, take_turns

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from kvkeep.core.cost import CostModel, PrefillCost, PromptTurn
    from kvkeep.serve.engine.answer import Answer
    from kvkeep.serve.engine.offload.load import Load
    from kvkeep.serve.engine.offload.loads import Loads

__all__ = ["Overlaps"]

# Seconds by which a read is late at least, and by as many as it was expected to take.
_LATE_S: Final = 0.05
# Seconds between two loads from a tier for which computing does not wait: it may have become fast.
_EXPLORE_S: Final = 30.0
# What computing and loading at once has to save on a GPU. A pass is handed to it operation by
# operation, and the threads that load wait for Python's lock meanwhile: on an H100, 32,768 tokens
# in memory took 352 ms at once and 147 ms loaded, where a seventh was expected to be saved.
_LEAST_GAIN_GPU: Final = 0.25


class Overlaps:
    """The prompts of one engine that are computed from the front and loaded from the back.

    ``step_tokens`` are the most of a pass, ``token_bytes`` those of a token's KV. A prompt is not
    computed for ``timeout`` seconds at most because of its load. Thread safety: none; the engine's
    thread calls it.
    """

    def __init__(
        self,
        loads: Loads,
        cost: CostModel,
        *,
        step_tokens: int,
        token_bytes: float,
        timeout: float,
        on_gpu: bool,
    ) -> None:
        self.take_turns = take_turns
        """The decision; benchmarks replace it."""
        self._loads = loads
        self._cost = cost
        self._step_tokens = step_tokens
        self._token_bytes = token_bytes
        self._timeout = timeout
        self._least_gain = _LEAST_GAIN_GPU if on_gpu else LEAST_GAIN
        self._explored = time.monotonic()

    def plan(self, running: Iterable[Answer], give_up: Callable[[Answer], None]) -> dict[int, int]:
        """Return where the next pass has to end at the latest, by the `id` of each such answer.

        An answer that waits has the number of its computed tokens. ``give_up`` is called for an
        answer that waited too long; its load ends.
        """
        prompts = [one for one in running if not one.decoding]
        if not any(one.loading for one in prompts):
            return {}
        now = time.monotonic()
        known, cost = self._cost.prefill.known, self._cost.prefill.cost
        progress = [self._progress(one, now) for one in prompts]
        # A token that only waits for its last pass should not wait for long ones of others.
        soon = any(one.decoding and not one.generated for one in running)

        def compute_s(start: int, stop: int) -> float:
            return self._compute_s(cost, start, stop)

        turns = self.take_turns(
            progress,
            compute_s if known else None,
            error=self._error(prompts),
            pass_s=cost.seconds_fixed,
            room_s=1.25 * cost.seconds_fixed if soon else float("inf"),
            least_gain=self._least_gain,
        )
        return self._ends(prompts, progress, turns, now, give_up)

    def _ends(
        self,
        prompts: Sequence[Answer],
        progress: Sequence[LoadProgress],
        turns: Sequence[PromptTurn],
        now: float,
        give_up: Callable[[Answer], None],
    ) -> dict[int, int]:
        ends: dict[int, int] = {}
        for answer, one, turn in zip(prompts, progress, turns, strict=True):
            load = answer.load
            if load is None or load.done:
                ends[id(answer)] = max(turn.stop, answer.computed)
                continue
            load.late = one.late_s > max(one.first_s, _LATE_S)
            if load.late:
                self._loads.go_on()
            self._begin(answer, load, one, turn, now)
            stop = max(min(turn.stop, load.limit()), answer.computed)
            if stop == answer.computed and now - load.alive_at > self._timeout:
                give_up(answer)
                stop = answer.num_tokens
            ends[id(answer)] = stop
        return ends

    def _begin(
        self, answer: Answer, load: Load, one: LoadProgress, turn: PromptTurn, now: float
    ) -> None:
        """Let the read of ``load`` begin if it pays, or if nothing was read for long."""
        if not load.answered or load.reading or load.has_read:
            return
        pays = turn.at < one.prompt.loaded
        if load.evidence is not None:
            load.evidence.planned(turn.all_loaded_s, turn.all_computed_s, pays=pays)
        if pays:
            self._loads.queue(answer.order, load)
        elif now - self._explored >= _EXPLORE_S:
            self._explored = now
            self._loads.queue(answer.order, load)
        else:
            self._loads.unqueue(load)

    def _progress(self, answer: Answer, now: float) -> LoadProgress:
        load = answer.load
        if load is None or load.done:
            at = answer.computed
            return LoadProgress(LoadablePrompt(at, at, at, answer.num_tokens, 1))
        found = load.progress(now, self._read_s, self._token_bytes)
        if self._loads.stuck and not load.reading:
            return found._replace(over=True)  # its read cannot begin
        return found

    def _read_s(self, tier: str, nbytes: float) -> float:
        return self._cost.reading(tier).seconds(nbytes)

    def _compute_s(self, cost: PrefillCost, start: int, stop: int) -> float:
        """Return the seconds to compute tokens in passes of the engine."""
        more = max(0, ceil((stop - start) / self._step_tokens) - 1)
        return cost.prefill_s(start, stop) + more * cost.seconds_fixed

    def _error(self, prompts: Sequence[Answer]) -> float:
        """Return the error of what is expected of computing, and of the tiers that are read."""
        tiers = {tier for one in prompts if one.load is not None for tier in one.load.tiers}
        reads = [self._cost.reading(tier) for tier in tiers]
        return self._cost.prefill.error + max((one.error for one in reads if one.known), default=0)
