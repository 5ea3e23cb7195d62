"""The closed loop against one that is worked out request by request; and nobody waits for ever."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from replaying import Chained, Listed, request

from kvkeep.bench.replay import Outcome, Workload, simulate
from kvkeep.bench.replay.loop import simulate_loop
from kvkeep.bench.traces import TraceRequest
from kvkeep.bench.traces.chain import Growing
from kvkeep.core.cost import PrefillCost
from kvkeep.core.errors import InvalidValue

UNIT = 4
COST = PrefillCost(
    seconds_fixed=0.1,
    seconds_per_token=0.011,
    seconds_per_token_pair=0.0007,
    decode_seconds_per_token=0.13,
)


@dataclass(frozen=True)
class Asked:
    """A request of lengths alone: nobody else's prompt begins like it."""

    time: float
    tokens: int
    output: int
    session: int | None = None
    took: float | None = None


def alone(number: int, asked: Asked) -> TraceRequest:
    units = np.arange(-(-asked.tokens // UNIT)) + 1000 * number
    session = None if asked.session is None else str(asked.session)
    return TraceRequest(
        asked.time, units, asked.tokens, asked.output, session=session, took_s=asked.took
    )


ASKED = st.lists(
    st.tuples(
        st.integers(0, 6),  # since the one before
        st.integers(1, 40),
        st.integers(0, 30),
        st.one_of(st.none(), st.integers(0, 3)),
        st.one_of(st.none(), st.integers(0, 9)),  # seconds that it took
    ),
    min_size=1,
    max_size=14,
)


def listed(rows: list[tuple[int, int, int, int | None, int | None]]) -> list[Asked]:
    """At times that are like no sum of others."""
    asked, now = [], 0.0
    for number, (pause, tokens, output, session, took) in enumerate(rows):
        now += pause + math.sqrt(2 + number) / 100
        asked.append(Asked(now, tokens, output, session, took))
    return asked


def sessions(asked):
    """Who follows whom, and who is the first of each session."""
    following, firsts, latest = {}, [], {}
    for number, one in enumerate(asked):
        if one.session is not None and one.session in latest:
            following[latest[one.session]] = number
        else:
            firsts.append(number)
        latest[one.session] = number
    return following, firsts


def worked_out(asked, pages, users):
    """Times until admission, first token and end, of each request that is not refused."""
    following, firsts = {}, []
    order = [(one.time, number) for number, one in enumerate(asked)]
    if users is not None:
        order, (following, firsts) = [], sessions(asked)
    idle = [asked[0].time] * (users or 0)
    ended, found, free = [], {}, -math.inf
    while order or (idle and firsts):
        # Whoever is idle takes the next session, unless somebody comes before that.
        while idle and firsts and min(idle) <= min(order, default=(math.inf,))[0]:
            order.append((min(idle), firsts.pop(0)))
            idle.remove(min(idle))
        came, number = min(order)
        order.remove((came, number))
        one = asked[number]
        prompt = -(-one.tokens // UNIT)
        taken = min(pages, -(-(one.tokens + max(0, one.output - 1)) // UNIT))
        fits = prompt <= pages
        for at in sorted({came, free, *(end for end, _ in ended)}):
            beside = [other for end, other in ended if end > at]
            if at < came or at < free:
                continue
            if not fits or sum(beside) + taken <= pages:
                break
        last = at
        free = max(free, at)
        if fits:
            free = at + COST.prefill_s(0, one.tokens)
            last = free + COST.decode_s(one.output)
            ended.append((last, taken))
            found[number] = (at - came, free - came, last - came)
        if number in following:
            other = following[number]
            pause = max(0, asked[other].time - one.time - (one.took or 0))
            order.append((last + pause, other))
        elif users is not None:
            idle.append(last)
    return found


@settings(deadline=None, max_examples=100)
@given(
    ASKED,
    st.one_of(st.integers(3, 20), st.just(500)),
    st.sampled_from([None, 1, 2, 3, 4]),
    st.booleans(),
)
def test_times_are_those_that_are_worked_out(rows, pages, users, by_units):
    asked = listed(rows)
    work = Workload.read(Listed([alone(number, one) for number, one in enumerate(asked)], UNIT))
    outcome = simulate_loop(
        work,
        pages * UNIT,
        cost=COST,
        page_tokens=None if by_units else UNIT,
        users=users,
    )
    found = worked_out(asked, pages, users)
    assert (outcome.requests, outcome.refused) == (len(asked), len(asked) - len(found))
    assert outcome.hit_tokens == 0
    times = np.array(list(found.values())).reshape(-1, 3).T
    for name, expected in zip(("queue_s", "ttft_s", "total_s"), times, strict=True):
        seconds = outcome.latency[name]
        if not len(expected):
            assert seconds == {}
            continue
        assert seconds["mean"] == pytest.approx(expected.mean())
        for quantile in (50, 90, 99):
            assert seconds[f"p{quantile}"] == pytest.approx(np.quantile(expected, quantile / 100))
    work_s = sum(COST.prefill_s(0, asked[number].tokens) for number in found)
    assert outcome.latency["prefill_s"] == pytest.approx(work_s)


# --- what is reused ------------------------------------------------------------------------------


@st.composite
def talks(draw, *, whole: bool = False):
    """Conversations that share beginnings, one within another; answers known or not.

    ``whole``: prompt and answer end with a unit, so that an answer has nothing that is not kept.
    """
    requests, now = [], 0.0
    for session in range(draw(st.integers(1, 4))):
        text = list(range(draw(st.integers(0, 2)), 4 + draw(st.integers(0, 9))))
        for turn in range(draw(st.integers(1, 4))):
            now += draw(st.sampled_from([0.0, 0.3, 5.0]))
            told = draw(st.booleans())
            count = draw(st.integers(0, 9)) if told or not whole else 1
            if whole and told:
                count = (-len(text)) % UNIT + 1 + UNIT * draw(st.integers(0, 2))
            answer = [100 * session + 10 * turn + at for at in range(count)]
            requests.append(spoken(now, text, answer, str(session), draw, told=told))
            text = [*text, *answer, *range(draw(st.integers(1, 6)))]
    return requests


def spoken(now, text, answer, session, draw, *, told):
    prompt = Growing(UNIT)
    prompt.append(np.array(text, np.int32))
    whole = prompt.fork()
    whole.append(np.array(answer[:-1], np.int32))
    return TraceRequest(
        now,
        prompt.units(),
        len(text),
        len(answer),
        namespace=draw(st.sampled_from(["", "", "other"])),
        session=draw(st.sampled_from([session, session, None])),
        answer=whole.full(len(text) // UNIT) if told else None,
        store=draw(st.sampled_from([True, True, True, False])),
    )


POOLS = st.integers(1, 30)
PAGES = st.sampled_from([None, UNIT, 2, 3])


@settings(deadline=None, max_examples=150)
@given(
    talks(),
    POOLS,
    PAGES,
    st.fixed_dictionaries({
        "users": st.sampled_from([None, 1, 3]),
        "policy": st.sampled_from(["lru", "priority"]),
        "cost": st.sampled_from([
            COST, PrefillCost(seconds_per_token=0), PrefillCost(seconds_per_token=9),
        ]),
    }),
)  # fmt: skip
def test_every_request_ends(requests, pool, page, how):
    """`simulate_loop` itself asserts that nobody waits or runs when nothing happens any more."""
    work = Workload.read(Listed(requests, UNIT))
    capacity, cost = pool * UNIT, how["cost"]
    outcome = simulate_loop(work, capacity, page_tokens=page, **how)
    assert outcome.requests == len(requests)
    assert outcome.tokens == work.tokens.sum()
    size = page or UNIT
    refused = sum(-(-one.tokens // size) > capacity // size for one in requests)
    assert outcome.refused == refused
    assert sum(outcome.misses.values()) + outcome.hit_tokens == outcome.tokens
    assert sum(outcome.namespaces[name][0] for name in outcome.namespaces) == outcome.tokens
    latency = outcome.latency
    assert 0 <= latency["utilisation"] <= 1 + 1e-9
    assert latency["saved_s"] >= -1e-9
    served = [one for one in requests if -(-one.tokens // size) <= capacity // size]
    in_full = sum(cost.prefill_s(0, one.tokens) for one in served)
    assert latency["prefill_s"] + latency["saved_s"] == pytest.approx(in_full)


@settings(deadline=None, max_examples=80)
@given(talks(whole=True), st.integers(12, 60), PAGES, st.sampled_from(["lru", "priority"]))
def test_one_after_the_other_is_what_simulate_does(requests, pool, page, policy):
    requests = [one for one in requests if one.store]
    if not requests:
        return
    work = Workload.read(Listed(as_one(requests), UNIT))
    looped = simulate_loop(work, pool * UNIT, policy, cost=COST, page_tokens=page, users=1)
    plain = simulate(work, pool * UNIT, policy, page_tokens=page)
    names = ["requests", "refused", "hit_tokens", "hit_blocks", "misses"]
    if page is None or UNIT % page == 0:
        names.append("evicted_pages")  # else a page that matches in part is evicted or not: the
        # loop opens a prompt alone, and needs fewer pages at that moment
    for name in names:
        assert getattr(looped, name) == getattr(plain, name), name


def as_one(requests):
    """Without sessions, the only user goes through them as they stand."""
    return [
        TraceRequest(
            one.time, one.units, one.tokens, one.output_tokens, one.namespace, answer=one.answer
        )
        for one in requests
    ]


# --- by hand -------------------------------------------------------------------------------------


def looped(requests, capacity=400, **how) -> Outcome:
    return simulate_loop(Workload.read(Listed(requests)), capacity, cost=COST, **how)


def test_a_hit_saves_the_time_it_would_have_taken():
    ids = Chained().ids("abcde")
    outcome = looped([request(0, ids), request(10, ids), request(20, ids, tokens=18)])
    whole, last = COST.prefill_s(0, 20), COST.prefill_s(19, 20)
    assert outcome.hit_tokens == 20 + 18
    assert outcome.latency["prefill_s"] == pytest.approx(whole + last + COST.prefill_s(17, 18))
    assert outcome.latency["saved_s"] == pytest.approx(
        whole - last + COST.prefill_s(0, 18) - COST.prefill_s(17, 18)
    )
    assert outcome.latency["span_s"] == pytest.approx(20 + COST.prefill_s(17, 18))


def test_what_is_computed_right_now_is_waited_for_and_reused():
    ids = Chained().ids("abcde")
    outcome = looped([request(0, ids), request(0.01, ids)])
    assert outcome.hit_tokens == 20
    assert outcome.latency["queue_s"]["p99"] == pytest.approx(
        0.99 * (COST.prefill_s(0, 20) - 0.01), rel=1e-6
    )


def test_pages_are_in_use_until_an_answer_ends():
    """With room for one at a time the second waits; what the first leaves goes for it."""
    one, two = (TraceRequest(at, np.arange(4) + 9 * at, 16, 9) for at in (0, 1))
    tight, ample = (looped([one, two], capacity) for capacity in (8 * UNIT, 12 * UNIT))
    begun = COST.prefill_s(0, 16) + COST.decode_s(9)
    assert tight.latency["queue_s"]["mean"] == pytest.approx((begun - 1) / 2)
    assert ample.latency["queue_s"]["mean"] == 0
    assert tight.evicted_pages > ample.evicted_pages == 0


def test_sessions_think_and_users_take_the_next_one():
    ids = Chained()
    talk = [request(at, ids.ids(path), session="s") for at, path in ((0, "ab"), (7, "abcd"))]
    other = request(1, ids.ids("xyz"), session="t")
    outcome = looped([talk[0], other, talk[1]], users=1)
    # 7 s after the first has ended; then the other session begins.
    span = COST.prefill_s(0, 8) + 7 + COST.prefill_s(8, 16) + COST.prefill_s(0, 12)
    assert outcome.latency["span_s"] == pytest.approx(span)
    assert outcome.latency["queue_s"]["p99"] == 0
    both = looped([talk[0], other, talk[1]], users=2)
    assert both.latency["queue_s"]["p99"] > 0  # they come together


def test_it_says_how_far_it_is():
    told: list[int] = []
    looped([request(float(at), [at]) for at in range(250)], progress=told.append)
    assert told == [100, 200]


@pytest.mark.parametrize(
    "how",
    [{"users": 0}, {"users": 1.5}, {"page_tokens": 0}, {"capacity": 0}],
)
def test_what_makes_no_sense_is_refused(how):
    with pytest.raises(InvalidValue):
        looped([request(0, [1])], **how)
