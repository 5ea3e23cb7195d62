"""The cost of a capacity, and its saving, from prices that the user gives."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvkeep.core.errors import InvalidValue

if TYPE_CHECKING:
    from kvkeep.bench.replay.outcome import Outcome

__all__ = ["FORMULA", "HOURS", "Cost", "Prices"]

HOURS = 730.5
"""Hours per month: 365.25 days × 24 hours / 12."""
_GIB = 1024**3

FORMULA = (
    "cost of a month = memory + disk + GPU time. "
    "Memory = capacity in tokens × bytes per token ÷ 2³⁰ × price of a GiB of memory. "
    "With tiers, memory counts the capacity of the memory tiers, and disk that of all others, at "
    "the price of a GiB of disk. "
    f"GPU time = computed tokens ÷ tokens prefilled per second ÷ 3600 × ({HOURS:g} h ÷ hours of "
    "the trace) × price of a GPU hour. Only prefill is counted: generating costs the same whatever "
    "is reused."
)


@dataclass(frozen=True, slots=True)
class Cost:
    """The cost of a month, by part."""

    memory: float
    disk: float
    gpu: float

    @property
    def total(self) -> float:
        """The sum of all parts."""
        return self.memory + self.disk + self.gpu


@dataclass(frozen=True, slots=True)
class Prices:
    """Prices in one currency; `FORMULA` explains how costs are computed from them.

    ``gpu_hour`` is the price of the GPUs that together prefill ``prefill_tokens_per_s``.
    ``kv_bytes_per_token`` is what `kvkeep size` prints. Raises `InvalidValue` for values that are
    negative or no numbers, and for 0 where it would be a divisor.
    """

    gpu_hour: float
    memory_gib_month: float
    disk_gib_month: float
    kv_bytes_per_token: float
    prefill_tokens_per_s: float
    currency: str = "$"

    def __post_init__(self) -> None:
        for name in ("gpu_hour", "memory_gib_month", "disk_gib_month"):
            self._check(name, zero=True)
        for name in ("kv_bytes_per_token", "prefill_tokens_per_s"):
            self._check(name, zero=False)

    def _check(self, name: str, *, zero: bool) -> None:
        value = getattr(self, name)
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or not math.isfinite(value) or value < 0 or (value == 0 and not zero):
            least = "of at least zero" if zero else "above zero"
            raise InvalidValue(f"{name} is {value!r}; a number {least} is needed")

    def month(self, outcome: Outcome, span_s: float) -> Cost | None:
        """Return the cost of a month of such traffic; None if the trace has no duration."""
        if span_s <= 0:
            return None
        memory, disk = 0, 0
        for tier in outcome.tiers:
            if str(tier.get("name", "")).startswith("memory"):
                memory += _room(tier, outcome.page_tokens)
            else:
                disk += _room(tier, outcome.page_tokens)
        if not outcome.tiers:
            memory = outcome.capacity_tokens
        gib = self.kv_bytes_per_token / _GIB
        return Cost(
            memory=memory * gib * self.memory_gib_month,
            disk=disk * gib * self.disk_gib_month,
            gpu=self._gpu(outcome.tokens - outcome.hit_tokens, span_s),
        )

    def nothing_kept(self, outcome: Outcome, span_s: float) -> Cost | None:
        """Return the monthly cost without a cache: all prompt tokens computed, no memory paid."""
        if span_s <= 0:
            return None
        return Cost(memory=0.0, disk=0.0, gpu=self._gpu(outcome.tokens, span_s))

    def _gpu(self, tokens: int, span_s: float) -> float:
        months = span_s / 3600 / HOURS
        return tokens / self.prefill_tokens_per_s / 3600 / months * self.gpu_hour


def _room(tier: dict[str, Any], page_tokens: int) -> int:
    """Return the tokens that fit into a tier: its capacity in blocks, or else its blocks."""
    return int(tier.get("capacity", tier.get("blocks", 0))) * page_tokens
