"""Jobs: what waits for what, when sessions follow their own answers, and how long they take."""

from __future__ import annotations

from zlib import crc32

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from replaying import Listed

from kvkeep.bench.replay import ReplayRun, Workload
from kvkeep.bench.replay.jobs import Jobs, calls_of
from kvkeep.bench.replay.loop import simulate_loop
from kvkeep.bench.replay.tiered import simulate_tiers
from kvkeep.bench.traces import TraceRequest
from kvkeep.core.cost import PrefillCost
from kvkeep.core.errors import InvalidValue

UNIT = 4
SECOND = PrefillCost(seconds_fixed=1.0, seconds_per_token=0.0)
"""Each prompt takes a second, however long it is."""
DECODING = PrefillCost(seconds_per_token=0.0, decode_seconds_per_token=1.0)
"""Each token of an answer but the first takes a second, beside all others."""


def asked(time, session=None, *, took=None, caller=None, output=1, prompt=None):
    ids = (
        np.arange(2) + 1000 * (crc32(f"{time} {session}".encode()) % 10_000)
        if prompt is None
        else prompt
    )
    return TraceRequest(
        float(time), np.array(ids), UNIT * len(ids), output, session=session, took_s=took,
        caller=caller,
    )  # fmt: skip


def workload(*requests) -> Workload:
    return Workload.read(Listed(sorted(requests, key=lambda one: one.time), UNIT))


def arrivals(work, serve, users=99):
    """When each request arrives, if the answer to number n takes ``serve(n)`` seconds."""
    calls = calls_of(work, users)
    came, events = {}, list(calls.first())
    while events:
        now, number = min(events)
        events.remove((now, number))
        assert number not in came
        came[number] = now
        events += calls.after(number, now + serve(number))
    assert len(came) == len(work)
    return [came[number] for number in range(len(work))]


# --- sessions -------------------------------------------------------------------------------------


def test_a_slow_answer_delays_all_that_follows_in_its_session() -> None:
    work = workload(asked(0, "a", took=2), asked(1, "b"), asked(5, "a", took=1), asked(9, "a"))
    assert arrivals(work, lambda number: 10) == [0, 0, 10 + 3, 23 + 3]
    assert arrivals(work, lambda number: 0) == [0, 0, 3, 6]


def test_a_pause_is_never_negative() -> None:
    work = workload(asked(0, "a", took=7), asked(5, "a"))
    assert arrivals(work, lambda number: 1) == [0, 1]


def test_a_request_without_a_session_is_a_job() -> None:
    work = workload(asked(0, "a", took=1), asked(2), asked(3, "a"), asked(4))
    assert arrivals(work, lambda number: 50) == [0, 0, 52, 0]
    assert Jobs(work).of.tolist() == [0, 1, 0, 2]


# --- sub-agents -----------------------------------------------------------------------------------


def called() -> Workload:
    """A caller that waits for two of three sub-agents, one of which calls another."""
    return workload(
        asked(0, "main", took=2),
        asked(3, "main/x", caller="main", took=1),
        asked(4, "main/y", caller="main", took=2),
        asked(7, "main/y/z", caller="main/y", took=1),
        asked(9, "main/y", caller="main", took=1),
        asked(6, "main/slow", caller="main", took=100),
        asked(12, "main", took=1),
        asked(200, "main"),
    )


def test_a_caller_waits_for_its_sub_agents() -> None:
    work = called()
    order = ["main", "x", "y", "slow", "z", "y2", "main2", "main3"]
    took = dict(zip(order, np.nan_to_num(work.took_s), strict=True))
    recorded = arrivals(work, lambda number: took[order[number]])
    assert recorded == work.times.tolist()

    def came(**slower: float) -> dict[str, float]:
        times = {**took, **slower}
        found = arrivals(work, lambda number: times[order[number]])
        return dict(zip(order, found, strict=True))

    # Main's second request came 2 s after the end of y, the last of what it waited for.
    assert came(x=3)["main2"] == 12
    assert came(x=30) == {**came(), "main2": 3 + 30 + 2}
    assert came(z=11)["y2"] == 7 + 11 + 1
    assert came(z=11)["main2"] == 19 + 1 + 2
    # The slow one had not ended, so the second did not wait for it; the third did.
    assert came(slow=150)["main2"] == 12
    assert came(slow=150)["main3"] == 6 + 150 + 94
    # Everything begins later if the caller's first answer is late.
    assert came(main=5)["slow"] == 5 + 4


def test_a_job_has_all_its_sub_agents() -> None:
    work = called()
    jobs = Jobs(work)
    assert jobs.of.tolist() == [0] * len(work)
    assert jobs.first == [0]
    ends = work.times + np.nan_to_num(work.took_s)
    assert jobs.seconds(work.times, ends).tolist() == [200]


