"""`Outcome`: what a replay found, in figures that can be drawn, compared and kept."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

__all__ = ["EVICTED", "FIRST", "NEVER", "OTHER", "REASONS", "REMAINDER", "Outcome", "Spans"]

FIRST = "first time seen"
EVICTED = "evicted"
NEVER = "never admitted"
OTHER = "other namespace"
REMAINDER = "page remainder"
REASONS = (FIRST, EVICTED, NEVER, OTHER, REMAINDER)
"""Why a token was computed that no cache gave; every one has exactly one reason."""


class Spans:
    """How often spans of time of about a length were seen: 4 steps for each doubling.

    From 1/16 second to 24 days; what is shorter or longer counts as that.
    """

    _LOWEST = 2.0**-4
    _STEPS = 4
    _COUNT = 25 * _STEPS

    def __init__(self) -> None:
        self.counts = np.zeros(self._COUNT, np.int64)

    def add(self, seconds: npt.NDArray[np.float64], weights: npt.NDArray[np.int64]) -> None:
        """Count ``weights`` for ``seconds``."""
        steps = self._STEPS * np.log2(np.maximum(seconds, self._LOWEST) / self._LOWEST)
        places = np.minimum(steps.astype(np.int64), self._COUNT - 1)
        self.counts += np.bincount(places, weights, self._COUNT).astype(np.int64)

    def quantile(self, share: float) -> float | None:
        """Seconds that ``share`` of what was counted did not exceed; None where nothing was."""
        total = int(self.counts.sum())
        if not total:
            return None
        place = int(np.searchsorted(np.cumsum(self.counts), share * total))
        return float(self._LOWEST * 2 ** ((min(place, self._COUNT - 1) + 0.5) / self._STEPS))

    def as_rows(self) -> list[list[float]]:
        """[seconds from, count] for each step from the first that was seen to the last."""
        seen = np.flatnonzero(self.counts)
        if not len(seen):
            return []
        return [
            [float(self._LOWEST * 2 ** (at / self._STEPS)), int(self.counts[at])]
            for at in range(int(seen[0]), int(seen[-1]) + 1)
        ]


@dataclass(slots=True)
class Outcome:
    """One policy with one capacity, over a whole trace.

    ``blocks`` are the units of all prompts, ``hit_blocks`` those reused whole, ``tokens`` and
    ``hit_tokens`` the same in tokens. ``misses`` has the tokens computed, by reason (`REASONS`).
    ``refused`` requests did not fit into the memory at all. ``seconds`` is what the replay took.

    ``timeline`` has, for each of some equal windows of the trace's time, [seconds at its end,
    blocks, hit blocks]. Histograms are rows of [seconds from, count]: ``reuse_gap`` counts reused
    blocks by the time since their last use; ``lifetime`` blocks by the time from being stored to
    their eviction; ``evicted_ago`` computed tokens by the time since they were evicted.
    ``tiers`` is what tiers below were asked for and wrote, where there are any; ``latency`` what a
    closed loop made of it; ``what_if`` points of the sampled curve: [capacity in tokens, token hit
    rate of LRU].
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
    """The largest ones: [tokens, hit tokens]."""
    tiers: list[dict[str, Any]] = field(default_factory=list)
    latency: dict[str, Any] = field(default_factory=dict)
    what_if: list[list[float]] = field(default_factory=list)
    what_if_namespaces: dict[str, list[list[float]]] = field(default_factory=dict)
    """Of the largest ones, where there are several: [times the capacity, token hit rate of LRU]."""

    @property
    def hit_rate(self) -> float:
        """Reused blocks / blocks."""
        return self.hit_blocks / self.blocks if self.blocks else 0.0

    @property
    def token_hit_rate(self) -> float:
        """Reused tokens / tokens."""
        return self.hit_tokens / self.tokens if self.tokens else 0.0

    def as_dict(self) -> dict[str, Any]:
        """All of it, for JSON."""
        return {**asdict(self), "hit_rate": self.hit_rate, "token_hit_rate": self.token_hit_rate}

    @classmethod
    def of(cls, found: dict[str, Any]) -> Outcome:
        """What `as_dict` gave. Raises TypeError for fields that are none."""
        derived = {"hit_rate", "token_hit_rate"}
        return cls(**{key: value for key, value in found.items() if key not in derived})
