"""Sessions of agents, a JSON object each, as the project kv-cache-tester publishes them.

    {"id": "…", "block_size": 64, "hash_id_scope": "local", "requests": [
      {"t": 0.0, "in": 2067, "out": 45, "hash_ids": [1, 2, …], "stop": "tool_use", "api_time": 9},
      {"t": 12.0, "type": "subagent", "agent_id": "…", "requests": [{"t": 12.1, …}, …]}]}

Times are seconds from the beginning of the session. A sub-agent is a session of its own, called by
the session around it; its times count from the same beginning (from its own ``t`` if they are
smaller). Ids are known in their session and its sub-agents only (``local``) or in all sessions
(``global``).
"""

from __future__ import annotations

import hashlib
import heapq
import math
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from kvkeep.bench.traces.chain import chain_tokens
from kvkeep.bench.traces.fields import (
    MOST_TEXT,
    BadLine,
    Fresh,
    count,
    json_object,
    json_values,
    number,
    opened,
    optional_seconds,
    optional_text,
    shown,
    whole_numbers,
)
from kvkeep.bench.traces.request import MAX_UNIT_TOKENS, NO_UNITS, TraceRequest, units_of
from kvkeep.core.errors import InvalidValue

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from pathlib import Path

    from kvkeep.bench.traces.request import UnitArray

__all__ = [
    "BLOCK_TOKENS",
    "Agent",
    "Recorded",
    "SessionReader",
    "by_time",
    "expanded",
    "files_of",
    "first_block_size",
    "fits",
]

_MOST_BYTES = 128 << 20  # of a session
_MOST_NESTED = 16  # requests within requests
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


def _recorded(found: dict[str, Any], before: UnitArray) -> tuple[Recorded, UnitArray]:
    """Return a request, and its ids; ``before`` are those of the request before it."""
    t = number(found, "t")
    if not 0 <= t <= _LONGEST_S:
        raise BadLine(f"t is {shown(found['t'])}; seconds in 0 … {_LONGEST_S:g} are needed")
    ids = whole_numbers(found, "hash_ids") if found.get("hash_ids") is not None else NO_UNITS
    shared = _shared(before, ids)
    recorded = Recorded(
        t,
        count(found, "in"),
        count(found, "out"),
        shared,
        ids[shared:].copy(),
        optional_text(found, "stop") or "",
        optional_seconds(found, "api_time") or None,
    )
    return recorded, ids


def _agent(found: dict[str, Any], bad: Callable[[object], object], depth: int = 0) -> Agent:
    """Return a session or a sub-agent; ``bad`` is called for each request that is left out."""
    agent, before = Agent(found, [], []), NO_UNITS
    for place, request in enumerate(found.pop("requests"), 1):
        try:
            if not isinstance(request, dict):
                raise BadLine(f"an object is needed, got {shown(request)}")
            if _is_agent(request):
                if depth >= _MOST_NESTED:
                    raise BadLine("nested too deeply")
                agent.agents.append(_agent(request, bad, depth + 1))
            else:
                recorded, before = _recorded(request, before)
                agent.requests.append(recorded)
        except BadLine as error:
            bad(f"request {place}: {error}")
    return agent


def _is_agent(found: dict[str, Any]) -> bool:
    return isinstance(found.get("requests"), list)


def fits(one: Recorded, block_tokens: int) -> bool:
    """Return whether a request has an id for each block, at least for each full one, or none."""
    full, blocks = one.tokens // block_tokens, units_of(one.tokens, block_tokens)
    return one.count in {0, full, blocks}


def _documents(path: Path) -> Iterator[dict[str, Any] | BadLine]:
    """Yield the objects of a file: one a line; else of all its text, one after the other or listed.

    Memory: about ten times the longest line, or the text.
    """
    with opened(path, _MOST_BYTES) as lines:
        for place, line in lines:
            try:
                if isinstance(line, BadLine):
                    raise line
                found = json_object(line)
            except BadLine as error:
                if place == 1:
                    yield from _in_text(line, (more for _, more in lines))
                    return
                yield BadLine(f"line {place}: {error}")
            else:
                yield found


