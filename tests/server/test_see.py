"""Every reason of the pool, produced over HTTP and named; what all explanations have to obey."""

from __future__ import annotations

import pytest
from real_server import eventually, raw, standing
from see_help import CHAT, COMPLETIONS, accounts, ask, explained, only, tokens_of

from kvkeep.serve.engine import Limits

pytestmark = pytest.mark.model

REST = "Answer in few words, and say so where you do not know. " * 12


# --- reasons -------------------------------------------------------------------------------------


def test_new_then_the_rest_of_a_page_and_the_last_token(server):
    prompt = tokens_of(1, 90)
    first = explained(server, ask(server, prompt))
    assert first["computed"] == {"new": 90}
    assert first["endpoint"] == "completions"
    assert first["generated_tokens"] == 1
    assert 0 < first["ttft_s"] <= first["seconds"]
    again = explained(server, ask(server, prompt))
    assert again["reused"] == {"pool": 80}
    assert again["computed"] == {"page_remainder": 9, "last_token": 1}
    assert only(again, "page_remainder")["evidence"] == {"page_size": 16}


def test_the_last_token_alone(server):
    prompt = tokens_of(2, 5 * 16 + 1)
    ask(server, prompt)
    again = explained(server, ask(server, prompt))
    assert again["computed"] == {"last_token": 1}
    assert "last token" in again["sentence"]


def test_a_time_in_the_system_prompt(server):
    def turn(second):
        system = f"You are a helpful assistant. The time is 12:00:{second}. {REST}"
        messages = [{"role": "system", "content": system}, {"role": "user", "content": "Why?"}]
        body = {"messages": messages, "max_tokens": 1, "temperature": 0}
        return server.http.post(CHAT, json=body).raise_for_status().json()

    first, second = turn("07"), turn("08")
    told = explained(server, second)
    assert told["endpoint"] == "chat"
    evidence = only(told, "diverged")["evidence"]
    assert evidence["nearest"] == first["id"]
    assert evidence["differs"] >= 1
    assert evidence["would_reuse"] == told["computed"]["diverged"] > told["computed"].get("new", 0)
    given, cached = evidence["given"], evidence["cached"]
    place = min(8, evidence["position"])
    assert given[:place] == cached[:place]
    assert given[place] != cached[place]
    text = told["text"]
    assert "12:00:08. Answer" in text["given_text"]
    assert "12:00:07. Answer" in text["cached_text"]
    at = text["at_given"]
    assert at == text["at_cached"]
    assert text["given_text"][at:].startswith(("08.", "8."))
    assert text["cached_text"][at:].startswith(("07.", "7."))
    assert f"token {evidence['position']}" in told["sentence"]
    # It goes on so for everybody: the summary says what that costs.
    turn("09")
    summary = server.http.get("/kv/summary?last=2").json()
    (cause,) = [one for one in summary["causes"] if one["reason"] == "diverged"]
    assert cause["position"] == evidence["position"]
    assert cause["requests"] == 2
    assert not cause["cache_salt"]
    assert summary["causes"][0] == cause
    assert "12:00:0" in cause["text"]["given_text"]
    assert cause["tokens_per_hour"] > cause["tokens"]


def test_evicted_when_and_by_what_policy(start_server):
    with start_server(num_pages=8) as server:
        first, other = tokens_of(1, 81), tokens_of(2, 81)
        ask(server, first)
        ask(server, other)
        told = explained(server, ask(server, first))
        evidence = only(told, "evicted")["evidence"]
        assert (evidence["cause"], evidence["policy"]) == ("pressure", "lru")
        assert evidence["tier"] == "pool"
        assert 0 <= evidence["ago_s"] <= told["at"] - evidence["at"] + 1e-6
        assert told["computed"]["evicted"] >= 3 * 16 - 1
        assert "when memory was short" in told["sentence"]


