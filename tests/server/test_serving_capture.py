"""A capture at a real server: what is in the file is what was asked for, and says nothing of it."""

from __future__ import annotations

import gzip
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from real_server import eventually, running

from kvkeep.bench.traces import Capture, open_trace

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from real_server import Running

pytestmark = pytest.mark.model

SECRET = "The password of the harbour master is plum-duff."


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running() as one:
        yield one


@pytest.fixture
def capture(server: Running, tmp_path: Path) -> Iterator[Capture]:
    server.http.post("/kv/clear", json={})
    cache = server.engine.cache
    made = Capture(
        tmp_path / "served.jsonl.gz", name="t", page_size=cache.page_size, pages=cache.num_pages
    )
    server.service.capture = made
    yield made
    server.service.capture = None
    made.close()


def ask(server: Running, prompt: Any, **more: Any) -> dict[str, Any]:
    body = {"prompt": prompt, "max_tokens": 6, "temperature": 0, "ignore_eos": True, **more}
    answer: dict[str, Any] = (
        server.http.post("/v1/completions", json=body).raise_for_status().json()
    )
    return answer


def test_what_was_asked_for_is_in_the_file(server: Running, capture: Capture) -> None:
    page = server.engine.cache.page_size
    prompt = list(range(100, 100 + 3 * page + 5))
    ask(server, prompt)
    again = ask(server, [*prompt[: 2 * page], *range(7, 7 + page)])
    named = {"session": "plum"}
    ask(server, prompt, cache_salt="somebody else", kvkeep=named)
    assert capture.close()

    trace = open_trace(capture.path)
    first, second, third = trace
    assert trace.unit_tokens == page
    assert trace.header is not None
    assert (trace.header.page_size, trace.header.pages) == (page, server.engine.cache.num_pages)
    assert [request.tokens for request in trace] == [3 * page + 5, 3 * page, 3 * page + 5]
    assert all(request.output_tokens == 6 for request in trace)
    # The same prompt is the same ids in any namespace, and the beginnings are as they were.
    assert first.units.tolist() == third.units.tolist()
    assert first.units[:2].tolist() == second.units[:2].tolist()
    assert first.units[2] != second.units[2]
    assert first.namespace == second.namespace != third.namespace
    assert first.time <= second.time <= third.time
    assert [request.kind for request in trace] == ["completions"] * 3
    assert (first.session, second.session) == (None, None)
    assert third.session not in {None, "plum"}
    assert [request.stop for request in trace] == ["length"] * 3
    # And what came of them.
    cached = [request.served.cached_tokens for request in trace if request.served]
    assert cached == [0, again["usage"]["prompt_tokens_details"]["cached_tokens"], 0]
    assert cached[1] >= 2 * page
    assert all(r.served and 0 < r.served.ttft_s <= r.served.seconds for r in trace)


def test_an_answer_is_what_the_next_turn_begins_with(server: Running, capture: Capture) -> None:
    page = server.engine.cache.page_size
    prompt = list(range(200, 200 + page + 3))
    ask(server, prompt, max_tokens=2 * page)
    assert capture.close()
    (turn,) = open_trace(capture.path)
    assert turn.answer is not None
    total = turn.tokens + turn.output_tokens - 1
    assert len(turn.answer) == total // page - turn.tokens // page
    assert not set(turn.answer.tolist()) & set(turn.units.tolist())
    assert server.engine.cache.stats().pages_cached == turn.tokens // page + len(turn.answer)


def test_nothing_that_was_said_is_in_the_file(server: Running, capture: Capture) -> None:
    ask(server, SECRET, cache_salt="plum")
    messages = [{"role": "user", "content": SECRET}]
    server.http.post("/v1/chat/completions", json={"messages": messages, "max_tokens": 3})
    assert capture.close()
    text = gzip.decompress(capture.path.read_bytes()).decode()
    assert text.count("\n") == 3
    assert not [word for word in ("plum", "harbour", "password") if word in text]
    assert capture.path.stat().st_mode & 0o077 == 0


def test_a_client_that_goes_away_is_in_it_too(server: Running, capture: Capture) -> None:
    body = {"prompt": "Once", "max_tokens": 400, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body) as answer:
        next(answer.iter_bytes())
    eventually(lambda: capture.stats().written == 1)
    assert capture.close()
    (request,) = open_trace(capture.path)
    assert request.served is None
    assert request.tokens > 0


def test_two_files_have_no_ids_in_common(server: Running, tmp_path: Path) -> None:
    found = []
    for name in ("a.jsonl", "b.jsonl"):
        capture = Capture(tmp_path / name, name="t", page_size=16, pages=8, unit_tokens=1)
        server.service.capture = capture
        ask(server, "The same prompt both times.")
        assert capture.close()
        (request,) = open_trace(capture.path)
        assert len(request.units) == request.tokens
        found.append({*request.units.tolist(), request.namespace})
    server.service.capture = None
    assert not found[0] & found[1]


def test_a_full_disk_ends_the_capture_and_not_the_server(
    server: Running, capture: Capture, caplog: pytest.LogCaptureFixture
) -> None:
    capture._writer._raw.close()  # every write fails from here on, as on a disk that is gone
    capture._writer._file = open("/dev/full", "wb", buffering=0)  # noqa: SIM115
    ask(server, "Still there?")
    eventually(lambda: capture.stats().failed)
    ask(server, "Still there.")
    assert capture.close()
    assert capture.stats().written == 0
    assert "cannot keep up" in caplog.text
