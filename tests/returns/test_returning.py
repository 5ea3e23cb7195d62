"""The policy `returns` in a cache: which conversation a prompt continues, and what is evicted."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvkeep import PagedCache
from kvkeep.core.eviction import Entry, EvictionPolicy, ReturnAware
from kvkeep.core.eviction.shares import Shares
from kvkeep.core.keys import as_namespace
from kvkeep.core.returns import Ended
from kvkeep.core.tokens import common_length

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvkeep.core.eviction.returns import Waits
    from kvkeep.core.returns import Returns, Wait

PAGE = 4
TOOL, PERSON = Ended("tool_use"), Ended("end_turn")


class Talks:
    """A cache with a clock, and conversations that go on in it."""

    def __init__(
        self, pages: int, policy: EvictionPolicy | None = None, prefix: str = "radix"
    ) -> None:
        self.now = 0.0
        self.policy = ReturnAware() if policy is None else policy
        self.cache = PagedCache(
            pages, PAGE, eviction=self.policy, prefix=prefix, clock=lambda: self.now
        )
        self.tokens: dict[str, list[int]] = {}
        self.all_tokens: list[int] = []
        """Of the last request, its answer included."""
        self.next_token = 1

    @property
    def returns(self) -> Returns:
        return self.waits.returns

    @property
    def waits(self) -> Waits:
        policy = self.policy.first if isinstance(self.policy, Shares) else self.policy
        assert isinstance(policy, ReturnAware)
        return policy.waits

    def fresh(self, count: int) -> list[int]:
        self.next_token += count
        return list(range(self.next_token - count, self.next_token))

    def turn(
        self, talk: str, more: int, ended: Ended, *, answer: int = 0, strip: bool = False
    ) -> int:
        """The next request of a conversation; return its cached tokens."""
        prompt = self.tokens.get(talk, []) + self.fresh(more)
        with self.cache.open(
            np.array(prompt, np.int32), talk.split("/", maxsplit=1)[0]
        ) as sequence:
            cached = sequence.num_cached
            sequence.copies()
            said = self.fresh(answer)
            if said:
                sequence.append(said)
                sequence.copies()
            sequence.publish()
            sequence.close(ended=ended)
        self.tokens[talk] = prompt if strip else prompt + said
        self.all_tokens = prompt + said
        self.cache.check()
        return cached

    def cached(self, talk: str) -> int:
        tokens = np.array([*self.tokens[talk], 0], np.int32)
        return self.cache.match(tokens, talk.split("/", maxsplit=1)[0]).num_tokens


@pytest.mark.parametrize("prefix", ["radix", "chain"])
def test_a_prompt_that_extends_a_request_is_its_return(prefix: str) -> None:
    talks = Talks(200, prefix=prefix)
    talks.turn("a", 20, TOOL)
    for _ in range(5):
        talks.now += 8.0
        talks.turn("a", 8, TOOL)
    (wait,) = talks.returns
    assert wait.turns == 6
    assert wait.gaps == (8.0,) * 5


@pytest.mark.parametrize("prefix", ["radix", "chain"])
def test_the_return_of_a_conversation_whose_pages_are_gone(prefix: str) -> None:
    talks = Talks(200, prefix=prefix)
    talks.turn("a/1", 20, TOOL)  # in one namespace with another one
    talks.turn("a/2", 24, TOOL)
    talks.now += 5.0
    talks.cache.evict(200)
    assert talks.turn("a/1", 8, TOOL) == 0
    talks.now += 1.0
    assert talks.turn("a/2", 8, TOOL) == 0
    assert sorted((wait.turns, wait.gaps) for wait in talks.returns) == [(2, (5.0,)), (2, (6.0,))]


def test_a_return_to_what_is_left_of_a_tail() -> None:
    talks = Talks(200)
    talks.turn("a", 80, TOOL)
    for _ in range(6):
        talks.now += 2.0
        talks.cache.evict(5)
        assert 0 < talks.turn("a", 4, TOOL) < len(talks.tokens["a"]) - 4
    (wait,) = talks.returns
    assert wait.turns == 7


@pytest.mark.parametrize("prefix", ["radix", "chain"])
def test_a_prompt_that_is_sent_again_says_nothing_of_the_answer(prefix: str) -> None:
    """It needs the KV of its conversation, so it ends the wait; a longer one would contain more."""
    talks = Talks(400, prefix=prefix)
    for talk in range(30):
        prompt = talks.fresh(20)
        for attempt in range(2):
            talks.now += 5.0
            talks.tokens[f"a/{talk}/{attempt}"] = list(prompt)
            talks.turn(f"a/{talk}/{attempt}", 0, TOOL, answer=40)
    assert sum(wait.turns == 2 for wait in talks.returns) == 30
    worth = talks.returns.tenant(as_namespace("a")).answers.worth
    assert {worth(wait.answer_kind, 40) for wait in talks.returns} == {40}


def test_an_answer_that_the_next_prompt_drops_is_left_behind_and_goes_first() -> None:
    talks = Talks(200)
    talks.turn("a", 40, TOOL, answer=20, strip=True)
    talks.turn("b", 40, TOOL)
    talks.now += 3.0
    talks.turn("a", 8, TOOL)
    (wait,) = [wait for wait in talks.returns if wait.turns == 2]
    assert wait.gaps == (3.0,)
    kept = talks.cached("a"), talks.cached("b")
    talks.cache.evict(5)  # the pages of the dropped answer
    assert (talks.cached("a"), talks.cached("b")) == kept


@pytest.mark.parametrize("prefix", ["radix", "chain"])
def test_answers_that_no_prompt_contains_go_before_the_next_prompt_has_come(prefix: str) -> None:
    talks = Talks(400, prefix=prefix)
    for _ in range(12):
        talks.turn("a/1", 8, TOOL, answer=40, strip=True)
        talks.now += 3.0
    talks.cache.clear()
    talks.turn("a/2", 40, TOOL, answer=40, strip=True)
    talks.turn("a/3", 40, TOOL, answer=40, strip=True)
    said = talks.cache.stats().pages_cached
    talks.cache.evict(20)  # two answers of ten pages
    assert talks.cache.stats().pages_cached == said - 20
    assert talks.cached("a/2") == talks.cached("a/3") == 40
    talks.now += 3.0
    for talk in ("a/2", "a/3"):
        assert talks.turn(talk, 4, TOOL) == 40
    assert {(wait.turns, wait.gaps) for wait in talks.returns if wait.turns == 2} == {(2, (3.0,))}


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from(["radix", "chain"]), st.sampled_from([30, 60, 400]))
def test_what_is_learned_of_answers_is_what_prompts_repeat(
    seed: int, prefix: str, pages: int
) -> None:
    """Whatever was evicted meanwhile: nothing is learned, or what is true."""
    chance = random.Random(seed)
    talks = Talks(pages, prefix=prefix)
    waits = talks.waits
    told: list[tuple[int, int, int]] = []
    read_again = waits.read_again

    def noted(wait: Wait, *rest: Any) -> int | None:
        again = read_again(wait, *rest)
        if again is not None:
            told.append((wait.prompt, wait.answer, again))
        return again

    waits.read_again = noted  # type: ignore[method-assign, assignment]
    said: dict[tuple[str, int, int], list[int]] = {}
    names = ["a/1", "a/2", "b/1"]
    for step in range(150):
        talks.now += chance.choice((2.0, 60.0))
        place = chance.randrange(3)
        if len(talks.tokens.get(names[place], [])) > PAGE * min(pages, 60) // 2:
            names[place] += f"/{step}"
        name = names[place]
        tokens = talks.tokens.get(name, [])
        more, answer = chance.randrange(1, 9), chance.randrange(24)
        strip = chance.random() > (0.1 if step < 80 else 0.9)
        told.clear()
        talks.turn(name, more, TOOL, answer=answer, strip=strip)
        for prompt, length, again in told:
            before = np.array(said[name, prompt, length])
            same = common_length(np.array(talks.all_tokens), before)
            if again == length:
                assert same >= (len(before) - 1) // PAGE * PAGE
            else:
                assert again == max(0, same // PAGE * PAGE - prompt)
        said[name, len(tokens) + more, answer] = talks.all_tokens
        if chance.random() < 0.2:
            talks.cache.evict(chance.randrange(pages))


def test_another_branch_is_no_return() -> None:
    """A sub-agent begins with the same system prompt and goes elsewhere; the first one waits on."""
    talks = Talks(200)
    talks.tokens["a/system"] = talks.fresh(16)
    for name in ("a/1", "a/2", "a/3"):
        talks.tokens[name] = list(talks.tokens["a/system"])
        talks.turn(name, 20, TOOL)
        talks.now += 1.0
    assert [wait.turns for wait in talks.returns] == [1, 1, 1]
    talks.turn("a/2", 8, TOOL)
    assert sorted(wait.turns for wait in talks.returns) == [1, 1, 2]


def test_conversations_behind_one_system_prompt_are_told_apart_when_evicted() -> None:
    talks = Talks(400)
    talks.tokens["a/system"] = talks.fresh(16)
    names = [f"a/{number}" for number in range(12)]
    for name in names:
        talks.tokens[name] = list(talks.tokens["a/system"])
        talks.turn(name, 20, TOOL)
        talks.now += 1.0
    talks.turn("a/system", 4, PERSON)
    talks.cache.evict(60)
    for name in names:
        talks.turn(name, 8, TOOL)
    assert sum(wait.turns == 2 for wait in talks.returns) == 12


def test_what_returns_soon_is_kept() -> None:
    """Tools are back after 8 s, people after 300: with room for half, tools keep theirs."""
    talks = Talks(60)
    chance = random.Random(2)
    due: dict[str, float] = {}
    for at in range(4):
        due[f"tool{at}"], due[f"person{at}"] = 8.0 + at, 300.0 * chance.random()
    hits = {"tool": 0, "person": 0}
    asked = {"tool": 0, "person": 0}
    for step in range(1500):
        talk = min(due, key=lambda name: due[name])
        talks.now = due[talk]
        kind = talk.rstrip("0123456789")
        if len(talks.tokens.get(talk, ())) > 60:
            del talks.tokens[talk]  # it begins anew
        known = talk in talks.tokens
        found = talks.turn(talk, 12, TOOL if kind == "tool" else PERSON)
        if known and step > 500:
            asked[kind] += 1
            hits[kind] += found > 0
        pause = 8.0 if kind == "tool" else 300.0
        due[talk] += pause * (0.8 + 0.4 * chance.random())
    assert hits["tool"] > 0.95 * asked["tool"]


class Checked(ReturnAware):
    """It compares each victim with the oldest of each class."""

    def __init__(self) -> None:
        super().__init__()
        self.here: dict[Entry, None] = {}
        self.pops = 0

    def add(self, entry: Entry) -> None:
        assert entry not in self.here
        super().add(entry)
        self.here[entry] = None

    def discard(self, entry: Entry) -> None:
        super().discard(entry)
        del self.here[entry]

    def put_back(self, entry: Entry) -> None:
        super().put_back(entry)
        self.here[entry] = None

    def pop(self) -> Entry | None:
        least = self.least()
        classes: dict[object, list[Entry]] = {}
        for other in self.here:
            classes.setdefault(other.rank[0], []).append(other)
        for others in classes.values():
            oldest = min(others, key=lambda other: other.wait.since)
            assert least is not None
            assert least <= self.worth(oldest)
        entry = super().pop()
        if entry is None:
            assert not classes
            assert least is None
            return None
        assert self.worth(entry) == least
        self.pops += 1
        return entry

    def worth(self, entry: Entry) -> float:
        """Worth as defined, at the octaves that it was ranked with."""
        if entry.rank[0].kind < 0:
            assert entry.wait.over
            return -1.0
        factor: float = entry.rank[0].factor / 2.0**entry.wait.tenant.octaves
        return self.returns.worth(entry.wait, self.clock()) * factor


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from(["radix", "chain"]), st.integers(12, 60))
def test_every_victim_is_worth_least(seed: int, prefix: str, pages: int) -> None:
    """Random conversations, with branches, dropped answers, evictions and pauses of all lengths."""
    policy = Checked()
    talks = Talks(pages, policy, prefix)
    wander(talks, seed, pages, lambda: len(policy) == len(policy.here))
    talks.cache.clear()
    assert not len(policy)
    assert policy.pops or pages > 50


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from(["radix", "chain"]), st.integers(12, 60))
def test_with_shares_every_victim_is_worth_least_to_its_tenant(
    seed: int, prefix: str, pages: int
) -> None:
    """All tenants learn together, each orders its own runs, and their pages are counted right."""
    made: list[Checked] = []

    def make() -> Checked:
        made.append(Checked())
        return made[-1]

    policy = Shares(make, {"a": 2.0})
    talks = Talks(pages, policy, prefix)
    cache = talks.cache

    def right() -> bool:
        assert policy.pages() == {space: n for space, n in cache.namespaces().items() if n}
        return len(policy) == sum(len(one.here) for one in made)

    wander(talks, seed, pages, right)
    assert all(one.returns is talks.returns for one in made[1:]), "the first one is for its name"
    cache.clear()
    assert not any(map(len, made))
    assert not policy.pages()
    assert any(one.pops for one in made) or pages > 50


def wander(talks: Talks, seed: int, pages: int, right: Callable[[], bool]) -> None:
    """Take 120 random turns; what is ``right`` after each."""
    chance = random.Random(seed)
    names = [f"{space}/{number}" for space in "ab" for number in range(4)]
    stripped = chance.choice((0.3, 0.9, 1.0))
    for _ in range(120):
        talks.now += chance.choice((2.0, 4.0, 60.0, 900.0))
        name = chance.choice(names)
        tokens = talks.tokens.get(name, [])
        if len(tokens) > PAGE * pages // 3 or chance.random() < 0.1:
            other = talks.tokens.get(chance.choice([n for n in names if n[0] == name[0]]), [])
            talks.tokens[name] = other[: chance.randrange(len(other) + 1) % (PAGE * pages // 4)]
        ended = chance.choice((TOOL, PERSON, Ended()))
        strip = chance.random() < stripped
        said = chance.randrange(8) if stripped < 0.5 else chance.randrange(PAGE * pages // 4)
        talks.turn(name, chance.randrange(1, 12), ended, answer=said, strip=strip)
        if chance.random() < 0.1:
            talks.cache.evict(chance.randrange(pages))
        assert right()


def test_conversations_that_are_over_leave_nothing_behind() -> None:
    """1,000 tenants come twice, and their pages are gone each time."""
    talks = Talks(40)
    for number in range(1000):
        for _ in range(2):
            talks.turn(f"tenant{number}", 8, TOOL)
            talks.cache.evict(40)
            talks.now += 2.0
        wait = next(iter(talks.returns))
        talks.returns.lost(wait, talks.now)
    assert len(talks.returns) == 0
    assert len(talks.waits._at_roots) <= 16
