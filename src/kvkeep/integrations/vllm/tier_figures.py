"""Counts and states of tiers for vLLM's Prometheus page, beside those of requests."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvkeep.integrations.vllm.stats import Counts
    from kvkeep.store.tiers import TierStats

__all__ = ["NOW", "TIER_COUNTERS", "TIER_GAUGES", "TierFigures"]

NOW: Final = "now "
"""Prefix of the name of a state: a later one replaces it, where counts add up."""
TIER_COUNTERS: Final = {
    "hits": "Loaded blocks, by the tier they were read from",
    "misses": "Blocks expected in the tier and not found",
    "late": "Blocks that did not come within the tier's timeout",
    "damaged": "Blocks whose verification failed: quarantined",
    "errors": "Calls to the tier that failed",
    "skipped_calls": "Calls not made because the circuit breaker was open",
    "writes": "Blocks written",
    "drops": "Blocks not written: full queue, no room, or a failed write",
    "over_budget": "Blocks not written, because the tier's write budget is short",
    "evictions": "Blocks evicted to make room",
    "demotions": "Evicted blocks that moved one tier down",
    "read_bytes": "Bytes of records read",
    "written_bytes": "Bytes of records written",
}
"""By the field of `TierCounters`; the metric of hits is called hit_blocks."""
TIER_GAUGES: Final = {
    "used_bytes": "Bytes in the tier, of all processes that share it",
    "capacity_bytes": "Capacity of the tier in bytes",
    "pinned_bytes": "Bytes in the tier that are pinned",
    "queued_bytes": "Bytes in the write queue",
    "blocks": "Blocks in the tier",
    "breaker_open": "1 while the circuit breaker of the tier is open for some kind of call",
    "write_budget_bytes": "The write budget of the tier in bytes, for its time",
    "write_budget_left_bytes": "What is left of the write budget now",
}
_EVERY_S: Final = 1.0


class TierFigures:
    """Adds to counts what the tiers of one rank counted, and their states once a second.

    Thread safety: none.
    """

    def __init__(self, rank: int = 0) -> None:
        self._rank = rank
        self._before: dict[str, float] = {}
        self._due = 0.0

    def count(self, tiers: Sequence[TierStats], counts: Counts) -> None:
        """Add what was counted since the last call; a Prometheus counter cannot decrease."""
        for tier in tiers:
            for name in TIER_COUNTERS:
                label, amount = f"{name} {tier.name}", tier.counters[name]
                before = self._before.get(label, 0)  # a tier that is attached anew counts anew
                counts.add(**{label: amount - before if amount >= before else amount})
                self._before[label] = amount

    @property
    def due(self) -> bool:
        """Whether a second has passed since the last states."""
        return time.monotonic() >= self._due

    def state(self, tiers: Sequence[TierStats], counts: Counts) -> None:
        """Set the states of the tiers."""
        self._due = time.monotonic() + _EVERY_S
        for tier in tiers:
            budget = tier.budget or {}
            states = {
                "used_bytes": tier.used_bytes,
                "capacity_bytes": tier.capacity,
                "pinned_bytes": tier.pinned_bytes,
                "queued_bytes": tier.queued_bytes,
                "blocks": tier.blocks,
                "breaker_open": int(tier.breaker != "closed"),
                "write_budget_bytes": budget.get("bytes"),
                "write_budget_left_bytes": budget.get("left"),
            }
            for name, amount in states.items():
                if amount is not None:
                    counts.set(f"{NOW}{name} {self._rank} {tier.name}", amount)
