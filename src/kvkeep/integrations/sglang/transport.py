"""Batches of pages into the store and out of it, by several threads, and counted."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvkeep.core.errors import IllegalStep

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from concurrent.futures import Future

    from kvkeep.integrations.sglang.options import StorageOptions
    from kvkeep.store import BlockStore

    Copy = Callable[[int, memoryview], None]

__all__ = ["Transfer", "Transport"]

_SLICE_BYTES = 1 << 20  # less is not worth another thread
_SLICE_MEMORY = 64  # pages in memory for each slice that is read: reading ahead, twice over


@dataclass(frozen=True, slots=True)
class Transfer:
    """What one call moved: pages, bytes, and in how many seconds."""

    pages: int
    bytes: int
    seconds: float

    @property
    def bandwidth(self) -> float:
        """GB/s."""
        return self.bytes / 1e9 / self.seconds if self.seconds else 0.0


class Transport:
    """Moves pages between what a caller has and a store, in slices beside each other.

    Thread safety: all methods. A closed store has nothing, and takes nothing.
    """

    def __init__(self, store: BlockStore, options: StorageOptions) -> None:
        self.store = store
        self._options = options
        # One for each direction: what waits for a slow place does not hold up the other.
        self._loading = ThreadPoolExecutor(options.threads, "kvkeep load")
        self._saving = ThreadPoolExecutor(options.threads, "kvkeep save")
        self._lock = threading.Lock()
        self._loaded: list[Transfer] = []
        self._saved: list[Transfer] = []
        self._closed = False
        self.counting = False

    def lookup(self, keys: Sequence[bytes], until: float | None = None) -> int:
        """Leading ``keys`` that are there; places that others write to are asked until then."""
        left = self._options.lookup_timeout
        if until is not None:
            left = min(left, max(0.0, until - time.monotonic()))
        try:
            return self.store.lookup(keys, deadline=left)
        except IllegalStep:
            return 0

    def load(self, keys: Sequence[bytes], size: int, sink: Copy) -> list[bool]:
        """Hand each page to ``sink(i, raw)``; which of them came, in ``load_timeout``."""
        began = time.monotonic()
        until = began + self._options.load_timeout

        def move(start: int, stop: int) -> list[bool]:
            def take(at: int, raw: memoryview) -> None:
                sink(start + at, raw)

            part = keys[start:stop]
            left = max(0.0, until - time.monotonic())
            got = self.store.read(part, [size] * len(part), take, deadline=left)
            return [at < got for at in range(len(part))]

        came = self._sliced(self._loading, move, len(keys), size, self._readable(size))
        self._count(self._loaded, came, size, began)
        return came

    def save(self, keys: Sequence[bytes], size: int, fill: Copy) -> list[bool]:
        """Keep pages that ``fill(i, raw)`` writes; which of them are kept.

        Returns when memory has them; where it has not much room left, when the slower tiers have
        them, or ``save_timeout`` later.
        """
        began = time.monotonic()
        wait_s = self._options.save_timeout if self._crowded(len(keys) * size) else None

        def move(start: int, stop: int) -> list[bool]:
            def give(at: int, raw: memoryview) -> None:
                fill(start + at, raw)

            part = keys[start:stop]
            kept = self.store.write(part, [size] * len(part), give, wait=wait_s)
            return [at < kept for at in range(len(part))]

        kept = self._sliced(self._saving, move, len(keys), size, self._options.threads)
        self._count(self._saved, kept, size, began)
        return kept

    def batches(self) -> tuple[list[Transfer], list[Transfer]]:
        """What was loaded, and what was saved, since this was asked last."""
        with self._lock:
            both = self._loaded, self._saved
            self._loaded, self._saved = [], []
        return both

    def close(self) -> bool:
        """Write what waits, for ``flush_timeout`` at most; whether all of it is written."""
        self._closed = True
        good = self.store.close(self._options.flush_timeout)
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
        """``move(start, stop)`` for slices of ``count`` pages, the first of them in this thread."""
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
        except (IllegalStep, RuntimeError):  # of the store; of threads that were given back
            if not self._closed:
                raise
            return [False] * count
        finally:
            wait(others)  # whatever happened: they copy from and to the caller's memory
        return moved

    def _crowded(self, more: int) -> bool:
        """Whether so many bytes may not fit behind what waits to be written: then they wait, too.

        Else they would be dropped for the slower tiers, and lost where memory evicts them.
        """
        front, *below = self.store.stats()
        waiting = max((tier.queued_bytes for tier in below), default=0)
        return bool(below) and waiting + more > (front.capacity or 0) // 2

    def _readable(self, size: int) -> int:
        """Slices that may read at once: all that they read ahead has to be in memory."""
        capacity = self.store.stats()[0].capacity or 0
        return max(1, min(self._options.threads, capacity // (_SLICE_MEMORY * size)))

    def _count(self, batches: list[Transfer], moved: list[bool], size: int, began: float) -> None:
        if self.counting and (pages := sum(moved)):
            batch = Transfer(pages, pages * size, time.monotonic() - began)
            with self._lock:
                batches.append(batch)
