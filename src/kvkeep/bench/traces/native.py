"""kvkeep's own format: a header line, then a line per request.

    {"kvkeep_trace": 1, "name": "…", "unit_tokens": 16, "page_size": 16, "pages": 4096}
    {"time": 0.5, "tokens": 40, "output_tokens": 9, "units": "…", "answer": "…", …}
    {"dropped": 3}

Ids are 16 hexadecimal digits each, without separators; ``units`` is null if only the length
of a prompt is known. Fields with a default value are left out.
``docs/traces.md`` describes all fields.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Self

import numpy as np

from kvkeep.bench.traces.fields import (
    BadLine,
    compressor,
    count,
    json_object,
    missing,
    number,
    optional_count,
    optional_seconds,
    optional_text,
    shown,
)
from kvkeep.bench.traces.request import MAX_UNIT_TOKENS, Served, TraceRequest, units_of
from kvkeep.core.errors import InvalidValue

if TYPE_CHECKING:
    from kvkeep.bench.traces.request import Trace, UnitArray

__all__ = ["VERSION", "Native", "TraceHeader", "TraceWriter", "write_trace"]

VERSION = 1
_DIGITS = 16


@dataclass(frozen=True, slots=True)
class TraceHeader:
    """The first line. ``page_size`` and ``pages`` are those of the pool of a captured trace."""

    name: str
    unit_tokens: int
    page_size: int | None = None
    pages: int | None = None

    @classmethod
    def of(cls, line: bytes) -> TraceHeader:
        """Parse a header. Raises `BadLine`."""
        found = json_object(line)
        version = found.get("kvkeep_trace")
        if type(version) is not int or version != VERSION:
            raise BadLine(f"kvkeep_trace is {shown(version)}, not {VERSION}")
        sizes = {
            key: count(found, key, 1) if found.get(key) is not None else None
            for key in ("page_size", "pages")
        }
        unit = count(found, "unit_tokens", 1, MAX_UNIT_TOKENS)
        return cls(optional_text(found, "name") or "", unit, **sizes)

    def line(self) -> bytes:
        """Return the header as a line."""
        fields = {
            "kvkeep_trace": VERSION,
            "name": self.name,
            "unit_tokens": self.unit_tokens,
            "page_size": self.page_size,
            "pages": self.pages,
        }
        return _line(fields)


class Native:
    """Reads lines of a file with this header. ``dropped`` counts requests the capture dropped.

    Files may be joined. Behind a header of another version, or with other units, all lines are
    invalid until the next header that fits: they may mean something else.
    """

    def __init__(self, header: TraceHeader) -> None:
        self.unit_tokens = header.unit_tokens
        self.dropped = 0
        self._unread = False

    def read(self, line: bytes) -> TraceRequest | None:
        """Return the request of a line; None for a header or a note."""
        found = json_object(line)
        if "kvkeep_trace" in found:
            self._unread = True
            if TraceHeader.of(line).unit_tokens != self.unit_tokens:
                raise BadLine("a second header with another unit_tokens")
            self._unread = False
            return None
        if self._unread:
            raise BadLine("it is behind a header that is not read")
        if "dropped" in found and "units" not in found:
            self.dropped += count(found, "dropped")
            return None
        tokens = count(found, "tokens")
        output = count(found, "output_tokens")
        units = _from_hex(found, "units") if found.get("units", "") is not None else None
        if units is not None and len(units) != (wanted := units_of(tokens, self.unit_tokens)):
            raise BadLine(f"units has {len(units)} ids; {tokens} tokens are {wanted} units")
        store = found.get("store", True)
        if type(store) is not bool:
            raise BadLine(f"store is {shown(store)}; true or false is needed")
        return TraceRequest(
            number(found, "time"),
            units,
            tokens,
            output,
            optional_text(found, "namespace") or "",
            optional_text(found, "session"),
            optional_text(found, "parent"),
            optional_count(found, "turn"),
            optional_text(found, "kind") or "",
            self._answer(found, tokens, output),
            store,
            _served(found, tokens),
            optional_text(found, "stop") or "",
            optional_seconds(found, "took_s"),
            optional_text(found, "caller"),
            optional_count(found, "first_token"),
        )

    def _answer(self, found: dict[str, Any], tokens: int, output: int) -> UnitArray | None:
        if found.get("answer") is None:
            return None
        answer = _from_hex(found, "answer")
        most = (tokens + output) // self.unit_tokens - tokens // self.unit_tokens
        if len(answer) > most:
            raise BadLine(f"answer has {len(answer)} ids; {output} tokens fill {most} units")
        return answer


def _served(found: dict[str, Any], tokens: int) -> Served | None:
    if found.get("cached_tokens") is None:
        return None
    cached = count(found, "cached_tokens", 0, tokens)
    loaded = count(found, "loaded_tokens", 0, cached) if "loaded_tokens" in found else 0
    seconds = [number(found, key) if key in found else 0.0 for key in ("ttft_s", "seconds")]
    return Served(cached, loaded, *seconds)


def _from_hex(found: dict[str, Any], key: str) -> UnitArray:
    if key not in found:
        raise missing(found, key)
    text = found.get(key)
    if type(text) is not str or len(text) % _DIGITS:
        raise BadLine(f"{key} is {shown(text)}; {_DIGITS} hexadecimal digits per id are needed")
    try:
        ids = np.frombuffer(bytes.fromhex(text), ">i8").astype(np.int64)
    except ValueError as error:
        raise BadLine(f"{key} has characters other than hexadecimal digits") from error
    if len(ids) * _DIGITS != len(text) or (len(ids) and ids.min() < 0):
        raise BadLine(f"{key} needs ids in 0 … 2⁶³-1")
    return ids


def _line(fields: dict[str, Any]) -> bytes:
    known = {k: value for k, value in fields.items() if value is not None or k == "units"}
    return json.dumps(known, separators=(",", ":")).encode() + b"\n"


class TraceWriter:
    """Writes a file in kvkeep's format, compressed if its name ends in ``.gz`` or ``.zst``.

    Only its owner can read the file. Raises `InvalidValue` for a file that exists, as traces are
    not overwritten, or cannot be created; `MissingExtra` for ``.zst`` without zstandard. Not
    thread-safe.
    """

    def __init__(self, path: str | os.PathLike[str], header: TraceHeader) -> None:
        path = Path(path)
        compressed = compressor(path)
        try:
            handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        except FileExistsError as error:
            raise InvalidValue(f"{path} exists already; name another file") from error
        except OSError as error:
            raise InvalidValue(f"cannot write {path}: {error.strerror}") from error
        self._raw = os.fdopen(handle, "wb")
        self._file: IO[bytes] = self._raw if compressed is None else compressed(self._raw)
        self._file.write(header.line())

    def write(self, request: TraceRequest) -> None:
        """Write a request; times are rounded to microseconds."""
        fields: dict[str, Any] = {
            "time": round(request.time, 6),
            "tokens": request.tokens,
            "output_tokens": request.output_tokens,
            "units": None if request.units is None else _hex(request.units),
            "answer": None if request.answer is None else _hex(request.answer),
            "namespace": request.namespace or None,
            "session": request.session,
            "parent": request.parent,
            "turn": request.turn,
            "kind": request.kind or None,
            "store": None if request.store else False,
            "stop": request.stop or None,
            "took_s": None if request.took_s is None else round(request.took_s, 6),
            "caller": request.caller,
            "first_token": request.first_token,
        }
        if (served := request.served) is not None:
            fields |= {
                "cached_tokens": served.cached_tokens,
                "loaded_tokens": served.loaded_tokens or None,
                "ttft_s": round(served.ttft_s, 6),
                "seconds": round(served.seconds, 6),
            }
        self._file.write(_line(fields))

    def note_dropped(self, requests: int) -> None:
        """Record that ``requests`` more requests are missing."""
        self._file.write(_line({"dropped": requests}))

    def flush(self) -> None:
        """Write buffered lines to the file, for readers."""
        self._file.flush()
        self._raw.flush()

    def close(self) -> None:
        """End the file; until then a compressed file is incomplete."""
        try:
            self._file.close()
        finally:
            self._raw.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def write_trace(trace: Trace, path: str | os.PathLike[str]) -> int:
    """Write all of ``trace`` in kvkeep's format; return the number of requests.

    An incomplete file is removed. Raises what reading and `TraceWriter` raise.
    """
    written = 0
    with TraceWriter(path, TraceHeader(trace.name, trace.unit_tokens)) as writer:
        try:
            for request in trace:
                writer.write(request)
                written += 1
        except BaseException:
            os.unlink(path)
            raise
    return written


def _hex(units: UnitArray) -> str:
    return units.astype(">i8").tobytes().hex()
