"""The status of a cache inside another engine: served, read by commands and by a browser."""

from __future__ import annotations

import socket
import threading
import time
from contextlib import contextmanager
from functools import partial

import httpx
import pytest
from browsing import KEY, LOOKS, TOO_WIDE, live, see
from prometheus_client.parser import text_string_to_metric_families
from real_server import eventually

from kvkeep.cli import main
from kvkeep.core.cost import CostModel
from kvkeep.core.keys import Namespace
from kvkeep.integrations.engine_status import EngineFacts, EngineStatus
from kvkeep.integrations.request_watch import WatchedLoad
from kvkeep.integrations.status_options import StatusAddress, bound_or_none, loopback_names
from kvkeep.serve.http import bind, url_of
from kvkeep.serve.server.status_app import StatusServer, create_status_app
from kvkeep.store import BlockStore

PAGE, PAGES = 16, 256


class Served:
    """A status over a real store, and what an engine tells it."""

    def __init__(self, place, key=None, host="127.0.0.1"):
        self.store = BlockStore("a model", tiers=["memory://1MiB", f"file://{place}?size=4MiB"])
        self.status = EngineStatus(
            EngineFacts("vLLM 0.0", "a <b>model</b>", PAGE, PAGES),
            CostModel(),
            tiers=lambda: [(0, tier) for tier in self.store.stats()],
            free_pages=lambda: PAGES - 10,
        )
        bound = bind(host, 0)
        self.port, self.url = bound.getsockname()[1], url_of(bound)
        make = partial(create_status_app, self.status, key=key, hosts=loopback_names(host))
        self.server = StatusServer(make, bound)
        headers = {} if key is None else {"authorization": f"Bearer {key}"}
        self.http = httpx.Client(base_url=self.url, timeout=30, headers=headers)
        eventually(self.answers)

    def answers(self):
        try:
            return self.http.get("/health").status_code == 200
        except httpx.TransportError:
            return False

    def get(self, path):
        return self.http.get(path).raise_for_status().json()

    def serve(self, id, prompt, table, *, cached=0, salt="", load=None):
        watch = self.status.watch
        watch.arrived(id, prompt, Namespace(tenant=salt), at=time.time())
        watch.found(id, cached)
        watch.admitted(id, table, loading=load and (load[0], load[1]))
        if load:
            watch.loaded(id, WatchedLoad((load,), 0.01))
        for one in watch.unanswered:
            watch.computed(one, len(prompt))
            watch.answering(one)
        watch.ended(id, "done", answer=[1, 2], computed=len(prompt), kept=len(prompt))

    def close(self):
        self.http.close()
        self.server.close()
        self.status.close()
        self.store.close()


@contextmanager
def serving(place, **more):
    one = Served(place, **more)
    try:
        yield one
    finally:
        one.close()


def some_requests(one):
    """A prompt, the same again, one that differs in the middle, and one from a tier."""
    first = list(range(100, 300))
    pages = list(range(1, 14))
    one.serve("cmpl-first", first, pages)
    one.serve("cmpl-again", first, pages, cached=192)
    other = [*first[:50], 7, *first[51:]]
    one.serve("cmpl-differs", other, [1, 2, 3, *range(20, 30)], cached=48, salt="")
    one.serve("cmpl-loaded", first, list(range(40, 53)), load=(0, 192, "file"), salt="a tenant")
    one.store.put([bytes(32)], [b"x" * 1000], wait=5)


@pytest.fixture(scope="module")
def outside(tmp_path_factory):
    with serving(tmp_path_factory.mktemp("kv")) as one:
        some_requests(one)
        yield one


@pytest.fixture(scope="module")
def locked(tmp_path_factory):
    with serving(tmp_path_factory.mktemp("kv"), key=KEY) as one:
        yield one


# --- what is told ----------------------------------------------------------------------------


