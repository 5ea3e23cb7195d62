"""Replays: hits, reasons and bounds, against lists and against trying everything."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from replaying import Chained, Listed, best_possible, lru_by_list, request, tenants, workload

from kvkeep.bench.replay import (
    BELADY,
    REASONS,
    Outcome,
    Paging,
    ReplayRun,
    Workload,
    belady,
    infinite,
    simulate,
)
from kvkeep.bench.traces import Served, generate, open_trace
from kvkeep.core.errors import InvalidValue
from kvkeep.core.eviction import POLICIES

CONVERSATION = Path(__file__).parents[3] / "shared" / "traces" / "mooncake_conversation.jsonl.gz"

PATHS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=4), min_size=1, max_size=6)


def adds_up(outcome: Outcome) -> bool:
    return sum(outcome.misses.values()) + outcome.hit_tokens == outcome.tokens


@settings(deadline=None, max_examples=150)
@given(PATHS, st.integers(1, 4))
def test_nothing_is_better_than_the_best(paths, room):
    best = best_possible(paths, room)
    work = workload(paths)
    assert belady(work, room * 4).hit_blocks == best
    assert infinite(work).hit_blocks >= best
    for policy in ("lru", "returns"):
        assert simulate(work, room * 4, policy).hit_blocks <= best


@settings(deadline=None, max_examples=100)
@given(
    st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=5), min_size=1, max_size=30),
    st.integers(1, 12),
)
def test_lru_is_lru(paths, room):
    assert simulate(workload(paths), room * 4).hit_blocks == lru_by_list(paths, room)


@pytest.fixture(scope="module")
def several():
    return tenants(seed=3, requests=50, unit_tokens=8)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("page", [None, 8, 4, 2])
def test_every_token_is_reused_or_has_its_reason(several, policy, page):
    outcome = simulate(several, 10_000, policy, page_tokens=page)
    assert outcome.requests == 50
    assert outcome.tokens == several.tokens.sum()
    assert adds_up(outcome)
    assert set(outcome.misses) == set(REASONS)
    assert outcome.misses["evicted"]
    assert outcome.hit_tokens <= infinite(several).hit_tokens + 50 * (page or 8)


def test_tokens_are_counted_exactly():
    chained = Chained()
    long, short = chained.ids("abcdef"), chained.ids("abcdXY")
    work = Workload.read(
        Listed([request(0, long, tokens=22), request(1, short), request(2, long, tokens=22)])
    )
    by_units = simulate(work, 400)
    assert (by_units.hit_blocks, by_units.hit_tokens) == (4 + 6, 16 + 22)
    by_pages = simulate(work, 400, page_tokens=4)
    assert by_pages.hit_tokens == 16 + 20  # of the page that is not full nothing is stored
    whole = Workload.read(Listed([request(0, long), request(1, long)]))
    exact = simulate(whole, 400, page_tokens=4)
    assert exact.hit_tokens == 23  # the last token is always computed
    assert exact.misses == {
        "first time seen": 24, "evicted": 0, "never admitted": 0, "other namespace": 0,
        "page remainder": 1,
    }  # fmt: skip


def test_the_reasons():
    chained = Chained()
    a, b, c = (chained.ids([name, 2, 3, 4]) for name in "abc")
    work = Workload.read(Listed([
        request(0, a),
        request(10, a, namespace="t"),  # another's
        request(20, b, store=False),  # leaves nothing
        request(30, b),
        request(40, c), request(50, [*c, *chained.ids([5, 6, 7, 8, 9, 10, 11, 12])]),
        request(60, a),  # by now it had to go
    ]))  # fmt: skip
    outcome = simulate(work, 12 * 4)
    assert adds_up(outcome)
    assert outcome.misses["other namespace"] == 16
    assert outcome.misses["never admitted"] == 16
    assert outcome.misses["evicted"] == 16
    assert outcome.namespaces == {"": [6 * 16 + 32, 16], "t": [16, 0]}


def test_what_does_not_fit_is_computed_and_counted():
    work = workload(["ab", "abcdefgh", "ab"])
    outcome = simulate(work, 3 * 4)
    assert (outcome.refused, outcome.hit_blocks) == (1, 2)
    assert adds_up(outcome)


def test_answers_are_reused_where_a_trace_has_them():
    chained = Chained()
    path = chained.ids("abcdef")
    prompt = chained.ids(["a", "b", "a part of c"])
    first = request(0, prompt, tokens=10, answer=np.array(path[2:4], np.int64))
    work = Workload.read(Listed([first, request(1, path)]))
    assert simulate(work, 400).hit_tokens == 16
    assert simulate(work, 400, page_tokens=4).hit_tokens == 16
    assert simulate(work, 400, page_tokens=2).hit_tokens == 16
    assert infinite(work).hit_tokens == 16
    assert belady(work, 400).hit_tokens == 16
    long = request(0, prompt, tokens=10, answer=np.array(path[2:], np.int64))
    work = Workload.read(Listed([long, request(1, path[:3])]))
    assert simulate(work, 3 * 4).hit_tokens == 8  # no room for the answer


def test_reuse_after_half_of_the_trace_is_late():
    assert infinite(workload(["ab", "cd", "cd", "ef", "ab", "gh"])).late_blocks == 2
    assert infinite(workload(["ab", "ab", "cd", "ef"])).late_blocks == 0


def test_ids_are_by_namespace():
    chained = Chained()
    path = chained.ids("abc")
    work = Workload.read(Listed([request(0, path), request(1, path, namespace="t")]))
    assert work.num_ids == 6
    assert work.content.tolist() == [0, 0, 1, 1, 2, 2]
    assert work.namespaces == ("", "t")
    assert work.prompt(1).tolist() == [1, 3, 5]


def test_a_digest_names_a_workload():
    trace, other = (generate("chat", seed=seed, requests=50) for seed in (1, 2))
    assert Workload.read(trace).digest == Workload.read(trace).digest
    assert Workload.read(trace).digest != Workload.read(other).digest


def test_a_workload_tells_how_answers_ended():
    told = [
        {"stop": "tool_use", "took_s": 2.5},
        {},
        {"stop": "end_turn", "served": Served(0, seconds=1.5)},
        {"stop": "tool_use", "served": Served(0, seconds=1.5), "took_s": 0.0},
    ]
    listed = [request(second, [second], **more) for second, more in enumerate(told)]
    work = Workload.read(Listed(listed, 4))
    assert work.stops == ("tool_use", "end_turn")
    assert work.stop.tolist() == [0, -1, 1, 0]
    assert np.array_equal(work.took_s, [2.5, np.nan, 1.5, 0.0], equal_nan=True)
    digests = {work.digest}
    for more in ({"stop": "end_turn", "took_s": 2.5}, {"stop": "tool_use"}, {"took_s": 2.5}):
        changed = [request(0, [0], **more), *listed[1:]]
        digests.add(Workload.read(Listed(changed, 4)).digest)
    assert len(digests) == 4


def test_an_empty_trace_is_refused():
    with pytest.raises(InvalidValue, match="no requests"):
        Workload.read(Listed([]))


@pytest.mark.parametrize("capacity", [0, -5, 3])
def test_a_capacity_of_no_page_is_refused(capacity):
    with pytest.raises(InvalidValue, match="capacity"):
        simulate(workload(["ab"]), capacity)


def test_a_policy_that_is_none():
    with pytest.raises(InvalidValue, match="'oracle'; there are lru"):
        ReplayRun("oracle", 100)


def test_paging_by_tokens_repeats_what_a_unit_stands_for():
    paging = Paging(4, 2)
    assert paging.prompt(np.array([7, 9], np.int32), 6).tolist() == [7, 7, 7, 7, 9, 9]
    assert paging.pages(9) == 4


@pytest.mark.skipif(not CONVERSATION.exists(), reason="the conversation trace is not here")
def test_the_conversation_trace():
    """What others measured with caches of blocks, written for that; ours is the one that serves."""
    work = Workload.read(open_trace(CONVERSATION))
    assert 100 * infinite(work).hit_rate == pytest.approx(36.6, abs=0.1)
    assert 100 * belady(work, 5859 * 512).hit_rate == pytest.approx(35.3, abs=0.1)
    assert 100 * simulate(work, 5859 * 512, "lru").hit_rate == pytest.approx(13.6, abs=0.1)
    assert 100 * simulate(work, 5859 * 512, "returns").hit_rate > 17


def test_bounds_are_runs_like_any_other():
    outcome = ReplayRun(BELADY, 100).on(workload(["ab", "ab"]))
    assert (outcome.policy, outcome.hit_blocks) == (BELADY, 2)
