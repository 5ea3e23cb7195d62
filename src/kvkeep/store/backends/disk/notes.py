"""Notes on the namespaces of a directory: lines of one file, ``<space in hex> <note>``.

The file is bounded, and appended to by one write a line, so several processes can do so at once.
Whatever else lies under its name (a link, a pipe, a folder) is not opened for long and not read.
"""

from __future__ import annotations

import os
import stat
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from kvkeep.core.keys import SPACE_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["NOTES", "note", "noted"]

NOTES: Final = "spaces"
_MOST: Final = 64 << 10  # bytes of the file
_HOW: Final = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # a pipe would wait for a writer


def note(root: str, space: bytes, text: bytes) -> None:
    """Add a note on ``space``, unless there is one or the file is full."""
    assert b"\n" not in text
    with _file(root, os.O_RDWR | os.O_APPEND | os.O_CREAT) as fd:
        line = space.hex().encode() + b" " + text + b"\n"
        there = b"" if fd is None else os.pread(fd, _MOST, 0)
        known = any(one.startswith(line[: 2 * SPACE_BYTES + 1]) for one in there.splitlines())
        if fd is not None and not known and len(there) + len(line) <= _MOST:
            os.write(fd, line)


def noted(root: str) -> dict[bytes, bytes]:
    """The notes, by space; lines that are none are passed over."""
    found: dict[bytes, bytes] = {}
    with _file(root, os.O_RDONLY) as fd:
        there = b"" if fd is None else os.pread(fd, _MOST, 0)
        for line in there.splitlines():
            name, _, text = line.partition(b" ")
            try:
                space = bytes.fromhex(name.decode("ascii"))
            except ValueError:
                continue
            if len(space) == SPACE_BYTES:
                found.setdefault(space, text)
    return found


@contextmanager
def _file(root: str, how: int) -> Iterator[int | None]:
    """The open file; None where there is none, or what lies there is no file."""
    try:
        fd = os.open(f"{root}/{NOTES}", how | _HOW, 0o600)
    except OSError:  # full, read-only, a link or a folder: there are no notes then
        yield None
        return
    try:
        yield fd if stat.S_ISREG(os.fstat(fd).st_mode) else None
    finally:
        os.close(fd)
