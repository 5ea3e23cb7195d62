"""`Loads`: loads KV of prompts from a store into pages, in the background.

    lookup ──▶ prefetch (while the answer waits) ──▶ admitted ──▶ chunks ──▶ done
                    │                                    │
                    └── late: read what is ready ────────┴── a slow chunk: keep those before

Threads of this module call the store, so that a tier that hangs never holds up the engine; the
engine's thread only writes chunks that have arrived to pages.
"""

from __future__ import annotations

import logging
import threading
import time
from abc import ABC, abstractmethod
from contextlib import suppress
from typing import TYPE_CHECKING

import torch

from kvkeep.core.errors import IllegalStep
from kvkeep.serve.engine.offload.forms import Buffers
from kvkeep.serve.engine.offload.load import Load, LoadChunk
from kvkeep.serve.engine.offload.threads import DaemonThreads
from kvkeep.serve.engine.offload.writes import block_keys

if TYPE_CHECKING:
    from torch import Tensor

    from kvkeep.core.pages.tensors import PagedTensors
    from kvkeep.observe.usage import LoadReport
    from kvkeep.serve.engine.offload.forms import Forms
    from kvkeep.serve.engine.offload.writes import Known
    from kvkeep.store import KVStore, Miss

__all__ = ["GRACE_S", "Loads", "PageLoads"]

_log = logging.getLogger(__name__)

# A lookup may wait for a server; a read mostly finds its blocks prefetched in memory.
_LOOKUP_THREADS = 4
_READ_THREADS = 2
# Bytes of one chunk, and how many chunks exist at once.
_CHUNK_BYTES = 32 << 20
_CHUNKS = 6
# Seconds beyond its deadline after which the engine stops waiting for a read.
GRACE_S = 0.5
# Seconds that close waits for each thread.
_CLOSE_S = 0.5


