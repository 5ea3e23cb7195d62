"""Generated traces: workloads with known statistics, from a seed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvkeep.bench.traces.generators.base import (
    GeneratedTrace,
    PromptSegments,
    SessionScript,
    TrafficModel,
    Turn,
)
from kvkeep.bench.traces.generators.chance import Chance, Table
from kvkeep.bench.traces.generators.workloads import API, RAG, Agents, Chat, Tenants
from kvkeep.core.errors import InvalidValue

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = [
    "API",
    "KINDS",
    "RAG",
    "Agents",
    "Chance",
    "Chat",
    "GeneratedTrace",
    "PromptSegments",
    "SessionScript",
    "Table",
    "Tenants",
    "TrafficModel",
    "Turn",
    "generate",
]

_WORKLOADS: dict[str, Callable[[], TrafficModel]] = {
    "agent": Agents,
    "rag": RAG,
    "api": API,
    "chat": Chat,
    "tenants": Tenants,
}
KINDS = tuple(_WORKLOADS)
"""Names of the workloads for `generate`."""


def generate(
    kind: str,
    *,
    seed: int,
    requests: int,
    unit_tokens: int = 16,
    sessions_per_second: float | None = None,
) -> GeneratedTrace:
    """Return a trace of one of `KINDS` with its defaults; `GeneratedTrace` takes any workload."""
    if kind not in _WORKLOADS:
        raise InvalidValue(f"a kind of traffic is one of {', '.join(KINDS)}; got {kind!r}")
    return GeneratedTrace(
        _WORKLOADS[kind](),
        seed=seed,
        requests=requests,
        unit_tokens=unit_tokens,
        sessions_per_second=sessions_per_second,
    )
