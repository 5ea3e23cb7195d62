"""Counts of the tier for vLLM's Prometheus page."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import (
    OffloadingConnectorStats,
)
from vllm.v1.kv_offload.base import OffloadingCounterMetadata, OffloadingGaugeMetadata

from kvkeep.integrations.vllm.stats import METRICS, NOW, TIER_COUNTERS, TIER_GAUGES, metric_of

if TYPE_CHECKING:
    from vllm.v1.kv_offload.base import OffloadingMetricMetadata

    from kvkeep.integrations.vllm.stats import Counts

__all__ = ["definitions", "taken"]

_PREFIX = "vllm:kvkeep_tier_"


def definitions() -> dict[str, OffloadingMetricMetadata]:
    """Return the metrics by name, for vLLM to declare."""
    found: dict[str, OffloadingMetricMetadata] = {
        _PREFIX + name: OffloadingCounterMetadata(documentation=text)
        for name, text in METRICS.items()
    }
    found |= {
        _PREFIX + metric_of(name): OffloadingCounterMetadata(
            documentation=text.replace("Blocks", "Chunks").replace("blocks", "chunks"),
            labelnames=("tier",),
        )
        for name, text in TIER_COUNTERS.items()
    }
    found |= {
        _PREFIX + name: OffloadingGaugeMetadata(
            documentation=f"{text}, at the last step", labelnames=("tier",)
        )
        for name, text in TIER_GAUGES.items()
    }
    return found


def taken(counts: Counts) -> OffloadingConnectorStats | None:
    """Return and reset the counts; None if all are zero."""
    stats = counts.take()
    if stats is None:
        return None
    told = OffloadingConnectorStats()
    for name, amount in stats.data.items():
        counter, _, tier = name.partition(" ")
        if name.startswith(NOW):
            gauge, _, tier = name.removeprefix(NOW).split(" ", 2)
            told.set_gauge(_PREFIX + gauge, amount, (tier,))
        elif counter in TIER_COUNTERS:
            told.increase_counter(_PREFIX + metric_of(counter), amount, (tier,))
        else:
            told.increase_counter(_PREFIX + name, amount)
    return told
