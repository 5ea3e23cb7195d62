"""Files: compressed, broken off, hostile, out of order, read again and again."""

from __future__ import annotations

import gzip
import json
import os
import tracemalloc
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from writing import mooncake, write

from kvkeep.bench.traces import FORMATS, fields, open_trace, reading
from kvkeep.core.errors import InvalidValue

if TYPE_CHECKING:
    from collections.abc import Callable

MOONCAKE = Path(__file__).parents[3] / "shared" / "traces" / "mooncake_conversation.jsonl.gz"


def two_frames(data: bytes) -> bytes:
    """As zstd writes them when files are put one behind the other."""
    half = data.index(b"\n") + 1
    return zstandard.compress(data[:half]) + zstandard.compress(data[half:])


@pytest.mark.parametrize("pack", [gzip.compress, zstandard.compress, two_frames, bytes])
def test_compression_is_found_by_the_first_bytes(
    pack: Callable[[bytes], bytes], tmp_path: Path
) -> None:
    plain = write(tmp_path / "plain", mooncake(0), mooncake(5)).read_bytes()
    path = tmp_path / "trace.whatever"
    path.write_bytes(pack(plain))
    assert [r.time for r in open_trace(path)] == [0, 0.005]


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="named pipes")
def test_a_pipe_cannot_be_gone_through_again(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(InvalidValue, match="is a pipe"):  # and nobody waits for a writer
        open_trace(pipe)


@pytest.mark.parametrize("pack", [gzip.compress, zstandard.compress])
def test_a_file_that_breaks_off_is_read_as_far_as_it_goes(
    pack: Callable[[bytes], bytes], tmp_path: Path
) -> None:
    lines = [mooncake(i, hash_ids=[i * 7919 % 65_521, 70_000 + i]) for i in range(20_000)]
    whole = pack(write(tmp_path / "plain", *lines).read_bytes())
    path = tmp_path / "broken"
    path.write_bytes(whole[: len(whole) * 3 // 4])
    trace = open_trace(path)
    read = list(trace)
    assert 13_000 < len(read) < 20_000  # all that there is
    assert trace.skipped >= 1
    damaged = bytearray(whole)
    damaged[len(whole) // 2 : len(whole) // 2 + 400] = bytes(400)
    path.write_bytes(damaged)
    trace = open_trace(path)
    list(trace)
    assert trace.skipped >= 1


@pytest.mark.parametrize("pack", [gzip.compress, zstandard.compress])
def test_a_bomb_is_refused(
    pack: Callable[[bytes], bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fields, "_ANYWAY_BYTES", 1 << 20)
    path = tmp_path / "bomb"
    path.write_bytes(pack(json.dumps(mooncake()).encode() + b"\n" + (b" " * 65_535 + b"\n") * 1024))
    with pytest.raises(InvalidValue, match="more than 400 times its size"):
        list(open_trace(path))


@pytest.mark.parametrize("packed", [False, True])
def test_a_long_line_is_left_out_without_being_held(
    packed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fields, "LINE_BYTES", 1 << 20)
    good = json.dumps(mooncake()).encode()
    data = b"\n".join((good, b'"' + b"x" * (32 << 20) + b'"', good))
    path = tmp_path / "long"
    path.write_bytes(gzip.compress(data, 1) if packed else data)
    trace = open_trace(path)
    del data
    tracemalloc.start()
    try:
        assert len(list(trace)) == 2
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()
    assert trace.reasons == ("line 2: a line has more than 1 MiB",)


def test_a_million_lines_need_no_more_memory_than_some(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "_WINDOW", 64)
    line = json.dumps(mooncake(output=1)).encode() + b"\n"
    path = tmp_path / "many.gz"
    path.write_bytes(gzip.compress(line * 10_000))

    def peak(path: Path) -> int:
        tracemalloc.start()
        try:
            for _ in open_trace(path):
                pass
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    few = tmp_path / "few.gz"
    few.write_bytes(gzip.compress(line * 2_000))
    peak(few)
    assert peak(path) < peak(few) * 1.2 + 100_000


def test_lines_that_are_a_little_out_of_order_are_sorted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "_WINDOW", 4)
    times = [3000, 1000, 2000, 5000, 4000, 9000, 8000, 7000, 10_000, 11_000, 12_000, 13_000, 14_000]
    trace = open_trace(write(tmp_path / "m", *map(mooncake, times)))
    assert [r.time for r in trace] == [(time - 1000) / 1000 for time in sorted(times)]
    path = write(tmp_path / "far", *map(mooncake, [*times, 500]))
    trace = open_trace(path)
    assert len(list(trace)) == len(times)
    assert "sort the file by time" in trace.reasons[0]


def test_requests_of_one_time_stay_in_order(tmp_path: Path) -> None:
    lines = [mooncake(5, output=number) for number in range(50)]
    assert [r.output_tokens for r in open_trace(write(tmp_path / "m", *lines))] == list(range(50))


def test_a_trace_is_the_same_each_time(tmp_path: Path) -> None:
    trace = open_trace(write(tmp_path / "m", mooncake(0), "?", mooncake(3, 100, hash_ids=[])))
    first = [(r.time, r.units.tolist()) for r in trace]
    one, other = iter(trace), iter(trace)
    pairs = [(next(one).time, next(other).time) for _ in range(2)]
    assert pairs == [(0, 0), (0.003, 0.003)]
    assert [(r.time, r.units.tolist()) for r in trace] == first
    assert trace.skipped == 1  # of the latest time, not of all


def test_many_bad_lines_leave_the_first_few_reasons(tmp_path: Path) -> None:
    trace = open_trace(write(tmp_path / "m", mooncake(), *["?"] * 30))
    assert len(list(trace)) == 1
    assert trace.skipped == 30
    assert [line.partition(":")[0] for line in trace.reasons] == [f"line {n}" for n in range(2, 7)]


def test_what_cannot_be_read_says_why(tmp_path: Path) -> None:
    empty = write(tmp_path / "empty", "", "  ")
    lfs = write(tmp_path / "lfs", "version https://git-lfs.github.com/spec/v1", "oid sha256:0")
    for path, why in [
        (tmp_path / "none", "No such file"),
        (tmp_path, "Is a directory"),
        (empty, "has no lines"),
        (lfs, "git lfs pull"),
        (Path("/dev/zero"), "is a device"),
    ]:
        with pytest.raises(InvalidValue, match=why):
            open_trace(path)
    path = write(tmp_path / "m", mooncake())
    with pytest.raises(InvalidValue, match="a format is one of kvkeep, mooncake"):
        open_trace(path, format="xml")
    with pytest.raises(InvalidValue, match="is no trace in kvkeep"):
        open_trace(path, format="kvkeep")
    with pytest.raises(InvalidValue, match="none of 1 lines is a request in the format prompts"):
        list(open_trace(path, format="prompts"))
    with pytest.raises(InvalidValue, match="unit_tokens"):
        open_trace(path, unit_tokens=0)


def test_bad_lines_before_the_first_good_one_do_not_hide_the_format(tmp_path: Path) -> None:
    path = tmp_path / "m"
    path.write_bytes(b"\xef\xbb\xbf# a comment\n\xff\xfe\n" + json.dumps(mooncake()).encode())
    trace = open_trace(path)
    assert (trace.format, len(list(trace)), trace.skipped) == ("mooncake", 1, 2)


@settings(
    max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    st.sampled_from(FORMATS[1:]),
    st.lists(st.binary(max_size=40) | st.text().map(str.encode), max_size=5),
)
def test_no_bytes_break_a_reader(tmp_path: Path, format: str, lines: list[bytes]) -> None:
    path = tmp_path / "noise"
    path.write_bytes(b"\n".join([json.dumps(mooncake()).encode(), *lines]))
    with suppress(InvalidValue):  # and nothing else
        list(open_trace(path, format=format))


_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=2)
    ),
    max_leaves=6,
)
_FIELDS = (
    "timestamp", "input_length", "output_length", "hash_ids", "chat_id", "parent_chat_id", "turn",
    "type", "session_id", "prompt", "tokens", "messages", "time", "namespace", "kvkeep_trace",
    "unit_tokens", "units", "answer", "store", "cached_tokens", "seconds", "dropped", "name",
    "stop", "took_s", "stop_reason", "api_time", "caller", "requests", "block_size", "t", "in",
    "out", "hash_id_scope", "id",
)  # fmt: skip


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.sampled_from(FORMATS), st.dictionaries(st.sampled_from(_FIELDS), _json, min_size=1))
def test_no_values_break_a_reader(tmp_path: Path, format: str, line: dict[str, object]) -> None:
    header = {"kvkeep_trace": 1, "unit_tokens": 4}
    path = tmp_path / "noise"
    path.write_text("\n".join((json.dumps(header), json.dumps(line))))
    with suppress(InvalidValue):  # and nothing else
        list(open_trace(path, format=format))


@pytest.mark.skipif(not MOONCAKE.is_file(), reason="the Mooncake trace is not beside this checkout")
def test_the_conversation_trace() -> None:
    trace = open_trace(MOONCAKE)
    seen: set[int] = set()
    requests = tokens = units = reusable = 0
    for request in trace:
        requests += 1
        tokens += request.tokens
        ids = request.units.tolist()
        units += len(ids)
        reusable += sum(one in seen for one in ids)
        seen.update(ids)
    assert (requests, tokens, units) == (12_031, 144_793_823, 288_500)
    assert reusable / units == pytest.approx(0.366, abs=0.0005)
