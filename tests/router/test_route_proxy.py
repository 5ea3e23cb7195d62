"""The proxy in front of servers that do well, badly, and not at all."""

from __future__ import annotations

import http.client
import json
import logging
import re
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import permutations
from pathlib import Path

import httpx
import pytest
from standing_in import CHUNKS, Routing, StandIn, eventually, routing

from kvkeep.core.errors import InvalidValue
from kvkeep.serve.http import BodyBudget, bind
from kvkeep.serve.http.bodies import FREE_BYTES
from kvkeep.serve.kv_events import BlockStored
from kvkeep.serve.router import RoutingCost
from kvkeep.serve.router.health import InstanceHealth
from kvkeep.serve.router.upstreams import Upstreams, end_to_end_headers

WHOLE = b"".join(CHUNKS)
ASK = {"model": "m", "prompt": [1, 2, 3, 4], "stream": True}


def ask(proxy, asked=ASK, path="/v1/completions", **options) -> httpx.Response:
    return httpx.post(proxy.url + path, json=asked, timeout=20, **options)


def holds(proxy, instance, tokens) -> None:
    """The instance says that it holds this prompt, as blocks of two."""
    hashes = list(range(len(tokens) // 2))
    event = BlockStored(hashes, None, tokens[: len(hashes) * 2], 2, None, "GPU", None)
    proxy.router.apply(instance.url, [event])


def state(proxy, instance) -> InstanceHealth:
    return proxy.upstreams.health.state(instance.url)


def states(proxy) -> list[InstanceHealth]:
    return [proxy.upstreams.health.state(name) for name in proxy.upstreams.names]


def metrics(proxy) -> str:
    return httpx.get(f"{proxy.url}/metrics").text


def test_a_prompt_goes_where_it_is_cached_and_the_answer_comes_as_it_is():
    with routing("well", "well", "well") as (proxy, made):
        for turn in range(6):
            one = made[turn % 3]
            prompt = [turn * 10 + at for at in range(8)]
            holds(proxy, one, prompt)
            answer = ask(proxy, {**ASK, "prompt": prompt}, headers={"x-theirs": "yes"})
            assert answer.status_code == 200
            assert answer.content == WHOLE
            assert answer.headers["x-mine"] == "1"
            path, headers, body = one.asked[-1]
            assert path == "/v1/completions"
            assert headers["x-theirs"] == "yes"
            assert headers["host"] == one.url.removeprefix("http://")
            assert json.loads(body)["prompt"] == prompt
        assert [len(one.paths) for one in made] == [2, 2, 2]
        assert 'matched_tokens_total{tier="GPU"} 48.0' in metrics(proxy)


def said(*turns: str) -> list[dict[str, str]]:
    roles = ("user", "assistant")
    return [{"role": roles[at % 2], "content": text * 400} for at, text in enumerate(turns)]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", lambda turns: {"prompt": "".join(turn["content"] for turn in turns)}),
        ("/v1/chat/completions", lambda turns: {"temperature": 0, "messages": turns}),
        ("/v1/messages", lambda turns: {"messages": turns, "system": "Be brief.", "tools": []}),
        ("/v1/responses", lambda turns: {"instructions": "Be brief.", "input": turns}),
    ],
)
@pytest.mark.parametrize("events", [False, True])
def test_a_text_returns_to_its_instance_in_one_trip(path, body, events):
    """Each turn of a conversation, also at instances whose events tell of tokens alone."""
    with routing("well", "well", "well") as (proxy, made):
        for one in made if events else ():
            holds(proxy, one, [1, 2])
        homes = []
        for number in range(5):
            before = [len(one.asked) for one in made]
            turns = [f"{number}", "a", "b", "c", "d"]
            for end in (1, 3, 5):
                assert ask(proxy, body(said(*turns[:end])), path).is_success
            counts = [len(one.asked) - had for one, had in zip(made, before, strict=True)]
            assert sorted(counts) == [0, 0, 3], "a turn went elsewhere, or a text took two trips"
            homes.append(counts.index(3))
        assert len(set(homes)) > 1
        assert 'matched_tokens_total{tier="TEXT"}' in metrics(proxy)


