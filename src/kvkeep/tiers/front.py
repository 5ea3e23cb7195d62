"""The memory in front of all tiers: where everything that is read or written passes through."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvkeep.backends.buffers import aligned
from kvkeep.errors import OutOfRoom
from kvkeep.eviction import LRU
from kvkeep.keys import SPACE_BYTES
from kvkeep.tiers.catalogue import Catalogue
from kvkeep.tiers.counters import Counters, TierStats
from kvkeep.tiers.record import HEADER_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvkeep.backends.memory import Draft, Lease, MemoryBackend
    from kvkeep.eviction import EvictionPolicy

__all__ = ["Front", "Held"]

_TRIES = 8


class Held:
    """A record somebody works with: in memory under a lease, or in a buffer of its own.

    ``payload``, the raw KV, is to be read only; the header before it is for who sends the record
    elsewhere to write.
    """

    __slots__ = ("_lease", "record")

    def __init__(self, record: memoryview, lease: Lease | None = None) -> None:
        self.record = record
        self._lease = lease

    @property
    def payload(self) -> memoryview:
        """What follows the header."""
        return self.record[HEADER_BYTES:]

    def release(self) -> None:
        """It is not needed any more."""
        if self._lease is not None:
            self._lease.release()


class Front:
    """An arena with raw records, and the order in which they may go.

    Records here are never verified and their headers are not to be relied on: a header is written
    when a record leaves for another tier.

    Thread safety: all methods.
    """

    name = "memory"

    def __init__(
        self,
        backend: MemoryBackend,
        policy: Callable[[], EvictionPolicy] = LRU,
        *,
        ttl: float | None = None,
        name: str = "memory",
    ) -> None:
        self.name = name
        self.backend = backend
        self.catalogue = Catalogue(policy, ttl=ttl)
        self.counters = Counters()
        self.capacity = backend.arena.size
        self.evicted: Callable[[bytes], None] | None = None
        """Told of every block that had to make room; set by who has other tiers."""

    def __contains__(self, block: object) -> bool:
        assert isinstance(block, bytes)
        if self.catalogue.ttl is not None and block not in self.catalogue:
            return False
        return self.backend.contains(block)

    def lease(self, block: bytes) -> Held | None:
        """Access to a record that is here."""
        if self.catalogue.ttl is not None and block not in self.catalogue:
            return None
        lease = self.backend.lease(block)
        return None if lease is None else Held(lease.place, lease)

    def reserve(self, block: bytes, raw_bytes: int) -> Draft | None:
        """Room for a record, which others have to leave; None when nothing more may go."""
        size = HEADER_BYTES + raw_bytes
        over = self.catalogue.over_quota(block[:SPACE_BYTES], size)
        if over < 0:
            return None
        if over:
            self._evict(self.catalogue.victims(over, block[:SPACE_BYTES]))
        for _ in range(_TRIES):
            try:
                return self.backend.reserve(block, size)
            except OutOfRoom as short:
                if short.needed > self.capacity:
                    return None
                victims = self.catalogue.victims(short.needed)
                if not victims:
                    return None
                self._evict(victims)
        return None

    def commit(self, draft: Draft, block: bytes) -> Held:
        """Make a draft's record findable; access to it, writable until it was sealed."""
        lease = draft.commit(lease=True)
        assert lease is not None
        self.catalogue.add(block, len(lease.view))
        return Held(lease.place, lease)

    def buffer(self, raw_bytes: int) -> memoryview:
        """Room for a record outside of the arena, for when there is none or it need not stay."""
        return aligned(HEADER_BYTES + raw_bytes)

    def leaving(self, needed: int) -> list[bytes]:
        """Blocks to take elsewhere so that ``needed`` bytes come free; still to be found here."""
        return self.catalogue.victims(needed)

    def remove(self, blocks: Sequence[bytes]) -> int:
        """Delete ``blocks``; their bytes."""
        for block in blocks:
            self.catalogue.forget(block)
        return self.backend.delete(blocks)

    def _evict(self, victims: Sequence[bytes]) -> None:
        if self.evicted is not None:
            for block in victims:
                self.evicted(block)
        self.backend.delete(victims)
        self.counters.count(evictions=len(victims))

    def stats(self) -> TierStats:
        """The memory at this moment."""
        return TierStats(
            name=self.name,
            place=self.backend.describe(),
            codec="raw",
            blocks=len(self.backend),
            used_bytes=self.backend.used(),
            capacity=self.capacity,
            pinned_bytes=self.catalogue.pinned_bytes,
            queued_bytes=0,
            breaker="closed",
            breaker_opened=0,
            counters=self.counters.as_dict(),
        )
