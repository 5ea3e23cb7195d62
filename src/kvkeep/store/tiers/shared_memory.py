"""`SharedMemoryTier`: one memory for all engines of a node, above all tiers."""

from __future__ import annotations

import logging
import threading
import time
from itertools import takewhile
from typing import TYPE_CHECKING, Final

from kvkeep.core.errors import BackendFailed
from kvkeep.store.tiers.counters import TierCounters, TierStats
from kvkeep.store.tiers.loss_log import LossLog
from kvkeep.store.tiers.memory import MemoryLease
from kvkeep.store.tiers.reserving import Reserving

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from types import TracebackType

    from kvkeep.store.backends.memory import Draft
    from kvkeep.store.backends.shm import ShmBackend
    from kvkeep.store.backends.shm.rows import Hold
    from kvkeep.store.tiers.memory import MemorySpec

__all__ = ["SharedMemoryTier", "SharedOrder"]

_AT_ONCE: Final = 256
_LOG = logging.getLogger("kvkeep.tiers")


class SharedMemoryTier:
    """An arena of raw records that other processes fill and read, too: see `ShmBackend`.

    As `MemoryTier`, which it takes the place of. Eviction, recency, quotas and pins are those of
    all processes; counters, and the log of losses, are those of this one. What another process
    evicted is missing here with no loss recorded.

    A failure of the arena, such as a stopped process that holds the lock, is a miss or a drop, and
    is counted as an error.

    Thread safety: all methods.

    Arguments:
        spec: what to open.
        losses: records which blocks it lost, and why.
        evicted: called with each block that was deleted to make room at once.
    """

    def __init__(
        self,
        spec: MemorySpec,
        *,
        losses: LossLog | None = None,
        evicted: Callable[[bytes], None] = lambda _block: None,
    ) -> None:
        backend = spec.backend
        assert backend.scheme == "shm"
        self.backend: ShmBackend = backend  # type: ignore[assignment]
        self.name = spec.name
        self.capacity = self.backend.capacity
        self.counters = TierCounters()
        self._faults = ArenaFaults(self.backend, self.name, self.counters)
        self.catalogue = SharedOrder(self.backend, spec.ttl, self._faults)
        self.losses = LossLog() if losses is None else losses
        self._evicted = evicted
        # block → holds of the records that are to be demoted, oldest first: a new record may leave,
        # too, while the one that it replaced is still being written
        self._leaving: dict[bytes, list[Hold]] = {}
        self._owed: list[tuple[bytes, Hold]] = []  # of these, `left` failed
        self._lock = threading.Lock()  # of `_leaving` and `_owed`
        self._replacing = threading.Lock()  # keeps `_make_up` from new records
        self._reserving = Reserving(self.backend, self.capacity, self.catalogue.over_quota)
        self._lost_before = self.backend.lost

    @property
    def leaving_bytes(self) -> int:
        """Bytes of blocks that any process is demoting, and that are still here."""
        return self.backend.leaving_bytes

    def __contains__(self, block: object) -> bool:
        self._make_up()
        if self.catalogue.ttl is not None:
            return block in self._leaving or block in self.catalogue
        assert isinstance(block, bytes)
        return self.catalogue.find(block) is not None

    def lease(self, block: bytes) -> MemoryLease | None:
        """Return access to the record of ``block``, None if it is not here."""
        leases = self.lease_all([block])
        return leases[0] if leases else None

    def lease_all(self, blocks: Sequence[bytes]) -> list[MemoryLease]:
        """`lease` leading ``blocks``, up to the first that is not here. Cost: a lock for 64."""
        self._make_up()
        with self._faults:
            if self.catalogue.ttl is not None:
                blocks = list(takewhile(self.__contains__, blocks))
            elif self.catalogue.hidden:
                hidden = self.catalogue.hidden
                blocks = list(takewhile(lambda block: block not in hidden, blocks))
            return [MemoryLease(one.place, one) for one in self.backend.lease_all(blocks)]
        return []

    def release_all(self, leases: Sequence[MemoryLease]) -> None:
        """Release ``leases``. Cost: a lock for 64."""
        self.backend.release_all([one.lease for one in leases if one.lease is not None])

    def absent(self, blocks: Sequence[bytes]) -> int:
        """Return how many leading ``blocks`` are not here."""
        if self.catalogue.ttl is not None:
            return next((at for at, block in enumerate(blocks) if block in self), len(blocks))
        records = self.catalogue.find_all(blocks)
        return next((at for at, there in enumerate(records) if there is not None), len(blocks))

    def reserve(self, block: bytes, raw_bytes: int) -> Draft | None:
        """Return memory for a record, evicting others for it; None if not enough is evictable."""
        with self._faults:
            return self._reserving.reserve(block, raw_bytes, self._evict)
        return None

    def reserve_all(self, blocks: Sequence[bytes], raw_bytes: Sequence[int]) -> list[Draft]:
        """`reserve` leading ``blocks``, 64 at most, up to the first without room."""
        with self._faults:
            return self._reserving.reserve_all(blocks, raw_bytes, self._evict)
        return []

    def commit_all(self, drafts: Sequence[Draft]) -> list[MemoryLease]:
        """`commit` all of ``drafts``, under one lock; empty if the arena failed.

        Raises:
            BackendFailed: the memory was closed.
        """
        with self._faults, self._replacing:
            leases = self.backend.commit_all(drafts)
            if self.catalogue.hidden:  # the removed records are replaced
                self.catalogue.hidden.difference_update(draft.block for draft in drafts)
            return [MemoryLease(lease.place, lease) for lease in leases]
        return []

    def commit(self, draft: Draft, block: bytes) -> MemoryLease | None:
        """Make the record of ``draft`` findable, for all processes, and return access to it.

        None if the arena failed; that is counted.

        Raises:
            BackendFailed: the memory was closed.
        """
        assert draft.block == block
        leases = self.commit_all([draft])
        return leases[0] if leases else None

    def leave(self, needed: int) -> list[bytes]:
        """Return blocks to demote, to free ``needed`` bytes; call `left` for each afterwards.

        Until then they are still found, by all processes, and no other process demotes them.
        Expired blocks are deleted at once instead.
        """
        self._make_up()
        chosen: list[tuple[bytes, Hold]] = []
        with self._faults:
            chosen = self.backend.evict(needed, leave=True)
        old = [(block, hold) for block, hold in chosen if self.catalogue.is_expired(hold)]
        for block, hold in old:
            self._left(block, hold)
        if old:
            self.losses.note([block for block, _ in old], self.name, "removed", "ttl")
            expired = set(old)
            chosen = [one for one in chosen if one not in expired]
        with self._lock:
            for block, hold in chosen:
                self._leaving.setdefault(block, []).append(hold)
        return [block for block, _ in chosen]

    def left(self, block: bytes) -> None:
        """Delete ``block``, which `leave` returned, unless it was committed again meanwhile."""
        with self._lock:
            holds = self._leaving.get(block, [])
            hold = holds.pop(0) if holds else None
            if not holds:
                self._leaving.pop(block, None)
        if hold is not None:
            self._left(block, hold)

    def _left(self, block: bytes, hold: Hold) -> None:
        with self._faults:
            self.counters.count(evictions=int(self.backend.end_leaving(hold)))
            return
        with self._lock:
            self._owed.append((block, hold))  # else nobody could ever evict it

    def remove(self, blocks: Sequence[bytes]) -> int:
        """Delete ``blocks``, for all processes; return the bytes freed.

        Raises:
            BackendFailed: the arena failed, which is counted. The blocks are hidden from this
                process, and deleted as soon as it works.
        """
        try:
            return self.backend.delete(blocks)
        except BackendFailed:
            self.catalogue.hidden.update(blocks)
            self.counters.count(errors=1)
            raise

    def _make_up(self) -> None:
        """Do what `left` and `remove` could not."""
        if self._owed:
            with self._lock:
                owed, self._owed = self._owed, []
            for block, hold in owed:
                self._left(block, hold)
        if self.catalogue.hidden:
            with self._faults, self._replacing:
                again = list(self.catalogue.hidden)
                self.backend.delete(again)
                self.catalogue.hidden.difference_update(again)

    def check(self) -> None:
        """Recount everything; an AssertionError is a bug of kvkeep."""
        self.backend.check()

    def _evict(self, needed: int, space: bytes | None = None) -> bool:
        """Delete victims at once; return whether there were any."""
        victims = [block for block, _ in self.backend.evict(needed, space)]
        self.losses.note(victims, self.name, "evicted", self.catalogue.policy)
        for block in victims:
            self._evicted(block)
        self.counters.count(evictions=len(victims))
        return bool(victims)

    def stats(self) -> TierStats:
        """Return the figures at this moment: of all processes, but for the counters.

        The counter ``damaged`` includes records that a repair of the arena dropped since this
        process opened it.
        """
        counters = self.counters.as_dict()
        counters["damaged"] += self.backend.lost - self._lost_before
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
            counters=counters,
        )


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


