"""`WriteBudget`: how many bytes a tier may write in a time, kept to the byte.

A bucket fills with what is written and empties at a steady rate. A write that would overflow it is
refused. What the bucket holds and what leaks out of it in ``seconds`` are together the budget, so
no span of that length, wherever it begins, has more writes than that.
"""

from __future__ import annotations

import errno
import os
import re
import struct
import sys
import threading
import time
from abc import ABC, abstractmethod
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple
from zlib import crc32

from kvkeep.core.errors import BackendFailed, InvalidValue, OutOfRoom, whole
from kvkeep.core.geometry.units import format_bytes, parse_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

if sys.platform != "win32":
    import fcntl

__all__ = ["FileBucket", "MemoryBucket", "OverBudget", "WriteBucket", "WriteBudget"]

_SPANS: Final = {"day": 86_400, "hour": 3_600}
_BURST: Final = 12  # a bucket holds this part of the budget
_MOST: Final = 1 << 70  # bytes, so that the file's fields have room for what a bucket holds
_SCALE: Final = 40  # bits behind the point of what a bucket holds: what leaks is rounded down
_MAGIC: Final = b"kvwrites"
# magic, what the bucket holds (low and high half), time, boot, bytes written in all; their CRC
_LAYOUT: Final = struct.Struct("<8sQQqQQ")
_SUM: Final = struct.Struct("<I")
_BOOT: Final = Path("/proc/sys/kernel/random/boot_id")
_MASK: Final = (1 << 64) - 1
_PAUSE: Final = 0.0005  # seconds between two attempts to lock


class OverBudget(OutOfRoom):
    """The write budget is spent; nothing was written. Part of it is free again later."""

    def __str__(self) -> str:
        return f"the write budget of {self.where} has no {self.needed} bytes left now"


