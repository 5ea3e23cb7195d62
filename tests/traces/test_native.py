"""kvkeep's own format: what is written is what is read."""

from __future__ import annotations

import gzip
import json
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from writing import mooncake, write

from kvkeep.bench.traces import (
    Served,
    TraceHeader,
    TraceRequest,
    TraceWriter,
    generate,
    open_trace,
    write_trace,
)
from kvkeep.bench.traces.request import MAX_ID
from kvkeep.core.errors import InvalidValue

if TYPE_CHECKING:
    from pathlib import Path

ids = st.integers(0, MAX_ID)
texts = st.text(max_size=20)


@st.composite
def requests(draw: st.DrawFn) -> TraceRequest:
    tokens, output = draw(st.integers(0, 40)), draw(st.integers(0, 40))
    units = draw(st.lists(ids, min_size=-(-tokens // 8), max_size=-(-tokens // 8)))
    answer = draw(st.none() | st.lists(ids, max_size=(tokens + output) // 8 - tokens // 8))
    cached = draw(st.integers(0, tokens))
    served = Served(cached, draw(st.integers(0, cached)), 0.25, 1.5)
    return TraceRequest(
        draw(st.integers(0, 10**9)) / 1000,
        np.array(units, np.int64),
        tokens,
        output,
        draw(texts),
        draw(st.none() | texts),
        draw(st.none() | texts),
        draw(st.none() | st.integers(0, 99)),
        draw(texts),
        None if answer is None else np.array(answer, np.int64),
        draw(st.booleans()),
        draw(st.none() | st.just(served)),
        draw(texts),
        draw(st.none() | st.just(0.0) | st.just(2.5)),
        draw(st.none() | texts),
    )


def facts(request: TraceRequest) -> tuple[object, ...]:
    answer = None if request.answer is None else request.answer.tolist()
    return (
        request.units.tolist(), answer, request.tokens, request.output_tokens, request.namespace,
        request.session, request.parent, request.turn, request.kind, request.store, request.served,
        request.stop, request.took_s, request.caller,
    )  # fmt: skip


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.lists(requests(), max_size=5), st.sampled_from(["t.jsonl", "t.jsonl.gz", "t.jsonl.zst"]))
def test_what_is_written_is_what_is_read(
    tmp_path: Path, given: list[TraceRequest], name: str
) -> None:
    given.sort(key=lambda request: request.time)
    path = tmp_path / name
    path.unlink(missing_ok=True)
    with TraceWriter(path, TraceHeader("some name", 8, page_size=16, pages=5)) as writer:
        for request in given:
            writer.write(request)
    trace = open_trace(path)
    assert trace.header == TraceHeader("some name", 8, 16, 5)
    assert (trace.name, trace.unit_tokens) == ("some name", 8)
    read = list(trace)
    assert [facts(request) for request in read] == [facts(request) for request in given]
    begin = given[0].time if given else 0
    assert [r.time for r in read] == pytest.approx([r.time - begin for r in given], abs=2e-6)


def test_any_trace_can_be_converted(tmp_path: Path) -> None:
    source = open_trace(write(tmp_path / "m", mooncake(0), mooncake(1500, 30, hash_ids=[0])))
    assert write_trace(source, tmp_path / "out.jsonl") == 2
    again = open_trace(tmp_path / "out.jsonl")
    assert (again.unit_tokens, again.format) == (512, "kvkeep")
    assert [facts(r) for r in again] == [facts(r) for r in source]
    assert [r.time for r in again] == [0, 1.5]


def test_the_same_trace_is_the_same_bytes(tmp_path: Path) -> None:
    for packed, begin in ((".gz", b"\x1f\x8b"), (".zst", b"\x28\xb5\x2f\xfd")):
        one, other = (tmp_path / f"{name}{packed}" for name in "ab")
        for path in (one, other):
            write_trace(generate("chat", seed=1, requests=20), path)
        assert one.read_bytes().startswith(begin)
        assert one.read_bytes() == other.read_bytes()


def test_no_file_is_written_over_and_none_is_left_unfinished(tmp_path: Path) -> None:
    there = write(tmp_path / "there", "precious")
    with pytest.raises(InvalidValue, match="exists already"):
        write_trace(generate("chat", seed=1, requests=1), there)
    assert there.read_text() == "precious\n"
    with pytest.raises(InvalidValue, match="cannot write"):
        write_trace(generate("chat", seed=1, requests=1), tmp_path / "no" / "such")
    bad = open_trace(write(tmp_path / "bad", "?"), format="mooncake")
    with pytest.raises(InvalidValue, match="line 1"):
        write_trace(bad, tmp_path / "out")
    assert not (tmp_path / "out").exists()


HEADER = {"kvkeep_trace": 1, "unit_tokens": 8}


def line(**more: object) -> dict[str, object]:
    return {"time": 0, "tokens": 10, "output_tokens": 9, "units": "0" * 32, **more}


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (line(units="0" * 16), "units has 1 ids; 10 tokens are 2 units"),
        (line(units="0" * 31), "16 hexadecimal digits per id"),
        (line(units="x" * 32), "characters other than hexadecimal"),
        (line(units="f" * 32), "ids in 0 … 2⁶³-1"),
        (line(units=" " * 32), "ids in 0 … 2⁶³-1"),
        (line(units=[1, 2]), "16 hexadecimal digits per id"),
        (line(answer="0" * 32), "answer has 2 ids; 9 tokens fill 1 units"),
        (line(store=1), "store is 1; true or false"),
        (line(cached_tokens=11), "cached_tokens is 11; a whole number in 0 … 10"),
        (line(cached_tokens=1, loaded_tokens=2), "loaded_tokens is 2"),
        (line(cached_tokens=1, seconds="x"), "seconds is 'x'"),
        (line(took_s=-1), "took_s is -1; a number of at least 0"),
        (line(stop=["x"]), "stop is ['x']; text"),
        ({"time": 0, "tokens": 1}, "output_tokens is missing"),
        ({**HEADER, "unit_tokens": 9}, "a second header"),
        ({"dropped": -1}, "dropped is -1"),
    ],
)
def test_bad_lines(bad: dict[str, object], reason: str, tmp_path: Path) -> None:
    trace = open_trace(write(tmp_path / "t", HEADER, line(), bad))
    assert len(list(trace)) == 1
    assert reason in trace.reasons[0]


def test_notes_of_what_is_missing_are_counted(tmp_path: Path) -> None:
    path = write(tmp_path / "t", HEADER, {"dropped": 2}, line(), HEADER, {"dropped": 3})
    trace = open_trace(path)
    assert (len(list(trace)), trace.dropped, trace.skipped) == (1, 5, 0)
    assert len(list(trace)) == 1
    assert trace.dropped == 5


@pytest.mark.parametrize(
    ("header", "reason"),
    [
        ({"kvkeep_trace": 2, "unit_tokens": 8}, "kvkeep_trace is 2, not 1"),
        ({"kvkeep_trace": 1}, "unit_tokens is missing"),
        ({"kvkeep_trace": 1, "unit_tokens": 0}, "unit_tokens is 0"),
        ({"kvkeep_trace": 1, "unit_tokens": 8, "pages": "x"}, "pages is 'x'"),
    ],
)
def test_bad_headers(header: dict[str, object], reason: str, tmp_path: Path) -> None:
    path = write(tmp_path / "t", header, line())
    with pytest.raises(InvalidValue, match=reason):
        open_trace(path)


def test_units_of_another_size_are_not_made_of_it(tmp_path: Path) -> None:
    path = write(tmp_path / "t", HEADER, line())
    with pytest.raises(InvalidValue, match="units of 8 tokens, not 16"):
        open_trace(path, unit_tokens=16)


def test_the_format_is_what_the_documents_say(tmp_path: Path) -> None:
    request = TraceRequest(
        1.25, np.array([10, 2**62]), 12, 5, "n", "s", None, 2, "k", np.array([255]),
        stop="tool_use", took_s=0.75,
    )  # fmt: skip
    with TraceWriter(tmp_path / "t.gz", TraceHeader("x", 8)) as writer:
        writer.write(request)
        writer.note_dropped(3)
    lines = gzip.decompress((tmp_path / "t.gz").read_bytes()).splitlines()
    assert [json.loads(one) for one in lines] == [
        {"kvkeep_trace": 1, "name": "x", "unit_tokens": 8},
        {
            "time": 1.25, "tokens": 12, "output_tokens": 5,
            "units": "000000000000000a4000000000000000", "answer": "00000000000000ff",
            "namespace": "n", "session": "s", "turn": 2, "kind": "k",
            "stop": "tool_use", "took_s": 0.75,
        },
        {"dropped": 3},
    ]  # fmt: skip