def test_a_text_that_was_not_answered_is_nowhere():
    with routing("500", "well") as (proxy, (bad, good)):
        busy = proxy.router.begin(proxy.router.score([1] * 90_000, among=[good.url])[0])
        assert ask(proxy, {"prompt": "a text " * 100}).status_code == 500
        assert len(bad.paths) == 1
        bad.mood = "well"
        proxy.router.end(busy)
        assert ask(proxy, {"prompt": "a text " * 100}).is_success
        assert 'placed_total{by="text"}' not in metrics(proxy)


def test_two_routers_send_a_new_conversation_to_the_same_instance():
    with routing("well", "well", "well", "well") as (one, made):
        urls = [each.url for each in made]
        other = Routing(*reversed(urls))
        try:
            for number in range(6):
                before = [len(each.paths) for each in made]
                turns = [{"role": "system", "content": "x" * 999}, *said(f"{number}", "b", "c")]
                for proxy, end in ((one, 2), (other, 4)):
                    assert ask(proxy, {"messages": turns[:end]}, "/v1/chat/completions").is_success
                counts = [len(each.paths) - had for each, had in zip(made, before, strict=True)]
                assert sorted(counts) == [0, 0, 0, 2]
        finally:
            other.stop()


def test_a_tokenizer_of_its_own_asks_nobody():
    seen = []

    def tokenize(asked):
        seen.append(asked)
        if asked["prompt"] == "bad":
            raise InvalidValue("no")
        return list(asked["prompt"].encode())

    with routing("well", "well", tokenize=tokenize) as (proxy, made):
        holds(proxy, made[1], list(b"cached text"))
        assert ask(proxy, {"prompt": "cached text"}).is_success
        assert ask(proxy, {"prompt": "bad"}).is_success
        assert len(seen) == 2
        assert not any(path == "/tokenize" for one in made for path, _, _ in one.asked)
        assert made[1].paths[:1] == ["/v1/completions"]


def test_salts_are_kept_apart():
    with routing("well", "well") as (proxy, made):
        event = BlockStored([1], None, [1, 2, 3, 4], 4, None, "GPU", None, [["s"]])
        proxy.router.apply(made[1].url, [event])
        for _ in range(3):
            assert ask(proxy, {**ASK, "cache_salt": "s"}).is_success
        assert [len(one.paths) for one in made] == [0, 3]


def test_what_cannot_be_read_goes_to_the_least_loaded_as_it_is():
    with routing("well") as (proxy, (one,)):
        for body in (b"", b"{", b"[]", b'"x"', b'{"prompt": {}}', b'{"prompt": [1, "x"]}',
                     b'{"prompt": [-1]}', b'{"prompt": []}', b'{"messages": "x"}',
                     b"[" * 100_000, b"\xff\xfe",
                     b'{"prompt": "base64"}', b'{"prompt": [[1]], "model": 7}'):  # fmt: skip
            answer = httpx.post(f"{proxy.url}/v1/completions", content=body)
            assert answer.content == WHOLE
            assert one.asked[-1][2] == body


@pytest.mark.parametrize("mood", ["503", "hangs up", "head only", "429"])
def test_another_one_is_asked_before_the_first_byte(mood):
    with routing(mood, "well") as (proxy, (bad, good)):
        proxy.upstreams.health._clock = lambda: 0.0  # however slow this machine is
        holds(proxy, bad, [1, 2, 3, 4])
        answer = ask(proxy)
        assert (answer.status_code, answer.content) == (200, WHOLE)
        assert len(bad.paths) == 1
        assert "retries_total" in metrics(proxy)
        ask(proxy)
        # Who failed is left alone for a while; who has too much to do is not ill.
        assert len(bad.paths) == (2 if mood == "429" else 1)
        assert len(good.paths) == 2


@pytest.mark.parametrize("mood", ["503", "429", "hangs up"])
def test_the_second_best_is_asked_next(mood):
    prompt = list(range(12))
    with routing(mood, "well", "well") as (proxy, (best, third, second)):
        for one, tokens in ((best, 8), (second, 6), (third, 2)):
            holds(proxy, one, prompt[:tokens])
        assert ask(proxy, {**ASK, "prompt": prompt}).content == WHOLE
        assert [len(one.paths) for one in (best, second, third)] == [1, 1, 0]


