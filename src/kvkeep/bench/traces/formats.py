"""Formats of single lines: Mooncake, Qwen-Bailian, Azure.

A format object is made for each pass over a file. ``read`` returns the request of a line, with the
time as in the file, or None for a header line, and raises `BadLine`.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Protocol

from kvkeep.bench.traces.fields import (
    Fresh,
    count,
    json_object,
    number,
    optional_count,
    optional_seconds,
    optional_text,
    unit_ids,
)
from kvkeep.bench.traces.files import BadLine
from kvkeep.bench.traces.request import MAX_TOKENS, MAX_UNIT_TOKENS, TraceRequest
from kvkeep.core.errors import InvalidValue, whole

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvkeep.bench.traces.request import UnitArray

    Tokenize = Callable[[str], Sequence[int]]

__all__ = ["Azure", "Bailian", "Format", "Mooncake", "ReadOptions"]

_MOST_SESSIONS = 1_000_000  # chats whose session is remembered
_MOST_SPREAD_S = 1e9


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """Options for files whose format leaves these facts open.

    ``unit_tokens``: tokens per id where the file does not say (Mooncake 512, Bailian 16), or of ids
    that are made here (prompts 1, Azure 512). ``chained``: whether ids in the file are
    prefix-chained; None: as usual in the format (Mooncake: yes, Bailian: no). ``text``: what a
    token of a text is: "words", "bytes" (of UTF-8), or a tokenizer's function. In formats
    that do not say when sessions begin, ``spread_s`` are the seconds over which they do, and times
    without requests in a session are shortened to ``longest_gap_s``.
    """

    unit_tokens: int | None = None
    chained: bool | None = None
    text: str | Tokenize = "words"
    spread_s: float = 0.0
    longest_gap_s: float | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.spread_s <= _MOST_SPREAD_S:
            raise InvalidValue(
                f"spread_s is {self.spread_s!r}; seconds in 0 … {_MOST_SPREAD_S:g} are needed"
            )
        gap = self.longest_gap_s
        if gap is not None and not 0 < gap <= _MOST_SPREAD_S:
            raise InvalidValue(
                f"longest_gap_s is {gap!r}; seconds above 0, at most {_MOST_SPREAD_S:g}, are needed"
            )
        if self.unit_tokens is not None:
            whole("unit_tokens", self.unit_tokens, 1, MAX_UNIT_TOKENS)
        if isinstance(self.text, str) and self.text not in {"words", "bytes"}:
            raise InvalidValue(
                f'text is "words", "bytes" or a tokenizer\'s function, got {self.text!r}'
            )

    def unit(self, default: int) -> int:
        """Return ``unit_tokens``, or the default of a format."""
        return self.unit_tokens or default

    def is_chained(self, default: bool) -> bool:
        """Return ``chained``, or the default of a format."""
        return default if self.chained is None else self.chained


class Format(Protocol):
    """Reads the lines of one format."""

    unit_tokens: int

    def read(self, line: bytes) -> TraceRequest | None:
        """Return the request of a line; None for a header."""


class _IdLines:
    """JSON lines with ``input_length`` and ``hash_ids``, the ids of the prompt's units."""

    def __init__(self, unit_tokens: int, chained: bool) -> None:
        self.unit_tokens = unit_tokens
        self._chained = chained
        self._fresh = Fresh()

    def _prompt(self, found: dict[str, Any]) -> tuple[UnitArray, int]:
        tokens = count(found, "input_length")
        units = unit_ids(
            found, "hash_ids", tokens, self.unit_tokens, chained=self._chained, fresh=self._fresh
        )
        return units, tokens


