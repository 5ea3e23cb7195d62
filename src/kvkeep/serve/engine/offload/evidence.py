"""`Evidence`: what is noted of one load while it goes on, and the report that comes of it.

    pool            came          stop         found            end
─────┼───────────────┼─────────────┼─────────────┼───────────────┼──▶ tokens
     │    sources    │ did not come│ not in time │ not there     │ the last token
"""

from __future__ import annotations

import time
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, Literal, NamedTuple

from kvkeep.observe.usage import LoadReport
from kvkeep.store import Fate

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from kvkeep.store import Lookup, Prefetch

    What = Literal["unavailable", "late", "never"]

__all__ = ["Evidence"]


class _Range(NamedTuple):
    start: int
    stop: int
    tier: str


class Evidence:
    """What is noted of one load. ``end`` tokens are wanted at most, those before the last one.

    ``tiers`` are the store's, fastest first.

    Thread safety: one thread at a time writes what it writes: who seeks, then who reads, then the
    engine's, which makes the report when the others are through, or are not waited for.
    """

    def __init__(self, end: int, page_size: int, tiers: Sequence[str]) -> None:
        self.since = time.time()
        """When it was sought, in Unix seconds."""
        self.stop = 0
        """So many tokens were to be read."""
        self.pool = 0
        """Tokens that the pool had when it was admitted."""
        self.asks = False
        """Whether anything was wanted of the store."""
        self.answered = False
        """Whether the store had said what it has when it was admitted."""
        self._end = end
        self._page_size = page_size
        self._front = tiers[0]
        self._began = self._last = time.monotonic()
        self._said: tuple[Lookup, Sequence[Fate]] | None = None
        self._slow = ""
        self._found = 0
        self._ready: int | None = None
        self._where: list[_Range] = []  # it was found, when it was sought,
        self._fetched: list[_Range] = []  # it was, on its way into memory,
        self._came: list[_Range] = []  # and it came from
        self._behind: Sequence[Fate] = ()
        self._stopped: Sequence[Fate] = ()
        self._in_time = True

    # --- noting ------------------------------------------------------------------------------

    def sought(self, there: Lookup, behind: Sequence[Fate]) -> None:
        """The store has said what it has, and of what it has not, why."""
        self.now()
        self._said = there, behind

    def brought(self, prefetch: Prefetch, ready: int) -> None:
        """``ready`` tokens may be read, most of them in memory by now."""
        self._fetched = _ranges(prefetch.start, prefetch.sources)
        self._ready = ready
        if ready < self._found:  # it was waited for in vain
            self.now()

    def begins(self, pool: int, *, wanted: bool) -> None:
        """Its answer is admitted. What the store says after that does not count."""
        if self._said is not None:
            there, self._behind = self._said
            self._found, self._where = there.tokens, _ranges(0, there.tiers)
            self.answered = True
        self.pool = pool
        self.asks = wanted and self._end - pool >= self._page_size

    def came(self, at: int, start: int, tokens: int, sources: Sequence[tuple[str, int]]) -> None:
        """A piece from token ``start`` on is in its pages; the first new token is ``at``."""
        for one in _ranges(start, [*sources, (self._front, tokens)]):
            begin, stop = max(at, one.start), min(start + tokens, one.stop)
            if begin < stop:
                self._came.append(_Range(begin, stop, one.tier))

    def stopped(self, why: Sequence[Fate]) -> None:
        """What was found did not come, and not because it took too long."""
        self._stopped = why

    def late(self) -> None:
        """The time for reading is over."""
        self._in_time = False
        self.now()

    def unanswered(self, why: Sequence[Fate]) -> None:
        """The store did not even say what it has; ``why`` may tell who did not answer."""
        self._behind = [one for one in why if one.what != "never"]
        self._slow = next((one.tier for one in why if one.what == "late"), "")
        self.now()

    def now(self) -> None:
        """Something came."""
        self._last = time.monotonic()

    # --- the report --------------------------------------------------------------------------

    def report_so_far(self) -> LoadReport:
        """Of a request that ended meanwhile, or gave way: what had come."""
        sources = self._sources()
        asked = sources[-1][1] - self.pool if sources else 0
        return LoadReport(asked, sources, (), self._last - self._began)

    def report(self) -> LoadReport:
        """What came, and why the rest did not."""
        if not self.asks:
            return LoadReport(seconds=self._last - self._began)
        sources = self._sources()
        at = sources[-1][1] if sources else self.pool
        found = min(max(self._found, at), self._end)
        missing = [
            *self._unread(at, min(max(self.stop, at), found)),
            *self._not_in_time(min(max(self.stop, at), found), found),
            *self._not_there(found),
        ]
        late = any(fate.what == "late" for fate in missing)
        return LoadReport(
            self._end - self.pool, sources, tuple(missing), self._last - self._began, late
        )

    def _sources(self) -> tuple[tuple[int, int, str], ...]:
        """What came, by the tier where it was: memory may have it from below just since then."""
        cuts = sorted(
            {edge for part in (self._came, self._fetched, self._where) for one in part
             for edge in one[:2]}
        )  # fmt: skip
        sources: list[_Range] = []
        for start, stop in pairwise(cuts):
            tier = _at(self._came, start)
            if tier is None:
                continue
            if tier == self._front:
                tier = _at(self._fetched, start) or tier
            if tier == self._front:
                tier = _at(self._where, start) or tier
            if sources and sources[-1].stop == start and sources[-1].tier == tier:
                sources[-1] = _Range(sources[-1].start, stop, tier)
            else:
                sources.append(_Range(start, stop, tier))
        return tuple((*one,) for one in sources)

    def _unread(self, start: int, stop: int) -> list[Fate]:
        """It was to be read, and did not come."""
        what: What = "unavailable" if self._in_time else "late"
        return self._cover(start, stop, self._stopped, what, "not read")

    def _not_in_time(self, start: int, stop: int) -> list[Fate]:
        """It was found, and not in memory when it was its turn; or it is not worth it."""
        if self._ready is not None and self._ready < self._found:
            return self._cover(start, stop, (), "late", "no answer")
        return [Fate(start, stop, "", "never", None, "part")] if start < stop else []

    def _not_there(self, start: int) -> list[Fate]:
        """It was not found."""
        if self.answered:
            return self._cover(start, self._end, self._behind, "never", "")
        return self._cover(start, self._end, self._behind, "late", "no answer")

    def _cover(
        self, start: int, stop: int, fates: Sequence[Fate], what: What, detail: str
    ) -> list[Fate]:
        """Tokens ``start`` … ``stop - 1`` by ``fates``, and what they leave by another."""
        covered: list[Fate] = []
        for fate in fates:
            begin, end = max(start, fate.start), min(stop, fate.stop)
            if begin < end:
                covered += self._same(start, begin, what, detail)
                covered.append(replace(fate, start=begin, stop=end))
                start = end
        return covered + self._same(start, stop, what, detail)

    def _same(self, start: int, stop: int, what: What, detail: str) -> list[Fate]:
        """The same for all of them, but for the tier where each was found."""
        if start >= stop:
            return []
        if what == "never":
            return [Fate(start, stop, "", what, None, detail)]
        now = time.time()
        edges = {edge for one in self._where for edge in one[:2] if start < edge < stop}
        return [
            Fate(begin, end, _at(self._where, begin) or self._slow, what, now, detail)
            for begin, end in pairwise(sorted({start, stop, *edges}))
        ]


def _ranges(start: int, runs: Iterable[tuple[str, int]]) -> list[_Range]:
    """``(tier, tokens)`` one behind the other, from token ``start`` on."""
    ranges: list[_Range] = []
    for tier, tokens in runs:
        ranges.append(_Range(start, start + tokens, tier))
        start += tokens
    return ranges


def _at(ranges: Sequence[_Range], token: int) -> str | None:
    return next((one.tier for one in ranges if one.start <= token < one.stop), None)
