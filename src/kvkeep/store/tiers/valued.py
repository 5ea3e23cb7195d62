"""`ValuedTiering`: writes a block when it leaves memory, if its chance of reuse is worth it."""

from __future__ import annotations

import time
from collections import OrderedDict
from typing import TYPE_CHECKING, Final
from zlib import crc32

from kvkeep.store.tiers.tiering import TieringPolicy

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["BlockValues", "ValuedTiering"]

_LOST: Final = 0.035
"""Share of the hits of writing everything that fewer writes may cost …"""
_LOST_OF_BEST: Final = 0.1
"""… and of the hits of the price that hits most."""
_PRICES: Final = (0.0, 0.1, 0.3, 0.6, 0.9, 1.2, 1.5, 1.9, 2.5, 4.0, 8.0, 20.0)
_SHARPNESS: Final = 3  # how much more than in proportion to its value a block is written
_WEIGHT: Final = 8.0  # decisions after which a kind counts as much as the mean
# Share of the blocks to sample: a fifth, at least 400 blocks, at most 16,384 (as adaptive does).
_SAMPLED: Final = 0.2
_LEAST: Final = 400
_MOST: Final = 1 << 14
_HALF_LIFE: Final = 4.0  # of hits and writes, in requested blocks over those that all tiers hold
_EVIDENCE: Final = 32  # hits of everything below memory, before which all is written
_TURN: Final = 0.25  # requested blocks between two choices, in the same unit
_STEADY: Final = 0.95  # another price is chosen if it writes less than this share
_REMEMBERED: Final = 8  # blocks that are known, over those that all tiers hold …
_MOST_KNOWN: Final = 1 << 17  # … at most
_VERDICTS: Final = 4096  # decisions that are kept for the other blocks of their prompts
_OPEN: Final = 4  # decisions on one block that later hits count for

Kind = tuple[int, bool, int, int]
"""Of a block that leaves memory: how often it came back after it had left, whether it was the last
of its prompt, and its requests and the seconds since the last one, in powers of two."""


class _Seen:
    """What is known of a block; ``open`` are the kinds that it had when it left before."""

    __slots__ = ("backs", "draw", "last", "open", "out", "since", "touches")

    def __init__(self) -> None:
        self.touches = self.backs = 0
        self.draw = self.since = 0.0
        self.last = self.out = False
        self.open: tuple[Kind, ...] = ()

    def kind(self, now: float) -> Kind:
        age = int(max(0.0, now - self.since))
        return min(self.backs, 3), self.last, min(self.touches.bit_length(), 3), age.bit_length()


class BlockValues:
    """How often blocks of each kind are requested after they left memory.

    Thread safety: none. Memory: 1,000 kinds at most, by what they are.
    """

    def __init__(self) -> None:
        self._left: dict[Kind, float] = {}
        self._hits: dict[Kind, float] = {}
        self._all_left = self._all_hits = 0.0

    def left(self, kind: Kind) -> None:
        """Record that a block of ``kind`` left memory."""
        self._left[kind] = self._left.get(kind, 0.0) + 1
        self._all_left += 1

    def came_back(self, kinds: Sequence[Kind]) -> None:
        """Record that a block was requested that had left memory as each of ``kinds``."""
        for kind in kinds:
            self._hits[kind] = self._hits.get(kind, 0.0) + 1
        self._all_hits += len(kinds)

    def hits(self, kind: Kind) -> float:
        """Return the expected number of requests for a block of ``kind`` that memory misses."""
        mean = (self._all_hits + 1) / (self._all_left + 1)
        return (self._hits.get(kind, 0.0) + _WEIGHT * mean) / (self._left.get(kind, 0.0) + _WEIGHT)

    def worth(self, kind: Kind) -> float:
        """Return the value of a block of ``kind`` over that of the average block that leaves."""
        return self.hits(kind) * (self._all_left + 1) / (self._all_hits + 1)

    def fade(self) -> None:
        """Let what was counted so far count half."""
        for counts in (self._left, self._hits):
            for kind in counts:
                counts[kind] /= 2
        self._all_left /= 2
        self._all_hits /= 2


