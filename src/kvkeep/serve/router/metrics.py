"""The router's Prometheus metrics."""

from __future__ import annotations

from collections import Counter as Counted
from functools import partial
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
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
    from kvkeep.serve.router.costs import CostOutcome
    from kvkeep.serve.router.discovery import Resolution
    from kvkeep.serve.router.expected import ExpectedReturns
    from kvkeep.serve.router.health import Doubt
    from kvkeep.serve.router.prompts import TokenizeOutcome
    from kvkeep.serve.router.router import PrefixRouter, Score
    from kvkeep.serve.router.upstreams import Upstreams

__all__ = ["RouterMetrics"]

_SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5, 2.0)


class RouterMetrics:
    """The router's metrics, in their own registry. No label names a prompt, key or client.

    Only ``tiers`` have their own label; other tier names of instances count as "other". The
    listening server sets ``connections``.
    """

    content_type = CONTENT_TYPE_LATEST

    def __init__(
        self,
        bodies: BodyBudget,
        tiers: Collection[str] = (),
        conversations: ExpectedReturns | None = None,
    ) -> None:
        self.connections: Connections | None = None
        self.bodies = bodies
        self._tiers = frozenset(tiers)
        own = self._registry = CollectorRegistry()
        own.register(_OfHTTP(self))
        if conversations is not None:
            own.register(_OfConversations(conversations))
        counter, gauge = partial(Counter, registry=own), partial(Gauge, registry=own)
        self.requests = counter(
            "kvkeep_router_requests", "Forwarded requests", ["instance", "outcome"]
        )
        self.retries = counter(
            "kvkeep_router_retries", "Requests sent on to another instance", ["instance"]
        )
        self.placed = counter("kvkeep_router_placed", "Placed prompts by criterion", ["by"])
        self.prompt_tokens = counter("kvkeep_router_prompt_tokens", "Tokens of placed prompts")
        self.matched_tokens = counter(
            "kvkeep_router_matched_tokens", "Tokens of placed prompts found cached there", ["tier"]
        )
        self.deciding = Histogram(
            "kvkeep_router_deciding_seconds",
            "Time from a prompt's tokens to its placement",
            buckets=_SECONDS,
            registry=own,
        )
        self._running = gauge("kvkeep_router_running", "Running requests", ["instance"])
        self._waiting = gauge(
            "kvkeep_router_waiting_seconds", "Expected prefill of waiting prompts", ["instance"]
        )
        self._resting = gauge("kvkeep_router_resting", "1: a request failed recently", ["instance"])
        self._suspect = gauge(
            "kvkeep_router_suspect", "1: no requests until it answers a probe", ["instance"]
        )
        self._probes = counter("kvkeep_router_probes", "Health probes", ["instance", "outcome"])
        self._costs = counter(
            "kvkeep_router_costs",
            "Readings of an instance's costs, by what became of them",
            ["instance", "outcome"],
        )
        self._prefill_speed = gauge(
            "kvkeep_router_prefill_token_seconds",
            "Seconds per token of a prompt of 1,000 tokens, as prompts there are scored",
            ["instance"],
        )
        self._doubts = counter(
            "kvkeep_router_doubts", "Times an instance became suspect", ["instance", "why"]
        )
        self._tokenized = counter("kvkeep_router_tokenize", "Requests to /tokenize", ["outcome"])
        self._resolved = counter(
            "kvkeep_router_resolutions",
            "Resolutions of a name at which instances are discovered",
            ["name", "outcome"],
        )
        self._instances = gauge("kvkeep_router_instances", "Instances by state", ["state"])
        self._blocks = gauge("kvkeep_router_blocks", "Blocks in the index, by kind", ["kind"])
        self._held = gauge(
            "kvkeep_router_instance_blocks",
            "Blocks of an instance: known, and evicted from the index at its limit",
            ["instance", "what"],
        )
        self._feed = gauge(
            "kvkeep_router_feed", "Counters of a KV event source", ["instance", "endpoint", "what"]
        )

    def placed_at(self, score: Score, tokens: TokenArray | None) -> None:
        """Count a placed prompt; ``tokens`` is None if they are unknown."""
        by = "load, tokens unknown" if tokens is None else "prefix" if score.tokens else "load"
        self.placed.labels(by).inc()
        self.prompt_tokens.inc(0 if tokens is None else len(tokens))
        for tier, length in score.tiers.items():
            self.matched_tokens.labels(tier if tier in self._tiers else "other").inc(length)

    def doubted(self, instance: str, why: Doubt) -> None:
        """Count an instance that became suspect."""
        self._doubts.labels(instance, why.value).inc()

    def probed(self, instance: str, answered: bool) -> None:
        """Count a probe."""
        self._probes.labels(instance, "answered" if answered else "failed").inc()

    def cost_read(self, instance: str, outcome: CostOutcome) -> None:
        """Count a reading of an instance's costs."""
        self._costs.labels(instance, outcome.value).inc()

    def tokenized(self, outcome: TokenizeOutcome) -> None:
        """Count a request to /tokenize."""
        self._tokenized.labels(outcome.value).inc()

    def resolved(self, name: str, found: Resolution) -> None:
        """Count a resolution of a name."""
        self._resolved.labels(name, "answered" if found.urls else "failed").inc()

    def forget(self, instance: str) -> None:
        """Drop all that has the label of an instance that is gone."""
        for one in (
            self.requests, self.retries, self._running, self._waiting, self._resting,
            self._suspect, self._probes, self._costs, self._prefill_speed, self._doubts,
            self._held, self._feed,
        ):  # fmt: skip
            one.remove_by_labels({"instance": instance})

    def exposition(
        self, router: PrefixRouter, upstreams: Upstreams, reader: EventReader | None
    ) -> bytes:
        """Return all metrics in Prometheus' text format."""
        states = Counted(upstreams.health.state(name) for name in upstreams.health.names())
        for state in InstanceHealth:
            self._instances.labels(state.value).set(states[state])
        for name in upstreams.health.names():
            running, waiting = router.load(name)
            self._running.labels(name).set(running)
            self._waiting.labels(name).set(waiting)
            seconds = router.cost_of(name).prefill.prefill_s(0, 1_000) / 1_000
            self._prefill_speed.labels(name).set(seconds)
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
    """Connections and request bodies of the proxy's own server."""

    def __init__(self, metrics: RouterMetrics) -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        return http_metrics.families(self._metrics.connections, self._metrics.bodies)


