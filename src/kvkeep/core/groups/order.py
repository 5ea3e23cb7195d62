"""`CheckpointOrder`: which checkpoint goes next."""

from __future__ import annotations

from collections import OrderedDict
from itertools import chain
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from kvkeep.core.groups.checkpoint import Checkpoint
    from kvkeep.core.pages.table import PageArray

__all__ = ["CheckpointOrder"]


class CheckpointOrder:
    """Checkpoints by class and recency, least recently used first.

    *Early* ones are guesses that no request has used, and those whose request left a later one:
    they go before any KV of tokens. *Late* ones go with the KV behind them, or when nothing else
    can be evicted. *Pinned* ones are on paths with pins, *used* ones have states that sequences or
    hard pins use: both are set aside when they are met, and return when that ends. So none is
    looked at twice.

    Thread safety: none; under the cache's lock. Cost: O(1).
    """

    __slots__ = ("_early", "_late", "_pinned", "_used")

    def __init__(self) -> None:
        self._early: OrderedDict[Checkpoint, None] = OrderedDict()
        self._late: OrderedDict[Checkpoint, None] = OrderedDict()
        self._pinned: OrderedDict[Checkpoint, None] = OrderedDict()
        self._used: dict[int, Checkpoint] = {}  # by the first page of the state

    def __len__(self) -> int:
        return len(self._early) + len(self._late) + len(self._pinned) + len(self._used)

    def __iter__(self) -> Iterator[Checkpoint]:
        return chain(self._early, self._late, self._pinned, self._used.values())

    def add(self, checkpoint: Checkpoint) -> None:
        """Add a new checkpoint."""
        self._class(checkpoint)[checkpoint] = None

    def _class(self, checkpoint: Checkpoint) -> OrderedDict[Checkpoint, None]:
        return self._early if checkpoint.early else self._late

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
        for some in (self._early, self._late, self._pinned):
            some.pop(checkpoint, None)
        if checkpoint.state is not None:
            self._used.pop(int(checkpoint.state[0]), None)

    # --- set aside -------------------------------------------------------------------------------

    def set_aside(self, pinned: Iterable[Checkpoint], used: Iterable[Checkpoint]) -> None:
        """Keep checkpoints apart, until they are `unpinned`, or their states `released`."""
        for checkpoint in pinned:
            self.discard(checkpoint)
            self._pinned[checkpoint] = None
        for checkpoint in used:
            assert checkpoint.state is not None
            self.discard(checkpoint)
            self._used[int(checkpoint.state[0])] = checkpoint

    def unpinned(self, checkpoints: Iterable[Checkpoint]) -> None:
        """Record that a pin which covered them ended: they are the least recently used."""
        for checkpoint in checkpoints:
            if checkpoint in self._pinned:
                self._return(checkpoint)

    def released(self, pages: PageArray) -> None:
        """Record that only the tree uses ``pages``; other pages than of states are ignored."""
        if self._used:
            for page in pages.tolist():
                checkpoint = self._used.get(page)
                if checkpoint is not None:
                    self._return(checkpoint)

    def _return(self, checkpoint: Checkpoint) -> None:
        self.discard(checkpoint)
        self.add(checkpoint)
        self._class(checkpoint).move_to_end(checkpoint, last=False)

    # --- victims ---------------------------------------------------------------------------------

    def early(self) -> Iterator[Checkpoint]:
        """Yield the early ones, least recently used first; end before anything changes."""
        return iter(self._early)

    def late(self) -> Iterator[Checkpoint]:
        """Yield the late ones, as `early`."""
        return iter(self._late)

    def pinned(self) -> Iterator[Checkpoint]:
        """Yield those that were set aside for pins, as `early`."""
        return iter(self._pinned)

    def check(self, is_idle: Callable[[PageArray], bool]) -> None:
        """Assert that those set aside are under pins, or in use."""
        assert all(one.node.covered for one in self._pinned), "set aside without a pin"
        for page, one in self._used.items():
            assert one.state is not None
            assert page == one.state[0]
            assert not is_idle(one.state), "set aside, and nobody uses it"
