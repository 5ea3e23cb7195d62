"""`MessageEvents`: an answer of the Messages API, as events or as one message."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvkeep.serve.messages.usage import MessageUsage

__all__ = ["MessageEvents", "new_id"]


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
