"""`ask`: one streamed completion of a kvkeep server, timed at the client."""

from __future__ import annotations

import json
import time
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvkeep.cli.client import Address
from kvkeep.core.errors import InvalidValue

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

__all__ = ["CompletionReply", "ask"]

_TIMEOUT_S = 600.0  # the server's own default for a request
_OUT_OF_MEMORY = {"context_length_exceeded", "out_of_pages"}


@dataclass(frozen=True, slots=True)
class CompletionReply:
    """A completion, timed at the client: seconds count from before the connection is made."""

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
        """The part of the reply that must not depend on the cache."""
        return self.text, self.generated_tokens, self.finish_reason

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens per second after the first one; None for an answer of one token."""
        streamed = self.seconds - self.ttft_s
        return (self.generated_tokens - 1) / streamed if self.generated_tokens > 1 else None


def ask(url: str, path: str, body: dict[str, Any]) -> CompletionReply:
    """Post ``body`` to the completion endpoint at ``path``, and read the stream to its end.

    Raises `InvalidValue` with the server's message for a request that it refuses, and
    `ConnectionError` for a stream that breaks off.
    """
    body = {**body, "stream": True, "stream_options": {"include_usage": True}}
    begun = time.perf_counter()
    text, finish_reason, usage = "", "", None
    ttft = None
    with closing(Address.parse(url).connection(_TIMEOUT_S)) as connection:
        connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        # The response is closed separately: it owns the socket of a connection not kept alive.
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
        raise ConnectionError("the stream ended without a token or without its usage")
    return CompletionReply(
        text=text,
        finish_reason=finish_reason,
        prompt_tokens=usage["prompt_tokens"],
        cached_tokens=usage["prompt_tokens_details"]["cached_tokens"],
        loaded_tokens=usage.get("kvkeep", {}).get("loaded_tokens", 0),
        generated_tokens=usage["completion_tokens"],
        ttft_s=ttft,
        seconds=seconds,
    )


def _events(lines: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    """Yield the JSON objects of server-sent events until ``[DONE]``, which is required."""
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
    raise ConnectionError("the stream broke off")


def _text(choice: dict[str, Any]) -> str:
    """Return the text of an event, of a chat completion or a plain one."""
    more: str = choice["delta"].get("content", "") if "delta" in choice else choice["text"]
    return more


def _refusal(error: dict[str, Any]) -> Exception:
    """Return the exception for an error object of the server."""
    message: str = error["message"]
    if error["code"] in _OUT_OF_MEMORY:
        return InvalidValue(f"{message}; use a larger --memory")
    if error["type"] == "invalid_request_error":
        return InvalidValue(message)
    return ConnectionError(f"the server reports: {message}")
