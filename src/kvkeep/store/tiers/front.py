"""The memory in front of all tiers: where everything that is read or written passes through."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from kvkeep.core.errors import OutOfRoom
from kvkeep.core.eviction import LRU
from kvkeep.core.keys import SPACE_BYTES
from kvkeep.store.backends.arena import Arena
from kvkeep.store.backends.buffers import aligned
from kvkeep.store.tiers.catalogue import Catalogue
from kvkeep.store.tiers.counters import TierCounters, TierStats
from kvkeep.store.tiers.fates import Fates
from kvkeep.store.tiers.record import HEADER_BYTES
from kvkeep.store.tiers.turns import AGAIN, Again, Turns

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvkeep.core.eviction import EvictionPolicy
    from kvkeep.store.backends.memory import Draft, Lease, MemoryBackend

__all__ = ["Front", "MemoryLease"]

_TRIES = 8
_THREADS = 64
"""Of requests that put at a time, and of readers of the tiers below: about as many at most."""


class MemoryLease:
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

    Thread safety: all methods. One lock makes the arena and the catalogue change together: else a
    block that is put while an older record of it is evicted would be known and not be there.

    Attributes:
        leaving_bytes: of blocks that `leave` named and that did not go yet.
    """

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
        self.capacity = backend.arena.size
        self.catalogue = Catalogue(policy, ttl=ttl, budget=self.capacity)
        self.counters = TierCounters()
        self.fates = Fates()
        """Where it notes what it loses; set by who has other tiers."""
        self.evicted: Callable[[bytes], None] | None = None
        """Told of every block that had to make room; set by who has other tiers."""
        self.leaving_bytes = 0
        self._leaving: dict[bytes, int] = {}  # still in the arena, in no order any more
        self._lock = threading.Lock()
        self._turns = Turns(_TRIES, threads=_THREADS)

    def __contains__(self, block: object) -> bool:
        assert isinstance(block, bytes)
        return not self._outlived(block) and self.backend.contains(block)

    def lease(self, block: bytes) -> MemoryLease | None:
        """Access to a record that is here."""
        if self._outlived(block):
            return None
        lease = self.backend.lease(block)
        return None if lease is None else MemoryLease(lease.place, lease)

    def reserve(self, block: bytes, raw_bytes: int) -> Draft | None:
        """Room for a record, which others have to leave; None when nothing more may go."""
        size = HEADER_BYTES + raw_bytes
        space = block[:SPACE_BYTES]
        over = self.catalogue.over_quota(space, size)
        if over > 0:
            self._evict(over, space)
            over = self.catalogue.over_quota(space, size)
        if over:
            return None

        def attempt() -> Draft | Again | None:
            try:
                return self.backend.reserve(block, size)
            except OutOfRoom as short:
                possible = short.needed <= self.capacity and self._evict(short.needed)
                return AGAIN if possible else None

        return self._turns.take(attempt)

    def commit(self, draft: Draft, block: bytes) -> MemoryLease:
        """Make a draft's record findable; access to it, writable until it was sealed.

        Raises:
            BackendFailed: the memory was closed.
        """
        with self._lock:
            lease = draft.commit(lease=True)
            assert lease is not None
            self.catalogue.add(block, len(lease.view))
            self._stay(block)
        return MemoryLease(lease.place, lease)

    def buffer(self, raw_bytes: int) -> memoryview:
        """Room for a record outside of the arena, for when there is none or it need not stay."""
        return aligned(HEADER_BYTES + raw_bytes)

    def leave(self, needed: int) -> list[bytes]:
        """Blocks to take elsewhere so that ``needed`` bytes come free: `gone` has to follow.

        Until then they are still found here. What outlived its time just goes.
        """
        old: list[bytes] = []
        with self._lock:
            blocks = self.catalogue.victims(needed, outlived=old)
            self.backend.delete(old)
            for block, size in zip(blocks, self.backend.sizes(blocks), strict=True):
                self._leaving[block] = Arena.extent(size or 0)
                self.leaving_bytes += self._leaving[block]
        self.counters.count(evictions=len(old))
        if old:
            self.fates.note(old, self.name, "removed", "ttl")
        return blocks

    def gone(self, block: bytes) -> None:
        """``block``, which was to `leave`, did, or is given up; unless it came back meanwhile."""
        with self._lock:
            if self._stay(block):
                self.backend.delete([block])
                self.counters.count(evictions=1)

    def remove(self, blocks: Sequence[bytes]) -> int:
        """Delete ``blocks``; their bytes."""
        with self._lock:
            for block in blocks:
                self.catalogue.forget(block)
                self._stay(block)
            return self.backend.delete(blocks)

    def check(self) -> None:
        """Recount; an AssertionError is a fault of kvkeep."""
        self.backend.check()
        self.catalogue.check()
        with self._lock:
            assert self.leaving_bytes == sum(self._leaving.values())
            known = {*self.catalogue.blocks(), *self._leaving}
            there = {item.block for item in self.backend.list()}
            assert known == there, (
                f"{len(known ^ there)} blocks are in memory or its catalogue only"
            )

    def _outlived(self, block: bytes) -> bool:
        """Whether it was not used for longer than it may be found; what leaves was, just now."""
        if self.catalogue.ttl is None:
            return False
        return block not in self.catalogue and block not in self._leaving

    def _stay(self, block: bytes) -> bool:
        """Under the lock: it does not leave any more; whether it was about to."""
        size = self._leaving.pop(block, None)
        self.leaving_bytes -= size or 0
        return size is not None

    def _evict(self, needed: int, space: bytes | None = None) -> bool:
        """Have blocks go at once; whether any could."""
        with self._lock:
            victims = self.catalogue.victims(needed, space)
            self.backend.delete(victims)
        self.fates.note(victims, self.name, "evicted", self.catalogue.policy)
        if self.evicted is not None:
            for block in victims:
                self.evicted(block)
        self.counters.count(evictions=len(victims))
        return bool(victims)

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
