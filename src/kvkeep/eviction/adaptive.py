"""A policy that watches what others would do, and does what does best."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Final

from kvkeep.eviction.twoq import TwoQ

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Adaptive"]

# Shares of memory for what was asked for once; None: no difference is made, which is LRU.
_SHARES: Final = (0.01, 0.1, 0.3, 0.5, 0.7, None)
# A sample is watched: at least this share of the blocks, and so many that chance evens out.
_SAMPLED: Final = 0.1
_LEAST: Final = 400
# Hits count half as much when so many memories' worth of blocks have been asked for since.
_HALF_LIFE: Final = 8.0
# So much better has another share to be.
_BETTER: Final = 1.01


class Adaptive(TwoQ):
    """2Q whose probation is as large as does best, from next to nothing to plain LRU.

    For each candidate it keeps a small cache of keys alone, fed with a sampled share of the blocks
    that prompts are made of, and follows the one that hits most. Which is best depends on how much
    memory there is and on what is asked, and both change: where memory is scarce, what was asked
    for once is rarely worth its place; where there is plenty, it is.

    Memory: about 1.5 KiB a sampled block. Cost: about 0.5 µs a block of every prompt.
    """

    name = "adaptive"

    def __init__(self, remembered: float = 4.0) -> None:
        super().__init__(remembered=remembered)
        self.probation = None
        self._trials: list[_Trial] = []
        self._below = 0
        self._left = 0
        self._turn = 1

    def fit(self, size: int, block: int) -> None:
        """It serves a memory of ``size``, in blocks of ``block``."""
        super().fit(size, block)
        blocks = max(1, size // block)
        share = min(1.0, max(_SAMPLED, _LEAST / blocks))
        self._below = max(1, round(share * 65_536))
        sampled = max(1, round(blocks * share))
        self._trials = [_Trial(share, sampled) for share in _SHARES]
        self._left = self._turn = sampled

    def asked(self, keys: Sequence[bytes]) -> int:
        """A prompt came; how many of its leading blocks were asked for lately."""
        history, below = self._history, self._below
        sampled = [
            (key, key in history) for key in reversed(keys) if int.from_bytes(key[:2]) < below
        ]
        if sampled:
            for trial in self._trials:
                trial.asked(sampled)
            self._left -= len(sampled)
            if self._left < 0:
                self._choose()
        return super().asked(keys)

    def _choose(self) -> None:
        self._left = self._turn
        now = next(trial for trial in self._trials if trial.probation == self.probation)
        best = max(self._trials, key=lambda trial: trial.hits)
        if best.hits > _BETTER * now.hits:
            self.probation = best.probation
        fade = 0.5 ** (1 / _HALF_LIFE)
        for trial in self._trials:
            trial.hits *= fade


class _Trial:
    """A cache of keys under 2Q, each a block of its own."""

    def __init__(self, probation: float | None, size: int) -> None:
        self.probation = probation
        self.hits = 0.0
        self._size = size
        self._most = size if probation is None else int(probation * size)
        self._once: OrderedDict[bytes, None] = OrderedDict()
        self._again: OrderedDict[bytes, None] = OrderedDict()

    def asked(self, keys: Sequence[tuple[bytes, bool]]) -> None:
        once, again, plain = self._once, self._again, self.probation is None
        for key, known in keys:
            if key in again:
                self.hits += 1
                again.move_to_end(key)
                continue
            if key in once:
                self.hits += 1
                del once[key]
                again[key] = None
                continue
            (again if known or plain else once)[key] = None
            if len(once) + len(again) > self._size:
                queue = once if len(once) > self._most or not again else again
                queue.popitem(last=False)
