"""What is plainly true: an LRU memory of blocks that keeps prefixes, as a dictionary."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence


class PlainMemory:
    """``capacity`` blocks; a prompt hits its leading blocks that are there."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.asked = self.hits = 0
        self._blocks: OrderedDict[Hashable, None] = OrderedDict()

    def prompt(self, blocks: Sequence[Hashable]) -> None:
        self.asked += len(blocks)
        self.hits += next(
            (at for at, one in enumerate(blocks) if one not in self._blocks), len(blocks)
        )
        self.used(blocks)

    def used(self, blocks: Sequence[Hashable]) -> None:
        for one in reversed(blocks):
            self._blocks[one] = None
            self._blocks.move_to_end(one)
        while len(self._blocks) > self.capacity:
            self._blocks.popitem(last=False)

    @property
    def hit_rate(self) -> float:
        return self.hits / self.asked if self.asked else 0.0


def plain_rates(prompts: Sequence[Sequence[Hashable]], capacities: Sequence[int]) -> list[float]:
    """The hit rate of each capacity, one simulation for each."""
    rates = []
    for capacity in capacities:
        memory = PlainMemory(capacity)
        for one in prompts:
            memory.prompt(one)
        rates.append(memory.hit_rate)
    return rates


def words_of(numbers: np.ndarray, seed: int) -> np.ndarray:
    """A key that is chance for each number."""
    chance = np.random.default_rng(seed)
    table = chance.integers(0, 2**64, int(numbers.max()) + 1, dtype=np.uint64)
    return table[numbers]
