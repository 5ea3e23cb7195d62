"""`ServerMetrics`: counters and histograms of requests, and the exposition for Prometheus."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, Final

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_1_0_0
from prometheus_client.registry import Collector

from kvkeep.observe.usage import UsageTable
from kvkeep.observe.usage.history import WARM
from kvkeep.serve.http import metrics as http_metrics
from kvkeep.serve.server import families

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from prometheus_client.core import Metric

    from kvkeep.core.cache import CacheStats
    from kvkeep.observe.usage import TenantLedger
    from kvkeep.serve.http import BodyBudget, Connections
    from kvkeep.serve.server.engine_costs import EngineCosts
    from kvkeep.serve.server.pins import PoolPins, StorePins

__all__ = ["ServerMetrics"]

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
_STEP_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)


class ServerMetrics:
    """One server's metrics, in their own registry.

    ``usage`` counts reuse. The attributes set later add families: ``events``
    returns a publisher's figures (`PublisherStats.as_dict`), ``reasons`` the computed tokens by
    reason since the start (an explainer's), ``tenants`` counts by tenant, ``pool_pins``
    and ``tier_pins`` keep prefixes, ``costs`` are what the engine has learned, ``connections`` and
    ``bodies`` are the HTTP server's.

    Thread safety: all methods.
    """

    content_type: Final = CONTENT_TYPE_PLAIN_1_0_0

    def __init__(self, usage: UsageTable | None = None) -> None:
        self._registry = registry = CollectorRegistry()
        self._state = _State()
        registry.register(self._state)
        self._exposing = threading.Lock()
        self.usage = UsageTable() if usage is None else usage
        self.events: Callable[[], Mapping[str, int]] | None = None
        self.reasons: Callable[[], Mapping[str, int]] | None = None
        self.tenants: TenantLedger | None = None
        self.pool_pins: PoolPins | None = None
        self.tier_pins: StorePins | None = None
        self.costs: EngineCosts | None = None
        self.connections: Connections | None = None
        self.bodies: BodyBudget | None = None
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
            "kvkeep_cached_tokens",
            "Prompt tokens of finished requests that were reused",
            registry=registry,
        )
        self.loaded_tokens = Counter(
            "kvkeep_loaded_tokens",
            "Prompt tokens of finished requests that were reused from the store",
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
        self._by_warmth = Histogram(
            "kvkeep_time_to_first_token_by_warmth_seconds",
            "From a request's arrival to its first token; warm: half of its prompt or more was "
            "reused",
            ["warmth"],
            buckets=_SECONDS,
            registry=registry,
        )
        self._cold, self._warm = map(self._by_warmth.labels, ("cold", "warm"))
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

    def note_first_token(self, seconds: float, *, prompt_tokens: int, reused_tokens: int) -> None:
        """Count a request's time to its first token, here and in the usage table."""
        self.usage.note_first_token(
            seconds, prompt_tokens=prompt_tokens, reused_tokens=reused_tokens
        )
        self.first_token.observe(seconds)
        warm = reused_tokens >= WARM * prompt_tokens
        (self._warm if warm else self._cold).observe(seconds)

    def exposition(
        self,
        cache: CacheStats,
        engine: Mapping[str, float],
        store: Mapping[str, Any] | None = None,
    ) -> bytes:
        """Return the text that Prometheus reads, with the figures given.

        Cost: below two milliseconds.
        """
        with self._exposing:
            found: list[Metric] = [*families.of_cache(cache), *families.of_engine(engine)]
            found += families.of_reuse(self.usage.moment().reuse)
            if self.reasons is not None:
                found += families.of_computed(self.reasons())
            if self.events is not None:
                found += families.of_events(self.events())
            if store is not None:
                found += families.of_store(engine, store)
            if self.costs is not None:
                found += families.of_costs(self.costs)
            if self.pool_pins is not None:
                found += families.of_pool_pins(self.pool_pins)
            if self.tier_pins is not None:
                found += families.of_tier_pins(self.tier_pins)
            if self.tenants is not None:
                found += families.of_tenants(self.tenants.series(families.MOST_NAMES))
            found += http_metrics.families(self.connections, self.bodies)
            self._state.families = found
            return generate_latest(self._registry)


class _State(Collector):
    """The families of the latest exposition that are read from cache, engine and store."""

    def __init__(self) -> None:
        self.families: list[Metric] = []

    def collect(self) -> Iterator[Metric]:
        """Return the latest families."""
        return iter(self.families)
