"""`RequestTimes`: when each request of a closed loop came, began, and was through."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from kvkeep.bench.replay.outcome import Spans

if TYPE_CHECKING:
    import numpy.typing as npt

    Floats = npt.NDArray[np.float64]

__all__ = ["RequestTimes"]

_WINDOWS = 100


class _Waits(Spans):
    """Spans from 61 µs to 2 years: 4 steps for each doubling."""

    _LOWEST = 2.0**-14
    _COUNT = 40 * Spans._STEPS


class RequestTimes:
    """Seconds for each of ``requests``; NaN where something did not happen (yet).

    Memory: 90 bytes a request.
    """

    def __init__(self, requests: int) -> None:
        self.came, self.began, self.first, self.last = np.full((4, requests), np.nan)
        """When it came, was admitted, had its first token, and its last."""
        self.prefill, self.saved, self.loaded = np.zeros((3, requests))
        """What was computed of its prompt, what a hit saved, what was read from tiers."""
        self._seen: list[tuple[float, int, int]] = []

    def seen(self, now: float, blocks: int, hit_blocks: int) -> None:
        """So many ``blocks`` were asked for until ``now``, and so many found."""
        self._seen.append((now, blocks, hit_blocks))

    def latency(self) -> dict[str, Any]:
        """`Outcome.latency`; see `simulate_loop`."""
        served = ~np.isnan(self.first)
        came, first = self.came[served], self.first[served]
        waits = _Waits()
        waits.add(first - came, np.ones(len(came), np.int64))
        span = float(np.nanmax(self.last) - np.nanmin(self.came))
        prefill = float(self.prefill.sum())
        return {
            "ttft_s": _summary(first - came),
            "queue_s": _summary(self.began[served] - came),
            "total_s": _summary(self.last[served] - came),
            "prefill_s": prefill,
            "saved_s": float(self.saved.sum()),
            "loaded_s": float(self.loaded.sum()),
            "span_s": span,
            "utilisation": prefill / span if span else 0.0,
            "rows": waits.as_rows(),
        }

    def timeline(self) -> list[list[float]]:
        """`Outcome.timeline`, in the time that has passed here."""
        seen = np.array(self._seen)
        begin, end = float(np.nanmin(self.came)), float(seen[-1, 0])
        span = end - begin or 1.0
        window = np.minimum((seen[:, 0] - begin) / span * _WINDOWS, _WINDOWS - 1).astype(np.int64)
        asked = np.diff(seen[:, 1:], axis=0, prepend=0)
        blocks = np.bincount(window, asked[:, 0], _WINDOWS)
        hits = np.bincount(window, asked[:, 1], _WINDOWS)
        return [
            [begin + span * (at + 1) / _WINDOWS, int(blocks[at]), int(hits[at])]
            for at in np.flatnonzero(blocks).tolist()
        ]


def _summary(seconds: Floats) -> dict[str, float]:
    """Mean and quantiles; empty where there are none."""
    if not len(seconds):
        return {}
    p50, p90, p99 = np.quantile(seconds, (0.5, 0.9, 0.99)).tolist()
    return {"mean": float(seconds.mean()), "p50": p50, "p90": p90, "p99": p99}
