"""Metric families about tenants: what they keep within their budgets, and what they used."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from kvkeep.observe.telemetry.labels import OTHER, label

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from prometheus_client.core import Metric

    from kvkeep.observe.usage import TenantCounts
    from kvkeep.serve.server.pins import PoolPins, StorePins

__all__ = ["of_pool_pins", "of_tenants", "of_tier_pins"]

_TOKENS = {
    "prompt": "prompt_tokens",
    "read": "read_tokens",
    "loaded": "loaded_tokens",
    "computed": "computed_tokens",
    "generated": "generated_tokens",
    "stored": "stored_tokens",
}


def of_pool_pins(pins: PoolPins) -> Iterator[Metric]:
    """Tokens that clients asked to be kept, and the pages that count against their budgets."""
    counter = CounterMetricFamily(
        "kvkeep_retained_tokens",
        "Prompt tokens that requests asked to be kept in the pool: pinned, beyond the budget, or "
        "pinned and given way to another tenant",
        labels=["outcome"],
    )
    counter.add_metric(["pinned"], pins.pinned_tokens)
    counter.add_metric(["beyond the budget"], pins.unpinned_tokens)
    counter.add_metric(["given way"], pins.given_tokens)
    yield counter
    yield GaugeMetricFamily(
        "kvkeep_retained_pages",
        "Pages that count against the budgets of pins of clients",
        pins.count,
    )


def of_tier_pins(pins: StorePins) -> Iterator[Metric]:
    """The same for the tiers."""
    counter = CounterMetricFamily(
        "kvkeep_store_retained_tokens",
        "Prompt tokens that requests asked to be kept in the tiers: kept, beyond the budget, kept "
        "and given way to another tenant, or within the budget and not pinned by any tier",
        labels=["outcome"],
    )
    counter.add_metric(["kept"], pins.pinned_tokens)
    counter.add_metric(["beyond the budget"], pins.unpinned_tokens)
    counter.add_metric(["given way"], pins.given_tokens)
    counter.add_metric(["lost"], pins.lost_tokens)
    yield counter
    yield GaugeMetricFamily(
        "kvkeep_store_retained_blocks",
        "Blocks that count against the budgets of what clients keep in the tiers",
        pins.count,
    )


def of_tenants(series: Sequence[tuple[str | None, TenantCounts]]) -> Iterator[Metric]:
    """What tenants used, from `TenantLedger.series`."""
    tokens = CounterMetricFamily(
        "kvkeep_namespace_tokens",
        "Tokens by namespace and kind; a namespace's counters begin when it gets its label",
        labels=["namespace", "kind"],
    )
    for tenant, counts in series:
        name = OTHER if tenant is None else label(tenant)
        for kind, field in _TOKENS.items():
            tokens.add_metric([name, kind], getattr(counts, field))
    yield tokens
