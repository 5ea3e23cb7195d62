"""Prometheus metrics of connections and request bodies."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from kvkeep.serve.http.connections import Phase

if TYPE_CHECKING:
    from collections.abc import Iterator

    from prometheus_client.core import Metric

    from kvkeep.serve.http.bodies import BodyBudget
    from kvkeep.serve.http.connections import Connections

__all__ = ["families"]


def families(connections: Connections | None, bodies: BodyBudget | None) -> Iterator[Metric]:
    """Yield the metrics of ``connections`` and ``bodies``, each unless None."""
    if connections is not None:
        phases = GaugeMetricFamily(
            "kvkeep_http_connections",
            "Open connections by what they wait for: head, idle, body, answer",
            labels=["phase"],
        )
        for phase in Phase:
            phases.add_metric([phase.value], connections.waiting(phase))
        yield phases
        yield CounterMetricFamily(
            "kvkeep_http_accepted", "Connections accepted", connections.accepted
        )
        yield CounterMetricFamily(
            "kvkeep_http_accept_errors",
            "Failed accept calls, for want of files or memory",
            connections.accept_errors,
        )
        yield _by_reason(
            "kvkeep_http_closed",
            "Connections closed by the server: head_timeout, displaced (by a new one at the "
            "limit), refused (at the limit), unread (a response), stalled (during a response)",
            connections.closed,
        )
    if bodies is not None:
        yield GaugeMetricFamily(
            "kvkeep_http_body_bytes", "Counted bytes of request bodies in memory", bodies.held
        )
        yield _by_reason(
            "kvkeep_http_bodies_refused",
            "Refused request bodies: too_large (413), late (408), budget (503)",
            bodies.refused,
        )


def _by_reason(name: str, text: str, counts: dict[str, int]) -> Metric:
    counter = CounterMetricFamily(name, text, labels=["reason"])
    for reason, count in counts.items():
        counter.add_metric([reason], count)
    return counter
