"""`open_trace`: reads a trace file in any of the known formats."""

from __future__ import annotations

import heapq
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from kvkeep.bench.traces.fields import json_object, shown
from kvkeep.bench.traces.files import BadLine, opened
from kvkeep.bench.traces.formats import Bailian, Mooncake
from kvkeep.bench.traces.native import Native, TraceHeader
from kvkeep.bench.traces.prompts import PromptReader
from kvkeep.bench.traces.request import MAX_UNIT_TOKENS
from kvkeep.bench.traces.sessions import BLOCK_TOKENS, SessionReader, files_of, first_block_size
from kvkeep.core.errors import InvalidValue, whole

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kvkeep.bench.traces.formats import Format
    from kvkeep.bench.traces.request import TraceRequest

__all__ = ["FORMATS", "FileTrace", "open_trace"]

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
    def length(self) -> int | None:
        """None: the number of requests is unknown before the end of a pass."""
        return None

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
        for number, request in self._read(noted):
            if request.time < last:
                noted(
                    f"line {number}: its time is {last - request.time:.3f} s before that of a "
                    f"request more than {len(waiting):,} lines earlier; sort the file by time"
                )
                continue
            heapq.heappush(waiting, (request.time, number, request))
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
