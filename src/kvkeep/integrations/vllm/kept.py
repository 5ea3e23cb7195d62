"""The open store of an engine, with what vLLM's order of calls demands of it."""

from __future__ import annotations

import atexit
import heapq
import logging
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar

from kvkeep.core.errors import IllegalStep
from kvkeep.integrations.options import FLUSH_S
from kvkeep.integrations.vllm.stats import TierFigures

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from concurrent.futures import Future

    from kvkeep.integrations.vllm.stats import Counts
    from kvkeep.store import BlockStore

__all__ = ["OpenStore", "log_fault"]

_LOG = logging.getLogger("kvkeep.vllm")
_DELETE_WAIT_S = 0.05
T = TypeVar("T")


class OpenStore:
    """A store that several parts of vLLM use, and close in any order. Thread safety: all methods.

    After `close`, `lookup`, `knows`, `unknown`, `must_ask` and `pin` find nothing and save nothing,
    where the store itself raises.

    Attributes:
        closed: whether `close` was called.
    """

    def __init__(self, store: BlockStore, *, rank: int = 0) -> None:
        self.store = store
        self._lock = threading.Lock()
        self._ends: list[tuple[float, int, bytes]] = []  # a heap: when a block is to be deleted
        self._due: dict[bytes, float] = {}
        self._counting = threading.Lock()
        self._figures = TierFigures(rank)
        self.closed = False
        # If vLLM runs in a script's own process, it may exit without closing its parts.
        atexit.register(self.close)

    def lookup(self, keys: Sequence[bytes], deadline: float) -> int:
        """As `BlockStore.lookup`; 0 if the store is closed."""
        return _unless_closed(lambda: self.store.lookup(keys, deadline=deadline), 0)

    def lookup_each(self, keys: Sequence[bytes], deadline: float) -> list[bool]:
        """As `BlockStore.lookup_each`; all False if the store is closed."""
        return _unless_closed(
            lambda: self.store.lookup_each(keys, deadline=deadline), [False] * len(keys)
        )

    def knows(self, keys: Sequence[bytes]) -> int:
        """As `BlockStore.knows`; 0 if the store is closed."""
        return _unless_closed(lambda: self.store.knows(keys), 0)

    @property
    def must_ask(self) -> bool:
        """As `BlockStore.must_ask`; False if the store is closed."""
        return _unless_closed(lambda: self.store.must_ask, False)

    def unknown(self, keys: Sequence[bytes]) -> list[int]:
        """As `BlockStore.unknown`; empty if the store is closed, so that nothing is saved."""
        return _unless_closed(lambda: self.store.unknown(keys), [])

    def pin(self, keys: Sequence[bytes], seconds: float) -> None:
        """As `BlockStore.pin`; does nothing if the store is closed."""
        _unless_closed(lambda: self.store.pin(keys, seconds), 0)

    def expire(self, keys: Sequence[bytes], ttl: float) -> None:
        """Delete blocks ``ttl`` seconds from now; replaces an earlier ``ttl``."""
        end = time.monotonic() + ttl
        with self._lock:
            for key in keys:
                self._due[key] = end
                heapq.heappush(self._ends, (end, len(self._ends), key))

    @property
    def has_expired(self) -> bool:
        """Whether blocks are to be deleted now."""
        ends = self._ends
        return bool(ends) and ends[0][0] <= time.monotonic()

    def delete_expired(self) -> int:
        """Start to delete the blocks that are due; return how many. Costs nothing if none are.

        Waits for a moment only: a tier that hangs delays no request.
        """
        if not self.has_expired:
            return 0
        now = time.monotonic()
        keys = []
        with self._lock:
            while self._ends and self._ends[0][0] <= now:
                end, _, key = heapq.heappop(self._ends)
                if self._due.get(key) == end:
                    del self._due[key]
                    keys.append(key)
        if keys:
            deleting = threading.Thread(
                target=self._remove, args=(keys,), name="kvkeep ttl", daemon=True
            )
            deleting.start()
            deleting.join(_DELETE_WAIT_S)
        return len(keys)

    def _remove(self, keys: Sequence[bytes]) -> None:
        with suppress(IllegalStep):  # the store was closed meanwhile
            removed = self.store.remove(keys)
            if not removed.complete:
                _LOG.warning(
                    "kvkeep failed to delete expired blocks from %s", ", ".join(removed.failed)
                )

    def count_tiers(self, counts: Counts, *, states: bool = False, now: bool = False) -> None:
        """Count what the tiers did since the last call; with ``states``, set these, too.

        That is done once a second, and at each call with ``now``.

        Cost: 20 µs a tier.
        """
        with self._counting:  # loads end concurrently
            if states and not (now or self._figures.due):
                return
            tiers = self.store.stats()
            self._figures.count(tiers, counts)
            if states:
                self._figures.state(tiers, counts)

    def clear(self) -> bool:
        """Delete the namespace; False: a tier failed and may still hold blocks."""
        try:
            removed = self.store.clear()
        except IllegalStep:  # closed: the slower tiers still hold their blocks
            return False
        _LOG.info("kvkeep deleted %.1f MiB", removed.bytes / 2**20)
        if not removed.complete:
            _LOG.warning(
                "kvkeep failed to delete all blocks: %s failed. Try again later",
                ", ".join(removed.failed),
            )
        return removed.complete

    def close(self) -> None:
        """Write queued blocks, for at most `FLUSH_S`; a second call does nothing."""
        with self._lock:
            if self.closed:
                return
            self.closed = True
        atexit.unregister(self.close)
        if not self.store.close(FLUSH_S):
            _LOG.warning("kvkeep did not write all queued blocks within %g s", FLUSH_S)


def _unless_closed(call: Callable[[], T], closed: T) -> T:
    try:
        return call()
    except IllegalStep:
        return closed


def log_fault(future: Future[Any]) -> None:
    """Log an unexpected exception in a thread; for the request it is a miss."""
    if not future.cancelled() and (error := future.exception()) is not None:
        _LOG.error("a bug of kvkeep; tokens that were not loaded are computed", exc_info=error)
