"""`SharedMemoryTier`: one memory for all engines of a node, above all tiers; opens either kind."""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING, Final

from kvkeep.core.errors import BackendFailed
from kvkeep.store.tiers.index import Index
from kvkeep.store.tiers.memory import HostMemory, MemoryTier

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from types import TracebackType

    from kvkeep.store.backends.memory import Lease
    from kvkeep.store.backends.shm import ShmBackend
    from kvkeep.store.backends.shm.rows import Hold
    from kvkeep.store.tiers.counters import TierCounters, TierStats
    from kvkeep.store.tiers.loss_log import LossLog
    from kvkeep.store.tiers.memory import MemorySpec
    from kvkeep.store.tiers.tier_shares import TenantWeights

__all__ = ["FrontMemory", "FrontOrder", "SharedMemoryTier", "SharedOrder", "open_front"]

_AT_ONCE: Final = 256
_LOG = logging.getLogger("kvkeep.tiers")


class SharedMemoryTier(HostMemory):
    """An arena of raw records that other processes fill and read, too: see `ShmBackend`.

    Eviction, recency, quotas and pins are those of all processes; counters, and the log of losses,
    are those of this one. What another process evicted is missing here with no loss recorded.

    A failure of the arena, such as a stopped process that holds the lock, is a miss or a drop, and
    is counted as an error.
    """

    backend: ShmBackend
    catalogue: SharedOrder

    def __init__(self, spec: MemorySpec, losses: LossLog, evicted: Callable[[bytes], None]) -> None:
        super().__init__(spec, losses, evicted)
        assert spec.backend.scheme == "shm"
        self.backend = spec.backend  # type: ignore[assignment]
        self._faults = faults = ArenaFaults(self.backend, self.name, self.counters)
        self.catalogue = SharedOrder(self.backend, spec.ttl, faults)
        # block → holds of the records that are to be demoted, oldest first: a new record may leave,
        # too, while the one that it replaced is still being written
        self._leaving: dict[bytes, list[Hold]] = {}
        self._lock = threading.Lock()  # of `_leaving`
        self._lost_before = self.backend.lost

    @property
    def leaving_bytes(self) -> int:  # type: ignore[override]
        """Bytes of blocks that any process is demoting, and that are still here."""
        return self.backend.leaving_bytes

    def __contains__(self, block: object) -> bool:
        return block in self._leaving or block in self.catalogue

    def absent(self, blocks: Sequence[bytes]) -> int:
        if self.catalogue.ttl is not None:
            return super().absent(blocks)
        records = self.catalogue.find_all(blocks)
        return next((at for at, there in enumerate(records) if there is not None), len(blocks))

    def commit_all(self, drafts: Sequence[Lease]) -> bool:
        """Cost: one lock for all."""
        with self._faults:
            self.backend.commit_all(drafts)
            return True
        return False

    def leave(self, needed: int) -> list[bytes]:
        """No other process demotes these blocks meanwhile."""
        old, blocks = [], []
        with self._faults:
            for block, hold in self.backend.evict(needed, leave=True):
                if self.catalogue.is_expired(hold):
                    self.backend.end_leaving(hold)
                    old.append(block)
                    continue
                blocks.append(block)
                with self._lock:
                    self._leaving.setdefault(block, []).append(hold)
        self._expire(old)
        return blocks

    def left(self, block: bytes) -> None:
        """If the arena fails, that is done as soon as it works."""
        with self._lock:
            holds = self._leaving.get(block, [])
            hold = holds.pop(0) if holds else None
            if not holds:
                self._leaving.pop(block, None)
        if hold is not None:
            self.counters.count(evictions=int(self.backend.end_leaving(hold)))

    def remove(self, blocks: Sequence[bytes]) -> int:
        try:
            return self.backend.delete(blocks)
        except BackendFailed:
            self.counters.count(errors=1)
            raise

    def check(self) -> None:
        self.backend.check()

    def _delete_victims(self, needed: int, space: bytes | None) -> list[bytes]:
        return [block for block, _ in self.backend.evict(needed, space)]

    def stats(self) -> TierStats:
        """The counter ``damaged`` includes records damaged since this process opened the arena."""
        stats = super().stats()
        stats.counters["damaged"] += self.backend.lost - self._lost_before
        return stats


class ArenaFaults:
    """A context in which a failure of the arena is counted, and passed on only if that is closed.

    Thread safety: all methods.
    """

    def __init__(self, backend: ShmBackend, name: str, counters: TierCounters) -> None:
        self._backend = backend
        self._name = name
        self._counters = counters

    def __enter__(self) -> None:
        pass

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        if not isinstance(error, BackendFailed) or self._backend.closed:
            return False
        self._counters.count(errors=1)
        _LOG.info("tier %s: %s", self._name, error)
        return True


