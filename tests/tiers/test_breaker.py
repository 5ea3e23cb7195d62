"""The circuit breaker: a table of its steps, with a clock that is given."""

from __future__ import annotations

import logging
import threading

import pytest

from kvkeep.store.tiers.breaker import Breaker


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def play(steps: str, *, limit: int = 3, longest: float = 60.0) -> list[str]:
    """Run steps, each a letter, or seconds that go by; what was said after each letter.

    f: a failure, s: a success, a: may I? (yes or no), ?: the state.
    """
    clock = Clock()
    breaker = Breaker("here", limit=limit, pause=1.0, longest=longest, clock=clock)
    said = []
    for step in steps.split():
        if step == "f":
            breaker.failed("why")
        elif step == "s":
            breaker.succeeded()
        elif step == "a":
            blocks, answer = breaker.blocks, breaker.allows()
            assert blocks != answer
            said.append("yes" if answer else "no")
        elif step == "?":
            said.append(breaker.state)
        else:
            clock.now += float(step)
    return said


@pytest.mark.parametrize(
    ("steps", "said"),
    [
        ("? a a", "closed yes yes"),
        ("f f a ?", "yes closed"),
        ("f f s f f ?", "closed"),  # in a row
        ("f f f ? a", "open no"),
        ("f f f 0.9 a 0.1 ? a ? a", "no open yes trying no"),  # one is let through
        ("f f f 1 a s ? a a", "yes closed yes yes"),
        ("f f f 1 a s f f ? f ?", "yes closed open"),  # it counts from nothing again
        ("f f f 1 a f ? 1.9 a 0.1 a", "yes open no yes"),  # twice as long
        ("f f f 1 a f 2 a f 4 a f 7.9 a 0.1 a", "yes yes yes no yes"),
        ("f f f 1 a f 2 a s f f f 0.9 a 0.1 a", "yes yes no yes"),  # short again
        ("f f f f f f 0.9 a 0.1 a", "no yes"),  # those began before it opened
        ("f f f s ? a", "closed yes"),  # late, but it answered
        ("f f f 1 a 0.9 a 0.1 a ?", "yes no yes trying"),  # a try that never comes back
        ("f f f 5 f a 1.9 a 0.1 a", "no no yes"),  # who was late without asking tells as much
    ],
)
def test_steps(steps: str, said: str) -> None:
    assert play(steps) == said.split()


def test_the_pause_has_a_longest() -> None:
    assert play("f 1 a f 2 a f 3 a f 3 a", limit=1, longest=3.0) == ["yes"] * 4


def test_what_it_says_and_counts(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    breaker = Breaker("far", limit=1, clock=clock)
    with caplog.at_level(logging.INFO, "kvkeep.tiers"):
        breaker.failed("no route")
        clock.now += 1
        assert breaker.allows()
        breaker.failed("no route")
        breaker.succeeded()
        breaker.succeeded()
    assert breaker.opened == 2
    texts = [record.getMessage() for record in caplog.records]
    assert texts == [
        "tier far: circuit breaker open for 1 s: no route",
        "tier far: circuit breaker open for 2 s: no route",
        "tier far: circuit breaker closed",
    ]


def test_of_many_threads_one_tries() -> None:
    clock = Clock()
    breaker = Breaker("here", limit=1, clock=clock)
    breaker.failed("why")
    clock.now += 1
    answers: list[bool] = []
    gate = threading.Barrier(8)

    def ask() -> None:
        gate.wait()
        answers.append(breaker.allows())

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(answers) == [False] * 7 + [True]
