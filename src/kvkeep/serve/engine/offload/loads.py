"""`Loads`: what a store has of prompts, on its way into their pages.

    sought ──▶ prefetched (while the request waits) ──▶ admitted ──▶ pieces ──▶ done
                    │                                      │
                    └── late: what is ready counts ────────┴── a slow piece: what came counts

Threads of this module ask the store, so that a tier that hangs never holds up the engine; its
thread only writes to pages what has come.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from contextlib import suppress
from queue import SimpleQueue
from typing import TYPE_CHECKING, NamedTuple

import torch

from kvkeep.core.errors import IllegalStep
from kvkeep.serve.engine.offload.forms import Buffers
from kvkeep.serve.engine.offload.writes import block_keys

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from kvkeep.core.keys import Namespace
    from kvkeep.core.pages.tensors import PagedTensors
    from kvkeep.core.tokens import TokenArray
    from kvkeep.observe.usage import LoadReport
    from kvkeep.serve.engine.offload.evidence import Evidence
    from kvkeep.serve.engine.offload.forms import Forms
    from kvkeep.serve.engine.offload.writes import Known
    from kvkeep.store import KVStore, Prefetch

__all__ = ["Load", "LoadChunk", "Loads"]

_log = logging.getLogger(__name__)

# Who asks what the store has may wait for a server; who reads has it in memory mostly.
_SEEKERS = 4
_READERS = 2
# Read in one go, and how many of that are on their way into pages.
_PIECE_BYTES = 32 << 20
_PIECES = 6
# How much longer than it may a read takes until it is given up here.
_GRACE_S = 0.5
# So long a thread has to notice that it is not wanted any more.
_END_S = 0.5


class LoadChunk(NamedTuple):
    """KV of ``tokens`` tokens from ``start`` on, in the order of pages, in a block of `Buffers`."""

    start: int
    tokens: int
    block: Tensor
    sources: Sequence[tuple[str, int]] = ()
    """``(tier, tokens)``, in order, if that is noted."""


class Load:
    """What the store has of one answer's tokens. Made by `Loads.seek`.

    Thread safety: its fields are written under the lock of its `Loads`, or by one thread alone.
    """

    def __init__(
        self,
        tokens: TokenArray,
        namespace: Namespace,
        tenant: str,
        have: int,
        evidence: Evidence | None = None,
    ) -> None:
        self.evidence = evidence
        self.told = False
        """Whether its report was given."""
        self.tokens = tokens
        self.namespace = namespace
        self.tenant = tenant
        self.have = have
        """Leading tokens that the pool had when it was asked."""
        self.held_since: float | None = None
        self.loading = False
        """Whether its answer runs, and pieces are still to come."""
        self.counts = False
        """Whether what it brings is the request's own, not that of its second time."""
        self._found = 0
        self._sought = False
        self._prefetch: Prefetch | None = None
        self._cancelled = False
        self._ready = 0  # tokens that are found in memory, now that it is admitted,
        self._stop = 0  # and those of them that are wanted
        self._read = False  # nothing more comes
        self._pieces: deque[LoadChunk] = deque()
        self._due: float | None = None  # when the read at hand should be through

    @property
    def settled(self) -> bool:
        """Whether it is known what there is, and that is in memory."""
        return self._sought and (self._prefetch is None or self._prefetch.done)