def _in_text(
    first: bytes | BadLine, rest: Iterable[bytes | BadLine]
) -> Iterator[dict[str, Any] | BadLine]:
    """Yield the objects of a text, and at its end why the rest of it is left out."""
    text, size = [], 0
    for line in (first, *rest):
        if isinstance(line, BadLine):
            yield line
            break
        size += len(line)
        if size > _MOST_BYTES:
            yield BadLine(f"more than {_MOST_BYTES >> 20} MiB, and no session a line")
            return
        text.append(line)
    yield from json_values(b"".join(text))


BLOCK_TOKENS = 64
"""Tokens of an id, in files without ``block_size``."""
_SUFFIXES = (".json", ".jsonl")
_PACKED = (".gz", ".zst")
_EARLY_S = 1e-6
_TAIL = 1 << 63  # no id has this bit


def files_of(path: Path) -> list[Path]:
    """Return the files of a directory that may have sessions, by name; a file alone as it is.

    Raises `InvalidValue` for a directory that cannot be listed.
    """
    if not path.is_dir():
        return [path]
    try:
        listed = sorted(path.iterdir())
    except OSError as error:
        raise InvalidValue(f"cannot read {path}: {error.strerror}") from error
    found = []
    for one in listed:
        name = one.name.lower()
        for suffix in _PACKED:
            name = name.removesuffix(suffix)
        if name.endswith(_SUFFIXES) and one.is_file():
            found.append(one)
    return found


def first_block_size(path: Path) -> int | None:
    """Return the tokens of an id in a file's first session; None if it begins with none."""
    with opened(path, _MOST_BYTES) as lines:
        first = next((line for _, line in lines), b"")
    if isinstance(first, BadLine) or not first.lstrip().startswith((b"{", b"[")):
        return None
    found = next(iter(_documents(path)), None)
    try:
        return _block_size(found) if isinstance(found, dict) and _is_agent(found) else None
    except BadLine:
        return BLOCK_TOKENS


def _block_size(found: dict[str, Any]) -> int:
    if found.get("block_size") is None:
        return BLOCK_TOKENS
    return count(found, "block_size", 1, MAX_UNIT_TOKENS)


@dataclass(frozen=True, slots=True)
class _Stream:
    """The requests of a session or a sub-agent, in the order of their times."""

    name: str
    kind: str
    caller: str | None
    seed: int  # of its ids
    block_tokens: int
    requests: list[Recorded]