class Loads(ABC):
    """Looks prompts up in a store, and reads their KV into memory.

    Reads for one answer may take ``timeout`` seconds in all. Thread safety: all methods belong to
    the engine's thread; ``arrival`` is set whenever a lookup ends, a chunk arrives or a load ends.
    """

    def __init__(self, store: KVStore, known: Known, *, page_size: int, timeout: float) -> None:
        self.arrival = threading.Event()
        self._store = store
        self._known = known
        self._timeout = timeout
        self._page_size = page_size
        self._block = store.block_tokens
        self._lookups = DaemonThreads("kvkeep lookups", _LOOKUP_THREADS, _log)
        self._reads = DaemonThreads("kvkeep reads", _READ_THREADS, _log)

    # --- lookup ------------------------------------------------------------------------------

    def start(self, load: Load) -> None:
        """Look up ``load.tokens`` in the background, and prefetch those that the pool lacks."""
        self._lookups.submit(lambda: self._run_lookup(load))

    def _run_lookup(self, load: Load) -> None:
        try:
            if not load.cancelled:
                self._look_up(load)
        finally:
            load.looked_up()
            self.arrival.set()

    def _look_up(self, load: Load) -> None:
        tokens, tenant = load.tokens, load.tenant
        began = time.monotonic()
        there = self._store.lookup(tokens, tenant=tenant)
        found = there.tokens
        keys = block_keys(load.namespace, tokens, self._block)
        stored = block_keys(load.namespace, tokens[:found], self._block)
        self._known.found(stored, missing=keys[found // self._block :], since=began)
        if load.in_pool >= self._block:  # reused from the pool, so the store sees no read of them
            self._store.touch(tokens[: min(found, load.in_pool)], tenant=tenant)
        if load.is_worthwhile(self._page_size) and found - load.in_pool >= self._page_size:
            prefetch = self._store.prefetch(tokens[:found], load.in_pool, tenant=tenant)
            load.prefetching(prefetch, found)
        if load.evidence is not None:
            behind = self._store.why(tokens, found, tenant=tenant, since=load.evidence.since)
            load.evidence.looked_up(there, behind)

    # --- reading -----------------------------------------------------------------------------

    def begin(self, load: Load, cached: int) -> None:
        """Start to read behind the ``cached`` tokens that the pool has; the answer is admitted.

        ``load.loading`` is then whether any chunk will come.
        """
        load.begin(cached, self._page_size)
        if not load.loading:
            self.cancel(load)
            return
        held = 0.0 if load.held_since is None else time.monotonic() - load.held_since
        # Ready tokens are worth reading even if the lookup took all of the time.
        seconds = max(self._timeout - held, self._timeout / 4)
        start = cached // self._page_size * self._page_size
        self._reads.submit(lambda: self._read_all(load, start, seconds))

    @abstractmethod
    def _read_all(self, load: Load, start: int, seconds: float) -> None:
        """Read from token ``start`` on, for ``seconds`` in all, and `Load.end_read`."""

    def _deliver(self, load: Load, chunk: LoadChunk) -> None:
        if load.arrived(chunk):
            self.arrival.set()
        else:
            self.give_back(chunk)

    def _forget_stored(self, load: Load, start: int) -> None:
        """Forget that blocks from ``start`` on are stored: they are lost or damaged.

        The next save then writes them again.
        """
        keys = block_keys(load.namespace, load.tokens, self._block)[start // self._block :]
        self._known.found([], missing=keys, since=time.monotonic())

    def _why(self, load: Load, start: int, since: float) -> tuple[Miss, ...]:
        return self._store.why(load.tokens, start, tenant=load.tenant, since=since)

    # --- the engine's side -------------------------------------------------------------------

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
        for chunk in load.cancel():
            self.give_back(chunk)

    def close(self) -> None:
        """End the threads; one that hangs in the store is left running, as a daemon."""
        self._lookups.close(_CLOSE_S)
        self._reads.close(_CLOSE_S)


class PageLoads(Loads):
    """Loads for a model in which every layer keeps every token: chunks in page order."""

    def __init__(
        self, store: KVStore, tensors: PagedTensors, forms: Forms, known: Known, *, timeout: float
    ) -> None:
        super().__init__(store, known, page_size=tensors.page_size, timeout=timeout)
        self._forms = forms
        blocks = max(1, _CHUNK_BYTES // (self._block * tensors.geometry.bytes_per_token))
        self._chunk = blocks * self._block
        self._buffers = Buffers(
            _CHUNKS,
            self._chunk // self._page_size,
            tensors.page_bytes,
            pinned=tensors.device.type == "cuda",
        )

    def _read_all(self, load: Load, start: int, seconds: float) -> None:
        """Read from token ``start`` on, chunk by chunk, for ``seconds`` in all."""
        evidence = load.evidence
        try:
            while start < load.stop and seconds > 0 and not load.cancelled:
                block = self._buffers.take(self._timeout)
                if block is None:
                    continue  # the engine is computing, and has not written any chunk yet
                began = time.monotonic()
                stop = min(load.stop, (start // self._chunk + 1) * self._chunk)
                chunk = LoadChunk(start, 0, block)
                try:
                    load.due = began + seconds + GRACE_S
                    chunk = self._read(load, start, stop, block, seconds)
                finally:
                    load.due = None
                    self._deliver(load, chunk)
                start += chunk.tokens
                seconds -= time.monotonic() - began
                if start < stop:
                    self._forget_stored(load, start)
                    if evidence is not None and seconds > 0:
                        evidence.stopped(self._why(load, start, evidence.since))
                    break
            if seconds <= 0 and evidence is not None:
                evidence.late()
        finally:
            load.end_read()
            self.arrival.set()

    def _read(self, load: Load, start: int, stop: int, block: Tensor, seconds: float) -> LoadChunk:
        """Read tokens ``start`` … ``stop - 1`` into ``block``, or as many as the store gives."""
        # A tail is found only by all of its tokens, even if not all of them are wanted.
        tokens = load.tokens[: load.ready if stop == load.stop else stop]
        sources: list[tuple[str, int]] = []
        kv, count = self._store.get(
            tokens, start, deadline=seconds, tenant=load.tenant, sources=sources
        )
        count = min(count, stop - start)
        if count <= 0:
            return LoadChunk(start, 0, block)
        assert isinstance(kv, torch.Tensor), "the default form is a tensor"
        self._forms.by_page(kv, count, block)
        return LoadChunk(start, count, block, sources)

    def give_back(self, chunk: LoadChunk) -> None:
        self._buffers.give(chunk.block)
