"""Sessions of agents as kv-cache-tester has them: nested requests, scopes of ids, bad files."""

from __future__ import annotations

import gzip
import json
import tracemalloc
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from writing import write

from kvkeep.bench.replay import Workload, summarise
from kvkeep.bench.traces import (
    TraceRequest,
    open_trace,
    sessions,
)
from kvkeep.core.errors import InvalidValue

if TYPE_CHECKING:
    from pathlib import Path

QUIET = [HealthCheck.function_scoped_fixture]


def asked(t: float, ids: list[int], tokens: int | None = None, **more: Any) -> dict[str, Any]:
    """A request as such files have it."""
    return {
        "t": t, "type": "s", "model": "m", "in": 64 * len(ids) if tokens is None else tokens,
        "out": 9, "hash_ids": ids, "input_types": ["text"], "output_types": [], "stop": "", **more,
    }  # fmt: skip


def agent(t: float, *requests: dict[str, Any], **more: Any) -> dict[str, Any]:
    """A sub-agent."""
    return {
        "t": t, "type": "subagent", "agent_id": "agent_1", "subagent_type": "Explore",
        "requests": list(requests), "models": ["m"], "tool_tokens": 0, **more,
    }  # fmt: skip


def session(name: str, *requests: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {
        "id": name, "models": ["m"], "block_size": 64, "hash_id_scope": "local",
        "tool_tokens": 12_536, "requests": list(requests), **more,
    }  # fmt: skip


SESSION = session(
    "s",
    asked(0, [1, 2], 150, stop="tool_use", api_time=2.5, think_time=0.0),
    agent(4, asked(4.5, [1, 7], api_time=1), asked(6, [1, 7, 8], stop="end_turn")),
    asked(10, [1, 2, 3], stop="end_turn", api_time=0),
)


def common(one: TraceRequest, other: TraceRequest) -> int:
    """Leading units that are the same."""
    pairs = zip(one.units.tolist(), other.units.tolist(), strict=False)
    return sum(1 for a, b in pairs if a == b)


def test_a_session_and_its_sub_agent(tmp_path: Path) -> None:
    trace = open_trace(write(tmp_path / "trace_1.json", SESSION))
    assert (trace.format, trace.unit_tokens, trace.name) == ("kv-cache-tester", 64, "trace_1.json")
    first, explore, deeper, last = trace
    assert [r.time for r in trace] == [0, 4.5, 6, 10]
    assert [r.session for r in trace] == ["s", "s/agent_1", "s/agent_1", "s"]
    assert [r.caller for r in trace] == [None, "s", "s", None]
    assert [r.turn for r in trace] == [1, 1, 2, 2]
    assert [r.kind for r in trace] == ["", "Explore", "Explore", ""]
    assert [r.stop for r in trace] == ["tool_use", "", "end_turn", "end_turn"]
    assert [r.took_s for r in trace] == [2.5, 1, None, None]
    assert [(r.tokens, len(r.units)) for r in trace] == [(150, 3), (128, 2), (192, 3), (192, 3)]
    # A sub-agent begins with what its caller begins with: the ids of one file are of one scope.
    assert (common(first, explore), common(explore, deeper), common(first, last)) == (1, 2, 2)
    work = Workload.read(trace)
    assert work.caller.tolist() == [-1, 0, 0, -1]
    assert work.session.tolist() == [0, 1, 1, 0]


def test_times_of_a_sub_agent_may_count_from_its_call(tmp_path: Path) -> None:
    inner = agent(40, asked(0.5, [1]), asked(50, [1, 2]))
    path = write(tmp_path / "a.json", session("s", asked(0, [1]), inner))
    assert [r.time for r in open_trace(path)] == [0, 40.5, 90]


def test_sub_agents_of_sub_agents(tmp_path: Path) -> None:
    inner = agent(2, asked(2, [1, 2]), agent(3, asked(3, [1, 2, 3])), agent(4, asked(4, [1])))
    path = write(tmp_path / "a.json", session("s", asked(0, [1]), inner))
    trace = open_trace(path)
    units = [r.units.tolist() for r in trace]
    assert [len(row) for row in units] == [1, 2, 3, 1]
    assert units[2][:2] == units[1]
    assert units[1][:1] == units[0] == units[3]
    found = [(r.session, r.caller) for r in trace]
    assert found == [
        ("s", None),
        ("s/agent_1", "s"),
        ("s/agent_1/agent_1", "s/agent_1"),
        ("s/agent_1/agent_1#2", "s/agent_1"),
    ]


def test_ids_are_known_in_their_session_unless_they_are_global(tmp_path: Path) -> None:
    for scope, shared in (("local", 0), ("global", 2), (None, 0)):
        place = tmp_path / str(scope)
        place.mkdir()
        for name in "ab":
            write(place / f"{name}.json", session(name, asked(0, [1, 2]), hash_id_scope=scope))
        one, other = open_trace(place)
        assert common(one, other) == shared, scope


def test_equal_prompts_of_a_session_are_equal_to_their_last_token(tmp_path: Path) -> None:
    """Files name full blocks only; a request is often sent twice, with and without streaming."""
    requests = [
        asked(0, [1, 2], 150),
        asked(1, [1, 2], 150),
        asked(2, [1, 2], 151),
        asked(3, [], 9),
    ]
    path = write(tmp_path / "a.json", session("s", *requests, asked(4, [], 9)))
    first, again, longer, unknown, other = open_trace(path)
    assert (common(first, again), common(first, longer), common(unknown, other)) == (3, 2, 0)


@given(st.lists(st.lists(st.integers(0, 1), max_size=12), max_size=5), st.integers(1, 4))
@settings(max_examples=40, deadline=None, suppress_health_check=QUIET)
def test_coarser_ids_are_equal_where_all_tokens_before_them_are(
    tmp_path: Path, given: list[list[int]], step: int
) -> None:
    path = tmp_path / "a.json"
    write(path, session("s", *(asked(at, ids, 64 * len(ids)) for at, ids in enumerate(given))))
    if not given:
        return
    seen: dict[int, tuple[int, ...]] = {}
    known: dict[tuple[int, ...], int] = {}
    read = list(open_trace(path, unit_tokens=64 * step))
    for request, ids in zip(read, given, strict=True):
        assert len(request.units) == -(-len(ids) // step)
        for at, unit in enumerate(request.units.tolist()):
            prefix = tuple(ids[: (at + 1) * step])
            assert seen.setdefault(unit, prefix) == prefix
            assert known.setdefault(prefix, unit) == unit


def test_files_that_are_written_otherwise(tmp_path: Path) -> None:
    """With indentation, a session a line, as a list, compressed, the header last."""
    two = [SESSION, session("t", asked(1, [1, 2]))]
    text = json.dumps(two, indent=2)
    turned = [dict(reversed(one.items())) for one in two]
    assert next(iter(turned[0])) == "requests"
    shapes = {
        "list.json": text.encode(),
        "lines.jsonl": "\n".join(map(json.dumps, two)).encode(),
        "behind.json": "\n".join(json.dumps(one, indent=1) for one in two).encode(),
        "packed.json.gz": gzip.compress(text.encode()),
        "last.json": json.dumps(turned).encode(),
        "mark.json": b"\xef\xbb\xbf" + text.encode(),
    }
    results = []
    for name, data in shapes.items():
        (tmp_path / name).write_bytes(data)
        trace = open_trace(tmp_path / name)
        assert trace.format == "kv-cache-tester", name
        results.append([(r.time, r.session, r.units.tolist(), r.stop, r.caller) for r in trace])
    assert results[0]
    assert all(result == results[0] for result in results)


def test_a_request_without_ids_has_a_length_alone(tmp_path: Path) -> None:
    bare = {"t": 1, "in": 200, "out": 3}
    trace = open_trace(write(tmp_path / "a.json", session("a", asked(0, [1]), bare)))
    assert [request.units is None for request in trace] == [False, True]
    assert Workload.read(trace).unknown == 1


def test_a_directory_is_one_trace_and_other_files_in_it_are_not_read(tmp_path: Path) -> None:
    write(tmp_path / "b.json", session("b", asked(1, [1])))
    write(tmp_path / "a.json", session("a", asked(0, [1]), asked(2, [1, 2])))
    write(tmp_path / "notes.txt", "nothing")
    write(tmp_path / "metadata.json", {"requests": 5})
    (tmp_path / "more.json").mkdir()
    trace = open_trace(tmp_path)
    assert sorted((r.session, r.turn) for r in trace) == [("a", 1), ("a", 2), ("b", 1)]
    assert trace.reasons == ("metadata.json, object 1: a session has a list of requests",)
    assert list(map(str, trace)) == list(map(str, trace))


def test_two_sessions_of_one_name_are_two(tmp_path: Path) -> None:
    for name in "ab":
        write(tmp_path / f"{name}.json", session("same", asked(0, [1])))
    write(tmp_path / "c.json", {"requests": [asked(1, [1])]})  # the file's name is its name
    one, other, third = open_trace(tmp_path)
    assert {one.session, other.session, third.session} == {"same", "same#2", "c"}
    assert common(one, other) == 0


def test_sessions_begin_within_the_time_of_the_longest(tmp_path: Path) -> None:
    for number in range(200):
        write(tmp_path / f"{number}.json", session(f"s{number}", asked(0, [1]), asked(5, [1, 2])))
    write(tmp_path / "long.json", session("long", asked(0, [1]), asked(1000, [1, 2])))
    trace = open_trace(tmp_path)
    begins = {}
    for request in trace:
        begin = begins.setdefault(request.session, request.time)
        if request.session != "long":
            assert request.time - begin == pytest.approx(0 if request.turn == 1 else 5)
    times = sorted(begins.values())
    assert times[0] == 0
    assert 980 < times[-1] <= 1000
    assert np.median(times) == pytest.approx(500, abs=100)
    assert begins == {r.session: r.time for r in trace if r.turn == 1}


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        (asked(-1, [1]), "t is -1; seconds in 0 … 1e+09"),
        ({**asked(0, [1]), "t": None}, "t is None; a number"),
        (asked(0, [1, 2], 64), "hash_ids has 2 ids; 64 tokens are 1 blocks of 64"),
        (asked(0, [1, -2]), "ids in 0 … 2⁶³-1"),
        (asked(0, [1], **{"in": -5}), "in is -5"),
        (asked(0, [1], out="x"), "out is 'x'"),
        (asked(0, [1], stop=[]), "stop is []"),
        (asked(0, [1], api_time=-3), "api_time is -3"),
        (asked(0, [1], stop="x" * 600), "at most 512 characters"),
        ("a text", "an object is needed, got 'a text'"),
        (5, "an object is needed, got 5"),
        ([asked(0, [1])], "an object is needed, got [{"),
    ],
)
def test_a_bad_request_costs_no_other(wrong: object, reason: str, tmp_path: Path) -> None:
    good = asked(1, [1]), asked(2, [1, 2])
    path = tmp_path / "a.json"
    path.write_text(json.dumps(session("s", good[0], wrong, good[1])))  # type: ignore[arg-type]
    trace = open_trace(path)
    assert [r.time for r in trace] == [0, 1]
    assert trace.skipped == 1
    assert trace.reasons[0].startswith("a.json, ")
    assert reason in trace.reasons[0]
    assert len(trace.reasons[0]) < 400


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"block_size": 0}, "block_size is 0"),
        ({"block_size": 48}, "block_size is 48, of which 64 tokens per id are no multiple"),
        ({"hash_id_scope": "file"}, "hash_id_scope is 'file'; local or global"),
        ({"id": 1.5}, "id is 1.5; text or a whole number"),
    ],
)
def test_a_bad_session_costs_no_other(more: dict[str, Any], reason: str, tmp_path: Path) -> None:
    lines = session("s", asked(0, [1])), session("t", asked(0, [1]), **more)
    trace = open_trace(write(tmp_path / "a.jsonl", *lines))
    assert [r.session for r in trace] == ["s"]
    assert reason in trace.reasons[0]


