"""`StoreRequest`: puts the blocks of a prompt into memory and queues their writes to the tiers."""

from __future__ import annotations

import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvkeep.store.tiers.planner import Refuse
from kvkeep.store.tiers.prompt_holds import PromptHolds
from kvkeep.store.tiers.prompt_moves import Placement, StoreMoves
from kvkeep.store.tiers.record import HEADER_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterator, Sequence

    from kvkeep.store.tiers.demoting import Demoter
    from kvkeep.store.tiers.levels import Levels
    from kvkeep.store.tiers.memory import MemoryLease
    from kvkeep.store.tiers.planner import Copy
    from kvkeep.store.tiers.write_queue import WriteQueue

__all__ = ["StoreRequest", "Written"]


@dataclass(slots=True)
class Written:
    """Positions of newly stored blocks (``kept``) and of blocks stored before (``already``).

    There was no room for the others.
    """

    kept: list[int] = field(default_factory=list)
    already: list[int] = field(default_factory=list)


class StoreRequest(StoreMoves):
    """One request that stores a prompt.

    ``fill(i, raw)`` writes the KV of block ``i``; it is called for blocks that no level has. The
    request waits for room in write queues, and for memory that queued writes hold, until ``until``
    (monotonic seconds).

    Attributes:
        written: the blocks stored so far.
    """

    def __init__(
        self,
        levels: Levels,
        queue: WriteQueue,
        demoter: Demoter,
        *,
        raw_bytes: Sequence[int],
        fill: Callable[[int, memoryview], None],
        until: float,
    ) -> None:
        super().__init__(levels.planner, levels.memory.catalogue)
        self.written = Written()
        self._levels = levels
        self._queue = queue
        self._demoter = demoter
        self._raw_bytes = raw_bytes
        self._fill = fill
        self._until = until
        self._at = 0
        self._lease: MemoryLease | None = None
        self._full: set[str] = set()  # names of tiers whose queue was full
        self._refused: dict[str, list[bytes]] = {}
        self._holds = PromptHolds(levels, ())

    def store(self, blocks: Sequence[bytes]) -> None:
        super().store(blocks)
        losses, memory = self._levels.losses, self._levels.memory
        for name, refused in self._refused.items():
            losses.note(refused, name, "refused", "admission")
        kept, already = len(self.written.kept), len(self.written.already)
        dropped = blocks[kept + already :]
        losses.note(dropped, memory.name, "dropped", "no room")
        memory.counters.count(writes=kept, already=already, drops=len(dropped))

    @contextmanager
    def holding(self, blocks: Sequence[bytes]) -> Iterator[None]:
        with PromptHolds(self._levels, blocks) as self._holds:
            yield

    def place(self, run: Sequence[bytes]) -> Placement:
        (block,), at = run, self._at
        self._at += 1
        self._lease = self._levels.memory.lease(block)
        if self._lease is not None:
            self.written.already.append(at)
            return Placement.IN_MEMORY
        if any(tier.serves(block) for tier in self._levels.tiers):
            self.written.already.append(at)
            return Placement.BELOW
        self._holds.begin()
        self._lease = self._keep(block, at)
        if self._lease is None:
            return Placement.NOWHERE
        self.written.kept.append(at)
        return Placement.NEW

    def _keep(self, block: bytes, at: int) -> MemoryLease | None:
        memory, raw_bytes = self._levels.memory, self._raw_bytes[at]
        draft = memory.reserve(block, raw_bytes)
        if draft is None and self._left() and raw_bytes + HEADER_BYTES <= memory.capacity:
            for tier in self._levels.tiers:  # queued writes hold their blocks in memory
                tier.health.settled(self._left())
            draft = memory.reserve(block, raw_bytes)
        if draft is None:
            return None
        with draft:
            self._fill(at, draft.view[HEADER_BYTES:])
            memory.counters.count(written_bytes=len(draft.view))
            return memory.commit(draft, block)

    def placed(self, run: Sequence[bytes]) -> None:
        assert self._lease is not None
        self._lease.release()

    def copy_down(self, run: Sequence[bytes], moves: Sequence[Copy | Refuse]) -> bool:
        below = any(tier.knows(run[0]) for tier in self._levels.tiers)
        for move in moves:
            tier, block = self._levels.tier(move.target), move.block
            if tier.knows(block):
                continue
            if isinstance(move, Refuse):
                self._refused.setdefault(tier.name, []).append(block)
            elif tier.name in self._full:  # useless there without the earlier block it dropped
                self._queue.note_dropped(tier, block, "queue full")
            elif self._queue.write(tier, block, self._left(), self._holds.add(tier, block)):
                below = True
            else:
                self._full.add(tier.name)
        return below

    def demote_ahead(self) -> None:
        self._demoter.demote_ahead()

    def use(self, blocks: Sequence[bytes], new: Container[bytes]) -> None:
        self._levels.used(blocks, new)

    def _left(self) -> float:
        return max(0.0, self._until - time.monotonic())
