"""`Turns`: lets each of several threads that compete for room succeed in the end."""

from __future__ import annotations

import threading
from enum import Enum
from typing import TYPE_CHECKING, Final, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["AGAIN", "Again", "Turns"]

Result = TypeVar("Result")


class Again(Enum):
    """The result of a failed attempt that may succeed if it is repeated."""

    AGAIN = "again"


AGAIN: Final = Again.AGAIN


class Turns:
    """Repeats attempts that compete for the same room; a thread that loses often gets priority.

    Another thread may use the room that one thread made. After ``tries`` failed attempts a thread
    takes a lock, and the others wait for it before their next attempt: each of them can win at most
    once more.

    Arguments:
        tries: attempts without the lock. With the lock, ``tries + threads`` attempts follow.
        threads: threads that make attempts at a time.

    Thread safety: every method. Cost: nothing unless a thread takes the lock.
    """

    def __init__(self, tries: int, threads: int) -> None:
        self._tries = tries
        self._alone_tries = tries + threads
        self._alone = threading.Lock()

    def take(self, attempt: Callable[[], Result | Again]) -> Result | None:
        """Repeat ``attempt`` until its result is not `AGAIN`; return that, None after all tries."""
        for _ in range(self._tries):
            if self._alone.locked():
                with self._alone:
                    pass
            result = attempt()
            if result is not AGAIN:
                return result
        with self._alone:
            for _ in range(self._alone_tries):
                result = attempt()
                if result is not AGAIN:
                    return result
        return None
