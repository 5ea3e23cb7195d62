"""GDSF: what would cost least to compute again, for the room it takes, goes first."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvkeep.core.errors import whole
from kvkeep.core.eviction.queues import QueuePolicy

if TYPE_CHECKING:
    from kvkeep.core.eviction.base import Entry

__all__ = ["GDSF"]


class GDSF(QueuePolicy):
    """Worth is how often a run was asked for, times what a page of it costs to compute again.

    A token costs the same for the weights wherever it stands, and for attention in proportion to
    what is before it; at ``even_tokens`` of context both are equal (for a dense model about its
    parameters over twice its layers times its width: 8B Llama 30,000). So the deep end of a long
    document is worth more than as many tokens at the beginning of another, if both are reused as
    often. Worth is added to a floor that rises to that of each victim, so what is not used any more
    ages. (Cherkasova: GreedyDual-Size-Frequency, 1998.)

    ``block_tokens`` are the tokens of a block, as `fit` is told of it: 512 unless the cache was
    made with other ``block_pages``.
    """

    name = "gdsf"

    def __init__(self, even_tokens: int = 32_768, block_tokens: int = 512) -> None:
        super().__init__()
        self.even_tokens = whole("even_tokens", even_tokens, 1)
        self.block_tokens = whole("block_tokens", block_tokens, 1)
        self._even = float("inf")  # in pages; until `fit` says how large those are, all cost alike
        self._floor = 0.0

    def fit(self, size: int, block: int) -> None:
        """It serves a memory of ``size``, in blocks of ``block``."""
        self._even = self.even_tokens / self.block_tokens * block

    def stored(self, entry: Entry, priority: int, *, known: bool = False) -> None:
        """It stands on the floor of this moment."""
        super().stored(entry, priority, known=known)
        entry.state = self._floor

    def grown(self, entry: Entry) -> None:
        """It stands on the floor of this moment."""
        super().grown(entry)
        entry.state = self._floor

    def hit(self, entry: Entry) -> None:
        """It stands on the floor of this moment."""
        super().hit(entry)
        entry.state = self._floor

    def split(self, upper: Entry, lower: Entry) -> None:
        """Both stand where the whole stood."""
        super().split(upper, lower)
        upper.state = lower.state

    def inherit(self, parent: Entry, child: Entry) -> None:
        """It stands no lower than what hung from it."""
        super().inherit(parent, child)
        parent.state = max(_floor_of(parent), _floor_of(child))

    def worth(self, entry: Entry) -> float:
        """Requests that asked for it, times what a page in its middle costs to compute again."""
        return (1 + entry.hits) * (1 + (entry.depth + entry.size / 2) / self._even)

    def age(self, entry: Entry) -> tuple[float, int]:
        """Its worth, above the floor it stands on; of equals, what was used longest ago."""
        return _floor_of(entry) + self.worth(entry), entry.last_used

    def pop(self) -> Entry | None:
        """Take out the entry of the least worth; the floor rises to that."""
        oldest = self._queue.oldest
        if oldest is not None:
            self._floor = oldest[0]
        return super().pop()

    def put_back(self, entry: Entry) -> None:
        """The entry just popped is next again: nothing is below the floor."""
        self._queue.put_back(entry, (self._floor, 0))

    def describe(self, entry: Entry) -> str:
        """Its worth, and how far above the floor that is."""
        above = _floor_of(entry) + self.worth(entry) - self._floor
        return f"{entry.hits} hits, worth {self.worth(entry):.2f}, {above:.2f} above the floor"


def _floor_of(entry: Entry) -> float:
    return entry.state if isinstance(entry.state, float) else 0.0  # a tree's root has none
