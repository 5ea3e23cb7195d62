"""`MemoryTier`: the memory above all tiers; everything that is read or written passes through."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from itertools import takewhile
from typing import TYPE_CHECKING

from kvkeep.core.eviction import LRU
from kvkeep.store.backends.arena import Arena
from kvkeep.store.tiers.counters import TierCounters, TierStats
from kvkeep.store.tiers.index import Index
from kvkeep.store.tiers.loss_log import LossLog
from kvkeep.store.tiers.record import HEADER_BYTES
from kvkeep.store.tiers.reserving import Reserving

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvkeep.core.eviction import EvictionPolicy
    from kvkeep.store.backends.buffers import SpareBuffers
    from kvkeep.store.backends.memory import Draft, Lease, MemoryBackend
    from kvkeep.store.backends.shm import ShmBackend
    from kvkeep.store.tiers.tier_shares import TenantWeights

__all__ = ["MemoryLease", "MemorySpec", "MemoryTier"]


@dataclass(slots=True)
class MemorySpec:
    """A memory tier to be opened: its backend, eviction policy, time to live (s) and name."""

    backend: MemoryBackend | ShmBackend
    policy: Callable[[], EvictionPolicy] = LRU
    ttl: float | None = None
    name: str = "memory"


class MemoryLease:
    """A record in use: leased from memory, or in a separate buffer.

    ``payload``, the raw KV, must not be written to. Only the header before it is written, by the
    thread that writes the record to a tier.
    """

    __slots__ = ("_buffers", "_lease", "record")

    def __init__(
        self,
        record: memoryview,
        lease: Lease | None = None,
        buffers: SpareBuffers | None = None,
    ) -> None:
        self.record = record
        self._lease = lease
        self._buffers = buffers

    @property
    def payload(self) -> memoryview:
        """The raw KV behind the header."""
        return self.record[HEADER_BYTES:]

    @property
    def lease(self) -> Lease | None:
        """The lease of memory, None for a buffer."""
        return self._lease

    def release(self) -> None:
        """End the use of the record; a buffer is given back to ``buffers``."""
        if self._lease is not None:
            self._lease.release()
        if self._buffers is not None:
            buffers, self._buffers = self._buffers, None
            buffers.give_back(self.record)


class MemoryTier:
    """An arena of raw records, and the order in which they are evicted.

    Records here are not verified, and their headers may be invalid: a header is written when the
    record is written to another tier.

    Thread safety: all methods. One lock makes the arena and the catalogue change together;
    otherwise a block that is put while its older record is evicted could stay in the catalogue
    without a record.

    Arguments:
        spec: what to open.
        losses: records which blocks it lost, and why.
        evicted: called with each block that was deleted to make room at once.
        shares: weights of tenants; see `Index`.

    Attributes:
        leaving_bytes: bytes of blocks that `leave` returned and that are still here.
    """

    def __init__(
        self,
        spec: MemorySpec,
        *,
        losses: LossLog | None = None,
        evicted: Callable[[bytes], None] = lambda _block: None,
        shares: TenantWeights | None = None,
    ) -> None:
        self.name = spec.name
        assert spec.backend.scheme == "memory"
        self.backend: MemoryBackend = spec.backend  # type: ignore[assignment]
        self.capacity = self.backend.arena.size
        self.catalogue = Index(spec.policy, ttl=spec.ttl, budget=self.capacity, shares=shares)
        self.counters = TierCounters()
        self.losses = LossLog() if losses is None else losses
        self.leaving_bytes = 0
        self._evicted = evicted
        self._leaving: dict[bytes, int] = {}  # bytes of blocks in the arena, not in the catalogue
        self._lock = threading.Lock()
        self._reserving = Reserving(self.backend, self.capacity, self.catalogue.over_quota)

    def __contains__(self, block: object) -> bool:
        assert isinstance(block, bytes)
        return not self._expired(block) and self.backend.contains(block)

    def lease(self, block: bytes) -> MemoryLease | None:
        """Return access to the record of ``block``, None if it is not here."""
        leases = self.lease_all([block])
        return leases[0] if leases else None

    def lease_all(self, blocks: Sequence[bytes]) -> list[MemoryLease]:
        """`lease` leading ``blocks``, up to the first that is not here."""
        if self.catalogue.ttl is not None:
            blocks = list(takewhile(lambda block: not self._expired(block), blocks))
        return [MemoryLease(one.place, one) for one in self.backend.lease_all(blocks)]

    def release_all(self, leases: Sequence[MemoryLease]) -> None:
        """Release ``leases``."""
        self.backend.release_all([one.lease for one in leases if one.lease is not None])

    def absent(self, blocks: Sequence[bytes]) -> int:
        """Return how many leading ``blocks`` are not here."""
        return next((at for at, block in enumerate(blocks) if block in self), len(blocks))

    def reserve(self, block: bytes, raw_bytes: int) -> Draft | None:
        """Return memory for a record, evicting others for it; None if not enough is evictable."""
        return self._reserving.reserve(block, raw_bytes, self._evict)

    def reserve_all(self, blocks: Sequence[bytes], raw_bytes: Sequence[int]) -> list[Draft]:
        """`reserve` leading ``blocks``, up to the first without room."""
        return self._reserving.reserve_all(blocks, raw_bytes, self._evict)

    def commit_all(self, drafts: Sequence[Draft]) -> list[MemoryLease]:
        """`commit` all of ``drafts``.

        Raises:
            BackendFailed: the memory was closed.
        """
        with self._lock:
            leases = self.backend.commit_all(drafts)
            for draft, lease in zip(drafts, leases, strict=True):
                self.catalogue.add(draft.block, len(lease.view))
                self._stay(draft.block)
        return [MemoryLease(lease.place, lease) for lease in leases]

    def commit(self, draft: Draft, block: bytes) -> MemoryLease:
        """Make the record of ``draft`` findable and return access to it.

        Raises:
            BackendFailed: the memory was closed.
        """
        assert draft.block == block
        return self.commit_all([draft])[0]

    def leave(self, needed: int) -> list[bytes]:
        """Return blocks to demote, to free ``needed`` bytes; call `left` for each afterwards.

        Until then they are still found here. Expired blocks are deleted at once instead.
        """
        old: list[bytes] = []
        with self._lock:
            blocks = self.catalogue.victims(needed, expired=old)
            self.backend.delete(old)
            for block, size in zip(blocks, self.backend.sizes(blocks), strict=True):
                self._leaving[block] = Arena.extent(size or 0)
                self.leaving_bytes += self._leaving[block]
        self.counters.count(evictions=len(old))
        if old:
            self.losses.note(old, self.name, "removed", "ttl")
        return blocks

    def left(self, block: bytes) -> None:
        """Delete ``block``, which `leave` returned, unless it was committed again meanwhile."""
        with self._lock:
            if self._stay(block):
                self.backend.delete([block])
                self.counters.count(evictions=1)

    def remove(self, blocks: Sequence[bytes]) -> int:
        """Delete ``blocks``; return the bytes freed."""
        with self._lock:
            for block in blocks:
                self.catalogue.forget(block)
                self._stay(block)
            return self.backend.delete(blocks)

    def check(self) -> None:
        """Recount everything; an AssertionError is a bug of kvkeep."""
        self.backend.check()
        self.catalogue.check()
        with self._lock:
            assert self.leaving_bytes == sum(self._leaving.values())
            known = {*self.catalogue.blocks(), *self._leaving}
            there = {item.block for item in self.backend.list()}
            assert known == there, (
                f"{len(known ^ there)} blocks are in memory or its catalogue only"
            )

    def _expired(self, block: bytes) -> bool:
        """Whether a time to live is set and ``block`` is over it or unknown; not while leaving."""
        if self.catalogue.ttl is None:
            return False
        return block not in self.catalogue and block not in self._leaving

    def _stay(self, block: bytes) -> bool:
        """Mark ``block`` as not leaving, under the lock; return whether it was."""
        size = self._leaving.pop(block, None)
        self.leaving_bytes -= size or 0
        return size is not None

    def _evict(self, needed: int, space: bytes | None = None) -> bool:
        """Delete victims at once; return whether there were any."""
        with self._lock:
            victims = self.catalogue.victims(needed, space)
            self.backend.delete(victims)
        self.losses.note(victims, self.name, "evicted", self.catalogue.policy)
        for block in victims:
            self._evicted(block)
        self.counters.count(evictions=len(victims))
        return bool(victims)

    def stats(self) -> TierStats:
        """Return the tier's figures at this moment."""
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
