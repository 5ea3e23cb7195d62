"""`Returns`: what it learns from the ends of requests."""

from __future__ import annotations

import random

import pytest

from kvkeep.core.errors import InvalidValue
from kvkeep.core.returns import AGES, Ended, Returns, Wait, bucket_of

TOOL, PERSON = Ended("tool_use"), Ended("end_turn")


def follow(returns: Returns, ended: Ended, pause: float, times: int, *, start: float = 0.0) -> Wait:
    """A conversation whose requests all end alike; its last wait is not over."""
    now, wait = start, None
    for _ in range(times):
        if wait is not None:
            now += pause
            returns.returned(wait, now)
        wait = returns.began(ended, 100, now, before=wait)
    assert wait is not None
    return wait


def test_a_class_that_returns_soon_is_worth_more() -> None:
    returns = Returns()
    tool = follow(returns, TOOL, 8.0, 200)
    person = follow(returns, PERSON, 300.0, 200)
    returns.learn(tool.since)
    young = bucket_of(1.0)
    assert returns.worth(tool.kind, young) > 5 * returns.worth(person.kind, young)
    assert returns.worth(person.kind, bucket_of(250.0)) > returns.worth(tool.kind, bucket_of(250.0))


def test_levels_of_a_class() -> None:
    returns = Returns()
    wait = follow(returns, TOOL, 8.0, 3)
    stop, turns, usual, tokens = returns.label(wait.kind)
    assert (stop, turns) == ("tool_use", 2)
    assert usual == bucket_of(8.0) // 4
    assert tokens == (100).bit_length() // 2
    assert wait.turns == 3
    assert wait.gaps == (8.0, 8.0)


def test_waits_are_bounded_and_what_is_dropped_is_counted() -> None:
    returns = Returns(most=10)
    waits = [returns.began(TOOL, 1, float(at)) for at in range(25)]
    assert len(returns) == 10
    assert returns.forgotten == 15
    assert [wait.over for wait in waits] == [True] * 15 + [False] * 10


def test_a_wait_beyond_the_longest_age_is_given_up() -> None:
    returns = Returns()
    wait = returns.began(TOOL, 1, 0.0)
    returns.learn(AGES[-1] - 1)
    assert not wait.over
    returns.learn(AGES[-1])
    assert wait.over


def test_further_stop_reasons_count_as_one() -> None:
    """Texts of a client cannot make classes without end."""
    returns = Returns()
    kinds = {returns.began(Ended(f"reason {at}"), 1, 0.0).kind for at in range(1000)}
    assert len(kinds) == 33


def test_ends_that_a_client_makes_up_take_no_places_for_good() -> None:
    """32 of them come first, and ever new ones between the others' answers."""
    returns, now = Returns(), 0.0
    for at in range(64):
        returns.lost(returns.began(Ended(f"made up {at % 32}"), 1, now, tenant="evil"), now)
    for at in range(600):
        now += 100.0
        returns.lost(returns.began(Ended(f"made up {at}"), 1, now, tenant="evil"), now)
        returns.returned(returns.began(TOOL, 1, now, tenant="good"), now + 8)
        returns.lost(returns.began(PERSON, 1, now, tenant="good"), now + 3600)
        if returns.due:
            returns.learn(now)
    called = returns.began(TOOL, 1, now, tenant="good")
    ended = returns.began(PERSON, 1, now, tenant="good")
    returns.learn(now)
    assert returns.worth(called.kind, 0) > 5 * returns.worth(ended.kind, 0)


def test_a_tenant_whose_conversations_never_return_ends_up_worth_less_than_others() -> None:
    """One floods with conversations that end like all others, and never come back."""
    returns = Returns()
    chance = random.Random(1)
    now = 0.0
    for _ in range(3000):
        now += 1.0
        if chance.random() < 0.8:
            returns.began(TOOL, 100, now, tenant="flood")
        else:
            wait = returns.began(TOOL, 100, now, tenant="honest")
            returns.returned(wait, now + 0.9)
        if returns.due:
            returns.learn(now)
    assert returns.tenant("flood").octaves < 0 < returns.tenant("honest").octaves
    assert returns.tenant("new").octaves == 0


@pytest.mark.parametrize("stop", ["x" * 65, 3, b"stop"])
def test_a_stop_reason_is_a_short_text(stop: object) -> None:
    with pytest.raises(InvalidValue, match="64 characters"):
        Ended(stop)  # type: ignore[arg-type]


@pytest.mark.parametrize("tokens", [-1, 1.5, True])
def test_the_length_of_an_answer_is_a_number(tokens: object) -> None:
    with pytest.raises(InvalidValue, match="tokens"):
        Ended(None, tokens)  # type: ignore[arg-type]


def test_classes_are_bounded() -> None:
    returns = Returns()
    for number in range(20_000):
        ended = Ended(f"stop {number % 50}", None)
        wait = returns.began(ended, 1 << number % 37, float(number))
        returns.returned(wait, number + 4.0 ** (number % 11))
        again = returns.began(ended, 1 << number % 31, float(number), before=wait)
        assert returns.worth(again.kind, 0) >= 0
    assert len(returns.times) <= 4096
