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
}
_TIER_GAUGES = {
    "kvkeep_store_transfer_bandwidth_bytes": (
        "bytes_per_s",
        "Bytes of raw KV a second that are read from a tier, or written to it; codecs included",
    ),
}


def of_costs(costs: EngineCosts) -> Iterator[Metric]:
    """What was learned of prefill and of each tier, and what was decided by it."""
    seconds = costs.prefill_seconds_per_token
    per_token = GaugeMetricFamily(
        "kvkeep_prefill_token_seconds",
        "Expected seconds a token of a prompt of 1,000 tokens",
    )
    if seconds is not None:
        per_token.add_metric([], seconds)
    yield per_token
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
