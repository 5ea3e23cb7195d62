"""What tiers count: nothing is lost, late or broken without a number that tells."""

from __future__ import annotations

import threading
from dataclasses import asdict, dataclass, field, fields

__all__ = ["TierCounters", "TierStats"]


@dataclass
class TierCounters:
    """Totals since the start, of one tier. Blocks unless the name says bytes or seconds.

    Attributes:
        hits: found here and handed out.
        misses: thought to be here, and not found.
        late: not here within the tier's timeout, or the queue of its readers was full.
        damaged: read, and not what was stored: quarantined.
        refused: of a format version, a length or a lossy codec that was not asked for here.
        errors: calls that failed.
        skipped_calls: calls not made because the circuit breaker was open.
        writes: written.
        already: not written because the place had them.
        drops: not written: the queue was full, there was no room, or the write failed.
        relists: times that the place was listed again because it had lost what it held.
        evictions: taken away to make room.
        demotions: moved one tier down when they were evicted.
        demotions_dropped: should have been, but there was no time.
        read_bytes, written_bytes: of records, as they lie in the tier.
        read_seconds, write_seconds: spent in the backend.
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
    relists: int = 0
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
        """Add to some of them at once."""
        with self._lock:
            for name, amount in more.items():
                setattr(self, name, getattr(self, name) + amount)

    def as_dict(self) -> dict[str, float]:
        """All of them at one moment."""
        with self._lock:
            return {field.name: getattr(self, field.name) for field in fields(self)}


@dataclass(frozen=True)
class TierStats:
    """One tier at one moment.

    ``used_bytes`` counts what all who share the place hold, where that is known, ``capacity`` is
    None where the place has its own rules. ``queued_bytes`` wait to be written. ``breaker`` is
    "closed" (all is well), "open" or "trying": the worst of looking up, reading and writing.
    ``breakers`` has the state of each kind of call (see `kvkeep.store.tiers.breaker`), ``parts``
    the parts of the place that are left alone, nodes of a cluster, with their states. ``counters``
    has `TierCounters` by name.
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

    def as_dict(self) -> dict[str, object]:
        """Plain values, for JSON."""
        return asdict(self)
