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
from kvkeep.bench.traces.generators.chat import Chat
from kvkeep.bench.traces.generators.coding import CodingAgents
from kvkeep.core.errors import InvalidValue

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = [
    "KINDS",
    "Chance",
    "Chat",
    "CodingAgents",
    "GeneratedTrace",
    "PromptSegments",
    "SessionScript",
    "Table",
    "TrafficModel",
    "Turn",
    "generate",
]

_WORKLOADS: dict[str, Callable[[], TrafficModel]] = {"agents": CodingAgents, "chat": Chat}
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
    """Return a trace of one of `KINDS`; `GeneratedTrace` takes any workload.

    Raises `InvalidValue` for a kind that does not exist.
    """
    if kind not in _WORKLOADS:
        raise InvalidValue(f"a kind of traffic is one of {', '.join(KINDS)}; got {kind!r}")
    return GeneratedTrace(
        _WORKLOADS[kind](),
        seed=seed,
        requests=requests,
        unit_tokens=unit_tokens,
        sessions_per_second=sessions_per_second,
    )
