"""The contract of backends: records stored under block ids.

A backend is one place that stores bytes: memory, a directory, a Valkey server, an object store. It
knows nothing of tokens, tensors, checksums or eviction order; the tier above it
(`kvkeep.store.tiers`) does. To add a backend, derive from `Backend`, implement `from_url`, `put`,
`get`, `sizes`, `delete` and `list`, and run `kvkeep.testing.BackendTests` against it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple, Self

from kvkeep.core.errors import OutOfRoom

if TYPE_CHECKING:
    from kvkeep.store.backends.urls import TierURL

__all__ = ["ALIGNMENT", "Backend", "Listed", "OverQuota", "Room"]

ALIGNMENT = 4096
"""Bytes. Every buffer passed to a backend starts at a multiple of `ALIGNMENT` and may be read or
written up to the next multiple past its end, so direct I/O needs no copy."""

Room = Callable[[int], memoryview]
"""``room(size)`` returns a writable buffer of exactly ``size`` bytes, aligned (see `ALIGNMENT`). It
raises `kvkeep.core.errors.OutOfRoom` if the caller does not want a record of that size."""


class Listed(NamedTuple):
    """One stored record: block id, size in bytes, time of its last use (Unix seconds)."""

    block: bytes
    size: int
    used: float


class OverQuota(OutOfRoom):
    """A namespace has no room for more below its quota.

    ``needed`` is the bytes of it to free first; -1: that would not be enough.
    """


class Backend(ABC):
    """Stores records under block ids (`kvkeep.core.keys.BLOCK_ID_BYTES` bytes: space, block key).

    Atomicity: a reader sees the new record whole, the previous one, or none: also while a `put`
    runs, and after the writer was killed.

    Errors: a missing record is no error. A method that fails raises `OutOfRoom` if a record
    finds no space, else `BackendFailed` or OSError. The tier turns errors into misses, counts them,
    and stops calling for a while when they repeat. Messages contain no password.

    Thread safety: the tier calls every method from several threads at once.

    Timeouts: calls block, and should return or raise within `timeout` seconds (`list` and `flush`
    may take as long as they need). The tier does not interrupt a call that takes longer: its
    caller gets a miss, the call counts as failed, and its thread stays occupied until it returns.

    Attributes:
        scheme: scheme of the backend's URLs.
        shared: whether other processes may add or remove records. If so, the tier looks up blocks
            it does not know of here, and the backend counts their bytes against ``capacity`` too.
        capacity: maximum bytes held, None without a limit of its own. `put` raises `OutOfRoom`
            rather than exceed it. Fixed once `settle_capacity` has returned.
        unit: bytes; the size of a record counts against ``capacity`` rounded up to this unit.
        timeout: seconds, see above. The tier sets it from the option ``timeout=``.
        last_progress: when a `flush` last made progress, in seconds of the monotonic clock. A flush
            that makes progress does not count as hanging, however long it takes.
    """

    scheme: str
    shared: bool = False
    capacity: int | None = None
    unit: int = 1
    timeout: float = 5.0
    last_progress: float = float("-inf")

    @classmethod
    @abstractmethod
    def from_url(cls, url: TierURL) -> Backend:
        """Open what ``url`` names; take the backend's options out of it. Raises `InvalidValue`."""

    @classmethod
    def check_url(cls, url: TierURL) -> bool:
        """Take the backend's options out of ``url`` and check them; open and change nothing.

        Returns whether it would have a capacity. The default checks no option, and returns True.

        Raises:
            InvalidValue: as `from_url`, as far as that is known without opening the place.
        """
        url.take_rest()
        return True

    @abstractmethod
    def put(self, block: bytes, record: memoryview) -> None:
        """Store ``record`` under ``block``, replacing an older one; the caller reuses its memory.

        Raises:
            OutOfRoom: ``capacity`` would be exceeded, or the place is full; nothing changed.
        """

    @abstractmethod
    def get(self, block: bytes, room: Room) -> memoryview | None:
        """Read the record under ``block`` into ``room(size)``; return that buffer, None if missing.

        ``room`` is called once, before any data is transferred, with the size that the place
        states. An exception from ``room`` is passed on unchanged.
        """

    @abstractmethod
    def sizes(self, blocks: Sequence[bytes]) -> list[int | None]:
        """Return each record's size in bytes, None where missing. Transfers no record."""

    @abstractmethod
    def delete(self, blocks: Sequence[bytes]) -> int:
        """Delete records; return the sum of their sizes in bytes. Missing blocks count 0."""

    @abstractmethod
    def list(self) -> Iterator[Listed]:
        """Yield every record once, in any order, without reading the records."""

    def part(self, block: bytes) -> str:
        """Return the part (a cluster's node) that holds ``block``; "" if unknown or the only one.

        Parts fail independently: the tier counts failures per part. Never waits (microseconds).
        """
        del block
        return ""

    def touch(  # noqa: B027
        self, blocks: Sequence[bytes], used: Sequence[float] | None = None
    ) -> None:
        """Record a use of each block, in this order, where the place can keep that cheaply.

        ``used`` has the times (Unix seconds, not decreasing); None means now. A later use that is
        already recorded stays.
        """

    def quarantine(self, block: bytes, reason: str) -> None:
        """Remove a record that failed verification; the default deletes it."""
        del reason  # for backends that keep bad records for inspection
        self.delete([block])

    def note_space(self, space: bytes, note: bytes) -> None:  # noqa: B027
        """Store one line of text about a namespace, where that is cheap; bounded in number.

        Called once per namespace. An older note may stay.
        """

    def settle_capacity(self) -> None:  # noqa: B027
        """Fix `capacity`, before a store uses the place.

        A place that gets none from its URL may choose one here, and remember it for others.
        """

    def noted_spaces(self) -> dict[bytes, bytes]:
        """Return notes by space, a few hundred at most. Check their sizes before reading them."""
        return {}

    def used(self) -> int | None:
        """Return the bytes held by all writers together; None if the backend does not count."""
        return None

    def flush(self) -> None:  # noqa: B027
        """Make finished puts survive a loss of power, as far as the options promise that."""

    def close(self) -> None:  # noqa: B027
        """Release connections, files and memory. A second call does nothing."""

    def describe(self) -> str:
        """Return the place as a URL for people, without secrets."""
        return f"{self.scheme}://"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.describe()}>"
