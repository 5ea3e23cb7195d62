"""`Turns`: a thread that makes room also gets it, even if others are quicker to take it."""

from __future__ import annotations

import threading
from enum import Enum
from typing import TYPE_CHECKING, Final, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["AGAIN", "Again", "Turns"]

Result = TypeVar("Result")


class Again(Enum):
    """What an attempt returns that may succeed if it is repeated."""

    AGAIN = "again"


AGAIN: Final = Again.AGAIN


class Turns:
    """Repeats attempts at a place that several threads fill; one that loses often goes alone.

    Room that one thread makes may be taken by another before it is used. After ``tries`` attempts
    the other threads wait before their next one, so that each can come before once more at most.

    Arguments:
        tries: attempts beside others, and alone (besides one for each of the others).
        threads: how many make attempts at a time.

    Thread safety: every method. Cost: nothing unless somebody goes alone.
    """

    def __init__(self, tries: int, threads: int) -> None:
        self._tries = tries
        self._alone_tries = tries + threads
        self._alone = threading.Lock()

    def take(self, attempt: Callable[[], Result | Again]) -> Result | None:
        """What ``attempt`` returns that is not `AGAIN`; None if it never does."""
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
