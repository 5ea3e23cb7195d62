"""Metric families for Prometheus of what computing and moving KV take."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from kvkeep.observe.telemetry.labels import label

if TYPE_CHECKING:
    from collections.abc import Iterator

    from prometheus_client.core import Metric

    from kvkeep.serve.server.engine_costs import EngineCosts

__all__ = ["of_costs"]

# Metric → the field of `LoadSums`, and the help text.
_COUNTERS = {
    "kvkeep_store_computed_stored_tokens": (
        "computed_stored_tokens",
        "Stored prompt tokens that were computed, because that is faster than to load them",
    ),
    "kvkeep_store_overtaken_tokens": (
        "overtaken_tokens",
        "Of these, tokens that were computed since loading them turned slow",
    ),
    "kvkeep_store_load_avoided_seconds": (
        "avoided_s",
        "Expected seconds by which loading would have been slower than computing",
    ),
}
_TIER_GAUGES = {
    "kvkeep_store_transfer_latency_seconds": (
        "seconds_fixed",
        "Seconds that reads from a tier, or writes to it, take beside those for their bytes",
    ),
    "kvkeep_store_transfer_bandwidth_bytes": (
        "bytes_per_s",
        "Bytes of raw KV a second that are read from a tier, or written to it; codecs included",
    ),
    "kvkeep_store_transfer_error": (
        "error",
        "Relative error of what is expected of reads and writes; 1 while nothing was observed",
    ),
    "kvkeep_store_transfer_queued_bytes": (
        "queued_bytes",
        "Bytes of reads and writes that wait or are under way",
    ),
}


def of_costs(costs: EngineCosts) -> Iterator[Metric]:
    """What was learned of prefill and of each tier, and what was decided by it."""
    seconds = costs.prefill_seconds_per_token
    per_token = GaugeMetricFamily(
        "kvkeep_prefill_token_seconds",
        "Expected seconds a token of a prompt of 1,000 tokens",
    )
    error = GaugeMetricFamily(
        "kvkeep_prefill_cost_error",
        "Relative error of the expected seconds of forward passes; 1 while none was observed",
    )
    if seconds is not None:
        per_token.add_metric([], seconds)
        error.add_metric([], costs.cost.prefill.error)
    yield per_token
    yield error
    tiers = costs.tiers()
    for name, (key, text) in _TIER_GAUGES.items():
        gauge = GaugeMetricFamily(name, text, labels=["tier", "call"])
        for tier, kinds in tiers.items():
            for kind, one in kinds.items():
                if one[key] is not None:
                    gauge.add_metric([label(tier, reserved=()), kind], one[key])
        yield gauge
    total = costs.total
    for name, (field, text) in _COUNTERS.items():
        yield CounterMetricFamily(name, text, getattr(total, field))
    loads = CounterMetricFamily(
        "kvkeep_store_loads",
        "Prompts of which the store had more than the pool, by what was done: loaded, computed, "
        "or both at once",
        labels=["outcome"],
    )
    loads.add_metric(["both"], total.both)
    loads.add_metric(["computed"], total.computed)
    loads.add_metric(["loaded"], total.loads - total.both - total.computed)
    yield loads
