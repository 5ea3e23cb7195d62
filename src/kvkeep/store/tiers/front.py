"""The memory in front of the tiers: a process's own, or that of all processes of a node.

Everything that is read or written passes through it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

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

__all__ = ["FrontMemory", "FrontOrder", "open_front"]


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
