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
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np

from kvkeep.bench.traces.chain import chain_tokens
from kvkeep.bench.traces.documents import Documents
from kvkeep.bench.traces.fields import (
    MOST_TEXT,
    Fresh,
    count,
    number,
    optional_text,
    shown,
)
from kvkeep.bench.traces.files import BadLine, opened
from kvkeep.bench.traces.recorded import (
    Agent,
    Recorded,
    SessionMaker,
    by_time,
    expanded,
    fits,
)
from kvkeep.bench.traces.request import MAX_UNIT_TOKENS, TraceRequest, units_of
from kvkeep.core.errors import InvalidValue

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from kvkeep.bench.traces.request import UnitArray

__all__ = ["BLOCK_TOKENS", "SessionReader", "files_of", "first_block_size"]

BLOCK_TOKENS = 64
"""Tokens of an id, in files without ``block_size``."""
_FIRST_PIECES = 4  # of 256 KiB, in which the format is detected
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
    """Return the tokens of an id in a file's first session; None if it begins with none.

    Reads no further than to the beginning of the session's requests.
    """
    documents = Documents(lambda found, requests, _: None if requests is None else found)
    with opened(path) as lines:
        for piece in islice(lines.pieces(), _FIRST_PIECES):
            try:
                found = [one for one in documents.read([piece]) if not isinstance(one, BadLine)]
                head = found[0] if found else documents.head()
                if isinstance(head, dict):
                    return _block_size(head)
            except BadLine:
                return BLOCK_TOKENS
            if found:
                return None
    return None


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
        with opened(file) as lines:
            for found in Documents(SessionMaker().made).read(lines.pieces()):
                if isinstance(found, BadLine):
                    bad(found)
                else:
                    assert isinstance(found, Agent), "a document that is no session"
                    yield found

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
