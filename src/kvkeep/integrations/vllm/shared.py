"""The store of a worker, and how a scheduler in the same process finds it."""

from __future__ import annotations

import atexit
import heapq
import logging
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

from kvkeep.core.errors import IllegalStep, InvalidValue

if TYPE_CHECKING:
    from collections.abc import Sequence
    from concurrent.futures import Future

    from kvkeep.integrations.vllm.groups import Groups
    from kvkeep.integrations.vllm.options import ConnectorOptions
    from kvkeep.integrations.vllm.stats import Counts
    from kvkeep.store import BlockStore

__all__ = ["SharedStore", "log_fault"]

_LOG = logging.getLogger("kvkeep.vllm")
_PATIENCE_S = 0.05

# By vLLM's engine id. vLLM makes both sides itself and lets them know nothing of each other, so
# this is how they meet; it holds nothing alive.
_ENGINES: WeakValueDictionary[str, SharedStore] = WeakValueDictionary()


class SharedStore:
    """One store with what both sides do with it. Thread safety: all methods.

    vLLM ends its two sides in any order, so the scheduler may ask after the worker has closed the
    store. `lookup`, `knows`, `unknown` and `pin` answer for a closed store that it has nothing and
    takes nothing, where the store itself raises.

    Attributes:
        news: set when something that a request waits for is done.

    Raises:
        InvalidValue: the engine has one already.
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
        self.sizes = sizes  # bytes of a record, by group
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
        # Where vLLM runs in a script's own process, nobody may tell us that it ends.
        atexit.register(self.close)

    @staticmethod
    def find(engine: str) -> SharedStore | None:
        """That of a worker in this process."""
        return _ENGINES.get(engine)

    def lookup(self, keys: Sequence[bytes], deadline: float) -> int:
        """See `BlockStore.lookup`; 0 once the store is closed."""
        try:
            return self.store.lookup(keys, deadline=deadline)
        except IllegalStep:
            return 0

    def knows(self, keys: Sequence[bytes]) -> int:
        """See `BlockStore.knows`; 0 once the store is closed."""
        try:
            return self.store.knows(keys)
        except IllegalStep:
            return 0

    @property
    def must_ask(self) -> bool:
        """See `BlockStore.must_ask`; False once the store is closed."""
        try:
            return self.store.must_ask
        except IllegalStep:
            return False

    def unknown(self, keys: Sequence[bytes]) -> list[int]:
        """See `BlockStore.unknown`; none once the store is closed: it keeps nothing more."""
        try:
            return self.store.unknown(keys)
        except IllegalStep:
            return []

    def pin(self, keys: Sequence[bytes], seconds: float) -> None:
        """See `BlockStore.pin`; nothing once the store is closed."""
        with suppress(IllegalStep):
            self.store.pin(keys, seconds)

    def expire(self, keys: Sequence[bytes], ttl: float) -> None:
        """Have blocks deleted ``ttl`` seconds from now; an earlier word on them is forgotten."""
        end = time.monotonic() + ttl
        with self._lock:
            for key in keys:
                self._due[key] = end
                heapq.heappush(self._ends, (end, len(self._ends), key))

    def delete_expired(self) -> int:
        """Have deleted what is due; how many blocks. Cost: next to nothing where nothing is.

        It is waited for a moment, and goes on behind that: a place that hangs holds up nobody.
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
            deleting.join(_PATIENCE_S)
        return len(keys)

    def _remove(self, keys: Sequence[bytes]) -> None:
        with suppress(IllegalStep):  # the store was closed meanwhile
            removed = self.store.remove(keys)
            if not removed.complete:
                _LOG.warning(
                    "kvkeep could not delete expired blocks from %s", ", ".join(removed.failed)
                )

    def count_hits(self, counts: Counts) -> None:
        """Count what the tiers handed out since the last call."""
        with self._counting:  # loads end side by side, and a Prometheus counter never goes back
            for tier in self.store.stats():
                hits = tier.counters["hits"]
                before = self._hits.get(tier.name, 0)
                self._hits[tier.name] = hits
                counts.hits(tier.name, hits - before)

    def clear(self) -> bool:
        """Delete the namespace; False: a tier could not be asked to, and may have it still."""
        try:
            removed = self.store.clear()
        except IllegalStep:  # closed: its slower tiers have all they had
            return False
        _LOG.info("kvkeep deleted %.1f MiB", removed.bytes / 2**20)
        if not removed.complete:
            _LOG.warning(
                "kvkeep could not delete all there is: %s failed. Try again later",
                ", ".join(removed.failed),
            )
        return removed.complete

    def close(self) -> None:
        """Write what waits, for ``flush_timeout`` at most; a second call does nothing."""
        with self._lock:
            if self.closed:
                return
            self.closed = True
        atexit.unregister(self.close)
        if not self.store.close(self._options.flush_timeout):
            _LOG.warning(
                "kvkeep did not write all it had within %g s (flush_timeout)",
                self._options.flush_timeout,
            )


def log_fault(future: Future[Any]) -> None:
    """What ended a thread's work unforeseen is told: those who wait see a miss."""
    if not future.cancelled() and (error := future.exception()) is not None:
        _LOG.error("a fault of kvkeep; what was to be loaded is computed", exc_info=error)
