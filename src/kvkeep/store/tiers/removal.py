"""`Remover`: deletes blocks, or a whole namespace, from every level by request."""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvkeep.core.errors import BackendFailed

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from kvkeep.store.tiers.levels import Levels
    from kvkeep.store.tiers.reading import Reader
    from kvkeep.store.tiers.shared_memory import FrontMemory
    from kvkeep.store.tiers.tier import Tier

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

    def __init__(self, levels: Levels, reader: Reader) -> None:
        self._levels = levels
        self._reader = reader
        self.closed = threading.Event()
        self.running: dict[_Removal, None] = {}  # those whose threads have not ended

    def remove(self, blocks: Sequence[bytes]) -> Removed:
        """See `TieredStore.remove`."""
        levels = self._levels
        blocks = list(dict.fromkeys(blocks))
        there = levels.known(blocks)
        # Writes first: a read that begins afterwards skips tiers that delete the block.
        removals = [_Removal(self, tier, blocks) for tier in levels.tiers]
        self._reader.cancel(blocks)
        try:
            # Memory first: else a tier could get a deleted block again from memory.
            in_memory = _from_memory(levels.memory, blocks)
        finally:
            below = _run(removals)
        levels.losses.note(there, levels.memory.name, "removed", "removed")
        return _sum(in_memory, below)

    def clear(self, space: bytes) -> Removed:
        """See `TieredStore.clear`."""
        levels, memory = self._levels, self._levels.memory
        # In this order, nothing brings an old block back: no read of one begins in a tier that
        # hides it, and none ends in memory; then no write of one begins from memory, which has
        # none; at last, those that have begun are called off.
        numbers = [tier.states.clear(space) for tier in levels.tiers]
        self._reader.cancel(self._reader.under_way(space))
        listed = (item.block for item in memory.backend.list())
        mine: list[bytes] = []
        in_memory = _from_memory(
            memory, (block for block in listed if block.startswith(space)), mine
        )
        levels.losses.note(mine, memory.name, "removed", "cleared")
        removals = [
            _Removal(self, tier, tier.states.under_way(space), (space, number))
            for tier, number in zip(levels.tiers, numbers, strict=True)
        ]
        return _sum(in_memory, _run(removals))

    def close(self) -> None:
        """Begin no more calls of any tier, and end all waits."""
        self.closed.set()
        for removal in list(self.running):
            removal.over.set()

    def join(self, timeout: float) -> bool:
        """Wait for the calls that run, ``timeout`` seconds at most; return whether all ended."""
        until = time.monotonic() + timeout
        for removal in list(self.running):
            left = min(removal.tier.timeout, until - time.monotonic())  # else it hangs
            if removal.is_alive():
                removal.join(max(0.0, left))
        return not self.running


class _Removal(threading.Thread):
    """The deletion of blocks from one tier, and of a clearance: its namespace and number.

    Attributes:
        freed: bytes freed so far.
        complete: whether none of the blocks is left in the tier.
        over: set at the end, or when nobody waits any longer.
    """

    def __init__(
        self,
        remover: Remover,
        tier: Tier,
        blocks: Sequence[bytes],
        cleared: tuple[bytes, int] | None = None,
    ) -> None:
        super().__init__(name=f"kvkeep {tier.name} deleter", daemon=True)
        self.tier = tier
        self.freed = 0
        self.complete = False
        self.over = threading.Event()
        self._remover = remover
        self._deletion = tier.states.delete(blocks)
        self._cleared = cleared
        self._progress = 0.0
        self._unbegun = threading.Lock()
        remover.running[self] = None

    def begin(self) -> None:
        """Delete the blocks, in this thread if there are any."""
        self._progress = time.monotonic()
        if self._deletion or self._cleared is not None:
            self.start()
        else:
            self.run()

    def give_up(self) -> None:
        """If the deletion has not begun, end it: blocks possibly left are not found."""
        if self._unbegun.acquire(blocking=False):
            self._deletion.wait(0.0)
            with self._deletion:
                self._deletion.failed = dict.fromkeys(self._deletion.blocks)
            self._remover.running.pop(self, None)
            self.over.set()

    def run(self) -> None:
        if not self._unbegun.acquire(blocking=False):
            return
        try:
            self.freed, complete = self.tier.remove(self._deletion, self._proceed)
            if self._proceed() and self._cleared is not None:
                freed, whole = self.tier.clear(*self._cleared, self._proceed)
                self.freed += freed
                complete &= whole
            self.complete = complete and not self._remover.closed.is_set()
        finally:
            self._remover.running.pop(self, None)
            self.over.set()

    def wait(self) -> None:
        """Wait while the deletion makes progress; blocks possibly left are not found."""
        while not (self.over.is_set() or self._remover.closed.is_set()):
            left = self._progress + self.tier.timeout - time.monotonic()
            if left <= 0:
                return
            self.over.wait(left)

    def _proceed(self) -> bool:
        self._progress = time.monotonic()
        return not self._remover.closed.is_set()


def _run(removals: Sequence[_Removal]) -> list[tuple[str, int, bool]]:
    """Delete from all tiers at once; return of each its name, bytes freed, whether all went."""
    try:
        for removal in removals:
            try:
                removal.begin()
            except RuntimeError as error:  # the process may have no more threads
                _LOG.warning("tier %s: nothing was deleted: %s", removal.tier.name, error)
                removal.give_up()
        for removal in removals:
            removal.wait()
    finally:  # also if Ctrl-C ended the start of a thread
        for removal in removals:
            removal.give_up()
    return [(removal.tier.name, removal.freed, removal.complete) for removal in removals]


def _from_memory(
    memory: FrontMemory, blocks: Iterable[bytes], removed: list[bytes] | None = None
) -> tuple[str, int, bool]:
    """Delete ``blocks`` from memory, and append them to ``removed``; return what `_run` does."""
    removed = [] if removed is None else removed
    try:
        removed.extend(blocks)
        return memory.name, memory.remove(removed), True
    except BackendFailed as error:  # only memory that processes share can fail
        _LOG.info("tier %s: %s", memory.name, error)
        return memory.name, 0, False


def _sum(in_memory: tuple[str, int, bool], below: Sequence[tuple[str, int, bool]]) -> Removed:
    tiers = [in_memory, *below]
    return Removed(
        tuple((name, freed) for name, freed, _ in tiers),
        tuple(name for name, _, complete in tiers if not complete),
    )
