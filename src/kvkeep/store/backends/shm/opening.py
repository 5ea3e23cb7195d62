"""Opens the file of a shared arena: creates it, or checks what is there.

Every process takes the lock first, so one creates the file and the others wait. The header is
written last: a file without one was left by a process that died meanwhile, and is begun again. All
memory is reserved (`posix_fallocate`) before it is mapped, so no access to it can fail.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import stat
import sys
import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from kvkeep.core.errors import BackendFailed, InvalidValue, reason
from kvkeep.core.geometry.units import format_bytes
from kvkeep.store.backends.base import ALIGNMENT
from kvkeep.store.backends.free_memory import free_memory
from kvkeep.store.backends.shm.layout import HEADER_BYTES, Layout, NotAnArena
from kvkeep.store.backends.shm.lock import NodeLock

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["OpenedArena", "Warming", "check_name", "open_arena", "path_of"]

_LOG = logging.getLogger("kvkeep.tiers")
_PATIENCE: Final = 120.0  # seconds to wait for another process that creates the arena
_STEP: Final = 256 << 20  # bytes reserved in one system call
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_LEFT_FREE: Final = 256 << 20  # bytes of memory that an arena leaves to the rest of the machine


class OpenedArena(NamedTuple):
    """An open file of an arena, locked; ``new`` if its index is still to be made."""

    fd: int
    lock: NodeLock
    layout: Layout
    new: bool


def check_name(name: str) -> str:
    """Return ``name``, the name of an arena. Raises `InvalidValue` if it is none."""
    if not _NAME.fullmatch(name):
        raise InvalidValue(
            f"name={name!r} is no name of an arena; use up to 64 letters, digits, '.', '_' and '-'"
        )
    return name


def path_of(directory: str, name: str) -> str:
    """Return the path of the arena ``name`` of this user."""
    return os.path.join(directory, f"kvkeep-{os.geteuid()}-{check_name(name)}")


def open_arena(path: str, wanted: Layout | None, timeout: float) -> OpenedArena:
    """Open the arena at ``path``, or create it as ``wanted``; None: only open it.

    The lock is held when this returns. An arena that exists keeps its sizes.

    Raises:
        InvalidValue: there is none, its directory has too little space, or the file belongs to
            another user, is readable by others, is no arena, or is one of another version.
        BackendFailed: the system failed, or another process held the lock for too long.
    """
    if sys.platform != "linux":
        raise InvalidValue("a shm:// tier needs Linux; use memory:// or file:// here")
    while True:
        lock_fd = _open_file(path, create=wanted is not None)
        lock = NodeLock(lock_fd, path, max(timeout, _PATIENCE))
        try:
            lock.acquire()
            lock.timeout = timeout
        except BaseException:
            lock.close()
            raise
        fd = -1
        try:
            if not _is_still_there(lock_fd, path):
                lock.release()
                lock.close()
                continue  # another process removed it meanwhile
            # A descriptor of its own for the mapping, which keeps it open: the lock must not be.
            fd = os.open(f"/proc/self/fd/{lock_fd}", os.O_RDWR | os.O_CLOEXEC)
            layout, new = _read_or_reserve(fd, path, wanted, lock)
            return OpenedArena(fd, lock, layout, new)
        except BaseException:
            if fd >= 0:
                os.close(fd)
            with suppress(RuntimeError):  # it was released
                lock.release()
            lock.close()
            raise


def _open_file(path: str, *, create: bool) -> int:
    flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        fd = os.open(path, flags)
    except FileNotFoundError:
        if not create:
            raise InvalidValue(
                f"{path} does not exist: no arena is there; give a size to make one, as in "
                "shm://4GiB"
            ) from None
        fd = _create_file(path, flags)
    except OSError as error:
        raise InvalidValue(f"{path} cannot be opened as a shared arena: {reason(error)}") from error
    found = os.fstat(fd)
    wrong = ""
    if not stat.S_ISREG(found.st_mode):
        wrong = "is no regular file"
    elif found.st_uid != os.geteuid():
        wrong = f"belongs to user {found.st_uid}, and this process is user {os.geteuid()}"
    elif found.st_mode & 0o077:
        wrong = f"has mode {stat.S_IMODE(found.st_mode):04o}; it must be 0600, for one user alone"
    elif found.st_nlink > 1:
        wrong = "has a second name (a hard link)"
    if wrong:
        os.close(fd)
        raise InvalidValue(f"{path} {wrong}; remove it, or use another name=")
    return fd


def _create_file(path: str, flags: int) -> int:
    try:
        return os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        return _open_file(path, create=True)  # another process was faster
    except OSError as error:
        raise InvalidValue(f"no shared arena can be made at {path}: {reason(error)}") from error


def _is_still_there(fd: int, path: str) -> bool:
    try:
        named = os.stat(path, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return os.path.samestat(named, os.fstat(fd))


def _read_or_reserve(
    fd: int, path: str, wanted: Layout | None, lock: NodeLock
) -> tuple[Layout, bool]:
    head = os.pread(fd, HEADER_BYTES, 0)
    if not head.strip(b"\0"):  # new, or its creator died
        if lock.in_use():  # to begin it again would take the memory from under these processes
            raise InvalidValue(
                f"{path} was overwritten while processes have it open: its header is gone; close "
                "these processes and remove it, or use another name="
            )
        if wanted is None:
            raise InvalidValue(f"{path} is no arena yet: the process that was making it died")
        _reserve(fd, path, wanted)
        return wanted, True
    try:
        layout = Layout.parse(head)
    except NotAnArena as error:
        raise InvalidValue(
            f"{path} is no shared arena that can be used: {error}; remove it, or use another name="
        ) from None
    found = os.fstat(fd)
    if found.st_size != layout.total:
        raise InvalidValue(
            f"{path} has {found.st_size} bytes and should have {layout.total}: it was truncated; "
            "remove it, or use another name="
        )
    if found.st_blocks * 512 < layout.total:  # copied with holes
        _allocate(fd, path, layout)
    if wanted is not None and wanted.data_bytes != layout.data_bytes:
        _LOG.warning(
            "%s was made with %s, and %s were asked for: it keeps its size; to change it, close "
            "the processes that use it and remove the file",
            path, format_bytes(layout.data_bytes), format_bytes(wanted.data_bytes),
        )  # fmt: skip
    return layout, False


def _reserve(fd: int, path: str, layout: Layout) -> None:
    """Give the file all its memory."""
    os.ftruncate(fd, 0)  # what a dead creator left
    try:
        _allocate(fd, path, layout)
    except BaseException:
        with suppress(OSError):
            os.ftruncate(fd, 0)
            os.unlink(path)  # under the lock, so nobody else has begun with it
        raise


def _allocate(fd: int, path: str, layout: Layout) -> None:
    missing = layout.total - os.fstat(fd).st_blocks * 512
    for free, where in _free(path):
        if missing > free:
            raise InvalidValue(
                f"{path} needs {format_bytes(layout.total)}, and {where} has {format_bytes(free)} "
                "free: take a smaller arena, or enlarge it (docker run --shm-size, in Kubernetes "
                "an emptyDir with medium: Memory at /dev/shm)"
            )
    try:
        for start in range(0, layout.total, _STEP):
            os.posix_fallocate(fd, start, min(_STEP, layout.total - start))
    except OSError as error:
        if error.errno in {errno.ENOSPC, errno.ENOMEM, errno.EFBIG}:
            free = next(_free(path))[0]
            raise InvalidValue(
                f"{path} needs {format_bytes(layout.total)}: {reason(error)}; "
                f"{format_bytes(free)} are free"
            ) from error
        raise BackendFailed(error.errno, f"{path} gets no memory: {reason(error)}") from error


def _free(path: str) -> Iterator[tuple[int, str]]:
    """Yield the bytes that each limit leaves, and its name."""
    directory = os.path.dirname(path)
    found = os.statvfs(directory)
    yield found.f_bavail * found.f_frsize, directory
    for free, where in free_memory():
        yield max(0, free - _LEFT_FREE), where


_WARM_STEP: Final = 16 << 20  # bytes between two looks whether to stop


class Warming:
    """Reads one byte of each page of ``memory``, in a thread, so that the process maps it.

    A page that no process has touched since the arena was made is zeroed by the kernel at this
    moment, too. Until all is done, a request that is first to touch a page waits for it. Reading
    changes nothing, so it may run beside any use of the memory.

    Thread safety: all methods.
    """

    def __init__(self, memory: memoryview) -> None:
        self._memory = memory
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvkeep shm warming", daemon=True)
        self._thread.start()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until all is mapped, ``timeout`` seconds at most; return whether it is."""
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def stop(self) -> None:
        """End early; waits for the step under way."""
        self._stopped.set()
        self._thread.join()

    def _run(self) -> None:
        for start in range(0, len(self._memory), _WARM_STEP):
            if self._stopped.is_set():
                break
            pages = np.frombuffer(self._memory[start : start + _WARM_STEP], np.uint8)[::ALIGNMENT]
            pages.max()  # releases the GIL
        self._memory = memoryview(b"")
