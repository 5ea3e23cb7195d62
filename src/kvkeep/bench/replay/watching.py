"""`ReplayWatch`: follows the cache's events to find why each token was computed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kvkeep.bench.replay.outcome import (
    EVICTED,
    FIRST,
    NEVER,
    NO_STATE,
    NO_WINDOW,
    OTHER,
    REMAINDER,
    Outcome,
    Spans,
)  # fmt: skip
from kvkeep.core.events import Evicted, Stored

if TYPE_CHECKING:
    import numpy.typing as npt

    from kvkeep.bench.replay.paging import Paging
    from kvkeep.bench.replay.workload import Ids, Workload
    from kvkeep.core.events import Event

__all__ = ["ReplayWatch"]

_WINDOWS = 100
_NAMESPACES = 20
_IN, _OUT = 1, 2  # states of a unit: cached, evicted; 0: never cached


class ReplayWatch:
    """Follows a replay of one workload and adds up its `Outcome`.

    `see` is a hook of the cache; `request` is called for each request. Cost: about 30 µs per
    request. Memory: 25 bytes per different unit, 4 per page or, if larger, unit in a page.
    """

    def __init__(
        self, workload: Workload, pages: int, paging: Paging | None, outcome: Outcome
    ) -> None:
        self.now = 0.0
        self.outcome = outcome
        self._workload = workload
        self._page_size, self._step = 1, 1
        self._reason, self._grid = REMAINDER, 1
        if paging is not None:
            # The first token of each unit in a page; of the first only, if units are larger.
            self._page_size = paging.size
            self._step = min(paging.size, paging.unit_size)
            if paging.groups is not None:
                self._reason = NO_WINDOW if paging.groups.state is None else NO_STATE
                self._grid = paging.groups.grid * paging.groups.page_size
        self._units_of = np.full((pages, -(-self._page_size // self._step)), -1, np.int32)
        count = workload.num_ids
        self._state = np.zeros(count, np.int8)
        self._asked = np.full(count, -np.inf)
        self._stored = np.zeros(count)
        self._gone = np.zeros(count)
        self._anywhere = np.zeros(int(workload.content.max(initial=0)) + 1, bool)
        self._gaps, self._lives, self._ago = Spans(), Spans(), Spans()
        self._misses = dict.fromkeys((FIRST, EVICTED, NEVER, OTHER, REMAINDER, self._reason), 0)
        self._windows = np.zeros((_WINDOWS, 2), np.int64)
        self._spaces = np.zeros((len(workload.namespaces), 2), np.int64)

    def see(self, event: Event) -> None:
        """Handle an event of the cache."""
        if isinstance(event, Stored):
            units = event.tokens.reshape(-1, self._page_size)[:, :: self._step]
            self._units_of[event.pages] = units
            self.stored(units.ravel())
        elif isinstance(event, Evicted):
            self.gone(np.unique(self._units_of[event.pages]))

    def stored(self, units: Ids) -> None:
        """Record that ``units`` are cached."""
        self._state[units] = _IN
        self._stored[units] = self.now

    def gone(self, units: Ids) -> None:
        """Record that ``units`` are evicted, at least in part."""
        first = units[self._state[units] == _IN]
        self._lives.add(self.now - self._stored[first], np.ones(len(first), np.int64))
        self._state[units] = _OUT
        self._gone[units] = self.now

    def request(self, number: int, hit_tokens: int, hit_blocks: int) -> None:
        """Record that request ``number`` was served, ``hit_tokens`` of its prompt from the cache.

        Call it before the request's own units are stored.
        """
        work, outcome = self._workload, self.outcome
        ids, tokens = work.prompt(number), int(work.tokens[number])
        outcome.requests += 1
        outcome.tokens += tokens
        outcome.hit_tokens += hit_tokens
        outcome.blocks += len(ids)
        outcome.hit_blocks += hit_blocks
        span = work.span_s or 1.0
        window = min(_WINDOWS - 1, int((self.now - work.times[0]) / span * _WINDOWS))
        self._windows[window] += (len(ids), hit_blocks)
        self._spaces[work.namespace[number]] += (tokens, hit_tokens)
        reused = ids[:hit_blocks]
        self._gaps.add(self.now - self._asked[reused], np.ones(hit_blocks, np.int64))
        self._why(ids, tokens, hit_tokens)
        self._asked[ids] = self.now
        self._anywhere[work.content[ids]] = True
        answer = work.answer(number)
        if len(answer):
            self._asked[answer] = self.now
            self._anywhere[work.content[answer]] = True

    def _why(self, ids: Ids, tokens: int, hit_tokens: int) -> None:
        unit = self._workload.unit_tokens
        first = hit_tokens // unit
        missing = ids[first:]
        if hit_tokens >= tokens or not len(missing):
            return
        weights = np.full(len(missing), unit, np.int64)
        weights[-1] -= len(ids) * unit - tokens
        weights[0] -= hit_tokens - first * unit
        known = self._asked[missing] > -np.inf
        state = self._state[missing]
        elsewhere = ~known & self._anywhere[self._workload.content[missing]]
        gone = known & (state == _OUT)
        self._add(FIRST, weights, ~known & ~elsewhere)
        self._add(OTHER, weights, elsewhere)
        self._add(EVICTED, weights, gone)
        self._add(NEVER, weights, known & (state == 0))
        there = known & (state == _IN)
        self._add(REMAINDER, weights, there)
        if self._reason != REMAINDER:
            self._not_resumed(there, weights, hit_tokens, tokens)
        if gone.any():
            self._ago.add(self.now - self._gone[missing[gone]], weights[gone])

    def _not_resumed(
        self,
        there: npt.NDArray[np.bool_],
        weights: npt.NDArray[np.int64],
        hit_tokens: int,
        tokens: int,
    ) -> None:
        """Count the cached tokens behind a hit that lacked a state or a window, up to the grid.

        ``there`` are the units from the hit on that are cached.
        """
        cached = len(there) if there.all() else int(there.argmin())
        reach = hit_tokens + int(weights[:cached].sum())
        # The last token is always computed.
        lost = max(0, min(reach, tokens - 1) // self._grid * self._grid - hit_tokens)
        self._misses[self._reason] += lost
        self._misses[REMAINDER] -= lost

    def _add(
        self, reason: str, weights: npt.NDArray[np.int64], which: npt.NDArray[np.bool_]
    ) -> None:
        self._misses[reason] += int(weights[which].sum())

    def tokens_of(self, least: float) -> dict[str, list[float]]:
        """Return [tokens, hit tokens] of the tenants that have ``least`` of all tokens or more."""
        most = self._spaces[:, 0] >= max(1.0, least * int(self._spaces[:, 0].sum()))
        return {
            self._workload.namespaces[at]: self._spaces[at].tolist()
            for at in np.flatnonzero(most).tolist()
        }

    def done(self) -> Outcome:
        """Return the complete outcome."""
        work, outcome = self._workload, self.outcome
        outcome.misses = self._misses
        ends = work.times[0] + work.span_s * np.arange(1, _WINDOWS + 1) / _WINDOWS
        outcome.timeline = [
            [float(end), int(blocks), int(hits)]
            for end, (blocks, hits) in zip(ends, self._windows, strict=True)
            if blocks
        ]
        outcome.reuse_gap = self._gaps.as_rows()
        outcome.lifetime = self._lives.as_rows()
        outcome.evicted_ago = self._ago.as_rows()
        largest = np.argsort(-self._spaces[:, 0], kind="stable")[:_NAMESPACES]
        outcome.namespaces = {
            work.namespaces[at]: [int(self._spaces[at, 0]), int(self._spaces[at, 1])]
            for at in largest.tolist()
        }
        return outcome
