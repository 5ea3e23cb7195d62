"""`SharedOrder`: the catalogue of memory that all processes of a node share."""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING, Final

from kvkeep.core.errors import BackendFailed
from kvkeep.store.backends.shm import clock

if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Mapping, Sequence
    from types import TracebackType

    from kvkeep.store.backends.shm import ShmBackend
    from kvkeep.store.backends.shm.core import Hold
    from kvkeep.store.tiers.counters import TierCounters

__all__ = ["ArenaFaults", "SharedHolds", "SharedOrder"]

_AT_ONCE: Final = 256
_NS: Final = 1_000_000_000
_LONGEST: Final = 4e9  # seconds of a pin; the arena has no room for more
_LOG = logging.getLogger("kvkeep.tiers")


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
        self._arena = backend.arena
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
            holds = self._arena.hold_all(wanted)
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
            self._arena.release(ended)


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
        self._arena = backend.arena
        self._books = backend.arena.books

    def __len__(self) -> int:
        return len(self._backend)

    def __contains__(self, block: object) -> bool:
        assert isinstance(block, bytes)
        entry = self.find(block)
        return entry >= 0 and not self.is_expired(entry)

    def find(self, block: bytes) -> int:
        """Return the entry of ``block``, -1 if it is unknown or hidden."""
        if block in self.hidden:
            return -1
        with self._faults:
            return self._arena.find(block)
        return -1

    def find_all(self, blocks: Sequence[bytes]) -> list[int]:
        """Return `find` of each block."""
        with self._faults:
            entries = self._arena.find_all(blocks)
            if self.hidden:
                hidden = [block in self.hidden for block in blocks]
                return [-1 if no else one for one, no in zip(entries, hidden, strict=True)]
            return entries
        return [-1] * len(blocks)

    @property
    def total_bytes(self) -> int:
        """Bytes of all extents that are taken."""
        return self._backend.used()

    @property
    def pinned_bytes(self) -> int:
        """Bytes that are pinned now, by any process."""
        return self._arena.pins.bytes()

    def is_expired(self, entry: int) -> bool:
        """Whether the record of ``entry`` was not used for `ttl` seconds, and is not pinned."""
        if self.ttl is None:
            return False
        now = clock.now()
        ends = self._books.used[entry] + int(self.ttl * _NS)
        return max(ends, self._books.pinned[entry]) < now

    def expired_at(self, block: bytes) -> float | None:
        """Return when ``block`` expired (Unix seconds); None if it is unknown or not expired."""
        entry = self.find(block)
        if entry < 0 or not self.is_expired(entry):
            return None
        ends = self._books.used[entry] + int((self.ttl or 0.0) * _NS)
        return clock.to_unix(max(ends, self._books.pinned[entry]))

    def leading(self, blocks: Sequence[bytes]) -> int:
        """Return how many leading ``blocks`` are here."""
        count = 0
        for start in range(0, len(blocks), _AT_ONCE):
            for entry in self.find_all(blocks[start : start + _AT_ONCE]):
                if entry < 0 or (self.ttl is not None and self.is_expired(entry)):
                    return count
                count += 1
        return count

    def used(
        self, blocks: Sequence[bytes], grain: float = 30.0, *, new: Container[bytes] = ()
    ) -> list[bytes]:
        """Record a use of the ``blocks`` of a prompt, for all processes; return no block."""
        del grain, new
        if blocks:
            last = clock.now() + len(blocks)
            entries = self.find_all(blocks)
            self._arena.use(entries, range(last, last - len(blocks), -1))
        return []

    def spaces(self) -> dict[bytes, int]:
        """Return nothing: the arena counts the bytes of namespaces with a quota only."""
        return {}

    def set_quota(self, space: bytes, limit: int) -> None:
        """Limit a namespace to ``limit`` bytes, for all processes; see `over_quota`."""
        self._arena.set_quota(space, limit)

    def announce(self, space: bytes, tenant: str | None) -> None:
        """Do nothing: tenants have no shares."""

    def over_quota(self, space: bytes, more: int) -> int:
        """Return the bytes to evict from a namespace before ``more`` are added; -1: never fits."""
        return self._arena.quotas.over(space, more)

    def pin(self, blocks: Sequence[bytes], seconds: float, most: int) -> list[bytes]:
        """Pin those of ``blocks`` that are here, in order, for ``seconds``; return the pinned ones.

        The pins of all processes together cover ``most`` bytes at most.
        """
        until = clock.now() + int(min(seconds, _LONGEST) * _NS)
        fresh = [block for block in blocks if block in self] if self.ttl is not None else blocks
        with self._faults:
            return self._arena.pins.pin(fresh, until, most)
        return []

    def unpin(self, blocks: Sequence[bytes]) -> list[bytes]:
        """End the pins of ``blocks``, whoever made them; return the blocks that were pinned."""
        with self._faults:
            return self._arena.pins.set(dict.fromkeys(blocks, 0))
        return []

    def pin_ends(self, blocks: Iterable[bytes]) -> dict[bytes, float]:
        """Return those of ``blocks`` that are pinned, each with the time at which its pin ends."""
        wanted = list(blocks)
        now, pinned = clock.now(), self._books.pinned
        return {
            block: clock.to_unix(pinned[entry])
            for block, entry in zip(wanted, self.find_all(wanted), strict=True)
            if entry >= 0 and pinned[entry] > now
        }

    def restore_pins(self, blocks: Iterable[bytes], ends: Mapping[bytes, float]) -> None:
        """Let the pins of ``blocks`` be as `pin_ends` returned them; end those it did not."""
        times = {block: clock.from_unix(ends[block]) if block in ends else 0 for block in blocks}
        with self._faults:
            self._arena.pins.set(times)
