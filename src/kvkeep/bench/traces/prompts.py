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
    count,
    json_object,
    number,
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
    from kvkeep.bench.traces.formats import ReadOptions

__all__ = ["PromptReader", "words"]

# A word with the space before it, or one other character: close to the tokens of English text.
_PIECE = re.compile(r"\s*\w{1,32}|\s*[^\w\s]|\s+")
_MARK = "<|{}|>\n"


class PromptReader:
    """Reads lines with ``prompt`` (text), ``tokens`` (ids) or ``messages``.

    Optional: ``time`` or ``timestamp`` (s; otherwise requests are a second apart),
    ``output_tokens``, ``namespace`` (or ``cache_salt``), ``session``, ``parent``, ``turn``,
    ``kind``, ``stop``, ``took_s``. Ids are made here, by default one per token, which is exact.
    """

    def __init__(self, options: ReadOptions) -> None:
        self.unit_tokens = options.unit(1)
        self._text = options.text
        self._timed: str | None = None
        self._read = 0

    def read(self, line: bytes) -> TraceRequest:
        """Return the request of a line."""
        found = json_object(line)
        tokens = self._tokens(found)
        time = self._time(found)
        turn = count(found, "turn", 0) if found.get("turn") is not None else None
        output = count(found, "output_tokens") if found.get("output_tokens") is not None else 0
        namespace = optional_text(found, "namespace") or optional_text(found, "cache_salt") or ""
        return TraceRequest(
            time,
            chain_tokens(tokens, self.unit_tokens),
            len(tokens),
            output,
            namespace,
            session=optional_text(found, "session"),
            parent=optional_text(found, "parent"),
            turn=turn,
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
            return self._of_text(text)
        if isinstance(messages := found.get("messages"), list):
            return self._of_text(_conversation(messages))
        ids = found.get("tokens", found.get("prompt"))
        if not isinstance(ids, list):
            raise BadLine("a prompt needs text in `prompt`, ids in `tokens`, or `messages`")
        try:
            return as_tokens(ids)
        except InvalidValue as error:
            raise BadLine(str(error)[:300]) from error

    def _of_text(self, text: str) -> npt.NDArray[np.int32] | Words:
        if self._text == "bytes":
            encoded = text.encode("utf-8", "surrogatepass")
            return np.frombuffer(encoded, np.uint8).astype(np.uint64)
        if isinstance(self._text, str):
            return words(text)
        return as_tokens(self._text(text))


def words(text: str) -> Words:
    """Return 64-bit hashes of words, with the space before them, and other single characters.

    English text has about a tenth fewer of them than tokens; other languages differ more.
    """
    return np.array([_word(piece) for piece in _PIECE.findall(text)], np.uint64)


@lru_cache(maxsize=65_536)
def _word(piece: str) -> int:
    encoded = piece.encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.blake2b(encoded, digest_size=8).digest(), "little")


def _conversation(messages: list[Any]) -> str:
    """Return a conversation as one text, to which more messages only append."""
    parts = []
    for message in messages:
        if not isinstance(message, dict):
            raise BadLine(f"messages has {shown(message)}; objects are needed")
        parts += [_MARK.format(message.get("role")), _content(message.get("content"))]
        if calls := message.get("tool_calls"):
            parts.append(json.dumps(calls, sort_keys=True))
    return "".join(parts)


def _content(content: object) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise BadLine(f"content is {shown(content)}; text or a list of parts is needed")
    return "".join(
        part["text"]
        if isinstance(part, dict) and isinstance(part.get("text"), str)
        else json.dumps(part, sort_keys=True)  # an image, by its URL
        for part in content
    )
