"""`Loads`: reads KV of prompts from a store, in the background; `PageLoads` those of plain models.

    lookup ──▶ prefetch (while the answer waits) ──▶ admitted ──▶ queued ──▶ read ──▶ chunks

Threads of this module call the store, so that a tier that hangs never holds up the engine; the
engine's thread only writes chunks that have arrived to pages.
"""

from __future__ import annotations

import logging
import threading
import time
from abc import ABC, abstractmethod
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from kvkeep.core.errors import IllegalStep
from kvkeep.serve.engine.offload.forms import Buffers
from kvkeep.serve.engine.offload.load import Load, LoadChunk
from kvkeep.serve.engine.offload.writes import DaemonThreads, block_keys

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvkeep.core.pages.tensors import PagedTensors
    from kvkeep.observe.usage import LoadReport
    from kvkeep.serve.engine.offload.forms import Forms
    from kvkeep.serve.engine.offload.writes import Known
    from kvkeep.store import KVStore, Miss

__all__ = ["Loads", "PageLoads"]

_log = logging.getLogger(__name__)

# A lookup may wait for a server. Of reads, one runs at a time, unless it is late.
_LOOKUP_THREADS = 4
_READ_THREADS = 4
# Host memory for blocks that wait for the engine's thread.
_BUFFER_BYTES = 192 << 20
_MOST_BUFFERS = 256
# Seconds between two looks at whether a read that waits for a buffer was cancelled.
_LOOK_S = 0.05
# Seconds that close waits for each thread.
_CLOSE_S = 0.5


