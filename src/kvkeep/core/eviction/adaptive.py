"""Adaptive: follow whichever of several policies would hit most."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Final, Protocol

from kvkeep.core.eviction.base import Entry
from kvkeep.core.eviction.reuse import Reuse
from kvkeep.core.eviction.twoq import TwoQ

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Adaptive"]

# Shares of probation to try; None is LRU.
_SHARES: Final = (0.01, 0.1, 0.3, 0.5, 0.7, None)
# Least size of the sample, as a share of the blocks and in blocks, to keep its error small.
_SAMPLED: Final = 0.1
_LEAST: Final = 400
# Half-life of the hits, in requested blocks over blocks in memory.
_HALF_LIFE: Final = 16.0


class Adaptive(Reuse):
    """Acts as LRU, as 2Q with some probation, or as `Reuse`: whichever would hit most now.

    Each candidate is simulated in a small cache of keys alone, fed with a sampled share of the
    blocks of all prompts. Which candidate is best depends on memory and traffic, and both change:
    where memory is scarce, blocks requested once are rarely worth their place; where it is ample,
    they are.

    It starts with `Reuse`, which is rarely far from the best. Entries wait in the queues of all
    candidates, so a switch costs nothing. Memory: about 300 bytes for each block of four memories,
    and 2.5 KiB a sampled one. Cost: about 2 µs a block of every prompt.
    """

    name = "adaptive"
    advised = True
    portions = True

    def __init__(self, remembered: float = 4.0) -> None:
        super().__init__(remembered=remembered)
        self._lists = TwoQ(remembered=0)  # the candidates that are 2Q or LRU
        self._lists.probation = None
        self._by_lists = False
        self._trials: list[_Trial] = []
        self._tried_below = 0
        self._tried_left = self._tried_round = 1

    @property
    def chosen(self) -> str:
        """The candidate that is followed now."""
        if not self._by_lists:
            return "reuse"
        probation = self._lists.probation
        return "lru" if probation is None else f"2q with {probation:.0%} on probation"

    def fit(self, size: int, block: int) -> None:
        super().fit(size, block)
        self._lists.fit(size, block)
        blocks = max(1, size // block)
        share = min(1.0, max(_SAMPLED, _LEAST / blocks))
        self._tried_below = max(1, round(share * 65_536))
        sampled = max(1, round(blocks * share))
        self._trials = [_Lists(share, sampled) for share in _SHARES]
        self._trials.append(_Learned(sampled, self))
        self._tried_left = self._tried_round = sampled

    def requested(self, keys: Sequence[bytes]) -> int:
        history, below = self._history, self._tried_below
        sampled = [
            (key, key in history) for key in reversed(keys) if int.from_bytes(key[:2]) < below
        ]
        if sampled:
            for trial in self._trials:
                trial.requested(sampled)
            self._tried_left -= len(sampled)
            if self._tried_left < 0:
                self._tried_left = self._tried_round
                self._choose()
        return super().requested(keys)

    def _choose(self) -> None:
        now = next(trial for trial in self._trials if self._follows(trial))
        best = max(self._trials, key=lambda trial: trial.hits)
        if best.hits > now.hits:  # a switch is free, so any gain is enough
            self._by_lists = isinstance(best, _Lists)
            if isinstance(best, _Lists):
                self._lists.probation = best.probation
        fade = 0.5 ** (1 / _HALF_LIFE)
        for trial in self._trials:
            trial.hits *= fade

    def _follows(self, trial: _Trial) -> bool:
        if isinstance(trial, _Lists):
            return self._by_lists and trial.probation == self._lists.probation
        return not self._by_lists

    # --- queues: an entry is in those of all candidates --------------------------------------

    def add(self, entry: Entry) -> None:
        super().add(entry)
        self._lists.add(entry)

    def discard(self, entry: Entry) -> None:
        super().discard(entry)
        self._lists.discard(entry)

    def pop(self) -> Entry | None:
        """Remove the victim of the followed candidate."""
        if self._by_lists:
            entry = self._lists.pop()
            if entry is not None:
                super().discard(entry)
        else:
            entry = super().pop()
            if entry is not None:
                self._lists.discard(entry)
        return entry

    def portion(self, entry: Entry) -> int:
        return self._lists.portion(entry) if self._by_lists else entry.size

    def put_back(self, entry: Entry) -> None:
        super().put_back(entry)
        self._lists.put_back(entry)


class _Trial(Protocol):
    """A simulated cache of block keys under one candidate."""

    hits: float

    def requested(self, keys: Sequence[tuple[bytes, bool]]) -> None:
        """Request blocks of a prompt, last to first, each with whether it was requested before."""


class _Lists:
    """2Q; LRU where ``probation`` is None."""

    def __init__(self, probation: float | None, size: int) -> None:
        self.probation = probation
        self.hits = 0.0
        self._size = size
        self._most = size if probation is None else int(probation * size)
        self._once: OrderedDict[bytes, None] = OrderedDict()
        self._again: OrderedDict[bytes, None] = OrderedDict()

    def requested(self, keys: Sequence[tuple[bytes, bool]]) -> None:
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


class _Key(Entry):
    __slots__ = ("key",)

    def __init__(self, key: bytes) -> None:
        super().__init__()
        self.key = key
        self.size = 1


class _Learned:
    """`Reuse`, with the ranks that ``learner`` has learned."""

    def __init__(self, size: int, learner: Reuse) -> None:
        self.hits = 0.0
        self._size = size
        self._learner = learner
        self._policy = Reuse(remembered=0)
        self._kept: dict[bytes, _Key] = {}

    def requested(self, keys: Sequence[tuple[bytes, bool]]) -> None:
        policy, kept = self._policy, self._kept
        policy.follow(self._learner)
        now = policy.moment
        for key, known in keys:
            entry = kept.get(key)
            if entry is not None:
                self.hits += 1
                policy.discard(entry)
                entry.hits += 1
            else:
                entry = kept[key] = _Key(key)
                entry.hits = int(known)
            entry.last_used = now
            policy.add(entry)
            if len(kept) > self._size:
                victim = policy.pop()
                assert isinstance(victim, _Key)
                del kept[victim.key]
