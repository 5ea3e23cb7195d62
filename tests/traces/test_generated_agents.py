"""Generated agents, reasoning and floods: what their traces promise."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvkeep.bench.replay import Workload, simulate, summarise
from kvkeep.bench.replay.jobs import Jobs
from kvkeep.bench.traces import GeneratedTrace, generate
from kvkeep.bench.traces.generators import CodingAgents, Reasoning, Tenants
from kvkeep.core.errors import InvalidValue

if TYPE_CHECKING:
    from kvkeep.bench.traces import Trace, TraceRequest

FEW = ((0, 1), (1, 9))
"""Tokens, where only times and turns are looked at."""
SMALL = CodingAgents(tools=FEW, instructions=FEW, message=FEW, result=FEW, output=FEW, summary=FEW)


def by_session(trace: Trace) -> dict[str, list[TraceRequest]]:
    found: dict[str, list[TraceRequest]] = defaultdict(list)
    for request in trace:
        found[f"{request.session}"].append(request)
    return found


def common(one: TraceRequest, other: TraceRequest) -> int:
    """Leading units that are the same."""
    pairs = zip(one.units.tolist(), other.units.tolist(), strict=False)
    return next(
        (i for i, (a, b) in enumerate(pairs) if a != b), min(len(one.units), len(other.units))
    )


# --- agents ---------------------------------------------------------------------------------------


def test_agents_pause_as_recorded_ones_do() -> None:
    found = summarise(GeneratedTrace(replace(SMALL, delegated=0.0), seed=1, requests=15_000)).stops
    tool, person = found["tool_use"], found["end_turn"]
    assert set(found) == {"tool_use", "end_turn"}
    assert tool.requests / person.requests == pytest.approx(13.3, rel=0.15)
    assert tool.pause_p50_s == pytest.approx(8.7, rel=0.05)
    assert tool.pause_p90_s == pytest.approx(65, rel=0.15)
    assert tool.never == pytest.approx(0.006, abs=0.003)
    assert person.pause_p50_s == pytest.approx(175, rel=0.25)
    assert person.pause_p90_s == pytest.approx(2900, rel=0.15)
    assert person.never is not None
    assert 0.08 < person.never < 0.3


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 10**6))
def test_a_caller_waits_for_its_sub_agents(seed: int) -> None:
    sessions = by_session(GeneratedTrace(replace(SMALL, delegated=0.1), seed=seed, requests=600))
    calls = 0
    for name, requests in sessions.items():
        caller = requests[0].caller
        assert {one.caller for one in requests} == {caller}
        assert [one.turn for one in requests] == list(range(1, len(requests) + 1))
        for one, later in pairwise(requests):
            assert one.took_s is not None
            assert later.time >= one.time + one.took_s - 1e-5
            if one.kind == "subagent":
                assert one.stop == "tool_use"
        if caller is None:
            assert {one.kind for one in requests} == {"agents"}
            continue
        calls += 1
        assert name.startswith(f"{caller}/")
        assert {one.kind for one in requests} == {"subagent"}
        # It begins when an answer that calls a tool ends, and is over before the caller goes on.
        before = [one for one in sessions[caller] if one.time < requests[0].time][-1]
        assert before.took_s is not None
        assert before.stop == "tool_use"
        assert requests[0].time == pytest.approx(before.time + before.took_s, abs=1e-5)
        after = next((one for one in sessions[caller] if one.time > before.time), None)
        if after is not None:
            assert requests[-1].stop == "end_turn"
            assert requests[-1].took_s is not None
            assert after.time >= requests[-1].time + requests[-1].took_s - 1e-5
    assert calls


def test_jobs_of_agents_have_their_sub_agents() -> None:
    work = Workload.read(generate("agents", seed=2, requests=600, unit_tokens=512))
    assert (work.caller >= 0).any()
    jobs = Jobs(work)
    for number in np.flatnonzero(work.caller >= 0):
        assert work.session[jobs.first[jobs.of[number]]] == work.caller[number]


def test_prompts_share_tools_and_instructions_and_go_back() -> None:
    trace = GeneratedTrace(
        CodingAgents(agents=1, context=60_000), seed=3, requests=900, unit_tokens=64
    )
    sessions = by_session(trace)
    mains = [one for one in sessions.values() if one[0].caller is None]
    others = [one for one in sessions.values() if one[0].caller is not None]
    assert len(mains) > 10
    assert others
    shared = common(mains[0][0], mains[1][0]) * 64
    assert 10_000 < shared < 18_000
    assert {common(mains[0][0], one[0]) * 64 for one in mains[1:]} == {shared}
    # A sub-agent has its caller's tools, and other instructions.
    tools = {common(mains[0][0], one[0]) * 64 for one in others}
    assert len(tools) == 1
    assert 8000 - 64 <= tools.pop() < 12_000 < shared
    on, back = 0, 0
    for requests in mains:
        for one, later in pairwise(requests):
            assert one.answer is not None
            held = [*one.units[: one.tokens // 64].tolist(), *one.answer.tolist()]
            if later.units[: len(held)].tolist() == held:
                on += 1
            else:
                back += 1
                assert common(one, later) * 64 >= shared
    assert 0 < back < on / 10
    assert max(one.tokens for requests in mains for one in requests) < 60_000 + 40_000


# --- reasoning ------------------------------------------------------------------------------------


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from([1, 3, 16]), st.sampled_from([0.0, 0.5, 1.0]))
def test_reasoning_and_what_is_behind_it_is_never_read_again(
    seed: int, unit: int, reasons: float
) -> None:
    workload = Reasoning(
        reasons=reasons, instructions=((0, 5), (1, 40)), message=FEW, output=((0, 2), (1, 30)),
        reasoning=((0, 20), (1, 60)), turns=((0, 2), (1, 6)),
    )  # fmt: skip
    kept = stripped = 0
    trace = GeneratedTrace(workload, seed=seed, requests=60, unit_tokens=unit)
    for requests in by_session(trace).values():
        for one, later in pairwise(requests):
            assert one.answer is not None
            full = one.tokens // unit
            held = [*one.units[:full].tolist(), *one.answer.tolist()]
            assert len(one.answer) == (one.tokens + one.output_tokens - 1) // unit - full
            again = set(later.units.tolist())
            if one.tokens + one.output_tokens <= later.tokens:
                kept += 1
                assert later.units[: len(held)].tolist() == held
            else:
                stripped += 1
                assert later.units[:full].tolist() == held[:full]
                assert not again & set(held[full:])
    assert (kept > 0) == (reasons < 1)
    assert (stripped > 0) == (reasons > 0)


def test_answers_with_reasoning_fill_a_cache_with_what_is_not_read() -> None:
    hits, evicted = [], []
    for reasons in (0.0, 1.0):
        workload = Workload.read(
            generate(
                "reasoning", seed=1, requests=800, unit_tokens=128, changed={"reasons": reasons}
            )
        )
        found = simulate(workload, 60_000)
        hits.append(found.hit_rate)
        evicted.append(found.evicted_pages)
    assert hits[1] < hits[0] - 0.1
    assert evicted[1] > 2 * evicted[0]


# --- a flood --------------------------------------------------------------------------------------


def test_one_tenant_floods_the_others() -> None:
    trace = GeneratedTrace(Tenants(tenants=10, flood=4.0), seed=1, requests=1500)
    sessions = by_session(trace)
    spaces = Counter(requests[0].namespace for requests in sessions.values())
    assert spaces["flooder"] / spaces.total() == pytest.approx(0.8, abs=0.03)
    assert len(spaces) == 11
    flooder = [one for one in trace if one.namespace == "flooder"]
    assert {one.kind for one in flooder} == {"flood"}
    assert max(map(len, (sessions[f"{one.session}"] for one in flooder))) == 1
    # All that its prompts have in common is their template.
    seen: set[int] = set()
    for one in flooder:
        units = one.units.tolist()
        assert 2000 < one.tokens < 17_000
        assert not seen & set(units[13:])
        seen.update(units)


def test_without_a_flood_nothing_changes() -> None:
    plain, other = (
        [(r.time, r.namespace, r.units.tolist()) for r in trace]
        for trace in (
            generate("tenants", seed=5, requests=60),
            generate("tenants", seed=5, requests=60, changed={"flood": 0}),
        )
    )
    assert plain == other


# --- numbers --------------------------------------------------------------------------------------


def test_numbers_of_a_kind_can_be_changed() -> None:
    made = generate("reasoning", seed=1, requests=5, changed={"reasons": 1, "assistants": 7})
    assert made.workload == Reasoning(reasons=1.0, assistants=7)


@pytest.mark.parametrize(
    ("kind", "changed", "message"),
    [
        ("chat", {"flood": 1}, "chat has no number 'flood'; it has sessions_per_second, assis"),
        ("chat", {"turns": 1}, "no number 'turns'"),
        ("chat", {"kind": 1}, "no number 'kind'"),
        ("tenants", {"flood": -1}, "flood is -1; a number of at least 0"),
        ("tenants", {"flood": float("nan")}, "flood is nan"),
        ("tenants", {"tenants": 0}, "tenants is 0; a whole number of at least 1"),
        ("tenants", {"tenants": 1.5}, "tenants is 1.5"),
        ("agents", {"sessions_per_second": 0}, "sessions_per_second is 0"),
    ],
)
def test_wrong_numbers(kind: str, changed: dict[str, float], message: str) -> None:
    with pytest.raises(InvalidValue, match=message):
        generate(kind, seed=1, requests=1, changed=changed)
