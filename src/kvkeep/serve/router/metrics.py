"""What a router counts, in Prometheus' terms."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector

from kvkeep.serve.http import metrics as http_metrics
from kvkeep.serve.router.health import InstanceHealth

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from prometheus_client.core import Metric

    from kvkeep.core.tokens import TokenArray
    from kvkeep.serve.http import BodyBudget, Connections
    from kvkeep.serve.kv_events import EventReader
    from kvkeep.serve.router.health import Doubt
    from kvkeep.serve.router.prompts import TokenizeOutcome
    from kvkeep.serve.router.router import PrefixRouter, Score
    from kvkeep.serve.router.upstreams import Upstreams

__all__ = ["RouterMetrics"]

_SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5, 2.0)


class RouterMetrics:
    """A registry of its own; nothing of it names a prompt, a key or a client.

    ``tiers`` have a label of their own; whatever else instances call theirs is "other". The server
    that listens sets ``connections``.
    """

    content_type = CONTENT_TYPE_LATEST

    def __init__(self, bodies: BodyBudget, tiers: Collection[str] = ()) -> None:
        self.connections: Connections | None = None
        self.bodies = bodies
        self._tiers = frozenset(tiers)
        own = self._registry = CollectorRegistry()
        own.register(_OfHTTP(self))
        self.requests = Counter(
            "kvkeep_router_requests", "Requests sent on", ["instance", "outcome"], registry=own
        )
        self.retries = Counter(
            "kvkeep_router_retries", "Requests sent to another one", ["instance"], registry=own
        )
        self.placed = Counter(
            "kvkeep_router_placed", "Prompts placed, by what was known", ["by"], registry=own
        )
        self.prompt_tokens = Counter(
            "kvkeep_router_prompt_tokens", "Tokens of prompts that were placed", registry=own
        )
        self.matched_tokens = Counter(
            "kvkeep_router_matched_tokens", "Of them: there already", ["tier"], registry=own
        )
        self.deciding = Histogram(
            "kvkeep_router_deciding_seconds",
            "Tokens to place",
            buckets=_SECONDS,
            registry=own,
        )
        self._running = Gauge("kvkeep_router_running", "Requests", ["instance"], registry=own)
        self._waiting = Gauge(
            "kvkeep_router_waiting_seconds", "Prefill expected", ["instance"], registry=own
        )
        self._resting = Gauge(
            "kvkeep_router_resting", "1: it failed of late", ["instance"], registry=own
        )
        self._suspect = Gauge(
            "kvkeep_router_suspect",
            "1: the instance gets no requests until it answers a probe",
            ["instance"],
            registry=own,
        )
        self._probes = Counter(
            "kvkeep_router_probes", "Probes of health", ["instance", "outcome"], registry=own
        )
        self._doubts = Counter(
            "kvkeep_router_doubts",
            "Times an instance became suspect, by reason",
            ["instance", "why"],
            registry=own,
        )
        self._tokenized = Counter(
            "kvkeep_router_tokenize", "Questions to /tokenize", ["outcome"], registry=own
        )
        self._blocks = Gauge("kvkeep_router_blocks", "Blocks known", ["kind"], registry=own)
        self._held = Gauge(
            "kvkeep_router_instance_blocks",
            "Blocks of an instance: known, and forgotten since they were too many",
            ["instance", "what"],
            registry=own,
        )
        self._feed = Gauge(
            "kvkeep_router_feed", "Of events", ["instance", "endpoint", "what"], registry=own
        )

    def placed_at(self, score: Score, tokens: TokenArray | None) -> None:
        """A prompt goes there; None where its tokens are not known."""
        by = "load, tokens unknown" if tokens is None else "prefix" if score.tokens else "load"
        self.placed.labels(by).inc()
        self.prompt_tokens.inc(0 if tokens is None else len(tokens))
        for tier, length in score.tiers.items():
            self.matched_tokens.labels(tier if tier in self._tiers else "other").inc(length)

    def doubted(self, instance: str, why: Doubt) -> None:
        """An instance became suspect."""
        self._doubts.labels(instance, why.value).inc()

    def probed(self, instance: str, answered: bool) -> None:
        """A probe was answered, or not."""
        self._probes.labels(instance, "answered" if answered else "failed").inc()

    def tokenized(self, came: TokenizeOutcome) -> None:
        """An instance was asked for tokens."""
        self._tokenized.labels(came.value).inc()

    def exposition(
        self, router: PrefixRouter, upstreams: Upstreams, reader: EventReader | None
    ) -> bytes:
        """Prometheus' text format."""
        for name in upstreams.names:
            running, waiting = router.load(name)
            self._running.labels(name).set(running)
            self._waiting.labels(name).set(waiting)
            held, evicted = router.blocks(name)
            self._held.labels(name, "known").set(held)
            self._held.labels(name, "evicted").set(evicted)
            state = upstreams.health.state(name)
            self._resting.labels(name).set(state is InstanceHealth.RESTING)
            self._suspect.labels(name).set(state is InstanceHealth.SUSPECT)
        known = router.stats()
        for kind in ("blocks", "prefixes", "orphans", "refused", "skipped", "evicted"):
            self._blocks.labels(kind).set(getattr(known, kind))
        for source, stats in (reader.stats() if reader is not None else {}).items():
            for what, number in stats.as_dict().items():
                self._feed.labels(source.instance, source.endpoint, what).set(number)
        return generate_latest(self._registry)


class _OfHTTP(Collector):
    """The connections and bodies of the proxy's own server."""

    def __init__(self, metrics: RouterMetrics) -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        """As they are now."""
        return http_metrics.families(self._metrics.connections, self._metrics.bodies)
