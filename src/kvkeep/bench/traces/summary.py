"""`summarise`: figures of a trace, and the reuse that an unlimited cache would reach."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from kvkeep.bench.traces.pauses import Pauses, StopSummary

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvkeep.bench.traces.request import Trace, TraceRequest, UnitArray

__all__ = ["TraceSummary", "summarise"]

_STEP_TOKENS = 16  # smaller units are grouped into steps of about this size


@dataclass(slots=True)
class TraceSummary:
    """Figures of a trace; tokens are prompt tokens unless said otherwise.

    ``reusable_units`` and ``reusable_tokens`` are what an unlimited cache would reuse: the leading
    units of each prompt that were seen before in its namespace. ``elsewhere_units`` were seen only
    in other namespaces. ``unchained_units`` were seen before although the unit before them was not:
    then ids are not prefix-chained, and all of these figures are wrong.

    ``single_turn`` is the share of requests alone in their session (None without sessions).
    ``stops`` has a summary for each way in which answers ended ("": unknown).
    ``cached_tokens`` of ``served_tokens`` were reused when the trace was captured.
    """

    name: str
    unit_tokens: int
    requests: int = 0
    tokens: int = 0
    output_tokens: int = 0
    span_s: float = 0.0
    units: int = 0
    reusable_units: int = 0
    reusable_tokens: int = 0
    elsewhere_units: int = 0
    unchained_units: int = 0
    prompt_p50: int = 0
    prompt_p90: int = 0
    prompt_max: int = 0
    namespaces: int = 0
    largest_namespace: int = 0
    sessions: int = 0
    single_turn: float | None = None
    kinds: dict[str, int] = field(default_factory=dict)
    stops: dict[str, StopSummary] = field(default_factory=dict)
    served_tokens: int = 0
    cached_tokens: int = 0
    skipped: int = 0
    reasons: tuple[str, ...] = ()
    dropped: int = 0

    @property
    def reusable_share(self) -> float:
        """Share of the units that are reusable: the upper bound of any hit rate by blocks."""
        return self.reusable_units / self.units if self.units else 0.0

    def as_dict(self) -> dict[str, Any]:
        """Return all figures by name."""
        return {**asdict(self), "reusable_share": self.reusable_share}


def summarise(trace: Trace) -> TraceSummary:
    """Read all of ``trace``. Memory: about 100 bytes per different unit.

    Units of fewer than 16 tokens are grouped into steps of 16, to which figures are then exact.
    """
    found = TraceSummary(trace.name, trace.unit_tokens)
    reuse = _Reuse(found)
    spaces: Counter[str] = Counter()
    sessions: Counter[str] = Counter()
    kinds: Counter[str] = Counter()
    lengths: Counter[int] = Counter()
    pauses = Pauses()
    for request in trace:
        pauses.add(request)
        found.requests += 1
        found.tokens += request.tokens
        found.output_tokens += request.output_tokens
        found.span_s = request.time
        reuse.add(request)
        spaces[request.namespace] += 1
        kinds[request.kind] += 1
        lengths[request.tokens] += 1
        if request.session is not None:
            sessions[f"{request.namespace}/{request.session}"] += 1
        if request.served is not None:
            found.served_tokens += request.tokens
            found.cached_tokens += request.served.cached_tokens
    _lengths(found, lengths)
    found.namespaces, found.sessions = len(spaces), len(sessions)
    found.largest_namespace = max(spaces.values(), default=0)
    if sessions:
        alone = sum(count == 1 for count in sessions.values())
        found.single_turn = alone / sessions.total()
    found.kinds = {kind: count for kind, count in kinds.most_common() if kind}
    found.stops = pauses.summaries()
    found.skipped = getattr(trace, "skipped", 0)
    found.reasons = tuple(getattr(trace, "reasons", ()))
    found.dropped = getattr(trace, "dropped", 0)
    return found


class _Reuse:
    """Units seen so far, by namespace."""

    def __init__(self, found: TraceSummary) -> None:
        self._found = found
        self._step = max(1, _STEP_TOKENS // found.unit_tokens)
        self._spaces: dict[str, set[int]] = {}
        self._anywhere: set[int] = set()

    def add(self, request: TraceRequest) -> None:
        found, step = self._found, self._step
        ids = _steps(request.units, step)
        known = self._space(request.namespace)
        leading = _leading(ids, known)
        units = min(leading * step, len(request.units))
        new = ids[leading:]
        found.units += len(request.units)
        found.reusable_units += units
        found.reusable_tokens += min(units * found.unit_tokens, request.tokens)
        found.unchained_units += sum(one in known for one in new)
        if len(self._spaces) > 1:
            elsewhere = _leading(new, self._anywhere)
            found.elsewhere_units += min(elsewhere * step, len(request.units) - units)
        if request.store:
            if request.answer is not None:
                # Of the units after the full ones of the prompt, take the ends of steps.
                first = (step - 1 - request.tokens // found.unit_tokens) % step
                new += request.answer[first::step].tolist()
            known.update(new)
            if len(self._spaces) > 1:
                self._anywhere.update(new)

    def _space(self, name: str) -> set[int]:
        if name not in self._spaces:
            if len(self._spaces) == 1:  # from a second namespace on, `_anywhere` is needed
                (only,) = self._spaces.values()
                self._anywhere.update(only)
            self._spaces[name] = set()
        return self._spaces[name]


def _steps(units: UnitArray, step: int) -> list[int]:
    ids: list[int] = units[step - 1 :: step].tolist()
    if len(units) % step:
        ids.append(int(units[-1]))
    return ids


def _leading(ids: Sequence[int], known: set[int]) -> int:
    for number, one in enumerate(ids):
        if one not in known:
            return number
    return len(ids)


def _lengths(found: TraceSummary, lengths: Counter[int]) -> None:
    seen = 0
    for length in sorted(lengths):
        seen += lengths[length]
        if not found.prompt_p50 and seen * 2 >= found.requests:
            found.prompt_p50 = length
        if not found.prompt_p90 and seen * 10 >= found.requests * 9:
            found.prompt_p90 = length
        found.prompt_max = length