class Loads(ABC):
    """Looks prompts up in a store, and reads their KV into memory.

    Thread safety: all methods belong to the engine's thread; ``arrival`` is set whenever a lookup
    ends, a chunk arrives or a load ends.
    """

    whole = False
    """Whether only all that is stored of a prompt is of use."""

    def __init__(self, store: KVStore, known: Known, *, page_size: int) -> None:
        self.arrival = threading.Event()
        self._store = store
        self._known = known
        self.page_size = page_size
        self.alive_at = 0.0
        """When a chunk of any load arrived last, in monotonic seconds."""
        self._block = store.block_tokens
        self._lookups = DaemonThreads("kvkeep lookups", _LOOKUP_THREADS, _log)
        self._reads = DaemonThreads("kvkeep reads", _READ_THREADS, _log)
        self._lock = threading.Lock()
        self._queued: list[tuple[Any, Load, int]] = []  # by the order of their answers
        self._running: list[Load] = []

    # --- lookup and prefetch ---------------------------------------------------------------------

    def start(self, load: Load) -> None:
        """Look up ``load.tokens`` in the background."""
        self._lookups.submit(lambda: self._run_lookup(load))

    def _run_lookup(self, load: Load) -> None:
        found: tuple[int, Sequence[tuple[str, int]]] = 0, ()
        try:
            if not load.cancelled:
                found = self._look_up(load)
        finally:
            load.looked_up(*found)
            self.arrival.set()

    def _look_up(self, load: Load) -> tuple[int, Sequence[tuple[str, int]]]:
        tokens, tenant = load.tokens, load.tenant
        began = time.monotonic()
        there = self._store.lookup(tokens, tenant=tenant)
        found = there.tokens
        keys = block_keys(load.namespace, tokens, self._block)
        stored = block_keys(load.namespace, tokens[:found], self._block)
        self._known.found(stored, missing=keys[found // self._block :], since=began)
        if load.in_pool >= self._block:  # reused from the pool, so the store sees no read of them
            self._store.touch(tokens[: min(found, load.in_pool)], tenant=tenant)
        if load.evidence is not None:
            behind = self._store.why(tokens, found, tenant=tenant, since=load.evidence.since)
            load.evidence.looked_up(there, behind)
        return found, there.tiers

    @property
    def busy(self) -> bool:
        """Whether a read is queued or under way."""
        with self._lock:
            return bool(self._queued or self._running)

    def prefetch(self, load: Load) -> None:
        """Read the KV of a waiting answer into memory in the background, if it was found."""
        if load.answered and not load.prefetched and load.found - load.in_pool >= self.page_size:
            load.prefetched = True
            self._lookups.submit(lambda: self._prefetch(load))

    def _prefetch(self, load: Load) -> None:
        tokens = load.tokens[: load.stored]
        load.prefetching(self._store.prefetch(tokens, load.in_pool, tenant=load.tenant))

    # --- reading ---------------------------------------------------------------------------------

    def queue(self, order: Any, load: Load, start: int) -> None:
        """Read ``load`` from token ``start`` on, behind those with a lower ``order``.

        One load is read at a time, except those that are late.
        """
        with self._lock:
            if load.reading or load.has_read or any(one is load for _, one, _ in self._queued):
                return
            self._queued.append((order, load, start))
            self._queued.sort(key=lambda one: one[0])
        self._go_on()

    def _go_on(self) -> None:
        """Begin the next read, if none is under way but late ones."""
        with self._lock:
            free = bool(self._queued) and self._may_begin()
        if free:
            self._reads.submit(self._read_queued)

    @property
    def stuck(self) -> bool:
        """Whether late reads take all threads, so that none can begin."""
        with self._lock:
            return len(self._running) >= _READ_THREADS and all(map(_is_over, self._running))

    def _may_begin(self) -> bool:
        return len(self._running) < _READ_THREADS and all(map(_is_over, self._running))

    def _read_queued(self) -> None:
        while True:
            with self._lock:
                if not self._queued or not self._may_begin():
                    return
                _, load, start = self._queued.pop(0)
                self._running.append(load)
            try:
                if load.begin_read():
                    self._read(load, start // self.page_size * self.page_size)
            finally:
                load.end_read()
                with self._lock:
                    self._running.remove(load)
                self.arrival.set()

    def _read(self, load: Load, start: int) -> None:
        came = self._read_from(load, start)
        if load.cancelled or came >= load.stop:
            return
        if load.patience_s == 0.0:  # it was overtaken by its deadline
            load.late = True
            return
        # Tokens that were found are lost or damaged. The next save writes them again.
        keys = block_keys(load.namespace, load.tokens, self._block)[came // self._block :]
        self._known.found([], missing=keys, since=time.monotonic())
        if load.evidence is not None:
            why = self._why(load, came, load.evidence.since)
            load.evidence.stopped(why, came, load.stop)

    @abstractmethod
    def _read_from(self, load: Load, start: int) -> int:
        """Read the tokens from ``start`` to ``load.stop``, and deliver chunks.

        Returns the end of what came.
        """

    def relearn(self, load: Load, start: int) -> None:
        """Read a little of ``load``, which does not pay, to learn whether its tier became fast."""
        self._lookups.submit(lambda: self._relearn(load, start))

    @abstractmethod
    def _relearn(self, load: Load, start: int) -> None: ...

    def _deliver(self, load: Load, chunk: LoadChunk) -> None:
        self.alive_at = time.monotonic()
        if load.arrived(chunk):
            self.arrival.set()
        else:
            self.give_back(chunk)

    def _why(self, load: Load, start: int, since: float) -> tuple[Miss, ...]:
        return self._store.why(load.tokens, start, tenant=load.tenant, since=since)

    # --- the engine's side -----------------------------------------------------------------------

    @abstractmethod
    def give_back(self, chunk: LoadChunk) -> None:
        """Free the memory of a chunk that was written to its pages, or is not needed."""

    def report(self, load: Load, *, called_off: bool = False) -> LoadReport | None:
        """Return the report on an admitted answer's load; None without evidence.

        With ``called_off`` the load ended early: only tokens that came are reported.
        """
        evidence = load.evidence
        if evidence is None:
            return None
        if called_off:
            return evidence.report_so_far()
        if evidence.asks and not evidence.answered:  # find out which tier is slow
            with suppress(IllegalStep):  # the store was closed under the engine
                evidence.unanswered(self._why(load, evidence.pool, evidence.since))
        return evidence.report()

    def cancel(self, load: Load) -> None:
        """Stop ``load`` and free its chunks."""
        with self._lock:
            self._queued = [one for one in self._queued if one[1] is not load]
        for chunk in load.cancel():
            self.give_back(chunk)
        self._go_on()

    def close(self) -> None:
        """End the threads; one that hangs in the store is left running, as a daemon."""
        self._lookups.close(_CLOSE_S)
        self._reads.close(_CLOSE_S)


class PageLoads(Loads):
    """Loads for a model in which every layer keeps every token: chunks are blocks of pages."""

    def __init__(self, store: KVStore, tensors: PagedTensors, forms: Forms, known: Known) -> None:
        super().__init__(store, known, page_size=tensors.page_size)
        self._forms = forms
        pages = self._block // self.page_size
        count = _BUFFER_BYTES // (pages * tensors.page_bytes)
        self._buffers = Buffers(
            max(4, min(_MOST_BUFFERS, count)),
            pages,
            tensors.page_bytes,
            pinned=tensors.device.type == "cuda",
        )

    def _read_from(self, load: Load, start: int) -> int:
        def sink(begin: int, stop: int, kv: Any, source: str) -> bool:
            return self._copy(load, begin, stop, kv, source)

        # All that is stored, since a tail is found only by all of its tokens: `sink` ends the read.
        _, count = self._store.get(
            load.tokens[: load.stored], start, deadline=load.patience_s, tenant=load.tenant,
            sink=sink,
        )  # fmt: skip
        return start + count

    def _copy(self, load: Load, start: int, stop: int, kv: Any, source: str) -> bool:
        """Bring tokens ``start`` … ``stop - 1`` into page order, and deliver them.

        Return whether more is wanted.
        """
        count = min(stop, load.stop) - start
        if count <= 0:
            return False
        block = None
        while block is None:
            if load.cancelled:
                return False
            block = self._buffers.take(_LOOK_S)  # the engine computes, and writes none to pages
        try:
            self._forms.by_page(kv, count, block)
        except BaseException:
            self._buffers.give(block)
            raise
        exact = start if ", " in source else None  # its codec is named
        self._deliver(load, LoadChunk(start, count, block, ((source, count),), exact))
        return stop < load.stop and not load.cancelled

    def _relearn(self, load: Load, start: int) -> None:
        self._store.get(
            load.tokens, start // self.page_size * self.page_size, tenant=load.tenant, pays=True,
            sink=lambda *_: False,
        )  # fmt: skip

    def give_back(self, chunk: LoadChunk) -> None:
        self._buffers.give(chunk.block)


def _is_over(load: Load) -> bool:
    """Whether others need not wait for a read, though it may hang in the store."""
    return load.late or load.cancelled
