"""The store of a worker, and how a scheduler in the same process finds it."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

from kvkeep.core.errors import IllegalStep, InvalidValue
from kvkeep.integrations.load_costs import RunCost, TimedLoads
from kvkeep.integrations.vllm.kept import OpenStore
from kvkeep.integrations.vllm.keys import keys_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvkeep.integrations.vllm.groups import Groups
    from kvkeep.store import BlockStore
    from kvkeep.store.blocks import ReturnNotes

__all__ = ["SharedStore"]

# By vLLM's engine id. vLLM makes both sides and gives neither a reference to the other, so they
# meet here. Weak: it keeps no store alive.
_ENGINES: WeakValueDictionary[str, SharedStore] = WeakValueDictionary()


class SharedStore(OpenStore):
    """A worker's store, used by both sides. Thread safety: all methods.

    vLLM closes its two sides in any order, so the scheduler may still use a store that the worker
    has closed.

    Attributes:
        sizes: bytes of a record, by group.
        costs: what loads take.
        generation: how often all blocks were deleted.
        news: set when a load or a lookup has ended.

    Raises:
        InvalidValue: the engine has another open store.
    """

    def __init__(
        self,
        engine: str,
        store: BlockStore,
        groups: Groups,
        sizes: list[int],
        *,
        rank: int = 0,
    ) -> None:
        other = _ENGINES.get(engine)
        if other is not None and not other.closed:
            store.close(0)
            raise InvalidValue(
                "there are two KVKeepConnectors in one engine, which would find each other's "
                "blocks; leave one of them, with the tiers of both"
            )
        super().__init__(store, rank=rank)
        self.groups = groups
        self.sizes = sizes
        self.costs = TimedLoads(store)
        self.news = threading.Event()
        self.generation = 0
        self._resetting = threading.Lock()  # held while blocks are copied into the store
        self._replay = store.replay()
        _ENGINES[engine] = self

    def write(
        self,
        keys: Sequence[bytes],
        sizes: Sequence[int],
        fill: Callable[[int, memoryview], None],
        generation: int,
    ) -> int:
        """As `BlockStore.write`; 0 if the blocks are of an earlier ``generation``."""
        with self._resetting:
            if generation < self.generation:
                return 0
            return self.store.write(keys, sizes, fill)

    def clear(self) -> bool:
        """As `OpenStore.clear`; what is computed with earlier plans is not written any more."""
        with self._resetting:
            self.generation += 1
        return super().clear()

    def runs(self, hashes: Sequence[bytes], first: int, end: int) -> list[RunCost]:
        """Return what loading the blocks ``first`` … ``end - 1`` takes, in pieces.

        Their ends are blocks of the request. Empty if the store is closed.
        """
        size, counted = self.groups.block_tokens, self.groups.counted
        nbytes = [0] * (end - first)
        for at, group in enumerate(self.groups.groups):
            start = max(first, group.first_needed(end * size, size))
            for block in range(start - first, end - first):
                nbytes[block] += self.sizes[at]
        try:
            runs = self.costs.runs(keys_of(hashes[first:end], counted), nbytes)
        except IllegalStep:
            return []
        return [run._replace(end=first + run.end) for run in runs]

    def tell(self, notes: ReturnNotes) -> None:
        """Tell the tiers of conversations that a scheduler in another process follows.

        Calls must be in order, from one thread at a time.
        """
        if not self.closed:
            self._replay.tell(notes)

    @staticmethod
    def find(engine: str) -> SharedStore | None:
        """Return the store of a worker in this process, by vLLM's engine id."""
        return _ENGINES.get(engine)
