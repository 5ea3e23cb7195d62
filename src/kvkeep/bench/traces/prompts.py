"""`PromptReader`: prompts as text, token ids or OpenAI's messages, one JSON object per line."""

from __future__ import annotations

import hashlib
import json
import re
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from kvkeep.bench.traces.chain import chain_tokens
from kvkeep.bench.traces.fields import (
    json_object,
    number,
    optional_count,
    optional_seconds,
    optional_text,
    shown,
)
from kvkeep.bench.traces.files import BadLine
from kvkeep.bench.traces.request import TraceRequest
from kvkeep.core.errors import InvalidValue
from kvkeep.core.tokens import as_tokens

if TYPE_CHECKING:
    import numpy.typing as npt

    from kvkeep.bench.traces.chain import Words

__all__ = ["PromptReader", "words"]

# A word with the space before it, or one other character: close to the tokens of English text.
_PIECE = re.compile(r"\s*\w{1,32}|\s*[^\w\s]|\s+")
_MARK = "<|{}|>\n"
_SYSTEM = ("system", "developer", "instructions")  # fields, and roles of messages
_TOOLS = ("tools", "functions")


class PromptReader:
    """Reads lines with ``prompt`` (text), ``tokens`` (ids) or ``messages``.

    ``system`` or ``instructions`` and ``tools`` beside text or messages are a part of the prompt,
    in front of it, as logged requests to the APIs of Anthropic and OpenAI have them.

    Optional: ``time`` or ``timestamp`` (s; otherwise requests are a second apart),
    ``output_tokens``, ``namespace`` (or ``cache_salt``), ``session``, ``parent``, ``turn``,
    ``kind``, ``stop``, ``took_s``. Ids are made here, by default one per token, which is exact.
    """

    def __init__(self, unit_tokens: int | None) -> None:
        self.unit_tokens = unit_tokens or 1
        self._timed: str | None = None
        self._read = 0

    def read(self, line: bytes) -> TraceRequest:
        """Return the request of a line."""
        found = json_object(line)
        tokens = self._tokens(found)
        time = self._time(found)
        namespace = optional_text(found, "namespace") or optional_text(found, "cache_salt") or ""
        return TraceRequest(
            time,
            chain_tokens(tokens, self.unit_tokens),
            len(tokens),
            optional_count(found, "output_tokens") or 0,
            namespace,
            session=optional_text(found, "session"),
            parent=optional_text(found, "parent"),
            turn=optional_count(found, "turn"),
            kind=optional_text(found, "kind") or "",
            stop=optional_text(found, "stop") or "",
            took_s=optional_seconds(found, "took_s"),
        )

    def _time(self, found: dict[str, Any]) -> float:
        """Return the time of a request; the first line decides whether the file has times."""
        if not self._read:
            self._timed = next((key for key in ("time", "timestamp") if key in found), None)
        time = float(self._read) if self._timed is None else number(found, self._timed)
        self._read += 1
        return time

    def _tokens(self, found: dict[str, Any]) -> npt.NDArray[np.int32] | Words:
        if isinstance(text := found.get("prompt"), str):
            return words(_rendered(found, []) + text)
        if isinstance(messages := found.get("messages"), list):
            return words(_rendered(found, messages))
        ids = found.get("tokens", found.get("prompt"))
        if not isinstance(ids, list):
            raise BadLine("a prompt needs text in `prompt`, ids in `tokens`, or `messages`")
        try:
            return as_tokens(ids)
        except InvalidValue as error:
            raise BadLine(str(error)[:300]) from error


def words(text: str) -> Words:
    """Return 64-bit hashes of words, with the space before them, and other single characters.

    English text has about a tenth fewer of them than tokens; other languages differ more.
    """
    return np.array([_word(piece) for piece in _PIECE.findall(text)], np.uint64)


@lru_cache(maxsize=65_536)
def _word(piece: str) -> int:
    encoded = piece.encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.blake2b(encoded, digest_size=8).digest(), "little")


def _rendered(found: dict[str, Any], messages: list[Any]) -> str:
    """Return the prompt of a request as one text, to which more messages only append.

    As in most templates, what the system says comes first, then the tools, then the conversation.
    """
    parts = []
    for key in _SYSTEM:
        if found.get(key):
            parts += [_MARK.format("system"), _content(found[key], key)]
    turns = [_turn(message) for message in messages]
    head = next(
        (at for at, message in enumerate(messages) if message.get("role") not in _SYSTEM),
        len(messages),
    )
    parts += turns[:head]
    for key in _TOOLS:
        if found.get(key):
            parts += [_MARK.format("tools"), _content(found[key], key)]
    return "".join(parts + turns[head:])


def _turn(message: object) -> str:
    if not isinstance(message, dict):
        raise BadLine(f"messages has {shown(message)}; objects are needed")
    text = _MARK.format(message.get("role")) + _content(message.get("content"), "content")
    calls = message.get("tool_calls")
    return text + json.dumps(calls, sort_keys=True) if calls else text


def _content(content: object, name: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise BadLine(f"{name} is {shown(content)}; text or a list of parts is needed")
    return "".join(
        part["text"]
        if isinstance(part, dict) and isinstance(part.get("text"), str)
        else _json(part)  # a tool; an image, by its URL
        for part in content
    )


def _json(part: object) -> str:
    """Return a part as text, without its mark for caches, which moves from turn to turn."""
    if isinstance(part, dict):
        part = {key: value for key, value in part.items() if key != "cache_control"}
    return json.dumps(part, sort_keys=True)
