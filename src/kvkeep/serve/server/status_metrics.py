"""`StatusMetrics`: metrics of a cache that is inside another engine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from kvkeep.serve.server import cost_families, families, tenant_families

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from prometheus_client.core import Metric

    from kvkeep.observe.usage import TenantLedger, UsageTable
    from kvkeep.serve.server.engine_costs import EngineCosts

__all__ = ["StatusMetrics"]

_GAUGES = {
    "kvkeep_requests_running": ("running", "Answers being computed"),
    "kvkeep_requests_waiting": ("waiting", "Answers in the queue"),
}
_COUNTERS = {
    "kvkeep_prompt_tokens": ("prompt_tokens", "Prompt tokens of finished requests"),
    "kvkeep_cached_tokens": (
        "cached_tokens", "Prompt tokens of finished requests that were reused",
    ),
    "kvkeep_loaded_tokens": (
        "loaded_tokens", "Prompt tokens of finished requests that were reused from the store",
    ),
    "kvkeep_generated_tokens": ("generated_tokens", "Tokens generated"),
}  # fmt: skip


class StatusMetrics:
    """Makes the text for Prometheus from what observers of requests counted.

    The names are those of a kvkeep server, as far as the figures exist.

    Thread safety: all methods.
    """

    def __init__(self, usage: UsageTable, tenants: TenantLedger, costs: EngineCosts) -> None:
        self._usage = usage
        self._tenants = tenants
        self._costs = costs

    def exposition(
        self,
        requests: Mapping[str, float],
        reasons: Mapping[str, int],
        tiers: Iterable[Mapping[str, Any]],
    ) -> bytes:
        """Return the text: ``requests`` are counts of requests, ``reasons`` of computed tokens."""
        found: list[Metric] = []
        for name, (key, text) in _GAUGES.items():
            found.append(GaugeMetricFamily(name, text, requests[key]))
        for name, (key, text) in _COUNTERS.items():
            found.append(CounterMetricFamily(name, text, requests[key]))
        found += families.of_reuse(self._usage.reuse(families.MOST_NAMES))
        found += families.of_computed(reasons)
        found += families.of_tiers(tiers)
        found += cost_families.of_costs(self._costs)
        found += tenant_families.of_tenants(self._tenants.series(families.MOST_NAMES))
        registry = CollectorRegistry(auto_describe=False)
        registry.register(_Found(found))
        return generate_latest(registry)


class _Found(Collector):
    """Families that were made before."""

    def __init__(self, found: list[Metric]) -> None:
        self._found = found

    def collect(self) -> Iterator[Metric]:
        """Return them."""
        return iter(self._found)
