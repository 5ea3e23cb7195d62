"""`MessageEvents`: an answer of the Messages API, as events or as one message."""

from __future__ import annotations

import json
import secrets
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvkeep.serve.messages.usage import MessageUsage

__all__ = ["MessageEvents", "new_id"]


def new_id(kind: str = "msg") -> str:
    """Return a new id: of a message (msg), a tool call (toolu) or a request (req)."""
    return f"{kind}_{secrets.token_hex(12)}"


class MessageEvents:
    """Writes one answer: each method returns the events to send next, in the API's order.

    message_start, then for each block content_block_start, content_block_delta … and
    content_block_stop, then message_delta and message_stop; one ping follows the first block's
    start. The same calls add up to `message`, the answer that is not streamed.

    Thread safety: none. Memory: the answer's text.
    """

    def __init__(self, id: str, model: str) -> None:
        self.id = id
        self._model = model
        self._content: list[dict[str, Any]] = []
        self._pieces: list[str] = []
        self._open: str | None = None  # the type of the block that is being written
        self._call: object = None
        self._message: dict[str, Any] = {}
        self._pinged = False

    @property
    def has_calls(self) -> bool:
        """Whether the answer has a tool call so far."""
        return any(block["type"] == "tool_use" for block in self._content)

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
        events = self._begin("text", {"type": "text", "text": ""}) if self._open != "text" else []
        self._pieces.append(piece)
        return [*events, self._delta({"type": "text_delta", "text": piece})]

    def call(self, key: object, id: str | None, name: str) -> list[dict[str, Any]]:
        """Begin a tool call; ``key`` tells it from the other calls of this answer."""
        self._call = key
        block = {"type": "tool_use", "id": id or new_id("toolu"), "name": name, "input": {}}
        return self._begin("tool_use", block)

    def arguments(self, piece: str) -> list[dict[str, Any]]:
        """Add to the JSON text of the arguments of the tool call that was begun last."""
        if not piece or self._open != "tool_use":
            return []
        self._pieces.append(piece)
        return [self._delta({"type": "input_json_delta", "partial_json": piece})]

    def is_in(self, key: object) -> bool:
        """Whether the tool call ``key`` is being written."""
        return self._open == "tool_use" and self._call == key

    def end(
        self, stop_reason: str, stop_sequence: str | None, usage: MessageUsage
    ) -> list[dict[str, Any]]:
        """End the answer; ``usage`` is the final one."""
        events = self._end_block()
        counts = usage.as_dict()
        self._message.update(
            content=self._content,
            stop_reason=stop_reason,
            stop_sequence=stop_sequence,
            usage=counts,
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

    def _begin(self, kind: str, block: dict[str, Any]) -> list[dict[str, Any]]:
        events = self._end_block()
        self._open = kind
        self._content.append(dict(block))
        index = len(self._content) - 1
        events.append({"type": "content_block_start", "index": index, "content_block": block})
        if not self._pinged:
            self._pinged = True
            events.append({"type": "ping"})
        return events

    def _delta(self, delta: dict[str, Any]) -> dict[str, Any]:
        return {"type": "content_block_delta", "index": len(self._content) - 1, "delta": delta}

    def _end_block(self) -> list[dict[str, Any]]:
        if self._open is None:
            return []
        written, self._pieces = "".join(self._pieces), []
        block = self._content[-1]
        if self._open == "text":
            block["text"] = written
        else:
            block["input"] = _arguments(written)
        self._open = None
        return [{"type": "content_block_stop", "index": len(self._content) - 1}]


def _arguments(written: str) -> dict[str, Any]:
    """Return the arguments of a tool call; what is no JSON object is kept under one name."""
    try:
        value = json.loads(written or "{}")
    except (ValueError, RecursionError):
        value = None
    return value if isinstance(value, dict) else {"invalid_json": written}
