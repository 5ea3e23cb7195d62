"""`Remover`: deletes blocks from every tier, also blocks that are being moved between tiers."""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvkeep.core.errors import BackendFailed

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

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
    are waited for. Each tier deletes in a thread of its own. The call waits for a tier as long as
    that makes progress: for the tier's timeout behind each record that it lists, and each thousand
    that it deletes. After `close`, no deletion makes another call.

    Thread safety: all methods.
    """

    def __init__(self, levels: Levels, queue: WriteQueue, reader: Reader) -> None:
        self._levels = levels
        self._queue = queue
        self._reader = reader
        self._closed = threading.Event()
        self._running: dict[_Removal, None] = {}  # those whose threads have not ended

    def remove(self, blocks: Sequence[bytes]) -> Removed:
        """See `TieredStore.remove`."""
        memory, losses = self._levels.memory, self._levels.losses
        blocks = list(dict.fromkeys(blocks))
        there = [block for block in blocks if self._levels.level_of(block) is not None]
        # Writes first: a read that begins afterwards skips tiers that delete the block.
        removals = [self._removal(tier, blocks) for tier in self._levels.tiers]
        self._reader.cancel(blocks)
        try:
            # Memory first: else a tier could get a deleted block again from memory.
            in_memory, failed = _from_memory(memory, lambda: blocks)
        finally:
            for removal in removals:
                removal.start()
            removed = self._await(removals)
        losses.note(there, memory.name, "removed", "removed")
        return Removed((in_memory, *removed.tiers), (*failed, *removed.failed))

    def clear(self, space: bytes) -> Removed:
        """See `TieredStore.clear`."""
        memory, losses = self._levels.memory, self._levels.losses
        # In this order, nothing brings an old block back: no read of one begins in a tier that
        # hides it, and none ends in memory; then no write of one begins from memory, which has
        # none; at last, those that have begun are called off.
        numbers = [tier.hide_space(space) for tier in self._levels.tiers]
        self._reader.cancel(self._reader.under_way(space))
        mine: list[bytes] = []

        def listed() -> list[bytes]:
            mine.extend(one.block for one in memory.backend.list() if one.block.startswith(space))
            return mine

        in_memory, failed = _from_memory(memory, listed)
        losses.note(mine, memory.name, "removed", "cleared")
        pending = self._queue.pending(space)
        removals = [
            self._removal(tier, pending, (space, number))
            for tier, number in zip(self._levels.tiers, numbers, strict=True)
        ]
        for removal in removals:
            removal.start()
        removed = self._await(removals)
        return Removed((in_memory, *removed.tiers), (*failed, *removed.failed))

    def _removal(
        self, tier: Tier, blocks: Sequence[bytes], space: tuple[bytes, int] | None = None
    ) -> _Removal:
        removal = _Removal(
            self._queue, tier, blocks, space, closed=self._closed, running=self._running
        )
        self._running[removal] = None
        return removal

    def _await(self, removals: Sequence[_Removal]) -> Removed:
        for removal in removals:
            removal.wait()
        return Removed(
            tuple((one.tier.name, one.freed) for one in removals),
            tuple(one.tier.name for one in removals if not one.complete),
        )

    def close(self) -> None:
        """Begin no more calls of any tier, and end all waits."""
        self._closed.set()
        for removal in list(self._running):
            removal.give_up()

    def join(self, timeout: float) -> bool:
        """Wait for the calls that run, ``timeout`` seconds at most; return whether all ended."""
        until = time.monotonic() + timeout
        for removal in list(self._running):
            left = min(removal.tier.timeout, until - time.monotonic())  # else it hangs
            removal.join(max(0.0, left))
        return not self._running


def _from_memory(
    memory: FrontMemory, blocks: Callable[[], Sequence[bytes]]
) -> tuple[tuple[str, int], list[str]]:
    """Delete ``blocks()`` from memory; return its name, the bytes freed, and it if it failed."""
    try:
        return (memory.name, memory.remove(blocks())), []
    except BackendFailed as error:  # only memory that processes share can fail
        _LOG.info("tier %s: %s", memory.name, error)
        return (memory.name, 0), [memory.name]


class _Removal:
    """The deletion of blocks from one tier, and of a namespace that it hides, if one is given.

    Attributes:
        freed: bytes freed so far.
        complete: whether none of the blocks is left in the tier.
    """

    def __init__(
        self,
        queue: WriteQueue,
        tier: Tier,
        blocks: Sequence[bytes],
        space: tuple[bytes, int] | None,
        *,
        closed: threading.Event,
        running: dict[_Removal, None],
    ) -> None:
        self.tier = tier
        self.freed = 0
        self.complete = False
        self._queue = queue
        self._blocks = blocks
        self._space = space
        self._closed = closed
        self._running = running
        self._deletions, self._writes = queue.call_off(tier, blocks)
        self._over = threading.Event()
        self._progress = 0.0
        self._thread = threading.Thread(
            target=self._delete, name=f"kvkeep {tier.name} deleter", daemon=True
        )

    def start(self) -> None:
        """Start a thread that deletes the blocks."""
        self._progress = time.monotonic()
        if self._blocks or self._space is not None:
            self._thread.start()
        else:
            self.complete = True
            self._ended()

    def wait(self) -> None:
        """Wait while the deletion makes progress; then hide blocks possibly left."""
        while not self._over.is_set():
            left = self._progress + self.tier.timeout - time.monotonic()
            if left <= 0 or self._closed.is_set():
                self.tier.hide(self._blocks)
                return
            self._over.wait(left)

    def give_up(self) -> None:
        """Wake the call that waits."""
        self._over.set()

    def join(self, timeout: float) -> None:
        """Wait for the thread to end, ``timeout`` seconds at most."""
        if self._thread.is_alive():
            self._thread.join(timeout)

    def _proceed(self) -> bool:
        self._progress = time.monotonic()
        return not self._closed.is_set()

    def _delete(self) -> None:
        complete = True
        try:
            for write in self._writes:
                write.wait()
            if self._proceed() and self._blocks:
                self.freed, left = self.tier.remove(self._blocks, self._proceed)
                complete = not left
            if self._proceed() and self._space is not None:
                freed, whole = self.tier.clear(*self._space, self._proceed)
                self.freed += freed
                complete &= whole
            self.complete = complete and not self._closed.is_set()
        finally:
            for block, deletion in self._deletions.items():
                self._queue.deleted(self.tier, block, deletion)
            self._ended()

    def _ended(self) -> None:
        self._running.pop(self, None)
        self._over.set()
