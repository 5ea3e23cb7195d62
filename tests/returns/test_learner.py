"""`Returns`: what it learns from the ends of requests."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvkeep.core.errors import InvalidValue
from kvkeep.core.returns import Answers, Ended, Returns, Wait, gittins

TOOL, PERSON = Ended("tool_use"), Ended("end_turn")


def follow(returns: Returns, ended: Ended, pause: float, times: int, *, start: float = 0.0) -> Wait:
    """A conversation whose requests all end alike; its last wait is not over."""
    now, wait = start, None
    for _ in range(times):
        if wait is not None:
            now += pause
            returns.returned(wait, now)
        wait = returns.began(ended, 100, now, before=wait)
        returns.study(now)
    assert wait is not None
    return wait


# --- times ---------------------------------------------------------------------------------------


def test_a_class_that_returns_soon_is_worth_more() -> None:
    returns = Returns()
    tool = follow(returns, TOOL, 8.0, 200)
    person = follow(returns, PERSON, 300.0, 200, start=2000.0)
    assert returns.worth(tool, tool.since + 1) > 5 * returns.worth(person, person.since + 1)
    assert returns.worth(person, person.since + 250) > returns.worth(tool, tool.since + 250)


def test_a_conversation_is_followed_over_its_turns() -> None:
    returns = Returns()
    wait = follow(returns, TOOL, 8.0, 9)
    assert wait.turns == 9
    assert wait.gaps == (8.0,) * 5
    assert list(returns) == [wait]


def test_conversations_that_never_return_count() -> None:
    returns = Returns()
    for at in range(1000):
        returns.returned(returns.began(TOOL, 1, float(at)), at + 30.0)
        returns.study(at + 30.0)
    alone = returns.worth(returns.began(TOOL, 1, 1030.0), 1030.0)
    for _ in range(1000):
        returns.began(TOOL, 1, 1030.0)
    for _ in range(4):  # they wait for long
        for _ in range(1000):
            returns.lost(returns.began(PERSON, 1, 3000.0), 3000.0)
        returns.study(3000.0)
    wait = returns.began(TOOL, 1, 3000.0)
    assert returns.worth(wait, 3000.0) < 0.6 * alone


def test_a_class_leans_on_the_more_general_one_until_it_has_seen_enough() -> None:
    returns = Returns()
    follow(returns, TOOL, 8.0, 400)
    new = returns.began(Ended("new"), 100, 4000.0)
    tool = returns.began(TOOL, 100, 4000.0)
    untaught = Returns()
    assert returns.worth(new, 4001.0) > 3 * untaught.worth(untaught.unknown(4000.0), 4001.0)
    for at in range(300):
        returns.lost(returns.began(Ended("new"), 100, 4000.0 + at), 4600.0 + at)
        returns.study(4600.0 + at)
    assert returns.worth(tool, 4001.0) > 3 * returns.worth(new, 4001.0)


def test_waits_are_bounded() -> None:
    returns = Returns(most=10)
    waits = [returns.began(TOOL, 1, float(at)) for at in range(25)]
    assert len(returns) == 10
    assert [wait.over for wait in waits] == [True] * 15 + [False] * 10
    assert list(returns) == waits[15:]


def test_ends_that_a_client_makes_up_take_no_places_for_good() -> None:
    """32 of them come first, and ever new ones between the others' answers."""
    returns, now = Returns(), 0.0
    for at in range(64):
        returns.lost(returns.began(Ended(f"made up {at % 32}"), 1, now, tenant="evil"), now)
    for at in range(600):
        now += 100.0
        for flood in range(4):
            ended = Ended(f"made up {4 * at + flood}")
            returns.lost(returns.began(ended, 1, now, tenant="evil"), now)
        returns.returned(returns.began(TOOL, 1, now, tenant="good"), now + 8)
        returns.lost(returns.began(PERSON, 1, now, tenant="good"), now + 3600)
        returns.study(now)
    called = returns.began(TOOL, 1, now, tenant="good")
    answered = returns.began(PERSON, 1, now, tenant="good")
    assert returns.worth(called, now) > 5 * returns.worth(answered, now)


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
        returns.study(now)
    assert returns.tenant("flood").octaves < 0 < returns.tenant("honest").octaves
    assert returns.tenant("new").octaves == 0


