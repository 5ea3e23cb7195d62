"""Lines of a file that may be compressed and may be hostile, with bounds on their size."""

from __future__ import annotations

import gzip
import io
import zlib
from contextlib import contextmanager
from typing import IO, TYPE_CHECKING, BinaryIO, Protocol, cast

from kvkeep.core.errors import InvalidValue, reason, require

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

__all__ = ["LINE_BYTES", "BadLine", "Lines", "compression", "compressor", "opened"]

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
def opened(path: Path) -> Iterator[Lines]:
    """Open the file's lines. `InvalidValue` if unreadable, `MissingExtra` without zstandard."""
    packed = compression(path)
    with path.open("rb") as raw:
        if packed is None:
            yield Lines(raw, None)
        elif packed == "gzip":
            # GzipFile has a buffer; a second one would lose the lines before a truncation.
            with gzip.GzipFile(fileobj=raw) as unpacked:
                yield Lines(unpacked, raw)
        else:
            zstandard = require("zstandard", "traces")
            reader = zstandard.ZstdDecompressor(max_window_size=_ZSTD_WINDOW_BYTES).stream_reader(
                raw, read_across_frames=True, closefd=False
            )
            with io.BufferedReader(reader, _BUFFER_BYTES) as file:
                yield Lines(file, raw)


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
    trace does. A truncated file has a bad line at its end. Memory: one line of `LINE_BYTES`.
    """

    def __init__(self, file: _Readable, packed: BinaryIO | None) -> None:
        self._file = file
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

    def pieces(self) -> Iterator[bytes | BadLine]:
        """Yield all bytes, 256 KiB at a time; at the end a `BadLine` if the file is truncated."""
        while True:
            try:
                piece = self._file.read(_BUFFER_BYTES)
            except Exception as error:
                if not _is_damage(error):
                    raise
                yield BadLine(f"the file cannot be read further: {reason(error)}")
                return
            if not piece:
                return
            self._count(len(piece))
            yield piece

    def _next(self) -> bytes | BadLine | None:
        line = self._file.readline(LINE_BYTES + 1)
        if not line:
            return None
        self._count(len(line))
        if len(line) <= LINE_BYTES:
            return line.removeprefix(b"\xef\xbb\xbf") if self._number == 0 else line
        while line and not line.endswith(b"\n"):
            line = self._file.readline(LINE_BYTES)
            self._count(len(line))
        return BadLine(f"a line has more than {LINE_BYTES >> 20} MiB")

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
