"""Lines of a trace file, bounded in size, and their values; a wrong value raises `BadLine`."""

from __future__ import annotations

import gzip
import io
import json
import math
import zlib
from contextlib import contextmanager
from functools import lru_cache
from typing import IO, TYPE_CHECKING, Any, BinaryIO, Protocol, cast

import numpy as np

from kvkeep.bench.traces.chain import chain_ids, fresh_ids
from kvkeep.bench.traces.request import MAX_TOKENS, units_of
from kvkeep.core.errors import InvalidValue, did_you_mean, reason, require

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path
    from typing import NoReturn

    from kvkeep.bench.traces.request import UnitArray

__all__ = [
    "LINE_BYTES",
    "BadLine",
    "Fresh",
    "Lines",
    "compression",
    "compressor",
    "count",
    "json_object",
    "json_values",
    "number",
    "opened",
    "optional_count",
    "optional_seconds",
    "optional_text",
    "shown",
    "unit_ids",
]

LINE_BYTES = 16 << 20
"""Longest line; a longer one is a bad line and is never held in memory."""

_BUFFER_BYTES = 256 << 10
_GZIP = b"\x1f\x8b"
_ZSTD = b"\x28\xb5\x2f\xfd"
_LFS = b"version https://git-lfs"
# Bound on decompression: traces shrink to a fourth or, if repetitive, to a fiftieth.
_MOST_TIMES = 400
_ANYWAY_BYTES = 256 << 20
_ZSTD_WINDOW_BYTES = 128 << 20


class BadLine(Exception):
    """An invalid line, with the reason; `FileTrace` counts it, or raises `InvalidValue`."""


def compression(path: Path) -> str | None:
    """Return "gzip", "zstd" or None, from the first bytes. `InvalidValue` if unreadable."""
    if path.is_fifo() or path.is_char_device():
        kind = "pipe" if path.is_fifo() else "device"
        raise InvalidValue(f"{path} is a {kind}; a trace is read several times: save it to a file")
    try:
        with path.open("rb") as file:
            magic = file.read(len(_LFS))
    except OSError as error:
        raise InvalidValue(f"cannot read {path}: {error.strerror}") from error
    if magic == _LFS:
        raise InvalidValue(f"{path} is a Git LFS pointer, not the file: run `git lfs pull`")
    if magic.startswith(_GZIP):
        return "gzip"
    return "zstd" if magic.startswith(_ZSTD) else None


@contextmanager
def opened(path: Path, longest: int | None = None) -> Iterator[Lines]:
    """Open the file's lines, of up to ``longest`` bytes (`LINE_BYTES`).

    Raises `InvalidValue` if unreadable, `MissingExtra` without zstandard.
    """
    packed = compression(path)
    with path.open("rb") as raw:
        if packed is None:
            yield Lines(raw, None, longest)
        elif packed == "gzip":
            # GzipFile has a buffer; a second one would lose the lines before a truncation.
            with gzip.GzipFile(fileobj=raw) as unpacked:
                yield Lines(unpacked, raw, longest)
        else:
            zstandard = require("zstandard", "traces")
            reader = zstandard.ZstdDecompressor(max_window_size=_ZSTD_WINDOW_BYTES).stream_reader(
                raw, read_across_frames=True, closefd=False
            )
            with io.BufferedReader(reader, _BUFFER_BYTES) as file:
                yield Lines(file, raw, longest)


def compressor(path: Path) -> Callable[[BinaryIO], IO[bytes]] | None:
    """Return what compresses a new file of this name: ``.gz``, ``.zst``; None for other names.

    It takes the open file. The same lines give the same bytes. `MissingExtra` without zstandard.
    """
    if path.suffix == ".gz":
        # Without name and time, so that the same trace gives the same bytes.
        return lambda raw: cast("IO[bytes]", gzip.GzipFile("", "wb", 6, raw, mtime=0))
    if path.suffix == ".zst":
        zstandard = require("zstandard", "traces")
        return lambda raw: cast("IO[bytes]", zstandard.ZstdCompressor().stream_writer(raw))
    return None


class _Readable(Protocol):
    def readline(self, size: int, /) -> bytes: ...

    def read(self, size: int, /) -> bytes: ...


