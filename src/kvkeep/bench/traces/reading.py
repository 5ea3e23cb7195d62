"""`open_trace`: reads a trace file in any of the known formats."""

from __future__ import annotations

import hashlib
import heapq
import json
import re
from collections import OrderedDict
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from kvkeep.bench.traces.chain import chain_tokens
from kvkeep.bench.traces.fields import (
    BadLine,
    Fresh,
    count,
    json_object,
    number,
    opened,
    optional_count,
    optional_seconds,
    optional_text,
    shown,
    unit_ids,
)
from kvkeep.bench.traces.native import Native, TraceHeader
from kvkeep.bench.traces.request import MAX_UNIT_TOKENS, TraceRequest
from kvkeep.bench.traces.sessions import BLOCK_TOKENS, SessionReader, files_of, first_block_size
from kvkeep.core.errors import InvalidValue, whole
from kvkeep.core.tokens import as_tokens

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import numpy.typing as npt

    from kvkeep.bench.traces.chain import Words
    from kvkeep.bench.traces.request import UnitArray

__all__ = [
    "FORMATS",
    "Bailian",
    "FileTrace",
    "Format",
    "Mooncake",
    "PromptReader",
    "open_trace",
    "words",
]

# A word with the space before it, or one other character: close to the tokens of English text.
_PIECE = re.compile(r"\s*\w{1,32}|\s*[^\w\s]|\s+")
_MARK = "<|{}|>\n"
_SYSTEM = ("system", "developer", "instructions")  # fields, and roles of messages
_TOOLS = ("tools", "functions")


class PromptReader:
    """Reads lines with ``prompt`` (text), ``tokens`` (ids) or ``messages``.

    ``system`` or ``instructions`` and ``tools`` beside text or messages are a part of the prompt,
    in front of it, as logged requests to the APIs of Anthropic and OpenAI have them.

    Optional: ``time`` or ``timestamp`` (s; otherwise requests are a second apart),
    ``output_tokens``, ``namespace`` (or ``cache_salt``), ``session``, ``parent``, ``turn``,
    ``kind``, ``stop``, ``took_s``. Ids are made here, by default one per token, which is exact.
    """

    def __init__(self, unit_tokens: int | None) -> None:
        self.unit_tokens = unit_tokens or 1
        self._timed: str | None = None
        self._read = 0

    def read(self, line: bytes) -> TraceRequest:
        """Return the request of a line."""
        found = json_object(line)
        tokens = self._tokens(found)
        time = self._time(found)
        namespace = optional_text(found, "namespace") or optional_text(found, "cache_salt") or ""
        return TraceRequest(
            time,
            chain_tokens(tokens, self.unit_tokens),
            len(tokens),
            optional_count(found, "output_tokens") or 0,
            namespace,
            session=optional_text(found, "session"),
            parent=optional_text(found, "parent"),
            turn=optional_count(found, "turn"),
            kind=optional_text(found, "kind") or "",
            stop=optional_text(found, "stop") or "",
            took_s=optional_seconds(found, "took_s"),
        )

    def _time(self, found: dict[str, Any]) -> float:
        """Return the time of a request; the first line decides whether the file has times."""
        if not self._read:
            self._timed = next((key for key in ("time", "timestamp") if key in found), None)
        time = float(self._read) if self._timed is None else number(found, self._timed)
        self._read += 1
        return time

    def _tokens(self, found: dict[str, Any]) -> npt.NDArray[np.int32] | Words:
        if isinstance(text := found.get("prompt"), str):
            return words(_rendered(found, []) + text)
        if isinstance(messages := found.get("messages"), list):
            return words(_rendered(found, messages))
        ids = found.get("tokens", found.get("prompt"))
        if not isinstance(ids, list):
            raise BadLine("a prompt needs text in `prompt`, ids in `tokens`, or `messages`")
        try:
            return as_tokens(ids)
        except InvalidValue as error:
            raise BadLine(str(error)[:300]) from error


def words(text: str) -> Words:
    """Return 64-bit hashes of words, with the space before them, and other single characters.

    English text has about a tenth fewer of them than tokens; other languages differ more.
    """
    return np.array([_word(piece) for piece in _PIECE.findall(text)], np.uint64)


