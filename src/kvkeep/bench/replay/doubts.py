"""What a trace leaves out, and whether it is long enough for the advice of its replays."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvkeep.bench.replay.words import count, duration, share

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvkeep.bench.replay.outcome import Outcome
    from kvkeep.bench.replay.workload import Workload

__all__ = ["FEW_REQUESTS", "doubts", "gaps"]

FEW_REQUESTS = 300
"""A trace with fewer requests is too short for a plan."""
_LATE = 0.1  # share of the reuse that comes late in a trace that is too short


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
            f"{unchained:,} ids follow another id than before: they are not prefix-chained, so all "
            "figures of reuse are wrong."
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
    late = endless.late_blocks / max(1, endless.hit_blocks)
    if late > _LATE:
        yield (
            f"{share(late)} of all reuse comes after a pause of more than half of the trace, which "
            f"covers {duration(span_s)}: a longer trace would have more reuse, and need more "
            "memory for it."
        )
