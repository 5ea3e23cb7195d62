"""Engines with a status, and what that says."""

from __future__ import annotations

import json
import time
import urllib.request
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from engines import Engine, engine

from ports import free_port

if TYPE_CHECKING:
    from collections.abc import Iterator

KEY = "a-long-secret"


def fetch(url: str, key: str | None = KEY) -> Any:
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=30) as answer:
        said = answer.read().decode()
        return json.loads(said) if "json" in answer.headers["content-type"] else said


def eventually(holds: Any, seconds: float = 60.0) -> Any:
    until = time.monotonic() + seconds
    while True:
        try:
            found = holds()
        except OSError:
            found = None
        if found:
            return found
        assert time.monotonic() < until, "it never came to that"
        time.sleep(0.05)


class Watched:
    """An engine with a status, and what that says."""

    def __init__(self, one: Engine, port: int) -> None:
        self.engine = one
        self.port = port
        self.url = f"http://127.0.0.1:{port}"
        eventually(lambda: fetch(f"{self.url}/health"))

    def get(self, path: str) -> Any:
        return fetch(self.url + path)

    def last(self) -> dict[str, Any]:
        """The whole explanation of the last request."""
        (newest,) = self.get("/kv/requests?last=1")["requests"]
        found: dict[str, Any] = self.get(f"/kv/explain/{newest['id']}")
        return found


@contextmanager
def watched(model: str, tiers: list[str], **more: Any) -> Iterator[Watched]:
    port = free_port()
    extra = {"status": f"127.0.0.1:{port}", "status_key": KEY, **more.pop("extra", {})}
    with engine(model, tiers, extra=extra, **more) as one:
        yield Watched(one, port)
