"""`Outcome`: the figures of one replay, and `ReplayWatch`, which adds them up."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from kvkeep.core.events import Evicted, Stored

if TYPE_CHECKING:
    from collections.abc import Iterable

    import numpy.typing as npt

    from kvkeep.bench.replay.paging import Paging
    from kvkeep.bench.replay.workload import Ids, Workload
    from kvkeep.core.events import Event

__all__ = [
    "EVICTED", "FIRST", "GROUP_REASONS", "NEVER", "NO_STATE", "NO_WINDOW", "OTHER", "REASONS",
    "REMAINDER", "Outcome", "ReplayWatch", "reasons_of",
]  # fmt: skip

FIRST = "first time seen"
EVICTED = "evicted"
NEVER = "never admitted"
OTHER = "other namespace"
REMAINDER = "page remainder"
REASONS = (FIRST, EVICTED, NEVER, OTHER, REMAINDER)
"""Reasons why a token was computed; every computed token has exactly one."""
NO_STATE = "no state"
NO_WINDOW = "window gone"
GROUP_REASONS = (NO_STATE, NO_WINDOW)
"""Further reasons, of models with states or windows."""

_NAMESPACES = 20
_IN, _OUT = 1, 2  # states of a unit: cached, evicted; 0: never cached


@dataclass(slots=True)
class Outcome:
    """The figures of one replay: how much of a trace a policy reused with one capacity.

    ``blocks`` are the units of all prompts, ``hit_blocks`` those reused whole; ``tokens`` and
    ``hit_tokens`` are the same in tokens. ``misses`` has the computed tokens by reason (`REASONS`).
    ``refused`` requests did not fit into the memory at all. ``seconds`` is the run time of the
    replay itself.

    ``late_blocks`` are the reused blocks whose last use was more than half of the trace ago.
    ``tiers`` are the figures of the tiers, if any; ``latency`` those of a replay that takes time.
    """

    policy: str
    capacity_tokens: int
    page_tokens: int
    trace: str = ""
    digest: str = ""
    requests: int = 0
    refused: int = 0
    tokens: int = 0
    hit_tokens: int = 0
    blocks: int = 0
    hit_blocks: int = 0
    evicted_pages: int = 0
    seconds: float = 0.0
    misses: dict[str, int] = field(default_factory=dict)
    late_blocks: int = 0
    namespaces: dict[str, list[int]] = field(default_factory=dict)
    """The largest namespaces: [tokens, hit tokens]."""
    groups: dict[str, Any] = field(default_factory=dict)
    """Of a model with windows or states: what became of rows and checkpoints."""
    tiers: list[dict[str, Any]] = field(default_factory=list)
    latency: dict[str, Any] = field(default_factory=dict)

    @property
    def hit_rate(self) -> float:
        """Reused blocks / all blocks of prompts."""
        return self.hit_blocks / self.blocks if self.blocks else 0.0

    @property
    def token_hit_rate(self) -> float:
        """Reused tokens / all tokens of prompts."""
        return self.hit_tokens / self.tokens if self.tokens else 0.0

    def as_dict(self) -> dict[str, Any]:
        """Return all fields and both rates, for JSON."""
        return {**asdict(self), "hit_rate": self.hit_rate, "token_hit_rate": self.token_hit_rate}


def reasons_of(outcomes: Iterable[Outcome]) -> list[str]:
    """Return `REASONS`, then those of `GROUP_REASONS` and other ones in ``outcomes``, sorted."""
    others = {reason for outcome in outcomes for reason in outcome.misses} - set(REASONS)
    more = [reason for reason in GROUP_REASONS if reason in others]
    return [*REASONS, *more, *sorted(others - set(more))]


class ReplayWatch:
    """Follows a replay of one workload and adds up its `Outcome`.

    `see` is a hook of the cache; `request` is called for each request. Cost: about 30 µs per
    request. Memory: 9 bytes per different unit, 4 per page or, if larger, unit in a page.
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
        self._anywhere = np.zeros(int(workload.content.max(initial=0)) + 1, bool)
        self._late_s = workload.span_s / 2
        self._misses = dict.fromkeys((FIRST, EVICTED, NEVER, OTHER, REMAINDER, self._reason), 0)
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

    def gone(self, units: Ids) -> None:
        """Record that ``units`` are evicted, at least in part."""
        self._state[units] = _OUT

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
        self._spaces[work.namespace[number]] += (tokens, hit_tokens)
        reused = ids[:hit_blocks]
        if self._late_s:
            outcome.late_blocks += int((self.now - self._asked[reused] >= self._late_s).sum())
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

    def done(self) -> Outcome:
        """Return the complete outcome."""
        work, outcome = self._workload, self.outcome
        outcome.misses = self._misses
        largest = np.argsort(-self._spaces[:, 0], kind="stable")[:_NAMESPACES]
        outcome.namespaces = {
            work.namespaces[at]: [int(self._spaces[at, 0]), int(self._spaces[at, 1])]
            for at in largest.tolist()
        }
        return outcome
