"""What one chat request goes through, HTTP in to the last token: it only gets shorter."""

from __future__ import annotations

import pytest
from real_server import eventually, running

from ways import Recorder

FLOORS = ("serve/", "observe/")


@pytest.mark.model
def test_a_chat_request():
    recorder = Recorder()
    body = {
        "model": "kvkeep-tiny", "max_tokens": 4, "temperature": 0,
        "messages": [{"role": "user", "content": "Write one line about caches. " * 8}],
    }  # fmt: skip
    try:
        with running() as server:
            server.http.post("/v1/chat/completions", json=body).raise_for_status()
            eventually(lambda: not server.engine.has_work)
            with recorder.way() as way:
                answer = server.http.post("/v1/chat/completions", json=body).raise_for_status()
                eventually(lambda: not server.engine.has_work)
    finally:
        recorder.close()
    assert answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    above_the_store = [name for name in way.files if name.startswith(FLOORS)]
    assert len(above_the_store) <= 78, sorted(above_the_store)
    assert way.within(files=80, calls=4_000, objects=160), way
