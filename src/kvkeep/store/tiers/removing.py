"""`Remover`: deletes blocks from every tier, also blocks that are being moved between tiers."""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvkeep.core.errors import BackendFailed

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvkeep.store.tiers.front import FrontMemory
    from kvkeep.store.tiers.levels import Levels
    from kvkeep.store.tiers.reading import Reader
    from kvkeep.store.tiers.tier import Tier
    from kvkeep.store.tiers.write_queue import WriteQueue

__all__ = ["Removed", "Remover"]

_LOG = logging.getLogger("kvkeep.tiers")


@dataclass(frozen=True, slots=True)
class Removed:
    """The result of a removal.

    Attributes:
        tiers: ``(name, bytes freed)`` of every tier, fastest first.
        failed: names of the tiers that may still hold some of the blocks: they failed, did not
            answer in time, or their circuit breaker is open. This store does not read these blocks
            there until they are written anew; other processes may find them.
    """

    tiers: tuple[tuple[str, int], ...]
    failed: tuple[str, ...] = ()

    @property
    def complete(self) -> bool:
        """Whether no tier holds any of the blocks."""
        return not self.failed

    @property
    def bytes(self) -> int:
        """Bytes freed in all tiers together."""
        return sum(freed for _, freed in self.tiers)


class Remover:
    """Deletes blocks, or a whole namespace, by request.

    Running reads of these blocks return nothing, queued writes are cancelled, and running writes
    are waited for. Each tier deletes in a separate thread, so a tier that hangs delays the call by
    no more than its timeout.

    Thread safety: all methods.
    """

    def __init__(self, levels: Levels, queue: WriteQueue, reader: Reader) -> None:
        self._levels = levels
        self._queue = queue
        self._reader = reader

    def remove(self, blocks: Sequence[bytes]) -> Removed:
        """See `TieredStore.remove`."""
        memory, losses = self._levels.memory, self._levels.losses
        blocks = list(dict.fromkeys(blocks))
        there = [block for block in blocks if self._levels.level_of(block) is not None]
        removals = self._call_off(blocks)
        try:
            # Memory first: else a tier could get a deleted block again from memory.
            in_memory, failed = _from_memory(memory, blocks)
        finally:
            for removal in removals:
                removal.start()
            for removal in removals:
                removal.wait()
        losses.note(there, memory.name, "removed", "removed")
        freed = [in_memory, *((removal.tier.name, removal.freed) for removal in removals)]
        failed += [one.tier.name for one in removals if not one.complete]
        return Removed(tuple(freed), tuple(failed))

    def clear(self, space: bytes | None) -> Removed:
        """See `TieredStore.clear`."""
        memory, losses = self._levels.memory, self._levels.losses
        within = space or b""
        freed: list[tuple[str, int]] = []
        with self._queue.clearing(within) as pending:
            blocks = list(dict.fromkeys([*self._reader.under_way(within), *pending]))
            removals = self._call_off(blocks)
            for removal in removals:
                removal.start()
            mine = [item.block for item in memory.backend.list() if item.block.startswith(within)]
            in_memory, failed = _from_memory(memory, mine)
            freed.append(in_memory)
            losses.note(mine, memory.name, "removed", "cleared")
            for removal in removals:
                removal.wait()
                count, complete = removal.tier.clear(space)
                freed.append((removal.tier.name, count + removal.freed))
                if not (complete and removal.complete):
                    failed.append(removal.tier.name)
        return Removed(tuple(freed), tuple(failed))

    def _call_off(self, blocks: Sequence[bytes]) -> list[_Removal]:
        # Writes first: a read that begins afterwards skips tiers that delete the block.
        removals = [_Removal(self._queue, tier, blocks) for tier in self._levels.tiers]
        self._reader.cancel(blocks)
        return removals


def _from_memory(memory: FrontMemory, blocks: Sequence[bytes]) -> tuple[tuple[str, int], list[str]]:
    """Delete ``blocks`` from memory; return its name with the bytes freed, and it if it failed."""
    try:
        return (memory.name, memory.remove(blocks)), []
    except BackendFailed as error:  # only memory that processes share can fail
        _LOG.info("tier %s: %s", memory.name, error)
        return (memory.name, 0), [memory.name]


class _Removal:
    """The deletion of blocks from one tier.

    Attributes:
        freed: bytes freed so far.
        complete: whether none of the blocks is left in the tier.
    """

    def __init__(self, queue: WriteQueue, tier: Tier, blocks: Sequence[bytes]) -> None:
        self.tier = tier
        self.freed = 0
        self.complete = False
        self._queue = queue
        self._blocks = blocks
        self._deletions, self._running = queue.call_off(tier, blocks)
        self._over = threading.Event()
        self._until = 0.0

    def start(self) -> None:
        """Start a thread that deletes the blocks."""
        self._until = time.monotonic() + self.tier.removal_timeout(len(self._blocks))
        if not self._blocks:
            self.complete = True
            self._over.set()
            return
        name = f"kvkeep {self.tier.name} deleter"
        threading.Thread(target=self._delete, name=name, daemon=True).start()

    def wait(self) -> None:
        """Wait for the deletion, at most `Tier.removal_timeout`; then hide blocks possibly left."""
        if not self._over.wait(max(0.0, self._until - time.monotonic())):
            self.tier.hide(self._blocks)

    def _delete(self) -> None:
        try:
            for over in self._running:
                over.wait()
            self.freed, left = self.tier.remove(self._blocks)
            self.complete = not left
        finally:
            for block, deletion in self._deletions.items():
                self._queue.deleted(self.tier, block, deletion)
            self._over.set()