class _Trial:
    """A simulated tier below memory at one price: LRU, keys alone."""

    def __init__(self, price: float) -> None:
        self.price = price
        self.hits = self.writes = 0.0
        self.kept: OrderedDict[bytes, None] = OrderedDict()
        self.room = 1

    def fit(self, room: int) -> None:
        self.room = room
        while len(self.kept) > room:
            self.kept.popitem(last=False)

    def use(self, block: bytes, *, missed: bool) -> None:
        if block in self.kept:
            self.kept.move_to_end(block)
            self.hits += missed

    def leaves_memory(self, block: bytes, worth: float, draw: float) -> None:
        if block in self.kept or worth < self.price * draw:
            return
        self.kept[block] = None
        self.writes += 1
        if len(self.kept) > self.room:
            self.kept.popitem(last=False)


class _Everything(_Trial):
    """A simulated tier that writes every block when it is stored, as `Inclusive`."""

    def use(self, block: bytes, *, missed: bool) -> None:
        super().use(block, missed=missed)
        self.kept[block] = None
        if len(self.kept) > self.room:
            self.kept.popitem(last=False)


class ValuedTiering(TieringPolicy):
    """Writes what pays: a block goes down when it leaves memory, if it is likely to be read again.

    Until then memory serves it, and how it is used tells what it is worth. A block that was read
    into memory keeps its copy below, so it is written once. `flush` and `close` write what memory
    holds and is worth it; a crash loses that.

    The value of a block is how often blocks of its kind are requested after they left memory:
    whether they came back before, how often they were requested, how long ago, and whether they
    were the last of a prompt. It is learned from a sample of the blocks, of refused ones as well. A
    block is written if its value over the average, to the third power, reaches the price times a
    number between 0 and 1 that is drawn for each prompt, so that of average blocks whole prompts
    are written or none of them.

    Prices are tried in small simulated tiers, as `AdaptiveTiering` tries policies. The one in use
    is that with the fewest writes among those that lose at most 3.5 % of the hits that writing
    everything has, and 10 % of those that the best price has.
    Until blocks were read again from below, all are written. While a tier's write budget runs
    short, its price is higher: see `attend`.

    Memory: about 360 bytes for each of 131,072 blocks at most, and 1 KiB a sampled block. Cost:
    three microseconds a block of every prompt, and one to two for a decision.

    Blocks of one tier take the same bytes, and stand for as many tokens: what a hit saves is the
    same for all, so it decides only whether the tier is worth writing to at all.

    Arguments:
        clock: returns seconds.
        saved: returns the seconds that reading a block from a level saves over computing it;
            nothing is written to a level where it is 0 or less. Must not block.

    Attributes:
        price: of a write, as a value over the average to the third power.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        saved: Callable[[int], float] = lambda _level: 1.0,
    ) -> None:
        self.clock = clock
        self.saved = saved
        self.price = 0.0
        self._price_of: Callable[[int], float] = lambda _level: 0.0
        self.values = BlockValues()
        self._seen: OrderedDict[bytes, _Seen] = OrderedDict()
        self._limit = _MOST_KNOWN
        self._trials = [_Trial(price) for price in _PRICES]
        self._everything = _Everything(0.0)
        self._memory: OrderedDict[bytes, None] = OrderedDict()
        self._memory_hits = 0.0
        self._room = 1
        self._below = 0
        self._turn = self._left = 1
        self._requests = 0
        self._verdicts: OrderedDict[tuple[float, Kind, int], bool] = OrderedDict()

    def fit(self, blocks: Sequence[int | None]) -> None:
        """Resize the simulated tiers; see `TieringPolicy.fit`."""
        total = max(1, sum(count for count in blocks if count is not None))
        share = min(1.0, max(_LEAST / total, min(_SAMPLED, _MOST / total)))
        sizes = [_MOST if count is None else max(1, round(count * share)) for count in blocks]
        self._below = round(share * (1 << 32))
        self._turn = max(1, round(total * share * _TURN))
        self._limit = _MOST_KNOWN if None in blocks else min(_MOST_KNOWN, _REMEMBERED * total)
        self._room = sizes[0]
        while len(self._memory) > self._room:
            self._memory.popitem(last=False)
        for trial in (self._everything, *self._trials):
            trial.fit(max(1, sum(sizes[1:])))

    def requested(self, blocks: Sequence[bytes]) -> None:
        """Note the use of a prompt's blocks; feed the sampled ones to the trials."""
        if not blocks:
            return
        known, now = self._seen, self.clock()
        last, below = blocks[-1], self._below
        self._requests = (self._requests + 1) & 0xFFFFFFFF
        draw = crc32(last, self._requests) / (1 << 32)
        sampled: list[tuple[bytes, _Seen]] = []
        for block in blocks:
            seen = known.pop(block, None)
            if seen is None:
                seen = _Seen()
            known[block] = seen
            seen.touches += 1
            seen.backs += seen.out
            seen.out = False
            seen.last = block is last and seen.touches == 1
            seen.draw, seen.since = draw, now
            if crc32(block) < below:
                sampled.append((block, seen))
        while len(known) > self._limit:
            known.popitem(last=False)
        for block, seen in reversed(sampled):
            self._step(block, seen, now)
        self._left -= len(sampled)
        if self._left < 0:
            self._choose()

    def _step(self, block: bytes, seen: _Seen, now: float) -> None:
        memory = self._memory
        missed = block not in memory
        memory[block] = None
        self._everything.use(block, missed=missed)
        for trial in self._trials:
            trial.use(block, missed=missed)
        if not missed:
            memory.move_to_end(block)
            self._memory_hits += 1
            return
        self.values.came_back(seen.open)
        if len(memory) <= self._room:
            return
        victim = memory.popitem(last=False)[0]
        gone = self._seen.get(victim)
        if gone is None:
            return
        kind = gone.kind(now)
        self.values.left(kind)
        gone.open = (*gone.open[1 - _OPEN :], kind)
        worth = self.values.worth(kind) ** _SHARPNESS
        for trial in self._trials:
            trial.leaves_memory(victim, worth, gone.draw)

    def _choose(self) -> None:
        self._left = self._turn
        if self._everything.hits < _EVIDENCE:
            self.price = 0.0
            return
        here, trials = self._memory_hits, self._trials
        best = max(trial.hits for trial in trials)
        needed = max(
            (1 - _LOST_OF_BEST) * (best + here),
            min(best + here, (1 - _LOST) * (self._everything.hits + here)),
        )
        enough = [trial for trial in trials if trial.hits + here >= needed]
        least = min(enough, key=lambda trial: trial.writes)
        now = next((trial for trial in trials if trial.price == self.price), least)
        if now not in enough or least.writes < _STEADY * now.writes:
            self.price = least.price
        fade = 0.5 ** (_TURN / _HALF_LIFE)
        self._memory_hits *= fade
        for trial in (self._everything, *self._trials):
            trial.hits *= fade
            trial.writes *= fade

    # --- decisions -------------------------------------------------------------------------------

    def admits(self, level: int, touches: int) -> bool:
        """Return False: nothing is written before it leaves memory."""
        del level, touches
        return False

    def promotes(self, level: int, touches: int) -> bool:
        """Return True: memory keeps what it reads."""
        del level, touches
        return True

    def leaves(self, level: int) -> bool:
        """Return False: what memory has read stays below."""
        del level
        return False

    def demotes(self, level: int, touches: int) -> int | None:
        """Return the next level; `evicts` decides of a block."""
        del touches
        return level + 1

    def evicts(self, block: bytes, level: int, touches: int) -> int | None:
        """Return the next level if ``block`` is worth its write there."""
        del touches
        return level + 1 if self.pays(block, level + 1) else None

    def attend(self, price_of: Callable[[int], float]) -> None:
        """Pay no less than ``price_of`` returns for a level."""
        self._price_of = price_of

    def refusal(self, level: int) -> str:
        """Return "write budget" if the price is that of the level's write budget."""
        return "write budget" if self._price_of(level) > self.price else "admission"

    def left(self, block: bytes) -> None:
        """Note that ``block`` left memory: its next request is a return."""
        seen = self._seen.get(block)
        if seen is not None:
            seen.out = True

    def pays(self, block: bytes, level: int) -> bool:
        """Whether writing ``block`` to ``level`` is worth its price; True if nothing is known."""
        if self.saved(level) <= 0:
            return False
        seen = self._seen.get(block)
        price = max(self.price, self._price_of(level))
        if seen is None or not price:
            return True
        kind = seen.kind(self.clock())
        # What the age says is asked once for all blocks of a prompt: one hole hides all behind it.
        key = seen.draw, (*kind[:3], 0), level
        verdict = self._verdicts.get(key)
        if verdict is None:
            verdict = self.values.worth(kind) ** _SHARPNESS >= price * seen.draw
            self._verdicts[key] = verdict
            if len(self._verdicts) > _VERDICTS:
                self._verdicts.popitem(last=False)
        return verdict

    def __repr__(self) -> str:
        return f"ValuedTiering(), price {self.price:g} at present"
