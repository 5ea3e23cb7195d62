"""What is wrong is refused with 400 and the name of the field; nothing is ever a 500."""

from __future__ import annotations

import json

import openai
import pytest

from kvkeep.serve.messages import REFUSED
from kvkeep.serve.server.schemas.chat import ChatRequest, Message
from kvkeep.serve.server.schemas.completions import CompletionRequest

pytestmark = pytest.mark.model

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
MESSAGES = "/v1/messages"
USER = [{"role": "user", "content": "x"}]
DEEP = 50_000
GOOD = {
    CHAT: {"messages": USER, "max_tokens": 1},
    COMPLETIONS: {"prompt": "x", "max_tokens": 1},
    MESSAGES: {"model": "kvkeep-tiny", "messages": USER, "max_tokens": 1},
    "/tokenize": {"prompt": "x"},
    "/detokenize": {"tokens": [5]},
    "/kv/clear": {},
    "/kv/remove": {"prompt": "x"},
}

# What both endpoints share: fields, and the name that the error has to give.
BOTH = [
    ({"model": "gpt-4"}, "model"),
    ({"model": 7}, "model"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": "7"}, "max_tokens"),
    ({"max_tokens": 1.5}, "max_tokens"),
    ({"max_tokens": True}, "max_tokens"),
    ({"max_tokens": 10**30}, "max_tokens"),
    ({"temperature": 2.1}, "temperature"),
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"temperature": 10**400}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 1.01}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"repetition_penalty": 1.1}, "repetition_penalty"),
    ({"repetition_penalty": True}, "repetition_penalty"),
    ({"min_p": 2}, "min_p"),
    ({"n": 0}, "n"),
    ({"n": 129}, "n"),
    ({"n": 17}, "n"),  # more than run at once
    ({"stop": ["a", "b", "c", "d", "e"]}, "stop"),
    ({"stop": ""}, "stop"),
    ({"stop": [""]}, "stop"),
    ({"stop": "x" * 10_000}, "stop"),
    ({"stop": 3}, "stop"),
    ({"seed": -1}, "seed"),
    ({"seed": 2**63}, "seed"),
    ({"presence_penalty": 2.5}, "presence_penalty"),
    ({"frequency_penalty": -2.5}, "frequency_penalty"),
    ({"logit_bias": {"5": 101}}, "logit_bias"),
    ({"logit_bias": {"five": 1}}, "logit_bias"),
    ({"logit_bias": {"-1": 1}}, "logit_bias"),
    ({"logit_bias": {"99999": 1}}, "logit_bias"),
    ({"logit_bias": {"٣": 1}}, "logit_bias"),
    ({"logit_bias": [1]}, "logit_bias"),
    ({"stream": "yes"}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"include": 1}}, "stream_options.include"),
    ({"cache_salt": ""}, "cache_salt"),
    ({"cache_salt": 5}, "cache_salt"),
    ({"cache_salt": "kvkeep-salt-public"}, "cache_salt"),
    ({"cache_salt": "namespace x"}, "cache_salt"),
    ({"ignore_eos": 1}, "ignore_eos"),
    ({"kvkeep": {"stoer": False}}, "kvkeep.stoer"),
    ({"kvkeep": {"draft_tokens": -1}}, "kvkeep.draft_tokens"),
    ({"kvkeep": {"beams": 2}}, "kvkeep.beams"),
    ({"use_beam_search": True}, "use_beam_search"),
    ({"kvkeep": []}, "kvkeep"),
    ({"frobnicate": 1}, "frobnicate"),
    ({"metadata": "x"}, "metadata"),
]
OF_CHAT = [
    ({"messages": None}, "messages"),
    ({"messages": []}, "messages"),
    ({"messages": "hello"}, "messages"),
    ({"messages": [{}]}, "messages.0"),
    ({"messages": [{"role": "user"}]}, "messages.0.content"),
    ({"messages": [{"role": "king", "content": "x"}]}, "messages.0.role"),
    ({"messages": [{"role": "user|>x<|end", "content": "x"}]}, "messages.0.role"),
    ({"messages": [{"role": "user", "content": None}]}, "messages.0.content"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "content.0.type"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages.0.content"),
    ({"messages": [{"role": "user", "content": "x", "mood": 1}]}, "messages.0.mood"),
    ({"messages": [{"role": "assistant", "content": "x", "tool_calls": [1]}]}, "tool_calls"),
    ({"tools": [{"type": "function"}]}, "tools"),
    ({"prompt_cache_retention": "1h"}, "prompt_cache_retention"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"response_format": {"type": "json_object"}}, "response_format.type"),
    ({"audio": {"voice": "x"}}, "audio"),
    ({"modalities": ["text", "audio"]}, "modalities"),
    ({"reasoning_effort": "high"}, "reasoning_effort"),
    ({"stream": True, "stream_options": {"include_obfuscation": True}}, "include_obfuscation"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"logprobs": 3}, "logprobs"),
    ({"max_completion_tokens": 0}, "max_completion_tokens"),
    ({"max_completion_tokens": 3}, "max_tokens"),  # is there as well
    ({"best_of": 2}, "best_of"),
    ({"prompt": "x"}, "prompt"),
]
OF_COMPLETIONS = [
    ({"prompt": ""}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [""]}, "prompt"),
    ({"prompt": [[]]}, "prompt"),
    ({"prompt": None}, "prompt"),
    ({"prompt": 5}, "prompt"),
    ({"prompt": {"text": "x"}}, "prompt"),
    ({"prompt": ["x", 5]}, "prompt"),
    ({"prompt": [5, "x"]}, "prompt"),
    ({"prompt": [True]}, "prompt"),
    ({"prompt": [1.5]}, "prompt"),
    ({"prompt": [-1]}, "prompt"),
    ({"prompt": [4096]}, "prompt"),
    ({"prompt": [4096], "echo": True}, "prompt"),
    ({"prompt": [2**31]}, "prompt"),
    ({"prompt": [10**100]}, "prompt"),
    ({"prompt": ["x"] * 129}, "prompt"),
    ({"prompt": ["x"] * 65}, "prompt"),  # more than the queue takes
    ({"prompt": [5] * 9000}, "prompt"),
    ({"logprobs": 6}, "logprobs"),
    ({"logprobs": True}, "logprobs"),
    ({"echo": True, "logprobs": 1}, "echo"),
    ({"best_of": 3, "n": 2}, "best_of"),
    ({"suffix": "x"}, "suffix"),
    ({"messages": USER}, "messages"),
]
CASES = [
    *((path, fields, name) for path in (CHAT, COMPLETIONS) for fields, name in BOTH),
    *((CHAT, fields, name) for fields, name in OF_CHAT),
    *((COMPLETIONS, fields, name) for fields, name in OF_COMPLETIONS),
    ("/tokenize", {"prompt": None}, "prompt"),
    ("/tokenize", {"messages": USER}, "prompt"),  # and prompt
    ("/tokenize", {"model": "gpt-4"}, "model"),
    ("/detokenize", {"tokens": [4096]}, "tokens"),
    ("/detokenize", {"tokens": [-1]}, "tokens"),
    ("/detokenize", {"tokens": "x"}, "tokens"),
    ("/kv/clear", {"cache_salt": 5}, "cache_salt"),
    ("/kv/clear", {"all": True}, "all"),
    ("/kv/remove", {"prompt": "x", "messages": USER}, "prompt"),
    ("/kv/remove", {"prompt": [-1]}, "prompt"),
    ("/kv/remove", {"prompt": [[1]]}, "prompt"),
    ("/kv/remove", {"prompt": ""}, "prompt"),
    ("/kv/remove", {"cache_salt": 5}, "cache_salt"),
]


