"""`Prompts`: the tokens of a request, so that it can be compared with what is cached."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvkeep.errors import InvalidValue
from kvkeep.router.upstreams import UpstreamFailed
from kvkeep.tokens import as_tokens

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvkeep.router.upstreams import Upstreams
    from kvkeep.tokens import TokenArray

    Tokenize = Callable[[dict[str, Any]], TokenArray]

__all__ = ["Prompt", "Prompts"]

_MOST_BYTES = 64 << 20  # of a tokenizer's answer
# What of a question for an answer is also one for its tokens.
_CHAT = ("model", "messages", "tools", "chat_template", "chat_template_kwargs")


@dataclass(frozen=True, slots=True)
class Prompt:
    """What a request says of itself. ``tokens`` is None where they could not be had."""

    tokens: TokenArray | None
    model: str = ""
    salt: str = ""


class Prompts:
    """Reads requests. Text becomes tokens by ``tokenize``, or by asking an instance's /tokenize.

    ``tokenize`` gets the body of a request with text in ``prompt``, or with ``messages``; it runs
    in a thread and may raise `InvalidValue`. Of several prompts in one request the first counts.
    """

    def __init__(
        self, upstreams: Upstreams, tokenize: Tokenize | None = None, *, patience_s: float = 5.0
    ) -> None:
        self._upstreams = upstreams
        self._tokenize = tokenize
        self._patience_s = patience_s
        self._turn = 0

    async def read(self, body: bytes, headers: list[tuple[bytes, bytes]]) -> Prompt:
        """What the request with this body asks for; never raises for what it contains."""
        try:
            asked = json.loads(body)
        except (ValueError, RecursionError):
            return Prompt(None)
        if not isinstance(asked, dict):
            return Prompt(None)
        model, salt = asked.get("model"), asked.get("cache_salt")
        try:
            tokens = await self._tokens(asked, headers)
        except InvalidValue:
            tokens = None
        return Prompt(
            tokens,
            model if isinstance(model, str) else "",
            salt if isinstance(salt, str) else "",
        )

    async def _tokens(
        self, asked: dict[str, Any], headers: list[tuple[bytes, bytes]]
    ) -> TokenArray | None:
        prompt = asked.get("prompt")
        if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
            prompt = prompt[0]
        if isinstance(prompt, list):
            return as_tokens(prompt)
        if isinstance(prompt, str):
            question = {"prompt": prompt, **{key: asked[key] for key in ("model",) if key in asked}}
        elif isinstance(asked.get("messages"), list):
            question = {key: asked[key] for key in _CHAT if key in asked}
        else:
            return None
        if self._tokenize is not None:
            return await asyncio.to_thread(self._tokenize, question)
        try:
            async with asyncio.timeout(self._patience_s):
                return await self._ask(question, headers)
        except (UpstreamFailed, TimeoutError):
            return None

    async def _ask(
        self, question: dict[str, Any], headers: list[tuple[bytes, bytes]]
    ) -> TokenArray | None:
        awake = self._upstreams.awake()
        self._turn += 1
        name = awake[self._turn % len(awake)]
        own = [pair for pair in headers if pair[0] in {b"authorization", b"x-api-key"}]
        own.append((b"content-type", b"application/json"))
        body = json.dumps(question).encode()
        async with self._upstreams.asking(name, "POST", "/tokenize", own, body) as response:
            if response.status_code != 200:
                return None
            answer = bytearray()
            async for piece in response.aiter_bytes():
                answer += piece
                if len(answer) > _MOST_BYTES:
                    return None
        try:
            said = json.loads(answer)
        except (ValueError, RecursionError):
            return None
        tokens = said.get("tokens") if isinstance(said, dict) else None
        return as_tokens(tokens) if isinstance(tokens, list) and tokens else None
