"""Reads and writes whole records, with direct I/O where it pays, and opens files safely.

Direct I/O needs memory, offsets and lengths in units of `ALIGNMENT`, but a record may have any
length. So its whole units are transferred in place and its last bytes through an aligned page of
this module, in the same system call.
"""

from __future__ import annotations

import errno
import mmap
import os
import stat
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from kvkeep.core.errors import BackendFailed, KVKeepError, OutOfRoom, reason
from kvkeep.store.backends.base import ALIGNMENT

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

if sys.platform != "win32":
    import fcntl

__all__ = [
    "ABSENT",
    "CANNOT_WRITE",
    "WRONG_KIND",
    "check_kind",
    "check_ours",
    "closing_fd",
    "lstat",
    "open_known",
    "open_record",
    "padded",
    "preallocate",
    "read_whole",
    "regular_files",
    "size_of",
    "supports_direct",
    "sync_path",
    "translated",
    "write_whole",
]

_O_DIRECT: Final[int] = getattr(os, "O_DIRECT", 0)  # 0 if not supported, as on macOS
ABSENT: Final = {errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENXIO}
"""Errors of opening a path without a regular file: nothing there, a symlink, a socket."""
CANNOT_WRITE: Final = {errno.EROFS, errno.EACCES, errno.EPERM}
"""Errors of writing to a file or filesystem that this process may only read."""
WRONG_KIND: Final = {
    errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ELOOP, errno.EINVAL, errno.ENXIO,
}  # fmt: skip
"""Errors of opening a path at which there is no file or directory of the expected kind."""
_KINDS: Final = {
    stat.S_IFREG: "regular file",
    stat.S_IFDIR: "directory",
    stat.S_IFLNK: "symbolic link",
    stat.S_IFIFO: "named pipe",
    stat.S_IFSOCK: "socket",
    stat.S_IFBLK: "device",
    stat.S_IFCHR: "device",
}
_THROUGH_CACHE: Final = 512 * 1024
"""Bytes read at once through the page cache. Larger reads make Linux fill it with single pages:
that takes twice as long, as does each later read of them."""
_FULL: Final = {errno.ENOSPC, errno.EDQUOT}  # not EFBIG: evicting others makes no file larger
_UNSUPPORTED: Final = {errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS}


@contextmanager
def translated(place: str, done: str, size: int = 0) -> Iterator[None]:
    """Turn OSError into `BackendFailed`, or `OutOfRoom` if the filesystem is full.

    ``done`` is the participle in the message; ``size`` the bytes of the record being written, 0 if
    nothing is.
    """
    try:
        yield
    except KVKeepError:
        raise
    except OSError as error:
        if size and error.errno in _FULL:
            raise OutOfRoom(padded(size), f"the filesystem of {place}") from error
        message = f"a record in {place} could not be {done}: {reason(error)}"
        raise BackendFailed(error.errno, message) from error


@contextmanager
def closing_fd(fd: int) -> Iterator[int]:
    """Close the descriptor ``fd`` at the end."""
    try:
        yield fd
    finally:
        os.close(fd)


def padded(size: int) -> int:
    """Return the bytes that a file of ``size`` bytes counts as: whole units of `ALIGNMENT`."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def supports_direct(path: str) -> bool:
    """Whether the filesystem supports direct I/O, tried on the file ``path``."""
    if not _O_DIRECT:
        return False
    try:
        os.close(os.open(path, os.O_RDONLY | os.O_CLOEXEC | _O_DIRECT))
    except OSError as error:
        if error.errno in _UNSUPPORTED:
            return False
        raise
    return True


def open_record(path: str) -> tuple[int, int] | None:
    """Open the regular file ``path`` for reading.

    Returns:
        A descriptor to close and the file's size in bytes; None if there is no regular file.
        Follows no symlink and does not wait for a pipe.
    """
    fd = _open_if_there(path, os.O_RDONLY | os.O_NONBLOCK)
    if fd is None:
        return None
    there = os.fstat(fd)
    if not stat.S_ISREG(there.st_mode):
        os.close(fd)
        return None
    return fd, there.st_size


def open_known(path: str, flags: int) -> tuple[int, os.stat_result]:
    """Open a regular file of this user; return a descriptor to close and its status.

    Never waits for the writer of a pipe, follows no symlink.

    Raises:
        OSError: EINVAL if it is something else or another user's; and the errors of `os.open`. The
            message names the file.
    """
    fd = os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
    try:
        found = os.fstat(fd)
        check_ours(found, path, stat.S_IFREG)
    except BaseException:
        os.close(fd)
        raise
    return fd, found


def check_kind(found: os.stat_result, path: str, kind: int) -> None:
    """Raise OSError (ENOTDIR, EINVAL) unless ``path`` is of ``kind``: stat.S_IFDIR or S_IFREG."""
    is_kind = stat.S_IFMT(found.st_mode)
    if is_kind != kind:
        number = errno.ENOTDIR if kind == stat.S_IFDIR else errno.EINVAL
        name = _KINDS.get(is_kind, "special file")
        raise OSError(number, f"it is a {name} and must be a {_KINDS[kind]}", path)


def check_ours(found: os.stat_result, path: str, kind: int) -> None:
    """Raise OSError as `check_kind`, or (EINVAL) if ``path`` is another user's."""
    check_kind(found, path, kind)
    if found.st_uid != os.geteuid():
        owner = f"it belongs to user {found.st_uid} and this process is {os.geteuid()}"
        raise OSError(errno.EINVAL, owner, path)


