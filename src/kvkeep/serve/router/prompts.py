"""`PromptParser`: the tokens of a request, so that it can be compared with what is cached."""

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
    from kvkeep.serve.router.health import Patience
    from kvkeep.serve.router.upstreams import Upstreams

    Tokenize = Callable[[dict[str, Any]], TokenArray]

__all__ = ["Prompt", "PromptParser", "TokenizeOutcome"]

_MOST_BYTES = 32 << 20  # of a tokenizer's answer; eight million bytes of text are not more tokens
_MOST_NAME = 4096  # bytes of a model's name or a salt, as JSON
_MOST_TRIES = 2  # instances that are asked to tokenize one text
# What of a question for an answer is also one for its tokens.
_CHAT = ("model", "messages", "tools", "chat_template", "chat_template_kwargs")
_NOTHING = msgspec.Raw()
_LIST = re.compile(rb'\s*\[\s*([\["]?)')


class _Asked(msgspec.Struct, gc=False):
    """The parts of a request's body that are looked at, each as it was written.

    The others are skipped without making objects of them: a body of 8 MiB takes at most 50 ms,
    where `json.loads` may take a second of the event loop.
    """

    model: msgspec.Raw = _NOTHING
    cache_salt: msgspec.Raw = _NOTHING
    prompt: msgspec.Raw = _NOTHING
    messages: msgspec.Raw = _NOTHING
    tools: msgspec.Raw = _NOTHING
    chat_template: msgspec.Raw = _NOTHING
    chat_template_kwargs: msgspec.Raw = _NOTHING


class _Tokens(msgspec.Struct, gc=False):
    """A tokenizer's answer."""

    tokens: list[int]


_bodies = msgspec.json.Decoder(_Asked)
_answers = msgspec.json.Decoder(_Tokens)
_rows = msgspec.json.Decoder(list[int])
_texts = msgspec.json.Decoder(list[str])
_text = msgspec.json.Decoder(str)
_UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)


class TokenizeOutcome(Enum):
    """What came of asking for the tokens of a text."""

    ANSWERED = "answered"
    REFUSED = "refused"
    LATE = "late"
    FAILED = "failed"
    NOBODY = "nobody is up"


@dataclass(frozen=True, slots=True)
class Prompt:
    """What a request says of itself. ``tokens`` is None where they could not be had."""

    tokens: TokenArray | None
    model: str = ""
    salt: str = ""


class PromptParser:
    """Reads requests. Text becomes tokens by ``tokenize``, or by asking an instance's /tokenize.

    ``tokenize`` gets the body of a request with text in ``prompt``, or with ``messages``; it runs
    in a thread and may raise `InvalidValue`. Only instances that are up are asked, two at most, and
    each has ``patience.tokenize_s``; ``told`` is called with what came of it. Of several prompts in
    one request the first counts.
    """

    def __init__(
        self,
        upstreams: Upstreams,
        patience: Patience,
        tokenize: Tokenize | None = None,
        *,
        told: Callable[[TokenizeOutcome], None] = lambda came: None,
    ) -> None:
        self._upstreams = upstreams
        self._patience = patience
        self._tokenize = tokenize
        self._told = told
        self._turn = 0

    async def read(self, body: bytes, headers: list[tuple[bytes, bytes]]) -> Prompt:
        """What the request with this body asks for; never raises for what it contains."""
        try:
            asked = _bodies.decode(body)
        except _UNREADABLE:
            return Prompt(None)
        try:
            tokens = await self._tokens(asked, headers)
        except (InvalidValue, *_UNREADABLE):
            tokens = None
        return Prompt(tokens, _name(asked.model), _name(asked.cache_salt))

    async def _tokens(self, asked: _Asked, headers: list[tuple[bytes, bytes]]) -> TokenArray | None:
        prompt = bytes(asked.prompt)
        if prompt not in {b"", b"null"}:
            first = _first(prompt)
            if not isinstance(first, str):
                return as_tokens(first)
            question = {"prompt": msgspec.Raw(msgspec.json.encode(first))}
            if asked.model != _NOTHING:
                question["model"] = asked.model
        elif bytes(asked.messages).startswith(b"["):
            parts = {key: getattr(asked, key) for key in _CHAT}
            question = {key: part for key, part in parts.items() if part != _NOTHING}
        else:
            return None
        written = msgspec.json.encode(question)
        if self._tokenize is not None:
            return await asyncio.to_thread(self._tokenize, msgspec.json.decode(written))
        return await self._ask_for(written, headers)

    async def _ask_for(
        self, question: bytes, headers: list[tuple[bytes, bytes]]
    ) -> TokenArray | None:
        """Ask the instances that are up in turn; one that does not answer in time is doubted."""
        own = [pair for pair in headers if pair[0] in {b"authorization", b"x-api-key"}]
        own.append((b"content-type", b"application/json"))
        asked: set[str] = set()
        while len(asked) < _MOST_TRIES:
            up = [name for name in self._upstreams.health.up() if name not in asked]
            if not up:
                break
            self._turn += 1
            name = up[self._turn % len(up)]
            asked.add(name)
            try:
                async with asyncio.timeout(self._patience.tokenize_s):
                    tokens = await self._ask(name, question, own)
            except TimeoutError:
                came = TokenizeOutcome.LATE
            except UpstreamFailed:
                came = TokenizeOutcome.FAILED
            else:
                self._told(TokenizeOutcome.REFUSED if tokens is None else TokenizeOutcome.ANSWERED)
                return tokens
            self._told(came)
            self._upstreams.health.doubt(name, Doubt.TOKENIZE)
        if not asked:
            self._told(TokenizeOutcome.NOBODY)
        return None

    async def _ask(
        self, name: str, question: bytes, headers: list[tuple[bytes, bytes]]
    ) -> TokenArray | None:
        async with self._upstreams.asking(name, "POST", "/tokenize", headers, question) as response:
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


def _name(written: msgspec.Raw) -> str:
    """A short text, or "" where it is something else."""
    part = bytes(written)
    if not part.startswith(b'"') or len(part) > _MOST_NAME:
        return ""
    try:
        return _text.decode(part)
    except _UNREADABLE:
        return ""


def _first(prompt: bytes) -> str | list[int]:
    """The first of the prompts that are written here. Raises msgspec's errors for what is none.

    Only this one is read: ten million empty lists would cost a second.
    """
    found = _LIST.match(prompt)
    if found is None:
        return _text.decode(prompt)
    if found[1] == b'"':
        return _texts.decode(prompt)[0]
    if found[1] == b"[":  # no list of ids has a bracket in it
        return _rows.decode(prompt[found.start(1) : prompt.find(b"]") + 1])
    return _rows.decode(prompt)