def test_live_and_requests(outside):
    eventually(lambda: outside.get("/kv/live")["totals"]["requests"] == 4)
    said = outside.get("/kv/live")
    assert (said["engine"], said["map"], said["text"]) == ("vLLM 0.0", False, False)
    assert not {"what_if", "sessions"} & said.keys()
    assert [tier["name"] for tier in said["tiers"]] == ["memory", "file"]
    assert said["tiers"][1]["blocks"] == 1
    assert sum(said["pages"][one] for one in ("free", "cached_evictable", "cached_held", "private")
               ) == PAGES  # fmt: skip
    by_id = {one["id"]: one for one in outside.get("/kv/requests")["requests"]}
    assert by_id["cmpl-first"]["computed"] == {"new": 200}
    assert by_id["cmpl-again"]["reused"] == {"pool": 192}
    assert by_id["cmpl-loaded"]["reused"] == {"file": 192}
    assert by_id["cmpl-differs"]["computed"]["diverged"] > 100
    assert by_id["cmpl-differs"]["outcome"] == "done"
    assert outside.get("/kv/explain/cmpl-loaded")["cache_salt"] == "a tenant"
    assert outside.get("/kv/stats")["engine"]["loaded_tokens"] == 192
    assert outside.get("/kv/cost")["loads"]["total"]["loaded_tokens"] == 192


def test_metrics_have_the_names_of_a_server(outside):
    found = {
        one.name: one for one in text_string_to_metric_families(outside.http.get("/metrics").text)
    }
    fill = {one.labels["tier"]: one.value for one in found["kvkeep_store_blocks"].samples}
    assert fill == {"memory": 1, "file": 1}
    reused = {one.labels["tier"]: one.value for one in found["kvkeep_hit_tokens"].samples}
    assert reused == {"pool": 240, "file": 192}
    assert {one.labels["reason"] for one in found["kvkeep_recomputed_tokens"].samples} >= {"new"}


@pytest.mark.parametrize(
    ("method", "path", "code"),
    [
        ("GET", "/kv/map", "no_map"), ("GET", "/kv/map/3", "no_map"),
        ("POST", "/kv/explain", "no_prompts"),
        ("GET", "/kv/explain/nobody", "unknown_request"),
        ("POST", "/kv/clear", None), ("POST", "/v1/completions", None),
    ],
)  # fmt: skip
def test_what_there_is_not(outside, method, path, code):
    answer = outside.http.request(method, path, json={"prompt": "x"} if method == "POST" else None)
    assert answer.status_code == 404
    assert answer.json()["error"]["code"] == code


def test_the_commands_read_it(outside, capsys):
    assert main(["top", "--once", outside.url]) == 0
    seen = capsys.readouterr().out
    for word in ("a <b>model</b>", "file", "a tenant", "differ at token 50"):
        assert word in seen
    assert main(["explain", outside.url, "cmpl-differs"]) == 0
    assert "at token 50, and" in capsys.readouterr().out
    assert main(["explain", outside.url]) == 0
    assert "%" in capsys.readouterr().out
    assert main(["usage", outside.url]) == 0
    assert "a tenant" in capsys.readouterr().out
    assert main(["explain", outside.url, "--prompt", "Hello"]) != 0
    assert "cannot be explained here: vLLM 0.0" in capsys.readouterr().err


@pytest.mark.parametrize("look", LOOKS)
def test_the_page_shows_it(outside, opened, look, tmp_path):
    with opened(outside, expected=["404"], **LOOKS[look]) as page:
        live(page)
        assert "a <b>model</b>" in page.locator("#model").inner_text()
        assert "vLLM 0.0" in page.locator("#model").inner_text()
        requests = see(page, "#requests")
        requests.locator(".request").nth(3).wait_for()
        requests.get_by_text("differ from request").first.click()
        page.locator("dialog[open]").get_by_text("at token 50").first.wait_for()
        page.keyboard.press("Escape")
        assert "file" in see(page, "#tiers-table").inner_text()
        assert page.locator("#kept").is_hidden()
        assert page.locator("#whatif-card").is_hidden()
        assert page.locator("#ask").is_hidden()
        assert page.evaluate(TOO_WIDE) == []
        page.screenshot(path=tmp_path / f"{look}.png", full_page=True)


