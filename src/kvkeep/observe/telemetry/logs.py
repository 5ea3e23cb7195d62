"""Logs: one line a record, as JSON or for people, with secrets taken out and nothing hidden."""

from __future__ import annotations

import json
import logging
import math
import re
import sys
import time
from typing import TYPE_CHECKING, Any, Final, Literal

from kvkeep.core.errors import InvalidValue
from kvkeep.observe.telemetry.labels import visible

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import TextIO

__all__ = ["JSONLines", "Plain", "configure", "redact"]

HIDDEN: Final = "***"

_LONGEST = 16_384  # characters of a text
_LONGEST_INT = 1024
_DEEPEST = 4
_SECRET_NAME = re.compile(
    r"(?i)authorization|cookie|password|passwd|secret|api[-_]?key|private[-_]?key|access[-_]?key"
    r"|(?:^|[-_])token$|credential"
)
_SECRETS: Final[tuple[tuple[re.Pattern[str], str], ...]] = (
    # scheme://user:password@host, the user may be empty
    (re.compile(r"(://[^\s/@:]*):[^\s/]*@"), rf"\1:{HIDDEN}@"),
    # Authorization: Bearer …, "x-api-key": "…"
    (
        re.compile(
            r"(?i)\b((?:proxy-)?authorization|(?:x-)?api[-_]?key)(['\"]?\s{0,8}[:=]\s{0,8}['\"]?)"
            r"(?:(?:bearer|basic|token)\s{1,8})?[^\s'\",;&]+"
        ),
        rf"\1\2{HIDDEN}",
    ),
    (re.compile(r"(?i)\b(bearer|basic)\s{1,8}[\w.~+/=-]{6,}"), rf"\1 {HIDDEN}"),
    # ?password=…&secret=…
    (
        re.compile(
            r"(?i)([?&](?:[\w-]{0,32}(?:password|passwd|secret|token|key|signature|credential))=)"
            r"[^&\s'\"]+"
        ),
        rf"\1{HIDDEN}",
    ),
)
# What a record has by itself; the rest came with ``extra``.
_OWN = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}
_OURS = frozenset({"time", "level", "logger", "message", "error", "stack"})


def redact(text: str) -> str:
    """``text`` without the secrets that can be told by their place.

    Passwords in URLs, values of Authorization and API key headers, bearer tokens, and parameters
    of URLs named after a secret. Long texts are cut. Cost: a few passes.
    """
    if len(text) > _LONGEST:
        text = f"{text[:_LONGEST]}…"
    for pattern, instead in _SECRETS:
        text = pattern.sub(instead, text)
    return text


class JSONLines(logging.Formatter):
    """A record as one JSON object in one line of ASCII, so that no text of others breaks out of it.

    ``time`` (UTC), ``level``, ``logger``, ``message``, the fields of ``extra``, and ``error`` or
    ``stack`` where there is one. A field named like one of these has "extra." before its name.
    """

    def format(self, record: logging.LogRecord) -> str:
        """The line, without its end."""
        told: dict[str, Any] = {
            "time": _utc(record.created),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": redact(_message(record)),
        }
        for name, value in vars(record).items():
            if name not in _OWN:
                told[f"extra.{name}" if name in _OURS else name] = _field(name, value)
        if (error := _error(self, record)) is not None:
            told["error"] = redact(error)
        if record.stack_info:
            told["stack"] = redact(record.stack_info)
        return json.dumps(told, ensure_ascii=True, allow_nan=False)


class Plain(logging.Formatter):
    """A record as a line for people; the lines of an exception follow."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(message)s")

    def format(self, record: logging.LogRecord) -> str:
        """The line, without its end."""
        told = f"{self.formatTime(record)} {record.levelname} {visible(redact(_message(record)))}"
        for more in (_error(self, record), record.stack_info):
            if more:
                told += "".join(f"\n{visible(line)}" for line in redact(more).split("\n"))
        return told


def configure(
    level: str = "info", form: Literal["text", "json"] = "text", stream: TextIO | None = None
) -> None:
    """Let all loggers of this process write to ``stream`` (default: stderr); for a command's main.

    A process whose logging is configured already keeps it, as with `logging.basicConfig`.
    Raises `InvalidValue` for a form or a level that there is not.
    """
    forms: dict[str, Callable[[], logging.Formatter]] = {"text": Plain, "json": JSONLines}
    if form not in forms:
        raise InvalidValue(f"logs are written as {' or '.join(forms)}, got {form!r}")
    number = logging.getLevelNamesMapping().get(level.upper())
    if number is None:
        raise InvalidValue(f"{level!r} is no level of logs; debug, info, warning or error is")
    handler = logging.StreamHandler(sys.stderr if stream is None else stream)
    handler.setFormatter(forms[form]())
    logging.basicConfig(level=number, handlers=[handler])


def _utc(seconds: float) -> str:
    whole, rest = divmod(int(seconds * 1000), 1000)
    return f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(whole))}.{rest:03d}Z"


def _message(record: logging.LogRecord) -> str:
    try:
        return record.getMessage()
    except Exception as error:  # noqa: BLE001 - what goes wrong with others' arguments is told
        return f"{record.msg!s} (its arguments do not fit: {type(error).__name__})"


def _error(formatter: logging.Formatter, record: logging.LogRecord) -> str | None:
    if record.exc_info and record.exc_info[0] is not None:
        return formatter.formatException(record.exc_info)
    return record.exc_text


def _field(name: str, value: Any, depth: int = 0) -> Any:
    """``value`` as JSON can say it; what is named after a secret is hidden."""
    if _SECRET_NAME.search(name):
        return HIDDEN
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return redact(value)
    if isinstance(value, int):
        # Digits of a very long number are refused by Python itself.
        return int(value) if value.bit_length() <= _LONGEST_INT else hex(value)[:_LONGEST_INT]
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else str(value)
    if depth < _DEEPEST and isinstance(value, dict):
        return {str(key): _field(str(key), one, depth + 1) for key, one in value.items()}
    if depth < _DEEPEST and isinstance(value, list | tuple):
        return [_field(name, one, depth + 1) for one in value]
    try:
        return redact(repr(value))
    except Exception as error:  # noqa: BLE001 - a log line is no place to fail in
        return f"<{type(value).__name__}: {type(error).__name__}>"
