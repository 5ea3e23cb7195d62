"""The trial of an order by waits, and `adaptive` in a cache whose conversations return."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvkeep import PagedCache
from kvkeep.core.eviction import LRU, Adaptive, EvictionPolicy, ReturnAware
from kvkeep.core.eviction.trials import Asked, KeyWaits
from kvkeep.core.returns import Ended, Returns

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvkeep.core.returns import Arrival, Wait

SOON, NEVER = Ended("soon"), Ended("never")


class Requests:
    """A trial of ``size`` blocks, told of requests as a cache tells it."""

    def __init__(self, size: int) -> None:
        self.now = 0.0
        self.returns = Returns()
        policy = ReturnAware()
        policy.attend(self.returns, lambda: self.now)
        self.trial = KeyWaits(policy, size)
        self.waits: dict[str, Wait] = {}

    def arrive(self, talk: str, blocks: str) -> tuple[Arrival, int]:
        """Request the blocks of a prompt, a letter each; return how many were held, too."""
        before = self.waits.pop(talk, None)
        if before is not None:
            self.returns.returned(before, self.now)
        arrival = self.returns.arrived(before)
        asked = [Asked(block.encode(), False, at) for at, block in enumerate(blocks)]
        return arrival, self.trial.requested(asked[::-1])

    def end(
        self, talk: str, arrival: Arrival, ended: Ended, answer: str = "", read: int = 9
    ) -> None:
        wait = self.returns.began(ended, 1, self.now, before=arrival.before)
        asked = [Asked(block.encode(), False, 9 + at) for at, block in enumerate(answer)]
        self.trial.ended(arrival, wait, asked[::-1], 9 + read)
        self.waits[talk] = wait

    def request(self, talk: str, blocks: str, ended: Ended = SOON, answer: str = "") -> int:
        arrival, held = self.arrive(talk, blocks)
        self.end(talk, arrival, ended, answer)
        return held

    @property
    def held(self) -> str:
        return "".join(sorted(key.decode() for key in self.trial._kept))

    def teach(self) -> None:
        """Conversations that end one way return after 4 s, the others never."""
        for _ in range(60):
            came = self.returns.began(SOON, 1, self.now)
            gone = self.returns.began(NEVER, 1, self.now)
            self.now += 4
            self.returns.returned(came, self.now)
            self.now += 1000
            self.returns.lost(gone, self.now)
        self.returns.learn(self.now)


def test_what_waits_for_a_conversation_that_returns_stays() -> None:
    """Its last use was the first one, but it is worth more than the others."""
    requests = Requests(6)
    requests.teach()
    requests.request("a", "ab", SOON)
    requests.now += 1
    requests.request("b", "cd", NEVER)
    requests.now += 1
    requests.request("c", "efg", NEVER)
    assert requests.held == "abcefg", "the tail of the one that never returns, the older one first"
    assert requests.request("a", "ab") == 2


def test_what_a_conversation_left_behind_goes_first() -> None:
    requests = Requests(6)
    requests.teach()
    requests.request("a", "abc", SOON)
    requests.request("b", "de", NEVER)
    requests.request("a", "abx", SOON)
    assert requests.held == "abcdex"
    requests.request("b", "dey", NEVER)
    assert requests.held == "abdexy"


def test_a_block_of_two_conversations_stays_for_either() -> None:
    requests = Requests(4)
    requests.teach()
    requests.request("a", "sa", SOON)
    requests.request("b", "sb", NEVER)  # which used the common block last
    requests.request("c", "cd", NEVER)
    assert requests.held == "acds"
    requests.request("d", "ef", SOON)
    assert "s" in requests.held
    assert "a" in requests.held


def test_a_block_whose_latest_conversation_left_waits_for_the_one_before() -> None:
    requests = Requests(4)
    requests.teach()
    requests.request("a", "sa", SOON)
    requests.request("b", "sb", SOON)
    requests.request("b", "xy", SOON)  # left the common block, and one of its own, behind
    assert requests.held == "asxy"


def test_an_answer_waits_with_its_conversation_and_goes_before_its_prompt() -> None:
    requests = Requests(6)
    requests.teach()
    requests.request("a", "ab", SOON, answer="cd")
    assert requests.held == "abcd"
    requests.request("b", "efg", SOON)
    assert requests.held == "abcefg"
    assert requests.request("a", "abc") == 3
    requests.request("c", "x", NEVER, answer="yz")
    assert requests.held == "abefgx", "made room while it ran; then its answer went"
    requests = Requests(2)
    requests.request("a", "a", answer="bc")
    assert requests.held == "ab"


def test_what_is_not_read_of_an_answer_goes_first() -> None:
    requests = Requests(6)
    requests.teach()
    requests.request("a", "ab", NEVER)
    arrival, _ = requests.arrive("b", "c")
    requests.end("b", arrival, SOON, answer="def", read=1)
    assert requests.held == "abcdef"
    requests.request("c", "gh", SOON)
    assert requests.held == "abcdgh"


def test_an_answer_of_a_prompt_without_sampled_blocks_waits_too() -> None:
    requests = Requests(4)
    requests.request("a", "", answer="ab")
    assert requests.held == "ab"
    assert requests.request("a", "abc") == 2


def test_running_requests_hold_their_blocks() -> None:
    requests = Requests(3)
    arrival, _ = requests.arrive("a", "abcd")
    assert requests.held == "abcd", "more than it has room for"
    other, held = requests.arrive("b", "abx")
    assert held == 2
    assert requests.held == "abcdx"
    requests.end("a", arrival, SOON)
    requests.end("b", other, SOON)
    requests.request("c", "y")
    assert len(requests.held) == 3


def test_an_aborted_request_counts_as_one_that_nothing_is_known_of() -> None:
    requests = Requests(4)
    arrival, _ = requests.arrive("a", "ab")
    requests.trial.ended(arrival, None, (), 0)
    assert requests.held == "ab"
    assert len(requests.trial.policy) == 1
    assert not requests.waits
    requests.request("b", "cdef")
    assert requests.held == "cdef"


@settings(max_examples=60, stateful_step_count=40, deadline=None)
class TrialMachine(RuleBasedStateMachine):
    """Requests of a few conversations with common blocks, running side by side."""

    SIZE = 8

    def __init__(self) -> None:
        super().__init__()
        self.requests = Requests(self.SIZE)
        self.running: list[tuple[str, Arrival]] = []

    @rule(talk=st.sampled_from("abc"), shared=st.integers(0, 3), more=st.integers(1, 4))
    def arrive(self, talk: str, shared: int, more: int) -> None:
        blocks = "STU"[:shared] + "".join(chr(256 + ord(talk) * 8 + at) for at in range(more))
        known = set(self.requests.held)
        arrival, held = self.requests.arrive(talk, blocks)
        assert held == len(known & set(blocks))
        assert set(blocks) <= set(self.requests.held)
        assert len(self.requests.trial) <= self.SIZE or not len(self.requests.trial.policy)
        self.running.append((talk, arrival))

    @precondition(lambda self: self.running)
    @rule(data=st.data(), ended=st.sampled_from([SOON, NEVER, None]))
    def end(self, data: st.DataObject, ended: Ended | None) -> None:
        talk, arrival = self.running.pop(data.draw(st.integers(0, len(self.running) - 1)))
        if ended is None:
            self.requests.trial.ended(arrival, None, (), 0)
        else:
            self.requests.end(talk, arrival, ended)

    @rule(seconds=st.sampled_from([0.5, 3.0, 100.0, 100_000.0]))
    def wait(self, seconds: float) -> None:
        self.requests.now += seconds

    @rule()
    def learn(self) -> None:
        self.requests.returns.learn(self.requests.now)

    @invariant()
    def blocks_are_where_they_should_be(self) -> None:
        trial = self.requests.trial
        held = [block for block in trial._kept.values() if block.group.wait is None]
        waiting = [block for block in trial._kept.values() if block.group.wait is not None]
        groups = {block.group for block in waiting}
        assert len(trial.policy) == len(groups)
        for key, block in trial._kept.items():
            assert block.key == key
            assert block in block.group.blocks
            assert len(block.earlier) <= 7
        for group in groups:
            assert group.wait is not None
            assert group in group.wait.blocks
            assert group.blocks
        assert sum(len(group.blocks) for group in groups) == len(waiting)
        running = {arrival.held for _, arrival in self.running}
        assert {block.group for block in held} <= running


TestTrialMachine = TrialMachine.TestCase


# --- in a cache ----------------------------------------------------------------------------------


def agents(policy: EvictionPolicy, requests: int, pages: int, seed: int = 1) -> float:
    """Return the share of cached tokens where half of the conversations never return."""
    chance = random.Random(seed)
    clock = 0.0
    cache = PagedCache(pages, 4, eviction=policy, block_pages=1, clock=lambda: clock)
    talks: dict[int, list[int]] = {}
    soon: list[int] = []
    hits = tokens = 0
    for number in range(requests):
        clock += 1
        if soon and chance.random() < 0.6:
            talk = soon.pop(0 if len(soon) > 6 else chance.randrange(len(soon)))
        else:
            talk, talks[number] = number, [number] * 9
        prompt = talks[talk] + [talk] * 8
        returning = talk % 2 == 0 and len(prompt) < 90
        with cache.open(np.array([*prompt, 0], np.int32)) as sequence:
            sequence.copies()
            hits += sequence.num_cached
            tokens += len(prompt)
            sequence.publish(len(prompt))
            sequence.close(ended=SOON if returning else NEVER)
        talks[talk] = prompt
        if returning:
            soon.append(talk)
    cache.check()
    return hits / tokens


def test_adaptive_follows_returns_where_conversations_return() -> None:
    policy = Adaptive()
    adaptive = agents(policy, 1500, pages=160)
    best = agents(ReturnAware(), 1500, pages=160)
    assert 2 * agents(LRU(), 1500, pages=160) < best
    assert adaptive > 0.9 * best


class Recording(Adaptive):
    """Keeps the keys that it is told of."""

    def __init__(self) -> None:
        super().__init__()
        self.prompts: list[list[bytes]] = []
        self.answers: list[tuple[int, list[bytes]]] = []

    def requested(self, keys: Sequence[bytes]) -> int:
        self.prompts.append([*keys])
        return super().requested(keys)

    def ended(
        self, arrival: Arrival, wait: Wait | None, answer: Sequence[bytes], place: int, read: int
    ) -> None:
        self.answers.append((place, [*answer]))
        super().ended(arrival, wait, answer, place, read)


@pytest.mark.parametrize("at", [None, 1, 9, 13])
@pytest.mark.parametrize(("prompt", "public"), [(2, 0), (8, 0), (8, 4), (15, 0), (15, 4), (15, 12)])
def test_the_keys_of_an_answer_are_those_of_the_next_prompt(
    public: int, at: int | None, prompt: int
) -> None:
    """With parts that are public, and with images."""
    policy = Recording()
    cache = PagedCache(40, 4, eviction=policy, block_pages=2)
    tokens = np.arange(40, dtype=np.int32)
    if public:
        cache.public.declare(tokens[:public])
    extra = [] if at is None else [(at, b"image")]
    with cache.open(tokens[:prompt], "a", extra=[one for one in extra if one[0] < prompt]) as one:
        one.copies()
        for place in range(prompt, 30):
            one.append([int(tokens[place])], extra=[(0, b"image")] if place == at else [])
        one.copies()
        one.publish(28)
    with cache.open(tokens, "a", extra=extra):
        pass
    first, second = policy.prompts
    assert second[: len(first)] == first
    (place, answer), (_, none) = policy.answers
    assert [*first[:place], *answer] == second[: 28 // 8]
    assert place == prompt // 8
    assert none == []
    cache.check()


def test_a_prompt_that_was_cut_has_its_answer_behind_the_cut() -> None:
    policy = Recording()
    cache = PagedCache(40, 4, eviction=policy, block_pages=1)
    with cache.open(np.arange(20, dtype=np.int32)) as one:
        one.copies()
        one.truncate(10)
        one.append([7] * 14)
        one.copies()
        one.publish()
    assert [(place, len(answer)) for place, answer in policy.answers] == [(2, 4)]
    with cache.open(np.array([*range(10), *[7] * 15], np.int32)):
        pass
    assert policy.prompts[1][2:6] == policy.answers[0][1]


def test_forks_and_aborts_keep_the_trials_whole() -> None:
    policy = Adaptive()
    cache = PagedCache(40, 4, eviction=policy, block_pages=1)
    trial = next(one.trial for one in policy.candidates if one.name == "returns")
    assert isinstance(trial, KeyWaits)
    with cache.open(np.arange(9, dtype=np.int32)) as one:
        one.copies()
        with one.fork() as other:
            other.append([1] * 8)
            other.copies()
            other.publish()
        one.publish()
        assert len(trial) == 4, "the fork's answer, which ended first"
        assert len(trial.policy) == 1
    assert len(trial) == 4
    one = cache.open(np.arange(50, 62, dtype=np.int32))
    one.copies()
    one.publish()
    one.close(keep=False)
    assert len(trial) == 7
    assert len(trial.policy) == 2
    cache.check()


def test_adaptive_without_ends_of_requests_follows_the_others() -> None:
    """As in a tier."""
    names = {candidate.name for candidate in Adaptive().candidates}
    assert "lru" in names
    assert "returns" not in names
