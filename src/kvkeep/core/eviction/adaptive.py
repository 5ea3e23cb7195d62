"""Adaptive: follow whichever of several policies would hit most."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

from kvkeep.core.eviction.depths import CLASSES, Depths, chances_by_class, class_of
from kvkeep.core.eviction.reuse import BUCKETS, HITS, Hazards, Reuse, bucket_of
from kvkeep.core.eviction.trials import Asked, KeyLists, KeyTrial
from kvkeep.core.eviction.twoq import TwoQ

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvkeep.core.eviction.base import Entry, EvictionPolicy
    from kvkeep.core.eviction.trials import Trial

__all__ = ["Adaptive", "Candidate"]

# Shares of probation to try.
_SHARES: Final = (0.01, 0.1, 0.4)
# Least size of the sample, as a share of the blocks and in blocks, to keep its error small.
_SAMPLED: Final = 0.1
_LEAST: Final = 1000
# Half-life of the hits, in requested blocks over blocks in memory.
_HALF_LIFE: Final = 16.0


class Candidate:
    """One of the policies that `Adaptive` may follow: its queues of entries, and its trial.

    ``policy`` has all entries in its queues, followed or not, and orders them when it is followed;
    candidates may share one, which ``follow`` then prepares. It leaves records of entries alone and
    does not use `Entry.state`. ``hits`` are those of the trial; older ones fade.
    """

    def __init__(
        self,
        name: str,
        policy: EvictionPolicy,
        trial: Trial,
        follow: Callable[[], None] | None = None,
    ) -> None:
        self.name = name
        self.policy = policy
        self.trial = trial
        self.follow = follow
        self.hits = 0.0


class Adaptive(Reuse):
    """new"""

    name = "adaptive"
    advised = True
    portions = True

    START = 0
    MARGIN = 0.0

    def __init__(self, remembered: float = 4.0) -> None:
        super().__init__(remembered=remembered)
        self._hazards = Hazards(CLASSES)
        self._came = self._groups = 1.0
        self._lists = TwoQ(remembered=0)
        self._depths = Depths()
        self.candidates: list[Candidate] = []
        self._reuse = _Queues(self)
        self._followed: EvictionPolicy = self._reuse
        self._chosen = 0
        self._others: list[EvictionPolicy] = []
        self._policies = [self._reuse, self._lists, self._depths]
        self._share = 1.0
        self._fading = 1.0
        self.fit(1, 1)

    @property
    def chosen(self) -> str:
        """The candidate that is followed now."""
        return self.candidates[self._chosen].name

    def fit(self, size: int, block: int) -> None:
        super().fit(size, block)
        self._lists.fit(size, block)
        self._depths.fit(size, block)
        blocks = max(1, size // block)
        share = min(1.0, max(_SAMPLED, _LEAST / blocks))
        self.watch(share, blocks)
        self._below = max(1, round(share * 256))
        sampled = max(1, round(blocks * share))
        self._fading = 0.5 ** (1 / (_HALF_LIFE * sampled))
        reuse, depths = Reuse(remembered=0), Depths()
        self._learned = reuse, depths
        self.candidates = [
            Candidate("depths", self._depths, KeyTrial(depths, sampled)),
            Candidate("reuse", self._reuse, KeyTrial(reuse, sampled)),
            self._list(None, sampled),
            *(self._list(share, sampled) for share in _SHARES),
        ]
        self._choose(self.START)

    def _list(self, probation: float | None, size: int) -> Candidate:
        def follow() -> None:
            self._lists.probation = probation

        name = "lru" if probation is None else f"2q with {probation:.0%} on probation"
        return Candidate(name, self._lists, KeyLists(probation, size), follow)

    def requested(self, keys: Sequence[bytes]) -> int:
        below, history = self._below, self._history
        sampled = [
            Asked(key, key in history, at) for at, key in enumerate(keys) if key[0] < below
        ]
        if sampled:
            self._watch(sampled)
            sampled.reverse()
            reuse, depths = self._learned
            reuse.follow(self)
            depths.at(self._time)
            fade = self._fading ** len(sampled)
            best, most, now = 0, -1.0, self._chosen
            for at, candidate in enumerate(self.candidates):
                hits = candidate.hits = fade * candidate.hits + candidate.trial.requested(sampled)
                if hits > most or (hits == most and at == now):
                    best, most = at, hits
            if best != now and most > self.candidates[now].hits + self.MARGIN * math.sqrt(most):
                self._choose(best)
        return history.requested(keys)

    def _choose(self, at: int) -> None:
        self._chosen = at
        candidate = self.candidates[at]
        if candidate.follow is not None:
            candidate.follow()
        self._followed = candidate.policy
        self._others = [policy for policy in self._policies if policy is not candidate.policy]

    def _watch(self, sampled: list[Asked]) -> None:
        watched, now, hazards = self._watched, self._time, self._hazards
        groups = set()
        each = CLASSES // HITS
        for key, _, before in sampled:
            last, row = watched.pop(key, (now, -1))
            hits = 0
            if row >= 0:
                hazards.ended(now - last, row, reused=True)
                groups.add(row * BUCKETS + bucket_of(now - last))
                self._came += 1
                hits = row // each + 1
            watched[key] = now, class_of(hits, before)
            if len(watched) > self._most:
                last, row = watched.popitem(last=False)[1]
                hazards.ended(now - last, row, reused=False)
        self._groups += len(groups)
        self._left -= len(sampled)
        if self._left < 0:
            self._left = self._round
            self._learn()

    def _learn(self) -> None:
        super()._learn()
        self._came *= self._fade
        self._groups *= self._fade

    def _ranked(self, horizon: float, seen: Hazards | None = None) -> list[tuple[int, int]]:
        if seen is None:
            return super()._ranked(horizon)
        table = chances_by_class(seen, horizon, self._came / self._groups)
        self._depths.chances = self._learned[1].chances = table
        return super()._ranked(horizon, seen.merged(HITS))

    # --- queues: an entry is in those of all candidates --------------------------------------

    def add(self, entry: Entry) -> None:
        for policy in self._policies:
            policy.add(entry)

    def discard(self, entry: Entry) -> None:
        for policy in self._policies:
            policy.discard(entry)

    def pop(self) -> Entry | None:
        """Remove the victim of the followed candidate."""
        self._depths.at(self._time)
        entry = self._followed.pop()
        if entry is not None:
            for policy in self._others:
                policy.discard(entry)
        return entry

    def portion(self, entry: Entry) -> int:
        policy = self._followed
        return policy.portion(entry) if policy.portions else entry.size

    def put_back(self, entry: Entry) -> None:
        for policy in self._policies:
            policy.put_back(entry)


class _Queues:
    """The queues of `Reuse` that an `Adaptive` inherits."""

    portions = False

    def __init__(self, owner: Reuse) -> None:
        self.owner = owner

    def add(self, entry: Entry) -> None:
        Reuse.add(self.owner, entry)

    def discard(self, entry: Entry) -> None:
        Reuse.discard(self.owner, entry)

    def pop(self) -> Entry | None:
        return Reuse.pop(self.owner)

    def put_back(self, entry: Entry) -> None:
        Reuse.put_back(self.owner, entry)