class Loads:
    """Asks a store for prompts, and reads what it has into memory for pages.

    ``timeout`` seconds are what reading for one request may take. Thread safety: all methods are
    the engine's thread's; ``news`` is set whenever something has come for it.
    """

    def __init__(
        self,
        store: KVStore,
        tensors: PagedTensors,
        forms: Forms,
        known: Known,
        *,
        timeout: float,
    ) -> None:
        self.news = threading.Event()
        self._store = store
        self._forms = forms
        self._known = known
        self._timeout = timeout
        self._size = tensors.page_size
        self._block = store.block_tokens
        blocks = max(1, _PIECE_BYTES // (self._block * tensors.geometry.bytes_per_token))
        self._piece = blocks * self._block
        pinned = tensors.device.type == "cuda"
        self._buffers = Buffers(
            _PIECES, self._piece // self._size, tensors.page_bytes, pinned=pinned
        )
        self._lock = threading.Lock()
        self._seekers = _Threads("kvkeep seeks", _SEEKERS)
        self._readers = _Threads("kvkeep reads", _READERS)

    # --- seeking -----------------------------------------------------------------------------

    def seek(
        self,
        tokens: TokenArray,
        namespace: Namespace,
        tenant: str,
        have: int,
        evidence: Evidence | None = None,
    ) -> Load:
        """Begin to look for ``tokens`` beyond the first ``have``, and to fetch what there is."""
        load = Load(tokens, namespace, tenant, have, evidence)
        self._seekers.do(lambda: self._seek(load))
        return load

    def wanted(self, load: Load) -> bool:
        """Whether the store could save as much as a page: the last token is computed anyway."""
        return len(load.tokens) - 1 - load.have >= self._size

    def _seek(self, load: Load) -> None:
        try:
            if not load._cancelled:
                self._ask(load)
        finally:
            load._sought = True
            self.news.set()

    def _ask(self, load: Load) -> None:
        tokens, tenant = load.tokens, load.tenant
        asked = time.monotonic()
        there = self._store.lookup(tokens, tenant=tenant)
        found = there.tokens
        keys = block_keys(load.namespace, tokens, self._block)
        stored = block_keys(load.namespace, tokens[:found], self._block)
        self._known.found(stored, missing=keys[found // self._block :], asked=asked)
        if load.have >= self._block:  # the pool had it, and the store is to know that it is in use
            self._store.touch(tokens[: min(found, load.have)], tenant=tenant)
        if self.wanted(load) and found - load.have >= self._size:
            prefetch = self._store.prefetch(tokens[:found], load.have, tenant=tenant)
            with self._lock:
                load._found = found
                load._prefetch = prefetch
                cancelled = load._cancelled
            if cancelled:
                prefetch.cancel()
        if load.evidence is not None:
            behind = self._store.why(tokens, found, tenant=tenant, since=load.evidence.since)
            load.evidence.sought(there, behind)

    # --- reading -----------------------------------------------------------------------------

    def begin(self, load: Load, cached: int) -> None:
        """Its answer is admitted, with ``cached`` tokens in the pool: read on from there.

        What is late is left; `loading` says whether anything comes.
        """
        evidence = load.evidence
        if evidence is not None:
            evidence.begins(cached, wanted=self.wanted(load))
        held = 0.0 if load.held_since is None else time.monotonic() - load.held_since
        # What is ready is worth reading also where the time is over.
        left = max(self._timeout - held, self._timeout / 4)
        with self._lock:
            prefetch, ready = load._prefetch, 0
            if prefetch is not None:
                with suppress(IllegalStep):  # the store was closed under the engine: nothing comes
                    # More may be found than memory holds: the rest is read as it comes.
                    ready = load._found if prefetch.done else min(load._found, prefetch.wait(0))
                load._prefetch = None
        if prefetch is not None:
            prefetch.cancel()
            if evidence is not None:
                with suppress(IllegalStep):
                    evidence.brought(prefetch, ready)
        load._stop, load._ready = min(ready, len(load.tokens) - 1), ready
        if load._stop - cached < self._size:
            self.cancel(load)
            return
        load.loading = True
        if evidence is not None:
            evidence.stop = load._stop
        start = cached // self._size * self._size
        self._readers.do(lambda: self._read_all(load, start, left))

    def _read_all(self, load: Load, start: int, left: float) -> None:
        try:
            while start < load._stop and left > 0 and not load._cancelled:
                block = self._buffers.take(self._timeout)
                if block is None:
                    continue  # the engine, which has them all to write, is busy computing
                began = time.monotonic()
                stop = min(load._stop, (start // self._piece + 1) * self._piece)
                tokens = 0
                sources: Sequence[tuple[str, int]] = ()
                try:
                    load._due = began + left + _GRACE_S
                    tokens, sources = self._read(load, start, stop, block, left)
                finally:
                    load._due = None
                    self._arrived(load, LoadChunk(start, tokens, block, sources))
                if start + tokens < stop:
                    self._lost(load, start + tokens)
                    if load.evidence is not None:
                        in_time = time.monotonic() - began < left
                        self._ask_why(load, load.evidence, start + tokens, in_time=in_time)
                    break
                start = stop
                left -= time.monotonic() - began
            if left <= 0 and load.evidence is not None:
                load.evidence.late()
        finally:
            load._read = True
            self.news.set()

    def _read(
        self, load: Load, start: int, stop: int, block: Tensor, seconds: float
    ) -> tuple[int, Sequence[tuple[str, int]]]:
        """Read tokens ``start`` … ``stop - 1`` into ``block``; how many came, and from where."""
        # A tail is found only by all of its tokens, also where not all of them are wanted.
        tokens = load.tokens[: load._ready if stop == load._stop else stop]
        sources: list[tuple[str, int]] = []
        if load.evidence is None:
            kv, count = self._store.get(tokens, start, deadline=seconds, tenant=load.tenant)
        else:
            kv, count = self._store.get(
                tokens, start, deadline=seconds, tenant=load.tenant, sources=sources
            )
        count = min(count, stop - start)
        if count <= 0:
            return 0, ()
        assert isinstance(kv, torch.Tensor), "the form that was asked for"
        self._forms.by_page(kv, count, block)
        return count, sources

    def _ask_why(self, load: Load, evidence: Evidence, start: int, *, in_time: bool) -> None:
        """Of what was found, token ``start`` did not come."""
        if not in_time:
            evidence.late()
            return
        why = self._store.why(load.tokens, start, tenant=load.tenant, since=evidence.since)
        evidence.stopped(why)

    def report(self, load: Load, evidence: Evidence, *, called_off: bool = False) -> LoadReport:
        """What came, and why the rest did not. Its answer was admitted, and nothing more comes."""
        if called_off:
            return evidence.report_so_far()
        if evidence.asks and not evidence.answered:  # who was it that did not?
            at = evidence.pool
            with suppress(IllegalStep):  # the store was closed under the engine
                why = self._store.why(load.tokens, at, tenant=load.tenant, since=evidence.since)
                evidence.unanswered(why)
        return evidence.report()

    def _lost(self, load: Load, start: int) -> None:
        """What was found is not there, or is bad: it is to be written again once it is computed."""
        keys = block_keys(load.namespace, load.tokens, self._block)[start // self._block :]
        self._known.found([], missing=keys, asked=time.monotonic())

    def _arrived(self, load: Load, piece: LoadChunk) -> None:
        if load.evidence is not None:
            load.evidence.now()
        with self._lock:
            wanted = piece.tokens > 0 and not load._cancelled
            if wanted:
                load._pieces.append(piece)
        if wanted:
            self.news.set()
        else:
            self._buffers.give(piece.block)

    def take(self, load: Load) -> list[LoadChunk]:
        """What has come since; give each one back when its pages are written."""
        with self._lock:
            pieces = list(load._pieces)
            load._pieces.clear()
        return pieces

    def give_back(self, piece: LoadChunk) -> None:
        """Its memory is free again."""
        self._buffers.give(piece.block)

    def through(self, load: Load) -> bool:
        """Whether no more comes of it: all was taken, or its read takes longer than it may."""
        due = load._due
        if due is not None and time.monotonic() > due:
            if load.evidence is not None:
                load.evidence.late()
            return True
        return load._read and not load._pieces

    def cancel(self, load: Load) -> None:
        """Nothing more is wanted of it."""
        with self._lock:
            load._cancelled = True
            prefetch, load._prefetch = load._prefetch, None
        load.loading = False
        for piece in self.take(load):
            self.give_back(piece)
        if prefetch is not None:
            prefetch.cancel()

    def close(self) -> None:
        """End the threads; those that hang are left to themselves."""
        self._seekers.close()
        self._readers.close()


class _Threads:
    """Up to ``count`` daemon threads that do what they are given, in order, begun when needed.

    Not an executor of the library: a thread that hangs in a tier must not keep the process alive.
    """

    def __init__(self, name: str, count: int) -> None:
        self._name = name
        self._count = count
        self._threads: list[threading.Thread] = []
        self._queue: SimpleQueue[Callable[[], None] | None] = SimpleQueue()

    def do(self, function: Callable[[], None]) -> None:
        """Call it soon; what it raises is logged."""
        self._queue.put(function)
        if len(self._threads) < self._count:
            thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._threads.append(thread)
            thread.start()

    def close(self) -> None:
        """End them after what was given so far."""
        for _ in self._threads:
            self._queue.put(None)
        for thread in self._threads:
            thread.join(_END_S)

    def _run(self) -> None:
        while (function := self._queue.get()) is not None:
            try:
                function()
            except Exception:  # noqa: BLE001 - whatever it is, it is computed instead
                _log.exception("the store was not read")
