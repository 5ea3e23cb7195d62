"""Generated traces: the same everywhere, and of the statistics that they say."""

from __future__ import annotations

import hashlib
from collections import Counter
from itertools import islice, pairwise
from typing import TYPE_CHECKING

import numpy as np
import pytest

from kvkeep.bench.traces import KINDS, GeneratedTrace, Trace, generate
from kvkeep.bench.traces.generators import (
    FIRST_TOKEN_S,
    TOKEN_S,
    WAITS,
    Chance,
    Chat,
    mean_of,
    value_at,
)
from kvkeep.core.errors import InvalidValue

if TYPE_CHECKING:
    from kvkeep.bench.traces import TraceRequest

# SHA-256 over times, lengths and ids of the first 40 requests of seed 7.
DIGESTS = {
    "chat": "e0cabd0417f8e545",
    "agents": "7c97cf801657b599",
}


def digest(trace: Trace) -> str:
    running = hashlib.sha256()
    for request in trace:
        head = (
            request.time,
            request.tokens,
            request.output_tokens,
            request.session,
            request.namespace,
        )
        running.update(repr(head).encode() + request.units.astype("<i8").tobytes())
        assert request.answer is not None
        running.update(request.answer.astype("<i8").tobytes())
    return running.hexdigest()[:16]


@pytest.mark.parametrize("kind", KINDS)
def test_a_seed_is_the_same_trace_on_every_machine(kind: str) -> None:
    assert digest(generate(kind, seed=7, requests=40)) == DIGESTS[kind]
    assert digest(generate(kind, seed=8, requests=40)) != DIGESTS[kind]


@pytest.mark.parametrize("kind", KINDS)
def test_more_requests_only_add_to_the_end(kind: str) -> None:
    short, long = generate(kind, seed=3, requests=60), generate(kind, seed=3, requests=90)
    assert isinstance(short, Trace)
    assert (short.length, len(list(short))) == (60, 60)
    assert digest(short) == digest(short)
    for one, other in zip(short, islice(long, 60), strict=True):
        assert (one.time, one.units.tolist()) == (other.time, other.units.tolist())


@pytest.mark.parametrize("kind", KINDS)
def test_times_only_grow_and_a_turn_goes_on_where_the_last_one_ended(kind: str) -> None:
    last: dict[str, TraceRequest] = {}
    before = 0.0
    for request in generate(kind, seed=5, requests=400):
        assert request.time >= before
        before = request.time
        assert len(request.units) == -(-request.tokens // 16)
        assert request.session is not None
        assert request.answer is not None
        previous = last.get(request.session)
        assert request.turn == (1 if previous is None else (previous.turn or 0) + 1)
        last[request.session] = request
        if previous is None:
            continue
        ended = previous.time + FIRST_TOKEN_S + TOKEN_S * previous.output_tokens
        assert request.time >= ended - 1e-5
        if kind == "chat":  # agents go back to earlier prompts
            assert previous.answer is not None
            held = [*previous.units[: previous.tokens // 16], *previous.answer]
            assert request.units[: len(held)].tolist() == held
            assert request.tokens > previous.tokens + previous.output_tokens


@pytest.mark.parametrize("unit", [1, 7, 512])
def test_the_size_of_units_changes_nothing_else(unit: int) -> None:
    fine, coarse = (generate("chat", seed=2, requests=30, unit_tokens=size) for size in (unit, 16))
    assert [(r.time, r.tokens) for r in fine] == [(r.time, r.tokens) for r in coarse]
    assert all(len(r.units) == -(-r.tokens // unit) for r in fine)


def sessions_of(trace: Trace) -> dict[str, list[TraceRequest]]:
    found: dict[str, list[TraceRequest]] = {}
    for request in trace:
        found.setdefault(f"{request.session}", []).append(request)
    return found


def gaps(trace: Trace) -> list[float]:
    """Seconds from the end of an answer to the next turn."""
    return [
        later.time - one.time - FIRST_TOKEN_S - TOKEN_S * one.output_tokens
        for turns in sessions_of(trace).values()
        for one, later in pairwise(turns)
    ]


def finished(trace: Trace, share: float = 0.5) -> list[list[TraceRequest]]:
    """The sessions that began in the first part, which are through at the end, but for a few."""
    all_of_them = list(sessions_of(trace).values())
    return all_of_them[: int(len(all_of_them) * share)]


FEW = ((0, 1), (1, 9))
"""Tokens, where only times and turns are looked at."""


def test_chats_have_a_few_turns_with_time_to_read_between() -> None:
    trace = GeneratedTrace(Chat(instructions=FEW, document=FEW), seed=1, requests=3000)
    turns = [len(session) for session in finished(trace)]
    assert sum(turns) / len(turns) == pytest.approx(3.1, abs=0.4)
    assert np.median(gaps(trace)) == pytest.approx(40, abs=6)


def test_sessions_begin_as_often_as_was_asked_for() -> None:
    alone = Chat(turns=((0, 1), (1, 1)), instructions=FEW, document=FEW)
    trace = GeneratedTrace(alone, seed=1, requests=2000, sessions_per_second=20)
    assert list(trace)[-1].time == pytest.approx(100, rel=0.08)


def test_a_workload_can_be_changed() -> None:
    one = Chat(turns=((0, 2), (1, 2)), output=((0, 9), (1, 9)))
    trace = list(GeneratedTrace(one, seed=1, requests=50))
    assert {r.output_tokens for r in trace} == {9}
    assert max(Counter(r.session for r in trace).values()) == 2
    with pytest.raises(InvalidValue, match="shares that grow from 0 to 1"):
        list(GeneratedTrace(Chat(turns=((0, 2), (0.5, 3))), seed=1, requests=1))


def test_what_is_wrong_is_said() -> None:
    with pytest.raises(InvalidValue, match="one of agents, chat; got"):
        generate("cats", seed=1, requests=1)
    with pytest.raises(InvalidValue, match="requests"):
        generate("chat", seed=1, requests=-1)
    with pytest.raises(InvalidValue, match="sessions_per_second"):
        generate("chat", seed=1, requests=1, sessions_per_second=0)
    with pytest.raises(InvalidValue, match="unit_tokens"):
        generate("chat", seed=1, requests=1, unit_tokens=0)


def test_chance() -> None:
    table = ((0, 10), (0.5, 20), (1, 100))
    assert [value_at(table, share) for share in (0, 0.25, 0.5, 0.75)] == [10, 15, 20, 60]
    assert mean_of(table) == 37.5
    assert mean_of(WAITS) == pytest.approx(1, abs=0.07)
    chance = Chance(1, "x")
    values = [chance.of(table) for _ in range(4000)]
    assert sum(values) / len(values) == pytest.approx(37.5, rel=0.05)
    assert [Chance(1, "x").share() for _ in range(2)] == [Chance(1, "x").share()] * 2
    assert Chance("always", "the", "same").share() == 0.9196729926490824
