"""Outcomes arranged for a report: a curve for each policy, and the bounds apart from them."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from kvkeep.bench.replay.bounds import BELADY, INFINITE
from kvkeep.bench.replay.words import shown
from kvkeep.core.errors import InvalidValue

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from kvkeep.bench.replay.outcome import Outcome

__all__ = ["Arranged", "PolicyCurve", "arranged"]

_USUAL = "lru"


@dataclass(frozen=True, slots=True)
class PolicyCurve:
    """The outcomes of one policy, by capacity, smallest first."""

    name: str
    outcomes: tuple[Outcome, ...]

    def at(self, capacity: int) -> Outcome | None:
        """Return the outcome with that capacity, or None."""
        return next((one for one in self.outcomes if one.capacity_tokens == capacity), None)

    def capacity_for(self, hit_rate: float) -> float | None:
        """Interpolate the capacity in tokens that reaches ``hit_rate``; None outside the curve."""
        for low, high in pairwise(self.outcomes):
            if low.hit_rate <= hit_rate <= high.hit_rate and low.hit_rate < high.hit_rate:
                part = (hit_rate - low.hit_rate) / (high.hit_rate - low.hit_rate)
                return low.capacity_tokens + part * (high.capacity_tokens - low.capacity_tokens)
        return None

    def what_if(self) -> list[tuple[float, float]]:
        """Return the points of all sampled curves: (capacity in tokens, hit rate), sorted."""
        return sorted({at: rate for one in self.outcomes for at, rate in one.what_if}.items())


@dataclass(frozen=True, slots=True)
class Arranged:
    """All outcomes of a report. ``capacities`` are those of the policies, smallest first."""

    policies: tuple[PolicyCurve, ...]
    belady: PolicyCurve | None
    infinite: Outcome | None
    capacities: tuple[int, ...]

    @property
    def usual(self) -> PolicyCurve | None:
        """The policy that others are compared with: lru, or else the first."""
        named = (line for line in self.policies if line.name == _USUAL)
        return next(named, self.policies[0] if self.policies else None)

    def best(self, capacity: int) -> PolicyCurve | None:
        """Return the policy with the most reuse at that capacity; the first of equals."""
        there = [line for line in self.policies if line.at(capacity) is not None]
        return max(there, key=lambda line: _rate(line.at(capacity)), default=None)

    def bound(self, capacity: int) -> Outcome | None:
        """Return the optimum with that capacity, if it was computed."""
        return self.belady.at(capacity) if self.belady is not None else None

    def each(self) -> Iterable[tuple[PolicyCurve, Outcome]]:
        """Yield every policy with every capacity: by capacity, then in the given order."""
        for capacity in self.capacities:
            for line in self.policies:
                outcome = line.at(capacity)
                if outcome is not None:
                    yield line, outcome

    def priced(self) -> list[tuple[PolicyCurve, Outcome]]:
        """Return what costs are told of: replays that take no time, where there are any.

        Others repeat a setting to see how long requests wait, in an order that is not the trace's.
        """
        found = list(self.each())
        return [one for one in found if not one[1].latency] or found


def arranged(outcomes: Sequence[Outcome]) -> Arranged:
    """Arrange ``outcomes``.

    Raises `InvalidValue` if there are none, or if they are of different traces.
    """
    if not outcomes:
        raise InvalidValue("a report needs at least one outcome")
    traces = {outcome.digest for outcome in outcomes}
    if len(traces) > 1:
        raise InvalidValue(f"a report is about one trace; these outcomes are of {len(traces)}")
    policies = [one for one in outcomes if one.policy not in {BELADY, INFINITE}]
    sizes = len({one.page_tokens for one in policies}) > 1
    lines: dict[str, list[Outcome]] = {}
    for outcome in policies:
        _place(lines, outcome, sizes=sizes)
    bound = [one for one in outcomes if one.policy == BELADY]
    infinite = [one for one in outcomes if one.policy == INFINITE]
    return Arranged(
        policies=tuple(PolicyCurve(name, _sorted(found)) for name, found in lines.items()),
        belady=PolicyCurve(BELADY, _sorted(bound)) if bound else None,
        infinite=infinite[0] if infinite else None,
        capacities=tuple(sorted({one.capacity_tokens for one in policies or bound})),
    )


def _place(lines: dict[str, list[Outcome]], outcome: Outcome, *, sizes: bool) -> None:
    """Add an outcome to its curve; a repeated policy and capacity starts another one."""
    name = shown(outcome.policy, 40)
    if sizes:
        name += f", pages of {outcome.page_tokens}"
    own, number = name, 1
    while any(one.capacity_tokens == outcome.capacity_tokens for one in lines.get(own, ())):
        number += 1
        own = f"{name} ({number})"
    lines.setdefault(own, []).append(outcome)


def _sorted(found: Iterable[Outcome]) -> tuple[Outcome, ...]:
    return tuple(sorted(found, key=lambda one: one.capacity_tokens))


def _rate(outcome: Outcome | None) -> float:
    return outcome.hit_rate if outcome is not None else 0.0
