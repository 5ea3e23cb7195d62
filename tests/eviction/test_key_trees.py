"""The trial of a policy hits as a pool with that policy does."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvkeep import PagedCache
from kvkeep.core.eviction import LRU, EvictionPolicy, TwoQ
from kvkeep.core.eviction.key_trees import KeyDepths, KeyRun, KeyTree
from kvkeep.core.eviction.trials import Asked

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    Make = Callable[[], EvictionPolicy]

SIZE = 12
MAKES: dict[str, Make] = {
    "lru": LRU,
    "2q, nothing": lambda: TwoQ(0.0, remembered=100.0),
    "2q, a third": lambda: TwoQ(0.3, remembered=100.0),
}


class Pair:
    """A trial, and the pool that it stands for, with the same requests."""

    def __init__(self, make: Make) -> None:
        # A page more, for the token that is always left to compute.
        self.cache = PagedCache(SIZE + 1, 2, eviction=make(), block_pages=1)
        policy = make()
        policy.fit(SIZE, 1)
        self.now = 0
        self.trial = KeyTree(policy, SIZE, lambda: self.now)
        self.seen: set[bytes] = set()

    def asked(self, blocks: Sequence[int]) -> list[Asked]:
        """Return the blocks of a prompt as a trial gets them; a key covers all before it."""
        keys = [bytes(blocks[: at + 1]) for at in range(len(blocks))]
        return [Asked(key, key in self.seen, at) for at, key in enumerate(keys)]

    def request(self, prompt: Sequence[int], answer: Sequence[int]) -> tuple[int, int]:
        """Return how many blocks of the prompt the trial and the pool held."""
        self.now += 10
        asked = self.asked(prompt)
        held = self.trial.requested(asked[::-1])
        with self.cache.open(np.array([*np.repeat(prompt, 2), 99], np.int32)) as sequence:
            cached = sequence.num_cached // 2
            sequence.copies()
            sequence.publish(2 * len(prompt))
            if answer:
                sequence.truncate(2 * len(prompt))
                sequence.append(np.array([*np.repeat(answer, 2), 99], np.int32))
                sequence.copies()
                sequence.publish(2 * len(prompt) + 2 * len(answer))
        self.seen.update(block.key for block in asked)
        if answer:
            self.now += 5
            behind = self.asked([*prompt, *answer])[len(prompt) :]
            self.trial.answered(behind[::-1], asked[::-1])
        return held, cached

    def check(self) -> None:
        """All keys are in runs, and the runs without others behind them in the queue."""
        self.cache.check()
        trial = self.trial
        runs = list(trial._runs.values())
        assert len(trial) == sum(run.size for run in runs) <= SIZE
        for first, run in trial._runs.items():
            assert run.size == len(run.blocks) > 0
            assert run.blocks[0].key == first
            assert run.parent is trial._root or run.parent in runs
            before = run.parent.blocks[-1].key if run.parent and run.parent.blocks else b""
            for block in run.blocks:
                assert block.key[:-1] == before
                before = block.key
            assert run.children == sum(other.parent is run for other in runs)
        assert len(trial.policy) == sum(not run.children for run in runs)


class TreeMachine(RuleBasedStateMachine):
    """Requests that share fronts, with and without answers."""

    @initialize(make=st.sampled_from(sorted(MAKES)))
    def begin(self, make: str) -> None:
        self.pair = Pair(MAKES[make])
        self.talks: list[list[int]] = [[]]

    @rule(
        talk=st.integers(0, 5),
        keep=st.integers(0, 8),
        more=st.lists(st.integers(0, 3), max_size=4),
        answer=st.lists(st.integers(4, 6), max_size=3),
    )
    def request(self, talk: int, keep: int, more: list[int], answer: list[int]) -> None:
        prompt = [*self.talks[talk % len(self.talks)][:keep], *more]
        if prompt and len(prompt) + len(answer) <= SIZE:
            runs = self.pair.trial._runs.values()
            kept = {block.key for run in runs for block in run.blocks}
            known = sum(block.key in kept for block in self.pair.asked(prompt))
            held, _ = self.pair.request(prompt, answer)
            assert held == known, "what was held before counts"
            self.talks.append([*prompt, *answer])

    @invariant()
    def the_trial_is_whole(self) -> None:
        if hasattr(self, "pair"):
            self.pair.check()


TestTreeMachine = TreeMachine.TestCase
TestTreeMachine.settings = settings(max_examples=50, stateful_step_count=25, deadline=None)


@pytest.mark.parametrize("name", sorted(MAKES))
def test_a_trial_hits_as_its_pool_does(name: str) -> None:
    """Prompts that share fronts, with and without answers, in 40 lives."""
    asked = hits = 0
    for seed in range(40):
        chance, pair = random.Random(seed), Pair(MAKES[name])
        talks: list[list[int]] = [[]]
        for turn in range(40):
            talk = talks[chance.randrange(6) % len(talks)]
            prompt = [
                *talk[: chance.randrange(9)],
                *chance.choices(range(4), k=chance.randrange(5)),
            ]
            # A pool needs pages for an answer before it sees that it has it: no answer comes twice.
            answer = [10 + 5 * turn + at for at in range(chance.randrange(4))]
            if prompt and len(prompt) + len(answer) <= SIZE:
                found, pooled = pair.request(prompt, answer)
                assert found == pooled
                asked, hits = asked + len(prompt), hits + found
                talks.append([*prompt, *answer])
    assert 0.2 * asked < hits < 0.9 * asked


def test_a_prompt_larger_than_the_memory_is_stored_in_part() -> None:
    pair = Pair(LRU)
    blocks = pair.asked(range(SIZE + 5))
    assert pair.trial.requested(blocks[::-1]) == 0
    assert pair.trial.requested(blocks[::-1]) == SIZE
    assert len(pair.trial) == SIZE
    behind = pair.asked(range(SIZE + 7))[SIZE + 5 :]
    pair.trial.answered(behind[::-1], blocks[::-1])
    pair.check()


def test_an_answer_whose_prompt_is_gone_is_not_stored() -> None:
    pair = Pair(LRU)
    prompt = pair.asked([1, 2])
    pair.trial.requested(prompt[::-1])
    pair.trial.requested(pair.asked(range(20, 20 + SIZE))[::-1])
    pair.trial.answered(pair.asked([1, 2, 3])[2:], prompt[::-1])
    pair.check()
    assert pair.trial.requested(prompt[::-1]) == 0


def test_the_tail_of_a_sampled_run_goes_by_its_places_in_the_prompt() -> None:
    policy = KeyDepths()
    run = KeyRun([Asked(bytes([at]), False, at) for at in (1, 3, 5, 9, 20, 30, 70)], None)
    policy.add(run)
    parts = []
    while run.size:
        assert policy.pop() is run
        parts.append(policy.portion(run))
        del run.blocks[-parts[-1] :]
        run.size -= parts[-1]
        if run.size:
            policy.put_back(run)
    assert parts == [1, 2, 2, 2]