def assert_error(answer, status, code=None):
    assert answer.status_code == status, answer.text
    (key, error), *rest = answer.json().items()
    assert (key, rest) == ("error", [])
    assert error.keys() == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str)
    if code is not None:
        assert error["code"] == code
    return error


@pytest.mark.parametrize(
    ("path", "fields", "name"), CASES, ids=[f"{p}-{n}-{i}" for i, (p, _, n) in enumerate(CASES)]
)
def test_a_wrong_field_is_named(server, path, fields, name):
    error = assert_error(server.http.post(path, json={**GOOD[path], **fields}), 400)
    assert name in error["message"]
    assert name in error["param"]
    assert error["type"] == "invalid_request_error"
    assert len(error["message"]) < 400


def between(**turn):
    """A conversation with this turn of the assistant in it."""
    return {"messages": [*USER, {"role": "assistant", "content": "x", **turn}, *USER]}


def parts(**more):
    """A conversation in one part that has these fields as well."""
    part = {"type": "text", "text": "x", **more}
    return {"messages": [{"role": "user", "content": [part]}]}


# Values that ask for nothing: as clients send them, and each that a table has.
NOTHING = [
    (CHAT, {"max_completion_tokens": GOOD[CHAT]["max_tokens"]}),
    (CHAT, {"top_k": -1}),
    (CHAT, {"logprobs": False, "top_logprobs": 0}),
    (CHAT, {"tools": [], "tool_choice": "auto"}),
    (CHAT, {"reasoning_effort": "none"}),
    (CHAT, {"stream_options": {}}),
    (CHAT, {"kvkeep": {"store": None, "beams": None}}),
    (COMPLETIONS, {"repetition_penalty": 1.0}),
    (COMPLETIONS, {"top_k": -1}),
    (COMPLETIONS, {"anything": None}),
    (MESSAGES, {"top_k": -1}),
    (MESSAGES, {"tools": [], "tool_choice": {"type": "auto"}}),
    (MESSAGES, {"tools": [], "tool_choice": {"type": "none"}}),
    *((CHAT, {name: value}) for name, (_, *all) in ChatRequest.REFUSED.items() for value in all),
    *((COMPLETIONS, {name: value})
      for name, (_, *all) in CompletionRequest.REFUSED.items() for value in all),
    *((MESSAGES, {name: value}) for name, (_, *all) in REFUSED.items() for value in all),
    *((path, dict.fromkeys(table)) for path, table in
      ((CHAT, ChatRequest.REFUSED), (COMPLETIONS, CompletionRequest.REFUSED), (MESSAGES, REFUSED))),
]  # fmt: skip


