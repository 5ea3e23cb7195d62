"""`NodeLock`: mutual exclusion between processes, and which of them live.

The kernel owns all locks, so a process that is killed leaves none behind. They belong to the open
file (`flock`, and open file description locks), which a fork would share: so the descriptor is
closed in a forked child, and a parent that is killed leaves none behind there either.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
import sys
import threading
import time
import weakref
from functools import cache
from typing import TYPE_CHECKING, Final

from kvkeep.core.errors import BackendFailed

if sys.platform == "linux":
    import fcntl

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["SLOTS", "NodeLock"]

SLOTS: Final = 256
"""Processes that may have the arena open at a time."""

_YIELDS: Final = 20  # tries that only give up the processor in between
_FIRST_PAUSE: Final = 20e-6  # seconds; doubles up to …
_LONGEST_PAUSE: Final = 1e-3
_TURN: Final = 0.01  # seconds to wait for a thread that does not wait
_OWN: Final[weakref.WeakSet[NodeLock]] = weakref.WeakSet()


@cache
def _flock() -> Callable[[int, int], int]:
    """Return `flock` of the C library, called without giving up the GIL.

    A thread that gave it up could hold the lock while it waits for the GIL, 5 ms for each busy
    thread of its process, and all processes of the node would wait with it.
    """
    function = ctypes.PyDLL(None, use_errno=True).flock
    function.argtypes, function.restype = [ctypes.c_int, ctypes.c_int], ctypes.c_int
    return function


class NodeLock:
    """A lock that one thread on the node holds at a time; a context manager, not reentrant.

    Thread safety: all methods. Cost: about 2 µs if it is free.

    Arguments:
        fd: descriptor of the arena's file, opened for this lock alone; owned by it from now on.
        place: the arena, for messages.
        timeout: seconds to wait for the lock.

    Attributes:
        slot: number of this opening among those of the node, -1 before `occupy`.
    """

    def __init__(self, fd: int, place: str, timeout: float) -> None:
        self.slot = -1
        self.timeout = timeout
        self._fd = fd
        self._place = place
        self._threads = threading.Lock()
        self._flock = _flock()
        self._stuck = False  # it was not given up in time; until it is, nobody waits again
        _OWN.add(self)

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *error: object) -> None:
        self.release()

    @property
    def inherited(self) -> bool:
        """Whether this process was forked from the one that opened the arena."""
        return self._fd == -2

    def acquire(self) -> None:
        """Take the lock.

        Raises:
            BackendFailed: another process did not release it within `timeout` seconds (a stopped
                process, for example), the arena is closed, or its opener forked this process.
        """
        timeout = 0.0 if self._stuck else self.timeout
        if not self._threads.acquire(timeout=timeout or _TURN):
            raise BackendFailed(
                f"{self._place}: another thread has waited for the lock of the node, or held it, "
                f"for {self.timeout:g} s"
            )
        try:
            if not self._try():
                self._wait(timeout)
            self._stuck = False
        except BaseException:
            self._threads.release()
            raise

    def _try(self) -> bool:
        if self._fd < 0:
            why = "opened by the parent of this process; open it here" if self.inherited else ""
            raise BackendFailed(f"{self._place} is {why or 'closed'}")
        if self._flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB) == 0:
            return True
        code = ctypes.get_errno()
        if code in {errno.EWOULDBLOCK, errno.EINTR}:
            return False
        raise BackendFailed(code, f"{self._place} cannot be locked: {os.strerror(code)}")

    def _wait(self, timeout: float) -> None:
        until = time.monotonic() + timeout
        pause, tries = _FIRST_PAUSE, 0
        while not self._try():
            if time.monotonic() >= until:
                self._stuck = True
                raise BackendFailed(
                    f"{self._place}: another process has held the lock for {self.timeout:g} s or "
                    "more; a process that is stopped in the middle of a change does that"
                )
            if tries < _YIELDS:
                os.sched_yield()
            else:
                time.sleep(pause)
                pause = min(2 * pause, _LONGEST_PAUSE)
            tries += 1

    def release(self) -> None:
        """Give the lock back."""
        if self._fd >= 0:
            self._flock(self._fd, fcntl.LOCK_UN)
        self._threads.release()

    # --- which processes live: call these with the lock held -------------------------------------

    def occupy(self, slot: int) -> bool:
        """Mark ``slot`` as that of this opening until it closes or dies; False if it is taken."""
        try:
            fcntl.fcntl(self._fd, fcntl.F_OFD_SETLK, _range(fcntl.F_WRLCK, slot))
        except BlockingIOError:
            return False
        self.slot = slot
        return True

    def lives(self, slot: int) -> bool:
        """Whether the process that occupied ``slot`` still has the arena open."""
        if slot == self.slot:
            return True
        return self._taken(_range(fcntl.F_WRLCK, slot))

    def in_use(self) -> bool:
        """Whether any other process, or other opening in this one, has the arena open."""
        return self._taken(_range(fcntl.F_WRLCK, 0, SLOTS))

    def _taken(self, where: bytes) -> bool:
        kind: int = _LOCK.unpack(fcntl.fcntl(self._fd, fcntl.F_OFD_GETLK, where))[0]
        return kind != fcntl.F_UNLCK

    def close(self) -> None:
        """Release everything. A second call does nothing."""
        with self._threads:
            fd, self._fd = self._fd, min(self._fd, -1)
        if fd >= 0:
            os.close(fd)

    def after_fork(self) -> None:
        """Give up what a forked process has inherited."""
        fd, self._fd = self._fd, -2
        self._threads = threading.Lock()  # another thread of the parent may have held it
        if fd >= 0:
            os.close(fd)


_LOCK: Final = struct.Struct("hhqqi4x")  # struct flock of 64-bit Linux


def _range(kind: int, slot: int, slots: int = 1) -> bytes:
    return _LOCK.pack(kind, os.SEEK_SET, slot, slots, 0)


def _forked() -> None:
    for lock in list(_OWN):
        lock.after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)
