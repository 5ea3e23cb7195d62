"""`CheckpointOrder`: which checkpoint goes next."""

from __future__ import annotations

from collections import OrderedDict
from itertools import chain
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvkeep.core.groups.kept import Checkpoint

__all__ = ["CheckpointOrder"]


class CheckpointOrder:
    """Checkpoints by class and recency, least recently used first.

    *Early* ones are guesses that no request has used, and those whose request left a later one:
    they go before any KV of tokens. The others go with the KV behind them, or when nothing else
    can be evicted.

    Thread safety: none; under the cache's lock. Cost: O(1).
    """

    __slots__ = ("_early", "_late")

    def __init__(self) -> None:
        self._early: OrderedDict[Checkpoint, None] = OrderedDict()
        self._late: OrderedDict[Checkpoint, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._early) + len(self._late)

    def __iter__(self) -> Iterator[Checkpoint]:
        return chain(self._early, self._late)

    def add(self, checkpoint: Checkpoint) -> None:
        """Add a new checkpoint."""
        (self._early if checkpoint.early else self._late)[checkpoint] = None

    def used(self, checkpoint: Checkpoint) -> None:
        """Record that a request resumed at ``checkpoint``: it is no longer early."""
        self.discard(checkpoint)
        checkpoint.guess = checkpoint.extended = False
        self.add(checkpoint)

    def extended(self, checkpoint: Checkpoint) -> None:
        """Record that the request that used ``checkpoint`` last has left a later one."""
        self.discard(checkpoint)
        checkpoint.extended = True
        self.add(checkpoint)

    def discard(self, checkpoint: Checkpoint) -> None:
        """Remove a checkpoint."""
        self._early.pop(checkpoint, None)
        self._late.pop(checkpoint, None)

    def early(self) -> Iterator[Checkpoint]:
        """Yield the early ones, least recently used first; end before anything changes."""
        return iter(self._early)
