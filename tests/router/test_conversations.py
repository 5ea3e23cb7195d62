"""`ConversationTable`: which request continues which, what is learned, and what a tenant can do."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvkeep.core.errors import InvalidValue
from kvkeep.core.returns import Ended
from kvkeep.serve.router.answers import UNFINISHED
from kvkeep.serve.router.conversations import ConversationTable, RoutedTurn
from kvkeep.serve.router.expected import ExpectedReturns
from kvkeep.serve.router.prompts import Prompt

TOOL, STOP = Ended("tool_calls", 50), Ended("stop", 200)


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Client:
    """Sends prompts to a table, each answered in two seconds."""

    def __init__(self, table: ConversationTable, clock: Clock, credentials: bytes = b"") -> None:
        self.table = table
        self.clock = clock
        self.credentials = credentials

    def ask(
        self,
        tokens: list[int] | None,
        ended: Ended = STOP,
        *,
        at: str = "one",
        **named: str,
    ) -> RoutedTurn:
        prompt = Prompt(None if tokens is None else np.array(tokens, np.int32), "m", **named)
        turn = self.table.find(prompt, self.credentials)
        assert turn is not None
        self.table.answered(turn)
        self.clock.now += 2.0
        self.table.ended(turn, at, ended)
        return turn


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def table(clock: Clock) -> ConversationTable:
    return ConversationTable(clock=clock)


@pytest.fixture
def client(table: ConversationTable, clock: Clock) -> Client:
    return Client(table, clock)


def row(length: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(1000), k=length)


@pytest.mark.parametrize("length", [16, 17, 63, 64, 65, 72, 73, 127, 128, 136, 1000, 4103])
def test_a_prompt_that_extends_another_continues_it(client: Client, length: int) -> None:
    prompt = row(length)
    first = client.ask(prompt, at="two")
    assert client.table.find(Prompt(np.array(row(length, 1), np.int32), "m")).conversation is None
    # The header of the answer may be another one; what is before may not.
    client.clock.now += 30.0
    later = client.ask(prompt[:-8] + row(200, 2))
    assert later.conversation is first.conversation
    assert (later.by, later.conversation.wait.gaps) == ("prefix", (30.0,))
    assert client.table.returned == {"session": 0, "prefix": 1, "key": 0}
    other = [*prompt[:-9], 1001, *row(200, 2)]
    assert client.ask(other).conversation is not first.conversation
    client.table.check()


def test_an_earlier_prompt_is_recognised_too(client: Client) -> None:
    """A template may drop the reasoning of all answers since: their prompts are no prefixes."""
    prompt = row(300)
    first = client.ask(prompt)
    client.ask(prompt + row(40, 1))
    assert client.ask(prompt + row(100, 2)).conversation is first.conversation
    assert client.ask(prompt + row(100, 3)).conversation is first.conversation
    assert len(client.table) == 1
    assert client.ask(prompt + row(100, 4)).conversation is not first.conversation, "long ago"


def test_a_session_is_one_conversation_and_a_key_may_be_many(client: Client) -> None:
    one = client.ask(row(100, 1), session="s").conversation
    assert client.ask(row(100, 2), session="s").conversation is one
    assert client.ask(None, session="s").conversation is one
    assert client.ask(row(100, 1), session="other").conversation is not one

    key = client.ask(row(100, 3), key="k").conversation
    other = client.ask(row(100, 4), key="k").conversation
    assert key is not other, "its prompt says that it is another one"
    assert client.ask(row(100, 3) + row(9, 5), key="k").conversation is key
    assert client.ask(None, key="k").conversation is key, "the latest one of the key"
    assert client.table.returned == {"session": 2, "prefix": 1, "key": 1}
    assert client.table.find(Prompt(None, "m")) is None
    assert client.table.find(Prompt(np.arange(15, dtype=np.int32), "m")) is None


def test_tenants_and_models_are_apart(table: ConversationTable, clock: Clock) -> None:
    mine, other = Client(table, clock, b"k1"), Client(table, clock, b"k2")
    first = mine.ask(row(100), session="s", key="k").conversation
    for asked in (
        other.ask(row(100)), other.ask(row(100), session="s"), other.ask(None, key="k"),
        mine.ask(row(100), salt="pepper"), mine.ask(None, session="s", salt="pepper"),
    ):  # fmt: skip
        assert asked.conversation is not first
    elsewhere = Prompt(np.array(row(100), np.int32), "another model")
    assert table.find(elsewhere, b"k1").conversation is None
    assert table.find(Prompt(np.array(row(100), np.int32), "m"), b"k1").conversation is first


def test_requests_side_by_side_are_no_returns(table: ConversationTable, clock: Clock) -> None:
    prompt = Prompt(np.array(row(100), np.int32), "m", session="s")
    turns = [table.find(prompt) for _ in range(3)]
    for turn in turns:
        table.answered(turn)
        clock.now += 1.0
    own = turns[0].conversation
    assert {turn.conversation for turn in turns} == {own}
    assert table.waiting == []
    for turn in turns:
        clock.now += 1.0
        table.ended(turn, "one", STOP)
        table.ended(turn, "one", STOP)  # once is enough
    assert table.waiting == [own]
    assert own.wait.since == clock.now
    assert sum(table.returned.values()) == 0


def test_what_no_instance_answered_changes_nothing(client: Client) -> None:
    table, own = client.table, client.ask(row(100)).conversation
    for _ in range(3):
        turn = table.find(Prompt(np.array(row(100), np.int32), "m"))
        table.ended(turn, "one", UNFINISHED)  # it was refused everywhere
    assert (table.waiting, own.running, sum(table.returned.values())) == ([own], 0, 0)
    assert table.stops["stop"].ended == 1


def test_classes_are_learned(client: Client) -> None:
    """Tools return after 8 seconds, people after 300 or never."""
    table, clock = client.table, client.clock
    for number in range(40):
        prompt = row(64, number)
        for _ in range(3):
            client.ask(prompt, TOOL)
            clock.now += 8.0
            prompt += row(30, number)
        client.ask(prompt, STOP)
        if number % 2:
            clock.now += 300.0
            client.ask(prompt + row(30, number), STOP)
    table.returns.learn(clock.now)
    figures = ExpectedReturns(table).figures(["one", "two"])
    tools, people = figures["stops"]["tool_calls"], figures["stops"]["stop"]
    assert (tools["ended"], tools["returned"], tools["waiting"]) == (120, 120, 0)
    assert (people["ended"], people["returned"], people["waiting"]) == (60, 20, 40)
    assert figures["followed"] == figures["waiting"] == figures["instances"]["one"]["waiting"] == 40
    assert figures["returned"] == {"session": 0, "prefix": 140, "key": 0}
    client.ask(row(64, 500), TOOL, at="two")
    client.ask(row(64, 501), STOP, at="one")
    chances = {own.home: chance for own, chance in table.expected(60.0)[-2:]}
    assert chances["two"] > 0.8
    assert chances["one"] < 0.2


def test_ways_to_end_are_bounded(client: Client) -> None:
    """Whatever words an instance has for it, and however many classes there are already."""
    for number in range(3000):
        ended = Ended(f"word {number % 60}", 1 << number % 37)
        client.ask(None, ended, key=f"k{number % 70}")
        client.clock.now += 4.0 ** (number % 7)
    client.table.check()
    assert len(client.table.stops) == 33
    assert client.table.stops["other"].ended > 100
    assert sum(one.ended for one in client.table.stops.values()) == 3000
    figures = ExpectedReturns(client.table).figures(["one"])
    assert figures["stops"]["other"]["waiting"] > 0


def test_the_largest_tenant_loses_its_oldest(clock: Clock) -> None:
    table = ConversationTable(100, clock=clock)
    flood, small = Client(table, clock, b"flood"), Client(table, clock, b"small")
    mine = [small.ask(row(40, number)).conversation for number in range(20)]
    for number in range(500):
        flood.ask(row(40, 1000 + number), session=f"s{number}")
        table.check()
    assert len(table) == 100
    assert table.forgotten == 420
    for number, own in enumerate(mine):
        assert small.ask([*row(40, number), 1, 2, 3]).conversation is own
    assert len(table.returns) == 100
    # Many tenants with one conversation each: the tables of all stay as small.
    for number in range(300):
        Client(table, clock, b"%d" % number).ask(None, key="k")
        table.check()
    assert len(table) == len(table._tenants) == 100
    assert len(table._sizes) <= 4 * 100 + 66


def test_the_shipped_bound(client: Client) -> None:
    """More conversations than are followed, each of its own session, prompt and pause."""
    table, clock = client.table, client.clock
    rng = np.random.default_rng(8)
    for number in range(34_000):
        prompt = Prompt(rng.integers(0, 1000, 80, np.int32), "m", session=f"s{number}")
        turn = table.find(prompt, b"%d" % (number % 50))
        assert turn is not None
        table.answered(turn)
        clock.now += 0.01
        table.ended(turn, "one", TOOL)
    table.check()
    assert (len(table), table.forgotten) == (32_768, 34_000 - 32_768)
    for held in (table._names, table._ends, table._steps, table.returns):
        assert len(held) <= 32_768
    assert {len(one.own) for one in table._tenants.values()} <= {655, 656}


def test_sums_of_many_are_not_made_anew_at_once(clock: Clock) -> None:
    table = ConversationTable(clock=clock)
    expected = ExpectedReturns(table, clock=clock)
    client = Client(table, clock)
    for number in range(1000):
        assert expected.total.waiting == number
        client.ask(None, key=f"k{number}")
    client.ask(None, key="one more")
    assert expected.total.waiting == 1001
    client.ask(None, key="and one")
    clock.now -= 2.0  # as if it took no time
    assert expected.total.waiting == 1001
    clock.now += 2.0
    assert expected.total.waiting == 1002


def test_prompts_that_differ_at_the_end_alone_are_no_returns(clock: Clock) -> None:
    """A batch: one question, about one thing after the other."""
    table = ConversationTable(clock=clock)
    client = Client(table, clock)
    for number in range(10):
        client.ask([*range(100), number])
    assert table.returned["prefix"] == 0
    client.ask([*range(100), 9, *range(200, 260)])
    assert table.returned["prefix"] == 1


def test_a_bound_below_one_is_refused() -> None:
    with pytest.raises(InvalidValue, match="most"):
        ConversationTable(0)
    one = ConversationTable(1)
    client = Client(one, Clock())
    client.ask(None, key="a")
    client.ask(None, key="b")
    one.check()
    assert (len(one), one.forgotten) == (1, 1)


class AgainstLists(RuleBasedStateMachine):
    """The table against one that compares lists of tokens."""

    MOST = 6

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.table = ConversationTable(self.MOST, clock=self.clock)
        self.running: list[tuple[RoutedTurn, Any, tuple[Any, ...]]] = []
        self.prompts: list[list[int]] = [row(20, 1), row(70, 2)]
        # In the model a conversation is a number; these are its ends, its tenant, its wait.
        self.numbers: dict[Any, int] = {}
        self.ends: dict[tuple[Any, ...], int] = {}
        self.own_ends: dict[int, list[tuple[Any, ...]]] = {}
        self.lengths: dict[int, int] = {}  # of their last prompts

    def _known(self) -> set[Any]:
        return {own for one in self.table._tenants.values() for own in one.own}

    @rule(
        tenant=st.sampled_from([b"a", b"b"]),
        at=st.integers(0, 30),
        cut=st.integers(0, 12),
        more=st.integers(0, 90),
        seed=st.integers(0, 2),
    )
    def begin(self, tenant: bytes, at: int, cut: int, more: int, seed: int) -> None:
        known = self.prompts[at % len(self.prompts)]
        prompt = known[: max(16, len(known) - cut)] + row(more, seed)
        self.prompts.append(prompt[:300])
        turn = self.table.find(Prompt(np.array(prompt[:300], np.int32), "m"), tenant)
        tokens = tuple(prompt[:300])
        expected = None
        for length in range(len(tokens), 0, -1):
            if (tenant, *tokens[:length]) in self.ends:
                expected = self.ends[tenant, *tokens[:length]]
                break
        found = turn.conversation
        assert (None if found is None else self.numbers[found]) == expected
        before = self._known()
        was_waiting = found in self.table.waiting
        goes_on = found is not None and len(tokens) > self.lengths[self.numbers[found]]
        returned = self.table.returned["prefix"]
        self.table.answered(turn)
        assert self.table.returned["prefix"] - returned == (was_waiting and goes_on)
        for own in before - self._known():
            self._gone(own)
        if found is None:
            self.numbers[turn.conversation] = len(self.numbers)
            self.own_ends[self.numbers[turn.conversation]] = []
        self.running.append((turn, turn.conversation, (tenant, *tokens[:-8])))
        self.clock.now += 1.0

    def _gone(self, own: Any) -> None:
        number = self.numbers[own]
        for end in self.own_ends[number]:
            if self.ends.get(end) == number:
                del self.ends[end]
        self.own_ends[number] = []

    @precondition(lambda self: self.running)
    @rule(at=st.integers(0, 10))
    def end(self, at: int) -> None:
        turn, own, end = self.running.pop(at % len(self.running))
        self.table.ended(turn, "one", STOP)
        if own not in self._known():
            return
        number = self.numbers[own]
        self.lengths[number] = turn.tokens
        mine = self.own_ends[number]
        if end in mine:
            mine.remove(end)
        mine.append(end)
        self.ends[end] = number
        if len(mine) > 3:
            gone = mine.pop(0)
            if self.ends.get(gone) == number:
                del self.ends[gone]

    @invariant()
    def agrees(self) -> None:
        self.table.check()
        assert len(self.table) <= self.MOST


AgainstLists.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestAgainstLists = AgainstLists.TestCase