@pytest.mark.parametrize(
    ("path", "fields"), NOTHING, ids=[f"{path}-{'-'.join(f)[:40]}" for path, f in NOTHING]
)
def test_a_value_that_asks_for_nothing_changes_nothing(server, path, fields):
    plain = server.http.post(path, json={**GOOD[path], "temperature": 0})
    answer = server.http.post(path, json={**GOOD[path], "temperature": 0, **fields})
    assert answer.status_code == 200, answer.text
    for part in ("choices", "content"):
        assert answer.json().get(part) == plain.json().get(part)


@pytest.mark.parametrize(
    ("fields", "same"),
    [
        (parts(cache_control={"type": "ephemeral"}), parts()),
        (between(content=None), between(content="")),
        *((between(**{name: value}), between())
          for name, (_, *all) in Message.REFUSED.items() for value in (None, *all)),
    ],
)  # fmt: skip
def test_a_turn_that_says_nothing_more_is_the_same_prompt(server, fields, same):
    tokens = [server.http.post("/tokenize", json=body).raise_for_status().json()["tokens"]
              for body in (fields, same)]  # fmt: skip
    assert tokens[0] == tokens[1]


def test_a_stream_without_padding_is_taken(server):
    options = {"include_usage": True, "include_obfuscation": False}
    body = {**GOOD[CHAT], "stream": True, "stream_options": options}
    assert server.http.post(CHAT, json=body).text.rstrip().endswith("data: [DONE]")


