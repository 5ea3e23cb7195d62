"""The two forms of server-sent events: OpenAI's and Anthropic's."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Protocol

from kvkeep.serve.messages import error_event

if TYPE_CHECKING:
    from kvkeep.serve.server.errors import ApiError
    from kvkeep.serve.server.schemas.base import ResponseModel

__all__ = ["MESSAGES", "OPENAI", "Frames"]


class Frames(Protocol):
    """The form of a stream's events."""

    @property
    def last(self) -> bytes:
        """What ends a complete stream."""

    @property
    def ping(self) -> bytes:
        """An event without meaning, for streams that are silent; empty if the API has none."""

    def event(self, event: ResponseModel) -> bytes:
        """Return one event."""

    def error(self, error: ApiError) -> bytes:
        """Return the event of an error, the last one of its stream."""


class _OpenAI:
    """Data only; ``[DONE]`` at the end."""

    last = b"data: [DONE]\n\n"
    ping = b""

    def event(self, event: ResponseModel) -> bytes:
        return b"data: %s\n\n" % event.model_dump_json().encode()

    def error(self, error: ApiError) -> bytes:
        return b"data: %s\n\n" % json.dumps(error.body()).encode()


class _Messages:
    """Each event has its type as its name; message_stop is the last."""

    last = b""
    ping = b'event: ping\ndata: {"type":"ping"}\n\n'

    def event(self, event: ResponseModel) -> bytes:
        fields: dict[str, Any] = event.model_dump()
        return self._named(fields)

    def error(self, error: ApiError) -> bytes:
        return self._named(error_event(error.status_code, str(error.detail)))

    def _named(self, event: dict[str, Any]) -> bytes:
        data = json.dumps(event, ensure_ascii=False, separators=(",", ":"))
        return b"event: %s\ndata: %s\n\n" % (event["type"].encode(), data.encode())


OPENAI: Frames = _OpenAI()
MESSAGES: Frames = _Messages()
