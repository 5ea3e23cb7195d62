"""Loads and saves of many pages, split among threads, and their statistics."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvkeep.core.errors import IllegalStep
from kvkeep.integrations.options import FLUSH_S, LOOKUP_S

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from concurrent.futures import Future

    from kvkeep.store import BlockStore

    Copy = Callable[[int, memoryview], None]

__all__ = ["Transfer", "Transport"]

_SAVE_S = 2.0  # that a save waits while memory is queued to be written; then pages are dropped
_THREADS = 4  # that copy the pages of one call
_SLICE_BYTES = 1 << 20  # smaller slices are not worth another thread
_SLICE_MEMORY = 64  # pages of memory for each slice being read: twice the read-ahead


@dataclass(frozen=True, slots=True)
class Transfer:
    """Pages and bytes that one call moved, and its seconds."""

    pages: int
    bytes: int
    seconds: float

    @property
    def bandwidth(self) -> float:
        """GB/s; 0 without a duration."""
        return self.bytes / 1e9 / self.seconds if self.seconds else 0.0


class Transport:
    """Moves pages between a caller's memory and a store, in slices side by side.

    A page is one record, or ``records`` of them, whose keys and numbers follow one another. It is
    stored if all of them are.

    Thread safety: all methods. After `close` everything is a miss and nothing is stored.

    Attributes:
        counting: whether `batches` collects transfers.
    """

    def __init__(self, store: BlockStore, load_timeout: float) -> None:
        self.store = store
        self._load_timeout = load_timeout
        # One for each direction, so that a slow tier delays only one of them.
        self._loading = ThreadPoolExecutor(_THREADS, "kvkeep load")
        self._saving = ThreadPoolExecutor(_THREADS, "kvkeep save")
        self._lock = threading.Lock()
        self._loaded: list[Transfer] = []
        self._saved: list[Transfer] = []
        self._closed = False
        self.counting = False

    def lookup(self, keys: Sequence[bytes], until: float | None = None, records: int = 1) -> int:
        """Return how many leading pages are stored; shared tiers are queried until ``until``."""
        left = LOOKUP_S
        if until is not None:
            left = min(left, max(0.0, until - time.monotonic()))
        try:
            return self.store.lookup(keys, deadline=left) // records
        except IllegalStep:
            return 0

    def load(self, keys: Sequence[bytes], size: int, sink: Copy, records: int = 1) -> list[bool]:
        """Hand each record, of ``size`` bytes, to ``sink(i, raw)``.

        Returns which pages came within ``load_timeout``. Parts of other pages may have come.
        """
        began = time.monotonic()
        until = began + self._load_timeout

        def move(start: int, stop: int) -> list[bool]:
            def take(at: int, raw: memoryview) -> None:
                sink(start * records + at, raw)

            part = keys[start * records : stop * records]
            left = max(0.0, until - time.monotonic())
            got = self.store.read(part, [size] * len(part), take, deadline=left)
            return [at < got // records for at in range(stop - start)]

        pages, page_bytes = len(keys) // records, size * records
        came = self._sliced(self._loading, move, pages, page_bytes, self._readable(size))
        self._count(self._loaded, came, page_bytes, began)
        return came

    def save(self, keys: Sequence[bytes], size: int, fill: Copy, records: int = 1) -> list[bool]:
        """Store records, of ``size`` bytes, that ``fill(i, raw)`` writes; return which pages are.

        Returns when memory has them. If memory is nearly full of pages that still have to be
        written, returns when the slower tiers have them, or after two seconds.
        """
        began = time.monotonic()
        wait_s = _SAVE_S if self._crowded(len(keys) * size) else None

        def move(start: int, stop: int) -> list[bool]:
            def give(at: int, raw: memoryview) -> None:
                fill(start * records + at, raw)

            part = keys[start * records : stop * records]
            kept = self.store.write(part, [size] * len(part), give, wait=wait_s)
            return [at < kept // records for at in range(stop - start)]

        pages, page_bytes = len(keys) // records, size * records
        kept = self._sliced(self._saving, move, pages, page_bytes, _THREADS)
        self._count(self._saved, kept, page_bytes, began)
        return kept

    def batches(self) -> tuple[list[Transfer], list[Transfer]]:
        """Return the loads and the saves since the last call."""
        with self._lock:
            both = self._loaded, self._saved
            self._loaded, self._saved = [], []
        return both

    def close(self) -> bool:
        """Write queued blocks, for at most `FLUSH_S`; return whether all were written."""
        self._closed = True
        good = self.store.close(FLUSH_S)
        self._loading.shutdown(wait=False)
        self._saving.shutdown(wait=False)
        return good

    def _sliced(
        self,
        crew: ThreadPoolExecutor,
        move: Callable[[int, int], list[bool]],
        count: int,
        size: int,
        limit: int,
    ) -> list[bool]:
        """Call ``move(start, stop)`` for slices of ``count`` pages, the first in this thread."""
        if not count:
            return []
        slices = max(1, min(limit, count, count * size // _SLICE_BYTES))
        edges = [count * at // slices for at in range(slices + 1)]
        others: list[Future[list[bool]]] = []
        try:
            others += [crew.submit(move, *edges[at : at + 2]) for at in range(1, slices)]
            moved = move(*edges[:2])
            for other in others:
                moved += other.result()
        except (IllegalStep, RuntimeError):  # the store, or the thread pool, was closed
            if not self._closed:
                raise
            return [False] * count
        finally:
            wait(others)  # even after an error: they use the caller's memory
        return moved

    def _crowded(self, more: int) -> bool:
        """Whether this many bytes may not fit behind the queued writes, so that a save must wait.

        Otherwise the slower tiers would drop them, and they would be lost when memory evicts them.
        """
        front, *below = self.store.stats()
        waiting = max((tier.queued_bytes for tier in below), default=0)
        return bool(below) and waiting + more > (front.capacity or 0) // 2

    def _readable(self, size: int) -> int:
        """Return how many slices may read at once, so that their read-ahead fits into memory."""
        capacity = self.store.stats()[0].capacity or 0
        return max(1, min(_THREADS, capacity // (_SLICE_MEMORY * size)))

    def _count(self, batches: list[Transfer], moved: list[bool], size: int, began: float) -> None:
        if self.counting and (pages := sum(moved)):
            batch = Transfer(pages, pages * size, time.monotonic() - began)
            with self._lock:
                batches.append(batch)
