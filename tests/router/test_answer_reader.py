"""How answers end, read from their bytes: against the answers as parsed JSON."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from kvkeep.core.returns import Ended
from kvkeep.serve.router.answers import AnswerReader

CALL = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
# What a model may say that looks like a field: JSON escapes its quotes.
FAKE = 'he said "finish_reason": "tool_calls", "tool_calls": [{ "completion_tokens": 9999 \\'


def read(data: bytes, cuts: list[int] | None = None, *, messages: bool = False) -> Ended:
    reader = AnswerReader(messages=messages)
    at = 0
    for cut in [*sorted(cuts or []), len(data)]:
        reader.feed(data[at:cut])
        at = cut
    return reader.ended


def dumped(value: Any, rng: random.Random) -> bytes:
    separators = rng.choice([(",", ":"), (", ", ": "), (" ,  ", " :  ")])
    return json.dumps(value, ensure_ascii=rng.random() < 0.5, separators=separators).encode()


def whole(stop: str | None, calls: list[Any] | None, tokens: int, text: str = FAKE) -> dict:
    message: dict[str, Any] = {"role": "assistant", "content": text}
    if calls is not None:
        message["tool_calls"] = calls
    return {
        "id": "x",
        "choices": [{"index": 0, "message": message, "finish_reason": stop, "stop_reason": 7}],
        "usage": {"prompt_tokens": 12, "completion_tokens": tokens},
    }


@pytest.mark.parametrize(
    ("stop", "calls", "expected"),
    [
        ("stop", None, "stop"),
        ("stop", [], "stop"),
        ("stop", [CALL], "tool_calls"),
        ("tool_calls", [CALL], "tool_calls"),
        ("function_call", None, "tool_calls"),
        ("length", [CALL], "length"),
        ("content_filter", [], "content_filter"),
        ("a new word", None, None),
        ("abort", None, "abort"),
        (None, None, None),
    ],
)
def test_a_whole_answer(stop: str | None, calls: list[Any] | None, expected: str | None) -> None:
    rng = random.Random(4)
    for _ in range(50):
        data = dumped(whole(stop, calls, 345), rng)
        cuts = rng.sample(range(len(data)), rng.randrange(8))
        assert read(data, cuts) == Ended(expected, 345)
    assert read(data, list(range(len(data)))) == Ended(expected, 345)


def chunk(delta: dict[str, Any], stop: str | None) -> dict[str, Any]:
    choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": stop}
    return {"id": "x", "object": "chat.completion.chunk", "choices": [choice]}


@pytest.mark.parametrize("usage", [None, 4321])
@pytest.mark.parametrize(("stop", "calls"), [("stop", False), ("stop", True), ("length", False)])
def test_a_stream_in_any_pieces(stop: str, calls: bool, usage: int | None) -> None:
    rng = random.Random(5)
    deltas: list[dict[str, Any]] = [{"role": "assistant"}, {"content": FAKE}, {"content": FAKE}]
    if calls:
        deltas.append({"tool_calls": [{"index": 0, **CALL}]})
    chunks = [chunk(delta, None) for delta in deltas] + [chunk({}, stop)]
    if usage is not None:
        chunks.append({"choices": [], "usage": {"completion_tokens": usage}})
    expected = Ended("tool_calls" if calls else stop, usage or len(deltas) + 1)
    for _ in range(50):
        data = b"".join(b"data: %s\n\n" % dumped(one, rng) for one in chunks) + b"data: [DONE]\n\n"
        assert read(data, rng.sample(range(len(data)), rng.randrange(30))) == expected
    assert read(data, list(range(len(data)))) == expected


@pytest.mark.parametrize(
    ("stop", "expected"),
    [("tool_use", "tool_calls"), ("end_turn", "stop"), ("max_tokens", "length"),
     ("stop_sequence", "stop"), ("refusal", "content_filter"), ("pause_turn", "pause_turn")],
)  # fmt: skip
def test_anthropics_answers(stop: str, expected: str) -> None:
    start = {
        "type": "message_start",
        "message": {"stop_reason": None, "usage": {"output_tokens": 1}},
    }
    text = {"type": "content_block_delta", "delta": {"text": '"stop_reason": "tool_use"'}}
    end = {
        "type": "message_delta",
        "delta": {"stop_reason": stop, "stop_sequence": None},
        "usage": {"output_tokens": 77},
    }
    rng = random.Random(6)
    frames = [(one["type"], dumped(one, rng)) for one in (start, text, end)]
    data = b"".join(b"event: %s\ndata: %s\n\n" % (str(kind).encode(), one) for kind, one in frames)
    assert read(data, list(range(0, len(data), 3)), messages=True) == Ended(expected, 77)
    message = dumped({"content": [text], "stop_reason": stop, "usage": {"output_tokens": 5}}, rng)
    assert read(message, messages=True) == Ended(expected, 5)


def test_several_choices_call_a_tool_if_one_does() -> None:
    answer = whole("tool_calls", [CALL], 5)
    answer["choices"].append({"index": 1, "message": {}, "finish_reason": "stop"})
    assert read(json.dumps(answer).encode()).stop == "tool_calls"


def test_other_bytes_say_nothing_and_take_no_memory() -> None:
    rng = random.Random(7)
    for data in (
        b"",
        b"{",
        bytes(rng.randrange(256) for _ in range(100_000)),
        b'"finish_reason"' * 50_000,
        b'"finish_reason":' + b" " * 100_000 + b'"stop"',
        b'"finish_reason":"' + b"a" * 100_000 + b'"',
        b'"' * 1_000_000,
    ):
        reader = AnswerReader()
        for at in range(0, len(data), 65_536):
            reader.feed(data[at : at + 65_536])
            assert len(reader._tail) <= 96
        assert reader.ended.stop is None
        assert reader.ended.tokens in {0, data.count(b'"finish_reason"')}
    huge = b'"completion_tokens": ' + b"9" * 5000 + b', "finish_reason": "stop"'
    assert read(huge, list(range(len(huge)))).stop == "stop"
