"""The order of moves when a prompt is read or stored, the same for every mover.

A store performs each step with bytes and threads (`kvkeep.store.tiers.reading` and `.writing`), a
replay on numbers (`kvkeep.bench.replay.tiers`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from enum import Enum, auto
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Sequence

    from kvkeep.store.tiers.catalogue import Catalogue
    from kvkeep.store.tiers.planner import Copy, Planner, Refuse

__all__ = ["Placement", "PromptMoves", "ReadMoves", "StoreMoves"]


class Placement(Enum):
    """Where a block is after it was to be placed in memory."""

    NEW = auto()
    """In memory, now."""
    IN_MEMORY = auto()
    """In memory, from before."""
    BELOW = auto()
    """In a tier below alone: it is not read to be stored."""
    NOWHERE = auto()
    """There is no room for it."""


class PromptMoves(ABC):
    """Moves the blocks of prompts as ``planner`` decides; ``memory`` is level 0's catalogue."""

    def __init__(self, planner: Planner, memory: Catalogue) -> None:
        self.planner = planner
        self.memory = memory

    @abstractmethod
    def use(self, blocks: Sequence[bytes], new: Container[bytes]) -> None:
        """Record in every level that the prompt used ``blocks``; it brought ``new`` itself."""


class ReadMoves(PromptMoves):
    """Reads a prompt. Derive from it and fill in `fetch` and `copy`."""

    def read(self, blocks: Sequence[bytes], levels: Sequence[int]) -> int:
        """Read ``blocks``, which are at ``levels``; return how many leading ones were read.

        Tiers that admit a block from this request on get a copy.
        """
        count = self.bring(blocks, levels)
        for block in blocks[:count]:
            for move in self.planner.read(block):
                self.copy(move)
        return count

    def bring(self, blocks: Sequence[bytes], levels: Sequence[int]) -> int:
        """Read ``blocks``, without copies to other tiers; return how many leading ones were read.

        Blocks that come to memory do not evict those of the same prompt.
        """
        mixed = any(levels) and not all(levels)
        above = [block for block, level in zip(blocks, levels, strict=False) if mixed and not level]
        for block in above:
            self.memory.hold(block)
        try:
            count = self.fetch(blocks, levels)
        finally:
            for block in above:
                self.memory.free(block)
        self.use(blocks[:count], ())
        return count

    @abstractmethod
    def fetch(self, blocks: Sequence[bytes], levels: Sequence[int]) -> int:
        """Hand over ``blocks`` in order, promoting those from below; return how many there were."""

    @abstractmethod
    def copy(self, move: Copy) -> None:
        """Have a tier write a block that was read, if memory has it and the tier has not."""


class StoreMoves(PromptMoves):
    """Stores a prompt. Derive from it and fill in `place`, `copy_down` and `demote_ahead`."""

    def store(self, blocks: Sequence[bytes]) -> None:
        """Place ``blocks`` in memory and in the tiers that admit them, as far as there is room.

        Blocks that no tier has or writes are held until the end: later blocks of a prompt must not
        evict its beginning, without which they are never found.
        """
        held: list[bytes] = []
        used: list[bytes] = []
        new: set[bytes] = set()
        try:
            for run in self.runs(blocks):
                moves = [move for block in run for move in self.planner.store(block)]
                placed = self.place(run)
                if placed is Placement.NOWHERE:
                    break
                used += run
                if placed is Placement.NEW:
                    new.update(run)
                if placed is not Placement.BELOW:
                    try:
                        if not self.copy_down(run, moves):
                            self.memory.hold_all(run, held)
                    finally:
                        self.placed(run)
                    self.demote_ahead()
            self.use(used, new)
        finally:
            self.memory.free_all(held)
        self.demote_ahead()

    def runs(self, blocks: Sequence[bytes]) -> Iterable[Sequence[bytes]]:
        """Split ``blocks`` into runs that take each step together: one by one."""
        return ([block] for block in blocks)

    @abstractmethod
    def place(self, run: Sequence[bytes]) -> Placement:
        """Place the blocks of a run in memory; they stay there until `placed`."""

    def placed(self, run: Sequence[bytes]) -> None:
        """All that needs the blocks of a run in memory has been queued."""

    @abstractmethod
    def copy_down(self, run: Sequence[bytes], moves: Sequence[Copy | Refuse]) -> bool:
        """Have tiers write the blocks of a run; whether one has them or will."""

    @abstractmethod
    def demote_ahead(self) -> None:
        """Demote blocks from memory before their room is needed, if the policy asks for it."""
