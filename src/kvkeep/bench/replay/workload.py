"""`Workload`: a trace as arrays, to be replayed many times."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from kvkeep.bench.traces.chain import fresh_ids
from kvkeep.bench.traces.request import units_of
from kvkeep.core.errors import InvalidValue
from kvkeep.core.returns import Ended

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy.typing as npt

    from kvkeep.bench.traces import Trace, TraceRequest

    Ids = npt.NDArray[np.int32]
    Floats = npt.NDArray[np.float64]
    Wholes = npt.NDArray[np.int64]
    Flags = npt.NDArray[np.bool_]

__all__ = ["Workload"]

_MOST_IDS = 2**31 - 2  # ids are tokens of `PagedCache`; the last one is the padding token


@dataclass(frozen=True, slots=True, eq=False)
class Workload:
    """All requests of a trace, in the order of their times.

    The ids of request ``i`` are ``ids[first[i] : last[i]]``: first the ``prompt_units[i]`` ids of
    its prompt, then those that end in its answer. They number the pairs of namespace and unit from
    0, so that equal ids can be reused; ``content[id]`` numbers the units, whatever the namespace.

    ``stop[i]`` is the index in ``stops`` of how its answer ended, -1 if unknown; ``took_s[i]`` are
    the seconds that it took when the trace was recorded, NaN if unknown. ``caller[i]`` is the
    session that called the session of the request, a sub-agent's; -1 for others. ``first_token[i]``
    stands for the first token of its answer, -1 if unknown.

    ``skipped`` lines of the file were invalid, for the ``skipped_reasons`` (the first few);
    ``dropped`` requests were lost by the capture; ``unknown`` requests have lengths only, and ids
    that no other request has.

    ``digest`` identifies the workload: equal digests mean equal workloads.

    Memory: 4 bytes per unit and about 80 per request.
    """

    name: str
    unit_tokens: int
    digest: str
    times: Floats
    tokens: Ids
    output_tokens: Ids
    namespace: Ids
    namespaces: tuple[str, ...]
    session: Ids
    store: Flags
    first: Wholes
    last: Wholes
    prompt_units: Ids
    ids: Ids
    content: Ids
    stop: Ids
    stops: tuple[str, ...]
    took_s: Floats
    caller: Ids
    first_token: Ids
    skipped: int = 0
    skipped_reasons: tuple[str, ...] = ()
    dropped: int = 0
    unknown: int = 0

    def __len__(self) -> int:
        """Number of requests."""
        return len(self.times)

    @property
    def num_ids(self) -> int:
        """Number of different ids."""
        return len(self.content)

    @property
    def span_s(self) -> float:
        """Seconds from the first request to the last."""
        return float(self.times[-1] - self.times[0]) if len(self) else 0.0

    def prompt(self, number: int) -> Ids:
        """Return the ids of a request's prompt."""
        start = self.first[number]
        return self.ids[start : start + self.prompt_units[number]]

    def answer(self, number: int) -> Ids:
        """Return the ids of the full units that end in its answer, as far as the trace has them."""
        return self.ids[self.first[number] + self.prompt_units[number] : self.last[number]]

    def ended(self, number: int) -> Ended:
        """Return how a request ended, as far as the trace has it."""
        stop, first = int(self.stop[number]), int(self.first_token[number])
        return Ended(
            self.stops[stop] if stop >= 0 else None,
            max(0, int(self.output_tokens[number])),
            first if first >= 0 else None,
        )

    def unchained_units(self) -> int:
        """Return the units of prompts that follow another unit than before; 0 if ids are chained.

        Otherwise all figures of reuse are wrong.
        """
        before = np.empty_like(self.ids)
        before[1:] = self.ids[:-1]
        before[self.first[self.prompt_units > 0]] = -1
        lengths = self.last - self.first
        place = np.arange(len(self.ids)) - np.repeat(self.first, lengths)
        asked = place < np.repeat(self.prompt_units, lengths)
        ids, before = self.ids[asked], before[asked]
        _, first, numbers = np.unique(ids, return_index=True, return_inverse=True)
        return int((before != before[first][numbers]).sum())

    @classmethod
    def read(
        cls,
        trace: Trace,
        progress: Callable[[int], None] | None = None,
        each: Callable[[TraceRequest], None] | None = None,
    ) -> Workload:
        """Read all of ``trace``; ``progress`` is called with the number of requests read.

        ``each`` is called with each request.

        Raises what reading raises, and `InvalidValue` for a trace without requests.
        """
        builder = _Builder(trace.unit_tokens)
        for number, request in enumerate(trace, 1):
            builder.add(request)
            if each is not None:
                each(request)
            if progress is not None and number % 1000 == 0:
                progress(number)
        if not builder.times:
            raise InvalidValue(f"{trace.name} has no requests")
        return builder.build(trace)


