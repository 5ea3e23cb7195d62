"""The store of a worker, and how a scheduler in the same process finds it."""

from __future__ import annotations

import atexit
import heapq
import logging
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakValueDictionary

from kvkeep.core.errors import IllegalStep, InvalidValue

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from concurrent.futures import Future

    from kvkeep.integrations.vllm.groups import Groups
    from kvkeep.integrations.vllm.options import ConnectorOptions
    from kvkeep.integrations.vllm.stats import Counts
    from kvkeep.store import BlockStore

__all__ = ["SharedStore", "log_fault"]

_LOG = logging.getLogger("kvkeep.vllm")
_DELETE_WAIT_S = 0.05
T = TypeVar("T")

# By vLLM's engine id. vLLM makes both sides and gives neither a reference to the other, so they
# meet here. Weak: it keeps no store alive.
_ENGINES: WeakValueDictionary[str, SharedStore] = WeakValueDictionary()


class SharedStore:
    """A worker's store, used by both sides. Thread safety: all methods.

    vLLM closes its two sides in any order, so the scheduler may still use a store that the worker
    has closed. Then `lookup`, `knows`, `unknown`, `must_ask` and `pin` find nothing and save
    nothing, where the store itself raises.

    Attributes:
        sizes: bytes of a record, by group.
        news: set when a load or a lookup has ended.
        closed: whether `close` was called.

    Raises:
        InvalidValue: the engine has another open store.
    """

    def __init__(
        self,
        engine: str,
        store: BlockStore,
        groups: Groups,
        sizes: list[int],
        options: ConnectorOptions,
    ) -> None:
        self.store = store
        self.groups = groups
        self.sizes = sizes
        self.news = threading.Event()
        self._options = options
        self._lock = threading.Lock()
        self._ends: list[tuple[float, int, bytes]] = []  # a heap: when a block is to be deleted
        self._due: dict[bytes, float] = {}
        self._counting = threading.Lock()
        self._hits: dict[str, float] = {}
        self.closed = False
        other = _ENGINES.get(engine)
        if other is not None and not other.closed:
            store.close(0)
            raise InvalidValue(
                "there are two KVKeepConnectors in one engine, which would find each other's "
                "blocks; leave one of them, with the tiers of both"
            )
        _ENGINES[engine] = self
        # If vLLM runs in a script's own process, it may exit without closing the connector.
        atexit.register(self.close)

    @staticmethod
    def find(engine: str) -> SharedStore | None:
        """Return the store of a worker in this process, by vLLM's engine id."""
        return _ENGINES.get(engine)

    def lookup(self, keys: Sequence[bytes], deadline: float) -> int:
        """As `BlockStore.lookup`; 0 if the store is closed."""
        return _unless_closed(lambda: self.store.lookup(keys, deadline=deadline), 0)

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

    def delete_expired(self) -> int:
        """Start to delete the blocks that are due; return how many. Costs nothing if none are.

        Waits for a moment only: a tier that hangs delays no request.
        """
        if not self._ends or self._ends[0][0] > time.monotonic():
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

    def count_hits(self, counts: Counts) -> None:
        """Count the blocks that were read from each tier since the last call."""
        with self._counting:  # loads end concurrently, and a Prometheus counter cannot decrease
            for tier in self.store.stats():
                hits = tier.counters["hits"]
                before = self._hits.get(tier.name, 0)
                self._hits[tier.name] = hits
                counts.hits(tier.name, hits - before)

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
        """Write queued blocks, for at most ``flush_timeout``; a second call does nothing."""
        with self._lock:
            if self.closed:
                return
            self.closed = True
        atexit.unregister(self.close)
        if not self.store.close(self._options.flush_timeout):
            _LOG.warning(
                "kvkeep did not write all queued blocks within %g s (flush_timeout)",
                self._options.flush_timeout,
            )


def _unless_closed(call: Callable[[], T], closed: T) -> T:
    try:
        return call()
    except IllegalStep:
        return closed


def log_fault(future: Future[Any]) -> None:
    """Log an unexpected exception in a thread; for the request it is a miss."""
    if not future.cancelled() and (error := future.exception()) is not None:
        _LOG.error("a bug of kvkeep; tokens that were not loaded are computed", exc_info=error)