class Lines:
    """Iterates ``(number, line)`` from 1, without blank lines; a line is bytes or a `BadLine`.

    Raises `InvalidValue` if a compressed file grows to more than 400 times its size, which no
    trace does. A truncated file has a bad line at its end. Memory: one line of ``longest`` bytes.
    """

    def __init__(self, file: _Readable, packed: BinaryIO | None, longest: int | None) -> None:
        self._file = file
        self._longest = longest or LINE_BYTES
        self._packed = packed
        self._number = 0
        self._read = 0

    def __iter__(self) -> Iterator[tuple[int, bytes | BadLine]]:
        while True:
            try:
                line = self._next()
            except Exception as error:
                if not _is_damage(error):
                    raise
                yield self._number + 1, BadLine(f"the file cannot be read further: {reason(error)}")
                return
            if line is None:
                return
            self._number += 1
            if isinstance(line, BadLine) or not line.isspace():
                yield self._number, line

    def _next(self) -> bytes | BadLine | None:
        line = self._file.readline(self._longest + 1)
        if not line:
            return None
        self._count(len(line))
        if len(line) <= self._longest:
            return line.removeprefix(b"\xef\xbb\xbf") if self._number == 0 else line
        while line and not line.endswith(b"\n"):
            line = self._file.readline(LINE_BYTES)
            self._count(len(line))
        return BadLine(f"a line has more than {self._longest >> 20} MiB")

    def _count(self, size: int) -> None:
        self._read += size
        if self._packed is None or self._read < _ANYWAY_BYTES:
            return
        if self._read > _MOST_TIMES * max(1, self._packed.tell()):
            raise InvalidValue(
                f"the file grows to more than {_MOST_TIMES} times its size when decompressed; "
                "decompress it yourself if it really is a trace"
            )


def _is_damage(error: Exception) -> bool:
    """Return whether reading failed because the file is damaged."""
    damage = isinstance(error, EOFError | zlib.error | OSError)
    return damage or type(error).__module__.partition(".")[0] == "zstandard"


_MOST_NAMES = 32
_LENGTHS = ("input_length", "output_length")  # alike, and not misspelt for each other
_SHOWN = 60  # characters of a value in a message
MOST_TEXT = 512
"""Most characters of a session, a namespace, a kind, a stop reason."""


def _refuse_constant(name: str) -> NoReturn:
    raise BadLine(f"{name} is not valid JSON")


_decode = json.JSONDecoder(parse_constant=_refuse_constant).raw_decode


def json_object(line: bytes) -> dict[str, Any]:
    """Return the object of a line; `BadLine` for anything else."""
    try:
        text = line.decode().strip()
        value, end = _decode(text)
    except UnicodeDecodeError as error:
        raise BadLine(f"not UTF-8 at byte {error.start}") from error
    except RecursionError as error:
        raise BadLine("nested too deeply") from error
    except ValueError as error:
        raise BadLine(f"not JSON: {error}") from error
    if end != len(text):
        raise BadLine(f"not JSON: more follows at character {end}")
    if type(value) is not dict:
        raise BadLine(f"an object is needed, got {shown(value)}")
    return value


def json_values(data: bytes) -> Iterator[dict[str, Any] | BadLine]:
    """Yield the objects of a text, which follow each other or are listed, as far as it is valid."""
    at, count = 0, 0
    try:
        text = data.decode()
        while at < len(text):
            if text[at] in " \t\r\n,":
                at += 1
                continue
            count += 1
            value, at = _decode(text, at)
            for found in value if isinstance(value, list) else [value]:
                if isinstance(found, dict):
                    yield found
                else:
                    yield BadLine(f"object {count}: an object is needed, got {shown(found)}")
    except UnicodeDecodeError as error:
        yield BadLine(f"not UTF-8 at byte {error.start}")
    except RecursionError:
        yield BadLine(f"object {count}: nested too deeply")
    except ValueError as error:
        yield BadLine(f"object {count}: not JSON: {error}")


def shown(value: object) -> str:
    """Return a value for a message, shortened."""
    try:
        text = repr(value[:_SHOWN] if isinstance(value, str | list) else value)
    except (RecursionError, ValueError):  # digits beyond Python's limit
        text = type(value).__name__
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "…"


def missing(found: dict[str, Any], key: str) -> BadLine:
    """Return the error for a line without ``key``; it names a field that may be meant for it."""
    names = tuple(name for name in found if name not in _LENGTHS)
    return BadLine(f"{key} is missing{_near(key, names)}")