def test_the_body_of_a_coding_agent_is_taken(server):
    body = {
        "model": "kvkeep-tiny", "max_tokens": 8, "stream": True, "metadata": {"user_id": "u"},
        "system": [{"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}}],
        "messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}],
        "thinking": {"type": "adaptive", "display": "summarized"},
        "output_config": {"effort": "high"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    }  # fmt: skip
    answer = server.http.post(MESSAGES, json=body)
    assert answer.status_code == 200, answer.text
    assert "message_stop" in answer.text


IMAGE = {
    "type": "image",
    "source": {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo="},
}


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "user", "content": [IMAGE]}],
        [
            *USER,
            {"role": "assistant",
             "content": [{"type": "tool_use", "id": "t1", "name": "R", "input": {}}]},
            {"role": "user",
             "content": [{"type": "tool_result", "tool_use_id": "t1", "content": [IMAGE]}]},
        ],
    ],
    ids=["user", "tool_result"],
)  # fmt: skip
def test_an_image_is_refused_by_its_place(server, messages):
    answer = server.http.post(MESSAGES, json={**GOOD[MESSAGES], "messages": messages})
    assert answer.status_code == 400
    assert f"messages.{len(messages) - 1}.content.0" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("path", "fields", "says"),
    [
        (CHAT, {"chache_salt": "x"}, "is no field of this request; did you mean 'cache_salt'?"),
        (COMPLETIONS, {"max_token": 3}, "did you mean 'max_tokens'?"),
        (CHAT, {"kvkeep": {"stroe": False}}, "kvkeep.stroe is no field of this request; did you"),
        (CHAT, {"stream": True, "stream_options": {"include_usgae": True}}, "'include_usage'?"),
        ("/kv/clear", {"cache-salt": "x"}, "did you mean 'cache_salt'?"),
        (CHAT, {"xyzzy": 1}, "xyzzy is no field of this request; leave it out"),
    ],
)  # fmt: skip
def test_a_near_field_is_named(server, path, fields, says):
    error = assert_error(server.http.post(path, json=GOOD[path] | fields), 400)
    assert says in error["message"]


def test_many_unknown_fields_are_refused_at_once(server):
    fields = {f"chache_salt_{number}" + "x" * 10_000: 1 for number in range(60)}
    error = assert_error(server.http.post(CHAT, json=GOOD[CHAT] | fields), 400)
    assert "59 more wrong fields" in error["message"]


@pytest.mark.parametrize("path", GOOD)
def test_what_is_right_is_taken(server, path):
    """Else all of the above might be refused for another reason."""
    expected = 403 if path == "/kv/remove" else 200  # that one needs a server with a key
    assert server.http.post(path, json=GOOD[path]).status_code == expected


BODIES = {
    "empty": b"",
    "no json": b"hello",
    "half": b'{"prompt": "x"',
    "no object": b"[]",
    "a number": b"5",
    "null": b"null",
    "text": b'"x"',
    "NaN": b'{"prompt": "x", "temperature": NaN}',
    "infinity": b'{"prompt": "x", "temperature": Infinity}',
    "beyond a float": b'{"prompt": "x", "temperature": 1e999}',
    "a huge number": b'{"prompt": "x", "seed": ' + b"9" * 100_000 + b"}",
    "deep lists": b'{"prompt": ' + b"[" * DEEP + b"]" * DEEP + b"}",
    "deep objects": b'{"a":' * DEEP + b"1" + b"}" * DEEP,
    "a lone surrogate": b'{"prompt": "\\ud800"}',
    "a surrogate as bytes": b'{"prompt": "\xed\xa0\x80"}',
    "not UTF-8": b'{"prompt": "\xff\xfe"}',
    "UTF-16": '{"prompt": "x"}'.encode("utf-16"),
    "a NUL outside": b'{"prompt": "x"}\x00',
    "two objects": b'{"prompt": "x"} {"prompt": "x"}',
    "a surrogate as a key": b'{"prompt": "x", "\\udfff": 1}',
}


@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES.keys())
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, "/tokenize"])
def test_what_is_no_json_is_refused(server, path, body):
    answer = server.http.post(path, content=body, headers={"content-type": "application/json"})
    assert_error(answer, 400)


