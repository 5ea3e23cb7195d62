"""T-LRU: what a conversation can lose without its next answer being late goes first."""

from __future__ import annotations

import math

from kvkeep.core.errors import whole
from kvkeep.core.eviction.base import Entry, EvictionPolicy
from kvkeep.core.eviction.queues import AgeQueue

__all__ = ["TLRU"]

# Each continuation counts so much in what the next one is expected to add.
_WEIGHT = 1 / 128


class TLRU(EvictionPolicy):
    """LRU, but first goes what leaves no more than ``spare_tokens`` to compute for the next turn.

    A conversation that was ``length`` long and goes on is expected to add what continuations add
    on average. So much is computed anyway; of what is cached, its end may go while both together
    stay within the budget: short conversations lose all, long ones the last of their tokens. That
    costs hits and buys that fewer prompts exceed the budget, which is what the slowest times to
    the first token are made of. (Zhang, Li, Moallemi, Peng: Tail-Optimized Caching for LLM
    Inference, 2025.)

    With a budget below what continuations add it is LRU. ``block_tokens`` are the tokens of a
    block, as `fit` is told of it: 512 unless the cache was made with other ``block_pages``.
    """

    name = "tlru"
    portions = True

    def __init__(self, spare_tokens: int = 8192, block_tokens: int = 512) -> None:
        super().__init__()
        self.spare_tokens = whole("spare_tokens", spare_tokens, 0)
        self.block_tokens = whole("block_tokens", block_tokens, 1)
        self._budget = 0.0  # in pages; until `fit` says how large those are, it is LRU
        self._added: float | None = None  # pages that a continuation adds, on average
        self._spare = AgeQueue[float]()
        self._needed = AgeQueue[float]()

    def fit(self, size: int, block: int) -> None:
        """It serves a memory of ``size``, in blocks of ``block``."""
        self._budget = self.spare_tokens / self.block_tokens * block

    # --- what is known of entries: how long the longest conversation through it was ---------------

    def stored(self, entry: Entry, priority: int, *, known: bool = False) -> None:
        """A conversation is as long as this.

        It goes on, if it adds less than there was: what follows on a system prompt begins one.
        """
        super().stored(entry, priority, known=known)
        if entry.depth >= entry.size:
            self._learn(entry.size)
        entry.state = entry.depth + entry.size

    def grown(self, entry: Entry) -> None:
        """A conversation went on."""
        super().grown(entry)
        end = entry.depth + entry.size
        if end <= 2 * _length(entry):
            self._learn(end - _length(entry))
        entry.state = end

    def split(self, upper: Entry, lower: Entry) -> None:
        """The front is part of what was as long as before."""
        super().split(upper, lower)
        upper.state = lower.state

    def inherit(self, parent: Entry, child: Entry) -> None:
        """The conversation lost its end, and is still as long."""
        super().inherit(parent, child)
        parent.state = max(_length(parent), _length(child))

    def _learn(self, added: int) -> None:
        if added > 0:
            known = self._added
            self._added = added if known is None else known + _WEIGHT * (added - known)

    def spare(self, entry: Entry) -> int:
        """How many pages of its tail leave the next prompt within the budget."""
        keep = math.ceil(_length(entry) + (self._added or 0.0) - self._budget)
        return min(entry.size, max(0, entry.depth + entry.size - keep))

    # --- queues ----------------------------------------------------------------------------------

    def add(self, entry: Entry) -> None:
        """``entry`` may be evicted from now on."""
        queue = self._spare if self.spare(entry) else self._needed
        queue.push(entry, entry.last_used)

    def discard(self, entry: Entry) -> None:
        """``entry`` may not be evicted any more."""
        queue = self._spare if entry in self._spare else self._needed
        queue.remove(entry)

    def pop(self) -> Entry | None:
        """Take out what was used longest ago: of what has spare pages, else of all."""
        while (entry := self._spare.pop()) is not None:
            if self.spare(entry):
                return entry
            # Continuations add more than when it was added: it is needed now.
            self._needed.push(entry, entry.last_used)
        return self._needed.pop()

    def portion(self, entry: Entry) -> int:
        """Its spare pages; all of it if it has none."""
        return self.spare(entry) or entry.size

    def put_back(self, entry: Entry) -> None:
        """The entry just popped lost its tail: it has spare pages left, or is needed now."""
        self.add(entry)

    def __len__(self) -> int:
        return len(self._spare) + len(self._needed)

    def describe(self, entry: Entry) -> str:
        """When it was used, and what of it is spare."""
        return f"used {self._time - entry.last_used} ago, {self.spare(entry)} pages spare"


def _length(entry: Entry) -> int:
    return entry.state if isinstance(entry.state, int) else 0  # a tree's root has none
