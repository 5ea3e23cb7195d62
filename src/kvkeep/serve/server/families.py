"""What Prometheus reads of cache, engine, store and telemetry at one moment, as metric families."""

from __future__ import annotations

from heapq import nlargest
from typing import TYPE_CHECKING, Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

from kvkeep.observe.telemetry.labels import OTHER, label

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from prometheus_client.core import Metric

    from kvkeep.core.cache import CacheStats
    from kvkeep.observe.telemetry import Buckets, TimesOfPages
    from kvkeep.observe.usage.table import ReuseSnapshot

__all__ = [
    "MOST_NAMES",
    "of_cache",
    "of_computed",
    "of_engine",
    "of_events",
    "of_namespaces",
    "of_pages",
    "of_reuse",
    "of_store",
]

MOST_NAMES = 20
"""Namespaces that have a label of their own; the rest are "other"."""

_Table = dict[str, tuple[str, str]]

# Ours → the field of `CacheStats`, and what it is.
_CACHE_GAUGES: _Table = {
    "kvkeep_pages_pinned": ("pinned_pages", "Cached pages under pins, soft or hard"),
    "kvkeep_pages_hard_pinned": (
        "hard_pinned_pages",
        "Cached pages that hard pins keep for certain",
    ),
    "kvkeep_pages_dead": ("pages_dead", "Cached pages that sessions left aside: they go first"),
    "kvkeep_pages_awaited": ("pages_awaited", "Cached pages kept for sessions that are away"),
    "kvkeep_pages_shared": ("pages_shared", "Pages that more than one sequence has"),
    "kvkeep_sessions": ("sessions", "Sessions that are known"),
    "kvkeep_namespaces": ("namespaces", "Namespaces that hold pages"),
}
_CACHE_COUNTERS: _Table = {
    "kvkeep_stored_pages": ("stored_pages", "Pages that became reusable"),
    "kvkeep_duplicate_pages": ("duplicate_pages", "Pages computed twice at once, one given back"),
    "kvkeep_evictions": ("evictions", "Times that pages were evicted, whatever their number"),
    "kvkeep_out_of_pages": ("out_of_pages", "Operations refused for want of pages"),
    "kvkeep_hook_errors": ("hook_errors", "Hooks of the cache that raised"),
}
# Ours → the engine's own counter of that name, and what it is.
_ENGINE_GAUGES: _Table = {
    "kvkeep_requests_running": ("running", "Requests being computed"),
    "kvkeep_requests_waiting": ("waiting", "Requests in the queue"),
}
_ENGINE_COUNTERS: _Table = {
    "kvkeep_steps": ("steps", "Forward passes"),
    "kvkeep_preemptions": ("preempted", "Times that a running request gave its pages back"),
    "kvkeep_deferrals": ("deferred", "Answers that waited for a prefix that another computed"),
    "kvkeep_computed_tokens": ("computed_tokens", "Tokens of all forward passes"),
    "kvkeep_draft_tokens_proposed": ("drafted_tokens", "Tokens guessed from the prompt"),
    "kvkeep_draft_tokens_accepted": ("accepted_drafts", "Guessed tokens that were right"),
}
# The same, where the engine has a store.
_KEEPER_COUNTERS: _Table = {
    "kvkeep_store_loaded_tokens": ("loaded_tokens", "Tokens that came from the store into pages"),
    "kvkeep_store_late_loads": ("late_loads", "Times the store took longer than a request waits"),
    "kvkeep_store_kept_tokens": ("kept_tokens", "Tokens handed to the store"),
    "kvkeep_store_unkept_tokens": ("unkept_tokens", "Computed tokens that it was too slow to take"),
}
_STORE_COUNTERS: _Table = {
    "kvkeep_store_asked_tokens": ("asked_tokens", "Tokens that the store was asked for"),
    "kvkeep_store_hit_tokens": ("hit_tokens", "Tokens that it was asked for and gave"),
    "kvkeep_store_put_tokens": ("put_tokens", "Tokens that it took in"),
    "kvkeep_store_skipped_tokens": ("skipped_tokens", "Tokens given to it that it had already"),
    "kvkeep_store_dropped_tokens": ("dropped_tokens", "Tokens given to it that found no room"),
}
_TIER_GAUGES: _Table = {
    "kvkeep_store_used_bytes": ("used_bytes", "Bytes in the tier, of all who share it"),
    "kvkeep_store_capacity_bytes": ("capacity", "What the tier may hold"),
    "kvkeep_store_pinned_bytes": ("pinned_bytes", "Bytes in the tier that are pinned"),
    "kvkeep_store_queued_bytes": ("queued_bytes", "Bytes that wait to be written"),
    "kvkeep_store_blocks": ("blocks", "Blocks in the tier"),
}
_TIER_COUNTERS = {
    "hits": "Blocks found in the tier and handed out",
    "misses": "Blocks thought to be in the tier and not found",
    "late": "Blocks that did not come within the tier's timeout",
    "damaged": "Blocks read that were not what was stored: quarantined",
    "refused": "Blocks not read: another format, length or key, or a lossy codec not asked for",
    "errors": "Calls to the tier that failed",
    "skipped_calls": "Calls not made because the circuit breaker was open",
    "writes": "Blocks written",
    "already": "Blocks not written because the tier had them",
    "drops": "Blocks not written: full queue, no room, or a failed write",
    "relists": "Times the tier was listed again because it had lost what it held",
    "evictions": "Blocks taken away to make room",
    "demotions": "Evicted blocks that moved one tier down",
    "demotions_dropped": "Evicted blocks that should have moved down, but there was no time",
    "read_bytes": "Bytes of records read",
    "written_bytes": "Bytes of records written",
    "read_seconds": "Seconds spent in the tier's backend, reading",
    "write_seconds": "Seconds spent in the tier's backend, writing",
}

