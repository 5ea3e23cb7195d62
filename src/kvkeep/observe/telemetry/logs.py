"""Logs: one line a record, as JSON or text, with secrets redacted and characters visible."""

from __future__ import annotations

import json
import logging
import math
import re
import time
from typing import TYPE_CHECKING, Any, Final, Literal

from kvkeep.core.errors import InvalidValue
from kvkeep.observe.telemetry.labels import visible

if TYPE_CHECKING:
    from collections.abc import Callable

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
# Attributes of every log record; others came with ``extra``.
_OWN = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}
_OURS = frozenset({"time", "level", "logger", "message", "error", "stack"})


def redact(text: str) -> str:
    """Return ``text`` without secrets, which are recognised by their position; cut if too long.

    These are passwords in URLs, values of Authorization and API key headers, bearer tokens, and
    URL parameters with the name of a secret. Cost: a few passes.
    """
    if len(text) > _LONGEST:
        text = f"{text[:_LONGEST]}…"
    for pattern, instead in _SECRETS:
        text = pattern.sub(instead, text)
    return text


class JSONLines(logging.Formatter):
    """Formats a record as one JSON object in one line of ASCII, so that no text breaks the line.

    Fields: ``time`` (UTC), ``level``, ``logger``, ``message``, those of ``extra``, and ``error`` or
    ``stack`` if there is one. A field of ``extra`` with one of these names becomes "extra.name".
    """

    def format(self, record: logging.LogRecord) -> str:
        """Return the line, without its end."""
        fields: dict[str, Any] = {
            "time": _utc(record.created),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": redact(_message(record)),
        }
        for name, value in vars(record).items():
            if name not in _OWN:
                fields[f"extra.{name}" if name in _OURS else name] = _field(name, value)
        if (error := _error(self, record)) is not None:
            fields["error"] = redact(error)
        if record.stack_info:
            fields["stack"] = redact(record.stack_info)
        return json.dumps(fields, ensure_ascii=True, allow_nan=False)


class Plain(logging.Formatter):
    """A record as a line for people; the lines of an exception follow."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(message)s")

    def format(self, record: logging.LogRecord) -> str:
        """Return the line, without its end."""
        line = f"{self.formatTime(record)} {record.levelname} {visible(redact(_message(record)))}"
        for more in (_error(self, record), record.stack_info):
            if more:
                line += "".join(f"\n{visible(part)}" for part in redact(more).split("\n"))
        return line


def configure(level: str = "info", form: Literal["text", "json"] = "text") -> None:
    """Let all loggers of this process write to stderr.

    For the main function of a command. Logging that is configured already stays, as with
    `logging.basicConfig`. Raises `InvalidValue` for an unknown form or level.
    """
    forms: dict[str, Callable[[], logging.Formatter]] = {"text": Plain, "json": JSONLines}
    if form not in forms:
        raise InvalidValue(f"logs are written as {' or '.join(forms)}, got {form!r}")
    number = logging.getLevelNamesMapping().get(level.upper())
    if number is None:
        raise InvalidValue(f"{level!r} is no level of logs; debug, info, warning or error is")
    handler = logging.StreamHandler()
    handler.setFormatter(forms[form]())
    logging.basicConfig(level=number, handlers=[handler])


def _utc(seconds: float) -> str:
    whole, rest = divmod(int(seconds * 1000), 1000)
    return f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(whole))}.{rest:03d}Z"


def _message(record: logging.LogRecord) -> str:
    try:
        return record.getMessage()
    except Exception as error:  # noqa: BLE001 - a bad argument must not lose the message
        return f"{record.msg!s} (its arguments do not fit: {type(error).__name__})"


def _error(formatter: logging.Formatter, record: logging.LogRecord) -> str | None:
    if record.exc_info and record.exc_info[0] is not None:
        return formatter.formatException(record.exc_info)
    return record.exc_text


def _field(name: str, value: Any, depth: int = 0) -> Any:
    """Return ``value`` for JSON; hide it if ``name`` is that of a secret."""
    if _SECRET_NAME.search(name):
        return HIDDEN
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return redact(value)
    if isinstance(value, int):
        # Python refuses to print the digits of a very long integer.
        return int(value) if value.bit_length() <= _LONGEST_INT else hex(value)[:_LONGEST_INT]
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else str(value)
    if depth < _DEEPEST and isinstance(value, dict):
        return {str(key): _field(str(key), one, depth + 1) for key, one in value.items()}
    if depth < _DEEPEST and isinstance(value, list | tuple):
        return [_field(name, one, depth + 1) for one in value]
    try:
        return redact(repr(value))
    except Exception as error:  # noqa: BLE001 - logging must not fail
        return f"<{type(value).__name__}: {type(error).__name__}>"
