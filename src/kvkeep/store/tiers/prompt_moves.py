"""The order of moves when a prompt is read or stored, the same for every mover.

A store performs each step with bytes and threads (`kvkeep.store.tiers.reading` and `.writing`), a
replay on numbers (`kvkeep.bench.replay.tiers`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from enum import Enum, auto
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Container, Sequence
    from contextlib import AbstractContextManager

    from kvkeep.store.tiers.front import FrontOrder
    from kvkeep.store.tiers.planner import Copy, Planner, Refuse

__all__ = ["Placement", "PromptMoves", "ReadMoves", "StoreMoves"]


class Placement(Enum):
    """The result of placing a block in memory."""

    NEW = auto()
    """It was added to memory."""
    IN_MEMORY = auto()
    """It was in memory already."""
    BELOW = auto()
    """It is in a lower tier only, and is not copied up."""
    NOWHERE = auto()
    """There is no room for it."""


class PromptMoves(ABC):
    """Moves the blocks of prompts as ``planner`` decides; ``memory`` is level 0's catalogue."""

    def __init__(self, planner: Planner, memory: FrontOrder) -> None:
        self.planner = planner
        self.memory = memory

    @abstractmethod
    def use(self, blocks: Sequence[bytes], new: Container[bytes]) -> None:
        """Record in every level that the prompt used ``blocks``; it stored those in ``new``."""


class ReadMoves(PromptMoves):
    """Reads a prompt. Subclasses implement `use`, `fetch` and `copy`."""

    def read(self, blocks: Sequence[bytes], levels: Sequence[int]) -> int:
        """Read ``blocks``, which are at ``levels``; return how many leading ones were read.

        Tiers that admit a block from this request on get a copy.
        """
        count = self.bring(blocks, levels)
        for move in self.planner.read(blocks[:count]):
            self.copy(move)
        return count

    def bring(self, blocks: Sequence[bytes], levels: Sequence[int]) -> int:
        """Read ``blocks``, without copies to other tiers; return how many leading ones were read.

        Blocks read into memory do not evict others of the same prompt.
        """
        mixed = any(levels) and not all(levels)
        above = [block for block, level in zip(blocks, levels, strict=False) if mixed and not level]
        held: list[bytes] = []
        try:
            self.memory.holds.hold_all(above, held)
            count = self.fetch(blocks, levels)
        finally:
            self.memory.holds.free_all(held)
        self.use(blocks[:count], ())
        return count

    @abstractmethod
    def fetch(self, blocks: Sequence[bytes], levels: Sequence[int]) -> int:
        """Deliver ``blocks`` in order, promoting those from lower tiers; return how many."""

    @abstractmethod
    def copy(self, move: Copy) -> None:
        """Queue the write of a block to a tier, if memory has the block and the tier has not."""


class StoreMoves(PromptMoves):
    """Stores a prompt. Subclasses implement the abstract methods."""

    def store(self, blocks: Sequence[bytes]) -> None:
        """Place ``blocks`` in memory and in the tiers that admit them, as far as there is room.

        Blocks that only memory has are held until the end: later blocks of a prompt must not evict
        its beginning, because a prompt is found by its leading blocks only.
        """
        held: list[bytes] = []
        used: list[bytes] = []
        new: set[bytes] = set()
        with self.holding(blocks):
            try:
                while len(used) < len(blocks):
                    if used:
                        self.demote_ahead()
                    placed, count = self.place(blocks, len(used))
                    run = blocks[len(used) : len(used) + count]
                    moves = self.planner.store(run)
                    if placed is Placement.NOWHERE:
                        break
                    used += run
                    if placed is Placement.NEW:
                        new.update(run)
                    if placed is not Placement.BELOW:
                        try:
                            only_here = self.copy_down(run, moves)
                            self.memory.holds.hold_all(only_here, held)
                        finally:
                            self.placed()
                self.use(used, new)
            finally:
                self.memory.holds.free_all(held)
        self.demote_ahead()  # after all holds: now any block may be moved to make room below

    @abstractmethod
    def holding(self, blocks: Sequence[bytes]) -> AbstractContextManager[object]:
        """Hold the beginning of the prompt in the tiers, so that its rest does not evict it."""

    @abstractmethod
    def place(self, blocks: Sequence[bytes], at: int) -> tuple[Placement, int]:
        """Place a run of ``blocks`` in memory that begins at position ``at``.

        Return how, and how many blocks it has: at least one. They stay there until `placed`.
        """

    def placed(self) -> None:
        """Release the run placed last: every write that needs its blocks in memory is queued."""

    @abstractmethod
    def copy_down(self, run: Sequence[bytes], moves: Sequence[Copy | Refuse]) -> Sequence[bytes]:
        """Queue writes of a run to tiers; return the blocks that no tier has or will write."""

    @abstractmethod
    def demote_ahead(self) -> None:
        """Demote blocks from memory before their room is needed, if the policy asks for it."""