@dataclass(frozen=True, slots=True)
class WriteBudget:
    """At most ``amount`` bytes of writes in any ``seconds`` (a whole number).

    Raises `InvalidValue` for an amount below 12 bytes or above 1024 EiB, or seconds below 1.
    """

    amount: int
    seconds: int = _SPANS["day"]

    def __post_init__(self) -> None:
        whole("bytes of a write budget", self.amount, _BURST, _MOST)
        whole("seconds of a write budget", self.seconds, 1)

    @classmethod
    def parse(cls, text: str) -> WriteBudget:
        """Read ``2TB/day`` or ``50GiB/hour``: an amount as `parse_bytes` takes it, and a span.

        Raises:
            InvalidValue: the text is no such budget.
        """
        match = re.fullmatch(r"(.+?) ?/ ?(day|hour)", text.strip())
        if match is None:
            raise InvalidValue(
                f"{text!r} is no write budget; write bytes per day or hour, as 2TB/day or "
                "50GiB/hour"
            )
        return cls(parse_bytes(match[1]), _SPANS[match[2]])

    @property
    def burst(self) -> int:
        """Bytes that may be written at once after a long time without writes."""
        return self.amount // _BURST

    def leaked(self, held: int, nanoseconds: int) -> int:
        """Return what is left of ``held`` (bytes << 40) after so many nanoseconds."""
        if nanoseconds <= 0:
            return held
        rate = self.amount - self.burst
        return max(0, held - ((rate * nanoseconds << _SCALE) // (self.seconds * 1_000_000_000)))

    def __str__(self) -> str:
        span = next((name for name, long in _SPANS.items() if long == self.seconds), None)
        return f"{format_bytes(self.amount)}/{span or f'{self.seconds} s'}"


class _Held(NamedTuple):
    """What a bucket holds (bytes << 40) at a time (ns), and the bytes written in all."""

    held: int
    at: int
    written: int


class WriteBucket(ABC):
    """The bucket of a `WriteBudget`.

    By a clock that was set back nothing leaks until it has caught up; if that would take longer
    than the span of the budget, the bucket counts as full, and leaks from then on. A clock that is
    set forward cannot be told from time that has passed.

    Thread safety: all methods.

    Arguments:
        budget: what it allows.
        where: the place, for messages.
        clock: returns Unix time in nanoseconds.
    """

    def __init__(
        self, budget: WriteBudget, where: str, clock: Callable[[], int] = time.time_ns
    ) -> None:
        self.budget = budget
        self.where = where
        self._clock = clock
        self._last = _Held(0, clock(), 0)

    @contextmanager
    @abstractmethod
    def _state(self) -> Iterator[list[_Held]]:
        """Hold the lock of the state; what the list has at the end is stored."""

    def charge(self, size: int) -> None:
        """Count ``size`` bytes as written, before they are.

        Raises:
            OverBudget: that would exceed the budget; nothing was counted.
            BackendFailed: the state cannot be read or written, or its lock is held too long.
            OutOfRoom: the state is in a file, and the filesystem is full.
        """
        with self._state() as state:
            # Stored also if the charge is refused: what leaks is counted from there.
            now = state[0] = self._last = self._now(state[0])
            more = now.held + (size << _SCALE)
            if more > self.budget.burst << _SCALE:
                raise OverBudget(size, self.where)
            state[0] = self._last = _Held(more, now.at, now.written + size)

    def left(self) -> int:
        """Return the bytes that may be written now, as far as this process knows; no I/O."""
        now = self._known()
        return max(0, (self.budget.burst << _SCALE) - now.held >> _SCALE)

    @property
    def written(self) -> int:
        """Bytes charged by all who share the bucket, as far as this process knows."""
        return self._last.written

    def state(self) -> dict[str, int]:
        """Return the budget (``bytes`` in ``seconds``), what is ``left``, what was ``written``."""
        budget = self.budget
        return {
            "bytes": budget.amount,
            "seconds": budget.seconds,
            "left": self.left(),
            "written": self.written,
        }

    def _known(self) -> _Held:
        """Return the state as far as this process knows, without what has leaked since."""
        last = self._last
        now = self._now(last)
        if now.at < last.at:  # the clock was set back far: what leaks is counted from here
            self._last = now
        return now

    def _now(self, last: _Held) -> _Held:
        now, budget = self._clock(), self.budget
        if now < last.at - budget.seconds * 1_000_000_000:
            return _Held(max(last.held, budget.burst << _SCALE), now, last.written)
        left = budget.leaked(last.held, now - last.at)
        return _Held(left, max(now, last.at), last.written)


class MemoryBucket(WriteBucket):
    """A bucket of one process; it begins empty."""

    def __init__(
        self, budget: WriteBudget, where: str, clock: Callable[[], int] = time.time_ns
    ) -> None:
        super().__init__(budget, where, clock)
        self._lock = threading.Lock()
        self._held = self._last

    @contextmanager
    def _state(self) -> Iterator[list[_Held]]:
        with self._lock:
            state = [self._held]
            try:
                yield state
            finally:
                self._held = state[0]


class FileBucket(WriteBucket):
    """A bucket in a file, shared by all processes that open it; it survives their ends.

    The file is locked by flock for each charge, so the kernel frees the lock of a killed process.
    A charge is one write within a page, before the data are written: a process killed in between
    has charged too much, never too little. After the machine was started anew the bucket counts as
    full, because the last charges may be lost; so it does if the file is damaged. A new file is
    an empty bucket, so deleting the file clears what was written.

    Arguments:
        path: of the file.
        timeout: returns the seconds to wait for the lock.
    """

    def __init__(
        self,
        budget: WriteBudget,
        where: str,
        path: str,
        clock: Callable[[], int] = time.time_ns,
        timeout: Callable[[], float] = lambda: 5.0,
    ) -> None:
        super().__init__(budget, where, clock)
        self._path = path
        self._timeout = timeout
        self._boot = _boot()
        self._threads = threading.Lock()

    @contextmanager
    def _state(self) -> Iterator[list[_Held]]:
        with self._threads:  # flock is per open file; this spares threads the waiting
            with self._translated():
                fd = self._locked()
            try:
                with self._translated():
                    state = [self._read(fd)]
                try:
                    yield state
                finally:
                    with self._translated():
                        self._write(fd, state[0])
            finally:
                fcntl.flock(fd, fcntl.LOCK_UN)  # a child forked meanwhile has it open
                os.close(fd)

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except BackendFailed:
            raise
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise OutOfRoom(_LAYOUT.size, f"the filesystem of {self._path}") from error
            message = f"{self._path} cannot be used: {error.strerror}"
            raise BackendFailed(error.errno, message) from error

    def refresh(self) -> None:
        """Learn what other processes have written.

        Raises:
            BackendFailed: as `charge`.
        """
        with self._state() as state:
            state[0] = self._last = self._now(state[0])

    def _locked(self) -> int:
        until = time.monotonic() + self._timeout()
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        while True:
            fd = os.open(self._path, flags, 0o600)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                there = os.lstat(self._path)
                mine = os.fstat(fd)
                if (there.st_dev, there.st_ino) == (mine.st_dev, mine.st_ino):
                    return fd
            except (BlockingIOError, FileNotFoundError):
                pass  # held by another process, or removed meanwhile
            except BaseException:
                os.close(fd)
                raise
            os.close(fd)
            if time.monotonic() > until:
                raise BackendFailed(
                    f"{self._path} was locked for more than {self._timeout():g} s: one of the "
                    "processes that write there is stopped or hangs"
                )
            time.sleep(_PAUSE)

    def _read(self, fd: int) -> _Held:
        data = os.pread(fd, _LAYOUT.size + _SUM.size, 0)
        if not data:
            self._sync(fd)
            return _Held(0, self._clock(), 0)
        full = self.budget.burst << _SCALE
        head, checksum = data[: _LAYOUT.size], data[_LAYOUT.size :]
        if not head.startswith(_MAGIC) or checksum != _SUM.pack(crc32(head)):
            return _Held(full, self._clock(), 0)
        _, low, high, at, boot, written = _LAYOUT.unpack(head)
        if boot != self._boot:
            return _Held(max(full, low | high << 64), self._clock(), written)
        return _Held(low | high << 64, at, written)

    def _write(self, fd: int, state: _Held) -> None:
        data = _LAYOUT.pack(
            _MAGIC, state.held & _MASK, state.held >> 64, state.at, self._boot,
            state.written & _MASK,
        )  # fmt: skip
        os.pwrite(fd, data + _SUM.pack(crc32(data)), 0)

    def _sync(self, fd: int) -> None:
        """Let the new file survive a loss of power: without it the bucket would be empty again."""
        self._write(fd, _Held(0, self._clock(), 0))
        os.fsync(fd)
        folder = os.open(os.path.dirname(self._path) or ".", os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def _boot() -> int:
    """Return a number that changes when the machine starts anew; 0 where none is known."""
    try:
        return int(_BOOT.read_text().strip().replace("-", "")[:16], 16)
    except (OSError, ValueError):
        return 0
