"""Counters and statistics of tiers: every lost, late or damaged block is counted."""

from __future__ import annotations

import threading
from dataclasses import asdict, dataclass, field, fields

__all__ = ["TierCounters", "TierStats"]


@dataclass
class TierCounters:
    """Totals of one tier since the start, in blocks unless stated otherwise.

    Attributes:
        hits: blocks that were read from this tier.
        misses: blocks that were expected in this tier, and missing.
        late: reads that the tier did not answer in time, or whose read queue was full.
        damaged: records that did not verify; they are quarantined.
        refused: intact records that this tier does not serve: of another format version or length,
            lossy or not encrypted against the tier's options, or of a key or codec it lacks.
        errors: calls of the backend that failed.
        skipped_calls: calls not made because the circuit breaker was open.
        writes: blocks written.
        already: blocks not written because the tier had them.
        drops: blocks not written: the queue was full, there was no room, or the write failed.
        over_budget: those of ``drops`` for which the tier's write budget had too little left.
        evictions: blocks deleted to make room.
        demotions: blocks moved to a lower tier when they were evicted.
        demotions_dropped: blocks that should have been demoted and were not, for lack of time.
        read_bytes, written_bytes: bytes of records as stored in the tier, encoded.
        read_seconds, write_seconds: seconds spent in the backend.
    """

    hits: int = 0
    misses: int = 0
    late: int = 0
    damaged: int = 0
    refused: int = 0
    errors: int = 0
    skipped_calls: int = 0
    writes: int = 0
    already: int = 0
    drops: int = 0
    over_budget: int = 0
    evictions: int = 0
    demotions: int = 0
    demotions_dropped: int = 0
    read_bytes: int = 0
    written_bytes: int = 0
    read_seconds: float = 0.0
    write_seconds: float = 0.0

    def __post_init__(self) -> None:
        self._lock = threading.Lock()

    def count(self, **more: float) -> None:
        """Add to several counters at once."""
        with self._lock:
            for name, amount in more.items():
                setattr(self, name, getattr(self, name) + amount)

    def as_dict(self) -> dict[str, float]:
        """Return all counters at one moment."""
        with self._lock:
            return {field.name: getattr(self, field.name) for field in fields(self)}


@dataclass(frozen=True)
class TierStats:
    """A snapshot of one tier.

    ``blocks`` and ``used_bytes`` include those of other processes, as far as they are known here;
    they are None, as is ``capacity``, where the backend has no budget. ``queued_bytes`` wait to be
    written. ``breaker`` is the worst circuit breaker state of lookups, reads and writes: "closed"
    (calls are allowed), "trying" or "open". ``breakers`` has the state of each kind of call (see
    `kvkeep.store.tiers.calls`), ``parts`` the state of each part of the backend (a node of a
    cluster) whose breakers are not all closed. ``budget`` is None without a
    write budget, else its ``bytes`` in ``seconds``, and those ``left`` at this moment. ``counters``
    has the fields of `TierCounters`.
    """

    name: str
    place: str
    codec: str
    blocks: int | None
    used_bytes: int | None
    capacity: int | None
    pinned_bytes: int
    queued_bytes: int
    breaker: str
    breaker_opened: int
    counters: dict[str, float]
    breakers: dict[str, str] = field(default_factory=dict)
    parts: dict[str, str] = field(default_factory=dict)
    budget: dict[str, int] | None = None

    def as_dict(self) -> dict[str, object]:
        """Return plain values, for JSON."""
        return asdict(self)
