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
import re
from dataclasses import dataclass, replace
from itertools import islice, pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from kvkeep.bench.traces.chain import chain_tokens
from kvkeep.bench.traces.fields import (
    LINE_BYTES,
    MOST_TEXT,
    BadLine,
    Fresh,
    count,
    json_object,
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
    "Documents",
    "Recorded",
    "SessionMaker",
    "SessionReader",
    "by_time",
    "expanded",
    "files_of",
    "first_block_size",
    "fits",
]

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


_MOST_NESTED = 16  # requests within requests
# A string, or a bracket; a quotation mark alone begins a string that is not complete.
_TOKEN = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"|["{}\[\]]', re.DOTALL)
_NEXT = re.compile(rb"[ \t\r\n]*(.?)", re.DOTALL)
_SPACE = b" \t\r\n"
_KEY = b'"requests"'


@dataclass(slots=True)
class _Open:
    """An object whose end is not read yet: its own text, and the results for its requests."""

    text: bytearray
    size: int = 0
    inner: int = 0  # brackets open in its text
    keyed: bool = False  # the last string is the key of its requests
    requests: list[Any] | None = None

    def add(self, text: bytes) -> None:
        self.size += len(text)
        if self.size <= LINE_BYTES:
            self.text += text
        else:
            self.text.clear()


class Documents:
    """Splits bytes into documents. Not thread-safe.

    ``made`` is called for each object, inner ones first, with its fields, the results for its
    requests (None if it has no list of requests), and the number of objects around it. An element
    for which it raises `BadLine`, or that is no object, is left out, and the reason is yielded.
    Memory: the results of a document, and the text of one object without its requests, at most
    `LINE_BYTES`.
    """

    def __init__(self, made: Callable[[dict[str, Any], list[Any] | None, int], object]) -> None:
        self._made = made
        self._stack: list[_Open] = []  # objects; of all but the last, the requests are being read
        self._in_list = True  # between elements, not in an object
        self._done: list[object] = []
        self._rest = b""
        self._read = 0

    def read(self, pieces: Iterable[bytes | BadLine]) -> Iterator[object]:
        """Yield the result of each document, and before it a `BadLine` for each bad element."""
        for piece in pieces:
            if isinstance(piece, BadLine):
                yield piece
                return
            try:
                self._process(self._rest + piece)
            except BadLine as error:
                yield from self._done
                yield error
                return
            yield from self._done
            self._done.clear()
        if self._stack or self._rest.strip(_SPACE):
            yield BadLine("the file ends within an object")

    def head(self) -> dict[str, Any] | None:
        """Return the fields before the requests of the document that is being read.

        None if its requests have not begun. Raises `BadLine`.
        """
        if not self._stack or self._stack[0].requests is None:
            return None
        return json_object(bytes(self._stack[0].text) + b"}")

    def _process(self, data: bytes) -> None:
        at = 0
        while (match := _TOKEN.search(data, at)) is not None:
            token, between = match[0], data[at : match.start()]
            follows = _NEXT.match(data, match.end()) if token == _KEY else None
            if token == b'"' or (follows is not None and not follows[1]):
                # The string, or what follows it, is not complete. A string longer than a line is
                # refused here, an object of that length when it ends.
                if len(data) - at > LINE_BYTES:
                    raise BadLine(f"a string has more than {LINE_BYTES >> 20} MiB")
                self._rest = data[at:]
                return
            at = match.end()
            if self._in_list:
                self._element(token, between)
            else:
                self._member(token, between, follows is not None and follows[1] == b":")
        rest = data[at:]
        if not self._in_list:
            self._stack[-1].add(rest)
        else:
            self._check_between(rest)
        self._rest = b""

    # --- between the elements of a list, or between documents ----------------------------------

    def _element(self, token: bytes, between: bytes) -> None:
        self._check_between(between)
        if token == b"{" or (token == b"[" and self._stack):
            self._stack.append(_Open(bytearray(token), 1))
            self._in_list = False
        elif token == b"]":
            if self._stack:
                self._in_list = False  # the object goes on after its requests
        elif token == b"}":
            raise BadLine("} without {")
        elif token != b"[":  # documents may form a list
            self._bad("an object is needed, got a string")

    def _check_between(self, text: bytes) -> None:
        if text := text.strip(_SPACE + b",\xef\xbb\xbf"):
            self._bad(f"an object is needed, got {text[:40]!r}")

    def _bad(self, reason: str) -> None:
        self._done.append(BadLine(f"object {self._read}: {reason}"))

    # --- within an object ----------------------------------------------------------------------

    def _member(self, token: bytes, between: bytes, is_key: bool) -> None:
        one = self._stack[-1]
        begins = one.keyed and not between.strip(_SPACE + b":")
        one.keyed = False
        one.add(between)
        if token[:1] == b'"':
            one.keyed = is_key and not one.inner
        elif token == b"[" and begins and len(self._stack) <= _MOST_NESTED:
            one.add(b"[]")
            one.requests = [] if one.requests is None else one.requests
            self._in_list = True
            return
        elif token in b"[{":
            one.inner += 1
        elif one.inner:
            one.inner -= 1
        else:
            one.add(token)
            self._end(one)
            return
        one.add(token)

    def _end(self, one: _Open) -> None:
        self._stack.pop()
        self._in_list = True
        self._read += 1
        try:
            if one.size > LINE_BYTES:
                raise BadLine(f"a request has more than {LINE_BYTES >> 20} MiB")
            found = json_object(bytes(one.text))
            if one.requests is None and type(found.get("requests")) is list:
                raise BadLine("nested too deeply")
            made = self._made(found, one.requests, len(self._stack))
        except BadLine as error:
            self._bad(str(error))
        except RecursionError:
            self._bad("nested too deeply")
        else:
            around = self._stack[-1].requests if self._stack else self._done
            assert around is not None, "an element of no list"
            around.append(made)


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
