"""`Advice`: what the replays of a plan recommend, by reuse or by money."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvkeep.bench.replay.candidates import PlanCandidate, cheapest_of_each_size
from kvkeep.bench.replay.doubts import difference
from kvkeep.bench.replay.plan_figures import FLEXIBLE, USUAL, WORTH, percent, points
from kvkeep.bench.replay.words import money

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kvkeep.bench.replay.plan_figures import PlanFigures

__all__ = ["Advice", "advise"]


@dataclass(frozen=True, slots=True)
class Advice:
    """A recommendation and its reasons, each one or several sentences.

    ``chosen`` is the setting to use, and ``candidates`` are those that it was chosen from: with
    prices, none costs less a month. ``warnings`` say what the trace is too short to tell.
    """

    chosen: PlanCandidate
    recommendation: str
    reasons: tuple[str, ...]
    warnings: tuple[str, ...] = ()
    candidates: tuple[PlanCandidate, ...] = ()

    @property
    def policy(self) -> str | None:
        """The policy to use; None: no cache."""
        return self.chosen.policy

    @property
    def tiering(self) -> str | None:
        """The tiering to use; None without a tier below memory."""
        return self.chosen.tiering

    @property
    def disk(self) -> bool:
        """Whether a tier below memory pays."""
        return self.chosen.disk_tokens > 0

    def __str__(self) -> str:
        return "\n\n".join((self.recommendation, *self.warnings, *self.reasons))


def advise(figures: PlanFigures) -> Advice:
    """Return the setting that costs least, or without prices the one that reuses most."""
    if figures.candidates[0].month is None:
        return _most_reuse(figures)
    return _cheapest(figures)


# --- by reuse ------------------------------------------------------------------------------------


def _most_reuse(figures: PlanFigures) -> Advice:
    plan = figures.plan
    policy, why_policy = figures.policy()
    below, why_disk = figures.disk(figures.here[policy])
    if below is not None and not figures.saves_time(*below):
        below = None
        why_disk += " But it saves no time: computing is faster than loading from it."
    chosen = PlanCandidate(policy, plan.memory_tokens, hit_rate=figures.here[policy])
    if below is not None:
        chosen = PlanCandidate(
            below[0], plan.memory_tokens, plan.disk_tokens, below[1], figures.tiers[below]
        )
        why_disk += figures.seconds(*below)
        why_policy = f"In memory alone: {_lowered(why_policy)}"
    nothing_below = " and nothing below it" if plan.disk_tokens and below is None else ""
    words = (
        f"Keep {figures.named(chosen)}{nothing_below}: {percent(chosen.hit_rate)} of all prompt "
        "tokens need not be computed; an unlimited cache would reuse "
        f"{percent(figures.most)}."
    )
    reasons = (
        figures.bounds(), why_policy, why_disk, _sizes(figures), figures.groups(policy),
        figures.misses(),
    )  # fmt: skip
    warnings = [*figures.doubts(), *_chance_of_reuse(figures, chosen)]
    if plan.prices is not None:
        warnings.append(
            "The trace has no duration, so prices tell nothing: this is what reuses most."
        )
    return Advice(
        chosen, words, tuple(filter(None, reasons)), tuple(warnings), tuple(figures.candidates)
    )


def _sizes(figures: PlanFigures) -> str:
    """Return what more and less memory reuses."""
    plan = figures.plan
    rates = {
        one.memory_tokens: one.hit_rate
        for one in figures.candidates
        if one.policy == FLEXIBLE and not one.disk_tokens
    }
    here = plan.memory_tokens
    parts = [f"{plan.size(size)} {percent(rate)}" for size, rate in sorted(rates.items())]
    said = f"More or less memory, with the policy {FLEXIBLE}: " + ", ".join(parts) + "."
    twice, half = rates.get(2 * here), rates.get(here // 2)
    if twice is not None and twice - rates[here] < WORTH:
        said += " Twice the memory would add next to nothing."
        if half is not None and rates[here] - half < WORTH:
            said += " Half of the memory would be enough for this trace."
    elif twice is not None:
        said += f" Twice the memory would add {points(twice - rates[here])}."
    return said


def _chance_of_reuse(figures: PlanFigures, chosen: PlanCandidate) -> Iterator[str]:
    """Yield a warning if the usual policy in memory alone may reuse as much on another day."""
    run, usual = figures.run(chosen), figures.plan.of(USUAL)
    if run == usual:
        return
    spread = difference(figures.outcomes[run], figures.outcomes[usual])
    if spread is not None and spread[0] <= 0 <= spread[1]:
        low, high = map(points, spread)
        yield (
            "It is not certain that this reuses more than lru in memory alone: by other parts of "
            f"the trace, the difference is between {low} and {high}."
        )


# --- by money ------------------------------------------------------------------------------------


def _cheapest(figures: PlanFigures) -> Advice:
    found = [one for one in figures.candidates if not one.disk_tokens or figures.in_time(one)]
    nothing = found[0]
    chosen = min(found, key=_month)
    if chosen.policy is None:
        best = min(found[1:], key=_month)
        words = (
            "Keep no KV: no memory that was replayed saves what it costs. Computing all prompts "
            f"costs {_money(figures, nothing)} a month; the cheapest cache, {figures.named(best)}, "
            f"{_money(figures, best)}."
        )
    else:
        words = (
            f"Keep {figures.named(chosen)}: {percent(chosen.hit_rate)} of all prompt tokens need "
            f"not be computed, and a month costs {_money(figures, chosen)} instead of "
            f"{_money(figures, nothing)} without a cache. An unlimited cache would reuse "
            f"{percent(figures.most)}."
        )
    at = figures.plan.size(figures.plan.memory_tokens)
    reasons = (
        _planned(figures, chosen, found), figures.bounds(),
        f"With {at} in memory alone: {_lowered(figures.policy()[1])}",
        _disk_costs(figures, found), _size_costs(figures, found),
        figures.groups(chosen.policy or USUAL), figures.misses(),
    )  # fmt: skip
    warnings = (
        *figures.doubts(), *_untried(figures, chosen, found),
        *_chance_of_money(figures, chosen, found),
    )  # fmt: skip
    return Advice(chosen, words, tuple(filter(None, reasons)), warnings, tuple(found))


def _planned(figures: PlanFigures, chosen: PlanCandidate, found: Sequence[PlanCandidate]) -> str:
    """Return what the memory that was asked about costs, if another is cheaper."""
    here = [one for one in found if one.memory_tokens == figures.plan.memory_tokens]
    best = min(here, key=_month)
    if best == chosen:
        return ""
    return f"With {figures.named(best)}, a month costs {_money(figures, best)}."


def _disk_costs(figures: PlanFigures, found: Sequence[PlanCandidate]) -> str:
    """Return what the tier costs and saves."""
    if not figures.tiers:
        return ""
    size = figures.plan.size(figures.plan.disk_tokens)
    below = [one for one in found if one.disk_tokens]
    if not below:
        return (
            f"A tier of {size} below memory saves no time: computing is faster than loading from "
            "it."
        )
    best = min(below, key=_month)
    alone = min((one for one in found if not one.disk_tokens), key=_month)
    saved = _month(alone) - _month(best)
    return (
        f"A tier of {size} below memory {'saves' if saved > 0 else 'costs'} "
        f"{_amount(figures, abs(saved))} a month, at best with "
        f"{figures.plan.size(best.memory_tokens)} of memory, the policy {best.policy} and the "
        f"tiering {best.tiering}: {percent(best.hit_rate)} for {_money(figures, best)}."
    )


def _size_costs(figures: PlanFigures, found: Sequence[PlanCandidate]) -> str:
    """Return what more and less memory reuses and costs."""
    alone = cheapest_of_each_size(one for one in found[1:] if not one.disk_tokens)
    parts = [
        f"{figures.plan.size(one.memory_tokens)} {percent(one.hit_rate)} for {_money(figures, one)}"
        for one in sorted(alone, key=lambda one: one.memory_tokens)
    ]
    return f"More or less memory, each with its cheapest policy: {', '.join(parts)}."


def _untried(
    figures: PlanFigures, chosen: PlanCandidate, found: Sequence[PlanCandidate]
) -> Iterator[str]:
    """Yield a warning if the cheapest memory is the least or the most that was tried."""
    best = chosen if chosen.policy is not None else min(found[1:], key=_month)
    below = "with" if best.disk_tokens else "without"
    tried = {
        one.memory_tokens for one in found[1:] if bool(one.disk_tokens) == bool(best.disk_tokens)
    }
    for edge, which, other in ((min(tried), "least", "less"), (max(tried), "most", "more")):
        if best.memory_tokens == edge:
            yield (
                f"{figures.plan.size(edge)} is the {which} memory that was tried {below} a tier "
                f"below it, and the cheapest: {other} may cost less still. Plan around it to know."
            )


def _chance_of_money(
    figures: PlanFigures, chosen: PlanCandidate, found: Sequence[PlanCandidate]
) -> Iterator[str]:
    """Yield a warning if a cache may cost as much as none on another day."""
    nothing = found[0]
    cached = chosen if chosen.policy is not None else min(found[1:], key=_month)
    spread = difference(figures.outcomes[figures.run(cached)], None)
    if spread is None:
        return
    fixed = _month(cached) - (1 - cached.hit_rate) * _month(nothing)
    low, high = (share * _month(nothing) - fixed for share in spread)
    if low < 0 < high:
        yield (
            f"Whether {figures.named(cached)} is cheaper than no cache is not certain: by other "
            f"parts of the trace, it costs {_amount(figures, -low)} a month more to "
            f"{_amount(figures, high)} less."
        )


def _month(one: PlanCandidate) -> float:
    assert one.month is not None
    return one.month


def _money(figures: PlanFigures, one: PlanCandidate) -> str:
    return _amount(figures, _month(one))


def _amount(figures: PlanFigures, amount: float) -> str:
    assert figures.plan.prices is not None
    return money(amount, figures.plan.prices.currency)


def _lowered(sentence: str) -> str:
    return f"{sentence[0].lower()}{sentence[1:]}"
