"""Recorded requests of a session, without the ids that each shares with the one before it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from kvkeep.bench.traces.fields import (
    count,
    number,
    optional_seconds,
    optional_text,
    shown,
    whole_numbers,
)
from kvkeep.bench.traces.files import BadLine
from kvkeep.bench.traces.request import NO_UNITS, units_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from kvkeep.bench.traces.request import UnitArray

__all__ = ["Agent", "Recorded", "SessionMaker", "by_time", "expanded", "fits"]

_MOST_REQUESTS = 1_000_000  # of a session
_MOST_IDS = 1 << 27  # of a session, without those that a request shares with the one before it
_LONGEST_S = 1e9


@dataclass(frozen=True, slots=True)
class Recorded:
    """A request. Its ids are the first ``shared`` of the request before it, and then ``more``."""

    t: float
    tokens: int
    output_tokens: int
    shared: int
    more: UnitArray
    stop: str
    took_s: float | None

    @property
    def count(self) -> int:
        """Number of its ids."""
        return self.shared + len(self.more)


def _shared(before: UnitArray, ids: UnitArray) -> int:
    """Return the number of leading ids that two prompts share."""
    most = min(len(before), len(ids))
    differ = np.flatnonzero(before[:most] != ids[:most])
    return int(differ[0]) if len(differ) else most


def expanded(requests: Iterable[Recorded]) -> Iterator[tuple[Recorded, UnitArray]]:
    """Yield requests with all of their ids."""
    ids = NO_UNITS
    for one in requests:
        ids = np.concatenate((ids[: one.shared], one.more))
        yield one, ids


def by_time(requests: list[Recorded]) -> list[Recorded]:
    """Return requests in the order of their times; they nearly always are."""
    if all(one.t <= later.t for one, later in pairwise(requests)):
        return requests
    kept, before = [], NO_UNITS
    for one, ids in sorted(expanded(requests), key=lambda pair: pair[0].t):
        shared = _shared(before, ids)
        kept.append(replace(one, shared=shared, more=ids[shared:].copy()))
        before = ids
    return kept


@dataclass(slots=True)
class Agent:
    """A session or a sub-agent: its fields, its requests, and the agents that it called."""

    found: dict[str, Any]
    requests: list[Recorded]
    agents: list[Agent]


class SessionMaker:
    """Makes requests and agents of the objects of a file, with limits for each session."""

    def __init__(self) -> None:
        self.requests = self.ids = 0
        self._before: dict[int, UnitArray] = {}  # ids of the request before, by depth

    def made(
        self, found: dict[str, Any], requests: list[Any] | None, depth: int
    ) -> Recorded | Agent:
        """Return what an object stands for. Raises `BadLine`."""
        if not depth:
            self.requests = self.ids = 0
        if requests is None:
            if not depth:
                raise BadLine("a session has a list of requests")
            return self._recorded(found, depth)
        self._before.pop(depth + 1, None)
        own = [one for one in requests if isinstance(one, Recorded)]
        return Agent(found, own, [one for one in requests if isinstance(one, Agent)])

    def _recorded(self, found: dict[str, Any], depth: int) -> Recorded:
        t = number(found, "t")
        if not 0 <= t <= _LONGEST_S:
            raise BadLine(f"t is {shown(found['t'])}; seconds in 0 … {_LONGEST_S:g} are needed")
        ids = whole_numbers(found, "hash_ids") if found.get("hash_ids") is not None else NO_UNITS
        shared = _shared(self._before.get(depth, NO_UNITS), ids)
        recorded = Recorded(
            t,
            count(found, "in"),
            count(found, "out"),
            shared,
            ids[shared:].copy(),
            optional_text(found, "stop") or "",
            optional_seconds(found, "api_time") or None,
        )
        if self.requests >= _MOST_REQUESTS or self.ids + len(ids) - shared > _MOST_IDS:
            raise BadLine(
                f"a session has at most {_MOST_REQUESTS:,} requests, with {_MOST_IDS:,} ids that "
                "they do not share with the request before"
            )
        self.requests += 1
        self.ids += len(ids) - shared
        self._before[depth] = ids
        return recorded


def fits(one: Recorded, block_tokens: int) -> bool:
    """Return whether a request has an id for each block, at least for each full one, or none."""
    full, blocks = one.tokens // block_tokens, units_of(one.tokens, block_tokens)
    return one.count in {0, full, blocks}
