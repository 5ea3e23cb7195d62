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
    return Health(NAMES, clock=lambda: now[0])


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


def test_a_suspect_is_logged_once(health, caplog):
    health.doubt("a", Doubt.CLIENT_LEFT)
    health.doubt("a", Doubt.CLIENT_LEFT)
    assert [record.getMessage() for record in caplog.records] == [
        f"a is suspect ({Doubt.CLIENT_LEFT.value}): no requests until it answers a probe"
    ]
    health.probed("a", answered=True)
    health.doubt("a", Doubt.CLIENT_LEFT)
    assert len([one for one in caplog.records if "suspect" in one.getMessage()]) == 2


def test_rests_grow_while_nothing_is_answered(health, now):
    rests = []
    for _ in range(8):
        health.failed("a")
        health.failed("a")  # together they are one
        health.probed("a", answered=True)
        begun = now[0]
        while health.state("a") is InstanceHealth.RESTING:
            now[0] += 0.5
        rests.append(now[0] - begun)
    assert rests == [1, 2, 4, 8, 16, 30, 30, 30]
    health.worked("a")
    health.failed("a")
    health.probed("a", answered=True)
    now[0] += 1.0
    assert health.state("a") is InstanceHealth.UP


def test_what_is_asked_next(health, now):
    assert left(health) == NAMES
    health.failed("a")
    health.probed("a", answered=True)
    health.doubt("b", Doubt.TOKENIZE)
    assert left(health) == ["c"]
    assert left(health, {"c"}) == ["a"]  # it rests, but answers probes
    assert left(health, {"a", "c"}) == ["b"]
    assert left(health, NAMES) == []


def test_a_client_that_leaves_is_a_doubt_and_a_failure_where_nobody_is_answered(health, now):
    health.left("a", now[0])
    assert health.state("a") is InstanceHealth.SUSPECT
    health.probed("a", answered=True)
    assert health.state("a") is InstanceHealth.UP
    since = now[0]
    now[0] += 2.0
    health.worked("a")
    now[0] += 20.0
    health.left("a", since)  # others were answered meanwhile: it was only slow
    health.probed("a", answered=True)
    assert health.state("a") is InstanceHealth.UP
    since = now[0]
    now[0] += 5.0
    health.left("a", since)
    health.probed("a", answered=True)
    assert health.state("a") is InstanceHealth.RESTING


def test_what_waits_is_given_up_after_three_probes_where_another_one_is_up(health):
    given_up: list[str] = []

    def waiting(name: str, others: set[str]):
        return health.waiting(name, others, lambda: given_up.append(name))

    with waiting("a", {"b"}) as one, waiting("a", set()) as last, waiting("c", {"a"}) as other:
        for count in range(1, 6):
            health.probed("a", answered=False)
            assert given_up == (["a"] if count > 2 else [])
        assert (one.abandoned, last.abandoned, other.abandoned) == (True, False, False)
    with waiting("a", {"b"}):
        health.doubt("b", Doubt.REQUEST)
        health.probed("a", answered=False)
        assert given_up == ["a"]  # nobody is up to whom it could go
        health.heard("a")
        health.probed("b", answered=True)
        assert given_up == ["a"]  # a stream goes on there
    health.probed("c", answered=True)
    assert given_up == ["a"]


def test_doubts_are_told(health):
    told: list[tuple[str, Doubt]] = []
    health.subscribe(lambda name, why: told.append((name, why)))
    health.probed("a", answered=False)
    health.probed("a", answered=False)  # known already
    health.failed("b")
    assert told == [("a", Doubt.PROBE), ("b", Doubt.REQUEST)]


@pytest.mark.parametrize("seconds", [0.0, -1.0, math.nan, math.inf])
@pytest.mark.parametrize(
    "name", ["first_byte_s", "idle_s", "probe_every_s", "probe_s", "tokenize_s"]
)
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
        self.health = Health(clock=lambda: self.time)
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
