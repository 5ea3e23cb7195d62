"""What Prometheus is told: counters and histograms of requests, and gauges read when it asks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

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

    def exposition(self, cache: CacheStats, engine: Mapping[str, float]) -> bytes:
        """The text that Prometheus reads, with the state given. Cost: well below a millisecond."""
        self._state.take(cache, engine)
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

    def collect(self) -> Iterator[Metric]:
        """What was taken last."""
        return iter(self._families)
