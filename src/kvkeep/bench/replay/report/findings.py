"""What a replay found, in sentences for somebody who was not there."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvkeep.bench.replay.outcome import EVICTED, FIRST, NEVER, OTHER, REMAINDER
from kvkeep.bench.replay.report.words import count, duration, money, share, tokens

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kvkeep.bench.replay.outcome import Outcome
    from kvkeep.bench.replay.report.arranged import Arranged, PolicyCurve
    from kvkeep.bench.replay.report.prices import Prices

__all__ = ["GLOSSARY", "REASON_WORDS", "findings"]

_MOST = 5  # capacities that are told of
_SAME = 0.0005  # of a hit rate: less is no difference worth a sentence

REASON_WORDS = {
    FIRST: "were never seen before",
    EVICTED: "had been evicted",
    NEVER: "were seen before but never admitted",
    OTHER: "were cached, but in another namespace",
    REMAINDER: "lay in a page that was not reused whole",
}

GLOSSARY = (
    ("hit rate", "blocks that were reused, of all blocks of all prompts. A prompt's blocks are "
     "reused from its beginning up to the first that is missing."),
    ("block", "the unit in which the trace names its tokens; how many there are in one is under "
     "“The trace”."),
    ("capacity", "how many tokens' KV the memory holds."),
    ("policy", "who goes first when memory is full."),
    ("belady", "a bound, not a policy: what a cache of that capacity could reuse if it knew all "
     "requests that will come. Nothing that cannot see the future does better."),
    ("infinite", "a bound, not a policy: what a cache reuses that never forgets. What is missing "
     "to 100 % was asked for the first time."),
    (FIRST, "a miss that no cache can avoid: nobody asked for these tokens before."),
    (EVICTED, "a miss that more memory or a better choice could have avoided."),
    (NEVER, "seen before, but the policy or a lack of memory did not let it in."),
    (OTHER, "the same tokens were there for another tenant or model, and are not shared."),
    (REMAINDER, "cached, but not as a full page, or behind one that was missing."),
    ("reuse gap", "for a block that was reused: the time since it was last asked for. Memory has "
     "to last that long."),
    ("lifetime", "for a block that was evicted: the time it had been in the cache."),
    ("evicted too early", "for a token computed again: the time since it was evicted. Where that "
     "is short, a little more memory would have helped."),
    ("what-if", "a curve that was estimated from a sample of the requests for many capacities at "
     "once, not replayed."),
    ("TTFT", "time to first token: from a request's arrival to the first token of its answer. "
     "p50 is the median; p99 is exceeded by one request in a hundred."),
)  # fmt: skip


def findings(found: Arranged, prices: Prices | None, span_s: float) -> list[str]:
    """The sentences, the most important first."""
    said = []
    if found.infinite is not None:
        said.append(
            f"Of all blocks asked for, {share(found.infinite.hit_rate)} had been asked for before: "
            "so much would be reused by a cache that never forgets."
        )
    usual = found.usual
    if usual is not None:
        capacities = [one.capacity_tokens for one in usual.outcomes]
        said += [_capacity(found, usual, one) for one in _some(capacities)]
        said += _why(usual)
        said += _waits(usual)
    elif found.belady is not None:
        said += [
            f"With {tokens(one.capacity_tokens)} tokens, no policy can reuse more than "
            f"{share(one.hit_rate)}."
            for one in found.belady.outcomes
        ]
    said += _refused(found)
    if prices is not None:
        said += _cheapest(found, prices, span_s)
    return said


def _some(capacities: Sequence[int]) -> list[int]:
    """All of them, or a few from the first to the last."""
    if len(capacities) <= _MOST:
        return list(capacities)
    last = len(capacities) - 1
    return [capacities[round(at * last / (_MOST - 1))] for at in range(_MOST)]


def _capacity(found: Arranged, usual: PolicyCurve, capacity: int) -> str:
    mine, best, bound = usual.at(capacity), found.best(capacity), found.bound(capacity)
    assert mine is not None
    assert best is not None
    said = (
        f"With {tokens(capacity)} tokens, {usual.name} reuses {share(mine.hit_rate)} of all blocks."
    )
    theirs = best.at(capacity)
    if theirs is not None and theirs.hit_rate - mine.hit_rate > _SAME:
        said += f" {best.name} would reuse {share(theirs.hit_rate)}"
        need = usual.capacity_for(theirs.hit_rate)
        if need is not None:
            said += f", for which {usual.name} needs about {tokens(need)}"
        said += "."
    elif len(found.policies) > 1:
        said += " None of the others reuses noticeably more."
    if bound is not None:
        said += f" The most that is possible with that much memory is {share(bound.hit_rate)}."
    return said


def _why(usual: PolicyCurve) -> Iterator[str]:
    """Why the usual policy computed what it computed, with the capacity in the middle."""
    outcome = usual.outcomes[(len(usual.outcomes) - 1) // 2]
    missed = sum(outcome.misses.values())
    if not missed:
        return
    parts = [
        f"{share(amount / missed)} {REASON_WORDS.get(reason, reason)}"
        for reason, amount in sorted(outcome.misses.items(), key=lambda one: -one[1])
        if amount / missed > _SAME
    ]
    said = (
        f"Of the {tokens(missed)} tokens that {usual.name} computes with "
        f"{tokens(outcome.capacity_tokens)}, {_listed(parts)}."
    )
    middle = _median(outcome.evicted_ago)
    if middle is not None:
        said += (
            f" Half of what had been evicted was needed again within {duration(middle)} of that."
        )
    yield said


def _median(rows: Sequence[Sequence[float]]) -> float | None:
    """Seconds that half of a histogram does not exceed: the end of the step it is in."""
    half, seen = sum(row[1] for row in rows) / 2, 0.0
    for number, row in enumerate(rows):
        seen += row[1]
        if seen >= half:
            return rows[number + 1][0] if number + 1 < len(rows) else row[0]
    return None


def _waits(usual: PolicyCurve) -> Iterator[str]:
    """Times to first token with the least memory and with the most, where there are any."""
    timed = [
        (outcome.capacity_tokens, times["p50"], times["p99"])
        for outcome in usual.outcomes
        if {"p50", "p99"} <= set(times := outcome.latency.get("ttft_s") or {})
    ]
    if not timed:
        return
    capacity, half, most = timed[0]
    said = (
        f"With {tokens(capacity)} tokens and {usual.name}, half of the requests have their first "
        f"token within {duration(half)}, and 99 of 100 within {duration(most)}"
    )
    if len(timed) > 1:
        capacity, half, most = timed[-1]
        said += f"; with {tokens(capacity)} within {duration(half)} and {duration(most)}"
    yield f"{said}."


def _refused(found: Arranged) -> Iterator[str]:
    most: tuple[PolicyCurve, Outcome] | None = max(
        found.each(), key=lambda one: one[1].refused, default=None
    )
    if most is not None and most[1].refused:
        line, outcome = most
        yield (
            f"{count(outcome.refused)} of {count(outcome.requests)} requests do not fit into "
            f"{tokens(outcome.capacity_tokens)} tokens at all ({line.name}); their tokens count as "
            "computed."
        )


def _cheapest(found: Arranged, prices: Prices, span_s: float) -> Iterator[str]:
    priced = [
        (cost.total, line.name, outcome)
        for line, outcome in found.each()
        if (cost := prices.month(outcome, span_s)) is not None
    ]
    if not priced:
        yield "The trace takes no time, so that no month can be made of it: costs are left out."
        return
    total, name, outcome = min(priced, key=lambda one: one[0])
    nothing = prices.nothing_kept(outcome, span_s)
    assert nothing is not None
    without = money(nothing.total, prices.currency)
    yield (
        f"The cheapest of all that was replayed is {name} with {tokens(outcome.capacity_tokens)} "
        f"tokens: {money(total, prices.currency)} a month for prefill and memory. "
        + (
            f"Without any cache it would be {without}."
            if nothing.total >= total
            else f"No cache at all would cost less still: {without}."
        )
    )


def _listed(parts: Sequence[str]) -> str:
    if len(parts) < 2:
        return "".join(parts)
    return f"{', '.join(parts[:-1])} and {parts[-1]}"
