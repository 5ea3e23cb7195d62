"""What a trace leaves out, and whether it is long enough for the advice of its replays."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kvkeep.bench.replay.words import count, duration, share

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvkeep.bench.replay.outcome import Outcome
    from kvkeep.bench.replay.workload import Workload

__all__ = ["FEW_REQUESTS", "difference", "doubts", "gaps"]

FEW_REQUESTS = 300
"""A trace with fewer requests is too short for a plan."""
_LATE = 0.1  # share of the reuse that comes late in a trace that is too short
_DRAWS = 1000
_RANGE = (5, 95)


def gaps(workload: Workload) -> Iterator[str]:
    """Yield sentences on what the file of a trace leaves out; none if it has everything."""
    requests = len(workload)
    if workload.skipped:
        first = "".join(f": {reason}" for reason in workload.skipped_reasons[:1])
        yield (
            f"{workload.skipped:,} of {workload.skipped + requests:,} lines of the trace are "
            f"skipped{first}"
        )
    if workload.dropped:
        yield f"The capture dropped {workload.dropped:,} requests, which the trace lacks."
    if workload.unknown == requests:
        yield (
            "The trace has lengths only: no prompt can be compared with another, so it tells "
            "nothing about reuse."
        )
    elif workload.unknown:
        yield (
            f"{workload.unknown:,} of {requests:,} requests have lengths only, and count as never "
            "seen before."
        )
    if unchained := workload.unchained_units():
        yield (
            f"{unchained:,} ids follow another id than before: they are not prefix-chained; read "
            "the file with --unchained."
        )


def doubts(usual: Outcome, endless: Outcome, span_s: float, size: str) -> Iterator[str]:
    """Yield sentences on what the trace is too short to tell; none for a long one.

    ``usual`` is the outcome of the usual policy with the memory in question, called ``size``,
    ``endless`` that of an unlimited cache.
    """
    if usual.requests < FEW_REQUESTS:
        plural = "" if usual.requests == 1 else "s"
        yield (
            f"The trace has {count(usual.requests)} request{plural}, too few to advise from: "
            f"{FEW_REQUESTS} are the least, and a day of traffic is better."
        )
    if usual.hit_tokens and not usual.evicted_pages and not usual.refused:
        yield (
            f"All KV of the trace fits into {size}: nothing was evicted, so it tells neither "
            "which policy to use nor how much memory a longer time needs."
        )
    late = _late(endless, span_s)
    if late > _LATE:
        yield (
            f"{share(late)} of all reuse comes after a pause of more than half of the trace, which "
            f"covers {duration(span_s)}: a longer trace would have more reuse, and need more "
            "memory for it."
        )


def _late(endless: Outcome, span_s: float) -> float:
    """Return the share of reused blocks whose last use was more than half of the trace ago."""
    total = sum(row[1] for row in endless.reuse_gap)
    late = sum(row[1] for row in endless.reuse_gap if row[0] >= span_s / 2)
    return late / total if total and span_s > 0 else 0.0


def difference(one: Outcome, other: Outcome | None, seed: int = 0) -> tuple[float, float] | None:
    """Return the range of how much more ``one`` reuses than ``other``, as a share of all blocks.

    Without ``other``, it is the range of what ``one`` reuses. Nine in ten traces made by drawing
    stretches of this one again and again are in the range: it is wide where the difference comes
    from a few moments of the trace (moving block bootstrap; Künsch, 1989). None if the trace is one
    moment. Cost: 3 ms.
    """
    rows = np.array([row[1:] for row in one.timeline], float).reshape(-1, 2)
    hits = np.zeros(len(rows)) if other is None else np.array([row[2] for row in other.timeline])
    if len(rows) != len(hits) or len(rows) < 2:
        return None
    number = len(rows)
    stretch = max(1, round(number**0.5))
    chance = np.random.default_rng(seed)
    begins = chance.integers(0, number, (_DRAWS, -(-number // stretch)))
    drawn = (begins[:, :, None] + np.arange(stretch)).reshape(_DRAWS, -1) % number
    gained = (rows[:, 1] - hits)[drawn].sum(axis=1) / rows[:, 0][drawn].sum(axis=1)
    low, high = np.percentile(gained, _RANGE)
    return float(low), float(high)
