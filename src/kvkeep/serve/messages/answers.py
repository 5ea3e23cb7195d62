"""`MessageEvents`: an answer of the Messages API, as events or one message; its usage; errors."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = [
    "LONG_S",
    "MessageEvents",
    "MessageUsage",
    "error_body",
    "error_event",
    "kind_of",
    "new_id",
    "split_usage",
]


LONG_S = 3600
"""Seconds of the long time to live."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageUsage:
    """Token counts of one request; the three kinds of input tokens add up to the prompt.

    ``read``: reused from the cache. ``written``: computed, and at or before the last breakpoint, so
    kept; of these, ``written_1h`` for an hour. ``rest``: computed, behind the last breakpoint.
    ``more`` are kvkeep's own figures.
    """

    read: int
    written: int
    written_1h: int
    rest: int
    output: int = 0
    more: Mapping[str, Any] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """Return the ``usage`` object of an answer."""
        usage: dict[str, Any] = {
            "input_tokens": self.rest,
            "cache_creation_input_tokens": self.written,
            "cache_read_input_tokens": self.read,
            "cache_creation": {
                "ephemeral_5m_input_tokens": self.written - self.written_1h,
                "ephemeral_1h_input_tokens": self.written_1h,
            },
            "output_tokens": self.output,
            "service_tier": "standard",
        }
        return {**usage, "kvkeep": dict(self.more)} if self.more else usage


def split_usage(
    prompt: int,
    cached: int,
    breakpoints: Sequence[tuple[int, float]] = (),
    *,
    output: int = 0,
    more: Mapping[str, Any] | None = None,
) -> MessageUsage:
    """Return the usage of ``prompt`` tokens of which the first ``cached`` were reused.

    ``breakpoints`` are (position in tokens, seconds to live).
    """
    last = max((at for at, _ in breakpoints), default=0)
    last_1h = max((at for at, ttl_s in breakpoints if ttl_s >= LONG_S), default=0)
    written = max(0, min(last, prompt) - cached)
    return MessageUsage(
        read=cached,
        written=written,
        written_1h=max(0, min(last_1h, prompt) - cached),
        rest=prompt - cached - written,
        output=output,
        more=more or {},
    )


def new_id(kind: str = "msg") -> str:
    """Return a new id: of a message (msg) or a request (req)."""
    return f"{kind}_{secrets.token_hex(12)}"


class MessageEvents:
    """Writes one answer: each method returns the events to send next, in the API's order.

    message_start, then for a text content_block_start, a ping, content_block_delta … and
    content_block_stop, then message_delta and message_stop. The same calls add up to `message`, the
    answer that is not streamed.

    Thread safety: none. Memory: the answer's text.
    """

    def __init__(self, id: str, model: str) -> None:
        self.id = id
        self._model = model
        self._pieces: list[str] = []
        self._message: dict[str, Any] = {}

    def start(self, usage: MessageUsage) -> list[dict[str, Any]]:
        """Begin the answer; ``usage`` is that of the prompt."""
        self._message = {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": usage.as_dict(),
        }
        return [{"type": "message_start", "message": dict(self._message)}]

    def text(self, piece: str) -> list[dict[str, Any]]:
        """Add text."""
        if not piece:
            return []
        events: list[dict[str, Any]] = []
        if not self._pieces:
            block = {"type": "text", "text": ""}
            events += [
                {"type": "content_block_start", "index": 0, "content_block": block},
                {"type": "ping"},
            ]
        self._pieces.append(piece)
        delta = {"type": "text_delta", "text": piece}
        return [*events, {"type": "content_block_delta", "index": 0, "delta": delta}]

    def end(
        self, stop_reason: str, stop_sequence: str | None, usage: MessageUsage
    ) -> list[dict[str, Any]]:
        """End the answer; ``usage`` is the final one."""
        content: list[dict[str, Any]] = []
        events: list[dict[str, Any]] = []
        if self._pieces:
            content.append({"type": "text", "text": "".join(self._pieces)})
            events.append({"type": "content_block_stop", "index": 0})
        counts = usage.as_dict()
        self._message.update(
            content=content, stop_reason=stop_reason, stop_sequence=stop_sequence, usage=counts
        )
        changed = {"stop_reason": stop_reason, "stop_sequence": stop_sequence}
        counts = {key: value for key, value in counts.items() if key != "service_tier"}
        events.append({"type": "message_delta", "delta": changed, "usage": counts})
        events.append({"type": "message_stop"})
        return events

    @property
    def message(self) -> dict[str, Any]:
        """The whole answer, after `end`."""
        return self._message


_KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    502: "api_error",
    503: "overloaded_error",
    504: "timeout_error",
    529: "overloaded_error",
}


def kind_of(status: int) -> str:
    """Return the type of an error with this HTTP status."""
    other = "api_error" if status >= 500 else "invalid_request_error"
    return _KINDS.get(status, other)


def error_body(status: int, message: str, *, request_id: str | None = None) -> dict[str, Any]:
    """Return the JSON object of an error."""
    error = {"type": kind_of(status), "message": message}
    return {"type": "error", "error": error, "request_id": request_id}


def error_event(status: int, message: str) -> dict[str, Any]:
    """Return the event of an error in the middle of a stream."""
    return {"type": "error", "error": {"type": kind_of(status), "message": message}}
