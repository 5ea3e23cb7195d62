"""`Reserving`: makes room for records in the memory in front."""

from __future__ import annotations

import threading
from enum import Enum
from typing import TYPE_CHECKING, Final, Protocol, TypeVar

from kvkeep.core.errors import OutOfRoom
from kvkeep.core.keys import SPACE_BYTES
from kvkeep.store.tiers.record import HEADER_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvkeep.store.backends.memory import Draft, InPlaceBackend

__all__ = ["AGAIN", "Again", "Reserving", "Turns"]

_TRIES: Final = 8  # attempts before a thread gets priority
_RUNS: Final = 8  # that threads may reserve before any of them counts to its namespace's quota
_THREADS: Final = 64  # at most, at a time: callers that put, and readers of tiers


class Evict(Protocol):
    """Deletes victims of at least so many bytes, in one namespace or all; False: there are none."""

    def __call__(self, needed: int, space: bytes | None = None) -> bool: ...


class Reserving:
    """Reserves memory for records, and evicts others for it: within quotas, and within the whole.

    Thread safety: all methods.

    Arguments:
        backend: where the records are.
        capacity: bytes of the memory.
        over_quota: returns the bytes to evict from a namespace before a record of so many bytes is
            added; -1: it never fits.
    """

    def __init__(
        self,
        backend: InPlaceBackend,
        capacity: int,
        over_quota: Callable[[bytes, int], int],
    ) -> None:
        self._backend = backend
        self._capacity = capacity
        self._over_quota = over_quota
        self._turns = Turns(_TRIES, threads=_THREADS)

    def reserve(self, block: bytes, raw_bytes: int, evict: Evict) -> Draft | None:
        """Return memory for a record, evicting others by ``evict``; None if too few can be."""
        drafts = self.reserve_all([block], [raw_bytes], evict)
        return drafts[0] if drafts else None

    def reserve_all(
        self, blocks: Sequence[bytes], raw_bytes: Sequence[int], evict: Evict
    ) -> list[Draft]:
        """`reserve` leading ``blocks`` of one namespace; empty if there is no room for the first.

        They are reserved together where no quota is near, else one: a draft counts to the quota
        when it is committed, and other threads may reserve as many meanwhile.
        """
        sizes, space = [HEADER_BYTES + one for one in raw_bytes], blocks[0][:SPACE_BYTES]
        if len(blocks) > 1 and self._over_quota(space, _RUNS * sum(sizes)):
            blocks, sizes = blocks[:1], sizes[:1]
        if len(blocks) == 1:
            over = self._over_quota(space, sizes[0])
            if over > 0:
                evict(over, space)
                over = self._over_quota(space, sizes[0])
            if over:
                return []

        def attempt() -> list[Draft] | Again:
            try:
                return self._backend.reserve_all(blocks, sizes)
            except OutOfRoom as short:
                needed = short.needed + sum(sizes[1:])
                possible = short.needed <= self._capacity and evict(needed)
                return AGAIN if possible else []

        return self._turns.take(attempt) or []


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
