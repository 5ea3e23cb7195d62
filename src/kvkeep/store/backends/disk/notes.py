"""Notes on the namespaces of a directory: lines ``<space in hex> <note>`` of one file.

The file is bounded. Each line is appended by one write, so several processes may append at once.
Anything else under the file's name (a link, a pipe, a folder) is not read.
"""

from __future__ import annotations

import os
import stat
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from kvkeep.core.keys import SPACE_BYTES
from kvkeep.store.backends.disk.files import closing_fd

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["NOTES", "add_note", "read_notes"]

NOTES: Final = "spaces"
_MOST: Final = 64 << 10  # bytes of the file
_FLAGS: Final = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # opening a pipe must not wait


def add_note(root: str, space: bytes, text: bytes) -> None:
    """Add a note on ``space``, unless it has one or the file is full."""
    assert b"\n" not in text
    with _file(root, os.O_RDWR | os.O_APPEND | os.O_CREAT) as fd:
        line = space.hex().encode() + b" " + text + b"\n"
        there = b"" if fd is None else os.pread(fd, _MOST, 0)
        known = any(one.startswith(line[: 2 * SPACE_BYTES + 1]) for one in there.splitlines())
        if fd is not None and not known and len(there) + len(line) <= _MOST:
            os.write(fd, line)


def read_notes(root: str) -> dict[bytes, bytes]:
    """Return the notes by space; other lines are skipped."""
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
    """Open the file; None if it is missing or no regular file."""
    try:
        fd = os.open(f"{root}/{NOTES}", how | _FLAGS, 0o600)
    except OSError:  # disk full, read-only, a link or a folder: no notes then
        yield None
        return
    with closing_fd(fd):
        yield fd if stat.S_ISREG(os.fstat(fd).st_mode) else None