@pytest.mark.parametrize("order", list(permutations(range(3))))
def test_the_third_is_asked_after_the_second_best(order):
    prompt = list(range(12))
    with routing("hangs up", "hangs up", "hangs up", timeouts={"tries": 3}) as (proxy, made):
        best, second, third = (made[at] for at in order)
        for one, tokens in ((best, 8), (second, 6), (third, 2)):
            holds(proxy, one, prompt[:tokens])
        third.mood = "well"
        assert ask(proxy, {**ASK, "prompt": prompt}).content == WHOLE
        assert [len(one.paths) for one in (best, second, third)] == [1, 1, 1]


def test_one_that_is_not_there_is_left_alone_and_comes_back():
    with routing("well", "well") as (proxy, (one, two)):
        holds(proxy, one, [1, 2, 3, 4])
        clock = [0.0]
        proxy.upstreams.health._clock = lambda: clock[0]
        one.mood = "hangs up"
        assert ask(proxy).content == WHOLE
        eventually(
            lambda: state(proxy, one) is InstanceHealth.RESTING
        )  # a probe was answered meanwhile
        assert httpx.get(f"{proxy.url}/health").json() == {
            "status": "ok",
            "instances": 1,
            "each": {one.url: "resting", two.url: "up"},
        }
        one.mood = "well"
        assert ask(proxy).content == WHOLE
        assert (len(one.paths), len(two.paths)) == (1, 2)
        clock[0] = 1.5
        assert ask(proxy).content == WHOLE
        assert (len(one.paths), len(two.paths)) == (2, 2)
        assert state(proxy, one) is InstanceHealth.UP


def test_a_request_that_breaks_whoever_has_it_does_not_go_round():
    with routing("hangs up", "hangs up", "hangs up", "hangs up") as (proxy, made):
        answer = ask(proxy)
        assert answer.status_code == 502
        assert answer.json()["error"]["message"] == "no instance could answer"
        assert sum(len(one.paths) for one in made) == 2


def test_when_all_are_gone_it_says_so_and_asks_again_later():
    gone = StandIn()
    with routing("well") as (proxy, (one,)):
        proxy.upstreams.health.failed(one.url)
        assert httpx.get(f"{proxy.url}/health").status_code == 503
        assert ask(proxy).content == WHOLE  # all rest: it is tried
        assert httpx.get(f"{proxy.url}/health").status_code == 200
    gone.stop()


def test_an_answer_that_breaks_off_is_seen_to():
    with routing("half", "well") as (proxy, (bad, good)):
        holds(proxy, bad, [1, 2, 3, 4])
        read = b""
        with pytest.raises(httpx.RemoteProtocolError):  # noqa: SIM117, PT012
            with httpx.stream("POST", f"{proxy.url}/v1/completions", json=ASK) as answer:
                for piece in answer.iter_raw():
                    read += piece
        assert read == CHUNKS[0]
        assert good.paths == []
        assert state(proxy, bad) is not InstanceHealth.UP


@pytest.mark.parametrize("mood", ["500", "400", "503", "429"])
def test_the_last_ones_error_is_the_clients(mood):
    with routing(mood) as (proxy, (one,)):
        answer = ask(proxy)
        assert answer.status_code == int(mood)
        assert answer.json() == {"error": {"message": "no"}}
        assert len(one.paths) == 1


def test_a_client_that_goes_is_no_work_any_more():
    body = json.dumps(ASK).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n"
    with routing("waits") as (proxy, (one,)):
        host, port = proxy.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port))) as plain:
            plain.sendall(head % len(body) + body)
            eventually(lambda: one.paths)
        eventually(lambda: one.left == 1)
        eventually(lambda: proxy.router.load(one.url) == (0, 0.0))
        eventually(lambda: state(proxy, one) is InstanceHealth.UP)
        eventually(lambda: 'outcome="given up"} 1.0' in metrics(proxy))


# --- instances that do not answer ------------------------------------------------------------


