"""What Prometheus is told: counters and histograms of requests, and gauges read when it asks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_1_0_0
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from prometheus_client.core import Metric

    from kvkeep.cache import CacheStats

__all__ = ["Metrics"]

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
_STEP_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)

# Ours → the engine's own counter of that name, and what it is.
_ENGINE_COUNTERS = {
    "kvkeep_steps": ("steps", "Forward passes"),
    "kvkeep_preemptions": ("preempted", "Times that a running request gave its pages back"),
    "kvkeep_draft_tokens_proposed": ("drafted_tokens", "Tokens guessed from the prompt"),
    "kvkeep_draft_tokens_accepted": ("accepted_drafts", "Guessed tokens that were right"),
}
# The same, where the engine has a store.
_KEEPER_COUNTERS = {
    "kvkeep_store_loaded_tokens": ("loaded_tokens", "Tokens that came from the store into pages"),
    "kvkeep_store_late_loads": ("late_loads", "Times the store took longer than a request waits"),
    "kvkeep_store_kept_tokens": ("kept_tokens", "Tokens handed to the store"),
    "kvkeep_store_unkept_tokens": ("unkept_tokens", "Computed tokens that it was too slow to take"),
}
_STORE_COUNTERS = {
    "kvkeep_store_asked_tokens": ("asked_tokens", "Tokens that the store was asked for"),
    "kvkeep_store_hit_tokens": ("hit_tokens", "Of these, tokens that it gave"),
    "kvkeep_store_put_tokens": ("put_tokens", "Tokens that it took in"),
    "kvkeep_store_skipped_tokens": ("skipped_tokens", "Tokens given to it that it had already"),
    "kvkeep_store_dropped_tokens": ("dropped_tokens", "Tokens given to it that found no room"),
}
_TIER_GAUGES = {
    "kvkeep_store_used_bytes": ("used_bytes", "Bytes in the tier, of all who share it"),
    "kvkeep_store_capacity_bytes": ("capacity", "What the tier may hold"),
    "kvkeep_store_queued_bytes": ("queued_bytes", "Bytes that wait to be written"),
}


class Metrics:
    """One server's figures, in a registry of their own.

    Thread safety: prometheus_client's: every update takes a lock.
    """

    content_type: Final = CONTENT_TYPE_PLAIN_1_0_0

    def __init__(self) -> None:
        self._registry = registry = CollectorRegistry()
        self._state = _State()
        registry.register(self._state)
        self.requests = Counter(
            "kvkeep_requests",
            "Requests for text by how they ended: stop, length, refused (400, 429, 503), timeout, "
            "gone (the client), failed",
            ["endpoint", "outcome"],
            registry=registry,
        )
        self.prompt_tokens = Counter(
            "kvkeep_prompt_tokens", "Prompt tokens of finished requests", registry=registry
        )
        self.cached_tokens = Counter(
            "kvkeep_cached_tokens", "Of these, tokens that were reused", registry=registry
        )
        self.loaded_tokens = Counter(
            "kvkeep_loaded_tokens",
            "Of the cached tokens, those that came from the store",
            registry=registry,
        )
        self.generated_tokens = Counter(
            "kvkeep_generated_tokens", "Tokens generated", registry=registry
        )
        self.first_token = Histogram(
            "kvkeep_time_to_first_token_seconds",
            "From a request's arrival to its first token",
            buckets=_SECONDS,
            registry=registry,
        )
        self.between_tokens = Histogram(
            "kvkeep_inter_token_seconds",
            "From one token of an answer to the next",
            buckets=_STEP_SECONDS,
            registry=registry,
        )
        self.whole = Histogram(
            "kvkeep_request_seconds",
            "From a request's arrival to its last token",
            buckets=_SECONDS,
            registry=registry,
        )

    def exposition(
        self,
        cache: CacheStats,
        engine: Mapping[str, float],
        store: Mapping[str, Any] | None = None,
    ) -> bytes:
        """The text that Prometheus reads, with the state given. Cost: well below a millisecond."""
        self._state.take(cache, engine)
        if store is not None:
            self._state.take_store(engine, store)
        return generate_latest(self._registry)


class _State(Collector):
    """What is read from engine and cache when Prometheus asks."""

    def __init__(self) -> None:
        self._families: list[Metric] = []

    def take(self, cache: CacheStats, engine: Mapping[str, float]) -> None:
        pages = GaugeMetricFamily("kvkeep_pages", "Pages by state", labels=["state"])
        pages.add_metric(["free"], cache.pages_free)
        pages.add_metric(["cached_evictable"], cache.pages_evictable)
        pages.add_metric(["cached_held"], cache.pages_protected)
        pages.add_metric(["private"], cache.pages_used - cache.pages_cached)
        self._families = [
            pages,
            GaugeMetricFamily(
                "kvkeep_requests_running", "Requests being computed", engine["running"]
            ),
            GaugeMetricFamily(
                "kvkeep_requests_waiting", "Requests in the queue", engine["waiting"]
            ),
            CounterMetricFamily("kvkeep_evicted_pages", "Pages evicted", cache.evicted_pages),
            *(
                CounterMetricFamily(name, text, engine[key])
                for name, (key, text) in _ENGINE_COUNTERS.items()
            ),
        ]

        if cache.what_if:
            self._families.append(_what_if(cache))

    def take_store(self, engine: Mapping[str, float], store: Mapping[str, Any]) -> None:
        """Add what the store and its tiers tell; a tier's figures bear its name."""
        for counters, source in ((_KEEPER_COUNTERS, engine), (_STORE_COUNTERS, store)):
            self._families += [
                CounterMetricFamily(name, text, source[key])
                for name, (key, text) in counters.items()
            ]
        tiers = store["tiers"]
        for name, (key, text) in _TIER_GAUGES.items():
            self._families.append(gauge := GaugeMetricFamily(name, text, labels=["tier"]))
            for tier in tiers:
                if tier[key] is not None:
                    gauge.add_metric([tier["name"]], tier[key])
        breaker = GaugeMetricFamily(
            "kvkeep_store_breaker_open", "1 while a failing tier is left alone", labels=["tier"]
        )
        self._families.append(breaker)
        for tier in tiers:
            breaker.add_metric([tier["name"]], tier["breaker"] != "closed")
        for key in tiers[0]["counters"]:
            name, text = f"kvkeep_store_{key}", f"A tier's {key.replace('_', ' ')}"
            self._families.append(counter := CounterMetricFamily(name, text, labels=["tier"]))
            for tier in tiers:
                counter.add_metric([tier["name"]], tier["counters"][key])

    def collect(self) -> Iterator[Metric]:
        """What was taken last."""
        return iter(self._families)


def _what_if(cache: CacheStats) -> GaugeMetricFamily:
    gauge = GaugeMetricFamily(
        "kvkeep_what_if_hit_rate",
        "Share of prompt tokens that so many times the memory would have had, by a sample",
        labels=["memory"],
    )
    for point in cache.what_if:
        gauge.add_metric([f"{point.times:g}x"], point.hit_rate)
    return gauge