@lru_cache(maxsize=64)  # a file with wrong names has them in every line
def _near(key: str, names: tuple[str, ...]) -> str:
    near = did_you_mean(key, names[:_MOST_NAMES])
    return near and f"; {near.removeprefix('; did you mean ').removesuffix('?')} is no field"


def count(found: dict[str, Any], key: str, low: int = 0, high: int = MAX_TOKENS) -> int:
    """Return the whole number at ``key``, in ``low`` … ``high``; accepts 5.0 as 5."""
    value = found.get(key)
    if type(value) is float and value.is_integer():
        value = int(value)
    if type(value) is not int or not low <= value <= high:
        if key not in found:
            raise missing(found, key)
        raise BadLine(f"{key} is {shown(value)}; a whole number in {low} … {high} is needed")
    return value


def optional_count(found: dict[str, Any], key: str) -> int | None:
    """Return the whole number at ``key``, or None if it is missing."""
    return None if found.get(key) is None else count(found, key)


def number(found: dict[str, Any], key: str) -> float:
    """Return the finite number at ``key``."""
    value = found.get(key)
    if type(value) not in (int, float):
        if key not in found:
            raise missing(found, key)
        raise BadLine(f"{key} is {shown(value)}; a number is needed")
    try:
        finite = float(value)  # type: ignore[arg-type]
    except OverflowError:
        finite = math.inf
    if not math.isfinite(finite):
        raise BadLine(f"{key} is {shown(value)}; a finite number is needed")
    return finite


def optional_seconds(found: dict[str, Any], key: str) -> float | None:
    """Return the seconds at ``key``, or None if they are missing."""
    if found.get(key) is None:
        return None
    seconds = number(found, key)
    if seconds < 0:
        raise BadLine(f"{key} is {shown(found[key])}; a number of at least 0 is needed")
    return seconds


def optional_text(found: dict[str, Any], key: str) -> str | None:
    """Return the text at ``key``, a whole number as text, or None if it is missing."""
    value = found.get(key)
    if value is None:
        return None
    if type(value) not in (int, str):
        raise BadLine(f"{key} is {shown(value)}; text or a whole number is needed")
    try:
        text = str(value)
    except ValueError as error:  # digits beyond Python's limit
        raise BadLine(f"{key} is too long a number") from error
    if len(text) > MOST_TEXT:
        raise BadLine(f"{key} has at most {MOST_TEXT} characters, got {len(text)}")
    return text


def unit_ids(
    found: dict[str, Any], key: str, tokens: int, unit_tokens: int, *, chained: bool, fresh: Fresh
) -> UnitArray:
    """Return the chained ids of a prompt's units.

    There must be one for each unit, but for the last unit if it is not full: it then gets an id of
    its own. ``chained``: the ids are chained already, so none may occur twice.
    """
    ids = whole_numbers(found, key)
    wanted = units_of(tokens, unit_tokens)
    if len(ids) != wanted and len(ids) != tokens // unit_tokens:
        raise BadLine(
            f"{key} has {len(ids)} ids; {tokens} tokens are {wanted} units of {unit_tokens}"
        )
    if not chained:
        ids = chain_ids(ids)
    elif len(set(found[key])) != len(ids):
        raise BadLine(f"{key} has an id twice: its ids stand for single units and are not chained")
    if len(ids) < wanted:
        ids = np.concatenate((ids, fresh.ids(1)))
    return ids


def whole_numbers(found: dict[str, Any], key: str) -> UnitArray:
    """Return the list of ids at ``key``."""
    values = found.get(key)
    if type(values) is not list:
        if key not in found:
            raise missing(found, key)
        raise BadLine(f"{key} is {shown(values)}; a list of ids is needed")
    if not values:
        return np.empty(0, np.int64)
    try:
        ids = np.array(values)
    except (ValueError, OverflowError) as error:
        raise BadLine(f"{key} is not a list of ids: {shown(values)}") from error
    if ids.dtype != np.int64 or ids.ndim != 1 or min(values) < 0:
        raise BadLine(f"{key} needs ids in 0 … 2⁶³-1, got {shown(values)}")
    return ids


class Fresh:
    """Ids that no other prompt has, for prompts of unknown content; the same in each pass."""

    def __init__(self) -> None:
        self._made = 0

    def ids(self, count: int) -> UnitArray:
        """Return ``count`` of them."""
        self._made += 1
        return fresh_ids(self._made, count)
