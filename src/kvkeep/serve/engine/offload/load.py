"""One load of a prompt from a store, and the evidence for the report on it."""

from __future__ import annotations

import threading
import time
from collections import deque
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

from kvkeep.core.errors import IllegalStep
from kvkeep.observe.usage import LoadReport
from kvkeep.store import LoadPiece, Miss

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from kvkeep.core.keys import Namespace
    from kvkeep.core.tokens import TokenArray
    from kvkeep.store import LoadChoice, Lookup, Prefetch

__all__ = ["Evidence", "Load", "LoadChunk"]


class _Range(NamedTuple):
    start: int
    stop: int
    tier: str


class Evidence:
    """The progress of one load: tokens found, fetched and read, their tiers, and failures.

    ``end`` is the number of tokens worth loading, all but the last; ``tiers`` are the store's,
    fastest first.

    Thread safety: `stopped` belongs to the thread that reads, `looked_up` to the one that looks up,
    the others to the engine's. It makes the report when the others are done, or their results are
    of no more use.
    """

    def __init__(self, end: int, page_size: int, tiers: Sequence[str]) -> None:
        self.since = time.time()
        """When the load was made, in Unix seconds."""
        self.pool = 0
        """Tokens that the pool had at admission."""
        self.asks = False
        """Whether a page or more was worth loading."""
        self.choice: LoadChoice | None = None
        """What was decided last: whether to load, and why not."""
        self._end = end
        self._page_size = page_size
        self._front = tiers[0]
        self._began = self._last = time.monotonic()
        self._answer: tuple[Lookup, Sequence[Miss]] | None = None
        self._slow = ""
        self._behind: Sequence[Miss] = ()
        self._fetched: list[_Range] = []  # where the prefetch read them
        self._came: list[_Range] = []  # of use, in order
        self._stopped: list[Miss] = []
        self._late = False

    # --- noting ------------------------------------------------------------------------------

    @property
    def answered(self) -> bool:
        """Whether the lookup is over."""
        return self._answer is not None

    def looked_up(self, there: Lookup, behind: Sequence[Miss]) -> None:
        """Note the result of the lookup, and ``behind``: the reasons for tokens not found."""
        self._last = time.monotonic()
        self._answer = there, behind

    def brought(self, prefetch: Prefetch) -> None:
        """Note the end of the prefetch."""
        self._fetched = _ranges(prefetch.start, prefetch.sources)

    def begins(self, pool: int, *, wanted: bool) -> None:
        """Note the admission, with ``pool`` tokens cached.

        ``wanted`` is whether anything was worth loading when the load was made.
        """
        self.pool = pool
        self.asks = wanted and self._end - pool >= self._page_size

    def came(self, start: int, sources: Iterable[tuple[str, int]], at: int) -> None:
        """Note that tokens need no computing, since they were loaded.

        ``sources`` are ``(tier, tokens)`` from ``start`` on; the tokens before ``at`` are left out.
        """
        for tier, tokens in sources:
            if start + tokens > at:
                self._came.append(_Range(max(start, at), start + tokens, tier or self._front))
            start += tokens
        self._last = time.monotonic()

    def stopped(self, why: Sequence[Miss], start: int, stop: int) -> None:
        """Note why tokens ``start`` … ``stop - 1`` were found and did not come."""
        tier = "" if self._answer is None else _at(_ranges(0, self._answer[0].tiers), start) or ""
        self._stopped += _cover(
            start, stop, why,
            lambda begin, end: Miss(begin, end, tier, "unavailable", time.time(), "not read"),
        )  # fmt: skip

    def late(self) -> None:
        """Note that computing did not wait for the read, which was late."""
        self._late = True
        self._last = time.monotonic()

    def unanswered(self, why: Sequence[Miss]) -> None:
        """Note that computing did not wait for the lookup; ``why`` may name the slow tier."""
        self._behind = [one for one in why if one.what != "never"]
        self._slow = next((one.tier for one in why if one.what == "late"), "")
        self._last = time.monotonic()

    # --- the report --------------------------------------------------------------------------

    def report_so_far(self) -> LoadReport:
        """Return the report of a load whose answer ended or was preempted: tokens that came."""
        sources = self._sources()
        stop = sources[-1].stop if sources else self.pool
        missing = tuple(self._slower(*gap, "") for gap in self._gaps(stop))
        return LoadReport(tuple((*one,) for one in sources), missing, self._seconds)

    def report(self) -> LoadReport:
        """Return the report: the tokens that came, by tier, and why the others did not."""
        if not self.asks:
            return LoadReport(seconds=self._seconds)
        found, where = 0, list[_Range]()
        if self._answer is not None:
            there, self._behind = self._answer
            found, where = min(there.tokens, self._end), _ranges(0, there.tiers)
        missing: list[Miss] = []
        for start, stop in self._gaps(self._end):
            middle = min(max(start, found), stop)
            for begin, end in _cut(start, middle, where):
                missing += self._unread(begin, end, _at(where, begin) or "")
            missing += _cover(middle, stop, self._behind, self._not_found)
        late = any(fate.what == "late" for fate in missing)
        parts = tuple((*one,) for one in self._sources())
        return LoadReport(parts, _joined(missing), self._seconds, late)

    @property
    def _seconds(self) -> float:
        return self._last - self._began

    def _unread(self, start: int, stop: int, tier: str) -> list[Miss]:
        """Explain tokens that were found in ``tier`` and did not come."""
        if not self._came and not self._stopped and stop - start < self._page_size:
            return [Miss(start, stop, "", "never", None, "part")]

        def gap(begin: int, end: int) -> Miss:
            if self._late:
                return Miss(begin, end, tier, "late", time.time(), "no answer")
            return self._slower(begin, end, tier)

        return _cover(start, stop, self._stopped, gap)

    def _slower(self, start: int, stop: int, tier: str) -> Miss:
        """Explain tokens of which computing was faster, or was expected to be."""
        choice = self.choice
        if choice is None:
            return Miss.slower(start, stop, tier, load_s=0.0, compute_s=0.0, overtaken=True)
        if start < choice.tokens:
            return replace(choice.overtaken(start, tier), stop=stop)
        for miss in choice.misses:
            if miss.start <= start < miss.stop:
                return replace(miss, start=start, stop=stop, tier=tier)
        return Miss.slower(start, stop, tier, load_s=choice.load_s, compute_s=choice.compute_s)

    def _not_found(self, start: int, stop: int) -> Miss:
        if self.answered:
            return Miss(start, stop, "", "never", None, "")
        return Miss(start, stop, self._slow, "late", time.time(), "no answer")

    def _gaps(self, end: int) -> list[tuple[int, int]]:
        """Return the ranges from the pool's tokens to ``end`` that did not come."""
        gaps, at = [], self.pool
        for start, stop, _ in [*self._came, _Range(end, end, "")]:
            if at < start:
                gaps.append((at, start))
            at = max(at, stop)
        return gaps

    def _sources(self) -> list[_Range]:
        """Return the tokens that came, by tier.

        Tokens read from memory count for the tier below from which they were fetched for this load.
        """
        where = [] if self._answer is None else _ranges(0, self._answer[0].tiers)
        sources: list[_Range] = []
        for part in self._came:
            for start, stop in _cut(part.start, part.stop, self._fetched, where):
                tier, comma, codec = part.tier.partition(", ")  # of KV that is not exact
                if tier == self._front:
                    tier = (_at(self._fetched, start) or tier).partition(", ")[0]
                if tier == self._front:
                    tier = _at(where, start) or tier
                tier += comma + codec
                if sources and sources[-1].stop == start and sources[-1].tier == tier:
                    sources[-1] = _Range(sources[-1].start, stop, tier)
                else:
                    sources.append(_Range(start, stop, tier))
        return sources


