"""The contract of backends: records under block ids, and nothing else.

A backend is one place where bytes can lie: memory, a directory, a Valkey server, an object store.
It knows no tokens, tensors, checksums or recency order; a tier (`kvkeep.store.tiers`) does. To add
one, derive from `Backend`, fill in five methods, and run `kvkeep.testing.BackendTests` against it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, ClassVar, NamedTuple, Self

if TYPE_CHECKING:
    from types import TracebackType

    from kvkeep.store.backends.urls import TierURL

__all__ = ["ALIGNMENT", "Backend", "Listed", "Room"]

ALIGNMENT = 4096
"""Bytes: every buffer that a backend is handed begins at a multiple of this and may be read, or
written, up to the next multiple behind its end. So direct I/O works on it as it is."""

Room = Callable[[int], memoryview]
"""Gives a writable buffer of exactly that many bytes (aligned, see `ALIGNMENT`), or raises
`kvkeep.core.errors.OutOfRoom` when a record of that size is not wanted: call it before anything is
read, with the size the place itself states."""


class Listed(NamedTuple):
    """One record that is there: its id, its size in bytes, when it was last used (Unix seconds)."""

    block: bytes
    size: int
    used: float


class Backend(ABC):
    """Records under block ids (`kvkeep.core.keys.BLOCK_ID_BYTES` bytes: space, then block key).

    A record is bytes that mean nothing here. It is put whole or not at all: whoever gets a block
    while it is being put, or after the writer was killed, finds the whole record, the one before,
    or nothing.

    A method that cannot do its work raises: `OutOfRoom` when there is no place for the record,
    `BackendFailed` or OSError for everything else. A missing record is None, never an error. The
    tier above turns errors into misses, counts them, and stops asking for a while when they
    repeat.

    Thread safety: every method may be called from several threads at once. Calls block; they are
    made from threads that a tier keeps for this, and should end in ``timeout`` seconds.

    Attributes:
        scheme: what its URLs begin with.
        shared: others may write here, or take away, while we look: what is not known to be here is
            asked for, and a budget is counted by the backend itself.
        capacity: bytes it may hold, or None where it has no limit of its own. `put` raises
            `OutOfRoom` rather than hold more.
        unit: a record counts against the capacity in whole units of so many bytes.
        stale_listings: how often the backend noticed that its last listing no longer holds, as when
            others emptied or replaced the place. The tier lists it again.
        last_progress: when a `flush` last made progress, in seconds of the monotonic clock. A call
            that makes progress does not count as hanging, however long it takes.
    """

    scheme: ClassVar[str]
    shared: bool = False
    capacity: int | None = None
    unit: int = 1
    stale_listings: int = 0
    last_progress: float = float("-inf")
    timeout: float = 5.0

    @classmethod
    @abstractmethod
    def from_url(cls, url: TierURL) -> Backend:
        """Open what ``url`` names; takes its own options out of it. Raises `InvalidValue`."""

    @abstractmethod
    def put(self, block: bytes, record: memoryview) -> None:
        """Keep ``record`` under ``block``, in place of what was there. Copies or sends it all.

        Raises:
            OutOfRoom: ``capacity`` would be passed, or the place is full; nothing changed.
        """

    @abstractmethod
    def get(self, block: bytes, room: Room) -> memoryview | None:
        """Read the record under ``block`` into ``room(size)`` and return that; None: not there."""

    @abstractmethod
    def sizes(self, blocks: Sequence[bytes]) -> list[int | None]:
        """Bytes of each record, None where there is none; transfers no record."""

    @abstractmethod
    def delete(self, blocks: Sequence[bytes]) -> int:
        """Take records away; bytes that this freed (0 for what is not there)."""

    @abstractmethod
    def list(self) -> Iterator[Listed]:
        """Every record, in any order, without reading them."""

    def part(self, block: bytes) -> str:
        """The part of the place that has ``block``: parts fail without each other.

        "" where all of it is one. A cluster names the node, as far as it is known without asking.
        What fails is then counted against that part alone. Cost: microseconds; never waits.
        """
        del block
        return ""

    def touch(  # noqa: B027
        self, blocks: Sequence[bytes], used: Sequence[float] | None = None
    ) -> None:
        """``blocks`` were used, in this order: remember it beyond this process, where it is cheap.

        ``used`` says when, in seconds since the epoch, each not before the one before it; None:
        just now. A later use of a block, which others may have told of, stays.
        """

    def quarantine(self, block: bytes, reason: str) -> None:
        """The record under ``block`` did not verify: it must not be found again."""
        del reason  # a place that keeps bad records for inspection writes it down
        self.delete([block])

    def peek(self, block: bytes, size: int) -> bytes | None:
        """The first ``size`` bytes of a record; None: not there, or not to be had without the rest.

        Called for records that are so large that they must be real before others go for them.
        """
        del block, size
        return None

    def note_space(self, space: bytes, note: bytes) -> None:  # noqa: B027
        """Keep ``note``, a line of text, on the namespace ``space``, where that is cheap.

        Once for each namespace; an older note on it stays or goes. How many are kept is bounded.
        """

    def noted_spaces(self) -> dict[bytes, bytes]:
        """Notes on namespaces of which blocks were put here, by space: some hundred at most.

        What others wrote in their place may be anything: its size is checked before it is read.
        """
        return {}

    def used(self) -> int | None:
        """Bytes held by all who write here, where the backend counts them; else None."""
        return None

    def flush(self) -> None:  # noqa: B027
        """Make all that was put last through a loss of power, as far as the options promise."""

    def close(self) -> None:  # noqa: B027
        """Give back connections, files and memory. A second call does nothing."""

    def describe(self) -> str:
        """The place as a person would name it, without secrets."""
        return f"{self.scheme}://"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.describe()}>"
