"""Notes on the namespaces of a directory: lines ``<space in hex> <note>`` of one file.

The file is bounded. Each line is appended by one write, so several processes may append at once.
Anything else under the file's name (a link, a pipe, a folder) is not read. So it is with the
file of the budget that the directory was last opened with.
"""

from __future__ import annotations

import logging
import os
import stat
import sys
import time
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Final, NamedTuple

from kvkeep.core.geometry.units import format_bytes
from kvkeep.core.keys import SPACE_BYTES
from kvkeep.store.backends.base import ALIGNMENT
from kvkeep.store.backends.disk.files import closing_fd

if sys.platform != "win32":
    import fcntl

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kvkeep.store.backends.disk.directory import RecordDirectory

__all__ = ["BUDGET", "NOTES", "LastBudget", "add_note", "read_budget", "read_notes", "settle"]

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


_LOG = logging.getLogger("kvkeep.tiers")

BUDGET: Final = "budget"
_WIDTH: Final = 64  # bytes of the line, padded, so that a write replaces the whole line
_PAUSE: Final = 0.01
_SHARE: Final = 0.8  # of the free space


class LastBudget(NamedTuple):
    """A budget in bytes, whether it was given as ``size=``, and when it was last used."""

    bytes: int
    given: bool
    opened: float


def settle(
    directory: RecordDirectory, given: int | None, used: Callable[[], int], timeout: float
) -> int:
    """Return the budget of ``directory`` in bytes, and remember it there.

    It is ``given``, or else the one it was last opened with, but no more than the filesystem has. A
    directory without one gets what ``used()`` returns and 80 % of the space that is free now: so
    opening it evicts nothing, and a fifth stays free. Logs a line unless ``given``.

    Waits ``timeout`` seconds at most for other processes. Remembers nothing after that, nor in a
    directory that this process may only read.
    """
    budget, is_new = _agree(directory.root, given, used, timeout)
    size = format_bytes(budget.bytes)
    if given is None and is_new:
        _LOG.warning(
            "%s has no size=: it keeps to %s, which is what it holds and 80 %% of the free space. "
            "The directory remembers this; size= changes it",
            directory.url,
            size,
        )
    elif given is None:
        _LOG.info("%s has no size=: it keeps to %s, as when last opened", directory.url, size)
    return budget.bytes


def _default(root: str, used: int) -> int:
    there = os.statvfs(root)
    return max(ALIGNMENT, used + int(there.f_bavail * there.f_frsize * _SHARE))


def _disk_bytes(root: str) -> int:
    there = os.statvfs(root)
    return there.f_blocks * there.f_frsize


def read_budget(root: str) -> LastBudget | None:
    """Return the budget that ``root`` was last opened with; None: it is not known."""
    try:
        fd = os.open(f"{root}/{BUDGET}", os.O_RDONLY | _FLAGS)
    except OSError:
        return None
    with closing_fd(fd):
        return _read(fd) if stat.S_ISREG(os.fstat(fd).st_mode) else None


def _agree(
    root: str, given: int | None, used: Callable[[], int], timeout: float
) -> tuple[LastBudget, bool]:
    """Return the budget that holds from now on, and whether it is another than before."""
    with _locked(root, timeout) as fd:
        last = read_budget(root) if fd is None else _read(fd)
        if given is not None:
            known = last is not None and last.bytes == given and last.given
            budget = LastBudget(given, True, time.time())
        elif last is not None:
            known = True
            budget = LastBudget(min(last.bytes, _disk_bytes(root)), last.given, time.time())
        else:
            known = False
            budget = LastBudget(_default(root, used()), False, time.time())
        if fd is not None:
            how = "given" if budget.given else "default"
            line = f"kvkeep budget {budget.bytes} {how} {budget.opened:.0f}"
            with suppress(OSError):  # the disk is full
                os.pwrite(fd, line.ljust(_WIDTH - 1).encode() + b"\n", 0)
        return budget, not known


def _read(fd: int) -> LastBudget | None:
    words = os.pread(fd, _WIDTH, 0).decode("ascii", "replace").split()
    if len(words) != 5 or words[:2] != ["kvkeep", "budget"] or words[3] not in ("given", "default"):
        return None
    if not (words[2].isdecimal() and words[4].isdecimal() and int(words[2]) >= ALIGNMENT):
        return None
    return LastBudget(int(words[2]), words[3] == "given", float(words[4]))


@contextmanager
def _locked(root: str, timeout: float) -> Iterator[int | None]:
    """Open and lock the file; None if it cannot be written, or stays locked."""
    try:
        fd = os.open(f"{root}/{BUDGET}", os.O_RDWR | os.O_CREAT | _FLAGS, 0o600)
    except OSError:  # disk full, read-only, a link or a folder: nothing is noted then
        yield None
        return
    until = time.monotonic() + timeout
    with closing_fd(fd):
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            yield None
            return
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > until:
                    yield None
                    return
            time.sleep(_PAUSE)
        try:
            yield fd
        finally:
            fcntl.flock(fd, fcntl.LOCK_UN)  # a child forked meanwhile has it open
