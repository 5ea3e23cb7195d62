"""The file of a shared arena: its layout, its creation, and the checks of one that exists.

    offset  bytes  what
         0   4096  header: magic, version, sizes, CRC-32; written last, at creation
      4096  16384  words, int64 each: see the names below
     20480 524288  rows of the records that were published last, int64 each
    544768   161 n  columns of n rows, one a record, and of n + 1 free extents: see `COLUMNS`
                   data, at a multiple of 2 MiB

Integers are in the order of the machine: the file never leaves it. Offsets are bytes in the data.
The rows are the truth; everything but them is counted anew after a crash.

Every process takes the lock first, so one creates the file and the others wait. A file without a
header was left by a process that died meanwhile, and is begun again. All memory is reserved
(`posix_fallocate`) before it is mapped, so no access to it can fail.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import stat
import struct
import sys
import threading
import zlib
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from kvkeep.core.errors import BackendFailed, InvalidValue, reason
from kvkeep.core.geometry.units import format_bytes
from kvkeep.core.keys import BLOCK_ID_BYTES
from kvkeep.store.backends.base import ALIGNMENT
from kvkeep.store.backends.free_memory import free_memory
from kvkeep.store.backends.shm.lock import SLOTS, NodeLock

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = [
    "HEADER_BYTES",
    "Layout",
    "OpenedArena",
    "Warming",
    "check_name",
    "open_arena",
    "path_of",
]

HEADER_BYTES: Final = 4096
QUOTAS: Final = 256
RECENT: Final = 1 << 16
"""Rows that were published last, by which processes learn of each other's records."""

# Words.
CHANGING: Final = 0  # 1 while a process that has the lock may be in the middle of a change
GENERATION: Final = 1  # the last number given to a record
PUBLISHED: Final = 2  # how many records were ever published
FREE_BYTES: Final = 3
FREE_EXTENTS: Final = 4
BUSY: Final = 5  # rows in use
RECORDS: Final = 6  # of these, published ones
LOW: Final = 7  # all rows below are in use
HIGH: Final = 8  # no row at or above was ever in use
REPAIRS: Final = 9
LOST: Final = 10  # published records that did not prove themselves
QUOTA_COUNT: Final = 11
KIND: Final = 12  # what the records are: one of the following
SLOT_AT: Final = 64  # the process id in each slot, 0 if it is free
LEAVING_AT: Final = SLOT_AT + SLOTS  # bytes that the process in each slot demotes
QUOTA_AT: Final = LEAVING_AT + SLOTS  # two words of the space, limit, bytes
_WORDS: Final = 2048
assert QUOTA_AT + 4 * QUOTAS <= _WORDS

UNDECIDED: Final = 0
RAW: Final = 1  # raw KV behind room for a header, of stores that have the arena in front
SEALED: Final = 2  # records with headers and checksums, of a lower tier

NUMBERS: Final = (
    "generation",  # unique to each record that was ever published or drafted
    "named",  # the generation while the record can be found, else 0
    "offset",
    "length",  # bytes of the extent
    "size",  # bytes of the record
    "used",  # last use, a time of the machine's clock
    "pinned",  # end of the pin, a time of that clock
    "proof",  # a checksum of id, generation, offset, length and size
    "free_offset",  # not of rows: the free extents, by address
    "free_length",
)
COLUMNS: Final = dict.fromkeys(NUMBERS, 8) | {  # bytes of each row
    "ids": BLOCK_ID_BYTES,
    "holders": SLOTS // 8,  # a bit for each process that drafts, leases or holds the record
    "busy": 1,  # 1 while the row is in use
}

_LOG = logging.getLogger("kvkeep.tiers")
_HEADER: Final = struct.Struct("<8sIIQQQQ")
_MAGIC: Final = b"kvkeepS\n"
_VERSION: Final = 2
_HUGE: Final = 2 << 20
_BYTES_PER_ROW: Final = 64 << 10
_SMALL: Final = 8192  # rows of an arena of small records, such as tests have
_MOST_ROWS: Final = 1 << 28
_PATIENCE: Final = 120.0  # seconds to wait for another process that creates the arena
_STEP: Final = 256 << 20  # bytes reserved in one system call
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_LEFT_FREE: Final = 256 << 20  # bytes of memory that an arena leaves to the rest of the machine
_WARM_STEP: Final = 16 << 20  # bytes between two looks whether to stop


class NotAnArena(Exception):
    """The bytes are no header of an arena that this kvkeep reads; the message says why."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Where everything is in the file.

    Attributes:
        data_bytes: bytes for records, a multiple of 4096.
        rows: records at most, with drafts.
    """

    data_bytes: int
    rows: int

    @classmethod
    def of(cls, size: int, records: int | None = None) -> Layout:
        """Return the layout of an arena with ``size`` bytes for ``records`` records at most."""
        data = size - size % ALIGNMENT
        if data < ALIGNMENT:
            raise InvalidValue(f"an arena of {size} bytes is too small; give it 4096 or more")
        return cls(data, records or max(data // _BYTES_PER_ROW, min(data // ALIGNMENT, _SMALL)))

    @property
    def recent_at(self) -> int:
        """Offset of the rows that were published last."""
        return HEADER_BYTES + 8 * _WORDS

    def column_at(self, name: str) -> int:
        """Return the offset of a column; all have room for a row more than there are."""
        begin = self.recent_at + 8 * RECENT
        for column, width in COLUMNS.items():
            if column == name:
                break
            begin += width * (self.rows + 1)
        return begin

    @property
    def data_at(self) -> int:
        """Offset of the data, a multiple of 2 MiB."""
        return -(-(self.column_at("busy") + self.rows + 1) // _HUGE) * _HUGE

    @property
    def total(self) -> int:
        """Bytes of the file."""
        return self.data_at + self.data_bytes

    def header(self) -> bytes:
        """Return the header, without the zeros behind it."""
        head = _HEADER.pack(_MAGIC, _VERSION, SLOTS, self.data_bytes, self.rows, RECENT, self.total)
        return head + zlib.crc32(head).to_bytes(4, "little")

    @classmethod
    def parse(cls, head: bytes) -> Layout:
        """Read a header; compute nothing from its numbers before they are checked.

        Raises:
            NotAnArena: it is none, is damaged, or is of another version.
        """
        if len(head) < _HEADER.size + 4 or not head.startswith(_MAGIC):
            raise NotAnArena("it does not begin as an arena of kvkeep does")
        _, version, slots, data, rows, recent, total = _HEADER.unpack_from(head)
        check = int.from_bytes(head[_HEADER.size : _HEADER.size + 4], "little")
        if zlib.crc32(head[: _HEADER.size]) != check:
            raise NotAnArena("the checksum of its header is wrong")
        if version != _VERSION:
            raise NotAnArena(f"its format has version {version}; this kvkeep reads {_VERSION}")
        layout = cls(data, rows)
        fine = ALIGNMENT <= data < 1 << 50 and not data % ALIGNMENT and 0 < rows <= _MOST_ROWS
        if not fine or (slots, recent, layout.total) != (SLOTS, RECENT, total):
            raise NotAnArena("the sizes in its header contradict each other")
        return layout


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
