"""`Load`: one load from a store, shared by the engine's thread and the threads that read."""

from __future__ import annotations

import threading
import time
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

from kvkeep.core.errors import IllegalStep
from kvkeep.store.kv.paying import LoadPiece

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvkeep.core.keys import Namespace
    from kvkeep.core.tokens import TokenArray
    from kvkeep.serve.engine.offload.evidence import Evidence
    from kvkeep.store import Prefetch

__all__ = ["Load", "LoadChunk"]


class LoadChunk(NamedTuple):
    """KV of ``tokens`` tokens from position ``start`` on.

    ``block`` has it in page order, in a block of `Buffers`; or it is a snapshot. ``sources`` are
    ``(tier, tokens)`` in order, as `KVStore.get` names them.
    """

    start: int
    tokens: int
    block: Any
    sources: tuple[tuple[str, int], ...]

    @property
    def stop(self) -> int:
        """The end of its tokens."""
        return self.start + self.tokens

    def lossy(self, start: int) -> int:
        """Return how many of its tokens from ``start`` on are not exact."""
        count, at = 0, self.start
        for source, tokens in self.sources:
            at += tokens
            if ", " in source:  # the codec is named
                count += max(0, at - max(start, at - tokens))
        return count


class Load:
    """The lookup, prefetch and read of one answer's tokens in a store.

    The steps are `looked_up`, `admitted`, `arrived` for each chunk, and `end_read`; `cancel` may
    come at any time. ``in_pool`` leading tokens were in the pool when the load was made.
    ``evidence`` is None if the engine has no observers.

    Thread safety: all methods. The public attributes belong to the engine's thread.
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
        self.is_first = False
        """Whether this load counts in the request's statistics: set at its first admission."""
        self.waited = False
        """Whether its answer was passed over by an admission."""
        self.prefetched = False
        """Whether its prefetch was begun."""
        self.done = False
        """Whether its answer needs no more of it."""
        self.late = False
        """Whether its lookup or its read was not waited for any longer."""
        self.stop = 0
        """The tokens before this one are worth reading, once that was decided."""
        self.deadline: float | None = None
        """When the read ends, in monotonic seconds; None: nothing was decided."""
        self.ends_at = 0.0
        """When the read is expected to end, in monotonic seconds."""
        self.alive_at = 0.0
        """When its answer was admitted, or a chunk arrived last, in monotonic seconds."""
        self._lock = threading.Lock()
        self._stored = 0
        self._runs: list[tuple[int, int, str]] = []  # start, stop, tier
        self._looked_up = False
        self._prefetch: Prefetch | None = None
        self._admitted = False
        self._cancelled = False
        self._reading = False
        self._read = False
        self._chunks: deque[LoadChunk] = deque()

    # --- lookup and prefetch ---------------------------------------------------------------------

    @property
    def answered(self) -> bool:
        """Whether the lookup is over."""
        return self._looked_up

    @property
    def stored(self) -> int:
        """The tokens that the store has."""
        return self._stored

    @property
    def found(self) -> int:
        """Of these the tokens that are of use: the prompt's last one is computed in any case."""
        return min(self._stored, len(self.tokens) - 1)

    @property
    def cancelled(self) -> bool:
        """Whether the answer no longer needs this load."""
        return self._cancelled

    def looked_up(self, stored: int, runs: Iterable[tuple[str, int]]) -> None:
        """Note the end of the lookup: ``stored`` tokens, in ``runs`` of ``(tier, tokens)``.

        0 if it failed.
        """
        start = 0
        for tier, tokens in runs:
            self._runs.append((start, start + tokens, tier))
            start += tokens
        self._stored, self._looked_up = stored, True

    def pieces(self, start: int, token_bytes: float, *, whole: bool) -> list[LoadPiece]:
        """Return what is stored behind ``start`` tokens, a piece for each run of a tier.

        ``whole``: as one piece, since a part of it is of no use.
        """
        parts: list[LoadPiece] = []
        for begin, end, tier in self._runs:
            stop = min(end, self.found)
            if stop > max(begin, start):
                size = int((stop - max(begin, start)) * token_bytes)
                parts.append(LoadPiece(stop, tier, {tier: size}))
        if whole and len(parts) > 1:
            tiers: dict[str, int] = {}
            for part in parts:
                for tier, size in part.tier_bytes.items():
                    tiers[tier] = tiers.get(tier, 0) + size
            return [LoadPiece(self.found, parts[-1].tier, tiers)]
        return parts

    def prefetching(self, prefetch: Prefetch) -> None:
        """Take over a ``prefetch``; it is cancelled if the answer was admitted, or has ended."""
        with self._lock:
            wanted = not self._admitted and not self._cancelled and self._prefetch is None
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

    def admitted(self, cached: int, page_size: int) -> None:
        """Note that the answer runs, and ``cached`` of its tokens need no computing."""
        with self._lock:
            self._admitted = True
        self.end_prefetch()
        if self.evidence is not None:
            behind = len(self.tokens) - 1 - self.in_pool  # the last token is computed in any case
            self.evidence.begins(cached, wanted=behind >= page_size)
        self.alive_at = time.monotonic()

    # --- the thread that reads -------------------------------------------------------------------

    @property
    def reading(self) -> bool:
        """Whether the read has begun, and is not over."""
        return self._reading and not self._read

    @property
    def has_read(self) -> bool:
        """Whether the read is over."""
        return self._read

    def begin_read(self) -> bool:
        """Note that the read begins; False if it is not wanted any more."""
        with self._lock:
            if self._cancelled or self._reading:
                return False
            self._reading = True
            return True

    @property
    def patience_s(self) -> float | None:
        """The seconds that are left for the read; None: it has no deadline."""
        return None if self.deadline is None else max(0.0, self.deadline - time.monotonic())

    def arrived(self, chunk: LoadChunk) -> bool:
        """Queue a chunk that was read; False if it is not wanted any more."""
        with self._lock:
            if not self._cancelled:
                self._chunks.append(chunk)
            return not self._cancelled

    def end_read(self) -> None:
        """Note that no more chunks arrive."""
        self._read = True

    # --- the engine's thread ---------------------------------------------------------------------

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
        self.end_prefetch()
        return self.take()