# The same, of a publisher of KV events.
_EVENT_COUNTERS: _Table = {
    "kvkeep_events_batches": ("batches", "Batches of KV events that were published"),
    "kvkeep_events_told": ("events", "KV events that were published"),
    "kvkeep_events_dropped": ("dropped", "KV events that found the queue full"),
    "kvkeep_events_resyncs": ("resyncs", "Times all was compared with the cache after that"),
    "kvkeep_events_replays": ("replays", "Requests for KV events that were missed"),
    "kvkeep_events_snapshots": ("snapshots", "Requests for all that is cached"),
    "kvkeep_events_refused": ("refused", "Requests on the replay socket that were none"),
}


def of_cache(cache: CacheStats) -> Iterator[Metric]:
    """Pages by state, what the cache has done, and what more memory would do."""
    pages = GaugeMetricFamily("kvkeep_pages", "Pages by state: all of the pool", labels=["state"])
    pages.add_metric(["free"], cache.pages_free)
    pages.add_metric(["cached_evictable"], cache.pages_evictable)
    pages.add_metric(["cached_held"], cache.pages_protected)
    pages.add_metric(["private"], cache.pages_used - cache.pages_cached)
    yield pages
    for name, (field, text) in _CACHE_GAUGES.items():
        yield GaugeMetricFamily(name, text, getattr(cache, field))
    for name, (field, text) in _CACHE_COUNTERS.items():
        yield CounterMetricFamily(name, text, getattr(cache, field))
    if cache.what_if:
        gauge = GaugeMetricFamily(
            "kvkeep_what_if_hit_rate",
            "Share of prompt tokens that so many times the memory would have had, by a sample",
            labels=["memory"],
        )
        for point in cache.what_if:
            gauge.add_metric([f"{point.times:g}x"], point.hit_rate)
        yield gauge


def of_engine(engine: Mapping[str, float]) -> Iterator[Metric]:
    """What the engine does and has done."""
    for name, (key, text) in _ENGINE_GAUGES.items():
        yield GaugeMetricFamily(name, text, engine[key])
    for name, (key, text) in _ENGINE_COUNTERS.items():
        yield CounterMetricFamily(name, text, engine[key])
    if "observer_errors" in engine:
        yield CounterMetricFamily(
            "kvkeep_observer_errors", "Observers of requests that raised", engine["observer_errors"]
        )


def of_store(engine: Mapping[str, float], store: Mapping[str, Any]) -> Iterator[Metric]:
    """What the store and its tiers tell; a tier's figures bear its name."""
    for counters, source in ((_KEEPER_COUNTERS, engine), (_STORE_COUNTERS, store)):
        for name, (key, text) in counters.items():
            yield CounterMetricFamily(name, text, source[key])
    tiers = [(_tier(tier["name"]), tier) for tier in store["tiers"]]
    for name, (key, text) in _TIER_GAUGES.items():
        gauge = GaugeMetricFamily(name, text, labels=["tier"])
        for tier_name, tier in tiers:
            if tier[key] is not None:
                gauge.add_metric([tier_name], tier[key])
        yield gauge
    breaker = GaugeMetricFamily(
        "kvkeep_store_breaker_open", "1 while a failing tier is left alone", labels=["tier"]
    )
    opened = CounterMetricFamily(
        "kvkeep_store_breaker_openings", "Times that a tier was left alone", labels=["tier"]
    )
    calls = GaugeMetricFamily(
        "kvkeep_store_calls_left_alone",
        "1 while calls of that kind to a tier are not made, because they failed",
        labels=["tier", "call"],
    )
    parts = GaugeMetricFamily(
        "kvkeep_store_parts_left_alone", "Parts of a tier that are left alone", labels=["tier"]
    )
    for tier_name, tier in tiers:
        breaker.add_metric([tier_name], tier["breaker"] != "closed")
        opened.add_metric([tier_name], tier["breaker_opened"])
        for call, state in tier["breakers"].items():
            calls.add_metric([tier_name, call], state != "closed")
        parts.add_metric([tier_name], len(tier["parts"]))
    yield breaker
    yield opened
    yield calls
    yield parts
    for key, text in _TIER_COUNTERS.items():
        counter = CounterMetricFamily(f"kvkeep_store_{key}", text, labels=["tier"])
        for tier_name, tier in tiers:
            counter.add_metric([tier_name], tier["counters"][key])
        yield counter


