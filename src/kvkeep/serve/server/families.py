"""Metric families for Prometheus, from figures of cache, engine, store and telemetry."""

from __future__ import annotations

from heapq import nlargest
from typing import TYPE_CHECKING, Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from kvkeep.observe.telemetry.labels import OTHER, label

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from prometheus_client.core import Metric

    from kvkeep.core.cache import CacheStats
    from kvkeep.observe.usage import TenantCounts
    from kvkeep.observe.usage.table import ReuseTotals
    from kvkeep.serve.server.engine_costs import EngineCosts
    from kvkeep.serve.server.pins import PoolPins, StorePins

__all__ = [
    "MOST_NAMES", "of_cache", "of_computed", "of_engine", "of_events", "of_reuse", "of_store",
    "of_tiers",
]  # fmt: skip

MOST_NAMES = 20
"""Namespaces with their own label; all others are "other"."""

_Table = dict[str, tuple[str, str]]

# Metric → the field of `CacheStats`, and the help text.
_CACHE_GAUGES: _Table = {
    "kvkeep_pages_pinned": ("pinned_pages", "Cached pages under pins"),
    "kvkeep_pages_dead": (
        "pages_dead",
        "Cached pages that sessions will not use again: evicted first",
    ),
    "kvkeep_pages_awaited": ("pages_awaited", "Cached pages kept for suspended sessions"),
    "kvkeep_pages_shared": ("pages_shared", "Pages in the tables of several sequences"),
}
# By whether the figures are of the KV alone (`MissRatioPoint.kv_only`).
_WHAT_IF = (
    (
        "kvkeep_what_if_hit_rate",
        "Estimated hit rate of a pool of so many times this memory; at 1x, the measured one",
    ),
    (
        "kvkeep_what_if_kv_hit_rate",
        "Estimated share of prompt tokens whose KV so many times this memory would have, if "
        "windows and states took no room: the most that it could reuse",
    ),
)
_CACHE_COUNTERS: _Table = {
    "kvkeep_evicted_pages": ("evicted_pages", "Pages evicted"),
    "kvkeep_evictions": ("evictions", "Evictions, of any number of pages"),
    "kvkeep_out_of_pages": ("out_of_pages", "Operations refused because pages were short"),
    "kvkeep_hook_errors": ("hook_errors", "Hooks of the cache that raised"),
}
# The same, of `GroupStats`, for models with windows or states.
_GROUP_COUNTERS: _Table = {
    "kvkeep_unresumed_tokens": (
        "unresumed_tokens",
        "Prompt tokens computed though their KV was cached: no state or window to resume",
    ),
}
# Metric → the field of `EngineStats`, and the help text.
_ENGINE_GAUGES: _Table = {
    "kvkeep_requests_running": ("running", "Answers being computed"),
    "kvkeep_requests_waiting": ("waiting", "Answers in the queue"),
}
_ENGINE_COUNTERS: _Table = {
    "kvkeep_preemptions": ("preempted", "Running answers that were preempted"),
    "kvkeep_deferrals": (
        "deferred",
        "Answers that waited for a prefix that another request computed",
    ),
}
# The same, for an engine with a store.
_OFFLOAD_COUNTERS: _Table = {
    "kvkeep_store_loaded_tokens": ("loaded_tokens", "Tokens loaded from the store into pages"),
    "kvkeep_store_unkept_tokens": (
        "unkept_tokens",
        "Computed tokens dropped because the store was too slow",
    ),
}
_STORE_COUNTERS: _Table = {
    "kvkeep_store_dropped_tokens": (
        "dropped_tokens",
        "Tokens handed to the store that were dropped: no room",
    ),
    "kvkeep_store_unread_tokens": (
        "unread_tokens",
        "Tokens of answers not stored: answers like them are never read again",
    ),
}
_TIER_GAUGES: _Table = {
    "kvkeep_store_used_bytes": ("used_bytes", "Bytes in the tier, of all processes that share it"),
    "kvkeep_store_capacity_bytes": ("capacity", "Capacity of the tier in bytes"),
    "kvkeep_store_queued_bytes": ("queued_bytes", "Bytes in the write queue"),
    "kvkeep_store_blocks": ("blocks", "Blocks in the tier"),
}
_TIER_COUNTERS = {
    "hits": "Blocks read from the tier",
    "misses": "Blocks expected in the tier and not found",
    "late": "Blocks that did not come within the tier's timeout",
    "damaged": "Blocks whose verification failed: quarantined",
    "errors": "Calls to the tier that failed",
    "writes": "Blocks written",
    "over_budget": "Blocks not written, because the tier's write budget is short",
    "drops": "Blocks not written: full queue, no room, or a failed write",
    "evictions": "Blocks evicted to make room",
    "read_bytes": "Bytes of records read",
    "written_bytes": "Bytes of records written",
    "read_seconds": "Seconds spent in the tier's backend, reading",
    "write_seconds": "Seconds spent in the tier's backend, writing",
}

# Metric → the field of `kvkeep.serve.kv_events.PublisherStats`, and the help text.
_EVENT_COUNTERS: _Table = {
    "kvkeep_events_dropped": ("dropped", "KV events dropped because the queue was full"),
    "kvkeep_events_resyncs": (
        "resyncs",
        "Times the published state was compared with the cache after drops",
    ),
    "kvkeep_events_refused": ("refused", "Invalid requests on the replay socket"),
}


