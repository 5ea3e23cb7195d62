"""The data of the page's charts, rounded to the precision that can be seen."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from kvkeep.bench.replay.words import shown

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvkeep.bench.replay.outcome import Outcome
    from kvkeep.bench.replay.prices import Prices
    from kvkeep.bench.replay.report.arranged import Arranged, PolicyCurve

__all__ = ["PERCENTILES", "chart_data"]

_WINDOWS = 100  # of a timeline, including windows without requests
PERCENTILES = ("p50", "p90", "p99", "mean")


def chart_data(found: Arranged, prices: Prices | None, span_s: float) -> dict[str, Any]:
    """Return the data for JSON; histograms and times by capacity, of which one is shown."""
    lines = [*found.policies, *([found.belady] if found.belady is not None else [])]
    return {
        "policies": [_line(line, prices, span_s) for line in found.policies],
        "belady": None if found.belady is None else _line(found.belady, prices, span_s),
        "infinite": None if found.infinite is None else _detail("infinite", found.infinite, span_s),
        "capacities": list(found.capacities),
        "currency": "" if prices is None else shown(prices.currency, 8),
        "details": {
            str(capacity): [
                _detail(line.name, outcome, span_s)
                for line in lines
                if (outcome := line.at(capacity)) is not None
            ]
            for capacity in found.capacities
        },
    }


def _line(line: PolicyCurve, prices: Prices | None, span_s: float) -> dict[str, Any]:
    return {
        "name": line.name,
        "points": [_point(one, prices, span_s) for one in line.outcomes],
        "what_if": [[int(at), _figure(rate)] for at, rate in line.what_if()],
    }


def _point(outcome: Outcome, prices: Prices | None, span_s: float) -> dict[str, Any]:
    cost = None if prices is None else prices.month(outcome, span_s)
    point: dict[str, Any] = {"capacity": outcome.capacity_tokens, "rate": _figure(outcome.hit_rate)}
    if cost is not None:
        point["cost"] = _figure(cost.total)
    times = outcome.latency.get("ttft_s")
    if isinstance(times, dict):
        point["ttft"] = {name: _figure(times[name]) for name in PERCENTILES if name in times}
    served = outcome.latency.get("job_served_s")
    if isinstance(served, dict):
        point["jobs"] = {name: _figure(served[name]) for name in PERCENTILES if name in served}
    return point


def _detail(name: str, outcome: Outcome, span_s: float) -> dict[str, Any]:
    return {
        "name": name,
        "rate": _figure(outcome.hit_rate),
        "time": _over_time(outcome, span_s),
        "gap": _rows(outcome.reuse_gap),
        "life": _rows(outcome.lifetime),
        "ago": _rows(outcome.evicted_ago),
        "wait": _rows(outcome.latency.get("rows") or []),
    }


def _over_time(outcome: Outcome, span_s: float) -> list[list[float | None]]:
    """Return [seconds since the beginning, hit rate]; the last window ends with the replay.

    A closed loop has its own clock: its span follows from the distance of two windows.
    """
    timeline = outcome.timeline
    if not timeline:
        return []
    ends = [row[0] for row in timeline]
    if outcome.latency and len(ends) > 1:
        span_s = _WINDOWS * min(after - end for end, after in pairwise(ends))
    begun = ends[-1] - span_s
    return [[_figure(end - begun), _figure(hits / blocks)] for end, blocks, hits in timeline]


def _rows(rows: Sequence[Sequence[float]]) -> list[list[float | None]]:
    return [[_figure(seconds), int(amount)] for seconds, amount in rows]


def _figure(value: float | None) -> float | None:
    """Round to five significant figures; None for NaN and infinity."""
    if value is None or not math.isfinite(value):
        return None
    return float(f"{value:.5g}")