class SharedHolds:
    """Holds of this process on blocks; they end with it, also by ``kill -9``.

    If the arena fails, blocks are not held, as if they were unknown.

    Thread safety: all methods.
    """

    def __init__(self, backend: ShmBackend, faults: ArenaFaults) -> None:
        self._backend = backend
        self._faults = faults
        self._lock = threading.Lock()
        self._held: dict[bytes, list[Hold]] = {}

    def hold(self, block: bytes) -> bool:
        """Keep ``block`` from eviction until `free` was called as often; False if it is unknown."""
        held: list[bytes] = []
        self.hold_all([block], held)
        return bool(held)

    def hold_all(self, blocks: Iterable[bytes], held: list[bytes]) -> None:
        """`hold` each of ``blocks``; those that are known are appended to ``held``."""
        wanted = list(blocks)
        holds: list[Hold | None] = []
        with self._faults:
            holds = self._backend.hold_all(wanted)
        with self._lock:
            for block, hold in zip(wanted, holds, strict=False):
                if hold is not None:
                    self._held.setdefault(block, []).append(hold)
                    held.append(block)

    def free(self, block: bytes) -> None:
        """Undo one `hold`; does nothing if there is none."""
        self.free_all([block])

    def free_all(self, blocks: Iterable[bytes]) -> None:
        """`free` each of ``blocks``."""
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

    Attributes:
        hidden: blocks that are unknown to this process, because their deletion failed.
    """

    policy = "lru"

    def __init__(self, backend: ShmBackend, ttl: float | None, faults: ArenaFaults) -> None:
        self.ttl = ttl
        self.holds = SharedHolds(backend, faults)
        self.hidden: set[bytes] = set()
        self._faults = faults
        self._backend = backend

    def __len__(self) -> int:
        return len(self._backend)

    def __contains__(self, block: object) -> bool:
        assert isinstance(block, bytes)
        record = self.find(block)
        return record is not None and not self.is_expired(record)

    def find(self, block: bytes) -> Hold | None:
        """Return the record of ``block``, None if it is unknown or hidden."""
        return self.find_all([block])[0]

    def find_all(self, blocks: Sequence[bytes]) -> list[Hold | None]:
        """Return `find` of each block."""
        with self._faults:
            records = self._backend.find_all(blocks)
            if self.hidden:
                for at, block in enumerate(blocks):
                    if block in self.hidden:
                        records[at] = None
            return records
        return [None] * len(blocks)

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
