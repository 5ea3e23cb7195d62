"""How much of a stored prefix an engine loads, and how long it waits to hear what is stored."""

from __future__ import annotations

import math
import statistics
import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

from kvkeep.core.cost import OnlineFit, best_prefix

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvkeep.core.cost import LearnedPrefill
    from kvkeep.store import BlockStore

__all__ = [
    "LoadChooser",
    "LoadDecision",
    "LoadPace",
    "LookupPatience",
    "ProbeEnd",
    "RunCost",
    "StoredRun",
    "TimedLoads",
]


_UNSURE: Final = 0.5  # of the error of an expected load that counts against it …
_LEAST_GAIN: Final = 0.02  # … and the part of computing that a load saves at least
_SLACK: Final = 1.25  # multiples of its expected seconds that a load may take …
_SPARE: Final = 0.25  # … and the part of computing that it may take beyond
_LEAST_PATIENCE_S: Final = 0.05  # threads wait for others now and then
_FAR: Final = 4  # multiples of the largest pass observed at which its cost is a guess
_STAKE: Final = 0.25  # of computing that a load from an unknown tier may take; what came counts …
_WHOLE_STAKE: Final = 0.5  # … and where it does not, as all must come or nothing is of use
_PROBE_SHARE: Final = 0.1  # of the time in which a tier is read for probes: it is idle else
_PROBE_PAUSE_S: Final = 1.0  # between two probes of a tier, at least …
_LONGEST_PAUSE_S: Final = 10.0  # … and at most …
_SURPRISED_PAUSE_S: Final = 0.25  # … and after one that was far from what was expected
_SURPRISE: Final = 2.0
_PROBE_LOST_S: Final = 60.0  # after which a probe that has not ended is not waited for
_MOST_TIERS: Final = 256
_RECENT: Final = 9  # lookups that say what the next one takes …
_SHARES: Final = 32  # … and those that say what it brings
_FIRST: Final = 0.25  # of what could be saved, that the first lookup may take
_LATER: Final = 4.0  # multiples of the usual seconds that a later one may take
_LOOKUP_PAUSE_S: Final = 5.0  # between two lookups that are not waited for


class StoredRun(NamedTuple):
    """A piece of a stored prefix that lies in one tier.

    Attributes:
        end: the tokens of the prompt up to its end.
        tier: the name of the tier.
        seconds: what loading it should take; None: nothing is known yet.
        error: the relative error of ``seconds`` to expect.
    """

    end: int
    tier: str
    seconds: float | None
    error: float = 0.0


class LoadDecision(NamedTuple):
    """What to load of a stored prefix.

    Attributes:
        tokens: of the prompt, up to which to load; not above those that are there: nothing.
        patience: seconds after which the load ends, as computing is faster then; infinite where
            that is not known.
        compute_s: seconds that computing what is loaded would take, or the prefix if nothing is;
            0 if unknown.
        load_s: seconds that loading the whole prefix should take; 0 if unknown.
        refused: the tier of the first piece that is not loaded; "": all of it is.
    """

    tokens: int
    patience: float
    compute_s: float
    load_s: float
    refused: str


@dataclass(slots=True)
class _Doubt:
    """What is held against a tier.

    ``late``: a load from it ended late, and nothing came from it in time since. ``next_probe``: the
    monotonic seconds before which it is not probed.
    """

    late: bool = False
    next_probe: float = 0.0


