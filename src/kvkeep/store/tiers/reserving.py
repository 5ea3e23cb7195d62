"""`Reserving`: makes room for records in the memory in front."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Protocol

from kvkeep.core.errors import OutOfRoom
from kvkeep.core.keys import SPACE_BYTES
from kvkeep.store.tiers.record import HEADER_BYTES
from kvkeep.store.tiers.turns import AGAIN, Again, Turns

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvkeep.store.backends.memory import Draft, InPlaceBackend

__all__ = ["Reserving"]

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
