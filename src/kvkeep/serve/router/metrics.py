"""The router's Prometheus metrics."""

from __future__ import annotations

import threading
from collections import Counter as Counted
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector

from kvkeep.serve.http import metrics as http_metrics
from kvkeep.serve.router.health import InstanceHealth

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping

    from prometheus_client.core import Metric

    from kvkeep.core.tokens import TokenArray
    from kvkeep.serve.http import BodyBudget, Connections
    from kvkeep.serve.kv_events import EventReader
    from kvkeep.serve.router.health import Doubt
    from kvkeep.serve.router.membership import Resolution
    from kvkeep.serve.router.prompts import TokenizeOutcome
    from kvkeep.serve.router.router import PrefixRouter, RouterStats, Score
    from kvkeep.serve.router.upstreams import Upstreams

__all__ = ["RouterFigures", "RouterMetrics"]

_SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5, 2.0)


class RouterFigures(NamedTuple):
    """What the event loop alone may read: states of instances, and small families."""

    states: dict[str, InstanceHealth]
    families: list[Metric]


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
        self._exposing = threading.Lock()
        own = self._registry = CollectorRegistry()
        self._read = _Read()
        own.register(self._read)
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
        self._tokenized = counter("kvkeep_router_tokenize", "Requests to /tokenize", ["outcome"])
        self._resolved = counter(
            "kvkeep_router_resolutions",
            "Resolutions of a name at which instances are discovered",
            ["name", "outcome"],
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

    def tokenized(self, outcome: TokenizeOutcome) -> None:
        """Count a request to /tokenize."""
        self._tokenized.labels(outcome.value).inc()

    def resolved(self, name: str, found: Resolution) -> None:
        """Count a resolution of a name."""
        self._resolved.labels(name, "answered" if found.urls else "failed").inc()

    def forget(self, instance: str) -> None:
        """Drop all that has the label of an instance that is gone."""
        for one in (self.requests, self.retries, self._probes, self._doubts):
            one.remove_by_labels({"instance": instance})

    def seen(self, upstreams: Upstreams) -> RouterFigures:
        """Return what only the event loop may read. Cost: 1 µs an instance."""
        found = [*http_metrics.families(self.connections, self.bodies)]
        health = upstreams.health
        return RouterFigures({name: health.state(name) for name in health.names()}, found)

    def exposition(
        self, seen: RouterFigures, router: PrefixRouter, reader: EventReader | None
    ) -> bytes:
        """Return all metrics in Prometheus' text format.

        Thread safety: any thread. Cost: 50 µs an instance, so call it outside of the event loop.
        """
        found = [*seen.families, _of_states(seen.states), _of_index(router.stats())]
        feed = GaugeMetricFamily(
            "kvkeep_router_feed",
            "Counters of a KV event source",
            labels=["instance", "endpoint", "what"],
        )
        for source, stats in (reader.stats() if reader is not None else {}).items():
            for what, number in stats.as_dict().items():
                feed.add_metric([source.instance, source.endpoint, what], number)
        with self._exposing:
            self._read.families = [*found, feed]
            text = generate_latest(self._registry)
        return text + _of_instances(seen.states, router).encode()


class _Read(Collector):
    """The families of the latest exposition that are read from router, proxy and reader."""

    def __init__(self) -> None:
        self.families: list[Metric] = []

    def collect(self) -> Iterator[Metric]:
        return iter(self.families)


def _of_instances(states: Mapping[str, InstanceHealth], router: PrefixRouter) -> str:
    """Return the text of what is known of each instance.

    Written here, since the client takes ten times as long, and there may be a thousand.
    """
    names = {name: f'instance="{_escaped(name)}"' for name in states}
    load = {name: router.load(name) for name in states}
    held = {name: router.blocks(name) for name in states}
    told: list[tuple[str, str, Callable[[str], float]]] = [
        ("running", "Running requests", lambda name: load[name][0]),
        ("waiting_seconds", "Expected prefill of waiting prompts", lambda name: load[name][1]),
        (
            "resting",
            "1: a request failed recently",
            lambda name: states[name] is InstanceHealth.RESTING,
        ),
        (
            "suspect",
            "1: no requests until it answers a probe",
            lambda name: states[name] is InstanceHealth.SUSPECT,
        ),
    ]
    lines: list[str] = []
    for what, text, value in told:
        lines += _head(metric := f"kvkeep_router_{what}", text)
        lines += (f"{metric}{{{label}}} {float(value(name))!r}" for name, label in names.items())
    lines += _head(
        metric := "kvkeep_router_instance_blocks",
        "Blocks of an instance: known, and evicted from the index at its limit",
    )
    for name, label in names.items():
        for kind, count in zip(("known", "evicted"), held[name], strict=True):
            lines.append(f'{metric}{{{label},what="{kind}"}} {float(count)!r}')
    return "".join(f"{line}\n" for line in lines)


def _head(metric: str, text: str) -> tuple[str, str]:
    return f"# HELP {metric} {text}", f"# TYPE {metric} gauge"


def _escaped(label: str) -> str:
    return label.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')


def _of_states(states: Mapping[str, InstanceHealth]) -> GaugeMetricFamily:
    counted = Counted(states.values())
    gauge = GaugeMetricFamily("kvkeep_router_instances", "Instances by state", labels=["state"])
    for state in InstanceHealth:
        gauge.add_metric([state.value], counted[state])
    return gauge


def _of_index(known: RouterStats) -> GaugeMetricFamily:
    blocks = GaugeMetricFamily(
        "kvkeep_router_blocks", "Blocks in the index, by kind", labels=["kind"]
    )
    for kind in ("blocks", "prefixes", "orphans", "refused", "skipped", "evicted"):
        blocks.add_metric([kind], getattr(known, kind))
    return blocks