# Probes have long: what is tested here is the time until the first byte, also on a busy machine.
SHORT = {"first_byte_s": 1.0, "idle_s": 1.0, "probe_every_s": 0.05, "probe_s": 10.0}


@pytest.mark.parametrize("mood", ["waits", "stalls", "garbage"])
def test_another_one_is_asked_where_no_first_byte_comes(mood):
    """It accepts and never answers, sends a head alone, or what is no HTTP."""
    with routing(mood, "well", timeouts=SHORT) as (proxy, (bad, good)):
        holds(proxy, bad, [1, 2, 3, 4])
        answer = ask(proxy)
        assert (answer.status_code, answer.content) == (200, WHOLE)
        assert len(bad.paths) == len(good.paths) == 1
        if mood != "garbage":  # it hangs up itself
            eventually(lambda: bad.left == 1)  # its answer is not wanted, and it is told so
        outcome = "broke" if mood == "garbage" else "no first byte in time"
        assert f'outcome="{outcome}"}} 1.0' in metrics(proxy)


def test_a_stopped_instance_is_found_by_probes_however_long_an_answer_may_take():
    timeouts = {"first_byte_s": 1000.0, "probe_every_s": 0.05, "probe_s": 0.5}
    with routing("well", "well", timeouts=timeouts) as (proxy, (bad, good)):
        holds(proxy, bad, [1, 2, 3, 4])
        bad.mood = "waits"
        with ThreadPoolExecutor(4) as pool:
            asked = [pool.submit(ask, proxy) for _ in range(8)]
            eventually(lambda: bad.paths)
            bad.mood = "stopped"
            assert all(one.result().content == WHOLE for one in asked)
        assert state(proxy, bad) is InstanceHealth.SUSPECT
        assert httpx.get(f"{proxy.url}/health").json() == {
            "status": "ok",
            "instances": 1,
            "each": {bad.url: "suspect", good.url: "up"},
        }
        text = metrics(proxy)
        assert 'outcome="silent, asked elsewhere"' in text
        assert f'doubts_total{{instance="{bad.url}",why="probe"}} 1.0' in text
        assert f'suspect{{instance="{bad.url}"}} 1.0' in text
        had = len(bad.paths)
        assert ask(proxy).content == WHOLE
        assert len(bad.paths) == had
        bad.mood = "well"
        eventually(lambda: state(proxy, bad) is InstanceHealth.UP)
        assert ask(proxy).content == WHOLE
        assert len(bad.paths) == had + 1


def test_the_last_one_left_is_waited_for():
    """Probes are not answered, and yet it may go on."""
    timeouts = {"first_byte_s": 1000.0, "probe_every_s": 0.05, "probe_s": 0.5}
    with routing("stopped", timeouts=timeouts) as (proxy, (one,)):
        eventually(lambda: proxy.upstreams.health.silent(one.url))
        assert httpx.get(f"{proxy.url}/health").status_code == 503
        with ThreadPoolExecutor(1) as pool:
            asked = pool.submit(ask, proxy)
            eventually(lambda: one.paths)
            time.sleep(0.3)
            assert not asked.done()
            one.wake()
            assert asked.result().content == WHOLE
        eventually(lambda: state(proxy, one) is InstanceHealth.UP)


def test_one_that_comes_back_takes_over_what_waits_at_one_that_is_stopped():
    timeouts = {"first_byte_s": 1000.0, "probe_every_s": 0.05, "probe_s": 0.5}
    with routing("stopped", "stopped", timeouts=timeouts) as (proxy, (one, two)):
        eventually(lambda: all(map(proxy.upstreams.health.silent, proxy.upstreams.names)))
        with ThreadPoolExecutor(1) as pool:
            asked = pool.submit(ask, proxy)
            eventually(lambda: one.paths or two.paths)
            other = two if one.paths else one
            other.mood = "well"
            assert asked.result().content == WHOLE
            assert len(other.paths) == 1


