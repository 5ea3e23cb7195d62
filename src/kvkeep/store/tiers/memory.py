"""The memory above all tiers, that of a process; everything that is read or written passes through.

`MemoryTier` has an arena of this process. `kvkeep.store.tiers.shared_memory` has that of a node.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import takewhile
from typing import TYPE_CHECKING, Final, Protocol

from kvkeep.core.errors import OutOfRoom
from kvkeep.core.eviction import LRU
from kvkeep.core.keys import SPACE_BYTES
from kvkeep.store.backends.arena import Arena
from kvkeep.store.tiers.counters import TierCounters, TierStats
from kvkeep.store.tiers.index import Index
from kvkeep.store.tiers.record import HEADER_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvkeep.core.eviction import EvictionPolicy
    from kvkeep.store.backends.buffers import SpareBuffers
    from kvkeep.store.backends.memory import Draft, Lease, MemoryBackend
    from kvkeep.store.backends.shm import ShmBackend
    from kvkeep.store.tiers.loss_log import LossLog
    from kvkeep.store.tiers.tier_shares import TenantWeights

__all__ = ["HostMemory", "MemoryLease", "MemorySpec", "MemoryTier"]

_TRIES: Final = 72  # to make room that other threads use meanwhile; more than threads that may
_RUNS: Final = 8  # that threads may reserve before any of them counts to its namespace's quota


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

    __slots__ = ("_buffers", "lease", "record")

    def __init__(
        self,
        record: memoryview,
        lease: Lease | None = None,
        buffers: SpareBuffers | None = None,
    ) -> None:
        self.record = record
        self.lease = lease
        """The lease of memory, None for a buffer."""
        self._buffers = buffers

    @property
    def payload(self) -> memoryview:
        """The raw KV behind the header."""
        return self.record[HEADER_BYTES:]

    def release(self) -> None:
        """End the use of the record; a buffer is given back to ``buffers``."""
        if self.lease is not None:
            self.lease.release()
        if self._buffers is not None:
            buffers, self._buffers = self._buffers, None
            buffers.give_back(self.record)


class _Order(Protocol):
    """Which blocks are here, and in which order they are evicted: `Index`, `SharedOrder`."""

    ttl: float | None

    @property
    def policy(self) -> str: ...

    @property
    def pinned_bytes(self) -> int: ...

    def over_quota(self, space: bytes, more: int) -> int: ...


class HostMemory(ABC):
    """Raw records in memory, and what is evicted for others.

    Records here are not verified, and their headers may be invalid: a header is written when the
    record is written to another tier.

    Thread safety: all methods.

    Arguments:
        spec: what to open.
        losses: records which blocks it lost, and why.
        evicted: called with each block that was deleted to make room at once.

    Attributes:
        catalogue: which blocks are here, and in which order they are evicted.
        leaving_bytes: bytes of blocks that `leave` returned and that are still here.
    """

    backend: MemoryBackend | ShmBackend
    catalogue: _Order
    leaving_bytes: int

    def __init__(self, spec: MemorySpec, losses: LossLog, evicted: Callable[[bytes], None]) -> None:
        self.name = spec.name
        self.capacity: int = spec.backend.capacity
        self.counters = TierCounters()
        self.losses = losses
        self._evicted = evicted
        self._faults: AbstractContextManager[object, bool] = nullcontext()  # type: ignore[assignment]
        self._making_room = threading.Lock()  # one thread at a time evicts for a record

    @abstractmethod
    def __contains__(self, block: object) -> bool: ...

    def lease(self, block: bytes) -> MemoryLease | None:
        """Return access to the record of ``block``, None if it is not here."""
        leases = self.lease_all([block])
        return leases[0] if leases else None

    def lease_all(self, blocks: Sequence[bytes]) -> list[MemoryLease]:
        """`lease` leading ``blocks``, up to the first that is not here."""
        with self._faults:
            if self.catalogue.ttl is not None:
                blocks = list(takewhile(self.__contains__, blocks))
            return [MemoryLease(lease.place, lease) for lease in self.backend.lease_all(blocks)]
        return []

    def release_all(self, leases: Sequence[MemoryLease]) -> None:
        """Release ``leases``."""
        self.backend.release_all([lease.lease for lease in leases if lease.lease is not None])

    def absent(self, blocks: Sequence[bytes]) -> int:
        """Return how many leading ``blocks`` are not here."""
        return next((at for at, block in enumerate(blocks) if block in self), len(blocks))

    def reserve(self, block: bytes, raw_bytes: int) -> Draft | None:
        """Return memory for a record, evicting others for it; None if not enough is evictable."""
        drafts = self.reserve_all([block], [raw_bytes])
        return drafts[0] if drafts else None

    def reserve_all(self, blocks: Sequence[bytes], raw_bytes: Sequence[int]) -> list[Draft]:
        """`reserve` leading ``blocks`` of one namespace; empty if there is no room for the first.

        They are reserved together where no quota is near, else one: a draft counts to the quota
        when it is committed, and other threads may reserve as many meanwhile.
        """
        sizes, space = [HEADER_BYTES + size for size in raw_bytes], blocks[0][:SPACE_BYTES]
        over_quota = self.catalogue.over_quota
        with self._faults:
            if len(blocks) > 1 and over_quota(space, _RUNS * sum(sizes)):
                blocks, sizes = blocks[:1], sizes[:1]
            if len(blocks) == 1 and (over := over_quota(space, sizes[0])):
                if over > 0:
                    self._evict(over, space)
                if over_quota(space, sizes[0]):
                    return []
            return self._reserve(blocks, sizes)
        return []

    def _reserve(self, blocks: Sequence[bytes], sizes: Sequence[int]) -> list[Draft]:
        if not self._making_room.locked():  # else that thread comes first
            try:
                return self.backend.reserve_all(blocks, sizes)
            except OutOfRoom:
                pass
        with self._making_room:
            for _ in range(_TRIES):
                try:
                    return self.backend.reserve_all(blocks, sizes)
                except OutOfRoom as short:
                    if short.needed > self.capacity or not self._evict(
                        short.needed + sum(sizes[1:])
                    ):
                        break
        return []

    @abstractmethod
    def commit_all(self, drafts: Sequence[Draft]) -> list[MemoryLease]:
        """Make the records of ``drafts`` findable, and return access to them.

        Empty if memory of the node failed; that is counted.

        Raises:
            BackendFailed: the memory was closed.
        """

    def commit(self, draft: Draft, block: bytes) -> MemoryLease | None:
        """`commit_all` of the draft of ``block``; None if memory of the node failed."""
        assert draft.block == block
        leases = self.commit_all([draft])
        return leases[0] if leases else None

    @abstractmethod
    def leave(self, needed: int) -> list[bytes]:
        """Return blocks to demote, to free ``needed`` bytes; call `left` for each afterwards.

        Until then they are still found here. Expired blocks are deleted at once instead.
        """

    @abstractmethod
    def left(self, block: bytes) -> None:
        """Delete ``block``, which `leave` returned, unless it was committed again meanwhile."""

    @abstractmethod
    def remove(self, blocks: Sequence[bytes]) -> int:
        """Delete ``blocks``; return the bytes freed.

        Raises:
            BackendFailed: memory of the node failed, which is counted; see `ShmBackend.delete`.
        """

    @abstractmethod
    def check(self) -> None:
        """Recount everything; an AssertionError is a bug of kvkeep."""

    def _evict(self, needed: int, space: bytes | None = None) -> bool:
        """Delete victims at once, in one namespace or all; return whether there were any."""
        victims = self._delete_victims(needed, space)
        self.losses.note(victims, self.name, "evicted", self.catalogue.policy)
        for block in victims:
            self._evicted(block)
        self.counters.count(evictions=len(victims))
        return bool(victims)

    @abstractmethod
    def _delete_victims(self, needed: int, space: bytes | None) -> list[bytes]: ...

    def _expire(self, blocks: Sequence[bytes]) -> None:
        """Count ``blocks``, which were deleted because their time was over."""
        if blocks:
            self.counters.count(evictions=len(blocks))
            self.losses.note(blocks, self.name, "removed", "ttl")

    def stats(self) -> TierStats:
        """Return the figures at this moment. Of memory of the node, counters are this process's."""
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


