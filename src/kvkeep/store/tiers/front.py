"""What a store wants of the memory in front of its tiers, whoever owns that memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence

    from kvkeep.store.backends import Listed
    from kvkeep.store.backends.memory import Draft
    from kvkeep.store.tiers.counters import TierCounters, TierStats
    from kvkeep.store.tiers.loss_log import LossLog
    from kvkeep.store.tiers.memory import MemoryLease, MemorySpec
    from kvkeep.store.tiers.tier_shares import TenantWeights

__all__ = ["FrontHolds", "FrontMemory", "FrontOrder", "Region", "open_front"]


class Region(Protocol):
    """The backend of the memory in front."""

    @property
    def region(self) -> memoryview:
        """The memory of all records."""

    def describe(self) -> str:
        """Return the place as a URL."""

    def used(self) -> int:
        """Return the bytes that are taken."""

    def list(self) -> Iterator[Listed]:
        """Yield every record."""

    def close(self) -> None:
        """Release it."""


class FrontHolds(Protocol):
    """Keeps blocks from eviction; see `kvkeep.store.tiers.holds.Holds`."""

    def hold(self, block: bytes) -> bool:
        """Keep ``block`` until `free` was called as often; False if it is unknown."""

    def hold_all(self, blocks: Iterable[bytes], held: list[bytes]) -> None:
        """`hold` each of ``blocks``; append those that are known to ``held``."""

    def free(self, block: bytes) -> None:
        """Undo one `hold`."""

    def free_all(self, blocks: Iterable[bytes]) -> None:
        """`free` each of ``blocks``."""


class FrontOrder(Protocol):
    """Which blocks are in memory, and in which order they go; see `Catalogue`."""

    @property
    def holds(self) -> FrontHolds:
        """Keeps blocks from eviction for a while."""

    @property
    def ttl(self) -> float | None:
        """Seconds after its last use that a block expires; None: never."""

    @property
    def policy(self) -> str:
        """The name of the eviction policy."""

    @property
    def total_bytes(self) -> int:
        """Bytes of all records."""

    @property
    def pinned_bytes(self) -> int:
        """Bytes that are pinned now."""

    def spaces(self) -> dict[bytes, int]:
        """Return the bytes of each namespace, as far as they are counted."""

    def __len__(self) -> int: ...

    def __contains__(self, block: object) -> bool: ...

    def leading(self, blocks: Sequence[bytes]) -> int:
        """Return how many leading ``blocks`` are here."""

    def used(
        self, blocks: Sequence[bytes], grain: float = 30.0, *, new: Container[bytes] = ()
    ) -> list[bytes]:
        """Record a use of the ``blocks`` of a prompt."""

    def expired_at(self, block: bytes) -> float | None:
        """Return when ``block`` expired (Unix seconds), None if it did not."""

    def set_quota(self, space: bytes, limit: int) -> None:
        """Limit a namespace to ``limit`` bytes."""

    def announce(self, space: bytes, tenant: str | None) -> None:
        """Count a namespace for the share of ``tenant``; None: all tenants share its blocks."""

    def pin(self, blocks: Sequence[bytes], seconds: float, most: int) -> list[bytes]:
        """Pin ``blocks``; return the pinned ones."""

    def unpin(self, blocks: Sequence[bytes]) -> list[bytes]:
        """End the pins of ``blocks``; return those that were pinned."""

    def pin_ends(self, blocks: Iterable[bytes]) -> dict[bytes, float]:
        """Return the pinned ones of ``blocks``, each with the end of its pin."""

    def restore_pins(self, blocks: Iterable[bytes], ends: Mapping[bytes, float]) -> None:
        """Let the pins of ``blocks`` be as `pin_ends` returned them."""


class FrontMemory(Protocol):
    """The memory above all tiers: a process's own (`MemoryTier`) or the node's.

    The latter is `SharedMemoryTier`. Everything that is read or written passes through it.
    """

    @property
    def name(self) -> str:
        """The name of the level, for statistics."""

    @property
    def capacity(self) -> int:
        """Bytes for records."""

    @property
    def backend(self) -> Region:
        """Where the records are."""

    @property
    def catalogue(self) -> FrontOrder:
        """Which blocks are here, and in which order they go."""

    @property
    def counters(self) -> TierCounters:
        """Totals of this process."""

    @property
    def losses(self) -> LossLog:
        """Which blocks were lost, and why."""

    @property
    def leaving_bytes(self) -> int:
        """Bytes of blocks that `leave` returned and that are still here."""

    def __contains__(self, block: object) -> bool: ...

    def lease(self, block: bytes) -> MemoryLease | None:
        """Return access to the record of ``block``, None if it is not here."""

    def lease_all(self, blocks: Sequence[bytes]) -> list[MemoryLease]:
        """`lease` leading ``blocks``, up to the first that is not here."""

    def release_all(self, leases: Sequence[MemoryLease]) -> None:
        """Release ``leases`` of this memory."""

    def absent(self, blocks: Sequence[bytes]) -> int:
        """Return how many leading ``blocks`` are not here."""

    def reserve(self, block: bytes, raw_bytes: int) -> Draft | None:
        """Return memory for a record, evicting others for it; None if there is none."""

    def reserve_all(self, blocks: Sequence[bytes], raw_bytes: Sequence[int]) -> list[Draft]:
        """`reserve` leading ``blocks``, up to the first without room; empty if that is the first.

        The blocks of one call are of one namespace.
        """

    def commit_all(self, drafts: Sequence[Draft]) -> list[MemoryLease]:
        """`commit` all of ``drafts``; empty if that failed, and was counted.

        Raises:
            BackendFailed: the memory was closed.
        """

    def commit(self, draft: Draft, block: bytes) -> MemoryLease | None:
        """Make a record findable and return access to it; None if that failed, and was counted.

        Raises:
            BackendFailed: the memory was closed.
        """

    def leave(self, needed: int) -> list[bytes]:
        """Return blocks to demote, to free ``needed`` bytes; call `left` for each afterwards."""

    def left(self, block: bytes) -> None:
        """Delete ``block``, which `leave` returned, unless it was committed again meanwhile."""

    def remove(self, blocks: Sequence[bytes]) -> int:
        """Delete ``blocks``; return the bytes freed.

        Raises:
            BackendFailed: memory that processes share failed, and hides the blocks from this one.
        """

    def check(self) -> None:
        """Recount everything; an AssertionError is a bug of kvkeep."""

    def stats(self) -> TierStats:
        """Return the level's figures at this moment."""


def open_front(
    spec: MemorySpec,
    losses: LossLog,
    evicted: Callable[[bytes], None],
    shares: TenantWeights | None = None,
) -> FrontMemory:
    """Return the memory of ``spec``; see `MemoryTier` for the arguments.

    Memory that processes share takes no ``shares``; see `open_tiers`.
    """
    from kvkeep.store.backends.memory import MemoryBackend  # noqa: PLC0415 - no import cycle
    from kvkeep.store.tiers.memory import MemoryTier  # noqa: PLC0415
    from kvkeep.store.tiers.shared_memory import SharedMemoryTier  # noqa: PLC0415

    if isinstance(spec.backend, MemoryBackend):
        return MemoryTier(spec, losses=losses, evicted=evicted, shares=shares)
    assert shares is None
    return SharedMemoryTier(spec, losses=losses, evicted=evicted)