def of_cache(cache: CacheStats) -> Iterator[Metric]:
    """Pages by state, the counters of the cache, and estimated hit rates of other sizes."""
    pages = GaugeMetricFamily("kvkeep_pages", "Pages by state: all of the pool", labels=["state"])
    for state, count in cache.pages_by_state().items():
        pages.add_metric([state], count)
    yield pages
    for name, (field, text) in _CACHE_GAUGES.items():
        yield GaugeMetricFamily(name, text, getattr(cache, field))
    for name, (field, text) in _CACHE_COUNTERS.items():
        yield CounterMetricFamily(name, text, getattr(cache, field))
    if cache.groups is not None:
        for name, (field, text) in _GROUP_COUNTERS.items():
            yield CounterMetricFamily(name, text, getattr(cache.groups, field))
    if cache.what_if:
        name, text = _WHAT_IF[cache.what_if[0].kv_only]
        gauge = GaugeMetricFamily(name, text, labels=["memory"])
        for point in cache.what_if:
            gauge.add_metric([f"{point.times:g}x"], point.hit_rate)
        yield gauge


def of_engine(engine: Mapping[str, float]) -> Iterator[Metric]:
    """Gauges and counters of the engine."""
    for name, (key, text) in _ENGINE_GAUGES.items():
        yield GaugeMetricFamily(name, text, engine[key])
    for name, (key, text) in _ENGINE_COUNTERS.items():
        yield CounterMetricFamily(name, text, engine[key])
    if "observer_errors" in engine:
        yield CounterMetricFamily(
            "kvkeep_observer_errors", "Observers of requests that raised", engine["observer_errors"]
        )


def of_store(engine: Mapping[str, float], store: Mapping[str, Any]) -> Iterator[Metric]:
    """Counters of the store, and those of its tiers (`of_tiers`)."""
    for counters, source in ((_OFFLOAD_COUNTERS, engine), (_STORE_COUNTERS, store)):
        for name, (key, text) in counters.items():
            yield CounterMetricFamily(name, text, source[key])
    yield from of_tiers(store["tiers"])


def of_tiers(found: Iterable[Mapping[str, Any]]) -> Iterator[Metric]:
    """Gauges and counters of tiers, labelled by tier, from `TierStats.as_dict`."""
    tiers = [(_tier(tier["name"]), tier) for tier in found]
    for name, (key, text) in _TIER_GAUGES.items():
        gauge = GaugeMetricFamily(name, text, labels=["tier"])
        for tier_name, tier in tiers:
            if tier[key] is not None:
                gauge.add_metric([tier_name], tier[key])
        yield gauge
    breaker = GaugeMetricFamily(
        "kvkeep_store_breaker_open",
        "1 while the circuit breaker of a tier is open",
        labels=["tier"],
    )
    for tier_name, tier in tiers:
        breaker.add_metric([tier_name], tier["breaker"] != "closed")
    yield breaker
    for key, text in _TIER_COUNTERS.items():
        counter = CounterMetricFamily(f"kvkeep_store_{key}", text, labels=["tier"])
        for tier_name, tier in tiers:
            counter.add_metric([tier_name], tier["counters"][key])
        yield counter


def of_reuse(reuse: ReuseTotals) -> Iterator[Metric]:
    """Reused tokens by tier, and the time that reuse saved."""
    hits = CounterMetricFamily(
        "kvkeep_hit_tokens",
        "Reused prompt tokens of admitted requests, by source: pool, or a tier",
        labels=["tier"],
    )
    for tier, tokens in reuse.hit_tokens.items():
        hits.add_metric([_tier(tier)], tokens)
    yield hits
    yield CounterMetricFamily(
        "kvkeep_prefill_saved_tokens",
        "Reused prompt tokens, which were not computed",
        reuse.saved_tokens,
    )
    saved = CounterMetricFamily(
        "kvkeep_prefill_saved_seconds",
        "Estimated time saved, by source: each reused token counts the average time of a computed "
        "prompt token at that moment",
        labels=["tier"],
    )
    for tier, seconds in reuse.saved_seconds.items():
        saved.add_metric([_tier(tier)], seconds)
    yield saved
    yield CounterMetricFamily(
        "kvkeep_prefill_computed_tokens", "Prompt tokens that were computed", reuse.computed_tokens
    )


def of_computed(reasons: Mapping[str, int]) -> Iterator[Metric]:
    """Computed prompt tokens, by the reason why they were not reused."""
    counter = CounterMetricFamily(
        "kvkeep_recomputed_tokens",
        "Computed prompt tokens, by why they were not reused (docs/explain.md)",
        labels=["reason"],
    )
    most = nlargest(MOST_NAMES, reasons.items(), key=lambda item: item[1])
    named = [(label(reason), tokens) for reason, tokens in most]
    left = sum(reasons.values()) - sum(tokens for _, tokens in most)
    for reason, tokens in [*named, (OTHER, left)] if left else named:
        counter.add_metric([reason], tokens)
    yield counter


def of_events(publisher: Mapping[str, int]) -> Iterator[Metric]:
    """Counters of the publisher of KV events, from `PublisherStats.as_dict`."""
    for name, (key, text) in _EVENT_COUNTERS.items():
        yield CounterMetricFamily(name, text, publisher[key])


def _tier(name: str) -> str:
    """Return the label of a tier: the name that an operator gave it."""
    return label(name, reserved=())


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
_COST_GAUGES = {
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
    for name, (key, text) in _COST_GAUGES.items():
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
        "or both, a part of each",
        labels=["outcome"],
    )
    loads.add_metric(["both"], total.both)
    loads.add_metric(["computed"], total.computed)
    loads.add_metric(["loaded"], total.loads - total.both - total.computed)
    yield loads