class SessionReader:
    """One pass over files of sessions.

    A request has one id for ``unit_tokens``, a multiple of the ``block_size`` of each file.
    The files do not say when sessions begin: they do within the time of the longest one, each at a
    moment that its name decides. Memory: all sessions, with the ids that each request does not
    share with the one before it.
    """

    dropped = 0

    def __init__(self, files: Sequence[Path], unit_tokens: int) -> None:
        self._files = files
        self.unit_tokens = unit_tokens
        self._names: dict[str, int] = {}
        self._fresh = Fresh()

    def requests(self, noted: Callable[[str], object]) -> Iterator[TraceRequest]:
        """Yield requests by time; ``noted`` is called with the reason of each that is invalid."""
        streams: list[tuple[float, _Stream]] = []
        for file in self._files:

            def bad(reason: object, name: str = file.name) -> None:
                noted(f"{name}, {reason}")

            for agent in self._agents(file, bad):
                try:
                    streams += list(self._streams(agent, file, bad))
                except BadLine as error:
                    bad(error)
        longest_s = max(
            (stream.requests[-1].t for _, stream in streams if stream.requests), default=0.0
        )
        made = [self._made(part * longest_s, stream) for part, stream in streams]
        return heapq.merge(*made, key=lambda request: request.time)

    @staticmethod
    def _agents(file: Path, bad: Callable[[object], object]) -> Iterator[Agent]:
        for place, found in enumerate(_documents(file), 1):

            def left_out(reason: object, place: int = place) -> None:
                bad(f"object {place}: {reason}")

            if isinstance(found, BadLine):
                bad(found)
            elif _is_agent(found):
                yield _agent(found, left_out)
            else:
                left_out("a session has a list of requests")

    def _streams(
        self, agent: Agent, file: Path, bad: Callable[[object], object]
    ) -> Iterator[tuple[float, _Stream]]:
        """Yield the session and its sub-agents, with when it begins, as a part of the longest."""
        found = agent.found
        block = _block_size(found)
        if self.unit_tokens % block:
            raise BadLine(
                f"block_size is {block}, of which {self.unit_tokens} tokens per id are no "
                f"multiple; give unit_tokens={math.lcm(block, self.unit_tokens)}"
            )
        scope = found.get("hash_id_scope")
        if scope not in (None, "local", "global"):  # it may be a list
            raise BadLine(f"hash_id_scope is {shown(scope)}; local or global is needed")
        name = self._named(optional_text(found, "id") or file.name.partition(".")[0])
        begin = _word("begin", name) / 2**64
        seed = 0 if scope == "global" else _word("ids", name)
        waiting: list[tuple[Agent, str, str, str | None]] = [(agent, name, "", None)]
        while waiting:
            one, name, kind, caller = waiting.pop()
            for request in one.requests:
                if not fits(request, block):
                    bad(
                        f"the request at {request.t} s: hash_ids has {request.count} ids; "
                        f"{request.tokens} tokens are {units_of(request.tokens, block)} blocks of "
                        f"{block}"
                    )
            stream = _Stream(name, kind, caller, seed, block, by_time(one.requests))
            yield begin, stream
            for place, called in enumerate(one.agents, 1):
                agent_id = optional_text(called.found, "agent_id") or str(place)
                kind = optional_text(called.found, "subagent_type") or "subagent"
                waiting.append((_absolute(called), self._named(f"{name}/{agent_id}"), kind, name))

    def _named(self, name: str) -> str:
        """Return a name that no other session has."""
        times = self._names.get(name, 0) + 1
        self._names[name] = times
        if times > 1:
            return self._named(f"{name}#{times}")
        if len(name) > MOST_TEXT:
            raise BadLine(f"the name of a sub-agent has more than {MOST_TEXT} characters")
        return name

    def _made(self, begin: float, stream: _Stream) -> Iterator[TraceRequest]:
        """Yield the requests of a session that begins at ``begin``."""
        found = expanded(stream.requests)
        fitting = ((one, ids) for one, ids in found if fits(one, stream.block_tokens))
        for turn, (one, ids) in enumerate(fitting, 1):
            yield TraceRequest(
                begin + one.t,
                self._units(stream, one, ids),
                one.tokens,
                one.output_tokens,
                session=stream.name,
                turn=turn,
                kind=stream.kind,
                stop=one.stop,
                took_s=one.took_s,
                caller=stream.caller,
            )

    def _units(self, stream: _Stream, one: Recorded, ids: UnitArray) -> UnitArray | None:
        """Return the chained ids of a prompt's units; None if the file has none of it.

        They depend on the session unless ids are global. Tokens behind the last id of the file get
        one that depends on their number: equal ids before them and an equal length make an equal
        prompt, as when a request is repeated.
        """
        blocks = units_of(one.tokens, stream.block_tokens)
        if not len(ids):
            if one.tokens >= stream.block_tokens:
                return None
            ids = self._fresh.ids(blocks)
        words = np.empty(1 + blocks, np.uint64)
        words[0] = stream.seed
        words[1 : 1 + len(ids)] = ids
        if len(ids) < blocks:
            words[-1] = _TAIL + one.tokens
        chained = chain_tokens(words, 1)[1:]
        step = self.unit_tokens // stream.block_tokens
        units = chained[step - 1 :: step]
        return np.concatenate((units, chained[-1:])) if blocks % step else units


def _absolute(agent: Agent) -> Agent:
    """Return a sub-agent whose times count from the beginning of the session around it."""
    if agent.found.get("t") is None or not agent.requests:
        return agent
    began = number(agent.found, "t")
    if min(one.t for one in agent.requests) >= began - _EARLY_S:
        return agent
    agent.requests = [replace(one, t=one.t + began) for one in agent.requests]
    return agent


def _word(*names: str) -> int:
    digest = hashlib.blake2b("/".join(names).encode("utf-8", "surrogatepass"), digest_size=8)
    return int.from_bytes(digest.digest(), "little")
