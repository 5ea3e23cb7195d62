"""Wrong ``kv_transfer_params`` in vLLM: ignored, counted, and logged once each, within bounds."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import pytest

from kvkeep.core.errors import InvalidValue
from kvkeep.integrations.vllm.options import MOST_MISTAKES, RequestMistakes, RequestOptions

if TYPE_CHECKING:
    from collections.abc import Iterator


class Tally:
    """Counts as those of the connector do."""

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


def test_each_mistake_is_logged_once_and_not_all(kept: Kept) -> None:
    tally = Tally()
    mistakes = RequestMistakes(tally)  # type: ignore[arg-type]
    for number in range(1, 3 * MOST_MISTAKES):
        for _ in range(2):
            assert mistakes.options(f"r{number}", wrong(number)) == RequestOptions()
    assert tally.ignored == 2 * (3 * MOST_MISTAKES - 1)
    assert len(kept.said) == MOST_MISTAKES


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
