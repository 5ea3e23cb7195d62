"""`Outcome`: the figures of one replay."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable

    import numpy.typing as npt

__all__ = [
    "EVICTED", "FIRST", "GROUP_REASONS", "NEVER", "NO_STATE", "NO_WINDOW", "OTHER", "REASONS",
    "REMAINDER", "Outcome", "Spans", "reasons_of",
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


class Spans:
    """A histogram of durations, in 4 steps per doubling, from 1/16 second to 24 days.

    Shorter and longer durations count in the first and last step.
    """

    _LOWEST = 2.0**-4
    STEPS = 4
    _COUNT = 25 * STEPS

    def __init__(self) -> None:
        self.counts = np.zeros(self._COUNT, np.int64)

    def add(self, seconds: npt.NDArray[np.float64], weights: npt.NDArray[np.int64]) -> None:
        """Count ``weights`` for ``seconds``."""
        steps = self.STEPS * np.log2(np.maximum(seconds, self._LOWEST) / self._LOWEST)
        places = np.minimum(steps.astype(np.int64), self._COUNT - 1)
        self.counts += np.bincount(places, weights, self._COUNT).astype(np.int64)

    def as_rows(self) -> list[list[float]]:
        """Return [seconds from, count] of each step, from the first that is not empty."""
        seen = np.flatnonzero(self.counts)
        if not len(seen):
            return []
        return [
            [float(self._LOWEST * 2 ** (at / self.STEPS)), int(self.counts[at])]
            for at in range(int(seen[0]), int(seen[-1]) + 1)
        ]


@dataclass(slots=True)
class Outcome:
    """The figures of one replay: how much of a trace a policy reused with one capacity.

    ``blocks`` are the units of all prompts, ``hit_blocks`` those reused whole; ``tokens`` and
    ``hit_tokens`` are the same in tokens. ``misses`` has the computed tokens by reason (`REASONS`).
    ``refused`` requests did not fit into the memory at all. ``seconds`` is the run time of the
    replay itself.

    ``timeline`` has a row for each of some equal windows of time: [seconds at its end, blocks, hit
    blocks]. Histograms have rows of [seconds from, count]: ``reuse_gap`` of reused blocks, by the
    time since their last use; ``lifetime`` of evicted blocks, by their time in the cache;
    ``evicted_ago`` of computed tokens, by the time since their eviction. ``tiers`` are the
    figures of the tiers, if any; ``latency`` those of a closed loop; ``what_if`` points of the
    sampled curve: [capacity in tokens, token hit rate of LRU].
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
    timeline: list[list[float]] = field(default_factory=list)
    reuse_gap: list[list[float]] = field(default_factory=list)
    lifetime: list[list[float]] = field(default_factory=list)
    evicted_ago: list[list[float]] = field(default_factory=list)
    namespaces: dict[str, list[int]] = field(default_factory=dict)
    """The largest namespaces: [tokens, hit tokens]."""
    shares: dict[str, list[float]] = field(default_factory=dict)
    """With shares: [weight, tokens, hit tokens, hit tokens alone on its share] of tenants."""
    groups: dict[str, Any] = field(default_factory=dict)
    """Of a model with windows or states: what became of rows and checkpoints."""
    tiers: list[dict[str, Any]] = field(default_factory=list)
    latency: dict[str, Any] = field(default_factory=dict)
    what_if: list[list[float]] = field(default_factory=list)
    what_if_namespaces: dict[str, list[list[float]]] = field(default_factory=dict)
    """If there are several namespaces: [factor of the capacity, token hit rate of LRU], of those
    whose prompts tell it for all factors."""

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

    @classmethod
    def of(cls, found: dict[str, Any]) -> Outcome:
        """Return the outcome of an `as_dict`. Raises TypeError for unknown fields."""
        derived = {"hit_rate", "token_hit_rate"}
        return cls(**{key: value for key, value in found.items() if key not in derived})


def reasons_of(outcomes: Iterable[Outcome]) -> list[str]:
    """Return `REASONS`, then those of `GROUP_REASONS` and other ones in ``outcomes``, sorted."""
    others = {reason for outcome in outcomes for reason in outcome.misses} - set(REASONS)
    more = [reason for reason in GROUP_REASONS if reason in others]
    return [*REASONS, *more, *sorted(others - set(more))]
