"""`Meeting`-driven loads: a row's stored KV comes from its end while its front is computed.

    start          computed ──▶ │ ◀── loaded              stop
    ├──────────────────────────┼──────────────────────────┤
                               where both should meet: planned anew after each pass

A thread reads; the caller computes a pass at a time, and asks after each what to do next. A load
that stalls is overtaken, one that is faster than expected saves passes.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Self

from kvkeep.core.cost import LoadablePrompt, meet

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from kvkeep.core.cost import CostModel, Meeting
    from kvkeep.store import TailRead

    Layers = Sequence[tuple[torch.Tensor, ...]]

__all__ = ["LoadStep", "RowLoad"]

_LEAST: Final = 256  # tokens of a pass, if as many are to be computed
_AT_ONCE: Final = 4  # blocks that come together: readers of a tier
_LATE: Final = 2.0  # times the expected seconds of these blocks, and …
_LATE_S: Final = 0.02  # … these more, without a block: then the load is late
_POLL_S: Final = 0.02
_GAIN: Final = (0.1, 0.3)  # by how much both at once has to be better: the models' error
_TOLD: Final = 8  # blocks that tell how fast the load is


class LoadStep(NamedTuple):
    """What to do next: take the KV of tokens up to ``stop`` from ``layers``, or compute it.

    ``layers`` has [heads, tokens, dim] of K and V of each layer; None: compute.
    """

    stop: int
    layers: Layers | None


class RowLoad:
    """The load of one text's stored KV, beside the passes that compute it; a context manager.

    Thread safety: one thread asks and computes; the other is this object's own.

    Arguments:
        tail: what is stored of the text.
        cost: of both.
        tokens: of the text.
    """

    def __init__(self, tail: TailRead, cost: CostModel, tokens: int) -> None:
        self._tail = tail
        self._cost = cost
        self._tokens = tokens
        self._room: Any = ()  # pairs of tensors, for all that is loaded
        self._changed = threading.Event()
        self._error: BaseException | None = None
        self._began = time.monotonic()
        self._free_at = self._began + sum(
            cost.reading(tier).busy_s for tier in tail.tier_bytes(tail.start, tail.stop)
        )
        self._thread: threading.Thread | None = None
        self.pays = tail.start < tail.stop
        """Whether loading some of the KV is expected to be faster than computing all of it."""
        self._passes = 0
        self._last = 0.0  # when a block came
        self._beside = False  # whether to compute while it is loaded
        if self.pays and cost.prefill.known:
            self._decide()

    def _decide(self) -> None:
        """Decide whether to load, to compute, or both: only if that gains more than it may err."""
        tail, prefill = self._tail, self._cost.prefill
        waits = max(0.0, self._free_at - self._began)
        alone = prefill.prefill_s(tail.start, self._tokens)
        loaded = waits + self._load_s(tail.start, tail.stop)
        loaded += prefill.prefill_s(tail.stop, self._tokens)
        reads = [self._cost.reading(tier).error for tier, _ in tail.runs]
        gain = min(max(prefill.error, *reads, _GAIN[0]), _GAIN[1])
        both, _ = self._plan(tail.start, tail.stop)
        self._beside = both.seconds < (1 - gain) * min(alone, loaded)
        self.pays = self._beside or loaded < alone

    def __enter__(self) -> Self:
        self._room = self._tail.room()
        self._began = time.monotonic()
        self._thread = threading.Thread(target=self._read, name="kvkeep tail", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Read no more. A tier that hangs is not waited for."""
        self._tail.cancel()

    def next(self, known: int) -> LoadStep | None:
        """Return what to do about the tokens behind the ``known`` first; None: compute the rest.

        Waits where loading is faster than computing, as long as the load keeps to that.
        """
        tail = self._tail
        while known < tail.stop:
            self._changed.clear()
            done, delivered = tail.done, tail.delivered
            if self._error is not None:
                raise self._error
            here = next((stop for start, stop in delivered if start <= known < stop), None)
            if here is not None:
                return LoadStep(here, self._cut(known, here))
            goal = min((start for start, _ in delivered if start > known), default=tail.stop)
            if done:
                return None if goal == tail.stop else self._compute(known, goal)
            if not self._cost.prefill.known:
                self._changed.wait()  # it ends when the tiers' timeouts are over, at the latest
                continue
            plan, late = self._plan(known, goal)
            self._beside |= late
            if not self._beside:
                self._changed.wait(_POLL_S)
                continue
            if plan.at == goal == tail.stop:
                return None
            if plan.at > known:
                return self._compute(known, plan.at)
            self._changed.wait(_POLL_S)
        return None

    def _compute(self, known: int, stop: int) -> LoadStep:
        """Return the next pass towards ``stop``: a part of the way, so that plans can change."""
        unit, left = self._tail.unit, stop - known
        if left > 2 * _LEAST:
            part = 2 if self._passes else 4  # the first one, before anything has come
            stop = max(known + max(_LEAST, left // part), (known // unit + 1) * unit)
            stop = stop // unit * unit
        self._passes += 1
        self._tail.stop_before(stop)
        return LoadStep(stop, None)

    def _plan(self, known: int, goal: int) -> tuple[Meeting, bool]:
        """Return where computing behind ``known`` and loading before ``goal`` should meet.

        And whether the load is late.
        """
        tail, now = self._tail, time.monotonic()
        came = sum(stop - start for start, stop in tail.delivered)
        begun = max(self._began, min(self._free_at, now))
        pace = None  # seconds a token, of what has come
        if came >= _TOLD * tail.unit:
            pace = max(0.0, self._last - begun) / came
        # Some blocks are read at once, and may come at once.
        soon = min(_AT_ONCE * tail.unit, tail.stop - tail.start)
        silence = now - max(self._last, begun)
        late = silence > _LATE * self._load_s(tail.stop - soon, tail.stop) + _LATE_S

        def load_s(tokens: int) -> float:
            expected = self._load_s(goal - tokens, goal)
            if late:  # of a tier that stalls, nothing that was learned is true
                return max(expected, silence * tokens / soon)
            return expected if pace is None else pace * tokens

        found = meet(
            LoadablePrompt(known, goal, tail.stop, self._tokens, tail.unit),
            self._cost.prefill.prefill_s,
            load_s,
            load_free_s=max(0.0, self._free_at - now),
        )
        return found, late

    def _load_s(self, start: int, stop: int) -> float:
        return self._cost.load_s(self._tail.tier_bytes(start, stop))

    def _read(self) -> None:
        first = self._tail.start

        def take(start: int, stop: int, kv: Any) -> None:
            for mine, theirs in zip(self._room, kv, strict=True):
                for into, part in zip(mine, theirs, strict=True):
                    into[:, start - first : stop - first].copy_(part)
            self._last = time.monotonic()
            self._changed.set()

        try:
            self._tail.read(take)
        except BaseException as error:  # noqa: BLE001 - it is raised in the caller's thread
            self._error = error
        finally:
            self._changed.set()

    def _cut(self, start: int, stop: int) -> Layers:
        first = self._tail.start
        return [
            tuple(part[:, start - first : stop - first] for part in layer) for layer in self._room
        ]