class Mooncake(_IdLines):
    """``timestamp`` (ms), ``input_length``, ``output_length``, ``hash_ids``.

    Released with Mooncake (FAST'25): ids are chained and stand for 512 tokens. Optional:
    ``output_length``, ``session_id``, ``stop_reason``, and ``api_time``, the seconds that the
    request took (0: unknown). A further request of a session may have, instead of ``timestamp``,
    the ``delay`` (ms) from the end of the answer before it, or from that request if its
    ``api_time`` is unknown.
    """

    def __init__(self, options: ReadOptions) -> None:
        super().__init__(options.unit(512), options.is_chained(True))
        # By session: when its latest request ended, and the first id, if that is of a full unit.
        self._latest: OrderedDict[str, tuple[float, int | None]] = OrderedDict()

    def read(self, line: bytes) -> TraceRequest:
        """Return the request of a line."""
        found = json_object(line)
        units, tokens = self._prompt(found)
        session = optional_text(found, "session_id")
        request = TraceRequest(
            self._time(found, session, units),
            units,
            tokens,
            optional_count(found, "output_length") or 0,
            session=session,
            stop=optional_text(found, "stop_reason") or "",
            took_s=optional_seconds(found, "api_time") or None,
        )
        if session is not None:
            self._latest.pop(session, None)
            first = int(units[0]) if tokens >= self.unit_tokens else None
            self._latest[session] = request.time + (request.took_s or 0.0), first
            if len(self._latest) > _MOST_SESSIONS:
                self._latest.popitem(last=False)
        return request

    def _time(self, found: dict[str, Any], session: str | None, units: UnitArray) -> float:
        """Return the time of a request, which may be told from the request before it."""
        if "timestamp" in found or "delay" not in found:
            return number(found, "timestamp") / 1000
        if session is None or session not in self._latest:
            raise BadLine("delay counts from a request of the same session_id, and none is before")
        ended, first = self._latest[session]
        if first is not None and (not len(units) or units[0] != first):
            raise BadLine(
                "hash_ids do not begin like those of the request before it in the session: ids of "
                "what is new in a prompt, without those before, are not read"
            )
        return ended + (optional_seconds(found, "delay") or 0.0) / 1000


class Bailian(_IdLines):
    """Qwen-Bailian's anonymised traces: ``timestamp`` (s), ``chat_id``, ``parent_chat_id``, ….

    Their ids are hashes of 16 tokens each, published as independent of the tokens before them, and
    are therefore chained here. Ids that are chained twice are equal where they were equal before.
    A session has the name of its first chat.
    """

    def __init__(self, options: ReadOptions) -> None:
        super().__init__(options.unit(16), options.is_chained(False))
        self._roots: OrderedDict[str, str] = OrderedDict()

    def read(self, line: bytes) -> TraceRequest:
        """Return the request of a line."""
        found = json_object(line)
        chat, parent = optional_text(found, "chat_id"), optional_text(found, "parent_chat_id")
        if parent == "-1":
            parent = None
        return TraceRequest(
            number(found, "timestamp"),
            *self._prompt(found),
            optional_count(found, "output_length") or 0,
            session=self._session(chat, parent),
            parent=parent,
            turn=optional_count(found, "turn"),
            kind=optional_text(found, "type") or "",
        )

    def _session(self, chat: str | None, parent: str | None) -> str | None:
        if chat is None:
            return parent
        root = chat if parent is None else self._roots.get(parent, parent)
        self._roots[chat] = root
        if len(self._roots) > _MOST_SESSIONS:
            self._roots.popitem(last=False)
        return root


class Azure:
    """``TIMESTAMP,ContextTokens,GeneratedTokens``: only times and lengths.

    The files do not show common prefixes of prompts: they are traces of load, not of reuse.
    """

    COLUMNS = ("timestamp", "contexttokens", "generatedtokens")

    def __init__(self, options: ReadOptions) -> None:
        self.unit_tokens = options.unit(512)

    def read(self, line: bytes) -> TraceRequest | None:
        """Return the request of a line; None for the header."""
        try:
            columns = line.decode("ascii").strip().split(",")
        except UnicodeDecodeError as error:
            raise BadLine("not ASCII") from error
        if len(columns) != 3:
            raise BadLine(f"three columns are needed, got {len(columns)}")
        if tuple(name.lower() for name in columns) == self.COLUMNS:
            return None
        tokens, output = (
            self._length(*pair) for pair in zip(self.COLUMNS[1:], columns[1:], strict=True)
        )
        return TraceRequest(self._seconds(columns[0]), None, tokens, output)

    @staticmethod
    def _length(name: str, column: str) -> int:
        digits = column.strip()
        if not (digits.isdecimal() and len(digits) <= 10 and int(digits) <= MAX_TOKENS):
            raise BadLine(
                f"{name} is {column[:40]!r}; a whole number in 0 … {MAX_TOKENS} is needed"
            )
        return int(digits)

    @staticmethod
    def _seconds(column: str) -> float:
        try:
            moment = datetime.fromisoformat(column.strip())
        except ValueError as error:
            raise BadLine(f"timestamp is {column[:40]!r}; a date and time is needed") from error
        return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
