"""`CheckpointOrder`, `LooseRows`: which checkpoint and which rows go next."""

from __future__ import annotations

from collections import OrderedDict
from itertools import chain, islice
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from kvkeep.core.groups.stored import Checkpoint
    from kvkeep.core.pages.tables import PageArray

__all__ = ["CheckpointOrder", "LooseRows"]


class LooseRows:
    """Loose rows by their first pages.

    Rows that a sequence uses, too, are set aside when they are met, and return when it releases
    them. So none is looked at twice. Thread safety: none; under the cache's lock. Cost: O(1) a row.
    """

    __slots__ = ("_aside", "_waiting")

    def __init__(self) -> None:
        self._waiting: OrderedDict[int, None] = OrderedDict()
        self._aside: set[int] = set()

    def __len__(self) -> int:
        return len(self._waiting) + len(self._aside)

    def add(self, firsts: Iterable[int]) -> None:
        """Add rows."""
        self._waiting.update(dict.fromkeys(firsts))

    def discard(self, firsts: Iterable[int]) -> None:
        """Remove rows, as far as they are loose."""
        for first in firsts:
            if first in self._waiting:
                del self._waiting[first]
            else:
                self._aside.discard(first)

    def oldest(self, most: int) -> list[int]:
        """Remove and return the oldest that were not set aside, ``most`` at most."""
        oldest = list(islice(self._waiting, most))
        for first in oldest:
            del self._waiting[first]
        return oldest

    def set_aside(self, firsts: Iterable[int]) -> None:
        """Keep rows that `oldest` returned, and that sequences use, until they are `released`."""
        self._aside.update(firsts)

    def released(self, pages: PageArray) -> None:
        """Record that no sequence uses ``pages`` any more; other pages than of rows are ignored."""
        if self._aside:
            for page in pages.tolist():
                if page in self._aside:
                    self._aside.remove(page)
                    self._waiting[page] = None

    def firsts(self) -> set[int]:
        """Return the first pages of all. Cost: all of them."""
        return self._aside.union(self._waiting)

    def aside(self) -> set[int]:
        """Return the first pages of those set aside, for `check`."""
        return set(self._aside)


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
