"""The memory in front of the tiers: a process's own, or that of all processes of a node.

Everything that is read or written passes through it. Where none is given, it is a buffer.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

from kvkeep.core.geometry.units import format_bytes
from kvkeep.store.backends.free_memory import free_memory
from kvkeep.store.backends.memory import MemoryBackend
from kvkeep.store.tiers.memory import MemoryTier
from kvkeep.store.tiers.shared_memory import SharedMemoryTier

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvkeep.store.tiers.index import Index
    from kvkeep.store.tiers.loss_log import LossLog
    from kvkeep.store.tiers.memory import MemorySpec
    from kvkeep.store.tiers.shared_memory import SharedOrder
    from kvkeep.store.tiers.tier_shares import TenantWeights

    FrontMemory = MemoryTier | SharedMemoryTier
    FrontOrder = Index | SharedOrder

__all__ = [
    "LEAST_BUFFER", "PROMPT_TOKENS", "FrontMemory", "FrontOrder", "SmallBuffer", "buffer_bytes",
    "open_front",
]  # fmt: skip

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


def open_front(
    spec: MemorySpec,
    losses: LossLog,
    evicted: Callable[[bytes], None],
    shares: TenantWeights | None = None,
) -> FrontMemory:
    """Return the memory of ``spec``; see `MemoryTier` for the arguments.

    Memory that processes share takes no ``shares``; see `open_tiers`.
    """
    if isinstance(spec.backend, MemoryBackend):
        return MemoryTier(spec, losses, evicted, shares)
    assert shares is None
    return SharedMemoryTier(spec, losses, evicted)


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
