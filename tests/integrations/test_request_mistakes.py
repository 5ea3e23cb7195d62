"""Wrong ``kv_transfer_params`` in vLLM: ignored, counted, and logged once each, within bounds."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvkeep.core.errors import InvalidValue
from kvkeep.integrations.vllm.options import MOST_MISTAKES, RequestMistakes, RequestOptions

if TYPE_CHECKING:
    from collections.abc import Iterator

HOUR = 3600.0


class Tally:
    """Counts in an hour, as those of the connector."""

    def __init__(self) -> None:
        self.ignored = 0

    def add(self, *, ignored_params: int) -> None:
        self.ignored += ignored_params


class Kept(logging.Handler):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        assert record.levelno == logging.WARNING
        self.said.append(record.getMessage())


@pytest.fixture
def kept() -> Iterator[Kept]:
    handler, log = Kept(), logging.getLogger("kvkeep.vllm")
    log.addHandler(handler)
    yield handler
    log.removeHandler(handler)


def wrong(number: int) -> dict[str, object]:
    return {"kvkeep": {"ttl": -number}}


def test_the_request_what_was_given_and_what_is_right_are_named(kept: Kept) -> None:
    tally = Tally()
    mistakes = RequestMistakes(tally)  # type: ignore[arg-type]
    assert mistakes.options("cmpl-7", {"kvkeep": {"stor": True}}) == RequestOptions()
    (said,) = kept.said
    assert "request 'cmpl-7'" in said
    assert "kvkeep has 'stor'; there are store, load, ttl, pin; did you mean 'store'?" in (said)
    assert tally.ignored == 1


def test_right_ones_are_followed_and_nothing_is_logged(kept: Kept) -> None:
    tally = Tally()
    mistakes = RequestMistakes(tally)  # type: ignore[arg-type]
    assert mistakes.options("a", {"kvkeep": {"load": False}}) == RequestOptions(load=False)
    assert mistakes.options("b", None) == RequestOptions()
    assert (kept.said, tally.ignored) == ([], 0)


def test_no_client_writes_a_line_of_its_own(kept: Kept) -> None:
    mistakes = RequestMistakes(Tally())  # type: ignore[arg-type]
    mistakes.options("a\nERROR: b", {"kvkeep": {"c\nERROR: d" * 999: 1}})
    (said,) = kept.said
    assert "\n" not in said
    assert len(said) < 1000


class MistakesMachine(RuleBasedStateMachine):
    """Against a list of all mistakes of the hour, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.began = 100.0
        self.tally = Tally()
        self.kept = Kept()
        self.log = logging.getLogger("kvkeep.vllm")
        self.log.addHandler(self.kept)
        self.mistakes = RequestMistakes(self.tally, lambda: self.now)  # type: ignore[arg-type]
        self.hour: list[int] = []  # different mistakes since the hour began
        self.lines = 0
        self.made = 0

    @rule(numbers=st.lists(st.integers(1, 3 * MOST_MISTAKES), max_size=2 * MOST_MISTAKES))
    def mistakes_are_made(self, numbers: list[int]) -> None:
        for number in numbers:
            if self.now >= self.began + HOUR:
                self.began, self.hour = self.now, []
            self.made += 1
            if number not in self.hour:
                self.hour.append(number)
                self.lines += (
                    len(self.hour) <= MOST_MISTAKES + 1
                )  # the last says that there are more
            assert self.mistakes.options(f"r{self.made}", wrong(number)) == RequestOptions()

    @rule(seconds=st.sampled_from([1.0, HOUR / 2, HOUR]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @invariant()
    def all_are_counted_and_the_first_ones_logged(self) -> None:
        assert self.tally.ignored == self.made
        assert len(self.kept.said) == self.lines

    def teardown(self) -> None:
        self.log.removeHandler(self.kept)


TestMistakes = MistakesMachine.TestCase


@pytest.mark.parametrize(
    "params",
    [{"kv_keep": {"store": False}}, {"KVKeep": {"store": False}}, {"store": False}, {"ttl": 5}],
    ids=str,
)
def test_what_is_not_where_it_is_looked_for_is_a_mistake(
    params: dict[str, object], kept: Kept
) -> None:
    tally = Tally()
    mistakes = RequestMistakes(tally)  # type: ignore[arg-type]
    assert mistakes.options("a", params) == RequestOptions()
    assert tally.ignored == 1
    assert 'kvkeep reads {"kvkeep": {…}}' in kept.said[0]


@pytest.mark.parametrize(
    "params",
    [
        None,
        {},
        {"do_remote_decode": True, "remote_host": "a", "tp_size": 2, "kv_rank": 1},
        {"kvkeep": {"load": False}, "kv_keep": 1, "store": "another connector's"},
        {f"name {at}": at for at in range(10_000)},
    ],
    ids=["none", "empty", "nixl", "given", "many"],
)
def test_parameters_of_other_connectors_are_none(params: object, kept: Kept) -> None:
    tally = Tally()
    RequestMistakes(tally).options("a", params)  # type: ignore[arg-type]
    assert tally.ignored == 0
    assert kept.said == []


def test_a_time_that_is_too_long_is_told_the_limit() -> None:
    with pytest.raises(InvalidValue, match=r"ttl is 1e\+300; a number of seconds up to \d+ is"):
        RequestOptions.parse({"kvkeep": {"ttl": 1e300}})
