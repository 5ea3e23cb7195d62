"""Tiering that watches what the others would do, and does what does best."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from typing import TYPE_CHECKING, Final, NamedTuple
from zlib import crc32

from kvkeep.store.tiers.planner import Touches
from kvkeep.store.tiers.tiering import Exclusive, Inclusive, TieringPolicy

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["AdaptiveTiering"]

_AFTER: Final = (1, 2)
# A sample is watched: at least this share of the blocks, and so many that chance evens out.
_SAMPLED: Final = 0.2
_LEAST: Final = 400
_MOST: Final = 1 << 14
# Hits count half as much when so many times all tiers' worth of blocks have been asked for since.
_HALF_LIFE: Final = 2.0
_TURN: Final = 0.25
# So much better has another to be.
_BETTER: Final = 1.05
# Counts of touches are kept of so many times as many blocks as there is room for.
_REMEMBERED: Final = 8


class AdaptiveTiering(TieringPolicy):
    """`Inclusive` or `Exclusive`, and from which touch on: what would have hit most lately.

    For each candidate it keeps small caches of keys alone, as large against each other as the
    tiers, fed with a sampled share of the blocks that prompts are made of. Which does best depends
    on how much room there is and on what is asked, and both change: where it is tight, a block that
    was asked for once is rarely worth its place below, where there is plenty, it is.

    Where a tier has no end that is known, nothing is moved out of it: it is `Inclusive` then.

    Memory: about 1 KiB a sampled block. Cost: below a microsecond a block of every prompt.
    """

    def __init__(self) -> None:
        self._trials: list[_Trial] = [kind(after) for kind in (_Copies, _Moves) for after in _AFTER]
        self._may_move = True
        self._now = self._trials[len(_AFTER)]
        self.switches = 0
        self._below = 0
        self._turn = 1
        self._left = 0
        # The memory of all of them: whatever is asked for is there, and goes when it is the oldest.
        self._memory: OrderedDict[bytes, None] = OrderedDict()
        self._room = 1
        self._touches = Touches()

    @property
    def chosen(self) -> TieringPolicy:
        """What it does at present."""
        return self._now.policy

    def fit(self, blocks: Sequence[int | None]) -> None:
        """So many blocks have room in each tier."""
        total = max(1, sum(count for count in blocks if count is not None))
        share = min(1.0, max(_LEAST / total, min(_SAMPLED, _MOST / total)))
        sizes = [_MOST if count is None else max(1, round(count * share)) for count in blocks]
        self._below = round(share * (1 << 32))
        self._turn = max(1, round(total * share * _TURN))
        self._touches.limit = _REMEMBERED * sum(sizes)
        self._may_move = None not in blocks
        if not self._may_move and isinstance(self._now, _Moves):
            self._now = self._trials[0]
        self._room = sizes[0]
        while len(self._memory) > self._room:
            self._memory.popitem(last=False)
        for trial in self._trials:
            trial.fit(sizes[1:])

    def requested(self, blocks: Sequence[bytes]) -> None:
        """A prompt came."""
        below = self._below
        steps = [self._step(block) for block in reversed(blocks) if crc32(block) < below]
        if not steps:
            return
        found = sum(not step.missed for step in steps)
        for trial in self._trials:
            trial.hits += found
            trial.follow(steps, self._touches)
        self._left -= len(steps)
        if self._left < 0:
            self._choose()

    def _step(self, block: bytes) -> _Step:
        """``block``, of the sample, is asked for: what comes of it in memory."""
        memory = self._memory
        missed = block not in memory
        memory[block] = None
        evicted = None
        if not missed:
            memory.move_to_end(block)
        elif len(memory) > self._room:
            evicted = memory.popitem(last=False)[0]
        return _Step(block, self._touches.touch(block), missed, evicted)

    def _choose(self) -> None:
        self._left = self._turn
        possible = self._trials if self._may_move else self._trials[: len(_AFTER)]
        best = max(possible, key=lambda trial: trial.hits)
        if best.hits > _BETTER * self._now.hits:
            self._now = best
            self.switches += 1
        fade = 0.5 ** (_TURN / _HALF_LIFE)
        for trial in self._trials:
            trial.hits *= fade

    def admits(self, level: int, touches: int) -> bool:
        """As the chosen one."""
        return self._now.policy.admits(level, touches)

    def promotes(self, level: int, touches: int) -> bool:
        """As the chosen one."""
        return self._now.policy.promotes(level, touches)

    def leaves(self, level: int) -> bool:
        """As the chosen one."""
        return self._now.policy.leaves(level)

    def demotes(self, level: int, touches: int) -> int | None:
        """As the chosen one."""
        return self._now.policy.demotes(level, touches)

    def __repr__(self) -> str:
        return f"AdaptiveTiering(), {self._now.policy} at present"


class _Step(NamedTuple):
    """A block was asked for: how often by now, whether memory had it, and what had to go there."""

    block: bytes
    touches: int
    missed: bool
    evicted: bytes | None


class _Trial(ABC):
    """The tiers below memory under one policy, as keys; each a block of its own."""

    policy: TieringPolicy

    def __init__(self, after: int) -> None:
        self.after = after
        self.hits = 0.0
        self.tiers: list[tuple[OrderedDict[bytes, None], int]] = []

    def fit(self, sizes: Sequence[int]) -> None:
        """The room of each tier, in keys."""
        tiers = [one for one, _ in self.tiers]
        tiers += [OrderedDict() for _ in sizes[len(tiers) :]]
        self.tiers = list(zip(tiers, sizes, strict=True))
        for kept, size in self.tiers:
            while len(kept) > size:
                kept.popitem(last=False)

    @abstractmethod
    def follow(self, steps: Sequence[_Step], touches: Touches) -> None:
        """A prompt came, its end first: count what is found here, and do as the policy says."""


class _Copies(_Trial):
    """`Inclusive`."""

    def __init__(self, after: int) -> None:
        super().__init__(after)
        self.policy = Inclusive(after)

    def follow(self, steps: Sequence[_Step], touches: Touches) -> None:
        """What is asked for is used in every tier, or comes there."""
        after = self.after
        for block, count, missed, _ in steps:
            found = False
            for kept, room in self.tiers:
                if block in kept:
                    found = True
                    kept.move_to_end(block)
                elif count >= after:
                    kept[block] = None
                    if len(kept) > room:
                        kept.popitem(last=False)
            if missed and found:
                self.hits += 1


class _Moves(_Trial):
    """`Exclusive`."""

    def __init__(self, after: int) -> None:
        super().__init__(after)
        self.policy = Exclusive(after)

    def follow(self, steps: Sequence[_Step], touches: Touches) -> None:
        """What memory misses leaves its tier, what memory gives up goes one down."""
        for block, _, missed, evicted in steps:
            if not missed:
                continue
            for kept, _ in self.tiers:
                if block in kept:
                    self.hits += 1
                    del kept[block]
                    break
            if evicted is not None:
                self._demote(evicted, touches)

    def _demote(self, block: bytes, touches: Touches) -> None:
        for kept, room in self.tiers:
            if touches.count(block) < self.after:
                return
            kept[block] = None
            if len(kept) <= room:
                return
            block = kept.popitem(last=False)[0]
