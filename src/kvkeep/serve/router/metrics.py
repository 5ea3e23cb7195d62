"""The router's Prometheus metrics."""

from __future__ import annotations

from collections import Counter as Counted
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from kvkeep.serve.http import metrics as http_metrics
from kvkeep.serve.router.health import InstanceHealth
from kvkeep.serve.router.router import Text

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping

    from kvkeep.core.tokens import TokenArray
    from kvkeep.serve.http import BodyBudget, Connections
    from kvkeep.serve.kv_events import EventReader
    from kvkeep.serve.router.health import Doubt
    from kvkeep.serve.router.membership import Resolution
    from kvkeep.serve.router.router import PrefixRouter, RouterStats, Score

__all__ = ["RouterMetrics"]

_SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5, 2.0)


class RouterMetrics:
    """The router's metrics, in their own registry. No label names a prompt, key or client.

    Only ``tiers`` have their own label; other tier names of instances count as "other". The
    listening server sets ``connections``.
    """

    content_type = CONTENT_TYPE_LATEST

    def __init__(self, bodies: BodyBudget, tiers: Collection[str] = ()) -> None:
        self.connections: Connections | None = None
        self.bodies = bodies
        self._tiers = frozenset(tiers)
        own = self._registry = CollectorRegistry()
        counter = partial(Counter, registry=own)
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
        self._probes = counter("kvkeep_router_probes", "Health probes", ["instance", "outcome"])
        self._doubts = counter(
            "kvkeep_router_doubts", "Times an instance became suspect", ["instance", "why"]
        )
        self._resolved = counter(
            "kvkeep_router_resolutions",
            "Resolutions of a name at which instances are discovered",
            ["name", "outcome"],
        )

    def placed_at(self, score: Score, tokens: TokenArray | Text | None) -> None:
        """Count a placed prompt; ``tokens`` is None if it is unknown."""
        by = "load, tokens unknown" if tokens is None else "load"
        if score.tokens:
            by = "text" if isinstance(tokens, Text) else "prefix"
        self.placed.labels(by).inc()
        self.prompt_tokens.inc(0 if tokens is None else len(tokens))
        for tier, held in score.tiers.items():
            self.matched_tokens.labels(tier if tier in self._tiers else "other").inc(held)

    def doubted(self, instance: str, why: Doubt) -> None:
        """Count an instance that became suspect."""
        self._doubts.labels(instance, why.value).inc()

    def probed(self, instance: str, answered: bool) -> None:
        """Count a probe."""
        self._probes.labels(instance, "answered" if answered else "failed").inc()

    def resolved(self, name: str, resolution: Resolution) -> None:
        """Count a resolution of a name."""
        self._resolved.labels(name, "answered" if resolution.urls else "failed").inc()

    def forget(self, instance: str) -> None:
        """Drop all that has the label of an instance that is gone."""
        for counter in (self.requests, self.retries, self._probes, self._doubts):
            counter.remove_by_labels({"instance": instance})

    def exposition(
        self,
        states: Mapping[str, InstanceHealth],
        router: PrefixRouter,
        reader: EventReader | None,
    ) -> bytes:
        """Return all metrics in Prometheus' text format; ``states`` are those of the instances.

        Thread safety: any thread. Cost: 100 µs an instance, so call it outside of the event loop.
        """
        families = [
            *self._registry.collect(),
            *http_metrics.families(self.connections, self.bodies),
            *_of_instances(states, router),
            _of_index(router.stats()),
            _of_feeds(reader),
        ]
        text: bytes = generate_latest(SimpleNamespace(collect=lambda: families))
        return text


def _of_instances(
    states: Mapping[str, InstanceHealth], router: PrefixRouter
) -> Iterator[GaugeMetricFamily]:
    counts = Counted(states.values())
    by_state = GaugeMetricFamily("kvkeep_router_instances", "Instances by state", labels=["state"])
    for state in InstanceHealth:
        by_state.add_metric([state.value], counts[state])
    yield by_state
    running = _gauge("running", "Running requests")
    waiting = _gauge("waiting_seconds", "Expected prefill of waiting prompts")
    resting = _gauge("resting", "1: a request failed recently")
    suspect = _gauge("suspect", "1: no requests until it answers a probe")
    blocks = _gauge(
        "instance_blocks",
        "Blocks of an instance: announced (known), routed, and evicted from the index at its limit",
        "what",
    )
    for name, state in states.items():
        requests, seconds = router.load(name)
        running.add_metric([name], requests)
        waiting.add_metric([name], seconds)
        resting.add_metric([name], state is InstanceHealth.RESTING)
        suspect.add_metric([name], state is InstanceHealth.SUSPECT)
        known, evicted = router.blocks(name)
        routed = router.routed(name)
        for what, count in (("known", known), ("routed", routed), ("evicted", evicted)):
            blocks.add_metric([name, what], count)
    yield from (running, waiting, resting, suspect, blocks)


def _gauge(name: str, text: str, *labels: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"kvkeep_router_{name}", text, labels=["instance", *labels])


def _of_index(stats: RouterStats) -> GaugeMetricFamily:
    blocks = GaugeMetricFamily(
        "kvkeep_router_blocks", "Blocks in the index, by kind", labels=["kind"]
    )
    for kind in ("blocks", "prefixes", "orphans", "refused", "skipped", "evicted"):
        blocks.add_metric([kind], getattr(stats, kind))
    return blocks


def _of_feeds(reader: EventReader | None) -> GaugeMetricFamily:
    feed = _gauge("feed", "Counters of a KV event source", "endpoint", "what")
    for source, stats in (reader.stats() if reader is not None else {}).items():
        for what, number in stats.as_dict().items():
            feed.add_metric([source.instance, source.endpoint, what], number)
    return feed