def test_users_go_on_when_the_whole_job_is_over() -> None:
    work = workload(
        asked(0, "a"), asked(1, "a/x", caller="a"), asked(2, "b"), asked(3, "c"), asked(9, "a"),
    )  # fmt: skip
    came = arrivals(work, lambda number: 10, users=1)
    # a, then x a second after it; a's second 8 s after x, then b and c.
    assert came == [0, 11, 39, 49, 29]
    assert arrivals(work, lambda number: 10, users=2) == [0, 11, 0, 10, 29]


@pytest.mark.parametrize(
    "requests",
    [
        [asked(0, "a", caller="a")],
        [asked(0, "a", caller="b"), asked(1, "b", caller="a"), asked(2, "a", caller="b")],
        [asked(0, "a", caller="nobody"), asked(1, "a")],
        [asked(0, "a", caller="b"), asked(0, "b"), asked(0, "b", caller="a"), asked(0, "a")],
    ],
)
def test_callers_that_cannot_be_do_no_harm(requests) -> None:
    work = workload(*requests)
    assert len(arrivals(work, lambda number: 1)) == len(work)
    assert len(arrivals(work, lambda number: 1, users=1)) == len(work)


ROWS = st.lists(
    st.tuples(
        st.integers(0, 3),
        st.one_of(st.none(), st.integers(0, 4)),
        st.one_of(st.none(), st.integers(0, 4)),
        st.one_of(st.none(), st.integers(0, 5)),
    ),
    min_size=1,
    max_size=20,
)


@settings(deadline=None, max_examples=150)
@given(ROWS, st.lists(st.integers(0, 5), min_size=20, max_size=20))
def test_each_request_arrives_once_and_no_sooner_than_it_may(rows, serve) -> None:
    now, requests = 0, []
    for gap, session, caller, took in rows:
        now += gap
        name = None if session is None else f"s{session}"
        by = None if caller is None else f"s{caller}"
        requests.append(asked(now, name, took=took, caller=by))
    work = workload(*requests)
    came = arrivals(work, lambda number: serve[number])
    jobs = Jobs(work)
    for before, others in jobs.followers.items():
        for other in others:
            assert before < other
            assert came[other] >= came[before] + serve[before]
            assert jobs.of[other] == jobs.of[before]
    for number, (_, session, _, _) in enumerate(rows):
        earlier = [at for at in range(number) if rows[at][1] == session]
        if session is not None and earlier:
            assert earlier[-1] in [b for b, others in jobs.followers.items() if number in others]
    fast = arrivals(work, lambda number: 0)
    assert all(one <= two for one, two in zip(fast, came, strict=True))


# --- through the engine, and through tiers --------------------------------------------------------


def test_users_never_have_two_requests_of_a_session_at_once() -> None:
    """Open, the second request comes while the first is answered; closed, after it."""
    work = workload(asked(0, "a", took=1, output=11), asked(2, "a", took=1), asked(3, "b"))
    open_, shut = (
        simulate_loop(work, 4000, cost=DECODING, users=users).latency for users in (None, 2)
    )
    assert open_["jobs"] == shut["jobs"] == 2
    assert open_["job_s"]["mean"] == pytest.approx(10 / 2)
    assert shut["job_s"]["mean"] == pytest.approx((10 + 1) / 2)


def test_hits_end_jobs_sooner() -> None:
    prompts = [np.arange(50) + 1000 * session for session in range(8)]
    cost = PrefillCost(seconds_per_token=0.01)
    requests = [
        asked(10 * turn + session / 10, f"s{session}", took=1, prompt=prompts[session][: 5 * turn])
        for turn in range(1, 11)
        for session in range(8)
    ]
    work = workload(*requests)
    tight, ample = (simulate_loop(work, tokens, cost=cost, users=8) for tokens in (400, 4000))
    assert ample.hit_rate > tight.hit_rate
    assert ample.latency["job_s"]["p50"] < tight.latency["job_s"]["p50"]


def test_tiers_are_replayed_with_users() -> None:
    work = workload(*(asked(at, f"s{at % 2}", took=0, prompt=[at % 2, 7]) for at in range(10)))
    sizes = [400, 4000]
    late = simulate_tiers(work, sizes, cost=SECOND, users=1).latency
    plain = simulate_tiers(work, sizes, cost=SECOND).latency
    assert (late["jobs"], plain["jobs"]) == (2, 2)
    # Each of five requests takes its second, and four pauses of two are between them.
    assert late["job_s"]["p50"] == pytest.approx(5 * 1 + 4 * 2)
    assert plain["job_s"]["p50"] < late["job_s"]["p50"]
    with pytest.raises(InvalidValue, match="prompts cost something"):
        simulate_tiers(work, sizes, users=1)


def test_traces_without_sessions_have_no_jobs() -> None:
    work = workload(asked(0), asked(1))
    assert "jobs" not in simulate_loop(work, 400, cost=SECOND).latency


def test_users_need_a_cost() -> None:
    with pytest.raises(InvalidValue, match="that needs the cost of prompts"):
        ReplayRun("lru", 400, users=2)
