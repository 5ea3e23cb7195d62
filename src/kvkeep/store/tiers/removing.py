"""`Remover`: deletes blocks from every tier, wherever they are on their way to."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvkeep.store.tiers.levels import Levels
    from kvkeep.store.tiers.reading import Reader
    from kvkeep.store.tiers.tier import Tier
    from kvkeep.store.tiers.write_queue import WriteQueue

__all__ = ["Removed", "Remover"]


@dataclass(frozen=True, slots=True)
class Removed:
    """What was deleted.

    Attributes:
        tiers: ``(name, bytes freed)`` of every tier, fastest first.
        failed: names of the tiers that may still hold some of it: they failed, did not answer in
            time, or their circuit breaker is open. This store does not read it there until it is
            written anew; other processes may find it.
    """

    tiers: tuple[tuple[str, int], ...]
    failed: tuple[str, ...] = ()

    @property
    def complete(self) -> bool:
        """Whether no tier holds any of it."""
        return not self.failed

    @property
    def bytes(self) -> int:
        """Bytes freed in all tiers together."""
        return sum(freed for _, freed in self.tiers)


class Remover:
    """Deletes by request: blocks, or a whole namespace.

    Reads under way hand their blocks to nobody, queued writes are given up, and writes that already
    run are waited for. Each tier deletes in a thread of its own, so that one that hangs costs its
    own timeout and no more.

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
            # Memory first: a tier that has deleted a block could be given it again from there.
            freed = [(memory.name, memory.remove(blocks))]
        finally:
            for removal in removals:
                removal.start()
            for removal in removals:
                removal.wait()
        losses.note(there, memory.name, "removed", "removed")
        freed += [(removal.tier.name, removal.freed) for removal in removals]
        return Removed(tuple(freed), tuple(one.tier.name for one in removals if not one.complete))

    def clear(self, space: bytes | None) -> Removed:
        """See `TieredStore.clear`."""
        memory, losses = self._levels.memory, self._levels.losses
        within = space or b""
        freed: list[tuple[str, int]] = []
        failed: list[str] = []
        with self._queue.clearing(within) as pending:
            blocks = list(dict.fromkeys([*self._reader.under_way(within), *pending]))
            removals = self._call_off(blocks)
            for removal in removals:
                removal.start()
            mine = [item.block for item in memory.backend.list() if item.block.startswith(within)]
            freed.append((memory.name, memory.remove(mine)))
            losses.note(mine, memory.name, "removed", "cleared")
            for removal in removals:
                removal.wait()
                count, complete = removal.tier.clear(space)
                freed.append((removal.tier.name, count + removal.freed))
                if not (complete and removal.complete):
                    failed.append(removal.tier.name)
        return Removed(tuple(freed), tuple(failed))

    def _call_off(self, blocks: Sequence[bytes]) -> list[_Removal]:
        # Writes first: a read that begins after that reads no tier that deletes the block.
        removals = [_Removal(self._queue, tier, blocks) for tier in self._levels.tiers]
        self._reader.cancel(blocks)
        return removals


class _Removal:
    """The deletion of blocks from one tier.

    Attributes:
        freed: bytes.
        complete: nothing is left in the tier.
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
        """Begin, in a thread of its own."""
        self._until = time.monotonic() + self.tier.removal_timeout(len(self._blocks))
        if not self._blocks:
            self.complete = True
            self._over.set()
            return
        name = f"kvkeep {self.tier.name} deleter"
        threading.Thread(target=self._delete, name=name, daemon=True).start()

    def wait(self) -> None:
        """Wait until it ends or the tier's timeout is over; blocks that may be left are hidden."""
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
