"""T-LRU: evict first the tails that conversations can lose without delaying their next answers."""

from __future__ import annotations

import math

from kvkeep.core.errors import whole
from kvkeep.core.eviction.base import Entry, EvictionPolicy
from kvkeep.core.eviction.queues import AgeQueue

__all__ = ["TLRU"]

# Weight of the newest continuation in the moving average of what continuations add.
_WEIGHT = 1 / 128


class TLRU(EvictionPolicy):
    """LRU that first evicts tails, as long as the next turn computes at most ``spare_tokens``.

    The next turn of a conversation is expected to add what continuations add on average. That much
    is computed anyway; cached tokens at the end may go while both together stay within the budget.
    So short conversations lose everything, and long ones the last of their tokens. This costs hits,
    and fewer prompts exceed the budget, which is what the slowest times to first token are made of.
    (Zhang, Li, Moallemi, Peng: Tail-Optimized Caching for LLM Inference, 2025.)

    With a budget below what continuations add it is LRU. ``block_tokens`` are the tokens of a
    block, as passed to `fit` in pages: 512, unless the cache was made with another ``block_pages``.
    """

    name = "tlru"
    portions = True

    def __init__(self, spare_tokens: int = 8192, block_tokens: int = 512) -> None:
        super().__init__()
        self.spare_tokens = whole("spare_tokens", spare_tokens, 0)
        self.block_tokens = whole("block_tokens", block_tokens, 1)
        self._budget = 0.0  # in pages; 0, so LRU, until `fit` is called
        self._added: float | None = None  # pages that a continuation adds, on average
        self._spare = AgeQueue[float]()
        self._needed = AgeQueue[float]()

    def fit(self, size: int, block: int) -> None:
        self._budget = self.spare_tokens / self.block_tokens * block

    # --- events: `Entry.state` is the length of the longest conversation through the entry --------

    def stored(self, entry: Entry, priority: int, *, known: bool = False) -> None:
        """Record a conversation of this length.

        It counts as a continuation if it is no longer than the prefix before it: a longer entry, as
        after a short system prompt, begins a conversation.
        """
        super().stored(entry, priority, known=known)
        if entry.depth >= entry.size:
            self._learn(entry.size)
        entry.state = entry.depth + entry.size

    def grown(self, entry: Entry) -> None:
        """Record that a conversation continued."""
        super().grown(entry)
        end = entry.depth + entry.size
        if end <= 2 * _length(entry):
            self._learn(end - _length(entry))
        entry.state = end

    def split(self, upper: Entry, lower: Entry) -> None:
        """Initialise the new front with the same conversation length."""
        super().split(upper, lower)
        upper.state = lower.state

    def inherit(self, parent: Entry, child: Entry) -> None:
        """Add the child's record: a conversation keeps its length when its tail is evicted."""
        super().inherit(parent, child)
        parent.state = max(_length(parent), _length(child))

    def _learn(self, added: int) -> None:
        if added > 0:
            known = self._added
            self._added = added if known is None else known + _WEIGHT * (added - known)

    def spare(self, entry: Entry) -> int:
        """Return how many tail pages the next turn can recompute within the budget."""
        keep = math.ceil(_length(entry) + (self._added or 0.0) - self._budget)
        return min(entry.size, max(0, entry.depth + entry.size - keep))

    # --- queues ------------------------------------------------------------------------------

    def add(self, entry: Entry) -> None:
        queue = self._spare if self.spare(entry) else self._needed
        queue.push(entry, entry.last_used)

    def discard(self, entry: Entry) -> None:
        queue = self._spare if entry in self._spare else self._needed
        queue.remove(entry)

    def pop(self) -> Entry | None:
        """Remove the least recently used entry with spare pages, else of all."""
        while (entry := self._spare.pop()) is not None:
            if self.spare(entry):
                return entry
            # The average continuation has grown since the entry was added: no page is spare now.
            self._needed.push(entry, entry.last_used)
        return self._needed.pop()

    def portion(self, entry: Entry) -> int:
        """Return its spare pages, or its size if it has none."""
        return self.spare(entry) or entry.size

    def put_back(self, entry: Entry) -> None:
        self.add(entry)

    def __len__(self) -> int:
        return len(self._spare) + len(self._needed)

    def describe(self, entry: Entry) -> str:
        """Return when it was used and how many of its pages are spare."""
        return f"used {self._time - entry.last_used} ago, {self.spare(entry)} pages spare"


def _length(entry: Entry) -> int:
    return entry.state if isinstance(entry.state, int) else 0  # the root of a tree has none
