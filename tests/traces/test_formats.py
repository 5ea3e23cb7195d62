"""Each format: what its lines become."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from writing import mooncake, write

from kvkeep.bench.replay import summarise
from kvkeep.bench.traces import Trace, open_trace
from kvkeep.core.errors import InvalidValue

if TYPE_CHECKING:
    from pathlib import Path

    from kvkeep.bench.traces import TraceRequest


def common(one: TraceRequest, other: TraceRequest) -> int:
    """Leading units that are the same."""
    pairs = zip(one.units.tolist(), other.units.tolist(), strict=False)
    return next(
        (i for i, (a, b) in enumerate(pairs) if a != b), min(map(len, (one.units, other.units)))
    )


def test_mooncake(tmp_path: Path) -> None:
    path = write(
        tmp_path / "m.jsonl",
        mooncake(27_482, 1030, 9, hash_ids=[46, 47, 2**63 - 1]),
        mooncake(28_500, 512, 0.0, hash_ids=[46], session_id="s"),
    )
    trace = open_trace(path)
    assert isinstance(trace, Trace)
    assert (trace.format, trace.unit_tokens, trace.name) == ("mooncake", 512, "m.jsonl")
    first, second = trace
    assert (first.time, second.time) == (0.0, pytest.approx(1.018))
    assert first.units.tolist() == [46, 47, 2**63 - 1]  # as they are: chained already
    assert (first.tokens, first.output_tokens, first.namespace, first.session) == (
        1030,
        9,
        "",
        None,
    )
    assert (second.tokens, second.session) == (512, "s")
    assert first.answer is None


def test_mooncake_with_the_ends_of_answers(tmp_path: Path) -> None:
    path = write(
        tmp_path / "m",
        mooncake(0, stop_reason="tool_use", api_time=6.5),
        mooncake(1, stop_reason="", api_time=0),
        mooncake(2, stop_reason=None, api_time=None),
        mooncake(3),
    )
    told = [(r.stop, r.took_s) for r in open_trace(path)]
    assert told == [("tool_use", 6.5), ("", None), ("", None), ("", None)]


def test_mooncake_without_the_length_of_answers(tmp_path: Path) -> None:
    line = mooncake(0, 655, hash_ids=[46, 47])
    del line["output_length"]
    (request,) = open_trace(write(tmp_path / "m", line))
    assert (request.tokens, request.output_tokens) == (655, 0)


def test_sessions_whose_requests_have_a_delay(tmp_path: Path) -> None:
    def turn(session: str, number: int, **more: object) -> dict[str, object]:
        line = mooncake(0, 512 * number, 8, session_id=session, **more)
        if number > 1:
            del line["timestamp"]
            line["delay"] = 500
        return line | {"hash_ids": [ord(session) * 10 + at for at in range(number)]}

    lines = [turn("a", number, api_time=2 * (number == 2)) for number in (1, 2, 3)]
    lines += [turn("b", number) | ({"timestamp": 200} if number == 1 else {}) for number in (1, 2)]
    trace = open_trace(write(tmp_path / "m", *lines))
    assert [(r.session, r.time) for r in trace] == [
        ("a", 0), ("b", 0.2), ("a", 0.5), ("b", 0.7), ("a", 3.0),
    ]  # fmt: skip
    assert summarise(trace).reusable_units == 1 + 2 + 1
    alone = {**turn("c", 2), "session_id": None}
    new = {**turn("a", 2), "hash_ids": [7, 8]}
    trace = open_trace(write(tmp_path / "n", *lines, turn("c", 2), alone, new))
    assert len(list(trace)) == len(lines)
    assert "line 6: delay counts from a request of the same session_id" in trace.reasons[0]
    assert "line 7: delay counts" in trace.reasons[1]
    assert "line 8: hash_ids do not begin like those of the request before" in trace.reasons[2]


def test_long_sessions_in_a_row(tmp_path: Path) -> None:
    """All requests of a session in a row are out of order by the duration of a session."""
    lines = []
    for session in range(30):
        lines.append(mooncake(session * 1000, session_id=str(session)))
        turn = mooncake(session_id=str(session), delay=10_000)
        del turn["timestamp"]
        lines += [turn] * 400
    trace = open_trace(write(tmp_path / "m", *lines))
    times = [request.time for request in trace]
    assert times == sorted(times)
    assert len(times) == len(lines)


def test_a_last_unit_that_is_not_named_is_one_of_its_own(tmp_path: Path) -> None:
    lines = [mooncake(0, 1030, hash_ids=[1, 2]), mooncake(0, 1030, hash_ids=[1, 2])]
    trace = open_trace(write(tmp_path / "m", *lines))
    first, second = trace
    assert first.units[:2].tolist() == second.units[:2].tolist() == [1, 2]
    assert len(first.units) == len(second.units) == 3
    assert first.units[2] != second.units[2]
    assert [one.units.tolist() for one in trace] == [first.units.tolist(), second.units.tolist()]


def bailian(
    chat: int, parent: int, tokens: int, ids: list[int], **more: object
) -> dict[str, object]:
    return {
        "chat_id": chat, "parent_chat_id": parent, "timestamp": 61.114 + chat, "type": "text",
        "input_length": tokens, "output_length": 132, "turn": 1, "hash_ids": ids, **more,
    }  # fmt: skip


def test_bailian(tmp_path: Path) -> None:
    path = write(
        tmp_path / "b.jsonl",
        bailian(55, -1, 40, [7, 8, 9]),
        bailian(56, -1, 32, [8, 7], type="image"),
        bailian(57, 55, 70, [7, 8, 10, 11, 9], turn=2),
        bailian(58, 57, 70, [7, 8, 10, 11, 12], turn=3),
    )
    trace = open_trace(path)
    assert (trace.format, trace.unit_tokens) == ("bailian", 16)
    first, other, second, third = trace
    assert [r.time for r in trace] == [0, 1, 2, 3]
    assert [r.session for r in trace] == ["55", "56", "55", "55"]
    assert [r.parent for r in trace] == [None, None, "55", "57"]
    assert [r.turn for r in trace] == [1, 1, 2, 3]
    assert other.kind == "image"
    # An id stands for its tokens alone there: 8 is not the same behind 7 and at the beginning.
    assert common(first, other) == 0
    assert not set(first.units.tolist()) & set(other.units.tolist())
    assert (common(first, second), common(second, third)) == (2, 4)
    assert first.units[2] != second.units[4]


def test_prompts_as_token_ids_are_exact(tmp_path: Path) -> None:
    path = write(
        tmp_path / "p.jsonl",
        {
            "tokens": [1, 2, 3, 4, 5],
            "output_tokens": 4,
            "namespace": "n",
            "session": "s",
            "turn": 2,
            "stop": "length",
            "took_s": 3,
        },
        {"prompt": [1, 2, 3, 9], "kind": "k", "cache_salt": "salt"},
        {"tokens": [2, 3]},
    )
    trace = open_trace(path)
    first, second, third = trace
    assert (trace.format, trace.unit_tokens) == ("prompts", 1)
    assert (common(first, second), common(first, third)) == (3, 0)
    assert (first.tokens, first.output_tokens, first.namespace, first.turn) == (5, 4, "n", 2)
    assert (second.kind, second.namespace, second.output_tokens) == ("k", "salt", 0)
    assert (first.stop, first.took_s, second.stop, second.took_s) == ("length", 3, "", None)
    assert [r.time for r in trace] == [0, 1, 2]
    coarse = list(open_trace(path, unit_tokens=2))
    assert [len(r.units) for r in coarse] == [3, 2, 1]
    assert common(coarse[0], coarse[1]) == 1


def test_prompts_as_text(tmp_path: Path) -> None:
    lines = [
        {"prompt": "One café is here.", "timestamp": 100.5},
        {"prompt": "One café is there!", "timestamp": 99},
    ]
    path = write(tmp_path / "p.jsonl", *lines)
    late, early = reversed(list(open_trace(path)))
    assert (early.time, late.time) == (0, 1.5)
    assert (early.tokens, late.tokens) == (5, 5)
    assert common(early, late) == 3


def test_prompts_as_conversations(tmp_path: Path) -> None:
    said = [{"role": "user", "content": "Which way to the harbour?"}]
    answered = [*said, {"role": "assistant", "content": "Down the hill."}]
    asked = [*answered, {"role": "user", "content": [{"type": "text", "text": "How far?"}]}]
    path = write(tmp_path / "c", *({"messages": each} for each in (said, answered, asked, said)))
    one, two, three, again = open_trace(path)
    assert common(one, two) == one.tokens
    assert common(two, three) == two.tokens
    assert one.units.tolist() == again.units.tolist()
    system = write(
        tmp_path / "s", {"messages": [{**said[0], "role": "system"}]}, {"messages": said}
    )
    assert common(*open_trace(system)) < 4


def logged(**fields: object) -> dict[str, object]:
    return {"model": "m", "messages": [{"role": "user", "content": "Hello there"}], **fields}


@pytest.mark.parametrize("name", ["system", "instructions", "tools", "functions"])
def test_what_stands_beside_messages_is_in_front_of_them(name: str, tmp_path: Path) -> None:
    def said(number: int) -> object:
        text = f"{number} has its own long rules"
        if name in {"tools", "functions"}:
            return [{"name": text, "cache_control": {"type": "ephemeral"}}]
        return text

    path = write(tmp_path / "c", *(logged(**{name: said(number)}) for number in (1, 1, 2)))
    first, again, other = open_trace(path)
    assert common(first, again) == first.tokens == len(first.units)
    assert first.tokens > 15
    assert common(first, other) < 16  # the mark of the system, or the name of a field
    (plain,) = open_trace(write(tmp_path / "p", logged()))
    (empty,) = open_trace(write(tmp_path / "e", logged(**{name: None})))
    assert plain.units.tolist() == empty.units.tolist()


def test_the_system_comes_first_and_then_the_tools(tmp_path: Path) -> None:
    rules, tools = "All rules of the house", [{"name": "search"}]
    talk = [{"role": "user", "content": "Hello"}]
    block = [{"type": "text", "text": rules, "cache_control": {"type": "ephemeral"}}]
    lines = [
        {"messages": talk, "tools": tools, "system": rules},
        {"messages": talk, "tools": tools, "system": block},
        {"messages": [{"role": "system", "content": rules}, *talk], "tools": tools},
        {"messages": talk, "system": rules, "tools": [{"name": "search", "cache_control": {}}]},
        {"messages": talk, "system": rules},
        {"messages": [{"role": "system", "content": rules}]},
        {"prompt": "Hello", "system": rules},
    ]
    one, *same, without, start, text = open_trace(write(tmp_path / "c", *lines))
    for other in same:
        assert other.units.tolist() == one.units.tolist()
    assert common(one, start) == common(without, start) == start.tokens
    assert common(text, start) == start.tokens - 1  # its last word goes on
    path = write(tmp_path / "w", lines[0], {"messages": talk, "system": 5})
    trace = open_trace(path)
    assert len(list(trace)) == 1
    assert "line 2: system is 5; text or a list of parts is needed" in trace.reasons[0]


def test_a_mark_for_caches_is_no_text(tmp_path: Path) -> None:
    """It stands at the end of the newest message, and moves on with each turn."""
    result = {"type": "tool_result", "tool_use_id": "t", "content": "5 files"}
    marked = {**result, "cache_control": {"type": "ephemeral"}}
    turns = [{"role": "user", "content": [marked]}]
    after = [{"role": "user", "content": [result]}, {"role": "assistant", "content": "Five."}]
    path = write(tmp_path / "c", {"messages": turns}, {"messages": after})
    one, two = open_trace(path)
    assert common(one, two) == one.tokens


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (mooncake(hash_ids=[1]), "hash_ids has 1 ids; 1024 tokens are 2 units of 512"),
        (mooncake(hash_ids=[1, 2, 3]), "hash_ids has 3 ids"),
        (mooncake(hash_ids=[1, -2]), "ids in 0 … 2⁶³-1"),
        (mooncake(hash_ids=[1, 2**63]), "ids in 0 … 2⁶³-1"),
        (mooncake(hash_ids=[1, 2**70]), "ids in 0 … 2⁶³-1"),
        (mooncake(hash_ids=[1, 2.0]), "ids in 0 … 2⁶³-1"),
        (mooncake(hash_ids=["1", "2"]), "ids in 0 … 2⁶³-1"),
        (mooncake(hash_ids=[[1], [2]]), "ids in 0 … 2⁶³-1"),
        (mooncake(hash_ids=[[1], [2, 3]]), "not a list of ids"),
        (mooncake(hash_ids=[True, False]), "ids in 0 … 2⁶³-1"),
        (mooncake(hash_ids={"a": 1}), "a list of ids is needed"),
        (mooncake(hash_ids=[4, 4]), "an id twice"),
        (mooncake(input_length=-1), "input_length is -1; a whole number in 0 … 2147483647"),
        (mooncake(input_length=2**31), "input_length is 2147483648"),
        (mooncake(input_length=True), "input_length is True"),
        (mooncake(output_length=1.5), "output_length is 1.5"),
        (mooncake(timestamp="0"), "timestamp is '0'; a number is needed"),
        (mooncake(timestamp=10**400), "a finite number is needed"),
        ('{"timestamp": NaN, "hash_ids": []}', "NaN is not valid JSON"),
        ('{"timestamp": 1e999, "input_length": 0, "output_length": 0, "hash_ids": []}', "finite"),
        ('{"hash_ids": [], "output_length": 1, "timestamp": 1}', "input_length is missing"),
        ('{"input_lenght": 0, "hash_ids": [], "timestamp": 1}', "'input_lenght' is no field"),
        ('{"input_length": 0, "output_length": 1, "timestamp": 1}', "hash_ids is missing"),
        (mooncake(session_id=["x"]), "session_id is ['x']; text or a whole number"),
        (mooncake(session_id="x" * 1000), "at most 512 characters"),
        (mooncake(stop_reason=5.5), "stop_reason is 5.5; text or a whole number"),
        (mooncake(api_time=-0.5), "api_time is -0.5; a number of at least 0"),
        (mooncake(api_time="x"), "api_time is 'x'; a number is needed"),
        ("[" * 100_000, "nested too deeply"),
        ('{"a": ' * 100_000, "nested too deeply"),
        ("{} {}", "more follows at character 2"),
        ("[1, 2]", "an object is needed, got [1, 2]"),
        ('{"timestamp": 0, ', "not JSON"),
        ('{"timestamp": ' + "9" * 5000 + "}", "not JSON"),
        ("nonsense", "not JSON"),
    ],
)  # fmt: skip
def test_a_bad_line_has_a_number_and_a_reason(line: object, reason: str, tmp_path: Path) -> None:
    path = write(tmp_path / "m", mooncake(), "", line, mooncake(1))
    trace = open_trace(path)
    assert len(list(trace)) == 2
    assert trace.skipped == 1
    (said,) = trace.reasons
    assert said.startswith("line 3: ")
    assert reason in said
    assert len(said) < 400


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ({"prompt": 5}, "a prompt needs text in `prompt`"),
        ({"tokens": [1, -1]}, "token ids lie in"),
        ({"tokens": [1, 2.5]}, "integer ids"),
        ({"tokens": [[1]]}, "one row of ids"),
        ({"messages": ["x"]}, "objects are needed"),
        ({"messages": [{"role": "user", "content": 5}]}, "text or a list of parts"),
        ({"prompt": "x", "turn": -1}, "turn is -1"),
    ],
)
def test_bad_prompts(line: object, reason: str, tmp_path: Path) -> None:
    trace = open_trace(write(tmp_path / "p", {"prompt": "x"}, line))
    assert len(list(trace)) == 1
    assert reason in trace.reasons[0]


def test_json_is_not_taken_for_what_it_is_not(tmp_path: Path) -> None:
    unknown = write(tmp_path / "u", {"what": 1, "ever": json.dumps({})})
    with pytest.raises(InvalidValue, match=r"its fields are ever, what. A trace is .* hash_ids"):
        open_trace(unknown)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("Timestamp,Model,Request tokens,Log Type\n0,M,52,x\n", "columns Timestamp,Model,Request"),
        ('[\n  {\n    "id": "1",\n    "conversations": []\n  }\n]\n', "it is a JSON array. "),
        ('[{"id": "1", "conversations": []}]', "it is a JSON array. "),
        ('{\n  "id": "1"\n}\n', "its first JSON object takes several lines. "),
        ("a log\n", "it begins with 'a log', which is not JSON. "),
    ],
)
def test_another_file_is_described(text: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "other"
    path.write_text(text)
    with pytest.raises(InvalidValue) as raised:
        open_trace(path)
    assert said in str(raised.value)
    assert "A trace is a file of JSON objects, one a line" in str(raised.value)
    assert "\n" not in str(raised.value)