@pytest.mark.parametrize(
    ("moods", "status", "message"),
    [
        (("waits", "waits", "waits"), 504, "no instance began to answer in time"),
        (("garbage", "waits"), 502, "no instance could answer"),
    ],
)
def test_what_is_said_where_nobody_answers(moods, status, message):
    with routing(*moods, timeouts=SHORT) as (proxy, made):
        answer = ask(proxy)
        assert answer.status_code == status
        assert answer.json()["error"]["message"] == message
        assert sum(len(one.paths) for one in made) == 2  # as many as may be tried


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/batches"])
def test_nobody_can_be_reached(path):
    """So nothing was executed, and all are tried whatever the request does."""
    gone = [StandIn(), StandIn()]
    urls = [one.url for one in gone]
    for one in gone:
        one.stop()
    proxy = Routing(*urls)
    try:
        answer = ask(proxy, path=path)
        assert answer.status_code == 503
        assert answer.headers["retry-after"] == "1"
        assert answer.json()["error"]["message"] == "no instance can be reached"
        assert metrics(proxy).count('outcome="unreachable"} 1.0') == 2
    finally:
        proxy.stop()


def test_a_refusal_is_passed_on_where_only_suspects_are_left():
    with routing("429", "stopped", timeouts={**SHORT, "probe_s": 0.5}) as (proxy, (full, _)):
        eventually(lambda: states(proxy) == [InstanceHealth.UP, InstanceHealth.SUSPECT])
        assert ask(proxy).status_code == 429
        assert len(full.paths) == 1


def test_a_stream_that_stalls_is_broken_off_and_not_asked_for_again():
    with routing("stops", "well", timeouts=SHORT) as (proxy, (bad, good)):
        holds(proxy, bad, [1, 2, 3, 4])
        read = b""
        with pytest.raises(httpx.RemoteProtocolError):  # noqa: SIM117, PT012
            with httpx.stream("POST", f"{proxy.url}/v1/completions", json=ASK) as answer:
                for piece in answer.iter_raw():
                    read += piece
        assert read == CHUNKS[0]
        assert good.paths == []
        eventually(lambda: bad.left == 1)
        assert 'outcome="stalled"} 1.0' in metrics(proxy)
        assert state(proxy, bad) is not InstanceHealth.UP


def test_a_client_that_stops_reading_is_not_waited_for_for_ever():
    with routing("well", timeouts={"idle_s": 0.4}) as (proxy, (one,)):
        one.chunks = [b"x" * (1 << 20)] * 64
        host, port = proxy.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port))) as plain:
            plain.sendall(b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\n\r\n")
            assert plain.recv(1)
            eventually(lambda: 'outcome="not taken"} 1.0' in metrics(proxy))
        assert state(proxy, one) is InstanceHealth.UP


def test_a_client_that_gives_up_makes_its_instance_suspect():
    with routing("waits", "well") as (proxy, (one, _)):
        holds(proxy, one, [1, 2, 3, 4])
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{proxy.url}/v1/completions", json=ASK, timeout=0.3)
        eventually(lambda: f'"{one.url}",why="client left"}} 1.0' in metrics(proxy))
        eventually(lambda: state(proxy, one) is InstanceHealth.UP)  # its probe was answered


def test_bodies_have_a_budget_together():
    body = json.dumps({**ASK, "user": "x" * 149_000})
    counted = len(body) - FREE_BYTES
    with routing("waits", bodies=BodyBudget(largest=150_000, budget=150_000)) as (proxy, (one,)):
        with ThreadPoolExecutor(1) as pool:
            first = pool.submit(httpx.post, f"{proxy.url}/v1/completions", content=body, timeout=20)
            eventually(lambda: one.paths)
            # Counted until its answer ends: another instance may have to be asked.
            held = re.search(r"^kvkeep_http_body_bytes (\S+)", metrics(proxy), re.M)
            assert float(held[1]) == counted
            assert httpx.get(f"{proxy.url}/health").is_success
            more = httpx.post(f"{proxy.url}/v1/completions", content=b"y" * 149_000)
            assert (more.status_code, more.headers["retry-after"]) == (503, "1")
            assert 'kvkeep_http_bodies_refused_total{reason="budget"} 1.0' in metrics(proxy)
            one.wake()
            assert first.result().content == WHOLE
        eventually(lambda: "kvkeep_http_body_bytes 0.0" in metrics(proxy))


def test_a_client_that_leaves_in_the_middle_of_its_body_holds_nothing():
    with routing("well", bodies=BodyBudget(largest=100_000)) as (proxy, _):
        host, port = proxy.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port))) as plain:
            plain.sendall(
                b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n"
                b"content-length: 90000\r\n\r\n" + b"x" * (FREE_BYTES + 500)
            )
            eventually(lambda: "kvkeep_http_body_bytes 500.0" in metrics(proxy))
        eventually(lambda: "kvkeep_http_body_bytes 0.0" in metrics(proxy))