class MemoryTier(HostMemory):
    """Memory of this process, with a policy, quotas and shares of its own.

    One lock makes the arena and the catalogue change together; otherwise a block that is put while
    its older record is evicted could stay in the catalogue without a record.

    Arguments:
        shares: weights of tenants; see `Index`.
    """

    backend: MemoryBackend
    catalogue: Index

    def __init__(
        self,
        spec: MemorySpec,
        losses: LossLog,
        evicted: Callable[[bytes], None],
        shares: TenantWeights | None = None,
    ) -> None:
        super().__init__(spec, losses, evicted)
        assert spec.backend.scheme == "memory"
        self.backend = spec.backend  # type: ignore[assignment]
        self.catalogue = Index(spec.policy, ttl=spec.ttl, budget=self.capacity, shares=shares)
        self.leaving_bytes = 0
        self._leaving: dict[bytes, int] = {}  # bytes of blocks in the arena, not in the catalogue
        self._lock = threading.Lock()  # of the catalogue with the arena, and of `_leaving`

    def __contains__(self, block: object) -> bool:
        assert isinstance(block, bytes)
        if self.catalogue.ttl is not None and block not in self.catalogue:
            return block in self._leaving  # else it is expired, or unknown
        return self.backend.contains(block)

    def commit_all(self, drafts: Sequence[Draft]) -> list[MemoryLease]:
        with self._lock:
            leases = self.backend.commit_all(drafts)
            for draft, lease in zip(drafts, leases, strict=True):
                self.catalogue.add(draft.block, len(lease.view))
                self._stay(draft.block)
        return [MemoryLease(lease.place, lease) for lease in leases]

    def leave(self, needed: int) -> list[bytes]:
        old: list[bytes] = []
        with self._lock:
            blocks = self.catalogue.victims(needed, expired=old)
            self.backend.delete(old)
            for block, size in zip(blocks, self.backend.sizes(blocks), strict=True):
                self._leaving[block] = Arena.extent(size or 0)
                self.leaving_bytes += self._leaving[block]
        self._expire(old)
        return blocks

    def left(self, block: bytes) -> None:
        with self._lock:
            if self._stay(block):
                self.backend.delete([block])
                self.counters.count(evictions=1)

    def remove(self, blocks: Sequence[bytes]) -> int:
        with self._lock:
            for block in blocks:
                self.catalogue.forget(block)
                self._stay(block)
            return self.backend.delete(blocks)

    def check(self) -> None:
        self.backend.check()
        self.catalogue.check()
        with self._lock:
            assert self.leaving_bytes == sum(self._leaving.values())
            known = {*self.catalogue.blocks(), *self._leaving}
            there = {item.block for item in self.backend.list()}
            assert known == there, (
                f"{len(known ^ there)} blocks are in memory or its catalogue only"
            )

    def _stay(self, block: bytes) -> bool:
        """Mark ``block`` as not leaving, under the lock; return whether it was."""
        size = self._leaving.pop(block, None)
        self.leaving_bytes -= size or 0
        return size is not None

    def _delete_victims(self, needed: int, space: bytes | None) -> list[bytes]:
        with self._lock:
            victims = self.catalogue.victims(needed, space)
            self.backend.delete(victims)
        return victims