@pytest.mark.parametrize("cause", ["cleared", "asked"])
def test_evicted_by_request(server, cause):
    prompt = tokens_of(3 + (cause == "asked"), 65)
    ask(server, prompt)
    if cause == "cleared":
        server.http.post("/kv/clear", json={}).raise_for_status()
    else:
        server.engine.cache.evict(10_000)
    told = explained(server, ask(server, prompt))
    assert told["computed"]["evicted"] >= 64
    assert only(told, "evicted")["evidence"]["cause"] == cause


def test_another_salt(server):
    prompt = tokens_of(10, 70)
    ask(server, prompt, "red")
    told = explained(server, ask(server, prompt, "blue"))
    assert told["cache_salt"] == "blue"
    span = only(told, "other_namespace")
    assert (span["start"], span["stop"]) == (0, 64)
    assert span["evidence"]["fields"] == {"tenant": ["blue", "red"]}
    assert "cache_salt" in told["sentence"]
    assert explained(server, ask(server, prompt, "blue"))["reused"] == {"pool": 64}


def test_not_to_be_stored(server):
    prompt = tokens_of(11, 65)
    ask(server, prompt, kvkeep={"store": False})
    told = explained(server, ask(server, prompt))
    assert only(told, "not_admitted")["evidence"] == {"why": "store_false", "tier": None}
    assert told["computed"]["not_admitted"] >= 64


def test_given_up_before_it_was_published(start_server):
    with start_server(limits=Limits(max_running=4, step_tokens=16), num_pages=256) as server:
        prompt = tokens_of(12, 1200)
        body = {"prompt": prompt, "max_tokens": 1, "temperature": 0}
        with standing(server):
            with raw(server, body):
                eventually(lambda: server.engine.num_running == 1)
            eventually(lambda: not server.service._tickets)  # it was noticed, and is aborted

        def outcomes():
            told = server.http.get("/kv/requests?last=1").json()["requests"]
            return [one["outcome"] for one in told]

        eventually(lambda: outcomes() == ["aborted"])
        told = explained(server, ask(server, prompt))
        assert only(told, "not_admitted")["evidence"] == {"why": "given_up", "tier": None}
        # What was published before it left is there.
        assert told["reused"]["pool"] % 16 == 0
        assert set(told["computed"]) <= {"not_admitted", "page_remainder", "last_token"}


def both_at_once(server, prompt):
    """Two of the same in one call: the second one is called id.1."""
    answer = ask(server, [prompt, prompt])
    usage = answer["usage"]
    told = [server.http.get(f"/kv/explain/{answer['id']}{end}").json() for end in ("", ".1")]
    for one in told:
        accounts(one)
    assert sum(one["prompt_tokens"] for one in told) == usage["prompt_tokens"]
    cached = sum(sum(one["reused"].values()) for one in told)
    assert cached == usage["prompt_tokens_details"]["cached_tokens"]
    return answer["id"], told


def test_two_of_the_same_at_once_are_computed_once(server):
    _, told = both_at_once(server, tokens_of(13, 100))
    assert told[0]["computed"] == {"new": 100}
    assert told[1]["reused"] == {"pool": 96}


def test_still_being_computed(start_server):
    # Nobody waits for anybody here.
    limits = Limits(max_running=4, step_tokens=32, max_overtaken=0)
    with start_server(limits=limits) as server:
        first, told = both_at_once(server, tokens_of(14, 100))
        assert told[0]["computed"] == {"new": 100}
        assert only(told[1], "computing")["evidence"] == {"by": first}
        assert told[1]["computed"]["computing"] >= 96
        assert first in told[1]["sentence"]


# --- asked of a prompt ---------------------------------------------------------------------------


