"""Requests of the Messages API as conversations: what is refused, and where breakpoints lie."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from kvkeep.core.errors import InvalidValue
from kvkeep.serve.engine import Tokenizer
from kvkeep.serve.messages import read_call, split_usage
from kvkeep.serve.models import bundled_model
from kvkeep.serve.server.errors import ApiError
from kvkeep.serve.server.message_jobs import message_prompt

MARK = {"cache_control": {"type": "ephemeral"}}
TEMPLATE = (
    "{% if tools %}<tools>{% for tool in tools %}{{ tool | tojson }};{% endfor %}"
    "</tools>{% endif %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% for call in m.tool_calls or [] %}"
    "<call>{{ call.function.name }} {{ call.function.arguments | tojson }}</call>{% endfor %}</>"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


def tool(name, **more):
    return {"name": name, "input_schema": {"type": "object"}, **more}


def used(id, **more):
    return {"type": "tool_use", "id": id, "name": "f", "input": {"a": 1}, **more}


def result(id, **more):
    return {"type": "tool_result", "tool_use_id": id, "content": "done", **more}


def turns(*contents):
    roles = ("user", "assistant")
    return [{"role": roles[at % 2], "content": one} for at, one in enumerate(contents)]


def call(*contents, **more):
    return read_call({"model": "m", "max_tokens": 1, "messages": turns(*contents), **more})


def test_a_near_field_is_named():
    with pytest.raises(InvalidValue, match=r"'max_token': is no field .*'max_tokens'"):
        call("x", max_token=1)
    with pytest.raises(InvalidValue, match="'xyzzy': is no field of this request; leave it out"):
        call("x", xyzzy=1)


@pytest.fixture(scope="module")
def service():
    """What `message_prompt` needs of a server, with a template that has tools."""
    tokenizer = Tokenizer.load(bundled_model())
    tokenizer._tokenizer.chat_template = TEMPLATE
    return SimpleNamespace(tokenizer=tokenizer, longest_prompt=4000, longest_text=100_000)


@pytest.mark.parametrize(
    ("contents", "says"),
    [
        (["a", [used("1")], [result("2")]], "unexpected `tool_use_id`"),
        (["a", [used("1")], "b"], "without `tool_result` blocks immediately after: 1"),
        (["a", [used("1"), used("2")], [result("2")]], "immediately after: 1"),
        (["a", [used("1")], [result("1")], "b", [result("1")]], "unexpected"),
        (["a", [used("1")]], "need their `tool_result`"),
        ([[used("1")]], "messages.0.content.0.type"),
        ([[{"type": "text", "text": ""}]], "must be non-empty"),
        (["a", "b", 7], "messages.2.content"),
    ],
)
def test_conversations_that_are_refused(contents, says):
    with pytest.raises(InvalidValue, match=says):
        call(*contents)


@pytest.mark.parametrize(
    ("given", "ends"),
    [
        ({"tools": [tool("f", **MARK), tool("g")]}, '"f"'),
        ({"tools": [tool("f"), tool("g", **MARK)]}, '"g"'),
    ],
)
def test_a_breakpoint_of_a_tool_ends_behind_it(service, given, ends):
    """Nothing of the next tool is before it, and all of its own."""
    prompt = message_prompt(service, call("Hi", **given))
    ((at, ttl_s),) = prompt.breakpoints
    before = service.tokenizer.decode(prompt.tokens[:at])
    assert ttl_s == 300
    assert before.count(ends) == 1
    assert before.rstrip(";").endswith("}}")
    assert '"g"' not in before or ends == '"g"'


def test_breakpoints_of_texts_calls_and_results(service):
    prompt = message_prompt(
        service,
        call(
            [{"type": "text", "text": "one", **MARK}, {"type": "text", "text": "two"}],
            [{"type": "text", "text": "three"}, used("1", **MARK)],
            [result("1", **MARK), {"type": "text", "text": "four", **MARK}],
            tools=[tool("f")],
        ),
    )
    decode = service.tokenizer.decode
    first, second, third, fourth = (decode(prompt.tokens[:at]) for at, _ in prompt.breakpoints)
    assert first.endswith("<user>one")
    assert second.endswith('<call>f {"a": 1')
    assert third.endswith("<tool>done")
    assert fourth.endswith("<user>four")
    assert decode(prompt.tokens).endswith("four</><assistant>")


def test_a_template_without_tools_refuses_them():
    service = SimpleNamespace(
        tokenizer=Tokenizer.load(bundled_model()), longest_prompt=4000, longest_text=100_000
    )
    for asked in (call("Hi", tools=[tool("f")]), call("Hi", [used("1")], [result("1")])):
        with pytest.raises(ApiError, match="no tools"):
            message_prompt(service, asked)
    assert len(message_prompt(service, call("Hi")).tokens)


def test_a_forced_call_is_refused(service):
    with pytest.raises(ApiError, match="cannot force"):
        message_prompt(service, call("Hi", tools=[tool("f")], tool_choice={"type": "any"}))


@pytest.mark.parametrize("cached", range(0, 101, 10))
@pytest.mark.parametrize(
    "points", [(), ((40, 3600.0),), ((40, 3600.0), (70, 300.0)), ((100, 300.0),)]
)
def test_usage_adds_up(cached, points):
    usage = split_usage(100, cached, points, output=3)
    assert usage.read == cached
    assert usage.read + usage.written + usage.rest == 100
    assert 0 <= usage.written_1h <= usage.written
    last = max((at for at, _ in points), default=0)
    assert usage.written == sum(cached <= at < last for at in range(100))
    assert usage.as_dict()["output_tokens"] == 3