def _cut(start: int, stop: int, *by: Iterable[_Range]) -> list[tuple[int, int]]:
    """Return ``start`` … ``stop`` in pieces that lie within ranges, or outside."""
    edges = {edge for part in by for one in part for edge in one[:2] if start < edge < stop}
    return list(pairwise(sorted({start, stop, *edges})))


def _cover(
    start: int, stop: int, fates: Sequence[Miss], gap: Callable[[int, int], Miss]
) -> list[Miss]:
    """Cut ``fates`` to tokens ``start`` … ``stop - 1``; ``gap`` makes those between them."""
    covered: list[Miss] = []
    for fate in fates:
        begin, end = max(start, fate.start), min(stop, fate.stop)
        if begin < end:
            if start < begin:
                covered.append(gap(start, begin))
            covered.append(replace(fate, start=begin, stop=end))
            start = end
    return [*covered, gap(start, stop)] if start < stop else covered


def _joined(misses: Iterable[Miss]) -> tuple[Miss, ...]:
    """Return ``misses``, with neighbours of one tier and reason as one, at the later moment."""
    joined: list[Miss] = []
    for one in misses:
        last = joined[-1] if joined else None
        if last is not None and last.stop == one.start and _reason(last) == _reason(one):
            moments = [at for at in (last.at, one.at) if at is not None]
            joined[-1] = replace(one, start=last.start, at=max(moments, default=None))
        else:
            joined.append(one)
    return tuple(joined)


def _reason(miss: Miss) -> tuple[str, str, str]:
    return miss.tier, miss.what, miss.detail


def _ranges(start: int, runs: Iterable[tuple[str, int]]) -> list[_Range]:
    """Return consecutive runs of ``(tier, tokens)`` as ranges, from token ``start`` on."""
    ranges: list[_Range] = []
    for tier, tokens in runs:
        ranges.append(_Range(start, start + tokens, tier))
        start += tokens
    return ranges


def _at(ranges: Sequence[_Range], token: int) -> str | None:
    return next((one.tier for one in ranges if one.start <= token < one.stop), None)


class LoadChunk(NamedTuple):
    """KV of ``tokens`` tokens from position ``start`` on.

    ``block`` has it in page order, in a block of `Buffers`; or it is a snapshot. ``sources`` are
    ``(tier, tokens)`` in order, as `KVStore.get` names them. From token ``exact`` on it is not
    exact; None: all of it is.
    """

    start: int
    tokens: int
    block: Any
    sources: tuple[tuple[str, int], ...]
    exact: int | None = None

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