class _Builder:
    def __init__(self, unit_tokens: int) -> None:
        self.unit_tokens = unit_tokens
        self.unknown = 0
        self.times: list[float] = []
        self.took_s: list[float] = []
        self.numbers: list[tuple[int, int, int, int, bool, int, int, int, int]] = []
        self.units: list[npt.NDArray[np.int64]] = []
        self.spaces: dict[str, int] = {}
        self.sessions: dict[tuple[int, str], int] = {}
        self.stops: dict[str, int] = {}
        self.callers: list[tuple[int, str] | None] = []

    def add(self, request: TraceRequest) -> None:
        space = self.spaces.setdefault(request.namespace, len(self.spaces))
        session = -1
        if request.session is not None:
            session = self.sessions.setdefault((space, request.session), len(self.sessions))
        stop = self.stops.setdefault(request.stop, len(self.stops)) if request.stop else -1
        self.callers.append(None if request.caller is None else (space, request.caller))
        duration = request.duration_s
        self.took_s.append(np.nan if duration is None else duration)
        answer = 0
        units = request.units
        if units is None:
            self.unknown += 1
            units = fresh_ids(len(self.times), units_of(request.tokens, self.unit_tokens))
        self.units.append(units)
        if request.answer is not None and len(request.answer):
            self.units.append(request.answer)
            answer = len(request.answer)
        self.times.append(request.time)
        self.numbers.append((
            request.tokens, request.output_tokens, space, session,
            request.store, len(units), answer, stop,
            -1 if request.first_token is None else request.first_token,
        ))  # fmt: skip

    def build(self, trace: Trace) -> Workload:
        table = np.array(self.numbers, np.int64)
        lengths = table[:, 5] + table[:, 6]
        last = np.cumsum(lengths)
        units = np.concatenate(self.units)
        self.units = []
        ids, content = _numbered(units, np.repeat(table[:, 2], lengths), len(self.spaces))
        if len(content) > _MOST_IDS:
            raise InvalidValue(
                f"{trace.name} has {len(content):,} different units; at most {_MOST_IDS:,} can be "
                "replayed"
            )
        digest = hashlib.blake2b(digest_size=16)
        digest.update(f"{trace.unit_tokens} {list(self.spaces)} {list(self.stops)}".encode())
        took_s = np.array(self.took_s)
        # A caller may have no requests of its own in the trace.
        callers = [-1 if one is None else self.sessions.get(one, -1) for one in self.callers]
        caller = np.array(callers, np.int32)
        for part in (np.array(self.times), table, took_s, caller, units):
            digest.update(np.ascontiguousarray(part).tobytes())
        columns = [np.ascontiguousarray(table[:, at], np.int32) for at in (0, 1, 2, 3, 5, 7, 8)]
        tokens, output_tokens, namespace, session, prompt_units, stop, first_token = columns
        return Workload(
            name=trace.name,
            unit_tokens=trace.unit_tokens,
            digest=digest.hexdigest(),
            times=np.array(self.times),
            tokens=tokens,
            output_tokens=output_tokens,
            namespace=namespace,
            namespaces=tuple(self.spaces),
            session=session,
            store=table[:, 4].astype(bool),
            first=last - lengths,
            last=last,
            prompt_units=prompt_units,
            ids=ids,
            content=content,
            stop=stop,
            first_token=first_token,
            stops=tuple(self.stops),
            took_s=took_s,
            caller=caller,
            skipped=getattr(trace, "skipped", 0),
            skipped_reasons=tuple(getattr(trace, "reasons", ())),
            dropped=getattr(trace, "dropped", 0),
            unknown=self.unknown,
        )


def _numbered(units: npt.NDArray[np.int64], spaces: Wholes, count: int) -> tuple[Ids, Ids]:
    """Return ids by namespace and unit, and for each id the number of its unit."""
    different, numbers = np.unique(units, return_inverse=True)
    if count == 1:
        return numbers.astype(np.int32), np.arange(len(different), dtype=np.int32)
    pairs, ids = np.unique(numbers * count + spaces, return_inverse=True)
    return ids.astype(np.int32), (pairs // count).astype(np.int32)
