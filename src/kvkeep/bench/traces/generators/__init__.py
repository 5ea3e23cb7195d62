"""Traces that are made: workloads whose statistics are known, from a seed."""

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
"""The names of the workloads that `generate` makes."""


def generate(
    kind: str,
    *,
    seed: int,
    requests: int,
    unit_tokens: int = 16,
    sessions_per_second: float | None = None,
) -> GeneratedTrace:
    """A trace of one of `KINDS` as it is by default; `GeneratedTrace` takes one of your own."""
    if kind not in _WORKLOADS:
        raise InvalidValue(f"a kind of traffic is one of {', '.join(KINDS)}; got {kind!r}")
    return GeneratedTrace(
        _WORKLOADS[kind](),
        seed=seed,
        requests=requests,
        unit_tokens=unit_tokens,
        sessions_per_second=sessions_per_second,
    )
