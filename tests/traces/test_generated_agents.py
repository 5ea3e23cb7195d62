"""Generated agents: what their traces promise."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvkeep.bench.replay import Workload
from kvkeep.bench.replay.jobs import Jobs
from kvkeep.bench.traces import GeneratedTrace, generate
from kvkeep.bench.traces.generators import CodingAgents

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


def test_agents_pause_as_recorded_ones_do() -> None:
    trace = GeneratedTrace(replace(SMALL, delegated=0.0), seed=1, requests=15_000)
    pauses: dict[str, list[float]] = defaultdict(list)
    ends: Counter[str] = Counter()
    for requests in by_session(trace).values():
        ends.update(one.stop for one in requests)
        for one, later in pairwise(requests):
            assert one.took_s is not None
            pauses[one.stop].append(later.time - one.time - one.took_s)
    assert set(ends) == {"tool_use", "end_turn"}
    assert ends["tool_use"] / ends["end_turn"] == pytest.approx(13.3, rel=0.15)
    tool, person = pauses["tool_use"], pauses["end_turn"]
    assert np.quantile(tool, (0.5, 0.9)) == pytest.approx([8.7, 65], rel=0.15)
    assert np.quantile(person, (0.5, 0.9)) == pytest.approx([175, 2900], rel=0.25)
    assert len(tool) / ends["tool_use"] == pytest.approx(0.994, abs=0.003)
    assert 0.7 < len(person) / ends["end_turn"] < 0.92


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
