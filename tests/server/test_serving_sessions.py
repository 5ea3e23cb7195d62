"""Sessions over HTTP: what requests say of themselves, and what is said of them between."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.model

COMPLETIONS = "/v1/completions"
GREEDY = {"temperature": 0, "max_tokens": 1, "ignore_eos": True}
PAGE = 16
HEAD = [7] * (2 * PAGE)


@pytest.fixture
def clean(server):
    """The server with an empty cache; sessions of earlier tests have nothing in it."""
    server.http.post("/kv/clear", json={}).raise_for_status()
    return server


def complete(server, prompt, *, salt=None, **extras):
    asked = {**GREEDY, "prompt": prompt, "cache_salt": salt, "kvkeep": extras or None}
    answer = server.http.post(COMPLETIONS, json=asked)
    answer.raise_for_status()
    return answer.json()


def hint(server, session, action, **more):
    answer = server.http.post(f"/kv/sessions/{session}", json={"action": action, **more})
    answer.raise_for_status()
    return answer.json()


def pages(server):
    """Cached, dead and awaited ones."""
    cache = server.stats()["cache"]
    return cache["pages_cached"], cache["pages_dead"], cache["pages_awaited"]


def test_a_session_from_its_first_request_to_its_end(clean):
    complete(clean, [*HEAD, *[8] * PAGE])  # the head is others' as well
    complete(clean, [*HEAD, *[9] * 3 * PAGE], session="a life")
    assert pages(clean) == (6, 0, 0)
    assert hint(clean, "a life", "suspend", eta_s=30) == {"known": True, "pages": 3}
    assert pages(clean) == (6, 0, 5)
    complete(clean, [*HEAD, *[9] * 4 * PAGE], session="a life")
    assert pages(clean) == (7, 0, 0), "it came back, and went on where it was"
    assert hint(clean, "a life", "close") == {"known": True, "pages": 4}
    assert pages(clean) == (7, 4, 0)
    complete(clean, [*HEAD, *[9] * PAGE, 11], session="a life")
    assert pages(clean) == (7, 3, 0), "what is used again is alive again"
    assert hint(clean, "a life", "close") == {"known": True, "pages": 0}, "two sessions used them"
    assert hint(clean, "a life", "close") == {"known": False, "pages": 0}


def test_hints_change_no_answer(clean):
    prompt = clean.engine.tokenizer.encode("What does textwrap.dedent do? " * 10).tolist()
    asked = {**GREEDY, "prompt": prompt, "max_tokens": 12}
    plain = clean.http.post(COMPLETIONS, json=asked).json()["choices"]
    for action, more in (("suspend", {"eta_s": 5}), ("close", {})):
        told = clean.http.post(COMPLETIONS, json={**asked, "kvkeep": {"session": "s"}}).json()
        assert told["choices"] == plain
        assert told["usage"]["prompt_tokens_details"]["cached_tokens"] == len(prompt) - 1
        hint(clean, "s", action, **more)


def test_a_conversation_names_its_session(clean):
    chat = {"messages": [{"role": "user", "content": "Why? " * 40}], "max_tokens": 1}
    clean.http.post("/v1/chat/completions", json={**chat, "kvkeep": {"session": "talk"}})
    assert hint(clean, "talk", "close")["pages"] == pages(clean)[0] > 0


def test_sessions_belong_to_their_salt(clean):
    complete(clean, [*HEAD, 1], session="c", salt="one")
    assert hint(clean, "c", "close") == {"known": False, "pages": 0}
    assert hint(clean, "c", "close", cache_salt="one") == {"known": True, "pages": 2}


def test_a_name_may_be_any_text(clean):
    complete(clean, [*HEAD, 1], session="a/b c?ü")
    assert hint(clean, "a%2Fb%20c%3F%C3%BC", "close") == {"known": True, "pages": 2}


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"action": "suspend"}, "eta_s"),
        ({"action": "suspend", "eta_s": 0}, "eta_s"),
        ({"action": "suspend", "eta_s": "1"}, "eta_s"),
        ({"action": "close", "eta_s": 1}, "eta_s"),
        ({"action": "supersede"}, "action"),
        ({}, "action"),
        ({"action": "close", "cache_salt": ""}, "cache_salt"),
    ],
)
def test_a_hint_that_is_none(server, body, field):
    answer = server.http.post("/kv/sessions/x", json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == field


def test_a_name_that_is_too_long(server):
    assert server.http.post(f"/kv/sessions/{'x' * 257}", json={"action": "close"}).is_client_error
    assert server.http.post("/kv/sessions/", json={"action": "close"}).is_client_error


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"kvkeep": {"turn": 1}}, "kvkeep.turn"),
        ({"kvkeep": {"session": ""}}, "kvkeep.session"),
        ({"kvkeep": {"session": "x" * 257}}, "kvkeep.session"),
        ({"kvkeep": {"session": "x"}, "prompt": ["a", "b"]}, "prompt"),
    ],
)
def test_a_session_that_is_none(server, changes, field):
    answer = server.http.post(COMPLETIONS, json={**GREEDY, "prompt": "x", **changes})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == field