def test_tenants_that_are_forgotten_begin_anew() -> None:
    returns = Returns(most=100)
    for at in range(50):
        returns.began(TOOL, 100, float(at), tenant="flood")
    for other in range(1024):
        returns.tenant(other)
    for _ in range(200):
        returns.returned(returns.began(TOOL, 100, 100.0, tenant="flood"), 103.0)
        returns.study(103.0)
    assert returns.tenant("flood").octaves >= 0


def test_classes_are_bounded() -> None:
    returns = Returns()
    for number in range(20_000):
        ended = Ended(f"stop {number % 50}", None)
        wait = returns.began(ended, 1 << number % 37, float(number))
        returns.returned(wait, number + 4.0 ** (number % 11))
        again = returns.began(ended, 1 << number % 31, float(number), before=wait)
        returns.study(float(number))
        assert returns.worth(again, float(number)) > 0
    assert len(returns.worths) <= 512


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(0, 1), min_size=4, max_size=4), st.integers(1, 9))
def test_worth_is_the_best_ratio_over_all_times_to_give_up(
    chances: list[float], width: int
) -> None:
    widths = np.array([2.0, width, 7.0, 5.0])
    index = gittins(np.array([chances]), widths)[0]
    for begin in range(4):
        stays, came, spent, best = 1.0, 0.0, 0.0, 0.0
        for chance, seconds in zip(chances[begin:], widths[begin:], strict=True):
            hazard = min(chance, 0.999)
            came += stays * hazard
            spent += stays * seconds * (1 - hazard / 2)
            stays *= 1 - hazard
            best = max(best, came / spent)
        assert index[begin] == pytest.approx(best, rel=1e-6, abs=1e-9)


@pytest.mark.parametrize("stop", ["x" * 65, 3, b"stop"])
def test_a_stop_reason_is_a_short_text(stop: object) -> None:
    with pytest.raises(InvalidValue, match="64 characters"):
        Ended(stop)  # type: ignore[arg-type]


@pytest.mark.parametrize("tokens", [-1, 1.5, True])
def test_the_length_of_an_answer_is_a_number(tokens: object) -> None:
    with pytest.raises(InvalidValue, match="tokens"):
        Ended(None, tokens)  # type: ignore[arg-type]


# --- answers -------------------------------------------------------------------------------------


def test_answers_that_are_never_read_again_are_worth_nothing() -> None:
    answers = Answers()
    for _ in range(8):
        assert answers.worth(("stop", 7), 100) == 100, "until something is known"
        answers.returned(("stop", 7), 100, 0)
    assert answers.worth(("stop", 7), 100) == 0
    assert answers.worth(("length", 7), 100) == 100
    for _ in range(4):
        answers.returned(("stop", 7), 100, 100)
    assert answers.worth(("stop", 7), 100) == 100, "one in five is read again"


def test_the_part_that_is_read_again_is_worth_storing() -> None:
    answers = Answers()
    for length in range(50, 70):
        answers.returned(("stop", None), length, 16)
    assert answers.worth(("stop", None), 100) == 16
    assert answers.worth(("stop", None), 10) == 10
    assert answers.sure(100) == 16


def test_a_common_first_token_tells_answers_apart() -> None:
    answers = Answers()
    for number in range(200):
        answers.returned(("stop", 7), 100, 0)
        answers.returned(("stop", 1000 + number), 100, 100)
    assert answers.worth(("stop", 7), 100) == 0
    assert answers.worth(("stop", 5000), 100) == 100
    assert answers.sure(100) == 0
