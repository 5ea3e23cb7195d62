"""`Store`: what `KVStore` and `BlockStore` have in common."""

from __future__ import annotations

import logging
import sys
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self, cast

from kvkeep.store.blocks.shared import ClosedUse, SharedStores
from kvkeep.store.blocks.stats import closed_is_illegal, seconds_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from types import TracebackType

    from kvkeep.store.backends.memory import MemoryBackend
    from kvkeep.store.backends.shm import ShmBackend
    from kvkeep.store.tiers import TieredStore

__all__ = ["Store"]

_LOG = logging.getLogger("kvkeep.store")


class Store:
    """Open tiers with pinned memory and a life cycle; sharable by name in a process.

    A shared store is one object with a shallow copy for each user. State that all users share must
    therefore be mutable objects; closing replaces ``_tiered`` in one copy alone.

    Thread safety: all methods.

    Attributes:
        cost: what computing KV takes, and reading and writing it, learned while the store is used.
    """

    _by_name: ClassVar[SharedStores[Any]]

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls._by_name = SharedStores(cls.__name__)

    def __init__(self, tiered: TieredStore, unit: str) -> None:
        self.cost = tiered.cost
        self._tiered = tiered
        self._unit = unit  # of what the log counts
        self._unpin: list[Callable[[], None]] = []  # undoes the pinning of memory
        self._shared_as: list[str] = []  # the name of a shared store until its user closes it

    @classmethod
    def _take(cls, name: str, given: Mapping[str, object], make: Callable[[], Self]) -> Self:
        """Return a handle of the shared store ``name``; ``make`` opens it for the first user."""
        store: Self = cls._by_name.take(name, given, make)
        store._shared_as = [name]
        return store

    def _pin_memory(self) -> None:
        if not self._unpin:
            self._unpin.append(pin_memory(self._tiered.memory.backend))

    def _begin(self) -> float:
        """Return the start time of a put or get, or 0.0 if it is not to be logged."""
        return time.perf_counter() if _LOG.isEnabledFor(logging.DEBUG) else 0.0

    def _log(
        self,
        began: float,
        what: Literal["put", "get"],
        *,
        asked: int,
        moved: int,
        size: int,
        tiers: Sequence[tuple[str, int]],
    ) -> None:
        """Log an operation for which `_begin` returned ``began``, not 0.

        ``moved`` of the ``asked`` tokens or blocks, of ``size`` bytes, were stored or returned:
        ``tiers`` has ``(tier, moved)`` in order. A put names the first tier only; slower tiers are
        written later.
        """
        seconds = time.perf_counter() - began
        _LOG.debug(
            "%s %d of %d %s, %d bytes in %.6f s, %.2f GB/s, %s",
            what, moved, asked, self._unit, size, seconds,
            size / 1e9 / seconds if seconds > 0 else 0.0,
            ", ".join(f"{name} {count}" for name, count in tiers) or "nowhere",
        )  # fmt: skip

    @property
    def _places(self) -> str:
        return ", ".join(tier.place for tier in self._tiered.stats())

    def flush(self, timeout: float | None = 60.0) -> bool:
        """Wait until the slower tiers hold all blocks that were put before this call.

        How durably, the options of each tier decide. Dropped blocks are not waited for. Return
        False if a tier failed, or needed more than ``timeout`` seconds.

        Raises:
            IllegalStep: the store is closed, or another thread closes it meanwhile.
        """
        timeout = None if timeout is None else seconds_of("timeout", timeout)
        with closed_is_illegal():
            return self._tiered.flush(timeout)

    def close(self, timeout: float = 10.0) -> bool:
        """`flush`, then release threads, files and memory. A second call does nothing.

        Each user of a shared store closes its own handle; the last call closes the store. Return
        what `flush` returned; True where other users remain.
        """
        timeout = seconds_of("timeout", timeout)
        if isinstance(self._tiered, ClosedUse) or self._tiered.inherited:
            return True
        if self._shared_as:
            with suppress(IndexError):  # another thread closes this handle at the same time
                name = self._shared_as.pop()
                self._tiered = cast("TieredStore", ClosedUse(self._tiered))
                return self._by_name.give_back(name, lambda store: store.close(timeout))
            return True
        while self._unpin:
            self._unpin.pop()()
        return self._tiered.close(timeout)

    def check(self) -> None:
        """Recount every tier; for tests, while nothing is read or written.

        Raises:
            AssertionError: the books of a tier are wrong, which is a bug of kvkeep.
        """
        self._tiered.check()

    def __enter__(self) -> Self:
        self._tiered.check_open()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


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
