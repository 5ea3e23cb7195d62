"""Adaptive: follow whichever of several policies would hit most."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Final

from kvkeep.core.eviction.base import Entry, EvictionPolicy
from kvkeep.core.eviction.depths import CLASSES, Depths, chances_by_class, class_of
from kvkeep.core.eviction.key_answers import KeyAnswers
from kvkeep.core.eviction.returns import ReturnAware
from kvkeep.core.eviction.reuse import BUCKETS, HITS, Hazards, Reuse, bucket_of
from kvkeep.core.eviction.trials import Asked, KeyLists, KeyTrial, KeyWaits
from kvkeep.core.eviction.twoq import TwoQ

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvkeep.core.eviction.trials import Trial
    from kvkeep.core.returns import Arrival, Returns, Wait

__all__ = ["Adaptive", "Candidate"]

# Shares of probation to try.
_SHARES: Final = (0.01, 0.1, 0.3, 0.5, 0.7)
# Least size of the sample, as a share of the blocks and in blocks, to keep its error small.
_SAMPLED: Final = 0.1
_LEAST: Final = 1000
# Half-life of the hits, in requested blocks over blocks in memory.
_HALF_LIFE: Final = 16.0
# Share of requests from which on, if they continue known conversations, it begins with `returns`.
_RETURNING: Final = 0.35


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
    """Follows LRU, 2Q, `Reuse`, `Depths` or `ReturnAware`: whichever would hit most now.

    Each candidate is simulated in a small cache of keys alone, fed with a sampled share of the
    blocks of all prompts. Which candidate is best depends on memory and traffic, and both change:
    where memory is scarce, blocks requested once are rarely worth their place; where it is ample,
    they are.

    `ReturnAware` is a candidate where the cache follows the ends of requests (`attend`): in a pool,
    not in a tier. While all trials hit as often, it is followed if 35 % of the requests continue
    known conversations, else `Reuse`. It decides at each request. Entries wait in the queues of all
    candidates, so a switch costs nothing.

    Memory: about 300 bytes for each block of four memories, and 3 KiB a sampled one. Cost: about
    3 µs a block of every prompt, three times as much where a memory has so few blocks that all
    are sampled, and 50 to 100 µs a request (`benchmarks/returns.py`).
    """

    name = "adaptive"
    remembers = True
    advised = True
    portions = True
    awaits = True

    def __init__(self, remembered: float = 4.0) -> None:
        super().__init__()
        self._lists = TwoQ(remembered=0)  # the candidates that are 2Q or LRU
        self._depths = Depths()
        self._learner = _Learner(remembered)
        self._policies: list[EvictionPolicy] = [self._learner, self._lists, self._depths]
        self._returns: ReturnAware | None = None  # if the cache attends it
        self._arrived = self._came = 0  # requests; those of known conversations
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

    def attend(self, returns: Returns, clock: Callable[[], float]) -> None:
        """Follow `ReturnAware`, too."""
        assert not len(self), "attended before anything is stored"
        self._returns = ReturnAware()
        self._returns.attend(returns, clock)
        self._policies.append(self._returns)
        self._try_waits()

    def _try_waits(self) -> None:
        """Add `ReturnAware` to the candidates, if it knows of waits."""
        if self._returns is None:
            return
        trial = ReturnAware()
        trial.attend(self._returns.returns, self._returns.clock)
        self._waits = KeyWaits(trial, self._sampled)
        self.candidates.append(Candidate("returns", self._returns, self._waits))
        self._follow(self._reuse)

    def _size_for(self, size: int, block: int) -> None:
        """Begin trials for a memory of ``size``."""
        blocks = max(1, size // block)
        self._answers = KeyAnswers(blocks)
        share = min(1.0, max(_SAMPLED, _LEAST / blocks))
        self._learner.watch(share, blocks)
        self._below = max(1, round(share * 256))
        sampled = self._sampled = max(1, round(blocks * self._below / 256))
        self._fade = 0.5 ** (1 / (_HALF_LIFE * sampled))
        reuse, depths = Reuse(remembered=0), Depths()
        self._learner.students = self._depths, depths
        self._trial_reuse, self._trial_depths = reuse, depths
        self._reuse = Candidate("reuse", self._learner, KeyTrial(reuse, sampled))
        self.candidates = [
            self._list(None, sampled),
            *(self._list(probation, sampled) for probation in _SHARES),
            self._reuse,
            Candidate("depths", self._depths, KeyTrial(depths, sampled)),
        ]
        self._follow(self.candidates[0])
        self._try_waits()

    def _list(self, probation: float | None, size: int) -> Candidate:
        name = "lru" if probation is None else f"2q with {probation:.0%} on probation"
        begin = partial(self._set_probation, probation)
        return Candidate(name, self._lists, KeyLists(probation, size), begin)

    def _set_probation(self, probation: float | None) -> None:
        self._lists.probation = probation

    def requested(self, keys: Sequence[bytes]) -> int:
        below, learner = self._below, self._learner
        known = learner.history
        blocks = [
            Asked(key, key in known, before)
            for before, key in enumerate(keys)
            if key[0] < below  # keys are hashes
        ]
        if self._returns is not None:
            arrival = self._returns.returns.arrival
            arrival.keys, arrival.blocks, arrival.listener = keys, blocks, self
            self._arrived += 1
            if arrival.before is not None:
                self._came += 1
                self._answers.returned(arrival.before, keys, self._returns.returns)
        if blocks:
            learner.learn(blocks)
            self._try(blocks)
        return known.requested(keys)

    def ended(
        self,
        arrival: Arrival,
        wait: Wait | None,
        answer: Sequence[bytes],
        place: int,
        read: int,
    ) -> None:
        """Tell the trials of an answer (see `kvkeep.core.returns.ReturnListener`)."""
        prompt, arrival.blocks = arrival.blocks, None
        if prompt is None:  # another fork ended
            return
        if wait is not None:
            self._answers.ended(wait, answer, place)
        below = self._below
        blocks = [
            Asked(key, False, before) for before, key in enumerate(answer, place) if key[0] < below
        ]
        blocks.reverse()
        if blocks:
            self._learner.answered(blocks)
            self._trial_reuse.follow(self._learner)
            self._trial_depths.at(self._learner.moment)
            for candidate in self.candidates:
                candidate.trial.answered(blocks, prompt)
        if prompt or blocks:
            self._waits.ended(arrival, wait, blocks, read)

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
        if self._returns is not None and all(one.hits == best.hits for one in self.candidates):
            # Nothing is known yet but whether conversations return.
            returning = self._came > _RETURNING * self._arrived
            best = self.candidates[-1] if returning else self._reuse
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
        if self._now.policy is self._returns and entry.wait is not None:
            return self._returns.describe(entry)
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
        self._now.policy.put_back(entry)
        for policy in self._others:
            policy.add(entry)

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
            self._forget()
        self._came += came
        self._groups += len(groups)
        self._left -= len(blocks)
        if self._left < 0:
            self._left = self._round
            self._learn()
            self._came *= self._fade
            self._groups *= self._fade

    def answered(self, blocks: Sequence[Asked]) -> None:
        """Record sampled blocks of an answer, which were not requested yet."""
        for key, _, before in blocks:
            if key not in self._watched:
                self._watched[key] = self._time, class_of(0, before)
                self._forget()

    def _forget(self) -> None:
        """Follow the block that was seen first no longer, if there are too many."""
        if len(self._watched) > self._most:
            last, row = self._watched.popitem(last=False)[1]
            self._hazards.ended(self._time - last, row, reused=False)

    def _rank(self, horizon: float, seen: Hazards) -> None:
        super()._rank(horizon, seen.merged(HITS))
        table = chances_by_class(seen, horizon, self._came / self._groups)
        for student in self.students:
            student.chances = table