@lru_cache(maxsize=65_536)
def _word(piece: str) -> int:
    encoded = piece.encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.blake2b(encoded, digest_size=8).digest(), "little")


def _rendered(found: dict[str, Any], messages: list[Any]) -> str:
    """Return the prompt of a request as one text, to which more messages only append.

    As in most templates, what the system says comes first, then the tools, then the conversation.
    """
    parts = []
    for key in _SYSTEM:
        if found.get(key):
            parts += [_MARK.format("system"), _content(found[key], key)]
    turns = [_turn(message) for message in messages]
    head = next(
        (at for at, message in enumerate(messages) if message.get("role") not in _SYSTEM),
        len(messages),
    )
    parts += turns[:head]
    for key in _TOOLS:
        if found.get(key):
            parts += [_MARK.format("tools"), _content(found[key], key)]
    return "".join(parts + turns[head:])


def _turn(message: object) -> str:
    if not isinstance(message, dict):
        raise BadLine(f"messages has {shown(message)}; objects are needed")
    text = _MARK.format(message.get("role")) + _content(message.get("content"), "content")
    calls = message.get("tool_calls")
    return text + json.dumps(calls, sort_keys=True) if calls else text


def _content(content: object, name: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise BadLine(f"{name} is {shown(content)}; text or a list of parts is needed")
    return "".join(
        part["text"]
        if isinstance(part, dict) and isinstance(part.get("text"), str)
        else _json(part)  # a tool; an image, by its URL
        for part in content
    )


def _json(part: object) -> str:
    """Return a part as text, without its mark for caches, which moves from turn to turn."""
    if isinstance(part, dict):
        part = {key: value for key, value in part.items() if key != "cache_control"}
    return json.dumps(part, sort_keys=True)


_MOST_SESSIONS = 1_000_000  # chats whose session is remembered


class Format(Protocol):
    """Reads the lines of one format."""

    unit_tokens: int

    def read(self, line: bytes) -> TraceRequest | None:
        """Return the request of a line; None for a header."""


class _IdLines:
    """JSON lines with ``input_length`` and ``hash_ids``, the ids of the prompt's units."""

    _CHAINED: bool
    _UNIT: int

    def __init__(self, unit_tokens: int | None) -> None:
        self.unit_tokens = unit_tokens or self._UNIT
        self._fresh = Fresh()

    def _prompt(self, found: dict[str, Any]) -> tuple[UnitArray, int]:
        tokens = count(found, "input_length")
        units = unit_ids(
            found, "hash_ids", tokens, self.unit_tokens, chained=self._CHAINED, fresh=self._fresh
        )
        return units, tokens


class Mooncake(_IdLines):
    """``timestamp`` (ms), ``input_length``, ``output_length``, ``hash_ids``.

    Released with Mooncake (FAST'25): ids are chained and stand for 512 tokens. Optional:
    ``output_length``, ``session_id``, ``stop_reason``, and ``api_time``, the seconds that the
    request took (0: unknown). A further request of a session may have, instead of ``timestamp``,
    the ``delay`` (ms) from the end of the answer before it, or from that request if its
    ``api_time`` is unknown.
    """

    _CHAINED = True
    _UNIT = 512

    def __init__(self, unit_tokens: int | None) -> None:
        super().__init__(unit_tokens)
        # By session: when its latest request ended, and the first id, if that is of a full unit.
        self._latest: OrderedDict[str, tuple[float, int | None]] = OrderedDict()

    def read(self, line: bytes) -> TraceRequest:
        """Return the request of a line."""
        found = json_object(line)
        units, tokens = self._prompt(found)
        session = optional_text(found, "session_id")
        request = TraceRequest(
            self._time(found, session, units),
            units,
            tokens,
            optional_count(found, "output_length") or 0,
            session=session,
            stop=optional_text(found, "stop_reason") or "",
            took_s=optional_seconds(found, "api_time") or None,
        )
        if session is not None:
            self._latest.pop(session, None)
            first = int(units[0]) if tokens >= self.unit_tokens else None
            self._latest[session] = request.time + (request.took_s or 0.0), first
            if len(self._latest) > _MOST_SESSIONS:
                self._latest.popitem(last=False)
        return request

    def _time(self, found: dict[str, Any], session: str | None, units: UnitArray) -> float:
        """Return the time of a request, which may be told from the request before it."""
        if "timestamp" in found or "delay" not in found:
            return number(found, "timestamp") / 1000
        if session is None or session not in self._latest:
            raise BadLine("delay counts from a request of the same session_id, and none is before")
        ended, first = self._latest[session]
        if first is not None and (not len(units) or units[0] != first):
            raise BadLine(
                "hash_ids do not begin like those of the request before it in the session: ids of "
                "what is new in a prompt, without those before, are not read"
            )
        return ended + (optional_seconds(found, "delay") or 0.0) / 1000


class Bailian(_IdLines):
    """Qwen-Bailian's anonymised traces: ``timestamp`` (s), ``chat_id``, ``parent_chat_id``, ….

    Their ids are hashes of 16 tokens each, published as independent of the tokens before them, and
    are therefore chained here. Ids that are chained twice are equal where they were equal before.
    A session has the name of its first chat.
    """

    _CHAINED = False
    _UNIT = 16

    def __init__(self, unit_tokens: int | None) -> None:
        super().__init__(unit_tokens)
        self._roots: OrderedDict[str, str] = OrderedDict()

    def read(self, line: bytes) -> TraceRequest:
        """Return the request of a line."""
        found = json_object(line)
        chat, parent = optional_text(found, "chat_id"), optional_text(found, "parent_chat_id")
        if parent == "-1":
            parent = None
        return TraceRequest(
            number(found, "timestamp"),
            *self._prompt(found),
            optional_count(found, "output_length") or 0,
            session=self._session(chat, parent),
            parent=parent,
            turn=optional_count(found, "turn"),
            kind=optional_text(found, "type") or "",
        )

    def _session(self, chat: str | None, parent: str | None) -> str | None:
        if chat is None:
            return parent
        root = chat if parent is None else self._roots.get(parent, parent)
        self._roots[chat] = root
        if len(self._roots) > _MOST_SESSIONS:
            self._roots.popitem(last=False)
        return root


SESSIONS = "kv-cache-tester"
FORMATS = ("kvkeep", "mooncake", "bailian", "prompts", SESSIONS)
"""Names of the formats that `open_trace` reads."""

_KINDS: dict[str, Callable[[int | None], Format]] = {
    "mooncake": Mooncake,
    "bailian": Bailian,
    "prompts": PromptReader,
}
# A capture writes requests when they end: lines are out of order by the duration of a request.
# Files with all requests of a session in a row are out of order by the duration of a session.
_WINDOW = 1 << 17
_WINDOW_UNITS = 8 << 20
_REASONS = 5
_FIRST_LINES = 20  # lines from which the format is detected


def open_trace(
    path: str | Path,
    *,
    format: str | None = None,
    unit_tokens: int | None = None,
) -> FileTrace:
    """Open a trace file, which may be compressed with gzip or zstd, or a directory of sessions.

    ``format`` is one of `FORMATS`; None detects it. An invalid line is skipped and counted
    (`FileTrace.skipped`, `FileTrace.reasons`). ``unit_tokens`` are the tokens per id where the file
    does not say (Mooncake 512, Bailian 16), or of ids that are made here (prompts 1). Raises
    `InvalidValue` for a file that cannot be read or has no known format, `MissingExtra` for zstd
    without zstandard.
    """
    path = Path(path)
    if format is not None and format not in FORMATS:
        raise InvalidValue(f"a format is one of {', '.join(FORMATS)}; got {format!r}")
    if unit_tokens is not None:
        whole("unit_tokens", unit_tokens, 1, MAX_UNIT_TOKENS)
    sessions = _sessions(path, format, unit_tokens)
    if sessions is not None:
        return FileTrace(path, SESSIONS, sessions)
    found, header = _look(path, format)
    if found != "kvkeep":
        return FileTrace(path, found, lambda: _Lines(path, _KINDS[found](unit_tokens)))
    assert header is not None
    if unit_tokens is not None and unit_tokens != header.unit_tokens:
        raise InvalidValue(
            f"{path} was written with units of {header.unit_tokens} tokens, not {unit_tokens}"
        )
    return FileTrace(path, found, lambda: _Lines(path, Native(header)), header=header)


class _Source(Protocol):
    """Reads the requests of one pass."""

    unit_tokens: int

    @property
    def dropped(self) -> int:
        """Requests that a capture dropped, as far as the pass has come."""

    def requests(self, noted: Callable[[str], object]) -> Iterator[TraceRequest]:
        """Yield requests by time; ``noted`` is called with the reason of each that is invalid."""


class FileTrace:
    """A trace in a file, or in the files of a directory, read again in each pass; a `Trace`.

    ``header`` is that of a file in kvkeep's own format. ``skipped`` (invalid lines), ``reasons``
    (for the first few) and ``dropped`` (requests that a capture dropped) are of the latest pass.

    Yields requests in the order of their times, the first at 0. Lines may be out of order by up to
    131,072 requests; a line that comes later is invalid. Memory: those requests, however long the
    file is; of kv-cache-tester's format, all sessions, with the ids that each request does not
    share with the one before it. Raises `InvalidValue` at the end if no line was a request.
    """

    def __init__(
        self,
        path: Path,
        format: str,
        make: Callable[[], _Source],
        *,
        header: TraceHeader | None = None,
    ) -> None:
        self.path = path
        self.format = format
        self.header = header
        self.unit_tokens = make().unit_tokens
        self._make = make
        self._pass = _Pass(self, make())

    @property
    def name(self) -> str:
        """The name in the header, or else the file's name."""
        return (self.header.name if self.header else "") or self.path.name

    @property
    def skipped(self) -> int:
        """Invalid lines in the latest pass."""
        return self._pass.skipped

    @property
    def reasons(self) -> tuple[str, ...]:
        """Reasons for the first few skipped lines: ``line 3: …``."""
        return tuple(self._pass.reasons)

    @property
    def dropped(self) -> int:
        """Requests that the capture dropped."""
        return self._pass.source.dropped

    def __iter__(self) -> Iterator[TraceRequest]:
        self._pass = _Pass(self, self._make())
        return self._pass.requests()

    def __repr__(self) -> str:
        return f"<FileTrace {self.path}, {self.format}, units of {self.unit_tokens} tokens>"


class _Pass:
    """One pass: its requests, with times from 0, and what it left out."""

    def __init__(self, trace: FileTrace, source: _Source) -> None:
        self._trace = trace
        self.source = source
        self.skipped = 0
        self.reasons: list[str] = []

    def requests(self) -> Iterator[TraceRequest]:
        """Yield requests in order, with times from 0."""
        begin: float | None = None
        for request in self.source.requests(self._bad):
            if begin is None:
                begin = request.time
            yield replace(request, time=request.time - begin) if begin else request
        if begin is None and self.skipped:
            raise InvalidValue(
                f"{self._trace.path}: none of {self.skipped} lines is a request in the format "
                f"{self._trace.format}; {self.reasons[0]}"
            )

    def _bad(self, reason: str) -> None:
        self.skipped += 1
        if len(self.reasons) < _REASONS:
            self.reasons.append(reason)


class _Lines:
    """A file with a request in each line, nearly in the order of their times."""

    def __init__(self, path: Path, format: Format) -> None:
        self._path = path
        self._format = format
        self.unit_tokens = format.unit_tokens

    @property
    def dropped(self) -> int:
        return getattr(self._format, "dropped", 0)

    def requests(self, noted: Callable[[str], object]) -> Iterator[TraceRequest]:
        waiting: list[tuple[float, int, TraceRequest]] = []
        units, last = 0, -float("inf")
        for at, request in self._read(noted):
            if request.time < last:
                noted(
                    f"line {at}: its time is {last - request.time:.3f} s before that of a "
                    f"request more than {len(waiting):,} lines earlier; sort the file by time"
                )
                continue
            heapq.heappush(waiting, (request.time, at, request))
            units += _size(request)
            while len(waiting) > _WINDOW or (units > _WINDOW_UNITS and len(waiting) > 1):
                last, _, first = heapq.heappop(waiting)
                units -= _size(first)
                yield first
        while waiting:
            yield heapq.heappop(waiting)[2]

    def _read(self, noted: Callable[[str], object]) -> Iterator[tuple[int, TraceRequest]]:
        read = self._format.read
        with opened(self._path) as lines:
            for number, line in lines:
                try:
                    if isinstance(line, BadLine):
                        raise line
                    request = read(line)
                except BadLine as error:
                    noted(f"line {number}: {error}")
                except RecursionError:
                    noted(f"line {number}: nested too deeply")
                else:
                    if request is not None:
                        yield number, request


def _size(request: TraceRequest) -> int:
    return 0 if request.units is None else len(request.units)


def _sessions(
    path: Path, format: str | None, unit_tokens: int | None
) -> Callable[[], SessionReader] | None:
    """Return what reads a file or a directory of sessions; None if it is of another format."""
    if format not in {None, SESSIONS}:
        return None
    files = files_of(path)
    sizes = (first_block_size(file) for file in files)
    block = next((size for size in sizes if size is not None), None)
    if path.is_dir() and block is None:
        raise InvalidValue(
            f"cannot read {path}: Is a directory without sessions, as {SESSIONS} has them in "
            ".json files"
        )
    if block is None and format is None:
        return None
    unit = unit_tokens or block or BLOCK_TOKENS
    return lambda: SessionReader(files, unit)


def _look(path: Path, format: str | None) -> tuple[str, TraceHeader | None]:
    """Return the format, and the header of a file in kvkeep's own."""
    if format not in {None, "kvkeep"}:
        with opened(path):  # checks that it can be read
            return str(format), None
    seen = ""  # what is there in place of a trace
    with opened(path) as lines:
        for number, line in lines:
            if number > _FIRST_LINES:
                break
            if isinstance(line, BadLine):
                seen = seen or str(line)
                continue
            try:
                found = _format_of(line)
            except BadLine as error:
                seen = seen or _described(line, error)
                continue
            if found == "kvkeep":
                return found, _header(path, number, line)
            if format is None:
                return found, None
            seen = seen or "the first line is no header"
    if not seen:
        raise InvalidValue(f"{path} has no lines; a trace has a request in each")
    if format is not None:
        raise InvalidValue(f"{path} is no trace in {format}: {seen}")
    raise InvalidValue(
        f"{path} is no trace in a known format: {seen}. A trace is a file of JSON objects, one a "
        "line, with hash_ids, prompt, tokens or messages, or of JSON objects with requests "
        f"({SESSIONS})"
    )


def _described(line: bytes, error: BadLine) -> str:
    """Return what a file has that does not begin with a request."""
    text = line.decode("utf-8", "replace").strip()
    if text[:1] == "[":
        return "it is a JSON array"
    if text[:1] == "{":
        return "its first JSON object takes several lines" if text == "{" else str(error)
    if "," in text:
        return f"it is a table with the columns {text[:200]}"
    return f"it begins with {shown(text)}, which is not JSON"


def _header(path: Path, number: int, line: bytes) -> TraceHeader:
    """Return kvkeep's header; a file with another version of it is no file of another format."""
    try:
        return TraceHeader.of(line)
    except BadLine as error:
        said = f"{path} is no trace that this kvkeep reads: line {number}: {error}"
        raise InvalidValue(said) from error


def _format_of(line: bytes) -> str:
    found = json_object(line)
    if "kvkeep_trace" in found:
        return "kvkeep"
    if "hash_ids" in found:
        return "bailian" if "chat_id" in found else "mooncake"
    if found.keys() & {"prompt", "tokens", "messages"} and "units" not in found:
        return "prompts"
    raise BadLine(f"its fields are {', '.join(sorted(found)[:12])[:200] or 'none'}")