def _open_if_there(path: str, flags: int) -> int | None:
    try:
        return os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError as error:
        if error.errno in ABSENT:
            return None
        raise


def size_of(path: str) -> int | None:
    """Return the size of a regular file in bytes; None if missing or empty."""
    found = lstat(path)
    return (found.st_size or None) if found and stat.S_ISREG(found.st_mode) else None


def lstat(path: str) -> os.stat_result | None:
    """Return the status of ``path``, None if missing. Does not follow a symlink."""
    try:
        return os.lstat(path)
    except OSError as error:
        if error.errno in ABSENT:
            return None
        raise


def regular_files(directory: str) -> Iterator[tuple[str, int]]:
    """Yield path and size in bytes of the regular files in ``directory``; none if it is missing."""
    try:
        with os.scandir(directory) as listing:
            entries = list(listing)
    except FileNotFoundError:
        return
    for entry in entries:
        found = lstat(entry.path)
        if found is not None and stat.S_ISREG(found.st_mode):
            yield entry.path, found.st_size


def sync_path(path: str) -> None:
    """Make a file or directory survive a loss of power; do nothing if it is missing or special."""
    held = _open_if_there(path, os.O_RDONLY | os.O_NONBLOCK)
    if held is None:
        return
    with closing_fd(held):
        mode = os.fstat(held).st_mode
        if stat.S_ISREG(mode) or stat.S_ISDIR(mode):
            os.fsync(held)


def preallocate(fd: int, size: int) -> None:
    """Allocate ``size`` bytes, so that a full filesystem fails before any data is written.

    Raises:
        OSError: the filesystem is full (ENOSPC, EDQUOT), or files may not be so large (EFBIG). A
            filesystem without preallocation is no error: the write itself will fail.
    """
    if not hasattr(os, "posix_fallocate"):
        return
    try:
        os.posix_fallocate(fd, 0, size)
    except OSError as error:
        if error.errno not in _UNSUPPORTED:
            raise


def write_whole(fd: int, record: memoryview, *, direct: bool) -> None:
    """Write ``record`` at offset 0; with ``direct`` it is padded to whole units."""
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
    """Fill ``buffer`` from offset 0; return False if the file is shorter."""
    size = len(buffer)
    if not (direct and _set_direct(fd, on=True)):
        return _all(lambda at: os.preadv(fd, [buffer[at : at + _THROUGH_CACHE]], at), size)
    body = size // ALIGNMENT * ALIGNMENT
    with mmap.mmap(-1, ALIGNMENT) as page:
        tail = [page] if body < size else []
        whole = _direct(fd, lambda at: os.preadv(fd, [buffer[at:body], *tail], at), size)
        buffer[body:] = page[: size - body]
    return whole


def _all(move: Callable[[int], int], size: int, unit: int = 1) -> bool:
    """Call ``move(offset)``, which returns the bytes transferred, until ``size`` are.

    After a partial transfer (Linux moves at most 2 GiB per call) the next call starts at the last
    whole ``unit``. Returns False if a call transfers less than a unit before the end.
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
    """`_all` with direct I/O; without it if the filesystem or the memory does not allow it."""
    try:
        return _all(move, size, ALIGNMENT)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    # Memory is not aligned, or the filesystem needs larger units: use the page cache.
    _set_direct(fd, on=False)
    return _all(move, size, ALIGNMENT)


def _set_direct(fd: int, *, on: bool) -> bool:
    """Turn direct I/O on or off; return False if the filesystem has none."""
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, flags | _O_DIRECT if on else flags & ~_O_DIRECT)
    except OSError as error:
        if error.errno not in _UNSUPPORTED:
            raise
        return False
    return bool(_O_DIRECT)