class LoadChooser:
    """Chooses how much of a stored prefix to load, down to nothing.

    What is not known is loaded, for that is how it becomes known; but not for long. A tier from
    which a load came late is not loaded from until a probe of it came in time. Prompts far longer
    than all that was computed so far are computed once, if loading does not look faster than any
    pass: else a cost that was guessed too high would never be corrected.

    Thread safety: none. Cost: some µs.

    Arguments:
        prefill: what computing costs.
        pass_tokens: the most tokens of one pass; None: no limit.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        prefill: LearnedPrefill,
        *,
        pass_tokens: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._prefill = prefill
        self._pass_tokens = pass_tokens
        self._clock = clock
        self._doubts: dict[str, _Doubt] = {}
        self._handover = OnlineFit(1)

    # --- choices ---------------------------------------------------------------------------------

    def compute_s(self, start: int, stop: int) -> float:
        """Return the seconds to compute tokens ``start`` … ``stop - 1``, in several passes."""
        seconds = self._prefill.prefill_s(start, stop)
        if self._pass_tokens is not None and stop - start > self._pass_tokens:
            more = math.ceil((stop - start) / self._pass_tokens) - 1
            seconds += more * self._prefill.cost.seconds_fixed
        return seconds

    def saves_s(self, computed: int, end: int, tokens: int) -> float | None:
        """Return the seconds of computing that tokens up to ``end`` save; None: unknown."""
        if not self._prefill.known:
            return None
        rest = self.compute_s(min(end, tokens - 1), tokens)
        return max(0.0, self.compute_s(computed, tokens) - rest)

    def choose(
        self,
        computed: int,
        tokens: int,
        runs: Sequence[StoredRun],
        *,
        divisible: bool = True,
        compute_free_s: float = 0.0,
        load_free_s: float = 0.0,
    ) -> LoadDecision:
        """Return what to load of a prompt of ``tokens``, of which ``computed`` are there.

        ``runs`` are the pieces stored behind these, in order. Not ``divisible``: all of them are
        loaded, or none. Computing and loading begin when older requests leave them room.
        """
        end = runs[-1].end
        if not self._prefill.known:
            return LoadDecision(end, math.inf, 0.0, 0.0, "")
        alone = self.compute_s(computed, tokens)
        sure = self._handover.expect((1.0,))
        load_s = sure + sum(run.seconds or 0.0 for run in runs)
        pieces = [(run.end, self._counted_s(run)) for run in runs]
        if not divisible:
            pieces = [(end, sum(seconds for _, seconds in pieces))]
        # The gain demanded stands before the first piece: it is that of any load at all.
        best = best_prefix(
            computed, tokens, pieces, self.compute_s, compute_free_s=compute_free_s,
            load_free_s=load_free_s + sure + _LEAST_GAIN * alone,
        )  # fmt: skip
        if best.tokens > computed and self._is_guess(computed, tokens, load_s):
            best = best._replace(tokens=computed)
        refused = next((run.tier for run in runs if run.end > best.tokens), "")
        loaded = [run for run in runs if run.end <= best.tokens]
        saved = alone - self.compute_s(min(best.tokens if loaded else end, tokens - 1), tokens)
        if loaded and all(run.seconds is not None for run in loaded):
            expected = sure + sum((1 + run.error) * (run.seconds or 0.0) for run in loaded)
            patience = min(saved, _SLACK * expected + _SPARE * saved)
        else:
            patience = saved * (_STAKE if divisible else _WHOLE_STAKE)
        patience = load_free_s + max(_LEAST_PATIENCE_S, patience)
        return LoadDecision(best.tokens, patience, saved, load_s, refused)

    def _counted_s(self, run: StoredRun) -> float:
        """Return the seconds that count for ``run``: infinite while its tier is in doubt."""
        doubt = self._doubts.get(run.tier)
        if doubt is not None and doubt.late:
            return math.inf
        return (run.seconds or 0.0) * (1 + _UNSURE * run.error)

    def _is_guess(self, computed: int, tokens: int, load_s: float) -> bool:
        """Whether computing has to be tried, as it may well be faster than a guess says."""
        largest = self._prefill.largest
        pass_tokens = min(tokens - computed, self._pass_tokens or tokens)
        at_least = self._prefill.prefill_s(computed, computed + largest)
        return pass_tokens > _FAR * largest and load_s > at_least

    # --- what happened ---------------------------------------------------------------------------

    def handed_over(self, seconds: float) -> None:
        """Learn what a load took beyond its own time: until the engine began it, and saw its end.

        It counts for every load.
        """
        self._handover.learn((1.0,), seconds)

    def came_late(self, tier: str) -> None:
        """Note that a load from ``tier`` ended late: others wait for a probe."""
        self._doubt(tier).late = True

    def take_probe(self, tier: str) -> bool:
        """Return whether to probe ``tier`` now, from which something was not loaded.

        True begins one: `probed` must follow.
        """
        doubt = self._doubt(tier)
        if self._clock() < doubt.next_probe:
            return False
        doubt.next_probe = self._clock() + _PROBE_LOST_S
        return True

    def probed(
        self, tier: str, seconds: float, *, in_time: bool, expected: float | None = None
    ) -> None:
        """Note that a probe of ``tier`` has ended, after ``seconds``; ``in_time``: with blocks.

        The next one is due when probes took 10 % of the time, and earlier if this one took less
        than half of the seconds that were ``expected``, or more than twice as many.
        """
        doubt = self._doubt(tier)
        pause = min(max(_PROBE_PAUSE_S, seconds / _PROBE_SHARE), _LONGEST_PAUSE_S)
        if expected and not 1 / _SURPRISE < seconds / expected < _SURPRISE:
            pause = max(_SURPRISED_PAUSE_S, seconds)
        doubt.next_probe = self._clock() + pause
        if in_time and not (expected and seconds > _SURPRISE * expected):
            doubt.late = False  # what is known of it holds

    def _doubt(self, tier: str) -> _Doubt:
        if len(self._doubts) >= _MOST_TIERS and tier not in self._doubts:
            self._doubts.pop(next(iter(self._doubts)))
        return self._doubts.setdefault(tier, _Doubt())


class LookupPatience:
    """Weighs what lookups take, lately, against what they bring.

    A lookup is waited for if the seconds that it takes are fewer than those that it saves, on
    average. If they are not, a lookup is made every five seconds, for which no request waits, to
    see whether they are again.

    Thread safety: none. Cost: some µs.

    Arguments:
        timeout: seconds that no lookup is waited for longer.
        clock: monotonic seconds.
    """

    def __init__(self, timeout: float, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._timeout = timeout
        self._clock = clock
        self._took: deque[float] = deque(maxlen=_RECENT)
        self._shares: deque[float] = deque(maxlen=_SHARES)
        self._next = 0.0

    def seconds(self, saves_s: float | None) -> float:
        """Return how long to wait for a lookup that can save ``saves_s``; None: that is unknown.

        0: not at all; see `due`.
        """
        if saves_s is None:
            return self._timeout
        if not self._took:
            return min(self._timeout, _FIRST * saves_s)
        usual, brings = statistics.median(self._took), statistics.mean(self._shares) * saves_s
        if usual > brings:
            return 0.0
        return min(self._timeout, max(_LATER * usual, _FIRST * brings), saves_s)

    def due(self) -> bool:
        """Return whether to begin a lookup that is not waited for; if so, the next one is later."""
        now = self._clock()
        if now < self._next:
            return False
        self._next = now + _LOOKUP_PAUSE_S
        return True

    def answered(self, seconds: float, share: float) -> None:
        """Note that a lookup took ``seconds`` and found this share of what it was asked for."""
        self._took.append(seconds)
        self._shares.append(share)


_PROBE_S: Final = 0.25  # what a probe should take at most, or twice what one block should
_PROBE_BLOCKS: Final = (1, 2, 4, 8, 16)  # in turn: reads of several blocks overlap
_PROBE_END_S: Final = 2.0
_EARLY: Final = 0.1  # of the seconds of computing, after which a load is compared with it
_SLOWER: Final = 1.2  # multiples of the pace of computing at which a load ends


class RunCost(NamedTuple):
    """Keys up to ``end`` are in ``tier``; ``seconds``: expected to load them, None: unknown."""

    end: int
    tier: str
    seconds: float | None
    error: float


class LoadPace(NamedTuple):
    """When a load ends early: at ``until`` (monotonic seconds), or when it falls behind.

    It falls behind if its blocks come more slowly than computing them would go, ``compute_s`` for
    all of them; 0: that is not known.
    """

    until: float
    compute_s: float = 0.0


class Read(NamedTuple):
    """What a read has brought: leading blocks.

    ``late``: more would have come too slowly. ``failed``: the tier that then was slower than what
    is known of it, or from which nothing came; "": none.
    """

    blocks: int
    late: bool
    failed: str


class ProbeEnd(NamedTuple):
    """A probe of ``tier`` that has ended, after ``seconds``; ``came``: with blocks."""

    tier: str
    seconds: float
    expected: float
    came: bool


class TimedLoads:
    """What loads from ``store`` take, and loads that end when they take too long.

    Thread safety: all methods.
    """

    def __init__(self, store: BlockStore) -> None:
        self._store = store
        self._probes = 0
        self.cost = store.cost

    def runs(self, keys: Sequence[bytes], nbytes: Sequence[int]) -> list[RunCost]:
        """Return in which tiers ``keys`` lie, in runs, and what it takes to load them.

        ``nbytes`` are the bytes that are loaded for each key.
        """
        found, start = [], 0
        for end, tier in self._store.sources(keys):
            learned = self.cost.reading(tier)
            seconds = learned.seconds(sum(nbytes[start:end])) if learned.known else None
            found.append(RunCost(end, tier, seconds, learned.error if learned.observations else 0))
            start = end
        return found

    def read(
        self,
        keys: Sequence[bytes],
        sizes: Sequence[int],
        sink: Callable[[int, memoryview], None],
        pace: LoadPace,
        cancelled: Callable[[], bool],
    ) -> Read:
        """Read blocks as `BlockStore.read` does, until they come too slowly."""
        runs = self._store.sources(keys)
        unknown = {tier for _, tier in runs if not self.cost.reading(tier).known}
        arrived, began, slow = 0, time.monotonic(), False

        def ends() -> bool:
            nonlocal slow
            slow = _is_slow(arrived, len(keys), time.monotonic() - began, pace.compute_s)
            return slow or cancelled()

        def take(at: int, raw: memoryview) -> None:
            nonlocal arrived
            sink(at, raw)
            arrived += 1

        count = self._store.read(
            keys, sizes, take, deadline=max(0.0, pace.until - began), cancelled=ends
        )
        late, failed = slow or time.monotonic() >= pace.until, ""
        if late and count < len(keys):
            start = 0
            for end, tier in runs:
                if count < end:
                    # What has come of an unknown tier is news enough.
                    failed = "" if tier in unknown and count > start else tier
                    break
                start = end
        return Read(count, late, failed)

    def probe(self, tier: str, keys: Sequence[bytes], sizes: Sequence[int]) -> ProbeEnd:
        """Read a few of ``keys`` from ``tier`` for no request. Takes two seconds at most."""
        start = 0
        for end, name in self._store.sources(keys):
            if name == tier:
                break
            start = end
        learned, most = self.cost.reading(tier), 1
        if learned.known:
            most = _PROBE_BLOCKS[self._probes % len(_PROBE_BLOCKS)]
            self._probes += 1
        count = min(most, len(keys) - start)
        if count < 1:
            return ProbeEnd(tier, 0.0, 0.0, came=False)
        longest = max(_PROBE_S, 2 * learned.seconds(sizes[start]))
        while count > 1 and learned.seconds(sum(sizes[start : start + count])) > longest:
            count -= 1
        expected = learned.seconds(sum(sizes[start : start + count]))
        copy = bytearray(max(sizes[start : start + count]))

        def take(_at: int, raw: memoryview) -> None:
            copy[: len(raw)] = raw

        began = time.monotonic()
        read = self.read(
            keys[start : start + count], sizes[start : start + count], take,
            LoadPace(began + _PROBE_END_S), lambda: False,
        )  # fmt: skip
        return ProbeEnd(tier, time.monotonic() - began, expected, came=read.blocks > 0)


def _is_slow(arrived: int, blocks: int, seconds: float, compute_s: float) -> bool:
    """Whether blocks come more slowly than computing goes."""
    if not arrived or seconds < _EARLY * compute_s:
        return False
    return seconds * blocks > _SLOWER * compute_s * arrived and compute_s > 0
