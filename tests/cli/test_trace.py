"""``kvkeep trace``: info, generate, convert."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from kvkeep.cli import main

if TYPE_CHECKING:
    from pathlib import Path

LINE = '{"timestamp": %d, "input_length": 1000, "output_length": 7, "hash_ids": [%d, %d]}\n'


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "m.jsonl"
    path.write_text(LINE % (0, 1, 2) + "oops\n" + LINE % (1500, 1, 3))
    return path


def test_info(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", "info", str(trace)]) == 0
    out = capsys.readouterr().out
    for text in (
        "(mooncake)",
        "25.0% of the units",
        "2,000",
        "lines skipped",
        "line 2: not JSON",
        "1.5 s",
    ):
        assert text in out
    assert main(["trace", "info", str(trace), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["requests"], found["units"], found["reusable_units"]) == (2, 4, 1)
    assert (found["skipped"], found["format"], found["reusable_share"]) == (1, "mooncake", 0.25)


def test_a_directory_of_sessions(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = tmp_path / "traces"
    place.mkdir()
    for name in ("one", "two", "three"):
        asked = [
            {"t": 9 * turn, "in": 640 * turn + 640, "out": 3, "hash_ids": [*range(10 * turn + 10)],
             "stop": "tool_use" if turn < 4 else "end_turn", "api_time": 2}
            for turn in range(5)
        ]  # fmt: skip
        called = {"t": 20, "type": "subagent", "agent_id": "x", "requests": [asked[0] | {"t": 21}]}
        found = {"id": name, "block_size": 64, "requests": [*asked[:3], called, *asked[3:]]}
        (place / f"{name}.json").write_text(json.dumps(found, indent=1))
    words = ["--unit", "128"]
    assert main(["trace", "info", str(place), *words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["requests"], found["sessions"], found["unit_tokens"]) == (18, 6, 128)
    assert found["format"] == "kv-cache-tester"
    assert found["span_s"] > 36
    out = tmp_path / "native.jsonl.gz"
    assert main(["trace", "convert", str(place), str(out), *words]) == 0
    cost = tmp_path / "cost.json"
    cost.write_text('{"kvkeep_cost": 1, "seconds_per_token": 0.001, "kv_bytes_per_token": 100}')
    capsys.readouterr()
    shown = []
    for trace in ([str(place), *words], [str(out)]):
        for capacity in ("2560", "1280+2560"):
            replay = ["replay", *trace, "--capacity", capacity, "--policy", "lru", "--jobs", "1"]
            more = ["--tiering", "exclusive", "--cost", str(cost), "--users", "2", "--json"]
            assert main([*replay, *more]) == 0
            latency = json.loads(capsys.readouterr().out)["latency"]
            assert latency["jobs"] == 3
            shown.append(latency)
    # The converted trace says the same, sub-agents and times included.
    for one, other in zip(shown[:2], shown[2:], strict=True):
        assert one["job_s"] == pytest.approx(other["job_s"])
    assert main(["trace", "info", str(tmp_path)]) == 2
    assert "Is a directory without sessions" in capsys.readouterr().err


def test_generate_and_convert(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "made.jsonl.gz"
    made = ["trace", "generate", "chat", "--seed", "3", "--requests", "50", "--out", str(out)]
    assert main(made) == 0
    assert "50 requests" in capsys.readouterr().out
    assert main(["trace", "info", str(out)]) == 0
    shown = capsys.readouterr().out
    assert "sessions" in shown
    assert main(made) == 2
    assert "exists already" in capsys.readouterr().err
    converted = tmp_path / "c.jsonl"
    assert main(["trace", "convert", str(trace), str(converted)]) == 0
    assert "2 requests" in capsys.readouterr().out
    assert main(["trace", "info", str(converted), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["reusable_units"] == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--format", "bailian"], "none of 3 lines"),
        (["--unit", "16"], "none of 3 lines"),
    ],
)
def test_what_is_wrong_is_one_line(
    trace: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["trace", "info", str(trace), *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_ids_that_are_not_chained_are_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "m.jsonl"
    path.write_text(LINE % (0, 1, 2) + LINE % (1, 5, 2))
    assert main(["trace", "info", str(path)]) == 0
    assert "Warning: 1 ids follow another id" in capsys.readouterr().out


# Files that people have.
DELAY = (
    [
        {"session_id": f"s{session}", "input_length": 512 * turn, "output_length": 8,
         "hash_ids": [10 * session + at for at in range(turn)],
         **({"timestamp": 1000 * session} if turn == 1 else {"delay": 500})}
        for session in range(4) for turn in (1, 2, 3, 4)
    ]
)  # fmt: skip
LENGTHS = [{"kvkeep_trace": 1, "name": "lengths", "unit_tokens": 512}] + [
    {"time": second, "tokens": 1000, "output_tokens": 50, "units": None} for second in range(400)
]
SYSTEM = [
    {"max_tokens": 9, "system": f"{agent} is an agent with long rules from the start",
     "messages": [{"role": "user", "content": "Hello"}]}
    for agent in ("Anna", "Boris")
]  # fmt: skip
UNSORTED = [
    {"timestamp": time, "input_length": 512 * len(ids), "output_length": 1, "hash_ids": ids}
    for time, ids in ((2000, [1, 2]), (0, [1, 3]), (1000, [1, 2, 4]))
]
UNREADABLE = [*UNSORTED, *[{**UNSORTED[0], "hash_ids": "?"}] * 3]


@pytest.mark.parametrize(
    ("lines", "share", "gap"),
    [
        (DELAY, 0.6, None),
        (LENGTHS, None, "The trace has lengths only"),
        (SYSTEM, 5 / 42, None),
        (UNSORTED, 3 / 7, None),
        (["\ufeff" + json.dumps(UNSORTED[0])], 0.0, None),
        ([*UNSORTED, "oops"], 3 / 7, "1 of 4 lines of the trace are skipped: line 4: not JSON"),
        (UNREADABLE, 3 / 7, "3 of 6 lines of the trace are skipped: line 4: hash_ids is"),
    ],
    ids=["delay", "lengths", "system", "unsorted", "mark", "oops", "unreadable"],
)
def test_what_a_file_leaves_out_is_said_by_all_who_read_it(
    lines: list[object],
    share: float | None,
    gap: str | None,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    plans = gap is None or gap.startswith("1 of")
    path = tmp_path / "trace"
    path.write_text(
        "".join(f"{one if isinstance(one, str) else json.dumps(one)}\n" for one in lines)
    )
    replay = ["replay", str(path), "--capacity", "1M", "--policy", "lru", "--jobs", "1"]
    plan = ["plan", str(path), "--memory", "1M", "--jobs", "1"]
    for words in (["trace", "info", str(path)], replay, plan):
        if words is plan and not plans:
            for more in ([], ["--json"]):
                assert main([*words, *more]) == 2
                said = capsys.readouterr()
                assert not said.out
                assert said.err.count("\n") == 1
                assert "has lengths only" in said.err or "3 of 6 lines are skipped" in said.err
            continue
        assert main(words) == 0
        text = " ".join(capsys.readouterr().out.split())
        assert (f"Warning: {gap}" in text) if gap else ("skipped" not in text)
        assert "No cache will help" not in text
        assert main([*words, "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        skipped = int(gap[0]) if gap and gap[0].isdecimal() else 0
        assert found["skipped"] == skipped == len(found["skipped_reasons"])
        assert found["unknown"] == (400 if lines is LENGTHS else 0)
        if words[0] == "trace":
            assert found["reusable_share"] == (None if share is None else pytest.approx(share))
        elif words is replay:
            assert found["hit_rate"] == pytest.approx(share or 0.0)
        else:
            assert found["outcomes"][-1]["hit_rate"] == pytest.approx(share)
            assert not gap or found["warnings"][0].startswith(gap)


def test_lengths_alone_stay_that_when_converted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, converted = tmp_path / "a.jsonl", tmp_path / "c.jsonl"
    path.write_text("".join(f"{json.dumps(one)}\n" for one in LENGTHS[:5]))
    assert main(["trace", "convert", str(path), str(converted)]) == 0
    assert main(["plan", str(converted), "--memory", "1M"]) == 2
    assert "has lengths only" in capsys.readouterr().err


def test_what_a_trace_says_of_itself_is_text_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "hostile.jsonl"
    head = {"kvkeep_trace": 1, "name": "\x1b[31mred\ud800\n[/b]", "unit_tokens": 16}
    lines = [
        {"time": 0.5, "tokens": 16, "output_tokens": 9, "units": f"{at:016x}", "kind": kind}
        for at, kind in enumerate(("[/red]", "\x1b]0;title\x07"))
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in (head, *lines)))
    for words in (
        ["trace", "info", str(path)],
        ["replay", str(path), "--capacity", "1k", "--policy", "lru", "--jobs", "1"],
        ["plan", str(path), "--memory", "1k", "--jobs", "1"],
    ):
        assert main(words) == 0
        out = capsys.readouterr().out
        assert "\x1b" not in out
        assert "\x07" not in out
        assert words[0] == "trace" or "␛[31mred\\ud800␊[/b]: 2 requests" in out
