"""`MessageExchange`: a request of Anthropic's API for instances that have OpenAI's alone."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import msgspec

from kvkeep.core.errors import InvalidValue
from kvkeep.serve.http import check_values
from kvkeep.serve.messages import (
    ChatStream,
    chat_body,
    error_body,
    error_event,
    from_chat,
    message_of,
    new_id,
    read_call,
)

if TYPE_CHECKING:
    from starlette.types import Message, Send

    from kvkeep.serve.messages import MessagesCall

__all__ = ["COUNT_PATH", "MESSAGES_PATH", "MessageExchange", "read_exchange", "refusal"]

MESSAGES_PATH = "/v1/messages"
COUNT_PATH = "/v1/messages/count_tokens"
_CHAT_PATH = "/v1/chat/completions"
_PASSED_ON = ("cache_salt", "prompt_cache_key")  # fields that the chat API of some servers has
_OURS = frozenset({"kvkeep", *_PASSED_ON})
_MOST_BYTES = 32 << 20
"""Bytes of a whole answer, or of one event, that are read to be translated."""
_JSON = [(b"content-type", b"application/json")]
_EVENTS = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
_COMMENT = b":\n\n"
_KEPT = frozenset({b"retry-after", b"x-request-id", b"date"})


def read_exchange(body: bytes, send: Send, *, count: bool) -> MessageExchange:
    """Return the exchange of a request; ``count`` for a request that only counts tokens.

    Raises `InvalidValue` for a body that Anthropic's API refuses. Run it in a thread: parsing 8 MiB
    takes up to 0.2 s.
    """
    check_values(body)
    try:
        value = msgspec.json.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidValue(f"the body is not valid JSON: {error}") from error
    if count and isinstance(value, dict):
        value = {"max_tokens": 0, **value}
    call = read_call(value, more=_OURS)
    chat = chat_body(call)
    for name in _PASSED_ON:
        if value.get(name) is not None:
            chat[name] = value[name]
    if count:
        fields = {"model", "messages", "tools", "add_generation_prompt", "continue_final_message"}
        chat = {name: item for name, item in chat.items() if name in fields}
    return MessageExchange(call, msgspec.json.encode(chat), send, count=count)


def refusal(status: int, message: str) -> bytes:
    """Return the body of an error."""
    return _dumped(error_body(status, message, request_id=new_id("req")))


class MessageExchange:
    """Sends the request as a chat request, and its answer as a message or its events.

    `send` takes the place of the client's: it translates what an instance or the router answers. An
    instance that has Anthropic's API itself gets the request unchanged: set ``translates`` before
    the answer begins. An answer that breaks off ends with an error event.

    Thread safety: none. Memory: a whole answer, or one event, 32 MiB at most.
    """

    def __init__(self, call: MessagesCall, body: bytes, send: Send, *, count: bool) -> None:
        self.body = body
        self.path = "/tokenize" if count else _CHAT_PATH
        self.translates = True
        self._count = count
        self._call = call
        self._send = send
        self._stream = ChatStream(call)
        self._status = 0
        self._streams = False
        self._headers: list[tuple[bytes, bytes]] = []
        self._buffer = bytearray()
        self._ended = False

    @staticmethod
    def headers(given: list[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
        """Return a client's headers for an instance: its key as a bearer token, no compression."""
        left = (b"accept-encoding", b"x-api-key", b"anthropic-version", b"anthropic-beta")
        headers = [pair for pair in given if pair[0] not in left]
        keys = [value for name, value in given if name == b"x-api-key"]
        if keys and not any(name == b"authorization" for name, _ in headers):
            headers.append((b"authorization", b"Bearer " + keys[0]))
        return headers

    async def send(self, message: Message) -> None:
        """Translate one ASGI message of an answer and pass it on."""
        if not self.translates:
            self._ended = True  # as far as this exchange is concerned
            await self._send(message)
        elif message["type"] == "http.response.start":
            await self._start(message)
        elif message["type"] == "http.response.body":
            await self._body(message.get("body", b""), more=message.get("more_body", False))

    async def broken_off(self) -> None:
        """End an answer that the instance did not end."""
        if self._status and not self._ended:
            await self._fail(502, "the instance broke off its answer")

    async def _start(self, message: Message) -> None:
        self._status = message["status"]
        headers = [(name.lower(), value) for name, value in message["headers"]]
        self._headers = [pair for pair in headers if pair[0] in _KEPT]
        kind = next((value for name, value in headers if name == b"content-type"), b"")
        good = self._status < 400
        self._streams = good and self._call.stream and not kind.startswith(b"application/json")
        if self._streams:
            await self._begin(self._status, _EVENTS)
            await self._send(_part(_COMMENT, more=True))  # the head leaves with the first bytes

    async def _body(self, piece: bytes, *, more: bool) -> None:
        if self._ended:
            return
        self._buffer += piece
        if len(self._buffer) > _MOST_BYTES:
            await self._fail(502, "the instance's answer is too long")
        elif self._streams:
            await self._events(more=more)
        elif not more:
            status, body = self._whole()
            self._ended = True
            length = [(b"content-length", b"%d" % len(body))]
            await self._begin(status, [*_JSON, *length])
            await self._send(_part(body, more=False))

    async def _events(self, *, more: bool) -> None:
        """Translate the events that are complete."""
        *lines, rest = self._buffer.replace(b"\r\n", b"\n").split(b"\n")
        self._buffer = bytearray(rest)
        out: list[dict[str, Any]] = []
        for line in lines:
            if not line.startswith(b"data:"):
                continue
            chunk = _loaded(bytes(line[5:]))
            if not isinstance(chunk, dict):
                continue  # [DONE], and what is no event of this API
            if chunk.get("error") is not None:
                await self._send(_frames(out))
                await self._fail(502, message_of(chunk) or "the instance failed")
                return
            out += self._stream.feed(chunk)
        if more:
            if out:
                await self._send(_frames(out))
            return
        if not self._stream.finished:
            await self._send(_frames(out))
            await self._fail(502, "the instance broke off its answer")
            return
        self._ended = True
        await self._send(_frames([*out, *self._stream.end()], more=False))

    def _whole(self) -> tuple[int, bytes]:
        """Return status and body of an answer that is not streamed, or of an error."""
        answer = _loaded(bytes(self._buffer))
        if self._status >= 400:
            message = message_of(answer) or f"the instance answered {self._status}"
            return self._status, refusal(self._status, message)
        if isinstance(answer, dict):
            if self._count and isinstance(answer.get("count"), int):
                return 200, _dumped({"input_tokens": answer["count"]})
            if not self._count and isinstance(answer.get("choices"), list):
                return 200, _dumped(from_chat(answer, self._call))
        return 502, refusal(502, "the instance's answer cannot be read")

    async def _fail(self, status: int, message: str) -> None:
        self._ended = True
        if self._streams:
            await self._send(_frames([error_event(status, message)], more=False))
            return
        body = refusal(status, message)
        await self._begin(status, [*_JSON, (b"content-length", b"%d" % len(body))])
        await self._send(_part(body, more=False))

    async def _begin(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        await self._send(
            {
                "type": "http.response.start",
                "status": status,
                "headers": [*self._headers, *headers],
            }
        )


def _loaded(data: bytes) -> object:
    try:
        return msgspec.json.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None


def _dumped(value: dict[str, Any]) -> bytes:
    return json.dumps(value, ensure_ascii=False).encode("utf-8", "replace")


def _frames(events: list[dict[str, Any]], *, more: bool = True) -> Message:
    data = b"".join(
        b"event: %s\ndata: %s\n\n" % (event["type"].encode(), _dumped(event)) for event in events
    )
    return _part(data, more=more)


def _part(body: bytes, *, more: bool) -> Message:
    return {"type": "http.response.body", "body": body, "more_body": more}
