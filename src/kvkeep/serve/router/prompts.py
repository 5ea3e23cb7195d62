"""`PromptParser`: the tokens of a request's prompt, to look up in the index."""

from __future__ import annotations

import asyncio
import re
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

import msgspec

from kvkeep.core.errors import InvalidValue
from kvkeep.core.tokens import as_tokens
from kvkeep.serve.router.health import Doubt
from kvkeep.serve.router.upstreams import UpstreamFailed

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvkeep.core.tokens import TokenArray
    from kvkeep.serve.router.health import Timeouts
    from kvkeep.serve.router.upstreams import Upstreams

    Tokenize = Callable[[dict[str, Any]], TokenArray]

__all__ = ["Prompt", "PromptParser", "TokenizeOutcome", "credentials_of"]

_MOST_BYTES = 32 << 20  # of a /tokenize response; 8 MiB of text has no more tokens than that
_MOST_NAME = 4096  # bytes of a model's name or a salt, as JSON
_SESSION_HEADER = b"x-session-id"
_MOST_TRIES = 2  # instances that may get one text for /tokenize
# Fields of a chat request that /tokenize takes as well.
_CHAT = ("model", "messages", "tools", "chat_template", "chat_template_kwargs")
_NOTHING = msgspec.Raw()
_LIST = re.compile(rb'\s*\[\s*([\["]?)')


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
    tools: msgspec.Raw = _NOTHING
    chat_template: msgspec.Raw = _NOTHING
    chat_template_kwargs: msgspec.Raw = _NOTHING


class _Tokens(msgspec.Struct, gc=False):
    """A response of /tokenize."""

    tokens: list[int]


_bodies = msgspec.json.Decoder(_Body)
_answers = msgspec.json.Decoder(_Tokens)
_rows = msgspec.json.Decoder(list[int])
_texts = msgspec.json.Decoder(list[str])
_text = msgspec.json.Decoder(str)
_UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)


class TokenizeOutcome(Enum):
    """The outcome of a request to /tokenize."""

    ANSWERED = "answered"
    REFUSED = "refused"
    LATE = "late"
    FAILED = "failed"
    NOBODY = "nobody is up"


@dataclass(frozen=True, slots=True)
class Prompt:
    """A request's prompt, model and ``cache_salt``. ``tokens`` is None if they are unknown.

    ``key`` names the conversation or application: its prompts should go to one instance.
    ``session`` names the conversation alone.
    """

    tokens: TokenArray | None
    model: str = ""
    salt: str = ""
    key: str = ""
    session: str = ""


class PromptParser:
    """Reads prompts from request bodies. ``tokenize``, or an instance's /tokenize, tokenizes text.

    ``tokenize`` gets a body with text in ``prompt``, or with ``messages``; it runs in a thread and
    may raise `InvalidValue`. Without ``tokenize``, a request goes to /tokenize of at most two
    instances that are up, each within ``timeouts.tokenize_s``; ``on_outcome`` is called for each.
    Of several prompts in one request the first counts.
    """

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
        self._turn = 0

    async def read(self, body: bytes, headers: list[tuple[bytes, bytes]]) -> Prompt:
        """Return the prompt of this body. No content of the body makes it raise."""
        try:
            fields = _bodies.decode(body)
        except _UNREADABLE:
            return Prompt(None)
        try:
            tokens = await self._tokens(fields, headers)
        except (InvalidValue, *_UNREADABLE):
            tokens = None
        session = _session_of(headers)
        key = _name(fields.prompt_cache_key) or session
        return Prompt(tokens, _name(fields.model), _name(fields.cache_salt), key, session)

    async def _tokens(self, fields: _Body, headers: list[tuple[bytes, bytes]]) -> TokenArray | None:
        prompt = bytes(fields.prompt)
        if prompt not in {b"", b"null"}:
            first = _first(prompt)
            if not isinstance(first, str):
                return as_tokens(first)
            text = {"prompt": msgspec.Raw(msgspec.json.encode(first))}
            if fields.model != _NOTHING:
                text["model"] = fields.model
        elif bytes(fields.messages).startswith(b"["):
            parts = {key: getattr(fields, key) for key in _CHAT}
            text = {key: part for key, part in parts.items() if part != _NOTHING}
        else:
            return None
        body = msgspec.json.encode(text)
        if self._tokenize is not None:
            return await asyncio.to_thread(self._tokenize, msgspec.json.decode(body))
        return await self._request_tokens(body, headers)

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
                    tokens = await self._request(name, body, own)
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

    async def _request(
        self, name: str, body: bytes, headers: list[tuple[bytes, bytes]]
    ) -> TokenArray | None:
        async with self._upstreams.request(name, "POST", "/tokenize", headers, body) as response:
            if response.status_code != 200:
                return None
            answer = bytearray()
            async for piece in response.aiter_bytes():
                answer += piece
                if len(answer) > _MOST_BYTES:
                    return None
        try:
            tokens = _answers.decode(answer).tokens
            return as_tokens(tokens) if tokens else None
        except (InvalidValue, *_UNREADABLE):
            return None


def _session_of(headers: list[tuple[bytes, bytes]]) -> str:
    """Return the session that a client names in a header; "" without one."""
    for name, value in headers:
        if name == _SESSION_HEADER:
            return value[:_MOST_NAME].decode("latin-1")
    return ""


def credentials_of(headers: list[tuple[bytes, bytes]]) -> bytes:
    """Return the API key of a request, in whichever header; empty without one."""
    keys = {name: value for name, value in headers if name in {b"authorization", b"x-api-key"}}
    given = keys.get(b"authorization", b"")
    scheme, _, bearer = given.partition(b" ")
    return (bearer if scheme.lower() == b"bearer" else given) or keys.get(b"x-api-key", b"")


def _name(written: msgspec.Raw) -> str:
    """Return a short JSON string, "" for anything else."""
    part = bytes(written)
    if not part.startswith(b'"') or len(part) > _MOST_NAME:
        return ""
    try:
        return _text.decode(part)
    except _UNREADABLE:
        return ""


def _first(prompt: bytes) -> str | list[int]:
    """Return the first prompt of a JSON value. Raises msgspec's errors for other values.

    Only the first one is parsed: ten million empty lists would cost a second.
    """
    found = _LIST.match(prompt)
    if found is None:
        return _text.decode(prompt)
    if found[1] == b'"':
        return _texts.decode(prompt)[0]
    if found[1] == b"[":  # a list of token ids ends at the first closing bracket
        return _rows.decode(prompt[found.start(1) : prompt.find(b"]") + 1])
    return _rows.decode(prompt)
