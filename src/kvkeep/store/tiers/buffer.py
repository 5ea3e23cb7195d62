"""The buffer in front of the tiers, where no memory is given; and buffers of single records."""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING, Final

import numpy as np

from kvkeep.core.geometry.units import format_bytes
from kvkeep.store.backends.base import ALIGNMENT
from kvkeep.store.backends.buffers import aligned
from kvkeep.store.backends.free_memory import free_memory

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvkeep.store.backends.memory import Lease

__all__ = ["LEAST_BUFFER", "PROMPT_TOKENS", "SmallBuffer", "SpareBuffers", "buffer_bytes"]

_LOG = logging.getLogger("kvkeep.tiers")

LEAST_BUFFER: Final = 256 << 20
"""Bytes of the buffer at least; all transfers pass through it."""
PROMPT_TOKENS: Final = 4096
"""Tokens of the prompts by which the buffer is sized."""
_PROMPTS: Final = 4  # that fit; three quarters of the memory may wait to be written
_SHARE: Final = 10  # at most a tenth of the free memory: a node has several ranks


def buffer_bytes(prompt_bytes: int) -> int:
    """Return the bytes of the buffer for prompts of `PROMPT_TOKENS` tokens of ``prompt_bytes``.

    Four of them, but no more than a tenth of the memory that is free now, and at least
    `LEAST_BUFFER`. The memory is taken when it is used first.
    """
    wanted = _PROMPTS * prompt_bytes
    free = min((free for free, _ in free_memory()), default=None)
    if free is not None:
        wanted = min(wanted, free // _SHARE)
    return max(LEAST_BUFFER, wanted)


class SmallBuffer:
    """Warns once of KV that was dropped because memory was full of blocks that wait to be written.

    Thread safety: all methods; two threads at once may both warn.

    Arguments:
        name: of the memory in front.
        capacity: its bytes.
    """

    def __init__(self, name: str, capacity: int) -> None:
        self._name = name
        self._capacity = capacity
        self._warned = False

    def dropped(self, tier: str, why: str) -> None:
        """Note a drop in ``tier``, for the reason ``why`` (`kvkeep.store.tiers.loss_log.Miss`)."""
        by_memory = why == ("no room" if tier == self._name else "queue full")
        if by_memory and not self._warned:
            self._warned = True
            _LOG.warning(
                "KV was dropped: it came faster than the tiers below %s write it, and the %s that "
                "may wait there were full (%s: %s). With more memory more of it is stored: put "
                "memory://%s in front of the tiers",
                self._name,
                format_bytes(self._capacity),
                tier,
                why,
                format_bytes(2 * self._capacity).replace(" ", ""),
            )


class SpareBuffers:
    """Aligned buffers of any size, of which up to ``limit`` bytes are kept when they are unused.

    New memory costs more at its first touch than the copy that fills it, so the buffer that was
    given back last is taken first: it may still be in a CPU cache.

    Thread safety: all methods. Cost: about a microsecond.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._lock = threading.Lock()
        self._kept: dict[int, list[memoryview]] = {}  # by size
        self._bytes = 0

    def take(self, size: int) -> memoryview:
        """Return a writable buffer of ``size`` bytes; its content is undefined."""
        with self._lock:
            kept = self._kept.get(size)
            if kept:
                self._bytes -= size
                return kept.pop()
        return aligned(size)

    def prepare(self, size: int, count: int) -> None:
        """Have ``count`` buffers of ``size`` bytes ready, all of their memory touched."""
        new = [aligned(size) for _ in range(min(count, self._limit // size))]
        for buffer in new:
            np.frombuffer(buffer, np.uint8)[::ALIGNMENT] = 0  # releases the GIL
            self.give_back(buffer)

    def commit_all(self, drafts: Sequence[Lease]) -> None:
        """Do nothing: none of its leases is a draft."""

    def release_all(self, leases: Sequence[Lease]) -> None:
        """Take back the buffers of ``leases``, which `take` returned."""
        for lease in leases:
            buffer, lease.hold = lease.hold, None
            if buffer is not None:
                self.give_back(buffer)

    def give_back(self, buffer: memoryview) -> None:
        """Keep a buffer of `take` that is not used any more."""
        size = len(buffer)
        with self._lock:
            if self._bytes + size > self._limit:
                self._kept.clear()  # of other sizes, perhaps
                self._bytes = 0
            if size <= self._limit:
                self._kept.setdefault(size, []).append(buffer)
                self._bytes += size
