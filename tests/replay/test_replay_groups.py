"""Replays of models with windows and states, against a cache that is driven by hand."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from replaying import Chained, Listed, agents, request

from kvkeep import PagedCache
from kvkeep.bench.replay import (
    BELADY,
    GROUP_REASONS,
    REASONS,
    Paging,
    PlannedMemory,
    PrefillCost,
    ReplayRun,
    Workload,
    advise,
    belady,
    simulate,
    simulate_loop,
)
from kvkeep.core.errors import InvalidValue
from kvkeep.core.groups import GroupLayout, StateSpec, WindowSpec

STATES = GroupLayout(16, (), StateSpec(3, 32))
WINDOWS = GroupLayout(16, (WindowSpec(40, 2), WindowSpec(64, 1, chunked=True)))
BOTH = GroupLayout(16, (WindowSpec(40),), StateSpec(2, 64))
LAYOUTS = {"states": STATES, "windows": WINDOWS, "both": BOTH}


@pytest.fixture(scope="module")
def chat():
    return agents(seed=5, requests=40, unit_tokens=16)


def by_hand(work: Workload, pages: int, layout: GroupLayout, eviction: str) -> list[int]:
    """Tokens that a cache finds of each prompt, computed pass by pass, token by token."""
    cache = PagedCache(pages, layout, eviction=eviction)
    unit, hits = work.unit_tokens, []
    for number in range(len(work)):
        tokens = int(work.tokens[number])
        prompt = np.repeat(work.prompt(number), unit)[:tokens]
        known = tokens // unit * unit
        sequence = cache.open(prompt[: known + 1], work.namespaces[work.namespace[number]])
        hits.append(sequence.num_cached)
        groups = sequence.groups
        answer = np.repeat(work.answer(number), unit)
        if known < tokens:
            sequence.append(prompt[known + 1 :])
        for text in (None, *(answer[at : at + 16] for at in range(0, len(answer), 16))):
            end = known
            if text is not None:
                if sequence.num_tokens != groups.position:
                    sequence.truncate(known)
                sequence.append(text)
                end = sequence.num_tokens
            sequence.copies()
            groups.copies()
            while groups.position < end:
                stop = min([end, groups.position + 2048, *groups.stops])
                planned = stop in groups.stops
                groups.reach(stop)
                if planned:
                    groups.checkpoint(stop)
                sequence.publish(stop)
        # The trace does not tell the rest: it takes room and is not stored.
        longest = tokens + max(0, int(work.output_tokens[number]) - 1)
        if longest > sequence.num_tokens:
            sequence.append(np.full(longest - sequence.num_tokens, 2**31 - 1, np.int32))
        sequence.copies()
        while groups.position < sequence.num_tokens:
            groups.reach(min(sequence.num_tokens, groups.position + 2048))
        sequence.close()
    cache.check()
    return hits


@pytest.mark.parametrize("eviction", ["lru"])
@pytest.mark.parametrize("kind", LAYOUTS)
def test_a_replay_is_the_cache(chat, kind, eviction):
    roomy = 2 * int(-(-chat.tokens.max() // 16))
    outcome = simulate(chat, roomy * 16, eviction, groups=LAYOUTS[kind])
    assert not outcome.refused
    assert outcome.hit_tokens == sum(by_hand(chat, roomy, LAYOUTS[kind], eviction))
    assert outcome.evicted_pages
    assert outcome.groups["pages"] == roomy
    assert 0 < outcome.groups["most_pages_of_a_request"] <= roomy
    assert 0 < outcome.groups["most_pages_stored"] < roomy


@pytest.mark.parametrize("kind", LAYOUTS)
@pytest.mark.parametrize("unit", [1, 8, 16, 64])
def test_every_token_has_its_reason(kind, unit):
    work = agents(seed=2, requests=30, unit_tokens=unit)
    outcome = simulate(work, 300_000, groups=LAYOUTS[kind])
    assert sum(outcome.misses.values()) + outcome.hit_tokens == outcome.tokens
    reason = GROUP_REASONS[LAYOUTS[kind].state is None]
    assert set(outcome.misses) == {*REASONS, reason}
    assert min(outcome.misses.values()) >= 0
    assert outcome.hit_tokens


@settings(deadline=None, max_examples=40)
@given(
    st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=9), min_size=1, max_size=12),
    st.integers(8, 60),
    st.sampled_from([
        GroupLayout(4, (), StateSpec(2, 8), tail_tokens=8),
        GroupLayout(4, (WindowSpec(7, 2), WindowSpec(8, 1, chunked=True))),
        GroupLayout(4, (WindowSpec(2),), StateSpec(1), tail_tokens=12),
        GroupLayout(4, (WindowSpec(2, 1, chunked=True),)),
    ]),
)  # fmt: skip
def test_pages_as_tokens_change_nothing(paths, pages, layout):
    chained = Chained()
    requests = [
        request(0.0, chained.ids(path), tokens=4 * len(path) - len(path) % 3) for path in paths
    ]
    work = Workload.read(Listed(requests))
    assert Paging(4, None, layout).scale == 4
    outcome = simulate(work, pages * 4, groups=layout)
    if not outcome.refused and not outcome.groups["resumes_given_up"]:
        assert outcome.hit_tokens == sum(by_hand(work, pages, layout, "lru"))


def test_chunks_that_no_page_divides_are_replayed_by_tokens():
    layout = GroupLayout(4, (WindowSpec(6, 1, chunked=True),))
    assert Paging(8, None, layout).scale == 1
    chained = Chained()
    work = Workload.read(Listed([request(at, chained.ids("abcd")) for at in range(2)]))
    assert simulate(work, 400, groups=layout).hit_tokens == 12


def conversation(*prompts: str, unit: int = 16) -> Workload:
    chained = Chained()
    found = [request(at, chained.ids(one), unit=unit) for at, one in enumerate(prompts)]
    return Workload.read(Listed(found, unit))


def test_tokens_without_a_state_are_counted():
    # The first prompt leaves a state at its end only, where the second has left it already.
    layout = GroupLayout(16, (), StateSpec(1), tail_tokens=1000)
    outcome = simulate(conversation("abcdefgh", "abcdXYZ1", "abcdPQ12"), 1600, groups=layout)
    assert outcome.hit_tokens == 4 * 16  # of the third, where the second branched
    assert outcome.misses["no state"] == 4 * 16  # of the second
    assert outcome.misses["page remainder"] == 0


def test_the_grid_is_no_lack_of_a_state():
    layout = GroupLayout(16, (), StateSpec(1, 64), tail_tokens=1000)
    outcome = simulate(conversation("abcdef", "abcdef"), 1600, groups=layout)
    assert outcome.hit_tokens == 64
    assert outcome.misses["no state"] == 0
    assert outcome.misses["page remainder"] == 32  # behind the last multiple of 64


def test_windows_that_are_gone_are_counted():
    # Resuming at d needs the rows of c and d, which were freed while a … h was computed.
    layout = GroupLayout(16, (WindowSpec(32, 1),))
    roomy = simulate(conversation("abcdefgh", "abcdXY"), 1600, groups=layout)
    assert roomy.hit_tokens == 64
    tight = simulate(conversation("abcdefgh", "12345678", "abcdXY"), 22 * 16, groups=layout)
    assert tight.hit_tokens + tight.misses["window gone"] + tight.misses["evicted"] == 64
    assert tight.misses["window gone"]


def test_states_cost_hits_and_belady_stays_a_bound(chat):
    plain = simulate(chat, 100_000, page_tokens=16)
    states = simulate(chat, 100_000, groups=STATES)
    assert states.hit_tokens <= plain.hit_tokens
    assert states.hit_tokens <= belady(chat, 100_000).hit_tokens


def test_a_request_too_large_is_refused():
    layout = GroupLayout(16, (), StateSpec(4))
    outcome = simulate(conversation("abcdef"), 9 * 16, groups=layout)
    assert outcome.refused == 1
    assert outcome.misses["first time seen"] == 96
    assert simulate(conversation("abcdef"), 10 * 16, groups=layout).refused == 0


@pytest.mark.parametrize("kind", LAYOUTS)
def test_with_computing_times(chat, kind):
    cost = PrefillCost(seconds_per_token=1e-4, decode_seconds_per_token=0.001)
    outcome = simulate_loop(chat, 200_000, cost=cost, groups=LAYOUTS[kind])
    assert outcome.requests == len(chat)
    assert sum(outcome.misses.values()) + outcome.hit_tokens == outcome.tokens
    assert outcome.latency["ttft_s"]["p50"] > 0
    assert outcome.groups["most_pages_stored"]
    tight = simulate_loop(chat, 2 * int(chat.tokens.max()), cost=cost, groups=LAYOUTS[kind])
    assert tight.hit_tokens < outcome.hit_tokens


def test_runs_know_groups(chat):
    run = ReplayRun("lru", 100_000, groups=STATES)
    outcome = run.on(chat)
    assert outcome.hit_tokens == simulate(chat, 100_000, groups=STATES).hit_tokens


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"policy": BELADY}, "a bound of models without windows"),
        ({"policy": "lru", "below": (1000,)}, "not with windows or states"),
        ({"policy": "lru", "page_tokens": 8}, "pages of these groups have 16"),
    ],
)
def test_what_cannot_be_replayed(given, says):
    with pytest.raises(InvalidValue, match=says):
        ReplayRun(capacity_tokens=10_000, groups=STATES, **given)


def test_a_plan_has_groups(chat):
    plan = PlannedMemory(100_000, groups=STATES)
    runs = plan.runs(chat)
    assert {run.groups for run in runs} == {STATES, None}
    advice = advise(plan, {run: run.on(chat) for run in runs}, chat)
    assert advice.chosen.memory_tokens == 100_000
