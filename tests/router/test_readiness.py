"""``/livez`` and ``/ready`` of the router, and what happens to requests when it shuts down."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from standing_in import CHUNKS, eventually, routing

from kvkeep.serve.router.health import Health

ASK = {"model": "m", "prompt": [1, 2, 3, 4], "stream": True}


def status(proxy, path, **headers):
    return httpx.get(proxy.url + path, headers=headers).status_code


def ask(proxy):
    return httpx.post(f"{proxy.url}/v1/completions", json=ASK, timeout=20)


def test_it_is_ready_while_one_instance_is_up():
    with routing("well", "well") as (proxy, made):
        eventually(lambda: status(proxy, "/ready") == 200)
        for one in made:
            one.health = "503"
        eventually(lambda: status(proxy, "/ready") == 503)
        refused = httpx.get(f"{proxy.url}/ready").json()["error"]
        assert refused["message"] == "no instance is up"
        assert status(proxy, "/livez") == 200
        made[1].health = "200"
        eventually(lambda: status(proxy, "/ready") == 200)


def test_it_is_not_ready_before_an_instance_has_answered():
    health = Health()
    health.add("a")
    health.add("b")
    assert health.up() == ["a", "b"]
    assert not health.any_up()
    health.probed("a", answered=False)
    assert not health.any_up()
    health.probed("b", answered=True)
    assert health.any_up()
    health.failed("b")
    assert not health.any_up()
    health.worked("a")
    assert health.any_up()


def test_probes_are_answered_under_any_host_name():
    with routing("well") as (proxy, _):
        eventually(lambda: status(proxy, "/ready") == 200)
        for path, expected in (("/ready", 200), ("/livez", 200), ("/health", 400)):
            assert status(proxy, path, host="10.1.2.3:8080") == expected


def test_a_shutdown_lets_running_requests_end_and_takes_no_more():
    with routing("waits") as (proxy, (one,)), ThreadPoolExecutor(1) as pool:
        eventually(lambda: status(proxy, "/ready") == 200)
        running = pool.submit(ask, proxy)
        eventually(lambda: one.paths)
        proxy.signal()
        eventually(lambda: status(proxy, "/ready") == 503)
        refused = httpx.get(f"{proxy.url}/ready").json()["error"]
        assert refused["message"] == "this router is shutting down"
        answer = ask(proxy)
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
        assert answer.headers["connection"] == "close"
        for path in ("/livez", "/health", "/metrics"):
            assert status(proxy, path) == 200
        assert not running.done()
        one.wake()
        assert running.result().content == b"".join(CHUNKS)
        eventually(lambda: not proxy.runs)


def test_a_second_signal_does_not_wait():
    with routing("waits") as (proxy, (one,)), ThreadPoolExecutor(1) as pool:
        running = pool.submit(ask, proxy)
        eventually(lambda: one.paths)
        proxy.signal()
        eventually(lambda: status(proxy, "/ready") == 503)
        proxy.signal()
        eventually(lambda: not proxy.runs)
        one.wake()
        with pytest.raises(httpx.HTTPError):
            running.result().raise_for_status()


def test_a_request_that_takes_longer_than_the_drain_is_cut_off():
    with routing("waits", drain_s=0.3) as (proxy, (one,)), ThreadPoolExecutor(1) as pool:
        running = pool.submit(ask, proxy)
        eventually(lambda: one.paths)
        proxy.signal()
        eventually(lambda: not proxy.runs)
        one.wake()
        with pytest.raises(httpx.HTTPError):
            running.result().raise_for_status()


def test_an_idle_router_ends_at_once():
    with routing("well") as (proxy, _):
        proxy.signal()
        eventually(lambda: not proxy.runs)
