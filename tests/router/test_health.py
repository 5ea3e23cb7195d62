"""What is thought of instances, step by step and by random lives."""

from __future__ import annotations

import math

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvkeep.core.errors import InvalidValue
from kvkeep.serve.router.health import Doubt, Health, InstanceHealth, Timeouts

NAMES = ["a", "b", "c"]


def left(health: Health, tried=()) -> list[str]:
    """The instances that a request may go to next."""
    barred = health.barred(tried)
    return [name for name in health.names() if name not in barred]


@pytest.fixture
def now() -> list[float]:
    return [100.0]


@pytest.fixture
def health(now) -> Health:
    health = Health(lambda: now[0])
    for name in NAMES:
        health.add(name)
    return health


def test_a_failure_is_over_after_a_rest_and_a_probe(health, now):
    health.failed("a")
    assert health.state("a") is InstanceHealth.SUSPECT
    assert health.wake("a").is_set()
    assert health.up() == ["b", "c"]
    health.probed("a", answered=True)
    assert health.state("a") is InstanceHealth.RESTING
    assert health.up() == ["b", "c"]
    now[0] += 1.0
    assert health.state("a") is InstanceHealth.UP


@pytest.mark.parametrize("seconds", [0.0, -1.0, math.nan, math.inf])
@pytest.mark.parametrize("name", ["first_byte_s", "idle_s", "probe_every_s", "probe_s"])
def test_times_that_are_none(name, seconds):
    with pytest.raises(InvalidValue, match=name):
        Timeouts(**{name: seconds})


def test_tries_that_are_none():
    with pytest.raises(InvalidValue, match="tries"):
        Timeouts(tries=0)


class Lives(RuleBasedStateMachine):
    """Random events at three instances against the rules, said once more in the plainest way."""

    @initialize()
    def begin(self) -> None:
        self.time = 0.0
        self.health = Health(lambda: self.time)
        self.joined = dict.fromkeys(NAMES, False)
        self.forgotten = dict.fromkeys(NAMES, True)
        for name in NAMES:
            self.come(name, True)

    @rule(name=st.sampled_from(NAMES), proven=st.booleans())
    def come(self, name, proven):
        self.health.add(name, proven=proven)
        if self.forgotten[name]:
            for part, value in (
                ("suspect", not proven), ("rests", 0.0), ("failures", 0), ("unanswered", 0),
            ):  # fmt: skip
                self.__dict__.setdefault(part, {})[name] = value
        self.joined[name], self.forgotten[name] = True, False

    @rule(name=st.sampled_from(NAMES))
    def leave(self, name):
        self.health.drain(name)
        self.joined[name] = False

    @rule(name=st.sampled_from(NAMES))
    def forget(self, name):
        self.health.remove(name)
        self.joined[name], self.forgotten[name] = False, True
        self.unanswered[name] = 0

    @rule(seconds=st.sampled_from([0.1, 1.0, 7.0]))
    def wait(self, seconds):
        self.time += seconds

    @rule(name=st.sampled_from(NAMES))
    def fail(self, name):
        self.health.failed(name)
        if self.forgotten[name]:
            return
        if self.rests[name] <= self.time:
            self.rests[name] = self.time + min(30.0, 2.0 ** self.failures[name])
            self.failures[name] += 1
        self.suspect[name] = True

    @rule(name=st.sampled_from(NAMES))
    def work(self, name):
        self.health.worked(name)
        self.suspect[name], self.rests[name], self.failures[name] = False, 0.0, 0
        self.unanswered[name] = 0

    @rule(name=st.sampled_from(NAMES), answered=st.booleans())
    def probe(self, name, answered):
        self.health.probed(name, answered=answered)
        self.suspect[name] = not answered
        self.unanswered[name] = 0 if answered or self.forgotten[name] else self.unanswered[name] + 1

    @rule(name=st.sampled_from(NAMES), why=st.sampled_from(Doubt))
    def doubt(self, name, why):
        self.health.doubt(name, why)
        self.suspect[name] = True

    @rule(name=st.sampled_from(NAMES))
    def hear(self, name):
        self.health.heard(name)
        self.unanswered[name] = 0

    @rule(name=st.sampled_from(NAMES))
    def client_leaves(self, name):
        self.health.left(name, self.time)
        self.suspect[name] = True

    @invariant()
    def it_is_as_said(self) -> None:
        if not hasattr(self, "health"):
            return
        by_state: dict[InstanceHealth, set[str]] = {state: set() for state in InstanceHealth}
        for name in NAMES:
            resting = self.rests[name] > self.time
            state = (
                InstanceHealth.LEAVING
                if not self.joined[name]
                else InstanceHealth.SUSPECT
                if self.suspect[name]
                else InstanceHealth.RESTING
                if resting
                else InstanceHealth.UP
            )
            assert self.health.state(name) is state
            assert self.health.silent(name) == (self.unanswered[name] >= 3)
            by_state[state].add(name)
        assert set(self.health.up()) == by_state[InstanceHealth.UP]
        assert set(self.health.joined()) == {name for name in NAMES if self.joined[name]}
        assert set(self.health.names()) == {name for name in NAMES if not self.forgotten[name]}
        for tried in (set(), {"a"}, {"a", "c"}, set(NAMES)):
            wanted = next(
                (
                    some
                    for state in (InstanceHealth.UP, InstanceHealth.RESTING, InstanceHealth.SUSPECT)
                    if (some := by_state[state] - tried)
                ),
                set(),
            )
            assert set(left(self.health, tried)) == wanted


TestLives = Lives.TestCase
TestLives.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
