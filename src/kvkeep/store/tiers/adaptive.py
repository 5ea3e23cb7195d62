"""`AdaptiveTiering`: simulates the other tiering policies and follows the one with most hits."""

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
# Share of the blocks to sample: a fifth, at least 400 blocks (fewer are too noisy), at most 16,384.
_SAMPLED: Final = 0.2
_LEAST: Final = 400
_MOST: Final = 1 << 14
# Half-life of the hits, in requested blocks over the blocks that all tiers hold together.
_HALF_LIFE: Final = 2.0
_TURN: Final = 0.25  # requested blocks between two choices, in the same unit
_BETTER: Final = 1.05  # a switch needs this many times the hits of the current policy
_REMEMBERED: Final = 8  # touches are counted of this many times the blocks that all tiers hold


class AdaptiveTiering(TieringPolicy):
    """Acts as `Inclusive` or `Exclusive`, with ``admit_after`` 1 or 2: whichever hits most now.

    Each candidate is simulated in small caches of keys alone, with the relative sizes of the tiers,
    fed with a sampled share of the blocks of all prompts. Which candidate hits most depends on
    capacity and traffic, and both change: where capacity is scarce, a block requested once is
    rarely worth its place in a lower tier; where it is ample, it is.

    If the capacity of a level is unknown, only the `Inclusive` candidates are considered.

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
        # All candidates share one simulated memory: an LRU that takes every requested block.
        self._memory: OrderedDict[bytes, None] = OrderedDict()
        self._room = 1
        self._touches = Touches()

    @property
    def chosen(self) -> TieringPolicy:
        """The candidate that is followed now."""
        return self._now.policy

    def fit(self, blocks: Sequence[int | None]) -> None:
        """Resize the simulated caches; see `TieringPolicy.fit`."""
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
        """Feed the sampled blocks of a prompt to all candidates; choose anew now and then."""
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
        """Request a sampled ``block`` from the simulated memory."""
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
        """Return what the chosen policy decides."""
        return self._now.policy.admits(level, touches)

    def promotes(self, level: int, touches: int) -> bool:
        """Return what the chosen policy decides."""
        return self._now.policy.promotes(level, touches)

    def leaves(self, level: int) -> bool:
        """Return what the chosen policy decides."""
        return self._now.policy.leaves(level)

    def demotes(self, level: int, touches: int) -> int | None:
        """Return what the chosen policy decides."""
        return self._now.policy.demotes(level, touches)

    def __repr__(self) -> str:
        return f"AdaptiveTiering(), {self._now.policy} at present"


class _Step(NamedTuple):
    """One request of a block: its touches so far, whether memory missed, and the block evicted."""

    block: bytes
    touches: int
    missed: bool
    evicted: bytes | None


class _Trial(ABC):
    """A simulation of the tiers below memory under one policy: LRU caches of block keys."""

    policy: TieringPolicy

    def __init__(self, after: int) -> None:
        self.after = after
        self.hits = 0.0
        self.tiers: list[tuple[OrderedDict[bytes, None], int]] = []

    def fit(self, sizes: Sequence[int]) -> None:
        """Set the capacity of each tier, in keys."""
        tiers = [one for one, _ in self.tiers]
        tiers += [OrderedDict() for _ in sizes[len(tiers) :]]
        self.tiers = list(zip(tiers, sizes, strict=True))
        for kept, size in self.tiers:
            while len(kept) > size:
                kept.popitem(last=False)

    @abstractmethod
    def follow(self, steps: Sequence[_Step], touches: Touches) -> None:
        """Request the blocks of a prompt, last to first: count hits and move keys by the policy."""


class _Copies(_Trial):
    """A simulation of `Inclusive`."""

    def __init__(self, after: int) -> None:
        super().__init__(after)
        self.policy = Inclusive(after)

    def follow(self, steps: Sequence[_Step], touches: Touches) -> None:
        """Mark each block as used in every tier, and add it where missing, from ``after`` on."""
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
    """A simulation of `Exclusive`."""

    def __init__(self, after: int) -> None:
        super().__init__(after)
        self.policy = Exclusive(after)

    def follow(self, steps: Sequence[_Step], touches: Touches) -> None:
        """Remove each block that memory missed from its tier; demote those that memory evicted."""
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
