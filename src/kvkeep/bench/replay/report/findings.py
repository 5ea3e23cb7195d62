"""The findings of a replay, in sentences."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvkeep.bench.replay.outcome import (
    EVICTED,
    FIRST,
    NEVER,
    NO_STATE,
    NO_WINDOW,
    OTHER,
    REMAINDER,
)  # fmt: skip
from kvkeep.bench.replay.words import count, duration, money, share, tokens

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kvkeep.bench.replay.outcome import Outcome
    from kvkeep.bench.replay.prices import Prices
    from kvkeep.bench.replay.report.arranged import Arranged, PolicyCurve

__all__ = ["GLOSSARY", "REASON_WORDS", "findings"]

_MOST = 5  # capacities in the text
_SAME = 0.0005  # differences of hit rates below this are not mentioned

REASON_WORDS = {
    FIRST: "were never seen before",
    EVICTED: "had been evicted",
    NEVER: "were seen before but never admitted",
    OTHER: "were cached in another namespace",
    REMAINDER: "lay in a page that was not reused whole",
    NO_STATE: "were cached without a state to go on from",
    NO_WINDOW: "were cached, but the windows before them were not",
}

GLOSSARY = (
    ("hit rate", "reused blocks as a share of all blocks of all prompts. A prompt's blocks are "
     "reused from its beginning to the first block that is not cached."),
    ("block", "the unit in which the trace names its tokens; its size is under “The trace”."),
    ("capacity", "tokens whose KV fits into the memory."),
    ("policy", "the eviction policy: what is evicted when memory is full."),
    ("belady", "a bound, not a policy: what a cache of that capacity could reuse if it knew all "
     "future requests. No policy can do better without seeing the future."),
    ("infinite", "a bound, not a policy: what an unlimited cache reuses. The rest, up to 100 %, "
     "is requested for the first time."),
    (FIRST, "a miss that no cache can avoid: these tokens were never requested before."),
    (EVICTED, "a miss that more memory or a better policy could have avoided."),
    (NEVER, "seen before, but not admitted by the policy or for lack of memory."),
    (OTHER, "cached for another tenant or model, with which nothing is shared."),
    (REMAINDER, "cached, but not as a full page, or after a block that was missing."),
    (NO_STATE, "cached in the layers that keep every token, but no state was stored there, so a "
     "request could not go on from there."),
    (NO_WINDOW, "cached in the layers that keep every token, but layers with a window had lost "
     "what comes before."),
    ("checkpoint", "a position at which requests can resume in a model with windows or states."),
    ("reuse gap", "for a reused block: the time since its last use. Memory has to last that "
     "long."),
    ("lifetime", "for an evicted block: the time it was in the cache."),
    ("evicted too early", "for a token computed again: the time since its eviction. Where that "
     "is short, a little more memory would have helped."),
    ("what-if", "a curve estimated for many capacities at once, from a sample of the requests."),
    ("TTFT", "time to first token: from a request's arrival to the first token of its answer. "
     "p50 is the median; p99 is exceeded by one request in a hundred."),
)  # fmt: skip


def findings(found: Arranged, prices: Prices | None, span_s: float) -> list[str]:
    """Return the sentences, the most important first."""
    said = []
    if found.infinite is not None:
        said.append(
            f"Of all blocks requested, {share(found.infinite.hit_rate)} had been requested before: "
            "an unlimited cache would reuse all of these."
        )
    usual = found.usual
    if usual is not None:
        capacities = [one.capacity_tokens for one in usual.outcomes]
        said += [_capacity(found, usual, one) for one in _some(capacities)]
        said += _why(usual)
        said += [*_waits(usual), *_jobs(usual)]
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
    """Return all capacities, or a few from the first to the last."""
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
        said += " No other policy reuses noticeably more."
    if bound is not None:
        said += f" The optimum with that much memory is {share(bound.hit_rate)}."
    return said


def _why(usual: PolicyCurve) -> Iterator[str]:
    """Return a sentence on why the usual policy computed tokens, at the middle capacity."""
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
        said += f" Half of the evicted tokens were requested again within {duration(middle)}."
    yield said


def _median(rows: Sequence[Sequence[float]]) -> float | None:
    """Return the seconds that half of a histogram does not exceed: the end of that step."""
    half, seen = sum(row[1] for row in rows) / 2, 0.0
    for number, row in enumerate(rows):
        seen += row[1]
        if seen >= half:
            return rows[number + 1][0] if number + 1 < len(rows) else row[0]
    return None


def _waits(usual: PolicyCurve) -> Iterator[str]:
    """Return a sentence on the times to first token with the least and the most memory."""
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


def _jobs(usual: PolicyCurve) -> Iterator[str]:
    """Return a sentence on how long jobs are served with the least and the most memory."""
    timed = [
        (outcome.capacity_tokens, times["p50"], times["p90"])
        for outcome in usual.outcomes
        if {"p50", "p90"} <= set(times := outcome.latency.get("job_served_s") or {})
    ]
    if not timed:
        return
    capacity, half, most = timed[0]
    said = (
        f"With {tokens(capacity)} tokens and {usual.name}, half of the jobs wait for answers for "
        f"at most {duration(half)} in all, and 9 of 10 for at most {duration(most)}"
    )
    if len(timed) > 1:
        capacity, half, most = timed[-1]
        said += f"; with {tokens(capacity)} for {duration(half)} and {duration(most)}"
    yield f"{said}."


def _refused(found: Arranged) -> Iterator[str]:
    most: tuple[PolicyCurve, Outcome] | None = max(
        found.each(), key=lambda one: one[1].refused, default=None
    )
    if most is not None and most[1].refused:
        line, outcome = most
        yield (
            f"{count(outcome.refused)} of {count(outcome.requests)} requests do not fit into "
            f"{tokens(outcome.capacity_tokens)} tokens at all ({line.name}); their tokens count "
            "as computed."
        )


def _cheapest(found: Arranged, prices: Prices, span_s: float) -> Iterator[str]:
    priced = [
        (cost.total, line.name, outcome)
        for line, outcome in found.priced()
        if (cost := prices.month(outcome, span_s)) is not None
    ]
    if not priced:
        yield "The trace has no duration, so the cost of a month cannot be estimated."
        return
    total, name, outcome = min(priced, key=lambda one: one[0])
    nothing = prices.nothing_kept(outcome, span_s)
    assert nothing is not None
    without = money(nothing.total, prices.currency)
    yield (
        f"The cheapest of all replays is {name} with {tokens(outcome.capacity_tokens)} tokens: "
        f"{money(total, prices.currency)} a month for prefill and memory. "
        + (
            f"Without any cache it would be {without}."
            if nothing.total >= total
            else f"No cache at all would be cheaper still: {without}."
        )
    )


def _listed(parts: Sequence[str]) -> str:
    if len(parts) < 2:
        return "".join(parts)
    return f"{', '.join(parts[:-1])} and {parts[-1]}"
