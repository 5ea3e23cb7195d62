"""`summarise`: figures of a trace, and the reuse that an unlimited cache would reach."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from kvkeep.bench.replay.bounds import infinite
from kvkeep.bench.replay.doubts import gaps
from kvkeep.bench.replay.outcome import OTHER
from kvkeep.bench.replay.workload import Workload

if TYPE_CHECKING:
    from kvkeep.bench.traces import Trace, TraceRequest

__all__ = ["TraceSummary", "summarise"]


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
    largest_namespace: int
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
        largest_namespace=int(np.bincount(work.namespace).max()),
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