def test_other_endpoints_and_methods():
    with routing("well", "well") as (proxy, made):
        assert httpx.get(f"{proxy.url}/v1/models?x=1&y=%20").content == WHOLE
        assert httpx.post(f"{proxy.url}/tokenize", json={"prompt": "ab"}).json()["tokens"] == [
            97,
            98,
        ]
        assert "/v1/models?x=1&y=%20" in [path for one in made for path in one.paths]


@pytest.mark.parametrize(
    "path", ["/v1/models/../../admin", "/v1/models/%2e%2E/%2e%2e/admin", "/v1/models/x/..%2f../y"]
)
def test_no_path_leads_out_of_what_is_passed_on(path):
    with routing("well") as (proxy, (one,)):
        plain = http.client.HTTPConnection(proxy.url.removeprefix("http://"), timeout=20)
        plain.request("POST", path)
        with plain.getresponse() as answer:
            assert answer.status == 404
            answer.read()
        plain.close()
        assert one.asked == []


def test_a_path_too_long_to_be_asked_for():
    with routing("well") as (proxy, (one,)):
        plain = http.client.HTTPConnection(proxy.url.removeprefix("http://"), timeout=20)
        plain.request("GET", "/v1/models/" + "x" * 65_520)  # what the server lets through
        with plain.getresponse() as answer:
            assert answer.status == 414
            answer.read()
        plain.close()
        assert one.asked == []


def test_too_large_and_foreign():
    with routing("well", bodies=BodyBudget(largest=1000)) as (proxy, (one,)):
        assert ask(proxy, {"prompt": "x" * 2000}).status_code == 413
        answer = httpx.post(proxy.url + "/v1/completions", json=ASK, headers={"host": "evil.test"})
        assert answer.status_code == 400
        assert one.asked == []


def test_keys_and_prompts_are_in_no_log(caplog):
    caplog.set_level(logging.DEBUG, "kvkeep.router")
    with routing("hangs up", "well") as (proxy, _):
        for _ in range(3):
            ask(proxy, {"prompt": "a secret text"}, headers={"authorization": "Bearer sk-123"})
        text = caplog.text + metrics(proxy)
    assert "answered" in text
    assert "sk-123" not in text
    assert "secret" not in text


@pytest.mark.parametrize(
    "instances",
    [
        ["x"],
        ["ftp://a"],
        ["http://"],
        ["http://a?b"],
        ["http://a", "http://a"],
        ["http://user:secret@a"],
        ["ftp://user:secret@a"],
        ["http://a:port"],
        ["http://a:99999"],
        ["http://[::1"],
        ["http://a b"],
        ["http://a\n"],
        ["http://a#b"],
    ],
)
def test_instances_that_are_none(instances):
    with pytest.raises(InvalidValue) as refused:
        Upstreams(instances)
    assert "secret" not in str(refused.value)


def test_nothing_is_asked_for_that_the_client_did_not():
    with routing("well") as (proxy, (one,)):
        plain = http.client.HTTPConnection(proxy.url.removeprefix("http://"), timeout=20)
        plain.putrequest("GET", "/v1/models", skip_accept_encoding=True)
        plain.endheaders()
        assert plain.getresponse().read() == WHOLE
        plain.close()
        assert set(one.asked[0][1]) <= {"host", "content-length", "via"}


def test_what_is_about_the_connection_stays():
    given = [(b"Connection", b"close, X-Own"), (b"X-Own", b"1"), (b"Host", b"h"),
             (b"X-Other", b"2"), (b"Transfer-Encoding", b"chunked"),
             (b"Authorization", b"Bearer k")]  # fmt: skip
    assert end_to_end_headers(given) == [(b"x-other", b"2"), (b"authorization", b"Bearer k")]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/models"])
