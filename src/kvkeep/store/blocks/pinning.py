"""Page-locked ("pinned") memory, which a GPU copies at full speed."""

from __future__ import annotations

import logging
import sys
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvkeep.store.backends.memory import MemoryBackend
    from kvkeep.store.backends.shm import ShmBackend

__all__ = ["pin_memory"]

_LOG = logging.getLogger("kvkeep.store")


def pin_memory(backend: MemoryBackend | ShmBackend) -> Callable[[], None]:
    """Page-lock the memory of ``backend`` if CUDA is available; return a call that undoes it.

    This allocates all of that memory. If CUDA refuses, copies are slower but right. torch is not
    imported for this: a process that never imported it copies nothing to a GPU.
    """
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available():
        return lambda: None
    memory = torch.frombuffer(backend.region, dtype=torch.uint8)
    cudart = torch.cuda.cudart()
    status = int(cudart.cudaHostRegister(memory.data_ptr(), memory.numel(), 0))
    if status:
        _LOG.warning("%s could not be pinned: CUDA error %d", backend.describe(), status)
        # CUDA keeps the error for this thread, and torch would raise it after its next kernel.
        with suppress(RuntimeError):
            torch.zeros(1, device="cuda")
        return lambda: None
    pinned = [memory]

    def unpin() -> None:
        if pinned:
            cudart.cudaHostUnregister(pinned.pop().data_ptr())

    return unpin