def test_a_prompt_as_if_it_were_asked_now(server):
    system = f"It is the second {{}} of the day. {REST}"
    ran = ask(server, system.format("11"), "asking")

    def told(**body):
        answer = server.http.post("/kv/explain", json={"cache_salt": "asking", **body})
        answer = answer.raise_for_status().json()
        accounts(answer)
        return answer

    same = told(prompt=system.format("11"))
    tokens = server.http.post("/tokenize", json={"prompt": system.format("11")}).json()["tokens"]
    assert told(prompt=tokens)["spans"] == same["spans"]
    assert (same["id"], same["outcome"], same["endpoint"]) == (None, None, "")
    assert same["text"] is None
    ran_again = explained(server, ask(server, system.format("11"), "asking"))
    assert (same["reused"], same["computed"]) == (ran_again["reused"], ran_again["computed"])
    before = server.engine.cache.stats()
    newest = server.http.get("/kv/requests?last=1").json()["requests"][0]
    other = told(prompt=system.format("12"))
    assert "12 of the day" in other["text"]["given_text"]
    assert only(other, "diverged")["evidence"]["nearest"] in {ran["id"], ran_again["id"]}
    fresh = told(messages=[{"role": "user", "content": "What did nobody ever ask?"}])
    assert set(fresh["computed"]) <= {"new", "diverged"}
    elsewhere = told(prompt=system.format("11"), cache_salt="another")
    assert only(elsewhere, "other_namespace")["evidence"]["fields"]["tenant"][1] == "asking"
    # Nothing came of asking.
    assert server.engine.cache.stats() == before
    assert server.http.get("/kv/requests?last=1").json()["requests"][0] == newest


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "prompt"),
        ({"prompt": "a", "messages": [{"role": "user", "content": "b"}]}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [2**31 - 1]}, "prompt"),
        ({"prompt": ["a", "b"]}, "prompt"),
        ({"prompt": [1, "b"]}, "prompt"),
        ({"prompt": "a", "cache_salt": ""}, "cache_salt"),
        ({"prompt": "a", "store": True}, "store"),
        ({"prompt": [7] * 20_000}, "prompt"),
    ],
)
def test_questions_that_are_none(server, body, param):
    answer = server.http.post("/kv/explain", json=body)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"].partition(".")[0] == param


@pytest.mark.parametrize("id", ["cmpl-0", "nope", "a/b", "%00", "..%2f", "é", "x" * 256])
def test_ids_that_nobody_knows(server, id):
    answer = server.http.get(f"/kv/explain/{id}")
    assert answer.status_code == 404
    error = answer.json()["error"]
    assert error["code"] == "unknown_request"
    assert "1,000" in error["message"]


def test_lists_are_newest_first_and_agree_with_each(server):
    ids = [ask(server, tokens_of(20 + number, 20), "lists")["id"] for number in range(4)]
    told = server.http.get("/kv/requests?last=3").json()["requests"]
    assert [one["id"] for one in told] == ids[:0:-1]
    for one in told:
        whole = server.http.get(f"/kv/explain/{one['id']}").json()
        assert {**whole, **one} == whole
        assert set(whole) - set(one) == {"spans", "text"}
    summary = server.http.get("/kv/summary?last=4").json()
    assert summary["requests"] == 4
    assert summary["prompt_tokens"] == 80
    assert sum(one["tokens"] for one in summary["causes"]) == sum(summary["computed"].values())
    assert sum(one["share"] for one in summary["causes"]) == pytest.approx(1)
    for path in ("requests", "summary"):
        for last in ("0", "1001", "-1", "x", "1.5"):
            assert server.http.get(f"/kv/{path}?last={last}").status_code == 400


def test_a_request_that_still_runs(server):
    body = {"prompt": tokens_of(30, 40), "max_tokens": 400, "ignore_eos": True, "stream": True}
    with server.http.stream("POST", COMPLETIONS, json=body) as answer:
        lines = answer.iter_lines()
        next(lines)
        (last,) = server.http.get("/kv/requests?last=1").json()["requests"]
        assert last["outcome"] is None
        assert last["generated_tokens"] is None
        assert last["computed"] == {"new": 40}
        assert last["id"] in server.http.get(f"/kv/explain/{last['id']}").text
    eventually(lambda: server.http.get("/kv/requests?last=1").json()["requests"][0]["outcome"]
               == "aborted")  # fmt: skip
    (last,) = server.http.get("/kv/requests?last=1").json()["requests"]
    assert last["generated_tokens"] >= 1
    server.assert_idle()