def test_a_router_among_its_own_instances_does_not_ask_itself_for_ever(path):
    sockets = [bind("127.0.0.1", 0) for _ in range(2)]
    urls = [f"http://127.0.0.1:{one.getsockname()[1]}" for one in sockets]
    one = StandIn("well")
    # Two routers that ask each other and themselves; a server is behind the second one alone.
    made = [Routing(*urls, bound=sockets[0]), Routing(*urls, one.url, bound=sockets[1])]
    try:
        asked = {"prompt": "text"} if path == "/v1/completions" else None
        for proxy in made:
            eventually(lambda proxy=proxy: httpx.get(f"{proxy.url}/health").is_success)
            answer = httpx.request("POST" if asked else "GET", proxy.url + path, json=asked)
            assert answer.is_success or answer.status_code >= 500
        eventually(lambda: httpx.get(f"{made[1].url}{path}").is_success)
        assert set(one.paths) == {path}
    finally:
        for proxy in made:
            proxy.stop()
        one.stop()


# --- paths that are not known here -----------------------------------------------------------

CASES = sorted((Path(__file__).parent / "cases").glob("messages_*.json"))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.stem)
@pytest.mark.parametrize("path", ["/v1/messages?beta=true", "/v1/messages/count_tokens"])
def test_a_request_of_another_api_arrives_byte_for_byte(case, path):
    body = case.read_bytes()
    with routing("well") as (proxy, (one,)):
        headers = {"content-type": "application/json", "anthropic-version": "2023-06-01"}
        answer = httpx.post(proxy.url + path, content=body, headers=headers)
        assert (answer.status_code, answer.content) == (200, WHOLE)
        (sent,) = [asked for asked in one.asked if asked[0] != "/tokenize"]
        assert (sent[0], sent[2]) == (path, body)
        assert sent[1]["anthropic-version"] == "2023-06-01"


def test_an_answer_of_interleaved_calls_comes_byte_for_byte():
    answer = (CASES[0].parent / "upstream_interleaved_calls.txt").read_bytes()
    with routing("well") as (proxy, (one,)):
        one.chunks = [answer[at : at + 100] for at in range(0, len(answer), 100)]
        for path in ("/v1/messages", "/v1/chat/completions", "/v1/responses", "/v1/new"):
            assert ask(proxy, {"messages": [], "stream": True}, path).content == answer


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/v1/responses/resp_1?stream=true"),
        ("DELETE", "/v1/responses/resp_1"),
        ("PUT", "/v1/a/b"),
        ("PATCH", "/v1/a"),
        ("OPTIONS", "/v1/chat/completions"),
        ("POST", "/v2/rerank"),
        ("POST", "/score"),
        ("POST", "/pooling"),
        ("POST", "/v1/audio/transcriptions"),
    ],
)
def test_every_path_of_inference_is_forwarded(method, path):
    body = b"" if method in {"GET", "OPTIONS"} else b"\x00 any \xff bytes"
    with routing("well") as (proxy, (one,)):
        answer = httpx.request(method, proxy.url + path, content=body)
        assert answer.content == WHOLE
        assert one.methods == [method]
        assert [(asked[0], asked[2]) for asked in one.asked] == [(path, body)]


@pytest.mark.parametrize(
    "path",
    ["/kv/map", "/kv/instances", "/sleep", "/wake_up", "/reset_prefix_cache", "/update_weights",
     "/collective_rpc", "/shutdown", "/abort_requests", "/v1/load_lora_adapter", "/v1", "/docs",
     "/v1/unload_lora_adapter/", "/v1/%6coad_lora_adapter", "/v1//load_lora_adapter", "//sleep",
     "/v1/..%5csleep", "/", "/V1/models"],
)  # fmt: skip
def test_no_path_that_operates_an_instance_is_forwarded(path):
    with routing("well") as (proxy, (one,)):
        for method in ("GET", "POST"):
            host = proxy.url.removeprefix("http://")
            plain = http.client.HTTPConnection(host, timeout=20)
            plain.request(method, path)
            assert plain.getresponse().status == 404
            plain.close()
        assert one.asked == []


