"""`PromptParser`: the beginning of a request's prompt, as tokens or as text, to place it by.

Text is the raw JSON of the fields that a prompt begins with: tools and system prompt, then the
conversation. It is compared, not understood, so one rule serves all APIs: the next turn of a
conversation has the same bytes and more behind them.
"""

from __future__ import annotations

import asyncio
import json
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import msgspec

from kvkeep.core.errors import InvalidValue
from kvkeep.core.tokens import as_tokens
from kvkeep.serve.router.router import Text

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvkeep.core.tokens import TokenArray

    Tokenize = Callable[[dict[str, Any]], TokenArray]

__all__ = ["MOST_BYTES", "MOST_TOKENS", "Prompt", "PromptParser"]

MOST_TOKENS: Final = 1 << 17
"""Tokens of a prompt that count; what is behind them neither decides nor counts as work."""
MOST_BYTES: Final = 4 * MOST_TOKENS
"""Bytes of a text that count, as JSON."""
_MOST_IDS: Final = 12 * MOST_TOKENS  # bytes of a list of token ids: ten digits, a comma, a blank
_MOST_NAME: Final = 4096  # bytes of a model's name or a salt, as JSON
_MOST_OPENING: Final = 64 << 10  # bytes of a conversation that are read for its first turns
_SESSION_HEADER: Final = b"x-session-id"
_THREADS: Final = 2
_NOTHING: Final = msgspec.Raw()
_EMPTY: Final = (_NOTHING, msgspec.Raw(b"null"))
_LIST: Final = re.compile(rb'\s*\[\s*([\["]?)')
_BINARY: Final = (b";base64,", b'"base64"')  # before an image; its bytes are not its tokens
_TOKENIZED: Final = frozenset({"/v1/completions", "/v1/chat/completions"})


class _Body(msgspec.Struct, gc=False):
    """The fields of a request body that matter here, as raw JSON.

    Other fields are skipped without creating objects: a body of 8 MiB takes at most 50 ms, where
    `json.loads` could block the event loop for a second.
    """

    model: msgspec.Raw = _NOTHING
    cache_salt: msgspec.Raw = _NOTHING
    prompt_cache_key: msgspec.Raw = _NOTHING
    prompt: msgspec.Raw = _NOTHING
    messages: msgspec.Raw = _NOTHING
    system: msgspec.Raw = _NOTHING
    input: msgspec.Raw = _NOTHING
    instructions: msgspec.Raw = _NOTHING
    previous_response_id: msgspec.Raw = _NOTHING
    tools: msgspec.Raw = _NOTHING

    def opening(self) -> list[msgspec.Raw]:
        """Return the fields before the conversation."""
        fields = (self.previous_response_id, self.tools, self.instructions, self.system)
        return [field for field in fields if field not in _EMPTY]

    def conversation(self) -> msgspec.Raw:
        """Return the field that grows from turn to turn; empty without one."""
        fields = (self.prompt, self.messages, self.input)
        return next((field for field in fields if field not in _EMPTY), _NOTHING)


_bodies = msgspec.json.Decoder(_Body)
_rows = msgspec.json.Decoder(list[int])
_text = msgspec.json.Decoder(str)
_values = json.JSONDecoder()
_UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)


@dataclass(frozen=True, slots=True)
class Prompt:
    """The beginning of a request's prompt, its model and ``cache_salt``.

    ``tokens`` are at most `MOST_TOKENS`, or a text of at most `MOST_BYTES`; None if the prompt is
    unknown. ``key`` names the conversation or application: its prompts should go to one instance.
    """

    tokens: TokenArray | Text | None
    model: str = ""
    salt: str = ""
    key: str = ""