class _OfConversations(Collector):
    """What the router knows about conversations."""

    def __init__(self, returns: ExpectedReturns) -> None:
        self._returns = returns

    def collect(self) -> Iterator[Metric]:
        table, total = self._returns.table, self._returns.total
        known = GaugeMetricFamily(
            "kvkeep_router_conversations",
            "Conversations: followed, waiting for their next request, expected within a minute",
            labels=["what"],
        )
        known.add_metric(["followed"], len(table))
        known.add_metric(["waiting"], total.waiting)
        known.add_metric(["expected"], total.expected)
        yield known
        yield CounterMetricFamily(
            "kvkeep_router_conversations_forgotten",
            "Conversations that were dropped because there were too many",
            table.forgotten,
        )
        returned = CounterMetricFamily(
            "kvkeep_router_returns",
            "Requests that continue a conversation, by what it was recognised",
            labels=["by"],
        )
        for by, count in table.returned.items():
            returned.add_metric([by], count)
        yield returned
        ended = CounterMetricFamily(
            "kvkeep_router_answers",
            "Answers by how they ended, and those whose conversations returned",
            labels=["stop", "what"],
        )
        for stop, counts in table.stops.items():
            ended.add_metric([stop, "ended"], counts.ended)
            ended.add_metric([stop, "returned"], counts.returned)
        yield ended
