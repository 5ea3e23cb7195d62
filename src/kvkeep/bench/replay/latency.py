"""`RequestTimes`: times of each request in a replay that takes time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from kvkeep.bench.replay.jobs import Jobs

if TYPE_CHECKING:
    import numpy.typing as npt

    from kvkeep.bench.replay.workload import Workload
    from kvkeep.core.cost import PrefillCost

    Floats = npt.NDArray[np.float64]

__all__ = ["RequestTimes"]


class RequestTimes:
    """Times of each request, in seconds of the replay's clock; NaN until they happen.

    Memory: 60 bytes per request.
    """

    def __init__(self, requests: int) -> None:
        self.came, self.began, self.first, self.last = np.full((4, requests), np.nan)
        """Arrival, admission, first token and last token."""
        self.prefill, self.saved, self.loaded = np.zeros((3, requests))
        """Seconds to compute the prompt, seconds saved by hits, seconds to read from tiers."""
        self.loaded_tokens = 0
        """Tokens read from tiers that take time …"""
        self.computed_stored_tokens = 0
        """… and those that were computed though such a tier has them."""

    def begin(self, number: int, now: float, cost: PrefillCost, cached: int, tokens: int) -> float:
        """Record that computing a prompt of ``tokens`` begins; return the seconds it takes."""
        # The last token is always computed: the answer follows from it.
        seconds = cost.prefill_s(min(cached, tokens - 1), tokens)
        self.computing(number, now, seconds, cost.prefill_s(0, tokens) - seconds)
        return seconds

    def computing(self, number: int, now: float, seconds: float, saved: float) -> None:
        """Record when a prompt is admitted, its seconds of computing, and those saved by hits."""
        self.began[number] = now
        self.prefill[number] = seconds
        self.saved[number] = saved

    def latency(self, workload: Workload) -> dict[str, Any]:
        """Return `Outcome.latency`; see `simulate_loop`."""
        served = ~np.isnan(self.first)
        came, first = self.came[served], self.first[served]
        span = float(np.nanmax(self.last) - np.nanmin(self.came))
        prefill = float(self.prefill.sum())
        jobs: dict[str, Any] = {}
        if (workload.session >= 0).any():
            seconds = Jobs(workload).seconds(self.came, self.last)
            jobs = {"jobs": len(seconds), "job_s": _summary(seconds)}
        return {
            "ttft_s": _summary(first - came),
            "queue_s": _summary(self.began[served] - came),
            "total_s": _summary(self.last[served] - came),
            "prefill_s": prefill,
            "saved_s": float(self.saved.sum()),
            "loaded_s": float(self.loaded.sum()),
            "loaded_tokens": self.loaded_tokens,
            "computed_stored_tokens": self.computed_stored_tokens,
            "span_s": span,
            "utilisation": prefill / span if span else 0.0,
            **jobs,
        }


def _summary(seconds: Floats) -> dict[str, float]:
    """Return mean and quantiles; empty for no values."""
    if not len(seconds):
        return {}
    p50, p90, p99 = np.quantile(seconds, (0.5, 0.9, 0.99)).tolist()
    return {"mean": float(seconds.mean()), "p50": p50, "p90": p90, "p99": p99}