class PromptParser:
    """Reads prompts from the bodies of requests to `PATHS`.

    ``tokenize`` gets a body with text in ``prompt``, or with ``messages`` and perhaps ``tools``, of
    OpenAI's completions and chats; it runs in two threads and may raise `InvalidValue`. A prompt
    that it does not tokenize within ``tokenize_s`` seconds, or that is longer than `MOST_BYTES`, is
    placed by its text, like all prompts without it. Of several prompts in one request the first
    counts.

    Thread safety: none; for the event loop.
    """

    PATHS: Final = _TOKENIZED | {"/v1/messages", "/v1/responses"}

    def __init__(self, tokenize: Tokenize | None = None, *, tokenize_s: float = 2.0) -> None:
        self._tokenize = tokenize
        self._tokenize_s = tokenize_s
        self._threads = ThreadPoolExecutor(_THREADS, "prompts")

    def close(self) -> None:
        """End the threads; what waits for one is given up."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def read(self, path: str, body: bytes, headers: list[tuple[bytes, bytes]]) -> Prompt:
        """Return the prompt of this body. No content of the body makes it raise."""
        try:
            fields = _bodies.decode(body)
        except _UNREADABLE:
            return Prompt(None)
        tokens: TokenArray | Text | None = None
        try:
            ids = _first_ids(bytes(memoryview(fields.prompt)[:_MOST_IDS]))
            if ids is not None:
                tokens = as_tokens(ids[:MOST_TOKENS])
            elif self._tokenize is not None and path in _TOKENIZED:
                tokens = await self._tokens(fields)
        except (InvalidValue, *_UNREADABLE):
            pass
        if tokens is None:
            tokens = _text_of(fields)
        key = _name(fields.prompt_cache_key) or _session_of(headers)
        return Prompt(tokens, _name(fields.model), _name(fields.cache_salt), key)

    async def _tokens(self, fields: _Body) -> TokenArray | None:
        if len(fields.conversation()) + len(fields.tools) > MOST_BYTES:
            return None
        try:
            async with asyncio.timeout(self._tokenize_s):
                loop = asyncio.get_running_loop()
                return await loop.run_in_executor(self._threads, self._tokenized, fields)
        except TimeoutError:
            return None

    def _tokenized(self, fields: _Body) -> TokenArray | None:
        assert self._tokenize is not None
        parts = {"prompt": fields.prompt, "messages": fields.messages, "tools": fields.tools}
        body = {name: msgspec.json.decode(raw) for name, raw in parts.items() if raw not in _EMPTY}
        if isinstance(body.get("prompt"), list):
            body["prompt"] = body["prompt"][0]
        if isinstance(body.get("prompt"), str):
            body = {"prompt": body["prompt"]}
        else:
            body["messages"] = _turns(body.get("messages"))
            if not body["messages"]:
                return None
        return self._tokenize(body)[:MOST_TOKENS]


def _turns(messages: object) -> list[dict[str, Any]]:
    """Return the first messages of a chat, up to the first with anything but text."""
    turns: list[dict[str, Any]] = []
    for message in messages if isinstance(messages, list) else ():
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            break
        content = message.get("content") or ""
        parts = content if isinstance(content, list) else ()
        if not isinstance(content, str | list) or not all(
            isinstance(part, dict) and part.get("type") == "text" for part in parts
        ):
            break
        turns.append(message)
    return turns


def _text_of(fields: _Body) -> Text | None:
    """Return the text of a prompt, up to its first image; None without text."""
    conversation = bytes(memoryview(fields.conversation())[:MOST_BYTES])
    if not conversation:
        return None
    parts = [bytes(memoryview(field)[:MOST_BYTES]) for field in fields.opening()]
    before = b"\0".join([*parts, b""])
    text = (before + conversation)[:MOST_BYTES]
    opening = before + conversation[: _opening_of(conversation)]
    images = (at for mark in _BINARY if (at := text.find(mark)) >= 0)
    return Text(text[: min(images, default=len(text))], opening)


def _opening_of(conversation: bytes) -> int:
    """Return how many bytes a conversation has up to the end of its first turn of a user.

    All of a text that is no list of turns; 0 where the first turns are long.
    """
    found = _LIST.match(conversation)
    if found is None or found[1]:
        return len(conversation)
    text = conversation[:_MOST_OPENING].decode("utf-8", "replace")
    at = found.end()
    try:
        while True:
            turn, at = _values.raw_decode(text, at)
            if not isinstance(turn, dict) or turn.get("role") == "user":
                return at
            while text[at : at + 1] in {",", " ", "\n", "\r", "\t"}:
                at += 1
    except (ValueError, RecursionError):
        return 0


def _first_ids(prompt: bytes) -> list[int] | None:
    """Return the first of the token ids in a JSON value; None for a text.

    Raises msgspec's errors for other lists. Only the first list is parsed: ten million empty ones
    would cost a second.
    """
    found = _LIST.match(prompt)
    if found is None or found[1] == b'"':
        return None
    start = found.start(1) if found[1] else found.start()
    stop = prompt.find(b"]", start)  # the first one ends a list of token ids
    if stop < 0:
        stop = prompt.rfind(b",", start)
    return _rows.decode(prompt[start:stop] + b"]")


def _session_of(headers: list[tuple[bytes, bytes]]) -> str:
    """Return the session that a client names in a header; "" without one."""
    for name, value in headers:
        if name == _SESSION_HEADER:
            return value[:_MOST_NAME].decode("latin-1")
    return ""


def _name(written: msgspec.Raw) -> str:
    """Return a short JSON string, "" for anything else."""
    part = bytes(memoryview(written)[: _MOST_NAME + 1])
    if not part.startswith(b'"') or len(part) > _MOST_NAME:
        return ""
    try:
        return _text.decode(part)
    except _UNREADABLE:
        return ""
