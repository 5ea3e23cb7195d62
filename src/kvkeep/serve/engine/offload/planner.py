"""`LoadPlanner`: decides, before each pass, which prompts wait for their KV."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, Final

from kvkeep.store import choose_load

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from kvkeep.core.cost import CostModel
    from kvkeep.serve.engine.offload.load import Load
    from kvkeep.serve.engine.offload.loads import Loads
    from kvkeep.serve.engine.request import Answer

__all__ = ["LoadPlanner"]

_LOOKUP_S: Final = 0.02  # for which a lookup is waited for at least …
_LOOKUP_SHARE: Final = 0.02  # … and this part of what computing the prompt takes
_RELEARN_S: Final = 10.0  # after which a tier is read again, as it may have become fast


def lookup_patience_s(compute_s: float | None, timeout: float) -> float:
    """Return the seconds that a prompt waits for its lookup, if computing it takes ``compute_s``.

    None: unknown.
    """
    if compute_s is None:
        return timeout
    return min(timeout, max(_LOOKUP_S, _LOOKUP_SHARE * compute_s))


class LoadPlanner:
    """Plans the loads of one engine, oldest prompt first.

    A prompt waits for its lookup, and then for its read if that is expected to pay, until one
    deadline: when computing would be as fast, or the read is much later than expected; ``timeout``
    seconds while the cost of computing is unknown. Behind what has come by then, it is computed. A
    prompt of which nothing comes for ``timeout`` seconds does not wait any longer.

    ``step_tokens`` are the most of a pass, ``token_bytes`` those of a token's KV. Thread safety:
    none; the engine's thread calls it.
    """

    def __init__(
        self,
        loads: Loads,
        cost: CostModel,
        *,
        step_tokens: int,
        token_bytes: float,
        timeout: float,
    ) -> None:
        self.choose_load = choose_load
        """The decision; benchmarks replace it."""
        self._loads = loads
        self._cost = cost
        self._step_tokens = step_tokens
        self._token_bytes = token_bytes
        self.timeout = timeout

    def waiting(self, running: Iterable[Answer], end: Callable[[Load], None]) -> set[int]:
        """Return the `id` of each answer that is not computed now, because KV of it may come.

        ``end`` is called for each load that has ended: nothing more of it is worth waiting for.
        """
        prompts = [answer for answer in running if not answer.decoding]
        waits: set[int] = set()
        if not any(answer.loading for answer in prompts):
            return waits
        now = time.monotonic()
        compute_free_s = load_free_s = 0.0
        for answer in prompts:
            load, begin = answer.load, answer.computed
            if load is not None and not load.done:
                if not load.answered:
                    if self._waits_for_lookup(answer, load, now):
                        waits.add(id(answer))
                elif self._waits_for_read(answer, load, now, compute_free_s, load_free_s):
                    waits.add(id(answer))
                    load_free_s = max(load_free_s, load.ends_at - now)
                    begin = load.stop
                else:
                    end(load)
            compute_free_s += self._compute_s(begin, answer.num_tokens)
        return waits

    def _waits_for_lookup(self, answer: Answer, load: Load, now: float) -> bool:
        """Whether to wait for a lookup; else the prompt is computed until it is answered."""
        seconds = None
        if self._cost.prefill.known:
            seconds = self._compute_s(answer.computed, answer.num_tokens)
        return now - load.alive_at <= lookup_patience_s(seconds, self.timeout)

    def _waits_for_read(
        self, answer: Answer, load: Load, now: float, compute_free_s: float, load_free_s: float
    ) -> bool:
        """Whether to wait for a read, which is queued if it pays and has not begun."""
        if load.has_read:
            return True  # its last chunks are not written yet
        if load.deadline is not None and (
            now > load.deadline or now - max(load.alive_at, self._loads.alive_at) > self.timeout
        ):
            load.late = True
            return False
        if load.reading:
            return True
        start = answer.computed
        pieces = load.pieces(start, self._token_bytes, whole=self._loads.whole)
        if not pieces or load.found - start < self._loads.page_size or self._loads.stuck:
            return False
        choice = self.choose_load(
            self._cost, start, answer.num_tokens, pieces, compute_s=self._compute_s,
            compute_free_s=compute_free_s, load_free_s=load_free_s,
        )  # fmt: skip
        if load.evidence is not None:
            load.evidence.choice = choice
        if not choice.pays:
            if self._cost.reading(pieces[-1].tier).age_s > _RELEARN_S:
                self._loads.relearn(load, start)
            return False
        load.stop, load.ends_at = choice.tokens, now + load_free_s + choice.load_s
        if load.deadline is None:
            load.alive_at = now
            patience = self.timeout if choice.patience_s is None else choice.patience_s
            load.deadline = now + patience
        self._loads.queue(answer.order, load, start)
        return True

    def _compute_s(self, start: int, stop: int) -> float:
        """Return the seconds to compute tokens in passes of the engine; 0 if unknown."""
        seconds = self._cost.prefill.prefill_s(start, stop)
        more = math.ceil((stop - start) / self._step_tokens) - 1
        return seconds + max(0, more) * self._cost.prefill.cost.seconds_fixed
