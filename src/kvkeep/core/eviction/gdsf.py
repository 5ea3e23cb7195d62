"""GDSF: evict first the entry with the lowest recomputing cost per page, times its requests."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvkeep.core.errors import whole
from kvkeep.core.eviction.queues import QueuePolicy

if TYPE_CHECKING:
    from kvkeep.core.eviction.base import Entry

__all__ = ["GDSF"]


class GDSF(QueuePolicy):
    """Ranks a run by its requests times the cost of recomputing one of its pages.

    Computing a token costs the same everywhere for the weights, and in proportion to the tokens
    before it for attention. At ``even_tokens`` of context both are equal: for a dense model, about
    its parameters over twice its layers times its width (30,000 for Llama 8B). So the end of a long
    document is worth more than as many tokens at the start of another. Worth is added to a floor,
    which rises to the worth of each victim, so entries that are no longer used age. (Cherkasova:
    GreedyDual-Size-Frequency, 1998.)

    ``block_tokens`` are the tokens of a block, as passed to `fit` in pages: 512, unless the cache
    was made with another ``block_pages``.
    """

    name = "gdsf"

    def __init__(self, even_tokens: int = 32_768, block_tokens: int = 512) -> None:
        super().__init__()
        self.even_tokens = whole("even_tokens", even_tokens, 1)
        self.block_tokens = whole("block_tokens", block_tokens, 1)
        self._even = float("inf")  # in pages; all pages cost the same until `fit` is called
        self._floor = 0.0

    def fit(self, size: int, block: int) -> None:
        self._even = self.even_tokens / self.block_tokens * block

    def stored(self, entry: Entry, priority: int, *, known: bool = False) -> None:
        """Record a new entry, on the present floor."""
        super().stored(entry, priority, known=known)
        entry.state = self._floor

    def grown(self, entry: Entry) -> None:
        """Record new pages; the entry moves to the present floor."""
        super().grown(entry)
        entry.state = self._floor

    def hit(self, entry: Entry) -> None:
        super().hit(entry)
        entry.state = self._floor

    def split(self, upper: Entry, lower: Entry) -> None:
        """Initialise the new front on the same floor."""
        super().split(upper, lower)
        upper.state = lower.state

    def inherit(self, parent: Entry, child: Entry) -> None:
        """Add the child's record; the parent's floor is the higher of both."""
        super().inherit(parent, child)
        parent.state = max(_floor_of(parent), _floor_of(child))

    def worth(self, entry: Entry) -> float:
        """Return the requests of ``entry`` times the cost of a page in its middle."""
        return (1 + entry.hits) * (1 + (entry.depth + entry.size / 2) / self._even)

    def age(self, entry: Entry) -> tuple[float, int]:
        """Return floor plus worth; among equals, the least recently used first."""
        return _floor_of(entry) + self.worth(entry), entry.last_used

    def pop(self) -> Entry | None:
        """Remove the entry of the least worth; the floor rises to it."""
        oldest = self._queue.oldest
        if oldest is not None:
            self._floor = oldest[0]
        return super().pop()

    def put_back(self, entry: Entry) -> None:
        """Make the entry just popped the next victim: nothing is below the floor."""
        self._queue.put_back(entry, (self._floor, 0))

    def describe(self, entry: Entry) -> str:
        """Return its hits, its worth, and how far it is above the floor."""
        above = _floor_of(entry) + self.worth(entry) - self._floor
        return f"{entry.hits} hits, worth {self.worth(entry):.2f}, {above:.2f} above the floor"


def _floor_of(entry: Entry) -> float:
    return entry.state if isinstance(entry.state, float) else 0.0  # the root of a tree has none
