"""Counts of the tier for vLLM's Prometheus page."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import (
    OffloadingConnectorStats,
)
from vllm.v1.kv_offload.base import OffloadingCounterMetadata

from kvkeep.integrations.vllm.stats import HITS, METRICS

if TYPE_CHECKING:
    from vllm.v1.kv_offload.base import OffloadingMetricMetadata

    from kvkeep.integrations.vllm.stats import Counts

__all__ = ["definitions", "taken"]

_PREFIX = "vllm:kvkeep_tier_"
_HIT_BLOCKS = f"{_PREFIX}hit_blocks"


def definitions() -> dict[str, OffloadingMetricMetadata]:
    """Return the metrics by name, for vLLM to declare."""
    found: dict[str, OffloadingMetricMetadata] = {
        _PREFIX + name: OffloadingCounterMetadata(documentation=text)
        for name, text in METRICS.items()
    }
    found[_HIT_BLOCKS] = OffloadingCounterMetadata(
        documentation="Loaded chunks, by the tier they were read from", labelnames=("tier",)
    )
    return found


def taken(counts: Counts) -> OffloadingConnectorStats | None:
    """Return and reset the counts; None if all are zero."""
    stats = counts.take()
    if stats is None:
        return None
    told = OffloadingConnectorStats()
    for name, amount in stats.data.items():
        if name.startswith(HITS):
            told.increase_counter(_HIT_BLOCKS, amount, (name.removeprefix(HITS),))
        else:
            told.increase_counter(_PREFIX + name, amount)
    return told
