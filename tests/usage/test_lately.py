"""Counters over the last minute: against a plain list of all that was noted."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvkeep.observe.usage.history import EVERY_S, Growth, Lately

NAMES = [("evicted", "pool"), ("errors", "file"), ("errors", "valkey")]


class LatelyMachine(RuleBasedStateMachine):
    """The clock goes on, counters grow or begin anew, and samples are noted at any time."""

    def __init__(self):
        super().__init__()
        self.now = 50.0
        self.counts = {}
        self.noted = [(self.now, {})]
        self.lately = Lately(lambda: self.now)

    @rule(seconds=st.sampled_from([0.3, 1.0, EVERY_S, 7.5, 61.0, 700.0]))
    def time_passes(self, seconds):
        self.now += seconds

    @rule(name=st.sampled_from(NAMES), more=st.integers(0, 1000))
    def grows(self, name, more):
        self.counts[name] = self.counts.get(name, 0) + more

    @rule(name=st.sampled_from(NAMES))
    def begins_anew(self, name):
        if name in self.counts:
            self.counts[name] = 0

    @rule()
    def is_noted(self):
        due = self.lately.due
        assert due == (self.now - self.noted[-1][0] >= EVERY_S)
        self.lately.note(self.counts)
        if due:
            self.noted.append((self.now, dict(self.counts)))

    def before(self, seconds):
        old = [counts for at, counts in self.noted[-122:] if at <= self.now - seconds]
        return old[-1] if old else self.noted[-122:][0][1]

    @invariant()
    def growth_is_that_since_the_sample_before(self):
        found = self.lately.growth(self.counts)
        assert found.keys() == self.counts.keys()
        for name, count in self.counts.items():
            parts = []
            for seconds in (60, 600):
                old = self.before(seconds).get(name, 0)
                parts.append(count - old if count >= old else count)
            assert found[name] == Growth(*parts, count)


TestLately = LatelyMachine.TestCase
TestLately.settings = settings(max_examples=60, stateful_step_count=60, deadline=None)


def test_a_minute_is_a_minute_where_samples_come_as_they_should():
    """With a sample every five seconds, what happened 66 seconds ago is no longer in it."""
    now = 0.0
    lately = Lately(lambda: now)
    happened: list[float] = []
    name = "errors", "file"
    for second in range(2000):
        now = float(second)
        if second % 17 == 0:
            happened.append(now)
        lately.note({name: len(happened)})
        told = lately.growth({name: len(happened)})[name]
        assert sum(at > now - 60 for at in happened) <= told.minute
        assert told.minute <= sum(at > now - 60 - 2 * EVERY_S for at in happened)
        assert sum(at > now - 600 for at in happened) <= told.ten_minutes
        assert told.ten_minutes <= sum(at > now - 600 - 2 * EVERY_S for at in happened)
        assert told.total == len(happened)
    assert len(lately._samples) <= 122