class SharedOrder:
    """Which blocks are in the arena, and in which order they are evicted: by their last use.

    The order, the pins and the quotas are those of all processes. A use is a time in the arena, so
    recording it takes no lock. Blocks of a prompt are used last to first, so that its end is
    evicted before its beginning.

    Thread safety: all methods. Cost: about 0.2 µs a block; pins and their bytes take a pass over
    the entries of the arena.

    A failure of the arena is counted; then blocks are unknown, not used, and not pinned. Only
    `set_quota` raises it.

    Arguments:
        ttl: seconds after its last use that a block expires for this process; None: never.
    """

    policy = "lru"

    def __init__(self, backend: ShmBackend, ttl: float | None, faults: ArenaFaults) -> None:
        self.ttl = ttl
        self._faults = faults
        self._backend = backend
        self._lock = threading.Lock()  # of `_held`
        self._held: dict[bytes, list[Hold]] = {}  # by this process; the kernel ends those of others

    def __len__(self) -> int:
        return len(self._backend)

    def __contains__(self, block: object) -> bool:
        assert isinstance(block, bytes)
        record = self.find(block)
        return record is not None and not self.is_expired(record)

    def find(self, block: bytes) -> Hold | None:
        """Return the record of ``block``, None if it is unknown."""
        return self.find_all([block])[0]

    def find_all(self, blocks: Sequence[bytes]) -> list[Hold | None]:
        """Return `find` of each block."""
        with self._faults:
            return self._backend.find_all(blocks)
        return [None] * len(blocks)

    def hold(self, blocks: Iterable[bytes], held: list[bytes]) -> None:
        """Keep ``blocks`` from eviction until `free` was called as often.

        Those that are known are appended to ``held``.
        """
        wanted = list(blocks)
        holds: list[Hold | None] = []
        with self._faults:
            holds = self._backend.hold_all(wanted)
        with self._lock:
            for block, hold in zip(wanted, holds, strict=False):
                if hold is not None:
                    self._held.setdefault(block, []).append(hold)
                    held.append(block)

    def free(self, blocks: Iterable[bytes]) -> None:
        """Undo one hold of each of ``blocks``; those without are ignored."""
        ended: list[Hold] = []
        with self._lock:
            for block in blocks:
                holds = self._held.get(block)
                if holds:
                    ended.append(holds.pop(0))  # of a replaced record first
                    if not holds:
                        del self._held[block]
        if ended:
            self._backend.release_holds(ended)

    @property
    def pinned_bytes(self) -> int:
        """Bytes that are pinned now, by any process."""
        return self._backend.pinned_bytes

    def _end(self, record: Hold) -> float:
        """Return when a record expires, in Unix seconds."""
        backend, ttl = self._backend, self.ttl or 0.0
        return max(backend.used_at(record) + ttl, backend.pinned_until(record))

    def is_expired(self, record: Hold) -> bool:
        """Whether the record was not used for `ttl` seconds, and is not pinned."""
        return self.ttl is not None and self._end(record) < time.time()

    def expired_at(self, block: bytes) -> float | None:
        """Return when ``block`` expired (Unix seconds); None if it is unknown or not expired."""
        record = self.find(block)
        return self._end(record) if record is not None and self.is_expired(record) else None

    def leading(self, blocks: Sequence[bytes]) -> int:
        """Return how many leading ``blocks`` are here."""
        count = 0
        for start in range(0, len(blocks), _AT_ONCE):
            for record in self.find_all(blocks[start : start + _AT_ONCE]):
                if record is None or self.is_expired(record):
                    return count
                count += 1
        return count

    def used(
        self, blocks: Sequence[bytes], grain: float = 30.0, *, stored: bool = False
    ) -> list[bytes]:
        """Record a use of the ``blocks`` of a prompt, for all processes; return no block."""
        del grain, stored
        with self._faults:
            self._backend.touch(blocks[::-1])
        return []

    def set_quota(self, space: bytes, limit: int) -> None:
        """Limit a namespace to ``limit`` bytes, for all processes; see `over_quota`."""
        self._backend.set_quota(space, limit)

    def announce(self, space: bytes, tenant: str | None) -> None:
        """Do nothing: tenants have no shares."""

    def over_quota(self, space: bytes, more: int) -> int:
        """Return the bytes to evict from a namespace before ``more`` are added; -1: never fits."""
        return self._backend.over_quota(space, more)

    def pin(self, blocks: Sequence[bytes], seconds: float, most: int) -> list[bytes]:
        """Pin those of ``blocks`` that are here, in order, for ``seconds``; return the pinned ones.

        The pins of all processes together cover ``most`` bytes at most.
        """
        fresh = [block for block in blocks if block in self] if self.ttl is not None else blocks
        with self._faults:
            return self._backend.pin(fresh, time.time() + seconds, most)
        return []

    def unpin(self, blocks: Sequence[bytes]) -> list[bytes]:
        """End the pins of ``blocks``, whoever made them; return the blocks that were pinned."""
        with self._faults:
            return self._backend.end_pins(dict.fromkeys(blocks, 0.0))
        return []

    def pin_ends(self, blocks: Iterable[bytes]) -> dict[bytes, float]:
        """Return those of ``blocks`` that are pinned, each with the time at which its pin ends."""
        wanted, now = list(blocks), time.time()
        return {
            block: end
            for block, record in zip(wanted, self.find_all(wanted), strict=True)
            if record is not None and (end := self._backend.pinned_until(record)) > now
        }

    def restore_pins(self, blocks: Iterable[bytes], ends: Mapping[bytes, float]) -> None:
        """Let the pins of ``blocks`` be as `pin_ends` returned them; end those it did not."""
        with self._faults:
            self._backend.end_pins({block: ends.get(block, 0.0) for block in blocks})


FrontMemory = MemoryTier | SharedMemoryTier
FrontOrder = Index | SharedOrder


def open_front(
    spec: MemorySpec,
    losses: LossLog,
    evicted: Callable[[bytes], None],
    shares: TenantWeights | None = None,
) -> FrontMemory:
    """Return the memory of ``spec``; see `MemoryTier` for the arguments.

    Memory that processes share takes no ``shares``; see `open_tiers`.
    """
    if spec.backend.scheme == "memory":
        return MemoryTier(spec, losses, evicted, shares)
    assert shares is None
    return SharedMemoryTier(spec, losses, evicted)
