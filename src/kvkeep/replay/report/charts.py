"""What the page's charts are drawn from: figures rounded to what can be seen."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from kvkeep.replay.report.words import shown

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvkeep.replay.outcome import Outcome
    from kvkeep.replay.report.arranged import Arranged, Line
    from kvkeep.replay.report.prices import Prices

__all__ = ["chart_data"]

PERCENTILES = ("p50", "p90", "p99", "mean")


def chart_data(found: Arranged, prices: Prices | None, span_s: float) -> dict[str, Any]:
    """For JSON. Histograms and times are by capacity: only one of them is looked at at a time."""
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


def _line(line: Line, prices: Prices | None, span_s: float) -> dict[str, Any]:
    return {
        "name": line.name,
        "points": [_point(one, prices, span_s) for one in line.outcomes],
        "what_if": [[int(at), _figure(rate)] for at, rate in _what_if(line)],
    }


def _point(outcome: Outcome, prices: Prices | None, span_s: float) -> dict[str, Any]:
    cost = None if prices is None else prices.month(outcome, span_s)
    point: dict[str, Any] = {"capacity": outcome.capacity_tokens, "rate": _figure(outcome.hit_rate)}
    if cost is not None:
        point["cost"] = _figure(cost.total)
    times = outcome.latency.get("ttft_s")
    if isinstance(times, dict):
        point["ttft"] = {name: _figure(times[name]) for name in PERCENTILES if name in times}
    return point


def _what_if(line: Line) -> list[tuple[float, float]]:
    """The points of all its outcomes, one for each capacity."""
    return sorted({at: rate for one in line.outcomes for at, rate in one.what_if}.items())


def _detail(name: str, outcome: Outcome, span_s: float) -> dict[str, Any]:
    return {
        "name": name,
        "rate": _figure(outcome.hit_rate),
        "time": _over_time(outcome.timeline, span_s),
        "gap": _rows(outcome.reuse_gap),
        "life": _rows(outcome.lifetime),
        "ago": _rows(outcome.evicted_ago),
    }


def _over_time(timeline: Sequence[Sequence[float]], span_s: float) -> list[list[float | None]]:
    """[seconds since the trace began, hit rate]; the last window ends with the trace."""
    if not timeline:
        return []
    begun = timeline[-1][0] - span_s
    return [[_figure(end - begun), _figure(hits / blocks)] for end, blocks, hits in timeline]


def _rows(rows: Sequence[Sequence[float]]) -> list[list[float | None]]:
    return [[_figure(seconds), int(amount)] for seconds, amount in rows]


def _figure(value: float | None) -> float | None:
    """Five figures that matter; None for what is no number."""
    if value is None or not math.isfinite(value):
        return None
    return float(f"{value:.5g}")
