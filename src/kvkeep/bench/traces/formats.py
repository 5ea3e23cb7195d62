"""Formats of single lines: Mooncake, Qwen-Bailian.

A format object is made for each pass over a file. ``read`` returns the request of a line, with the
time as in the file, or None for a header line, and raises `BadLine`.
"""

from __future__ import annotations

from collections import OrderedDict
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
from kvkeep.bench.traces.request import TraceRequest

if TYPE_CHECKING:
    from kvkeep.bench.traces.request import UnitArray

__all__ = ["Bailian", "Format", "Mooncake"]

_MOST_SESSIONS = 1_000_000  # chats whose session is remembered


class Format(Protocol):
    """Reads the lines of one format."""

    unit_tokens: int

    def read(self, line: bytes) -> TraceRequest | None:
        """Return the request of a line; None for a header."""


class _IdLines:
    """JSON lines with ``input_length`` and ``hash_ids``, the ids of the prompt's units."""

    _CHAINED: bool
    _UNIT: int

    def __init__(self, unit_tokens: int | None) -> None:
        self.unit_tokens = unit_tokens or self._UNIT
        self._fresh = Fresh()

    def _prompt(self, found: dict[str, Any]) -> tuple[UnitArray, int]:
        tokens = count(found, "input_length")
        units = unit_ids(
            found, "hash_ids", tokens, self.unit_tokens, chained=self._CHAINED, fresh=self._fresh
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

    _CHAINED = True
    _UNIT = 512

    def __init__(self, unit_tokens: int | None) -> None:
        super().__init__(unit_tokens)
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

    _CHAINED = False
    _UNIT = 16

    def __init__(self, unit_tokens: int | None) -> None:
        super().__init__(unit_tokens)
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
