"""Counts of kvkeep for vLLM's log and its Prometheus page."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any, Final

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from vllm.config import VllmConfig

    from kvkeep.store.tiers import TierStats

__all__ = [
    "METRICS", "NOW", "TIER_COUNTERS", "TIER_GAUGES", "Counts", "KVKeepPromMetrics", "KVKeepStats",
    "TierFigures", "metric_of",
]  # fmt: skip

METRICS = {
    "hit_tokens": "Tokens that were found in the store for requests",
    "loaded_tokens": "Tokens whose KV was loaded instead of computed",
    "failed_tokens": "Tokens whose load failed, so that they were computed",
    "late_tokens": "Failed tokens whose load took longer than load_timeout, or than computing",
    "slower_tokens": "Tokens found in the store but computed, because that is faster",
    "slower_requests": "Requests of which tokens were found and computed for that reason",
    "saved_tokens": "Tokens whose KV was stored",
    "dropped_tokens": "Tokens whose KV was dropped for lack of room",
    "unread_tokens": "Tokens of answers not stored, because later prompts will not contain them",
    "load_seconds": "Seconds of all loads together",
    "save_seconds": "Seconds that the model waited for its KV to be copied",
    "late_lookups": "Lookups in shared tiers that took longer than half a second",
    "skipped_lookups": "Lookups in shared tiers not waited for, as that takes longer than it saves",
    "ignored_params": "Requests with wrong kv_transfer_params, which were ignored",
    "unkept_embeds": "Requests not kept, because their prompts have embeddings",
    "unkept_whole": "Requests not kept, because what they return needs all tokens computed",
    "unkept_adapter": "Requests not kept, because their LoRA weights are not known",
    "unkept_content": "Requests not kept, because block hashes may not tell what decides their KV",
}
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
_UNLOGGED = (NOW, "read_bytes ", "written_bytes ", "writes ")  # beginnings of names


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
                counts.add(**{label: amount - self._before.get(label, 0)})
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


class Counts:
    """Counts since they were last taken. Thread safety: all methods."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: dict[str, float] = {}

    def add(self, **more: float) -> None:
        """Add to several counts at once."""
        with self._lock:
            for name, amount in more.items():
                if amount:
                    self._counts[name] = self._counts.get(name, 0) + amount

    def set(self, name: str, state: float) -> None:
        """Set a state, whose name begins with `NOW`."""
        with self._lock:
            self._counts[name] = state

    def take(self) -> KVKeepStats | None:
        """Return and reset the counts; None if all are zero."""
        if not self._counts:
            return None
        with self._lock:
            taken, self._counts = self._counts, {}
        return KVKeepStats(data=taken)


class KVKeepStats(KVConnectorStats):
    """Counts of one interval, by name, which add up; and states, of which the later one counts."""

    def reset(self) -> None:
        """Remove all counts."""
        self.data: dict[str, float] = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Return the sum with another interval or rank."""
        data: dict[str, float] = dict(self.data)
        for name, amount in other.data.items():
            data[name] = amount if name.startswith(NOW) else data.get(name, 0) + amount
        return KVKeepStats(data=data)

    def reduce(self) -> dict[str, int | float]:
        """Return the counts for a line of vLLM's log."""
        return {
            f"kvkeep {name}": _short(amount)
            for name, amount in sorted(self.data.items())
            if not name.startswith(_UNLOGGED)
        }

    def is_empty(self) -> bool:
        """Return whether there are no counts."""
        return not self.data


class KVKeepPromMetrics(KVConnectorPromMetrics):
    """``vllm:kvkeep_…`` metrics on vLLM's Prometheus page."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        metric_types: Mapping[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._metrics = {
            name: self._counter_cls(
                name=f"vllm:kvkeep_{name}", documentation=text, labelnames=labelnames
            )
            for name, text in METRICS.items()
        }
        self._tier_counters = {
            name: self._counter_cls(
                name=f"vllm:kvkeep_{metric_of(name)}", documentation=text,
                labelnames=[*labelnames, "tier"],
            )
            for name, text in TIER_COUNTERS.items()
        }  # fmt: skip
        self._tier_gauges = {
            name: self._gauge_cls(
                name=f"vllm:kvkeep_{name}", documentation=f"{text}, at the last step",
                labelnames=[*labelnames, "tier", "rank"], multiprocess_mode="mostrecent",
            )
            for name, text in TIER_GAUGES.items()
        }  # fmt: skip
        for labels in per_engine_labelvalues.values():
            for metric in self._metrics.values():
                metric.labels(*labels)  # shown as zero from the start

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add the counts of an interval."""
        labels = self.per_engine_labelvalues[engine_idx]
        for name, amount in transfer_stats_data.items():
            counter, _, tier = name.partition(" ")
            if name in self._metrics:
                self._metrics[name].labels(*labels).inc(amount)
            elif counter in self._tier_counters:
                self._tier_counters[counter].labels(*labels, tier).inc(amount)
            elif name.startswith(NOW):
                gauge, rank, tier = name.removeprefix(NOW).split(" ", 2)
                if gauge in self._tier_gauges:
                    self._tier_gauges[gauge].labels(*labels, tier, rank).set(amount)


def metric_of(counter: str) -> str:
    """Return the name of a tier's counter as a metric, without what all have in common."""
    return "hit_blocks" if counter == "hits" else counter


def _short(amount: float) -> int | float:
    return int(amount) if amount == int(amount) else round(amount, 4)
