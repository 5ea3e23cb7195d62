"""`AnswerReader`: how an answer ends, read from the bytes that are passed on to the client."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from kvkeep.core.returns import Ended

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["UNFINISHED", "AnswerReader"]

UNFINISHED: Final = Ended("unfinished")
"""The answer broke off, or its client left."""

_TAIL: Final = 96  # bytes that a piece is searched with, of those before it: more than a match has
# Raw quotes begin and end strings: text of a model that looks like a field has escaped ones.
_FIELD: Final = (
    rb'"(%s)"\s{0,8}:\s{0,8}(?:"([a-z_]{1,32})"|(\d{1,9})|(\[\s{0,8}\{))'  # name and value
)
_CHAT: Final = re.compile(_FIELD % b"finish_reason|completion_tokens|tool_calls")
_MESSAGES: Final = re.compile(_FIELD % b"stop_reason|output_tokens")
# The words of Anthropic's API, and of OpenAI's past, in those of OpenAI's.
_WORDS: Final[Mapping[str, str]] = {
    "tool_use": "tool_calls",
    "function_call": "tool_calls",
    "end_turn": "stop",
    "stop_sequence": "stop",
    "max_tokens": "length",
    "refusal": "content_filter",
}


class AnswerReader:
    """Finds the stop reason, tool calls and the number of tokens in the pieces of an answer.

    It searches bytes and parses nothing: whole answers and streams, in any pieces, are read alike,
    and an answer that is no JSON says nothing. ``messages``: the answer is one of Anthropic's API.
    An answer that ends normally with a tool call ends with "tool_calls", whatever its server calls
    it. Of several choices the one that calls a tool counts, else the last one.

    Memory: 96 bytes. Cost: about 1 µs a piece and 3 ms for 1 MiB. Thread safety: none.
    """

    __slots__ = ("_calls", "_chunks", "_field", "_reason", "_stop", "_tail", "_tokens")

    def __init__(self, *, messages: bool = False) -> None:
        self._field = _MESSAGES if messages else _CHAT
        self._reason = b'"stop_reason"' if messages else b'"finish_reason"'
        self._tail = b""
        self._stop: str | None = None
        self._calls = False
        self._tokens = 0
        self._chunks = 0

    def feed(self, piece: bytes) -> None:
        """Read the next bytes of the answer."""
        known = len(self._tail)
        data = self._tail + piece
        # Each chunk of a stream has a reason, null but for the last one: not worth a match.
        self._chunks += data.count(self._reason) - self._tail.count(self._reason)
        for found in self._field.finditer(data):
            if found.end() > known:  # else it was counted with the piece before
                self._note(*found.groups())
        self._tail = data[-_TAIL:]

    def _note(
        self, name: bytes, word: bytes | None, number: bytes | None, items: bytes | None
    ) -> None:
        if name in {b"finish_reason", b"stop_reason"}:
            if word is not None and self._stop != "tool_calls":
                said = word.decode()
                self._stop = _WORDS.get(said, said)
        elif name == b"tool_calls":
            self._calls = self._calls or items is not None
        elif number is not None:
            self._tokens = int(number)

    @property
    def ended(self) -> Ended:
        """How the answer ended, with its tokens as its usage says; without one, its chunks."""
        stop = self._stop
        if self._calls and stop in {None, "stop"}:
            stop = "tool_calls"
        return Ended(stop, self._tokens or self._chunks)
