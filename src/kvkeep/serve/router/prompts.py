"""`PromptParser`: the tokens at the beginning of a request's prompt, to look up in the index."""

from __future__ import annotations

import asyncio
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, Final, TypeVar

import msgspec

from kvkeep.core.errors import InvalidValue
from kvkeep.core.tokens import as_tokens
from kvkeep.serve.router.chats import (
    MOST_BYTES,
    beginning,
    beginning_of_text,
    chat_of_messages,
    chat_of_responses,
    chat_turns,
    tools_of,
)
from kvkeep.serve.router.health import Doubt
from kvkeep.serve.router.upstreams import UpstreamFailed

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvkeep.core.tokens import TokenArray
    from kvkeep.serve.router.health import Timeouts
    from kvkeep.serve.router.upstreams import Upstreams

    Tokenize = Callable[[dict[str, Any]], TokenArray]

T = TypeVar("T")

__all__ = ["MOST_TOKENS", "Prompt", "PromptParser", "TokenizeOutcome"]

MOST_TOKENS: Final = 1 << 17
"""Tokens of a prompt that count; what is behind them neither decides nor counts as work."""
_MOST_IDS: Final = 12 * MOST_TOKENS  # bytes of a list of token ids: ten digits, a comma, a blank
_MOST_ANSWER: Final = 16 << 20  # bytes of a /tokenize response
_MOST_NAME: Final = 4096  # bytes of a model's name or a salt, as JSON
_SESSION_HEADER: Final = b"x-session-id"
_MOST_TRIES: Final = 2  # instances that may get one text for /tokenize
_THREADS: Final = 2
_SHORT: Final = 16 << 10  # bytes of a conversation that the event loop reads itself
_NOTHING: Final = msgspec.Raw()
_EMPTY: Final = (_NOTHING, msgspec.Raw(b"null"))
_LIST: Final = re.compile(rb'\s*\[\s*([\["]?)')


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
    chat_template: msgspec.Raw = _NOTHING
    chat_template_kwargs: msgspec.Raw = _NOTHING


class _Tokens(msgspec.Struct, gc=False):
    """A response of /tokenize."""

    tokens: list[int]


_bodies = msgspec.json.Decoder(_Body)
_answers = msgspec.json.Decoder(_Tokens)
_rows = msgspec.json.Decoder(list[int])
_text = msgspec.json.Decoder(str)
_UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)


class TokenizeOutcome(Enum):
    """The outcome of a request to /tokenize, or of the router's own tokenizer."""

    ANSWERED = "answered"
    REFUSED = "refused"
    LATE = "late"
    FAILED = "failed"
    NOBODY = "nobody is up"


@dataclass(frozen=True, slots=True)
class Prompt:
    """The beginning of a request's prompt, its model and ``cache_salt``.

    ``tokens`` is None if they are unknown, else has at most `MOST_TOKENS`. ``key`` names the
    conversation or application: its prompts should go to one instance.
    """

    tokens: TokenArray | None
    model: str = ""
    salt: str = ""
    key: str = ""