# --- strangers -------------------------------------------------------------------------------


TOLD = (
    "/kv/live", "/kv/requests", "/kv/explain/x", "/kv/summary", "/kv/stats", "/kv/cost",
    "/metrics", "/kv/map", "/openapi.json",
)  # fmt: skip


def test_a_key_is_needed_for_all_that_is_told(locked):
    for path in TOLD:
        for headers in ({"authorization": "Bearer wrong"}, {"authorization": ""}):
            assert locked.http.get(path, headers=headers).status_code == 401, path
    assert locked.http.get("/kv/live").status_code == 200
    assert httpx.get(f"{locked.url}/health").status_code == 200


def test_a_page_of_another_name_cannot_read_it(outside):
    for host in ("evil.example", "evil.example:80", "127.0.0.1.evil.example", ""):
        answer = outside.http.get("/kv/live", headers={"host": host})
        assert answer.status_code == 400, host
    assert outside.http.get("/kv/live", headers={"host": f"localhost:{outside.port}"}).is_success


def test_a_named_host_accepts_all_names():
    assert loopback_names("0.0.0.0") is None
    assert loopback_names("10.0.0.1") is None
    assert "::1" in (loopback_names("::1") or ())


def test_a_thousand_requests(outside):
    """Of clients at once, while an engine goes on telling."""
    failed = []

    def ask():
        with httpx.Client(base_url=outside.url, timeout=60) as client:
            for number in range(128):
                path = ("/kv/live", "/kv/requests?last=5", "/health", "/metrics")[number % 4]
                if client.get(path).status_code != 200:
                    failed.append(path)

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for number in range(250):
        outside.serve(f"beside {number}", [number] * 40, [60, 61, 62])
    for thread in threads:
        thread.join()
    assert failed == []
    assert outside.status.watch.lost == 0


def test_more_connections_than_it_takes(outside):
    many = [socket.create_connection(("127.0.0.1", outside.port)) for _ in range(100)]
    assert outside.get("/kv/live")["engine"] == "vLLM 0.0"
    for one in many:
        one.close()


# --- the end ---------------------------------------------------------------------------------


def test_it_ends_with_requests_open_and_gives_its_port_back(tmp_path):
    with serving(tmp_path) as one:
        half = socket.create_connection(("127.0.0.1", one.port))
        half.sendall(b"GET /kv/live HTTP/1.1\r\nHost: localhost\r\n")
        idle = socket.create_connection(("127.0.0.1", one.port))
        counted = [each.name for each in threading.enumerate()]
        one.close()
        one.server.close()  # a second time
        left = [each.name for each in threading.enumerate()]
        for name in ("kvkeep status", "kvkeep watch", "kvkeep-explain"):
            assert left.count(name) == counted.count(name) - 1
        half.close()
        idle.close()
        with socket.create_server(("127.0.0.1", one.port)):
            pass


def test_closed_before_it_listens(tmp_path):
    bound = bind("127.0.0.1", 0)
    port = bound.getsockname()[1]
    begun = threading.Event()

    def make():
        begun.wait(10)
        raise RuntimeError("the application cannot be made")

    server = StatusServer(make, bound)
    begun.set()
    server.close()
    with socket.create_server(("127.0.0.1", port)):
        pass


def test_an_address_in_use_is_no_error(caplog):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = StatusAddress("127.0.0.1", taken.getsockname()[1])
        assert bound_or_none(address) is None
    assert f"kvkeep serves no status at {address}" in caplog.text
    assert bound_or_none(StatusAddress("no-such-host.invalid", 1)) is None


def test_ranks_have_ports_of_their_own():
    address = StatusAddress.parse("127.0.0.1:8201")
    assert str(address.of_rank(3)) == "127.0.0.1:8204"
    assert str(StatusAddress.parse("[::1]:0").of_rank(3)) == "[::1]:0"
