"""Hostile text is shown as text, and with --no-text none is shown."""

from __future__ import annotations

import json
import unicodedata

import pytest
from see_help import ask, explained, only

pytestmark = pytest.mark.model

MARKUP = "<script>alert(1)</script><img src=x onerror=alert(1)>"
CONTROLS = "\x00\x1b[31m\x07\r\n\t\x7f\x9b"
TURNED = "user\u202egnp.exe\u202c \u2066\u2069 \u200e\u200f\u2028 \ufeff \u200b"
HOSTILE = MARKUP + CONTROLS + TURNED
FILLER = (
    " and then it says something that goes on for a while: return a copy of the string with all "
    "characters removed from the list, sorted by keys and values; if the path is an open file then "
    "close it, read and write it to standard output, or raise an error that tells what is wrong. "
)


def strings(value):
    """All texts of a JSON value, keys as well."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield key
            yield from strings(item)
    elif isinstance(value, list):
        for item in value:
            yield from strings(item)


def assert_showable(answer):
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "application/json"
    for text in strings(json.loads(answer.text)):
        acting = {
            one for one in text if unicodedata.category(one) in {"Cc", "Cf", "Cs", "Zl", "Zp"}
        }
        assert not acting - {"\u200c", "\u200d"}, ascii(text)


PATHS = ("live", "requests", "summary", "map")


def test_in_prompts_salts_and_sessions(server):
    ask(server, f"A {HOSTILE} 1 {FILLER}", HOSTILE, kvkeep={"session": HOSTILE})
    answer = ask(server, f"A {HOSTILE} 2 {FILLER}", HOSTILE, kvkeep={"session": HOSTILE})
    for path in (*PATHS, f"explain/{answer['id']}"):
        assert_showable(server.http.get(f"/kv/{path}"))
    told = explained(server, answer)
    text = told["text"]
    assert "\\u202e" in told["cache_salt"]
    assert MARKUP in told["cache_salt"]  # it is text, and stays what it is
    assert "␀␛[31m␇␍␊␉␡\\u009b" in told["session"]
    # The places are those of the text as it is shown.
    at = text["at_given"], text["at_cached"]
    assert text["given_text"][at[0] :].lstrip().startswith("2")
    assert text["cached_text"][at[1] :].lstrip().startswith("1")
    (tenant,) = [one for one in server.http.get("/kv/live").json()["tenants"] if one["cache_salt"]]
    assert tenant["cache_salt"] == told["cache_salt"]
    assert_showable(
        server.http.post("/kv/explain", json={"prompt": f"A {HOSTILE} 3", "cache_salt": HOSTILE})
    )
    other = server.http.post("/kv/explain", json={"prompt": f"A {HOSTILE} 1 {FILLER}"})
    assert_showable(other)
    fields = only(other.json(), "other_namespace")["evidence"]["fields"]
    assert fields["tenant"] == ["", told["cache_salt"]]


def test_the_page_about_controls_is_where_they_differ(server):
    first = ask(server, f"Here is {CONTROLS} the one {FILLER}", "places")
    told = explained(server, ask(server, f"Here is {TURNED} the one {FILLER}", "places"))
    assert only(told, "diverged")["evidence"]["nearest"] == first["id"]
    text = told["text"]
    assert text["given_text"][: text["at_given"]] == text["cached_text"][: text["at_cached"]]
    assert "␛[31m" in text["cached_text"]


@pytest.mark.parametrize("half", ["\\ud83d", "\\udc69", "x\\ud800y"])
def test_halves_of_characters(server, half):
    """JSON may have what is no text: it is refused, or it is harmless."""
    headers = {"content-type": "application/json"}
    for field in ('"prompt": "%s"', '"prompt": "a", "cache_salt": "%s"'):
        body = "{" + field % half + "}"
        answer = server.http.post("/kv/explain", content=body, headers=headers)
        assert answer.status_code in {200, 400}, answer.text
        assert answer.text.encode().decode() == answer.text


def test_tokens_that_are_parts_of_characters(server):
    tokens = server.http.post("/tokenize", json={"prompt": "🤖🦾 日本 " + FILLER + " 🐍"}).json()[
        "tokens"
    ]
    first = ask(server, tokens, "parts")
    changed = [*tokens[:5], tokens[4], *tokens[6:]]
    told = server.http.get(f"/kv/explain/{ask(server, changed, 'parts')['id']}")
    assert_showable(told)
    assert first["id"] in told.text


def test_ids_are_told_again_as_text(server):
    for id in ("%3Cscript%3Ealert(1)%3C%2Fscript%3E", "%E2%80%AEa", "%00", "%0d%0aX:%20y"):
        answer = server.http.get(f"/kv/explain/{id}")
        assert answer.status_code == 404
        assert answer.headers["content-type"] == "application/json"
        assert "x" not in answer.headers
        message = answer.json()["error"]["message"]
        assert message.isprintable()


def test_no_text(start_server):
    with start_server(text=False) as server:
        assert server.http.get("/kv/live").json()["text"] is False
        secret = "Xyzzy"
        ask(server, f"It is {secret} 1 {FILLER}")
        answer = ask(server, f"It is {secret} 2 {FILLER}")
        told = explained(server, answer)
        evidence = only(told, "diverged")["evidence"]
        assert not {"given", "cached"} & set(evidence)
        assert evidence["would_reuse"] > 16
        assert told["text"] is None
        tokens = server.http.post("/tokenize", json={"prompt": FILLER}).json()["tokens"]
        some = str(tokens[:3])[1:-1]
        asked = server.http.post("/kv/explain", json={"prompt": f"It is {secret} 3 {FILLER}"})
        answers = [asked, *(server.http.get(f"/kv/{path}") for path in PATHS)]
        answers += [server.http.get(f"/kv/explain/{answer['id']}")]
        for one in answers:
            assert one.status_code == 200
            assert secret not in one.text
            assert "goes on for" not in one.text
            assert some.replace(" ", "") not in one.text.replace(" ", "")
        tree = server.http.get("/kv/map").json()
        assert {node["text"] for node in tree["nodes"] if node["id"] > 0} == {None}
