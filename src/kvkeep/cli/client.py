"""A client of the service: one request, streamed, on the standard library alone."""

from __future__ import annotations

import json
import time
from contextlib import closing
from dataclasses import dataclass
from http.client import HTTPConnection
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from kvkeep.errors import InvalidValue

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

__all__ = ["Heard", "ask", "get"]

# As long as the service itself gives a request.
_PATIENCE_S = 600.0
_TOO_LITTLE_MEMORY = {"context_length_exceeded", "out_of_pages"}


@dataclass(frozen=True, slots=True)
class Heard:
    """An answer as its client has seen it; seconds count from before the connection was made."""

    text: str
    finish_reason: str
    prompt_tokens: int
    cached_tokens: int
    loaded_tokens: int
    generated_tokens: int
    ttft_s: float
    seconds: float

    @property
    def answer(self) -> tuple[str, int, str]:
        """What must not depend on the time it took."""
        return self.text, self.generated_tokens, self.finish_reason

    @property
    def tokens_per_s(self) -> float | None:
        """The pace after the first token; None for an answer that had only one."""
        streamed = self.seconds - self.ttft_s
        return (self.generated_tokens - 1) / streamed if self.generated_tokens > 1 else None


def ask(url: str, path: str, body: dict[str, Any]) -> Heard:
    """Post ``body`` to ``path``, an endpoint that streams, and listen to the end.

    Raises `InvalidValue` with the service's own words for what it refuses, and `ConnectionError`
    for an answer that breaks off.
    """
    body = {**body, "stream": True, "stream_options": {"include_usage": True}}
    begun = time.perf_counter()
    text, finish_reason, usage = "", "", None
    ttft = None
    with closing(_connection(url)) as connection:
        connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        # Closed by itself: a connection that is not kept alive has handed its socket over.
        with connection.getresponse() as response:
            if response.status != 200:
                raise _refusal(json.load(response)["error"])
            for event in _events(response):
                usage = event.get("usage") or usage
                for choice in event["choices"]:
                    more = _text(choice)
                    text += more
                    finish_reason = choice["finish_reason"] or finish_reason
                    if ttft is None and (more or finish_reason):
                        ttft = time.perf_counter() - begun
    seconds = time.perf_counter() - begun
    if ttft is None or usage is None:
        raise ConnectionError("the answer has no end")
    return Heard(
        text=text,
        finish_reason=finish_reason,
        prompt_tokens=usage["prompt_tokens"],
        cached_tokens=usage["prompt_tokens_details"]["cached_tokens"],
        loaded_tokens=usage.get("kvkeep", {}).get("loaded_tokens", 0),
        generated_tokens=usage["completion_tokens"],
        ttft_s=ttft,
        seconds=seconds,
    )


def get(url: str, path: str) -> Any:
    """The JSON document at ``path``."""
    with closing(_connection(url)) as connection:
        connection.request("GET", path)
        with connection.getresponse() as response:
            return json.load(response)


def _connection(url: str) -> HTTPConnection:
    address = urlsplit(url)
    assert address.hostname is not None, url
    return HTTPConnection(address.hostname, address.port, timeout=_PATIENCE_S)


def _events(lines: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    """The JSON objects of a stream of server-sent events, which has to come to its end."""
    for line in lines:
        field, _, data = line.partition(b":")
        if field != b"data":
            continue
        if data.strip() == b"[DONE]":
            return
        event = json.loads(data)
        if "error" in event:
            raise _refusal(event["error"])
        yield event
    raise ConnectionError("the answer broke off")


def _text(choice: dict[str, Any]) -> str:
    """The text of an event: of a chat, or of a plain completion."""
    more: str = choice["delta"].get("content", "") if "delta" in choice else choice["text"]
    return more


def _refusal(error: dict[str, Any]) -> Exception:
    """What the service says is wrong: with the request, or with itself."""
    message: str = error["message"]
    if error["code"] in _TOO_LITTLE_MEMORY:
        return InvalidValue(f"{message}; give it more memory")
    if error["type"] == "invalid_request_error":
        return InvalidValue(message)
    return ConnectionError(f"the service says: {message}")
