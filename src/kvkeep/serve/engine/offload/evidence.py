"""`Evidence`: records the progress of one load, and makes the report of it.

    pool            came          stop         found            end
─────┼───────────────┼─────────────┼─────────────┼───────────────┼──▶ tokens
     │    sources    │ read failed │ not in time │ not stored    │ the last token
"""

from __future__ import annotations

import time
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, Literal, NamedTuple

from kvkeep.observe.usage import LoadReport
from kvkeep.store import Miss

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
    """The progress of one load: tokens found, fetched and read, their tiers, and failures.

    ``end`` is the number of tokens worth loading, all but the last; ``tiers`` are the store's,
    fastest first.

    Thread safety: one thread writes at a time: the lookup's, then the reader's, then the engine's,
    which makes the report when the others are done or have run out of time.
    """

    def __init__(self, end: int, page_size: int, tiers: Sequence[str]) -> None:
        self.since = time.time()
        """When the load was made, in Unix seconds."""
        self.stop = 0
        """Tokens to read, once the answer is admitted."""
        self.pool = 0
        """Tokens that the pool had at admission."""
        self.asks = False
        """Whether a page or more was worth loading."""
        self.answered = False
        """Whether the lookup was over at admission."""
        self._end = end
        self._page_size = page_size
        self._front = tiers[0]
        self._began = self._last = time.monotonic()
        self._answer: tuple[Lookup, Sequence[Miss]] | None = None
        self._slow = ""
        self._found = 0
        self._ready: int | None = None
        self._where: list[_Range] = []  # where the lookup found tokens
        self._fetched: list[_Range] = []  # where the prefetch read them
        self._came: list[_Range] = []  # where the reads found them
        self._behind: Sequence[Miss] = ()
        self._stopped: Sequence[Miss] = ()
        self._in_time = True

    # --- noting ------------------------------------------------------------------------------

    def looked_up(self, there: Lookup, behind: Sequence[Miss]) -> None:
        """Note the result of the lookup, and ``behind``: the reasons for tokens not found."""
        self.now()
        self._answer = there, behind

    def brought(self, prefetch: Prefetch, ready: int) -> None:
        """Note the end of the prefetch: ``ready`` tokens can be read, most of them from memory."""
        self._fetched = _ranges(prefetch.start, prefetch.sources)
        self._ready = ready
        if ready < self._found:  # the wait for the rest ended just now
            self.now()

    def begins(self, pool: int, *, wanted: bool) -> None:
        """Note the admission, with ``pool`` tokens cached; a lookup that ends later is ignored.

        ``wanted`` is whether anything was worth loading when the load was made.
        """
        if self._answer is not None:
            there, self._behind = self._answer
            self._found, self._where = there.tokens, _ranges(0, there.tiers)
            self.answered = True
        self.pool = pool
        self.asks = wanted and self._end - pool >= self._page_size

    def came(self, at: int, start: int, tokens: int, sources: Sequence[tuple[str, int]]) -> None:
        """Note a chunk of ``tokens`` tokens from ``start`` on; tokens before ``at`` are not new."""
        for one in _ranges(start, [*sources, (self._front, tokens)]):
            begin, stop = max(at, one.start), min(start + tokens, one.stop)
            if begin < stop:
                self._came.append(_Range(begin, stop, one.tier))

    def stopped(self, why: Sequence[Miss]) -> None:
        """Note why the read ended early, though it had time left."""
        self._stopped = why

    def late(self) -> None:
        """Note that the read ran out of time."""
        self._in_time = False
        self.now()

    def unanswered(self, why: Sequence[Miss]) -> None:
        """Note that the lookup was not over at admission; ``why`` may name the slow tier."""
        self._behind = [one for one in why if one.what != "never"]
        self._slow = next((one.tier for one in why if one.what == "late"), "")
        self.now()

    def now(self) -> None:
        """Note the time of the last progress."""
        self._last = time.monotonic()

    # --- the report --------------------------------------------------------------------------

    def report_so_far(self) -> LoadReport:
        """Return the report of a load whose answer ended or was preempted."""
        sources = self._sources()
        asked = sources[-1][1] - self.pool if sources else 0
        return LoadReport(asked, sources, (), self._last - self._began)

    def report(self) -> LoadReport:
        """Return the report: the tokens that came, by tier, and why the others did not."""
        if not self.asks:
            return LoadReport(seconds=self._last - self._began)
        sources = self._sources()
        at = sources[-1][1] if sources else self.pool
        found = min(max(self._found, at), self._end)
        stop = min(max(self.stop, at), found)
        unread: What = "unavailable" if self._in_time else "late"
        behind: What = "never" if self.answered else "late"
        missing = [
            *self._cover(at, stop, self._stopped, unread, "not read"),
            *self._not_in_time(stop, found),
            *self._cover(
                found, self._end, self._behind, behind, "" if self.answered else "no answer"
            ),
        ]
        late = any(fate.what == "late" for fate in missing)
        return LoadReport(
            self._end - self.pool, sources, tuple(missing), self._last - self._began, late
        )

    def _sources(self) -> tuple[tuple[int, int, str], ...]:
        """Return the tokens that came, by tier.

        Tokens read from memory count for the tier below from which they were fetched for this load.
        """
        cuts = sorted(
            {edge for part in (self._came, self._fetched, self._where) for one in part
             for edge in one[:2]}
        )  # fmt: skip
        sources: list[_Range] = []
        for start, stop in pairwise(cuts):
            tier = _at(self._came, start)
            if tier is None:
                continue
            tier, comma, codec = tier.partition(", ")  # of KV that is not exact
            if tier == self._front:
                tier = (_at(self._fetched, start) or tier).partition(", ")[0]
            if tier == self._front:
                tier = _at(self._where, start) or tier
            tier += comma + codec
            if sources and sources[-1].stop == start and sources[-1].tier == tier:
                sources[-1] = _Range(sources[-1].start, stop, tier)
            else:
                sources.append(_Range(start, stop, tier))
        return tuple((*one,) for one in sources)

    def _not_in_time(self, start: int, stop: int) -> list[Miss]:
        """Explain tokens that were found but not read: too slow, or less than a page."""
        if self._ready is not None and self._ready < self._found:
            return self._cover(start, stop, (), "late", "no answer")
        return [Miss(start, stop, "", "never", None, "part")] if start < stop else []

    def _cover(
        self, start: int, stop: int, fates: Sequence[Miss], what: What, detail: str
    ) -> list[Miss]:
        """Cut ``fates`` to tokens ``start`` … ``stop - 1``; tokens in the gaps get ``what``."""
        covered: list[Miss] = []
        for fate in fates:
            begin, end = max(start, fate.start), min(stop, fate.stop)
            if begin < end:
                covered += self._same(start, begin, what, detail)
                covered.append(replace(fate, start=begin, stop=end))
                start = end
        return covered + self._same(start, stop, what, detail)

    def _same(self, start: int, stop: int, what: What, detail: str) -> list[Miss]:
        """Return misses with one reason, split by the tier where the lookup found the tokens."""
        if start >= stop:
            return []
        if what == "never":
            return [Miss(start, stop, "", what, None, detail)]
        now = time.time()
        edges = {edge for one in self._where for edge in one[:2] if start < edge < stop}
        return [
            Miss(begin, end, _at(self._where, begin) or self._slow, what, now, detail)
            for begin, end in pairwise(sorted({start, stop, *edges}))
        ]


def _ranges(start: int, runs: Iterable[tuple[str, int]]) -> list[_Range]:
    """Return consecutive runs of ``(tier, tokens)`` as ranges, from token ``start`` on."""
    ranges: list[_Range] = []
    for tier, tokens in runs:
        ranges.append(_Range(start, start + tokens, tier))
        start += tokens
    return ranges


def _at(ranges: Sequence[_Range], token: int) -> str | None:
    return next((one.tier for one in ranges if one.start <= token < one.stop), None)
