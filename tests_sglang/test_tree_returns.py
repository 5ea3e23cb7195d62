"""kvkeep's tree inside SGLang with the policy `returns`: conversations, their answers and ends."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.managers.schedule_batch import (
    FINISH_ABORT,
    FINISH_LENGTH,
    FINISH_MATCHED_STR,
    FINISH_MATCHED_TOKEN,
)
from sglang.srt.mem_cache.common import release_kv_cache
from test_tree import Walk
from test_tree_attacks import Attack
from tree_scheduler import Scheduler, memory, request

from kvkeep.core.eviction import policy as named
from kvkeep.integrations.sglang.tree import FinishedAnswers, KVKeepTree

PAGE, END = 4, 7


class Talks:
    """Conversations in a tree whose clock the test sets."""

    def __init__(self, pages: int, page: int = PAGE, **more: Any) -> None:
        self.now = 0.0
        params = memory(page, pages, row=2048, **more)
        tree = KVKeepTree(params, lambda: named("returns"), clock=lambda: self.now)
        self.made = Scheduler(tree, params)
        self.tree = tree
        self.tokens: dict[str, list[int]] = {}
        self.next_token = 10

    @property
    def waits(self) -> list[Any]:
        assert self.tree._returns is not None
        return list(self.tree.policy.returns)

    def fresh(self, count: int) -> list[int]:
        self.next_token += count
        return list(range(self.next_token - count, self.next_token))

    def begin(self, talk: str, more: int, answer: int = 0) -> Any:
        prompt = self.tokens[talk] = self.tokens.get(talk, []) + self.fresh(more)
        req = self.made.admit(prompt, cache_salt=talk.split("/", maxsplit=1)[0])
        assert req is not None
        for token in [*self.fresh(answer - 1), END][:answer]:
            assert self.made.decode(req, token)
        return req

    def finish(self, req: Any, reason: Any) -> None:
        self.made.running.remove(req)
        req.finished_reason = reason
        release_kv_cache(req, self.made.cache, checkpoint=True)
        self.made.cache.check_integrity()

    def turn(
        self, talk: str, more: int, reason: Any, answer: int = 0, *, strip: bool = False
    ) -> int:
        """The next request of a conversation; return the tokens that were cached."""
        req = self.begin(talk, more, answer)
        self.finish(req, reason)
        if not strip:
            self.tokens[talk] += list(req.output_ids)
        return self.made.matched[-1]

    def cached(self, talk: str) -> int:
        salt = talk.split("/", maxsplit=1)[0]
        return len(self.made.match([*self.tokens[talk], 0], cache_salt=salt))


TOOL, PERSON = FINISH_MATCHED_TOKEN(matched=END), FINISH_LENGTH(length=0)


@pytest.mark.parametrize(("page", "eagle"), [(1, False), (4, False), (4, True)])
def test_a_prompt_that_extends_a_request_is_its_return(page: int, *, eagle: bool) -> None:
    talks = Talks(400, page, is_eagle=eagle)
    for _ in range(5):
        talks.turn("a", 20, TOOL, 6)
        talks.now += 8.0
    (wait,) = talks.waits
    assert (wait.turns, wait.gaps) == (5, (8.0,) * 4)
    talks.tokens["b"] = talks.tokens["a"]
    talks.turn("b", 20, TOOL)  # of another tenant
    assert sorted(one.turns for one in talks.waits) == [1, 5]
    talks.made.flush()
    assert talks.waits == []


def test_the_return_of_a_conversation_whose_pages_are_gone() -> None:
    talks = Talks(200)
    for name in ("a/1", "a/2"):
        talks.turn(name, 24, TOOL, 6)
    talks.now += 5.0
    assert talks.made.evict(10**6)
    for name in ("a/1", "a/2"):
        assert talks.turn(name, 8, TOOL) == 0
        talks.now += 1.0
    assert [(wait.turns, wait.gaps) for wait in talks.waits] == [(2, (5.0,)), (2, (6.0,))]


def test_a_request_that_was_retracted_began_once_and_ends_once() -> None:
    talks = Talks(200)
    talks.turn("a", 20, TOOL, 4)
    talks.now += 3.0
    req = talks.begin("a", 8, 5)
    assert talks.waits == []
    talks.made.retract(req)
    talks.now += 60.0
    assert talks.made.resume(req)
    talks.finish(req, TOOL)
    (wait,) = talks.waits
    assert (wait.turns, wait.gaps, wait.since) == (2, (3.0,), 63.0)
    assert (wait.prompt, wait.answer) == (32, 5)


def test_what_returns_soon_is_kept() -> None:
    """Tools are back after 8 s, people after 300: with room for half, tools keep theirs."""
    talks = Talks(70)
    chance = random.Random(2)
    due: dict[str, float] = {}
    for at in range(4):
        due[f"tool{at}"], due[f"person{at}"] = 8.0 + at, 300.0 * chance.random()
    hits = {"tool": 0, "person": 0}
    asked = {"tool": 0, "person": 0}
    for step in range(1200):
        talk = min(due, key=lambda name: due[name])
        talks.now = due[talk]
        kind = talk.rstrip("0123456789")
        if len(talks.tokens.get(talk, ())) > 60:
            del talks.tokens[talk]  # it begins anew
        known = talk in talks.tokens
        found = talks.turn(talk, 12, TOOL if kind == "tool" else PERSON, 1)
        if known and step > 400:
            asked[kind] += 1
            hits[kind] += found > 0
        pause = 8.0 if kind == "tool" else 300.0
        due[talk] += pause * (0.8 + 0.4 * chance.random())
    assert hits["tool"] > 0.95 * asked["tool"]


def test_answers_that_no_prompt_contains_go_before_the_next_prompt_has_come() -> None:
    talks = Talks(400)
    for _ in range(12):
        talks.turn("a/1", 8, TOOL, 40, strip=True)
        talks.now += 3.0
    talks.made.evict(10**6)
    for name in ("a/2", "a/3"):
        talks.turn(name, 40, TOOL, 40, strip=True)
    assert talks.made.evict(80) == 80  # the two answers
    assert talks.cached("a/2") == talks.cached("a/3") == 40
    talks.now += 3.0
    for name in ("a/2", "a/3"):
        assert talks.turn(name, 4, TOOL) == 40
    assert [wait.gaps for wait in talks.waits[-2:]] == [(3.0,), (3.0,)]


def test_ends_of_requests() -> None:
    ends = FinishedAnswers()
    tokenizer = SimpleNamespace(get_added_vocab=lambda: {"<tool>": 5, "<end>": 7})

    def told(reason: Any, answer: list[int], length: int | None = None) -> tuple[Any, ...]:
        req = request("r", [1, 2, 3])
        req.tokenizer, req.finished_reason, req.finished_len = tokenizer, reason, length
        req.output_ids.extend(answer)
        ended = ends.of(req)
        return ended.stop, ended.tokens

    assert told(FINISH_MATCHED_TOKEN(matched=7), [3, 5, 4, 7]) == ("stop 7 after 5", 4)
    assert told(FINISH_MATCHED_TOKEN(matched=7), [3, 4, 7, 9], 3) == ("stop 7", 3)
    assert told(FINISH_MATCHED_STR(matched="x"), [3]) == ("stop text", 1)
    assert told(FINISH_LENGTH(length=2), [3, 4]) == ("length", 2)
    assert told(FINISH_ABORT(), [3]) == ("unfinished", 1)
    tokenizer = SimpleNamespace()
    assert told(FINISH_MATCHED_TOKEN(matched=7), [3, 5, 7]) == ("stop 7", 3)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("page", "eagle"), [(1, False), (4, False), (3, True)])
@pytest.mark.parametrize("kind", [Walk, Attack])
def test_random_schedules(kind: type[Walk], page: int, seed: int, *, eagle: bool) -> None:
    rng = random.Random(seed)
    talks = Talks(rng.choice([12, 40, 90]), page, is_eagle=eagle)

    class Later(kind):  # type: ignore[valid-type, misc]
        def go_on(self) -> None:
            talks.now += rng.choice((2.0, 60.0, 900.0))
            super().go_on()

    walk = Later(talks.made, rng)
    walk.attack(150) if kind is Attack else walk.run(150)
