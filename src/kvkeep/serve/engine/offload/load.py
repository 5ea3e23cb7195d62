"""`Load`: one load from a store, shared by the engine's thread and the threads that read."""

from __future__ import annotations

import threading
import time
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

from kvkeep.core.errors import IllegalStep

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvkeep.core.keys import Namespace
    from kvkeep.core.tokens import TokenArray
    from kvkeep.serve.engine.offload.evidence import Evidence
    from kvkeep.store import Prefetch

__all__ = ["Load", "LoadChunk"]


class LoadChunk(NamedTuple):
    """KV of ``tokens`` tokens from position ``start`` on.

    ``block`` has it in page order, in a block of `Buffers`; or it is a snapshot.
    ``sources`` are ``(tier, tokens)`` in order, as `KVStore.get` names them.
    """

    start: int
    tokens: int
    block: Any
    sources: Sequence[tuple[str, int]] = ()

    def lossy(self, at: int, stop: int) -> int:
        """Return how many of the tokens ``at`` … ``stop - 1`` are not exact."""
        count, start = 0, self.start
        for source, tokens in self.sources:
            if ", " in source:  # the codec is named
                count += max(0, min(stop, start + tokens) - max(at, start))
            start += tokens
        return count


class Load:
    """The lookup, prefetch and read of one answer's tokens in a store.

    The steps are `looked_up`, `begin` (the answer is admitted), `arrived` for each chunk, and
    `end_read`; `cancel` may come at any time. ``in_pool`` leading tokens were in the pool when the
    load was made. ``evidence`` is None if the engine has no observers.

    Thread safety: all methods. The public attributes belong to the engine's thread, except
    ``due``, which the reading thread sets.
    """

    def __init__(
        self,
        tokens: TokenArray,
        namespace: Namespace,
        tenant: str,
        in_pool: int,
        evidence: Evidence | None = None,
    ) -> None:
        self.tokens = tokens
        self.namespace = namespace
        self.tenant = tenant
        self.in_pool = in_pool
        self.evidence = evidence
        self.reported = False
        """Whether the observers have the report of this load."""
        self.held_since: float | None = None
        """When admission first waited for this load, in monotonic seconds."""
        self.loading = False
        """Whether the answer runs and chunks are still to come."""
        self.is_first = False
        """Whether this load counts in the request's statistics: set at its first admission."""
        self.ready = 0
        """Tokens that can be read, once the answer is admitted."""
        self.stop = 0
        """Tokens to read: the ready ones, except the last token, which is computed in any case."""
        self.due: float | None = None
        """When the read under way should be over, in monotonic seconds; None between reads."""
        self._lock = threading.Lock()
        self._found = 0
        self._looked_up = False
        self._prefetch: Prefetch | None = None
        self._cancelled = False
        self._chunks: deque[LoadChunk] = deque()
        self._read = False

    @property
    def settled(self) -> bool:
        """Whether the lookup is over and the prefetch of the tokens it found is done."""
        return self._looked_up and (self._prefetch is None or self._prefetch.done)

    @property
    def cancelled(self) -> bool:
        """Whether the answer no longer needs this load."""
        return self._cancelled

    def is_through(self) -> bool:
        """Whether no chunk will come: all were taken, or a read has missed its deadline."""
        due = self.due  # the reading thread may set it to None meanwhile
        if due is not None and time.monotonic() > due:
            if self.evidence is not None:
                self.evidence.late()
            return True
        return self._read and not self._chunks

    def is_worthwhile(self, page_size: int) -> bool:
        """Whether the store could save a page or more; the last token is computed in any case."""
        return len(self.tokens) - 1 - self.in_pool >= page_size

    def prefetching(self, prefetch: Prefetch, found: int) -> None:
        """Take over the ``prefetch`` of ``found`` tokens; cancel it if the load was cancelled."""
        with self._lock:
            self._found, self._prefetch = found, prefetch
            cancelled = self._cancelled
        if cancelled:
            prefetch.cancel()

    def looked_up(self) -> None:
        """Note that the lookup is over, whether it found anything, failed or was skipped."""
        self._looked_up = True

    def begin(self, cached: int, page_size: int) -> None:
        """End the prefetch and set `ready`, `stop` and `loading`; the pool has ``cached`` tokens.

        A prefetch that is not done is cancelled; tokens that it has brought are ready. Less than
        a page is not loaded.
        """
        evidence = self.evidence
        if evidence is not None:
            evidence.begins(cached, wanted=self.is_worthwhile(page_size))
        with self._lock:
            prefetch, self._prefetch = self._prefetch, None
        if prefetch is not None:
            with suppress(IllegalStep):  # the store was closed under the engine: nothing is ready
                # Found may exceed what memory holds: the rest is read from its tier.
                self.ready = self._found if prefetch.done else min(self._found, prefetch.wait(0))
            prefetch.cancel()
            if evidence is not None:
                with suppress(IllegalStep):
                    evidence.brought(prefetch, self.ready)
        self.stop = min(self.ready, len(self.tokens) - 1)
        self.loading = self.stop - cached >= page_size
        if self.loading and evidence is not None:
            evidence.stop = self.stop

    def arrived(self, chunk: LoadChunk) -> bool:
        """Queue a chunk that was read; False if it is empty, or the load was cancelled."""
        if self.evidence is not None:
            self.evidence.now()
        with self._lock:
            wanted = chunk.tokens > 0 and not self._cancelled
            if wanted:
                self._chunks.append(chunk)
        return wanted

    def end_read(self) -> None:
        """Note that no more chunks arrive."""
        self._read = True

    def take(self) -> list[LoadChunk]:
        """Return the chunks that arrived since the last call."""
        with self._lock:
            chunks = list(self._chunks)
            self._chunks.clear()
        return chunks

    def cancel(self) -> list[LoadChunk]:
        """Stop prefetch and read; return the chunks that were not taken."""
        with self._lock:
            self._cancelled = True
            prefetch, self._prefetch = self._prefetch, None
        self.loading = False
        if prefetch is not None:
            prefetch.cancel()
        return self.take()
