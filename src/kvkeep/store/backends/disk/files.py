"""Whole records to and from open files: past the page cache where that pays, around it where not.

Direct I/O wants memory, offsets and lengths in units of `ALIGNMENT`, and records end anywhere. So
the full units of a record go as they are, and its last bytes through one page of our own, in the
same call.
"""

from __future__ import annotations

import errno
import mmap
import os
import stat
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from kvkeep.core.errors import BackendFailed, KVKeepError, OutOfRoom
from kvkeep.store.backends.base import ALIGNMENT

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

if sys.platform != "win32":
    import fcntl

__all__ = [
    "ABSENT",
    "create_locked",
    "kind_of",
    "open_known",
    "open_plain",
    "open_record",
    "padded",
    "pin",
    "preallocate",
    "read_whole",
    "size_of",
    "supports_direct",
    "sync_path",
    "translated",
    "write_whole",
]

_O_DIRECT: Final[int] = getattr(os, "O_DIRECT", 0)  # 0 where there is none, as on macOS
_O_PATH: Final[int] = getattr(os, "O_PATH", os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
ABSENT: Final = {errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENXIO}
"""What opening says where there is no regular file: nothing, a symlink, a socket."""
_KINDS: Final = {
    stat.S_IFREG: "regular file",
    stat.S_IFDIR: "directory",
    stat.S_IFLNK: "symbolic link",
    stat.S_IFIFO: "named pipe",
    stat.S_IFSOCK: "socket",
    stat.S_IFBLK: "device",
    stat.S_IFCHR: "device",
}
_FULL: Final = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_UNSUPPORTED: Final = {errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS}


@contextmanager
def translated(place: str, done: str, size: int = 0) -> Iterator[None]:
    """The one edge at which the system's errors become ours.

    ``done``: what could not be done to a record; ``size``: the bytes it wanted to write.
    """
    try:
        yield
    except KVKeepError:
        raise
    except OSError as error:
        if size and error.errno in _FULL:
            raise OutOfRoom(padded(size), f"the filesystem of {place}") from error
        message = f"a record in {place} could not be {done}: {error}"
        raise BackendFailed(error.errno, message) from error


def padded(size: int) -> int:
    """Bytes that a file of ``size`` bytes is counted as: whole units of `ALIGNMENT`."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def supports_direct(path: str) -> bool:
    """Whether the filesystem of the file ``path`` opens it for direct I/O."""
    if not _O_DIRECT:
        return False
    try:
        os.close(os.open(path, os.O_RDONLY | os.O_CLOEXEC | _O_DIRECT))
    except OSError as error:
        if error.errno in _UNSUPPORTED:
            return False
        raise
    return True


def pin(path: str) -> tuple[int, int] | None:
    """Hold the regular file ``path``, so that its blocks are freed only when this is closed.

    Freeing the blocks of a large file takes milliseconds; unlinking a file held like this takes
    microseconds, and the rest happens in `os.close`, where nobody waits for a lock.

    Returns:
        A descriptor to close, and the file's size in bytes; None when there is no such file, or
        it is no regular one. Symlinks are not followed, pipes not waited for.
    """
    return _opened(path, _O_PATH)


def open_record(path: str) -> tuple[int, int] | None:
    """`pin`, for reading."""
    return _opened(path, os.O_RDONLY | os.O_NONBLOCK)


def open_plain(path: str, flags: int) -> int:
    """`open_known`; only the file descriptor."""
    return open_known(path, flags)[0]


def open_known(path: str, flags: int) -> tuple[int, os.stat_result]:
    """Open a file that must be regular and ours; return its descriptor and what `os.fstat` says.

    Never waits for a writer, follows no symlink.

    Raises:
        OSError: EINVAL when it is something else or belongs to another user; and what opening a
            file raises. The message names the file.
    """
    fd = os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
    try:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            kind = kind_of(found.st_mode)
            raise OSError(errno.EINVAL, f"it is a {kind} and must be a regular file", path)
        if found.st_uid != os.geteuid():
            owner = f"it belongs to user {found.st_uid} and this process is {os.geteuid()}"
            raise OSError(errno.EINVAL, owner, path)
    except BaseException:
        os.close(fd)
        raise
    return fd, found


def kind_of(mode: int) -> str:
    """What ``st_mode`` says a file is, in words."""
    return _KINDS.get(stat.S_IFMT(mode), "special file")


def _opened(path: str, flags: int) -> tuple[int, int] | None:
    try:
        fd = os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError as error:
        if error.errno in ABSENT:
            return None
        raise
    found = os.fstat(fd)
    if not stat.S_ISREG(found.st_mode):
        os.close(fd)
        return None
    return fd, found.st_size


def create_locked(path: str, size: int) -> int:
    """A new file of ``size`` bytes, locked by us until it is closed: so others see that we live."""
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
    fd = os.open(path, flags, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.ftruncate(fd, size)
    except OSError:
        os.close(fd)
        os.unlink(path)
        raise
    return fd


def size_of(path: str) -> int | None:
    """Bytes of a regular file; None when there is none, or it is empty."""
    try:
        found = os.stat(path, follow_symlinks=False)
    except OSError as error:
        if error.errno in ABSENT:
            return None
        raise
    return (found.st_size or None) if stat.S_ISREG(found.st_mode) else None


def sync_path(path: str) -> None:
    """Make a file or directory last through a loss of power; nothing when it is not there.

    What is neither (somebody put a pipe or a link in its place) is not there.
    """
    try:
        held = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        if error.errno in ABSENT:
            return  # deleted since
        raise
    try:
        mode = os.fstat(held).st_mode
        if stat.S_ISREG(mode) or stat.S_ISDIR(mode):
            os.fsync(held)
    finally:
        os.close(held)


def preallocate(fd: int, size: int) -> None:
    """Have the filesystem set ``size`` bytes aside, so that it is full before anything is written.

    Raises:
        OSError: it is full (ENOSPC, EDQUOT), or the file may not be so large (EFBIG). A
            filesystem that cannot set bytes aside is no error: writing will tell.
    """
    if not hasattr(os, "posix_fallocate"):
        return
    try:
        os.posix_fallocate(fd, 0, size)
    except OSError as error:
        if error.errno not in _UNSUPPORTED:
            raise


def write_whole(fd: int, record: memoryview, *, direct: bool) -> None:
    """Write ``record`` from the beginning of the file; with ``direct`` padded to whole units."""
    size = len(record)
    if not (direct and _set_direct(fd, on=True)):
        written = _all(lambda at: os.pwrite(fd, record[at:], at), size)
    else:
        body = size // ALIGNMENT * ALIGNMENT
        with mmap.mmap(-1, ALIGNMENT) as page:
            page[: size - body] = bytes(record[body:])
            tail = [page] if body < size else []
            written = _direct(
                fd, lambda at: os.pwritev(fd, [record[at:body], *tail], at), padded(size)
            )
    if not written:
        raise OSError(errno.EIO, "the filesystem took only a part of the record")


def read_whole(fd: int, buffer: memoryview, *, direct: bool) -> bool:
    """Fill ``buffer`` from the beginning of the file; False when the file ends before that."""
    size = len(buffer)
    if not (direct and _set_direct(fd, on=True)):
        return _all(lambda at: os.preadv(fd, [buffer[at:]], at), size)
    body = size // ALIGNMENT * ALIGNMENT
    with mmap.mmap(-1, ALIGNMENT) as page:
        tail = [page] if body < size else []
        whole = _direct(fd, lambda at: os.preadv(fd, [buffer[at:body], *tail], at), size)
        buffer[body:] = page[: size - body]
    return whole


def _all(move: Callable[[int], int], size: int, unit: int = 1) -> bool:
    """Call ``move(offset)``, which says how many bytes it moved, until ``size`` are.

    A call that is cut short (2 GiB is the most that one moves) is followed by one from the last
    whole ``unit``. False when less than a unit was moved before the end.
    """
    at = 0
    while at < size:
        moved = move(at)
        if at + moved >= size:
            break
        if moved < unit:
            return False
        at += moved // unit * unit
    return True


def _direct(fd: int, move: Callable[[int], int], size: int) -> bool:
    """`_all` with direct I/O, and without it where the filesystem or the memory refuses it."""
    try:
        return _all(move, size, ALIGNMENT)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    # The memory is not aligned, or the filesystem wants larger units: through the page cache.
    _set_direct(fd, on=False)
    return _all(move, size, ALIGNMENT)


def _set_direct(fd: int, *, on: bool) -> bool:
    """Turn direct I/O on or off; False where the filesystem has none."""
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, flags | _O_DIRECT if on else flags & ~_O_DIRECT)
    except OSError as error:
        if error.errno not in _UNSUPPORTED:
            raise
        return False
    return bool(_O_DIRECT)
