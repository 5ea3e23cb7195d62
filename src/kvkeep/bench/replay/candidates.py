"""`PlanCandidate`: a setting that a plan can recommend, and what it would bring."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvkeep.bench.replay.runs import BOUNDS

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from kvkeep.bench.replay.outcome import Outcome
    from kvkeep.bench.replay.prices import Prices
    from kvkeep.bench.replay.runs import ReplayRun

__all__ = ["PlanCandidate", "candidates", "cheapest_of_each_size"]


@dataclass(frozen=True, slots=True)
class PlanCandidate:
    """A setting that was replayed, or no cache at all (then ``policy`` is None).

    ``hit_rate`` is the share of prompt tokens that it reuses, ``month`` what a month of such
    traffic costs with it; None without prices.
    """

    policy: str | None
    memory_tokens: int
    disk_tokens: int = 0
    tiering: str | None = None
    hit_rate: float = 0.0
    month: float | None = None

    @classmethod
    def of(cls, run: ReplayRun, outcome: Outcome, month: float | None = None) -> PlanCandidate:
        """Return the setting of a replay."""
        return cls(
            run.policy,
            run.capacity_tokens,
            sum(run.below),
            run.tiering if run.below else None,
            outcome.token_hit_rate,
            month,
        )


def candidates(
    outcomes: Mapping[ReplayRun, Outcome], prices: Prices | None, span_s: float
) -> list[PlanCandidate]:
    """Return the settings among replays: bounds, and replays that take time, are none.

    With prices, no cache at all is the first one. Prices need a trace that takes time: with
    ``span_s`` 0 they are not used.
    """
    if span_s <= 0:
        prices = None
    found: list[PlanCandidate] = []
    for run, outcome in outcomes.items():
        if run.policy in BOUNDS or run.cost is not None:
            continue
        if prices is None:
            found.append(PlanCandidate.of(run, outcome))
            continue
        month, nothing = prices.month(outcome, span_s), prices.nothing_kept(outcome, span_s)
        assert month is not None
        assert nothing is not None
        if not found:
            found.append(PlanCandidate(None, 0, month=nothing.total))
        found.append(PlanCandidate.of(run, outcome, month.total))
    return found


def cheapest_of_each_size(found: Iterable[PlanCandidate]) -> list[PlanCandidate]:
    """Return the cheapest setting of each memory and disk, and no cache, the cheapest first."""
    best: dict[tuple[int, int], PlanCandidate] = {}
    for one in found:
        assert one.month is not None
        size = one.memory_tokens, one.disk_tokens
        known = best.get(size)
        if known is None or known.month is None or one.month < known.month:
            best[size] = one
    return sorted(best.values(), key=lambda one: one.month or 0.0)