def of_pages(evicted: int, times: TimesOfPages | None) -> Iterator[Metric]:
    """Evicted pages by reason, how long they had stayed, how long prefixes waited for a next use.

    ``evicted`` are all; those that no hook saw go with the reason "unknown".
    """
    known = {} if times is None else times.evicted
    counter = CounterMetricFamily("kvkeep_evicted_pages", "Pages evicted", labels=["reason"])
    for reason, pages in known.items():
        counter.add_metric([reason], pages)
    unknown = max(0, evicted - sum(known.values()))
    if unknown or not known:
        counter.add_metric(["unknown"], unknown)
    yield counter
    if times is None:
        return
    residency = HistogramMetricFamily(
        "kvkeep_page_residency_seconds",
        "From when a page was stored to when it was evicted, each page",
        labels=["reason"],
    )
    for reason, buckets in times.residency.items():
        residency.add_metric([reason], _buckets(buckets), buckets.total)
    yield residency
    gap = times.reuse_gap
    yield HistogramMetricFamily(
        "kvkeep_reuse_gap_seconds",
        "From one use of a cached prefix to the next, each sequence that went on behind one",
        buckets=_buckets(gap),
        sum_value=gap.total,
    )


def of_reuse(reuse: ReuseSnapshot) -> Iterator[Metric]:
    """What requests reused, by tier, and what that saved."""
    hits = CounterMetricFamily(
        "kvkeep_hit_tokens",
        "Prompt tokens of admitted requests that were reused, by where they were: pool, or a tier",
        labels=["tier"],
    )
    for tier, tokens in reuse.hit_tokens.items():
        hits.add_metric([_tier(tier)], tokens)
    yield hits
    yield CounterMetricFamily(
        "kvkeep_prefill_saved_tokens", "Prompt tokens that were not computed", reuse.saved_tokens
    )
    yield CounterMetricFamily(
        "kvkeep_prefill_saved_seconds",
        "What computing these would have taken, estimated: each counts what a prompt token had "
        "taken on average when it was reused",
        reuse.saved_seconds,
    )
    yield CounterMetricFamily(
        "kvkeep_prefill_computed_tokens", "Prompt tokens that were computed", reuse.computed_tokens
    )
    yield CounterMetricFamily(
        "kvkeep_prefill_computed_seconds",
        "Time of forward passes by the share of prompt tokens in them",
        reuse.computed_seconds,
    )
    asked = GaugeMetricFamily(
        "kvkeep_namespace_prompt_ratio",
        f"Share of the prompt tokens of late, of the {MOST_NAMES} largest namespaces and the rest",
        labels=["namespace"],
    )
    reused = GaugeMetricFamily(
        "kvkeep_namespace_reused_ratio",
        "Share of a namespace's prompt tokens of late that was reused",
        labels=["namespace"],
    )
    for share in reuse.shares:
        name = OTHER if share.name is None else label(share.name)
        asked.add_metric([name], share.prompt)
        reused.add_metric([name], share.reused)
    yield asked
    yield reused


def of_namespaces(pages: Mapping[str, int]) -> Iterator[Metric]:
    """Cached pages of the largest namespaces, and of the rest together."""
    gauge = GaugeMetricFamily(
        "kvkeep_namespace_pages",
        f"Cached pages of the {MOST_NAMES} largest namespaces and of the rest",
        labels=["namespace"],
    )
    largest = nlargest(MOST_NAMES, pages.items(), key=lambda item: item[1])
    for name, count in largest:
        gauge.add_metric([label(name)], count)
    if len(pages) > len(largest):
        gauge.add_metric([OTHER], sum(pages.values()) - sum(count for _, count in largest))
    yield gauge


def of_computed(reasons: Mapping[str, int]) -> Iterator[Metric]:
    """Computed prompt tokens by why they were not reused."""
    counter = CounterMetricFamily(
        "kvkeep_recomputed_tokens",
        "Prompt tokens that were computed, by why they were not reused (docs/explain.md)",
        labels=["reason"],
    )
    most = nlargest(MOST_NAMES, reasons.items(), key=lambda item: item[1])
    named = [(label(reason), tokens) for reason, tokens in most]
    left = sum(reasons.values()) - sum(tokens for _, tokens in most)
    for reason, tokens in [*named, (OTHER, left)] if left else named:
        counter.add_metric([reason], tokens)
    yield counter


def of_events(publisher: Mapping[str, int]) -> Iterator[Metric]:
    """What the publisher of KV events has done: `kvkeep.serve.kv_events.PublisherStats` by name."""
    for name, (key, text) in _EVENT_COUNTERS.items():
        yield CounterMetricFamily(name, text, publisher[key])


def _tier(name: str) -> str:
    """The label of a tier: its name, as an operator gave it."""
    return label(name, reserved=())


def _buckets(buckets: Buckets) -> list[tuple[str, float]]:
    return [
        ("+Inf" if bound == float("inf") else str(bound), count)
        for bound, count in buckets.cumulative
    ]
