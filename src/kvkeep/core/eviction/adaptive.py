"""Adaptive: follow whichever of several policies would hit most."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kvkeep.core.eviction.base import Entry, EvictionPolicy
from kvkeep.core.eviction.depths import CLASSES, Depths, chances_by_class, class_of
from kvkeep.core.eviction.reuse import BUCKETS, HITS, Hazards, Reuse, bucket_of
from kvkeep.core.eviction.trials import Asked, KeyLists, KeyTrial
from kvkeep.core.eviction.twoq import TwoQ

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

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
    """A policy that `Adaptive` may follow: its queues of entries, and its trial.

    ``policy`` orders entries. All entries wait in its queues, followed or not, so that a switch
    costs nothing; ``add``, ``discard``, ``pop``, ``portion`` and ``put_back`` are called, events
    are not. It leaves the records of entries alone, and their ``state`` if another policy uses it.
    Candidates may share a policy, which ``follow`` then prepares. ``trial`` gets a sample of the
    blocks of all prompts and tells how many it holds; ``hits`` adds these up, and older ones fade.
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


class Adaptive(EvictionPolicy):
    """Follows LRU, 2Q with some probation, `Reuse` or `Depths`: whichever would hit most now.

    Each candidate is simulated in a small cache of keys alone, fed with a sampled share of the
    blocks of all prompts. Which candidate is best depends on memory and traffic, and both change:
    where memory is scarce, blocks requested once are rarely worth their place; where it is ample,
    they are.

    It starts with LRU, and decides at each request. Entries wait in the queues of all candidates,
    so a switch costs nothing. Memory: about 300 bytes for each block of four memories, and 2.5 KiB
    a sampled one. Cost: about 1.5 µs a block of every prompt;
    five times as much where a memory has so few blocks that all are sampled.
    """

    name = "adaptive"
    remembers = True
    advised = True
    portions = True

    def __init__(self, remembered: float = 4.0) -> None:
        super().__init__()
        self._lists = TwoQ(remembered=0)  # the candidates that are 2Q or LRU
        self._depths = Depths()
        self._learner = _Learner(remembered)
        self._policies: list[EvictionPolicy] = [self._learner, self._lists, self._depths]
        self._below = 0
        self._fade = 1.0
        self.candidates: list[Candidate] = []
        """Those that it follows, the first one first."""
        self._size_for(1, 1)

    @property
    def chosen(self) -> str:
        """The candidate that is followed now."""
        return self._now.name

    def fit(self, size: int, block: int) -> None:
        for policy in self._policies:
            policy.fit(size, block)
        self._size_for(size, block)

    def _size_for(self, size: int, block: int) -> None:
        """Begin trials for a memory of ``size``."""
        blocks = max(1, size // block)
        share = min(1.0, max(_SAMPLED, _LEAST / blocks))
        self._learner.watch(share, blocks)
        self._below = max(1, round(share * 256))
        sampled = max(1, round(blocks * share))
        self._fade = 0.5 ** (1 / (_HALF_LIFE * sampled))
        reuse, depths = Reuse(remembered=0), Depths()
        self._learner.students = self._depths, depths
        self._trial_reuse, self._trial_depths = reuse, depths
        self.candidates = [
            self._list(None, sampled),
            *(self._list(probation, sampled) for probation in _SHARES),
            Candidate("reuse", self._learner, KeyTrial(reuse, sampled)),
            Candidate("depths", self._depths, KeyTrial(depths, sampled)),
        ]
        self._follow(self.candidates[0])

    def _list(self, probation: float | None, size: int) -> Candidate:
        def follow() -> None:
            self._lists.probation = probation

        name = "lru" if probation is None else f"2q with {probation:.0%} on probation"
        return Candidate(name, self._lists, KeyLists(probation, size), follow)

    def requested(self, keys: Sequence[bytes]) -> int:
        below, learner = self._below, self._learner
        known = learner.history
        blocks = [
            Asked(key, key in known, before)
            for before, key in enumerate(keys)
            if key[0] < below  # keys are hashes
        ]
        if blocks:
            learner.learn(blocks)
            self._try(blocks)
        return known.requested(keys)

    def _try(self, blocks: list[Asked]) -> None:
        """Request ``blocks`` of all trials, and follow the one with the most hits."""
        blocks.reverse()  # the end of a prompt is evicted before its beginning
        self._trial_reuse.follow(self._learner)
        self._trial_depths.at(self._learner.moment)
        fade, best = self._fade ** len(blocks), self._now
        for candidate in self.candidates:
            candidate.hits = fade * candidate.hits + candidate.trial.requested(blocks)
        for candidate in self.candidates:
            if candidate.hits > best.hits:
                best = candidate
        if best is not self._now:
            self._follow(best)

    def _follow(self, candidate: Candidate) -> None:
        self._now = candidate
        if candidate.follow is not None:
            candidate.follow()
        self._others = [policy for policy in self._policies if policy is not candidate.policy]

    # --- events: the learner has the clock -------------------------------------------------------

    def stored(self, entry: Entry, priority: int, *, known: bool = False) -> None:
        self._learner.stored(entry, priority, known=known)

    def grown(self, entry: Entry) -> None:
        self._learner.grown(entry)

    def hit(self, entry: Entry) -> None:
        self._learner.hit(entry)

    def used(self, entry: Entry) -> None:
        self._learner.used(entry)

    @property
    def moment(self) -> int:
        return self._learner.moment

    def describe(self, entry: Entry) -> str:
        return self._learner.describe(entry)

    # --- queues: an entry is in those of all candidates ------------------------------------------

    def add(self, entry: Entry) -> None:
        for policy in self._policies:
            policy.add(entry)

    def discard(self, entry: Entry) -> None:
        for policy in self._policies:
            policy.discard(entry)

    def pop(self) -> Entry | None:
        """Remove the victim of the followed candidate."""
        self._depths.at(self._learner.moment)
        entry = self._now.policy.pop()
        if entry is not None:
            for policy in self._others:
                policy.discard(entry)
        return entry

    def portion(self, entry: Entry) -> int:
        policy = self._now.policy
        return policy.portion(entry) if policy.portions else entry.size

    def put_back(self, entry: Entry) -> None:
        """Make the entry just popped a candidate again, for all policies."""
        for policy in self._policies:
            policy.put_back(entry)

    def __len__(self) -> int:
        return len(self._learner)


class _Learner(Reuse):
    """`Reuse`, with counts by depth as well, from which ``students`` are told the chances."""

    def __init__(self, remembered: float) -> None:
        super().__init__(remembered=remembered)
        self._hazards = Hazards(CLASSES)
        self._came = self._groups = 1.0  # returned blocks; of different prompts, classes and ages
        self.students: Sequence[Depths] = ()

    def learn(self, blocks: Sequence[Asked]) -> None:
        """Record sampled blocks of a prompt."""
        watched, now, hazards = self._watched, self._time, self._hazards
        groups = set()
        came = 0
        for key, _, before in blocks:
            last, row = watched.pop(key, (now, -1))
            hits = 0
            if row >= 0:
                hazards.ended(now - last, row, reused=True)
                groups.add(row * BUCKETS + bucket_of(now - last))
                came += 1
                hits = row * HITS // CLASSES + 1
            watched[key] = now, class_of(hits, before)
            if len(watched) > self._most:
                last, row = watched.popitem(last=False)[1]
                hazards.ended(now - last, row, reused=False)
        self._came += came
        self._groups += len(groups)
        self._left -= len(blocks)
        if self._left < 0:
            self._left = self._round
            self._learn()
            self._came *= self._fade
            self._groups *= self._fade

    def _rank(self, horizon: float, seen: Hazards) -> None:
        super()._rank(horizon, seen.merged(HITS))
        table = chances_by_class(seen, horizon, self._came / self._groups)
        for student in self.students:
            student.chances = table
