"""Pinned memory: what a GPU copies to and from at full speed."""

from __future__ import annotations

import logging
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvkeep.store.backends.memory import MemoryBackend

__all__ = ["pin_memory"]

_LOG = logging.getLogger("kvkeep.store")


def pin_memory(backend: MemoryBackend) -> Callable[[], None]:
    """Pin the memory of ``backend`` when CUDA is there; the call that undoes it.

    All of it is taken from the system then. Where CUDA refuses, copies are slower, not wrong. A
    process that never imported torch copies nothing to a GPU: torch is not imported for this.
    """
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available():
        return lambda: None
    memory = torch.frombuffer(backend.arena.buffer, dtype=torch.uint8)
    cudart = torch.cuda.cudart()
    status = int(cudart.cudaHostRegister(memory.data_ptr(), memory.numel(), 0))
    if status:
        _LOG.warning("%s could not be pinned: CUDA error %d", backend.describe(), status)
        return lambda: None
    pinned = [memory]

    def unpin() -> None:
        if pinned:
            cudart.cudaHostUnregister(pinned.pop().data_ptr())

    return unpin
