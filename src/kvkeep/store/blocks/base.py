"""`Store`: what `KVStore` and `BlockStore` have in common; results and statistics of both."""

from __future__ import annotations

import logging
import sys
import threading
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Literal, Self

from kvkeep.core.cost import CostModel
from kvkeep.core.errors import BackendFailed, IllegalStep, check_type, number
from kvkeep.store.tiers import TieredStore, TieringPolicy, open_tiers

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from types import TracebackType

    from kvkeep.store.backends import Backend
    from kvkeep.store.backends.memory import MemoryBackend
    from kvkeep.store.backends.shm import ShmBackend
    from kvkeep.store.codecs import BlockShape
    from kvkeep.store.tiers import Miss, TenantWeights, TierStats

__all__ = [
    "Lookup",
    "Put",
    "Store",
    "StoreStats",
    "closed_is_illegal",
    "runs_of",
    "seconds_of",
]

_LOG = logging.getLogger("kvkeep.store")


class Store:
    """Open tiers with pinned memory and a life cycle.

    Thread safety: all methods.

    Attributes:
        cost: what computing KV takes, and reading and writing it, learned while the store is used.
    """

    def __init__(
        self,
        tiers: Sequence[str | Backend],
        policy: TieringPolicy | None,
        cost: CostModel | None,
        *,
        unit: Literal["tokens", "blocks"],
        notes: Mapping[bytes, bytes],
        prompt_bytes: int,
        shape: BlockShape | None = None,
        shares: TenantWeights | None = None,
    ) -> None:
        check_type("policy", policy, TieringPolicy | None, "a TieringPolicy, as Inclusive(),")
        check_type("cost", cost, CostModel | None, "a kvkeep.core.cost.CostModel")
        front, below = open_tiers(
            tiers, shape, shares=shares is not None, prompt_bytes=prompt_bytes
        )
        self._tiered = TieredStore(front, below, policy, notes=notes, shares=shares, cost=cost)
        self.cost = self._tiered.cost
        self._unit = unit  # of what the log counts
        self._unpin: list[Callable[[], None]] = []  # undoes the pinning of memory

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

        Return what `flush` returned.
        """
        timeout = seconds_of("timeout", timeout)
        if self._tiered.inherited:
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


class closed_is_illegal:  # noqa: N801 - it reads as a context manager
    """Raise `IllegalStep` if another thread closed the store during the operation."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, BackendFailed):
            raise IllegalStep("the store was closed by another thread") from error


def seconds_of(name: str, value: object, *, ends: bool = False) -> float:
    """Check a time in seconds given by a caller; with ``ends``, it must be positive and finite.

    A time longer than a thread can wait, some hundred years, is cut to that.

    Raises:
        InvalidValue: ``value`` is no such number.
    """
    needed = "a time above zero that ends" if ends else "a number"
    above = 0 if ends else None
    seconds = number(name, value, f"{needed}, in seconds,", above=above, ends=ends)
    return min(seconds, threading.TIMEOUT_MAX / 2)  # half: it is added to the clock


@dataclass(frozen=True, slots=True)
class Put:
    """The result of a put: how many tokens were stored, skipped or dropped.

    Attributes:
        tokens: newly stored.
        skipped: stored before; their bytes were not touched.
        dropped: not stored for lack of room.
        partial: not stored because they are in no whole block, at either end (see ``tail``).
        failed: with ``replace``, the tiers that failed to delete older KV. This store does not read
            it any more; others may.
        unread: not stored because answers like this one are never read again.
    """

    tokens: int
    skipped: int
    dropped: int
    partial: int
    failed: tuple[str, ...] = field(default=(), repr=False)
    unread: int = 0


@dataclass(frozen=True, slots=True)
class Lookup:
    """The number of tokens stored as a prefix of a prompt, and ``(tier name, tokens)`` in order.

    Attributes:
        tokens: a `get` could return so many.
        tiers: of these tokens.
        stored_tokens: how far the layers that keep every token reach, in whole blocks: of
            snapshots, a state or a window may be missing there. Otherwise as many as ``tokens``.
        miss: why the first block behind ``tokens`` cannot be read; None if nothing is missing.
    """

    tokens: int
    tiers: tuple[tuple[str, int], ...]
    stored_tokens: int = field(default=-1, repr=False)
    miss: Miss | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if self.stored_tokens < 0:
            object.__setattr__(self, "stored_tokens", self.tokens)  # the dataclass is frozen

    def __int__(self) -> int:
        return self.tokens


def runs_of(parts: Iterable[tuple[str, int]]) -> tuple[tuple[str, int], ...]:
    """Merge neighbouring ``(tier, tokens)`` of the same tier."""
    runs: list[tuple[str, int]] = []
    for name, tokens in parts:
        if runs and runs[-1][0] == name:
            runs[-1] = (name, runs[-1][1] + tokens)
        else:
            runs.append((name, tokens))
    return tuple(runs)


@dataclass(frozen=True)
class StoreStats:
    """Counts of tokens since the store was opened, and the state of its tiers, fastest first.

    Callers of `get` requested ``asked_tokens`` and got ``hit_tokens``. `put` stored ``put_tokens``,
    skipped ``skipped_tokens`` that were stored before, and dropped ``dropped_tokens`` for lack of
    room. ``unread_tokens`` of answers were not stored because answers like them are never read
    again.
    """

    gets: int = 0
    asked_tokens: int = 0
    hit_tokens: int = 0
    puts: int = 0
    put_tokens: int = 0
    skipped_tokens: int = 0
    dropped_tokens: int = 0
    unread_tokens: int = 0
    tiers: tuple[TierStats, ...] = ()

    @property
    def hit_rate(self) -> float:
        """``hit_tokens / asked_tokens``; 0 before the first get."""
        return self.hit_tokens / self.asked_tokens if self.asked_tokens else 0.0

    def as_dict(self) -> dict[str, object]:
        """Return plain values, for JSON."""
        return asdict(self) | {"hit_rate": self.hit_rate}
