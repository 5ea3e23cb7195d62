"""`summarise`: figures of a trace, the reuse that an unlimited cache would reach, and doubts."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from kvkeep.bench.replay.bounds import infinite
from kvkeep.bench.replay.outcome import OTHER
from kvkeep.bench.replay.words import count, duration, share
from kvkeep.bench.replay.workload import Workload

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvkeep.bench.replay.outcome import Outcome
    from kvkeep.bench.traces import Trace, TraceRequest

__all__ = ["FEW_REQUESTS", "TraceSummary", "doubts", "gaps", "summarise"]

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


@dataclass(slots=True)
class TraceSummary:
    """Figures of a trace; tokens are prompt tokens unless said otherwise.

    ``reusable_units`` and ``reusable_tokens`` are what an unlimited cache reuses (`infinite`): the
    leading units of each prompt that were stored before in its namespace. No replay reuses more.
    ``elsewhere_tokens`` were seen only in other namespaces.

    ``cached_tokens`` of ``served_tokens`` were reused when the trace was captured.
    ``skipped`` lines were invalid, for the ``skipped_reasons`` (the first few), ``dropped``
    requests were lost by the capture, and ``unknown`` requests have lengths only; ``warnings`` are
    sentences on what the file leaves out.
    """

    name: str
    unit_tokens: int
    requests: int
    tokens: int
    output_tokens: int
    span_s: float
    units: int
    reusable_units: int
    reusable_tokens: int
    elsewhere_tokens: int
    prompt_p50: int
    prompt_p90: int
    prompt_max: int
    namespaces: int
    sessions: int
    served_tokens: int
    cached_tokens: int
    skipped: int
    skipped_reasons: tuple[str, ...]
    dropped: int
    unknown: int
    warnings: tuple[str, ...]

    @property
    def reusable_share(self) -> float | None:
        """Share of the units that are reusable: the upper bound of any hit rate by blocks.

        None if the trace has lengths only.
        """
        if self.unknown == self.requests:
            return None
        return self.reusable_units / self.units if self.units else 0.0

    def as_dict(self) -> dict[str, Any]:
        """Return all figures by name."""
        return {**asdict(self), "reusable_share": self.reusable_share}


def summarise(trace: Trace) -> TraceSummary:
    """Read all of ``trace``. Memory: that of its `Workload`.

    Raises what reading raises, and `InvalidValue` for a trace without requests.
    """
    seen = _Seen()
    work = Workload.read(trace, each=seen.add)
    endless = infinite(work)
    lengths = np.sort(work.tokens)
    count = len(work)
    return TraceSummary(
        work.name,
        work.unit_tokens,
        requests=count,
        tokens=endless.tokens,
        output_tokens=int(work.output_tokens.sum(dtype="int64")),
        span_s=work.span_s,
        units=endless.blocks,
        reusable_units=endless.hit_blocks,
        reusable_tokens=endless.hit_tokens,
        elsewhere_tokens=endless.misses[OTHER],
        prompt_p50=int(lengths[-(-count // 2) - 1]),
        prompt_p90=int(lengths[-(-count * 9 // 10) - 1]),
        prompt_max=int(lengths[-1]),
        namespaces=len(work.namespaces),
        sessions=len(np.unique(work.session[work.session >= 0])),
        served_tokens=seen.served_tokens,
        cached_tokens=seen.cached_tokens,
        skipped=work.skipped,
        skipped_reasons=work.skipped_reasons,
        dropped=work.dropped,
        unknown=work.unknown,
        warnings=tuple(gaps(work)),
    )


@dataclass(slots=True)
class _Seen:
    """What a `Workload` does not have of its requests."""

    served_tokens: int = 0
    cached_tokens: int = 0

    def add(self, request: TraceRequest) -> None:
        if request.served is not None:
            self.served_tokens += request.tokens
            self.cached_tokens += request.served.cached_tokens
