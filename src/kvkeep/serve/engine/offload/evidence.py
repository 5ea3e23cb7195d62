"""`Evidence`: records the progress of one load, and makes the report of it.

    pool                                  found            end
─────┼──────────────┼──────────┼────────────┼───────────────┼──▶ tokens
     │   computed   │   lost   │   loaded   │  not stored   │ the last token
"""

from __future__ import annotations

import time
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, Literal, NamedTuple

from kvkeep.observe.usage import LoadReport
from kvkeep.store import Miss

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from kvkeep.store import Lookup, Prefetch

    What = Literal["unavailable", "late"]

__all__ = ["Evidence"]


class _Range(NamedTuple):
    start: int
    stop: int
    tier: str


class Evidence:
    """The progress of one load: tokens found, fetched and read, their tiers, and failures.

    ``end`` is the number of tokens worth loading, all but the last; ``tiers`` are the store's,
    fastest first.

    Thread safety: `read_from` and `stopped` belong to the thread that reads, `looked_up` to the
    one that looks up, the others to the engine's. It makes the report when the others are done, or
    their results are of no more use.
    """

    def __init__(self, end: int, page_size: int, tiers: Sequence[str]) -> None:
        self.since = time.time()
        """When the load was made, in Unix seconds."""
        self.pool = 0
        """Tokens that the pool had at admission."""
        self.asks = False
        """Whether a page or more was worth loading."""
        self._end = end
        self._page_size = page_size
        self._front = tiers[0]
        self._began = self._last = time.monotonic()
        self._answer: tuple[Lookup, Sequence[Miss]] | None = None
        self._slow = ""
        self._behind: Sequence[Miss] = ()
        self._fetched: list[_Range] = []  # where the prefetch read them
        self._came: list[_Range] = []  # that were of use
        self._read: list[_Range] = []  # where the reads found them
        self._stopped: list[Miss] = []
        self._late = False
        self._plan = 0.0, 0.0  # seconds with the rest loaded, and computed
        self._pays = False  # whether the read was worth it when it began, or last

    # --- noting ------------------------------------------------------------------------------

    @property
    def answered(self) -> bool:
        """Whether the lookup is over."""
        return self._answer is not None

    def looked_up(self, there: Lookup, behind: Sequence[Miss]) -> None:
        """Note the result of the lookup, and ``behind``: the reasons for tokens not found."""
        self.now()
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

    def planned(self, load_s: float, compute_s: float, *, pays: bool) -> None:
        """Note the seconds until the first token with all of the rest loaded, and computed.

        ``pays`` is whether some of it is worth loading. The last call counts.
        """
        self._plan, self._pays = (load_s, compute_s), pays

    def came(self, start: int, stop: int) -> None:
        """Note that tokens ``start`` … ``stop - 1`` need no computing, since they were loaded."""
        self._came.append(_Range(start, stop, ""))
        self.now()

    def read_from(self, tier: str, start: int, stop: int) -> None:
        """Note the tier that gave tokens ``start`` … ``stop - 1``; "": the first."""
        if start < stop:
            self._read.append(_Range(start, stop, tier or self._front))

    def stopped(self, why: Sequence[Miss], start: int, stop: int) -> None:
        """Note why tokens ``start`` … ``stop - 1`` were found and did not come."""
        tier = "" if self._answer is None else _at(_ranges(0, self._answer[0].tiers), start) or ""
        self._stopped += self._cover(
            start, stop, why, lambda begin, end: _miss(begin, end, tier, "unavailable", "not read")
        )

    def late(self) -> None:
        """Note that computing did not wait for the read, which was late."""
        self._late = True
        self.now()

    def unanswered(self, why: Sequence[Miss]) -> None:
        """Note that computing did not wait for the lookup; ``why`` may name the slow tier."""
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
        missing = tuple(
            self._slower(start, stop, "")
            for start, stop in self._gaps(sources[-1].stop if sources else self.pool)
        )
        asked = sources[-1].stop - self.pool if sources else 0
        return LoadReport(asked, tuple((*one,) for one in sources), missing, self._seconds)

    def report(self) -> LoadReport:
        """Return the report: the tokens that came, by tier, and why the others did not."""
        if not self.asks:
            return LoadReport(seconds=self._seconds)
        found, where = 0, list[_Range]()
        if self._answer is not None:
            there, self._behind = self._answer
            found, where = min(there.tokens, self._end), _ranges(0, there.tiers)
        sources, missing = self._sources(), list[Miss]()
        for start, stop in self._gaps(self._end):
            middle = min(max(start, found), stop)
            for begin, end in self._cut(start, middle, where):
                missing += self._unread(begin, end, _at(where, begin) or "")
            missing += self._cover(middle, stop, self._behind, self._not_found)
        late = any(fate.what == "late" for fate in missing)
        parts = tuple((*one,) for one in sources)
        return LoadReport(self._end - self.pool, parts, _joined(missing), self._seconds, late)

    @property
    def _seconds(self) -> float:
        return self._last - self._began

    def _unread(self, start: int, stop: int, tier: str) -> list[Miss]:
        """Explain tokens that were found in ``tier`` and did not come."""
        if not self._came and not self._stopped and stop - start < self._page_size:
            return [Miss(start, stop, "", "never", None, "part")]

        def gap(begin: int, end: int) -> Miss:
            if self._late:
                return _miss(begin, end, tier, "late", "no answer")
            return self._slower(begin, end, tier)

        return self._cover(start, stop, self._stopped, gap)

    def _slower(self, start: int, stop: int, tier: str) -> Miss:
        load_s, compute_s = self._plan
        return Miss.slower(
            start,
            stop,
            tier,
            load_s=load_s,
            compute_s=compute_s,
            overtaken=self._pays or bool(self._came),
        )

    def _not_found(self, start: int, stop: int) -> Miss:
        if self.answered:
            return Miss(start, stop, "", "never", None, "")
        return _miss(start, stop, self._slow, "late", "no answer")

    def _gaps(self, end: int) -> list[tuple[int, int]]:
        """Return the ranges from the pool's tokens to ``end`` that did not come."""
        gaps, at = [], self.pool
        for start, stop, _ in [*sorted(self._came), _Range(end, end, "")]:
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
        for part in sorted(self._came):
            for start, stop in self._cut(part.start, part.stop, self._read, self._fetched, where):
                tier = _at(self._read, start) or self._front
                tier, comma, codec = tier.partition(", ")  # of KV that is not exact
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

    @staticmethod
    def _cut(start: int, stop: int, *by: Iterable[_Range]) -> list[tuple[int, int]]:
        """Return ``start`` … ``stop`` in pieces that lie within ranges, or outside."""
        edges = {edge for part in by for one in part for edge in one[:2] if start < edge < stop}
        return list(pairwise(sorted({start, stop, *edges})))

    def _cover(
        self, start: int, stop: int, fates: Sequence[Miss], gap: Callable[[int, int], Miss]
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


def _miss(start: int, stop: int, tier: str, what: What, detail: str) -> Miss:
    return Miss(start, stop, tier, what, time.time(), detail)


def _ranges(start: int, runs: Iterable[tuple[str, int]]) -> list[_Range]:
    """Return consecutive runs of ``(tier, tokens)`` as ranges, from token ``start`` on."""
    ranges: list[_Range] = []
    for tier, tokens in runs:
        ranges.append(_Range(start, start + tokens, tier))
        start += tokens
    return ranges


def _at(ranges: Sequence[_Range], token: int) -> str | None:
    return next((one.tier for one in ranges if one.start <= token < one.stop), None)
