"""Tiering that watches what the others would do, and does what does best."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Final
from zlib import crc32

from kvkeep.tiers.plan import Exclusive, Inclusive, TieringPolicy

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["AdaptiveTiering"]

_AFTER: Final = (1, 2)
# A sample is watched: at least this share of the blocks, and so many that chance evens out.
_SAMPLED: Final = 0.1
_LEAST: Final = 400
_MOST: Final = 1 << 14
# Hits count half as much when so many times all tiers' worth of blocks have been asked for since.
_HALF_LIFE: Final = 8.0
_TURN: Final = 0.25
# So much better has another to be.
_BETTER: Final = 1.02
# Counts of touches are kept of so many times as many blocks as there is room for.
_REMEMBERED: Final = 8


class AdaptiveTiering(TieringPolicy):
    """`Inclusive` or `Exclusive`, and from which touch on: what would have hit most lately.

    For each candidate it keeps small caches of keys alone, as large against each other as the
    tiers, fed with a sampled share of the blocks that prompts are made of. Which does best depends
    on how much room there is and on what is asked, and both change: where it is tight, a block that
    was asked for once is rarely worth its place below, where there is plenty, it is.

    Memory: about 1 KiB a sampled block. Cost: below a microsecond a block of every prompt.
    """

    def __init__(self) -> None:
        self._trials = [
            _Trial(kind(after), exclusive=kind is Exclusive, after=after)
            for kind in (Inclusive, Exclusive)
            for after in _AFTER
        ]
        self._now = self._trials[len(_AFTER)]
        self.switches = 0
        self._below = 0
        self._turn = 1
        self._left = 0
        self._counts: OrderedDict[bytes, int] = OrderedDict()
        self._remembered = 1

    @property
    def chosen(self) -> TieringPolicy:
        """What it does at present."""
        return self._now.policy

    def fit(self, blocks: Sequence[int | None]) -> None:
        """So many blocks have room in each tier."""
        known = [count for count in blocks if count is not None]
        total = max(1, sum(known))
        share = min(1.0, max(_LEAST / total, min(_SAMPLED, _MOST / total)))
        sizes = [_MOST if count is None else max(1, round(count * share)) for count in blocks]
        self._below = round(share * (1 << 32))
        self._turn = max(1, round(total * share * _TURN))
        self._remembered = _REMEMBERED * sum(sizes)
        for trial in self._trials:
            trial.fit(sizes)

    def asked(self, blocks: Sequence[bytes]) -> None:
        """A prompt came."""
        below = self._below
        sampled = [block for block in reversed(blocks) if crc32(block) < below]
        if not sampled:
            return
        counts = self._counts
        touched = []
        for block in sampled:
            count = counts.pop(block, 0) + 1
            counts[block] = count
            touched.append((block, count))
        while len(counts) > self._remembered:
            counts.popitem(last=False)
        for trial in self._trials:
            trial.asked(touched, counts)
        self._left -= len(sampled)
        if self._left < 0:
            self._choose()

    def _choose(self) -> None:
        self._left = self._turn
        best = max(self._trials, key=lambda trial: trial.hits)
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


class _Trial:
    """Tiers of keys under one policy, each key a block of its own."""

    def __init__(self, policy: TieringPolicy, *, exclusive: bool, after: int) -> None:
        self.policy = policy
        self.hits = 0.0
        self._exclusive = exclusive
        self._after = after
        self._tiers: list[tuple[OrderedDict[bytes, None], int]] = []

    def fit(self, sizes: Sequence[int]) -> None:
        """The room of each tier, in keys."""
        tiers = [one for one, _ in self._tiers]
        tiers += [OrderedDict() for _ in sizes[len(tiers) :]]
        self._tiers = list(zip(tiers, sizes, strict=True))
        for kept, size in self._tiers:
            while len(kept) > size:
                kept.popitem(last=False)

    def asked(self, keys: Sequence[tuple[bytes, int]], counts: OrderedDict[bytes, int]) -> None:
        """A prompt came, its end first; each key with how often it was touched."""
        front, room = self._tiers[0]
        below = self._tiers[1:]
        for key, touches in keys:
            if key in front:
                self.hits += 1
                front.move_to_end(key)
                if not self._exclusive:
                    self._admit(key, touches, below)
            elif self._exclusive:
                for kept, _ in below:
                    if key in kept:
                        self.hits += 1
                        del kept[key]
                        break
                front[key] = None
                if len(front) > room:
                    self._demote(front.popitem(last=False)[0], counts)
            else:
                self.hits += any(key in kept for kept, _ in below)
                front[key] = None
                if len(front) > room:
                    front.popitem(last=False)
                self._admit(key, touches, below)

    def _admit(
        self, key: bytes, touches: int, below: Sequence[tuple[OrderedDict[bytes, None], int]]
    ) -> None:
        for kept, room in below:
            if key in kept:
                kept.move_to_end(key)
            elif touches >= self._after:
                kept[key] = None
                if len(kept) > room:
                    kept.popitem(last=False)

    def _demote(self, key: bytes, counts: OrderedDict[bytes, int]) -> None:
        for kept, room in self._tiers[1:]:
            if counts.get(key, 0) < self._after:
                return
            kept[key] = None
            if len(kept) <= room:
                return
            key = kept.popitem(last=False)[0]
