"""``/kv/tiers`` and ``kvkeep store tiers|attach|detach``: tiers that come and go under a server."""

from __future__ import annotations

import json
import threading

import pytest
from real_server import eventually
from test_serving_tiers import KEY, PROMPT, ask, loaded, metrics, serving

from kvkeep.cli import main

pytestmark = [pytest.mark.model, pytest.mark.usefixtures("load_first")]


@pytest.fixture
def server(tmp_path):
    with serving(tmp_path, api_key=KEY) as server:
        yield server


def names(server):
    return [tier["name"] for tier in server.http.get("/kv/tiers").json()["tiers"]]


def attach(server, url, **more):
    return server.http.post("/kv/tiers", json={"url": url, **more})


def error(answer):
    found = answer.json()["error"]
    return answer.status_code, found["code"], found["message"]


def test_tiers_are_attached_and_detached_and_nothing_is_lost(server, tmp_path):
    assert names(server) == ["memory", "file"]
    ask(server)
    assert server.flush(20)
    answer = attach(server, f"file://{tmp_path}/other?size=64MiB", below="memory")
    assert answer.status_code == 200
    memory, other, file = answer.json()["tiers"]
    assert [memory["name"], other["name"], file["name"]] == ["memory", "file2", "file"]
    assert other == {
        "name": "file2", "place": f"file://{tmp_path}/other", "codec": "raw",
        "capacity": 64 << 20, "used_bytes": 0, "blocks": 0, "queued_bytes": 0,
        "breaker": "closed",
    }  # fmt: skip
    left = server.http.delete("/kv/tiers/file").json()
    assert (left["name"], left["left"]) == ("file", 0)
    assert left["moved"] > 0
    assert names(server) == ["memory", "file2"]
    server.engine.cache.clear()
    again = ask(server)
    assert loaded(again) > 0
    assert again["choices"][0]["text"]
    found = metrics(server)
    assert any('tier="file2"' in name for name in found)
    assert not any('tier="file"' in name and "capacity" in name for name in found)


def test_blocks_that_are_left_behind_are_explained(server, tmp_path):
    ask(server)
    assert server.flush(20)
    attach(server, f"file://{tmp_path}/other?size=64MiB")
    gone = server.http.delete("/kv/tiers/file", params={"move": False}).json()
    assert (gone["moved"], gone["left"] > 0) == (0, True)
    server.engine.cache.clear()
    server.store._tiered.memory.remove(
        [item.block for item in server.store._tiered.memory.backend.list()]
    )
    (miss, *_) = server.store.why(PROMPT)
    assert (miss.tier, miss.what, miss.detail) == ("file", "removed", "detached")
    told = server.http.post("/kv/explain", json={"prompt": PROMPT}).json()
    assert any(
        (span.get("evidence") or span).get("cause") == "detached" for span in told["spans"]
    ), told
    # Attached again, all is there as before.
    attach(server, f"file://{tmp_path}/tier?size=256MiB")
    eventually(lambda: server.http.get("/kv/tiers").json()["tiers"][-1]["blocks"])
    assert loaded(ask(server)) > 0


def test_wrong_requests_are_one_line(server, tmp_path):
    status, code, message = error(attach(server, f"file://{tmp_path}/tier?size=1GiB"))
    assert (status, code) == (409, "conflict")
    assert message == f"file://{tmp_path}/tier is attached already, as file"
    status, code, message = error(attach(server, f"file://{tmp_path}/x?size=1MiB", below="disk"))
    assert (status, code) == (400, "wrong_tier")
    assert message == "no tier is called 'disk'; there are memory, file"
    assert error(server.http.delete("/kv/tiers/file"))[:2] == (409, "conflict")
    assert error(server.http.delete("/kv/tiers/memory"))[:2] == (409, "conflict")
    status, code, message = error(server.http.delete("/kv/tiers/nothing"))
    assert (status, message) == (404, "no tier is called 'nothing'; there are memory, file")
    for url in (
        "tape://me:s3cret@host/1", "valkey://me:s3cret@host:port",
        "valkey://me:s3cret@127.0.0.1:1/0?colour=red", "file:///proc/nothing/here", "x", "",
    ):  # fmt: skip
        answer = attach(server, url)
        assert answer.status_code == 400, url
        assert "s3cret" not in answer.text
        assert "\\n" not in answer.text
    assert names(server) == ["memory", "file"]


def test_secrets_in_urls_are_not_shown(server):
    answer = attach(server, "valkey://me:s3cret@127.0.0.1:1/0?timeout=100ms")
    assert "s3cret" not in answer.text + server.http.get("/kv/tiers").text
    assert "s3cret" not in server.http.get("/kv/stats").text


def test_changes_need_a_key_and_a_store(tmp_path, start_server):
    with serving(tmp_path) as server:
        assert names(server) == ["memory", "file"]
        for answer in (
            attach(server, f"file://{tmp_path}/x?size=1MiB"),
            server.http.delete("/kv/tiers/file"),
        ):
            assert error(answer)[:2] == (403, "no_api_key")
    with start_server(api_key=KEY) as server:
        assert server.http.get("/kv/tiers").status_code == 401
        headers = {"Authorization": f"Bearer {KEY}"}
        assert server.http.get("/kv/tiers", headers=headers).status_code == 404


def test_answers_go_on_while_tiers_come_and_go(server, tmp_path):
    expected = ask(server)["choices"][0]["text"]
    over = threading.Event()
    texts, failed = [], []

    def use():
        try:
            while not over.is_set():
                texts.append(ask(server)["choices"][0]["text"])
                server.engine.cache.clear()
        except Exception as error:  # noqa: BLE001 - the test fails with it
            failed.append(error)

    using = threading.Thread(target=use)
    using.start()
    try:
        for turn in range(4):
            places = f"file://{tmp_path}/place{turn % 2}?size=64MiB"
            answer = attach(server, places, below="memory" if turn % 2 else None)
            assert answer.status_code == 200, answer.text
            leaving = names(server)[1 + turn % 2]
            assert server.http.delete(f"/kv/tiers/{leaving}").json()["left"] == 0
    finally:
        over.set()
        using.join(60)
    assert not failed
    assert {*texts} == {expected}
    server.assert_idle()


def test_the_commands_say_what_the_server_does(server, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("KVKEEP_API_KEY", KEY)
    monkeypatch.setenv("COLUMNS", "250")
    ask(server)
    assert server.flush(20)
    place = f"file://{tmp_path}/new?size=64MiB"
    assert main(["store", "attach", server.url, place, "--below", "memory"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[-3:]] == ["memory", "file2", "file"]
    assert "64 MiB" in lines[-2]
    assert main(["store", "detach", server.url, "file"]) == 0
    first, *_ = capsys.readouterr().out.splitlines()
    assert first.startswith("file is detached: ")
    assert first.endswith(" 0 only left in its place")
    assert main(["store", "tiers", server.url, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert [tier["name"] for tier in answer["tiers"]] == ["memory", "file2"]
    assert main(["store", "detach", server.url, "file2"]) == 2
    assert "file2 is the last tier below memory" in capsys.readouterr().err