class PromptParser:
    """Reads prompts from request bodies. ``tokenize``, or an instance's /tokenize, tokenizes text.

    `PATHS` have prompts. Only the beginning of a prompt is read, `MOST_BYTES` of JSON: the rest is
    neither parsed, joined nor tokenized. What takes more than a millisecond runs in two threads,
    and a prompt that is not read there within ``timeouts.tokenize_s`` counts as unknown.

    ``tokenize`` gets a body with text in ``prompt``, or with ``messages`` and perhaps ``tools``; it
    runs in those threads and may raise `InvalidValue`. Without ``tokenize``, a request goes to
    /tokenize of at most two instances that are up, each within ``timeouts.tokenize_s``.
    ``on_outcome`` is called for each. Of several prompts in one request the first counts.

    Thread safety: none; for the event loop.
    """

    PATHS: Final = frozenset(
        {"/v1/completions", "/v1/chat/completions", "/v1/messages", "/v1/responses"}
    )

    def __init__(
        self,
        upstreams: Upstreams,
        timeouts: Timeouts,
        tokenize: Tokenize | None = None,
        *,
        on_outcome: Callable[[TokenizeOutcome], None] = lambda outcome: None,
    ) -> None:
        self._upstreams = upstreams
        self._timeouts = timeouts
        self._tokenize = tokenize
        self._on_outcome = on_outcome
        self._threads = ThreadPoolExecutor(_THREADS, "prompts")
        self._turn = 0

    def close(self) -> None:
        """End the threads; what waits for one is given up."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def read(self, path: str, body: bytes, headers: list[tuple[bytes, bytes]]) -> Prompt:
        """Return the prompt of this body. No content of the body makes it raise."""
        try:
            fields = _bodies.decode(body)
        except _UNREADABLE:
            return Prompt(None)
        try:
            tokens = await self._tokens(path, fields, headers)
        except (InvalidValue, *_UNREADABLE):
            tokens = None
        key = _name(fields.prompt_cache_key) or _session_of(headers)
        return Prompt(tokens, _name(fields.model), _name(fields.cache_salt), key)

    async def _tokens(
        self, path: str, fields: _Body, headers: list[tuple[bytes, bytes]]
    ) -> TokenArray | None:
        ids = _first_ids(bytes(memoryview(fields.prompt)[:_MOST_IDS]))
        if ids is not None:
            return as_tokens(ids[:MOST_TOKENS])
        texts = (fields.prompt, fields.messages, fields.system, fields.input, fields.tools)
        try:
            if sum(map(len, texts)) > _SHORT:
                text = await self._in_thread(_request, path, fields)
            else:
                text = _request(path, fields)
            if text is None or self._tokenize is None:
                return None if text is None else await self._request_tokens(text, headers)
            own = await self._in_thread(self._tokenize, msgspec.json.decode(text))
            return own[:MOST_TOKENS]
        except TimeoutError:
            self._on_outcome(TokenizeOutcome.LATE)
            return None

    async def _in_thread(self, work: Callable[..., T], *arguments: object) -> T:
        """Return what ``work`` returns; raises `TimeoutError`, after which it may still run."""
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(self._timeouts.tokenize_s):
            return await loop.run_in_executor(self._threads, work, *arguments)

    async def _request_tokens(
        self, body: bytes, headers: list[tuple[bytes, bytes]]
    ) -> TokenArray | None:
        """Send the text to /tokenize of instances that are up, in turn; doubt one that is late."""
        own = [pair for pair in headers if pair[0] in {b"authorization", b"x-api-key", b"via"}]
        own.append((b"content-type", b"application/json"))
        tried: set[str] = set()
        while len(tried) < _MOST_TRIES:
            up = [name for name in self._upstreams.health.up() if name not in tried]
            if not up:
                break
            self._turn += 1
            name = up[self._turn % len(up)]
            tried.add(name)
            try:
                async with asyncio.timeout(self._timeouts.tokenize_s):
                    tokens = await self._ask(name, body, own)
            except TimeoutError:
                outcome = TokenizeOutcome.LATE
            except UpstreamFailed:
                outcome = TokenizeOutcome.FAILED
            else:
                refused = tokens is None
                self._on_outcome(TokenizeOutcome.REFUSED if refused else TokenizeOutcome.ANSWERED)
                return tokens
            self._on_outcome(outcome)
            self._upstreams.health.doubt(name, Doubt.TOKENIZE)
        if not tried:
            self._on_outcome(TokenizeOutcome.NOBODY)
        return None

    async def _ask(
        self, name: str, body: bytes, headers: list[tuple[bytes, bytes]]
    ) -> TokenArray | None:
        async with self._upstreams.request(name, "POST", "/tokenize", headers, body) as response:
            if response.status_code != 200:
                return None
            answer = bytearray()
            async for piece in response.aiter_bytes():
                answer += piece
                if len(answer) > _MOST_ANSWER:
                    return None
        try:
            tokens = _answers.decode(answer).tokens
            return as_tokens(tokens[:MOST_TOKENS]) if tokens else None
        except (InvalidValue, *_UNREADABLE):
            return None


def _request(path: str, fields: _Body) -> bytes | None:
    """Return the body that asks for the tokens of the beginning of a prompt; None without text."""
    body: dict[str, Any] = {}
    if fields.model not in _EMPTY and len(fields.model) <= _MOST_NAME:
        body["model"] = fields.model
    if fields.prompt not in _EMPTY:
        prompt = bytes(fields.prompt)
        found = _LIST.match(prompt)
        body["prompt"] = beginning_of_text(prompt, 0 if found is None else found.start(1))
        return msgspec.json.encode(body)
    whole = ("tools", "chat_template", "chat_template_kwargs")
    if sum(len(getattr(fields, name)) for name in whole) > MOST_BYTES:
        return None
    chat = _chat(path, fields)
    if (
        max(len(fields.messages), len(fields.input)) > MOST_BYTES
        and "tool_calls" in (*chat, {})[-1]
    ):
        del chat[-1]  # its arguments may be cut
    if not chat:
        return None
    body["messages"] = chat
    for name in whole:
        if (value := getattr(fields, name)) not in _EMPTY:
            body[name] = value
    if path == "/v1/responses":
        body["add_special_tokens"] = True  # as vLLM 0.32 does for this API alone
    if path in {"/v1/messages", "/v1/responses"} and "tools" in body:
        body["tools"] = tools_of(_beginning(fields.tools))
    return msgspec.json.encode(body)


def _chat(path: str, fields: _Body) -> list[dict[str, Any]]:
    """Return the beginning of a conversation as a chat, empty where it is unknown."""
    if path == "/v1/messages":
        return chat_of_messages(_beginning(fields.system), _beginning(fields.messages))
    if path != "/v1/responses":
        return chat_turns(_beginning(fields.messages))
    if fields.previous_response_id not in _EMPTY:
        return []  # it begins with a conversation that its instance keeps
    return chat_of_responses(_beginning(fields.instructions), _beginning(fields.input))


def _beginning(value: msgspec.Raw) -> object:
    return None if value in _EMPTY else msgspec.json.decode(beginning(bytes(value)))


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
