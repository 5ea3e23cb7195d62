"""Formats of single lines: Mooncake, Qwen-Bailian, plain prompts, Azure.

A format is made anew for each pass over a file; ``read`` turns a line into a request whose time is
the file's own, None for a line that is none and says so (a header), and raises `BadLine`.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Protocol

from kvkeep.bench.traces.fields import Fresh, count, json_object, number, optional_text, unit_ids
from kvkeep.bench.traces.files import BadLine
from kvkeep.bench.traces.request import MAX_TOKENS, TraceRequest, units_of
from kvkeep.core.errors import InvalidValue, whole

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    Tokenize = Callable[[str], Sequence[int]]

__all__ = ["Azure", "Bailian", "Format", "Mooncake", "ReadOptions"]

_MOST_SESSIONS = 1_000_000  # chats whose root is remembered
_MOST_UNIT = 1 << 20


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """How a file is read, where its format leaves it open.

    ``unit_tokens``: what an id stands for where the file does not say (Mooncake 512, Bailian 16),
    or is to stand for where ids are made (prompts 1, Azure 512). ``chained``: whether ids in the
    file are prefix-chained; None is as its format has it (Mooncake: yes, Bailian: no). ``text``:
    what a token of a text is: "words", "bytes" (of UTF-8), or a tokenizer's function.
    """

    unit_tokens: int | None = None
    chained: bool | None = None
    text: str | Tokenize = "words"

    def __post_init__(self) -> None:
        if self.unit_tokens is not None:
            whole("unit_tokens", self.unit_tokens, 1, _MOST_UNIT)
        if isinstance(self.text, str) and self.text not in {"words", "bytes"}:
            raise InvalidValue(
                f'text is read as "words", "bytes" or by a tokenizer\'s function, got {self.text!r}'
            )

    def unit(self, default: int) -> int:
        """``unit_tokens``, or what is usual."""
        return self.unit_tokens or default

    def is_chained(self, default: bool) -> bool:
        """``chained``, or what is usual."""
        return default if self.chained is None else self.chained


class Format(Protocol):
    """How one kind of lines is read."""

    unit_tokens: int

    def read(self, line: bytes) -> TraceRequest | None:
        """The line's request; None for a line that is none."""


class Mooncake:
    """``timestamp`` (ms), ``input_length``, ``output_length``, ``hash_ids``; ``session_id`` may be.

    Released with Mooncake (FAST'25): ids are chained, one for 512 tokens.
    """

    def __init__(self, options: ReadOptions) -> None:
        self.unit_tokens = options.unit(512)
        self._chained = options.is_chained(True)
        self._fresh = Fresh()

    def read(self, line: bytes) -> TraceRequest:
        """One request a line."""
        found = json_object(line)
        tokens = count(found, "input_length")
        units = unit_ids(
            found, "hash_ids", tokens, self.unit_tokens, chained=self._chained, fresh=self._fresh
        )
        return TraceRequest(
            number(found, "timestamp") / 1000,
            units,
            tokens,
            count(found, "output_length"),
            session=optional_text(found, "session_id"),
        )


class Bailian:
    """Qwen-Bailian's anonymised traces: ``timestamp`` (s), ``chat_id``, ``parent_chat_id``, ….

    Its ids are hashes of 16 tokens each, by what is published of them without what comes before:
    they are chained here, which leaves ids that are chained already as they were, but for names.
    A session has the name of its first chat.
    """

    def __init__(self, options: ReadOptions) -> None:
        self.unit_tokens = options.unit(16)
        self._chained = options.is_chained(False)
        self._fresh = Fresh()
        self._roots: OrderedDict[str, str] = OrderedDict()

    def read(self, line: bytes) -> TraceRequest:
        """One request a line."""
        found = json_object(line)
        tokens = count(found, "input_length")
        units = unit_ids(
            found, "hash_ids", tokens, self.unit_tokens, chained=self._chained, fresh=self._fresh
        )
        time, output = number(found, "timestamp"), count(found, "output_length")
        chat, parent = optional_text(found, "chat_id"), optional_text(found, "parent_chat_id")
        turn = count(found, "turn", 0) if found.get("turn") is not None else None
        kind = optional_text(found, "type") or ""
        if parent == "-1":
            parent = None
        return TraceRequest(
            time,
            units,
            tokens,
            output,
            session=self._session(chat, parent),
            parent=parent,
            turn=turn,
            kind=kind,
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
    """``TIMESTAMP,ContextTokens,GeneratedTokens``: lengths alone.

    What prompts have in common is not in these files, so each has ids of its own: nothing can be
    reused. They tell of load, not of caches.
    """

    COLUMNS = ("timestamp", "contexttokens", "generatedtokens")

    def __init__(self, options: ReadOptions) -> None:
        self.unit_tokens = options.unit(512)
        self._fresh = Fresh()

    def read(self, line: bytes) -> TraceRequest | None:
        """One request a line; None for the header."""
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
        units = self._fresh.ids(units_of(tokens, self.unit_tokens))
        return TraceRequest(self._seconds(columns[0]), units, tokens, output)

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
