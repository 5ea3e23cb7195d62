"""`Load`: one load from a store, shared by the engine's thread and the threads that read."""

from __future__ import annotations

import threading
import time
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

from kvkeep.core.cost import Overlap
from kvkeep.core.errors import IllegalStep

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from kvkeep.core.cost import LoadProgress
    from kvkeep.core.keys import Namespace
    from kvkeep.core.tokens import TokenArray
    from kvkeep.serve.engine.offload.evidence import Evidence
    from kvkeep.store import Prefetch

    BytesSeconds = Callable[[str, float], float]

__all__ = ["Load", "LoadChunk"]


class LoadChunk(NamedTuple):
    """KV of ``tokens`` tokens from position ``start`` on.

    ``block`` has it in page order, in a block of `Buffers`; or it is a snapshot.
    """

    start: int
    tokens: int
    block: Any


class Load:
    """The lookup, prefetch and read of one answer's tokens in a store.

    The steps are `looked_up`, `admitted`, `arrived` for each chunk, and `end_read`; `cancel` may
    come at any time. ``in_pool`` leading tokens were in the pool when the load was made. ``unit``
    are the tokens of a block; with ``whole``, only all that is stored is of use. ``evidence`` is
    None if the engine has no observers.

    Thread safety: all methods. The public attributes belong to the engine's thread.
    """

    def __init__(
        self,
        tokens: TokenArray,
        namespace: Namespace,
        tenant: str,
        in_pool: int,
        evidence: Evidence | None = None,
        *,
        unit: int,
        whole: bool = False,
    ) -> None:
        self.tokens = tokens
        self.namespace = namespace
        self.tenant = tenant
        self.in_pool = in_pool
        self.evidence = evidence
        self.reported = False
        """Whether the observers have the report of this load."""
        self.is_first = False
        """Whether this load counts in the request's statistics: set at its first admission."""
        self.waited = False
        """Whether its answer was passed over by an admission."""
        self.prefetched = False
        """Whether its prefetch was begun."""
        self.done = False
        """Whether its answer needs no more of it."""
        self.late = False
        """Whether its read is late, so that others need not wait for it."""
        self.alive_at = 0.0
        """When its answer was admitted, or was computed last, in monotonic seconds."""
        self._started = time.monotonic()
        self._unit, self._whole = unit, whole
        self._lock = threading.Lock()
        self._overlap: Overlap | None = None  # once its answer is admitted
        self._found = 0
        self._least = 1  # tokens that are worth loading
        self._runs: list[tuple[int, int, str]] = []  # start, stop, tier
        self._looked_up = False
        self._prefetch: Prefetch | None = None
        self._stop_before: Callable[[int], None] | None = None
        self._cancelled = False
        self._reading = False
        self._read = False
        self._chunks: deque[LoadChunk] = deque()

    # --- lookup and prefetch ---------------------------------------------------------------------

    @property
    def settled(self) -> bool:
        """Whether the lookup is over, and the prefetch, if there is one."""
        return self._looked_up and (self._prefetch is None or self._prefetch.done)

    @property
    def answered(self) -> bool:
        """Whether the lookup is over."""
        return self._looked_up

    @property
    def found(self) -> int:
        """The tokens that the store has, as far as they were looked up."""
        return self._found

    @property
    def cancelled(self) -> bool:
        """Whether the answer no longer needs this load."""
        return self._cancelled

    def is_worthwhile(self, page_size: int) -> bool:
        """Whether the store could save a page or more; the last token is computed in any case."""
        return len(self.tokens) - 1 - self.in_pool >= page_size

    def looked_up(self, found: int, runs: Iterable[tuple[str, int]]) -> None:
        """Note the end of the lookup: ``found`` tokens are stored, of which ``runs`` are tiers.

        0 if it failed, or nothing is worth loading.
        """
        with self._lock:
            self._looked_up, self._found = True, found
            self._note_runs(0, runs)
            if self._overlap is not None:
                self._note_found(self._overlap)

    def prefetching(self, prefetch: Prefetch) -> None:
        """Take over a ``prefetch``; it is cancelled if the answer was admitted, or has ended."""
        with self._lock:
            wanted = self._overlap is None and not self._cancelled and self._prefetch is None
            if wanted:
                self._prefetch = prefetch
        if not wanted:
            prefetch.cancel()

    def end_prefetch(self) -> None:
        """Cancel the prefetch, if there is one; what it has brought stays in memory."""
        with self._lock:
            prefetch, self._prefetch = self._prefetch, None
        if prefetch is not None:
            prefetch.cancel()
            if self.evidence is not None:
                with suppress(IllegalStep):  # the store was closed under the engine
                    self.evidence.brought(prefetch)

    # --- both at once ----------------------------------------------------------------------------

    def admitted(self, cached: int, page_size: int) -> None:
        """Note that the answer runs, and ``cached`` of its tokens need no computing."""
        self.end_prefetch()
        if self.evidence is not None:
            self.evidence.begins(cached, wanted=self.is_worthwhile(page_size))
        self.alive_at = time.monotonic()
        with self._lock:
            overlap = Overlap(cached, len(self.tokens), self._unit, whole=self._whole)
            overlap.begin(self._started)
            self._least = page_size
            if self._looked_up:
                self._note_found(overlap)
            self._overlap = overlap

    def _note_found(self, overlap: Overlap) -> None:
        """Note what is worth loading: a page or more."""
        stop = min(self._found, len(self.tokens) - 1)
        overlap.found(stop if stop - overlap.computed >= self._least else overlap.computed)

    def progress(self, now: float, seconds: BytesSeconds, token_bytes: float) -> LoadProgress:
        """Return how far the load has come; ``seconds(tier, bytes)`` are those of reads."""

        def read_s(start: int, stop: int) -> float:
            total = 0.0
            for first, end, tier in self._runs:
                tokens = min(stop, end) - max(start, first)
                if tokens > 0:
                    total += seconds(tier, tokens * token_bytes)
            return total

        with self._lock:
            known = read_s if self._looked_up else _unknown
            return self._running.progress(now, known, waited_s=now - self.alive_at)

    def compute(self, stop: int) -> None:
        """Note that a pass begins, up to ``stop``: nothing before it is read any more."""
        with self._lock:
            self._running.compute(stop)
            stop_before = self._stop_before
        if stop_before is not None:
            stop_before(stop)

    def advance(self, computed: int) -> tuple[int, list[tuple[int, int]]]:
        """Note that ``computed`` tokens are there.

        Returns how many then are, and the ranges of these that were loaded.
        """
        with self._lock:
            saved = self._running.advance(computed)
            return self._running.computed, saved

    def put(self, chunk: LoadChunk) -> None:
        """Note that a chunk was written to its pages."""
        with self._lock:
            self._running.put(chunk.start, chunk.start + chunk.tokens)

    def limit(self) -> int:
        """Return where a pass has to end at the latest."""
        with self._lock:
            return self._running.limit()

    @property
    def tiers(self) -> set[str]:
        """The tiers that have what was found."""
        return {tier for _, _, tier in self._runs}

    def is_through(self) -> bool:
        """Whether the load is of no more use: all is there, or nothing more will come."""
        with self._lock:
            overlap = self._running
            if not self._looked_up:
                return overlap.computed >= overlap.tokens - 1
            if overlap.met:
                return True
            return overlap.over and overlap.limit() == overlap.tokens

    @property
    def _running(self) -> Overlap:
        assert self._overlap is not None, "its answer was not admitted"
        return self._overlap

    # --- the thread that reads -------------------------------------------------------------------

    @property
    def reading(self) -> bool:
        """Whether the read has begun, and is not over."""
        return self._reading and not self._read

    @property
    def has_read(self) -> bool:
        """Whether the read is over."""
        return self._read

    def begin_read(self) -> int | None:
        """Note that the read begins; return from where on, None if it is not wanted any more."""
        with self._lock:
            overlap = self._overlap
            if self._cancelled or self._reading or overlap is None or overlap.met:
                return None
            self._reading = True
            overlap.begin(time.monotonic())
            return overlap.computing

    def located(
        self,
        start: int,
        stop: int,
        runs: Iterable[tuple[str, int]],
        stop_before: Callable[[int], None] | None = None,
    ) -> None:
        """Note where the tokens ``start`` … ``stop - 1`` are now, and how to read fewer of them."""
        with self._lock:
            overlap = self._running
            overlap.found(min(stop, len(self.tokens) - 1))
            overlap.begin(time.monotonic())
            self._note_runs(start, runs)
            self._stop_before = stop_before
            computing, cancelled = overlap.computing, self._cancelled
        if stop_before is not None:
            stop_before(len(self.tokens) if cancelled else computing)

    @property
    def stop(self) -> int:
        """The end of what is worth reading, all tokens but the last at most."""
        with self._lock:
            return self._running.stop

    @property
    def computing(self) -> int:
        """The tokens before this one are there, or are being computed."""
        with self._lock:
            return self._running.computing

    def arrived(self, chunk: LoadChunk) -> bool:
        """Queue a chunk that was read; False if it is not wanted any more."""
        if self.evidence is not None:
            self.evidence.now()
        stop = chunk.start + chunk.tokens
        with self._lock:
            wanted = not self._cancelled and stop > self._running.computing and chunk.tokens > 0
            if wanted:
                self._running.came(chunk.start, stop, time.monotonic())
                self._chunks.append(chunk)
        return wanted

    def end_read(self) -> None:
        """Note that no more chunks arrive."""
        with self._lock:
            self._read = True
            if self._overlap is not None:
                self._overlap.over = True

    def take(self) -> list[LoadChunk]:
        """Return the chunks that arrived since the last call."""
        with self._lock:
            chunks = list(self._chunks)
            self._chunks.clear()
            if self._overlap is not None:
                self._overlap.take()
        return chunks

    def cancel(self) -> list[LoadChunk]:
        """Stop prefetch and read; return the chunks that were not taken."""
        with self._lock:
            self._cancelled = True
            stop_before = self._stop_before
        self.end_prefetch()
        if stop_before is not None:
            stop_before(len(self.tokens))
        return self.take()

    def _note_runs(self, start: int, runs: Iterable[tuple[str, int]]) -> None:
        self._runs = []
        for tier, tokens in runs:
            self._runs.append((start, start + tokens, tier))
            start += tokens

    def sources_known(
        self,
        start: int,
        front: int,
        came: Iterable[tuple[int, int]],
        sources: Iterable[tuple[str, int]],
    ) -> None:
        """Note the tiers of what came: from ``start`` to ``front`` memory, then ``sources``.

        These are ``(tier, tokens)`` of the ranges ``came``, in order.
        """
        if self.evidence is None:
            return
        self.evidence.read_from("", start, front)
        runs = list(sources)
        for at, stop in came:
            begin = at
            while begin < stop and runs:
                tier, tokens = runs[0]
                count = min(tokens, stop - begin)
                self.evidence.read_from(tier, begin, begin + count)
                begin += count
                runs[0] = tier, tokens - count
                if tokens == count:
                    runs.pop(0)


def _unknown(start: int, stop: int) -> float:
    return 0.0
