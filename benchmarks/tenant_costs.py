"""What budgets of pins cost: time and memory, without a model.

    python benchmarks/tenant_costs.py

Each figure is the median of several runs. Everything is seeded by its construction.
"""

from __future__ import annotations

import tracemalloc
from statistics import median
from time import monotonic, perf_counter
from typing import TYPE_CHECKING

import numpy as np

from kvkeep.core.keys import Namespace
from kvkeep.serve.server.pin_budget import PinBudget

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvkeep.core.tokens import TokenArray
    from kvkeep.serve.server.pin_units import KeptUnit

PAGE = 16
PROMPT = 20_000
FAR = 1_000_000


class NoPins:
    """Pins that cost nothing, so that the budget alone is measured."""

    def pin(self, kept: KeptUnit, tokens: TokenArray, seconds: float) -> int:
        """Say that all is pinned."""
        return len(tokens)

    def unpin(self, kept: KeptUnit, start: int) -> None:
        """Do nothing."""


def budget(most_each: int, most: int) -> PinBudget:
    """Return an empty budget."""
    return PinBudget(NoPins(), unit=PAGE, most_each=most_each, most=most, clock=monotonic)


def keep(pins: PinBudget, tenant: str, begin: int, tokens: int) -> None:
    """Keep a prompt of a tenant."""
    row = np.arange(begin, begin + tokens, dtype=np.int32)
    pins.keep(row, Namespace(tenant=tenant), [(tokens, 300.0)])


def timed(call: Callable[[int], object], runs: int = 15) -> float:
    """Return the median of milliseconds of ``call(number)``."""
    times = []
    for number in range(runs):
        begun = perf_counter()
        call(number)
        times.append(perf_counter() - begun)
    return median(times) * 1e3


def memory() -> float:
    """Return the bytes of a kept page with its tokens."""
    tracemalloc.start()
    pins = budget(FAR, FAR)
    before = tracemalloc.get_traced_memory()[0]
    for number in range(20):
        keep(pins, str(number), number * FAR // 10, PAGE * 1000)
    taken = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    return taken / pins.units


def main() -> None:
    """Measure and print."""
    print(f"a kept page of {PAGE} tokens: {memory():.0f} bytes")
    pins = budget(FAR, FAR)
    keep(pins, "a", 0, PROMPT)
    again = timed(lambda number: keep(pins, "a", 0, PROMPT))
    print(f"a prompt of {PROMPT:,} tokens again: {again:.2f} ms")
    new = timed(lambda number: keep(pins, str(number), 0, PROMPT))
    print(f"a new prompt of {PROMPT:,} tokens: {new:.2f} ms")

    full = budget(5000, 50_000)
    for number in range(100):
        keep(full, str(number), number * FAR // 10, PAGE * 500)
    taking = timed(lambda number: keep(full, f"new {number}", FAR * 20, PROMPT), 5)
    print(f"the same in place of 100 tenants with 500 pages each: {taking:.2f} ms")
    crowd = budget(5000, 50_000)
    for number in range(50_000):
        keep(crowd, str(number), number, PAGE)
    in_vain = timed(lambda number: keep(crowd, f"new {number}", FAR, PROMPT))
    print(f"the same beside 50,000 tenants with a page each: {in_vain:.2f} ms")


if __name__ == "__main__":
    main()