def test_blocks_of_several_sizes_have_ids_of_a_common_one(tmp_path: Path) -> None:
    lines = session("s", asked(0, [1, 2, 3])), session("t", asked(0, [1, 2], 90), block_size=48)
    path = write(tmp_path / "a.jsonl", *lines)
    assert [len(r.units) for r in open_trace(path, unit_tokens=192)] == [1, 1]


@pytest.mark.parametrize(
    ("cut", "reason"),
    [
        (lambda text: text[:-1], "line 2: not JSON"),
        (lambda text: text[: len(text) // 2], "line 2: not JSON"),
        (lambda text: text + '{"id": "', "line 2: not JSON: more follows"),
        (lambda text: text + "]\n," + '"x"', "line 3: not JSON"),
        (lambda text: text + "\n" + '{"requests": [' * 40 + "]}" * 40, "nested too deeply"),
        (lambda text: text + '\n{"requests": {"a": 1}}', "a session has a list of requests"),
        (lambda text: text + '\n{"id": "\\u12"}', "not JSON"),
    ],
)
def test_damaged_files_are_read_as_far_as_they_go(cut: Any, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    whole = json.dumps(session("s", asked(0, [1]))) + "\n"
    path.write_text(whole + cut(json.dumps(SESSION)))
    trace = open_trace(path)
    assert next(iter(trace)).session == "s"
    assert any(reason in one for one in trace.reasons), trace.reasons


def test_the_ids_of_a_long_session_take_the_memory_of_its_longest_prompt(tmp_path: Path) -> None:
    ids = list(range(4000))
    requests = [asked(turn, ids[: 1000 + 10 * turn]) for turn in range(300)]
    path = write(tmp_path / "a.json", session("s", *requests))
    assert summarise(open_trace(path)).reusable_share > 0.99
    reader = sessions.SessionReader([path], 64)
    tracemalloc.start()
    try:
        made = reader.requests(lambda reason: None)
        next(made)
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held < 1 << 20  # 300 prompts of 2,500 ids are 6 MB


def test_requests_may_be_out_of_order_and_bad_ones_among_them(tmp_path: Path) -> None:
    """Ids are kept as differences to the request before, in the file and then by time."""
    ids = [[1, 2, 3], [1, 2, 3, 4], [1, 9], [1, 2, 3, 4, 5], [1, 9, 8], [7]]
    times = [0, 30, 20, 10, 40, 5]
    requests = [asked(t, one) for t, one in zip(times, ids, strict=True)]
    requests[1]["in"] = 64  # it has too many ids, and is left out
    trace = open_trace(write(tmp_path / "a.json", session("s", *requests)))
    plain = open_trace(
        write(tmp_path / "b.json", session("s", *sorted(requests, key=lambda r: r["t"])))
    )
    shown = [(r.time, r.turn, r.units.tolist()) for r in trace]
    assert shown == [(r.time, r.turn, r.units.tolist()) for r in plain]
    assert [(time, turn, len(units)) for time, turn, units in shown] == [
        (0, 1, 3), (5, 2, 1), (10, 3, 5), (20, 4, 2), (40, 5, 3),
    ]  # fmt: skip
    assert trace.skipped == plain.skipped == 1
    every = list(trace)
    assert [common(every[0], one) for one in every] == [3, 0, 3, 1, 1]


def test_a_file_that_is_damaged_at_once_is_of_no_format(tmp_path: Path) -> None:
    path = tmp_path / "a.json.gz"
    path.write_bytes(b"\x1f\x8b" + b"x" * 100)
    with pytest.raises(InvalidValue, match="cannot be read further"):
        open_trace(path)


@settings(max_examples=100, deadline=None, suppress_health_check=QUIET)
@given(st.data())
def test_no_damage_breaks_the_reader(tmp_path: Path, data: st.DataObject) -> None:
    text = bytearray(json.dumps([SESSION, session("t", asked(0, [1, 2]))]).encode())
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(text) - 1))
        new = data.draw(
            st.sampled_from([b"", b"{", b"}", b"[", b"]", b'"', b"\\", b"1e999", b"\xff"])
        )
        text[at : at + data.draw(st.integers(0, 9))] = new
    path = tmp_path / "a.json"
    path.write_bytes(text)
    with suppress(InvalidValue):  # and nothing else
        for request in open_trace(path, format="kv-cache-tester"):
            if request.units is not None:
                assert len(request.units) == -(-request.tokens // 64)
