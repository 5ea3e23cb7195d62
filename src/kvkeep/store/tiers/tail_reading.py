"""`TailRequest`: reads a prompt from its end towards its front, until computing meets it."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Final

from kvkeep.store.tiers.prompt_holds import PromptHolds
from kvkeep.store.tiers.reading import ReadRequest, end_read
from kvkeep.store.tiers.shared_read import SharedRead

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvkeep.store.tiers.inexact import InexactBlocks
    from kvkeep.store.tiers.memory import MemoryLease
    from kvkeep.store.tiers.reading import Reader

__all__ = ["TailLimit", "TailRequest"]

_AT_ONCE: Final = 4  # blocks read from a tier without latency


class TailLimit:
    """The first block that a `TailRequest` still wants; others move it while the request reads.

    Thread safety: all methods.

    Attributes:
        first: position of that block.
        changed: event that is set when ``first`` has moved, or a read has ended.
    """

    def __init__(self) -> None:
        self.first = 0
        self.changed = threading.Event()
        self._lock = threading.Lock()

    def move(self, first: int) -> None:
        """Want no blocks before ``first``. A lower position than before changes nothing."""
        with self._lock:
            self.first = max(self.first, first)
        self.changed.set()


class TailRequest(ReadRequest):
    """One request that reads a prompt's blocks, the last one first.

    ``sink(i, raw)`` is called in the calling thread for each block that arrives, in about this
    order: one that is slow does not keep back those before it. Blocks that are missing are passed
    over. Blocks before ``limit`` are not begun any more, and dropped if they arrive. The read ends
    at ``until``, whatever the tiers do.

    Attributes:
        delivered: positions of the blocks passed to ``sink``, in the order of their arrival.
    """

    def __init__(
        self,
        reader: Reader,
        raw_bytes: Sequence[int],
        sink: Callable[[int, memoryview], None],
        *,
        limit: TailLimit,
        until: float | None = None,
        sources: list[str] | None = None,
        inexact: InexactBlocks | None = None,
    ) -> None:
        super().__init__(reader, raw_bytes, sink, until=until, sources=sources, inexact=inexact)
        self._wanted = limit
        self.delivered: list[int] = []

    def read(self, blocks: Sequence[bytes], levels: Sequence[int]) -> int:
        """Read ``blocks``, which are at ``levels``; return how many were delivered.

        The whole prompt counts as used, also what was computed: without its front, its tail is
        never found.
        """
        with PromptHolds(self._levels, blocks) as self._holds:
            with self.keeping_above(blocks, levels):
                count = self.fetch(blocks, levels)
            self.use(blocks, ())
            for move in self.planner.read([blocks[at] for at in sorted(self.delivered)]):
                self.copy(move)
        return count

    def fetch(self, blocks: Sequence[bytes], levels: Sequence[int]) -> int:
        ahead: dict[int, SharedRead | MemoryLease] = {}  # by position, the last ones first
        missing: list[bytes] = []
        wanted, left = self._wanted, len(levels)
        self._mark = self._reader.replacements
        try:
            while not self._replaced(blocks) and not self._is_late():
                wanted.changed.clear()
                for at in [at for at in ahead if at < wanted.first]:
                    end_read(ahead.pop(at))
                while left > wanted.first and len(ahead) < self._window(left - 1, levels):
                    left -= 1
                    ahead[left] = self._begin(blocks[left], left, levels[left])
                if not ahead:
                    break
                over, due = self._arrived(ahead)
                if over is None:
                    wanted.changed.wait(self._patience(due))
                    continue
                started = ahead.pop(over)
                try:
                    if not self._deliver(blocks, started, over):
                        missing.append(blocks[over])
                finally:
                    end_read(started)
        finally:
            for started in ahead.values():
                end_read(started)
        if missing:
            for tier in self._levels.tiers:
                tier.recheck(missing)
        return len(self.delivered)

    def _window(self, at: int, levels: Sequence[int]) -> int:
        """Return how many blocks to read at once, of which the one at ``at`` is one.

        Few, so that those from the end come first and few are dropped where computing meets them;
        more from a tier with a long latency.
        """
        raw_bytes = self._raw_bytes[at]
        most = self._limit(raw_bytes)
        if not levels[at]:
            return most
        reads = self._levels.tier(levels[at]).reads
        cost = reads.cost
        block_s = cost.seconds_per_byte * raw_bytes
        if not reads.known or not block_s:
            return min(most, _AT_ONCE)
        return min(most, _AT_ONCE + int(cost.seconds_fixed / block_s))

    def _begin(self, block: bytes, at: int, level: int) -> SharedRead | MemoryLease:
        started = self._reader.start(block, self._raw_bytes[at], level)
        if isinstance(started, SharedRead):
            started.watch(self._wanted.changed.set)
        return started

    def _arrived(
        self, ahead: dict[int, SharedRead | MemoryLease]
    ) -> tuple[int | None, float | None]:
        """Return the position of a read that is over, or None, and when to ask again."""
        soonest: float | None = None
        for at, started in ahead.items():
            due = started.due() if isinstance(started, SharedRead) else None
            if due is None:
                return at, None
            soonest = due if soonest is None else min(soonest, due)
        return None, soonest

    def _deliver(self, blocks: Sequence[bytes], started: SharedRead | MemoryLease, at: int) -> bool:
        """Pass a block to the sink; return False if it is missing."""
        lease = self._await(started)
        if lease is None:
            return False
        if at < self._wanted.first or self._replaced(blocks):
            return True  # not missing, and not wanted any more
        payload = lease.payload
        if not self._has_length(blocks[at], payload, self._raw_bytes[at]):
            return False
        self._sources.append(self._given(blocks[at], lease, self._source(started)))
        self._sink(at, payload)
        self.delivered.append(at)
        return True

    def _patience(self, due: float | None) -> float | None:
        """Return the seconds until ``due``, or until the end of the time for the read."""
        ends = [one for one in (due, self._until) if one is not None]
        return max(0.0, min(ends) - time.monotonic()) if ends else None

    def _is_late(self) -> bool:
        return self._until is not None and time.monotonic() >= self._until
