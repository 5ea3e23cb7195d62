"""Generated traces: workloads with known statistics, from a seed."""

from __future__ import annotations

import math
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

from kvkeep.bench.traces.generators.base import (
    GeneratedTrace,
    PromptSegments,
    SessionScript,
    TrafficModel,
    Turn,
)
from kvkeep.bench.traces.generators.chance import Chance, Table
from kvkeep.bench.traces.generators.coding import CodingAgents
from kvkeep.bench.traces.generators.reasoning import Reasoning
from kvkeep.bench.traces.generators.workloads import API, RAG, Agents, Chat, Tenants
from kvkeep.core.errors import InvalidValue, whole

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

__all__ = [
    "API",
    "KINDS",
    "RAG",
    "Agents",
    "Chance",
    "Chat",
    "CodingAgents",
    "GeneratedTrace",
    "PromptSegments",
    "Reasoning",
    "SessionScript",
    "Table",
    "Tenants",
    "TrafficModel",
    "Turn",
    "generate",
]

_WORKLOADS: dict[str, Callable[[], Any]] = {
    "agent": Agents,
    "agents": CodingAgents,
    "rag": RAG,
    "api": API,
    "chat": Chat,
    "reasoning": Reasoning,
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
    changed: Mapping[str, float] | None = None,
) -> GeneratedTrace:
    """Return a trace of one of `KINDS`; `GeneratedTrace` takes any workload.

    ``changed`` has numbers of the kind that differ from its defaults, by the names of its fields:
    ``{"flood": 4}`` for tenants. Raises `InvalidValue` for a kind or a name that does not exist.
    """
    if kind not in _WORKLOADS:
        raise InvalidValue(f"a kind of traffic is one of {', '.join(KINDS)}; got {kind!r}")
    return GeneratedTrace(
        _changed(_WORKLOADS[kind](), kind, changed or {}),
        seed=seed,
        requests=requests,
        unit_tokens=unit_tokens,
        sessions_per_second=sessions_per_second,
    )


def _changed(workload: Any, kind: str, numbers: Mapping[str, float]) -> TrafficModel:
    """Return a workload with other numbers."""
    own = {field.name: getattr(workload, field.name) for field in fields(workload)}
    known = {name: value for name, value in own.items() if type(value) in (int, float)}
    checked: dict[str, float] = {}
    for name, value in numbers.items():
        if name not in known:
            raise InvalidValue(f"{kind} has no number {name!r}; it has {', '.join(known)}")
        if type(known[name]) is int:
            checked[name] = whole(name, value, 1)
        elif not 0 <= value < math.inf:
            raise InvalidValue(f"{name} is {value}; a number of at least 0 is needed")
        else:
            checked[name] = float(value)
    changed: TrafficModel = replace(workload, **checked)
    return changed
