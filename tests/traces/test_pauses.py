"""How long sessions pause, by how their answers ended."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvkeep.bench.traces import Served, StopSummary, TraceRequest, open_trace
from kvkeep.bench.traces.pauses import Pauses
from kvkeep.bench.traces.request import NO_UNITS

AGENTS = Path(__file__).parents[3] / "shared" / "traces" / "agent_sessions.jsonl.gz"


def asked(time: float, session: str | None, stop: str, **more: object) -> TraceRequest:
    return TraceRequest(time, NO_UNITS, 0, 0, session=session, stop=stop, **more)  # type: ignore[arg-type]


def test_a_pause_begins_where_the_answer_ends() -> None:
    pauses = Pauses()
    for request in (
        asked(0, "a", "tool_use", took_s=2.0),
        asked(1, "b", "tool_use", served=Served(0, seconds=3.0)),
        asked(5, "b", "end_turn"),
        asked(10, "a", "", took_s=4.0),
        asked(11, "a", "end_turn", took_s=1.0),  # before the end of the one before it
        asked(12, None, "length"),
        asked(65, "b", "end_turn"),
    ):
        pauses.add(request)
    found = pauses.summaries()
    assert list(found) == ["end_turn", "tool_use", "", "length"]
    assert found["tool_use"] == StopSummary(2, 4.5, pytest.approx(7.3), 0.0)
    assert found["end_turn"] == StopSummary(3, 60.0, 60.0, pytest.approx(2 / 3))
    assert found[""] == StopSummary(1, 0.0, 0.0, 0.0)
    assert found["length"] == StopSummary(1)


def test_equal_names_in_two_namespaces_are_two_sessions() -> None:
    pauses = Pauses()
    for space in "xy":
        pauses.add(asked(0, "a", "stop", namespace=space))
    assert pauses.summaries()["stop"].never == 1


@given(
    st.lists(
        st.tuples(st.integers(0, 5), st.sampled_from("abc"), st.sampled_from(["", "x", "y"])),
        max_size=20,
    )
)
def test_each_pause_is_that_to_the_next_request_of_its_session(
    given: list[tuple[int, str, str]],
) -> None:
    times = np.cumsum([gap for gap, _, _ in given]).tolist()
    pauses = Pauses()
    for now, (_, session, stop) in zip(times, given, strict=True):
        pauses.add(asked(now, session, stop))
    found = pauses.summaries()
    assert set(found) == {stop for _, _, stop in given}
    for stop, one in found.items():
        mine = [at for at, (_, _, its) in enumerate(given) if its == stop]
        waits = []
        for at in mine:
            later = [n for n in range(at + 1, len(given)) if given[n][1] == given[at][1]]
            waits += [times[later[0]] - times[at]] if later else []
        assert one.requests == len(mine)
        assert one.never == pytest.approx(1 - len(waits) / len(mine))
        assert one.pause_p50_s == (pytest.approx(np.median(waits)) if waits else None)


@pytest.mark.skipif(not AGENTS.is_file(), reason="the agent trace is not beside this checkout")
def test_tools_return_sooner_and_more_often_than_people() -> None:
    pauses = Pauses()
    for request in open_trace(AGENTS, strict=True):
        pauses.add(request)
    found = pauses.summaries()
    assert {stop: one.requests for stop, one in found.items()} == {
        "tool_use": 6740,
        "": 583,
        "end_turn": 477,
    }
    tool, person = found["tool_use"], found["end_turn"]
    assert tool.pause_p50_s == pytest.approx(8.7, abs=0.1)
    assert person.pause_p50_s == pytest.approx(174, abs=5)
    assert (tool.never, person.never) == (pytest.approx(0.006, 0.1), pytest.approx(0.134, 0.1))