def test_a_nul_is_a_character_like_any_other(server):
    answer = server.http.post(COMPLETIONS, json={"prompt": "a\x00b", "max_tokens": 1})
    assert answer.status_code == 200


@pytest.mark.parametrize(
    "kind",
    [
        None,
        "text/plain",
        "application/x-www-form-urlencoded",
        "multipart/form-data; boundary=x",
        "application/json; charset=latin-1",
        "application/jsonp",
        "\xff",
    ],
)
def test_what_does_not_say_it_is_json_is_refused(server, kind):
    headers = {} if kind is None else {"content-type": kind.encode("latin-1")}
    body = json.dumps(GOOD[COMPLETIONS]).encode()
    error = assert_error(server.http.post(COMPLETIONS, content=body, headers=headers), 415)
    assert "Content-Type: application/json" in error["message"]


def test_a_packed_body_is_refused(server):
    headers = {"content-type": "application/json", "content-encoding": "gzip"}
    assert_error(server.http.post(COMPLETIONS, content=b"\x1f\x8b", headers=headers), 415)


def test_an_object_with_a_charset_is_taken(server):
    headers = {"content-type": "Application/JSON; charset=UTF-8"}
    body = json.dumps(GOOD[COMPLETIONS]).encode()
    assert server.http.post(COMPLETIONS, content=body, headers=headers).status_code == 200


def test_errors_of_addresses_have_the_same_form(server):
    assert_error(server.http.get("/nothing/here"), 404)
    assert_error(server.http.get("/v1/models/other/model"), 404, "model_not_found")
    wrong = server.http.get(CHAT)
    assert_error(wrong, 405)
    assert wrong.headers["allow"] == "POST"
    assert_error(server.http.delete("/v1/models"), 405)
    assert_error(server.http.get("/docs"), 404)


@pytest.mark.parametrize(
    ("query", "name"),
    [("nodes=0", "nodes"), ("nodes=x", "nodes"), ("root=" + "9" * 5000, "root"),
     ("namespace=" + "x" * 300, "namespace")],
)  # fmt: skip
def test_a_wrong_query_is_named(server, query, name):
    error = assert_error(server.http.get(f"/kv/map?{query}"), 400)
    assert error["param"] == name


def test_a_prompt_that_does_not_fit_says_how_much_does(server):
    error = assert_error(
        server.http.post(COMPLETIONS, json={"prompt": "word " * 9000}),
        400,
        "context_length_exceeded",
    )
    assert "at most 8191" in error["message"]
    error = assert_error(
        server.http.post(CHAT, json={"messages": [{"role": "user", "content": "word " * 9000}]}),
        400,
        "context_length_exceeded",
    )
    assert error["param"] == "messages"


def test_a_model_without_a_template_says_what_to_do(start_server):
    with start_server() as server:
        server.engine.tokenizer._tokenizer.chat_template = None
        error = assert_error(server.http.post(CHAT, json=GOOD[CHAT]), 400, "no_chat_template")
        assert "/v1/completions" in error["message"]


def test_a_template_that_refuses_is_the_clients_mistake(start_server):
    with start_server() as server:
        server.engine.tokenizer._tokenizer.chat_template = "{{ raise_exception('no, not so') }}"
        error = assert_error(server.http.post(CHAT, json=GOOD[CHAT]), 400)
        assert "no, not so" in error["message"]
        assert error["param"] == "messages"


def test_openais_client_raises_what_it_has_for_it(server):
    client = server.openai()
    with pytest.raises(openai.BadRequestError, match="temperature") as caught:
        client.chat.completions.create(model="kvkeep-tiny", messages=USER, temperature=3)
    assert caught.value.param == "temperature"
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="gpt-4", messages=USER)
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-4")


def test_a_stream_that_cannot_begin_is_no_stream(server):
    answer = server.http.post(COMPLETIONS, json={"prompt": [4096], "stream": True})
    assert_error(answer, 400)
    assert answer.headers["content-type"] == "application/json"


def test_nothing_is_left_behind(server):
    server.assert_idle()
    assert server.http.get("/health").status_code == 200