@pytest.mark.parametrize(
    ("request_line", "status"),
    [
        ("POST /v1/load_lora_adapter#x", 400),
        ("GET /v1/models?x=1#y", 400),
        ("CONNECT /v1/models", 405),
    ],
)
def test_no_request_is_forwarded_as_another_or_as_a_tunnel(request_line, status):
    with routing("well") as (proxy, (one,)):
        host, port = proxy.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=20) as plain:
            plain.sendall(f"{request_line} HTTP/1.1\r\nhost: localhost\r\n\r\n".encode())
            assert plain.recv(100).startswith(b"HTTP/1.1 %d " % status)
        assert one.asked == []


def test_a_piece_of_an_answer_does_not_wait_for_the_next():
    with routing("stops", timeouts={"idle_s": 30.0}) as (proxy, (one,)):
        with httpx.stream("POST", f"{proxy.url}/v1/messages", json={"stream": True}) as answer:
            assert next(answer.iter_raw()) == CHUNKS[0]
        eventually(lambda: one.left == 1)


# --- what a refused or hostile request changes -----------------------------------------------


def test_a_request_that_is_refused_moves_no_traffic():
    """An instance without the client's key says 401 at once: it did no work."""
    with routing("401", "401", cost=RoutingCost()) as (proxy, made):
        assert ask(proxy, {"prompt": [7] * 1_000_000}).status_code == 401
        for one in made:
            one.mood = "well"
        for number in range(40):
            assert ask(proxy, {"prompt": [number] * 200}).is_success
        assert min(len(one.paths) for one in made) >= 10


def test_a_prompt_stays_where_it_was_answered_without_events():
    with routing("well", "well", "well") as (proxy, made):
        prompts = [[number] * 100 for number in range(6)]
        homes = [set() for _ in prompts]
        for turn in range(4):
            for prompt, home in zip(prompts, homes, strict=True):
                before = [len(one.paths) for one in made]
                assert ask(proxy, {"prompt": prompt + [turn] * 50 * turn}).is_success
                home.update(at for at, one in enumerate(made) if len(one.paths) > before[at])
        assert [len(home) for home in homes] == [1] * 6
        assert len(set.union(*homes)) > 1


# --- what is sent again, and what is shown -----------------------------------------------------


@pytest.mark.parametrize("mood", ["hangs up", "head only", "garbage", "502", "504", "waits"])
@pytest.mark.parametrize("path", ["/v1/batches", "/v1/new", "/v1/responses"])
def test_a_request_that_may_have_changed_something_is_not_sent_again(mood, path):
    with routing(mood, mood, timeouts=SHORT) as (proxy, made):
        answer = ask(proxy, path=path)
        assert answer.status_code in {502, 504}
        assert sum(len(one.paths) for one in made) == 1


@pytest.mark.parametrize("mood", ["503", "429"])
def test_a_request_that_was_refused_is_sent_elsewhere_whatever_it_does(mood):
    with routing(mood, mood) as (proxy, made):
        assert ask(proxy, path="/v1/batches").status_code == int(mood)
        assert [len(one.paths) for one in made] == [1, 1]


@pytest.mark.parametrize(
    "headers", [{}, {"authorization": "Bearer x"}, {"authorization": "k"}, {"x-api-key": ""}]
)
def test_instances_are_shown_to_those_who_have_the_key(headers):
    with routing("well", api_key="k") as (proxy, (one,)):
        for path in ("/health", "/metrics"):
            answer = httpx.get(proxy.url + path, headers=headers)
            assert answer.status_code == (401 if path == "/metrics" else 200)
            assert one.url not in answer.text
            for right in ({"authorization": "Bearer k"}, {"x-api-key": "k"}):
                assert one.url in httpx.get(proxy.url + path, headers=right).text
        # Requests are forwarded with the clients' own keys.
        assert ask(proxy, headers=headers).content == WHOLE
        assert one.asked[-1][1].get("authorization") == headers.get("authorization")
