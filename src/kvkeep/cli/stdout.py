"""`checked_stdout`: tells a stdout that takes nothing more from failures of other files."""

from __future__ import annotations

import os
import sys
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from kvkeep.core.errors import reason

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["OutputFailed", "checked_stdout", "drop_output"]


class OutputFailed(Exception):
    """Stdout is full, or its disk fails. No `OSError`, which commands take for one of their own."""


class _Stdout:
    """A stream whose failures are `OutputFailed`, except for a reader that has gone."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Write ``text``; return its length."""
        with _output():
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        """Write what is buffered."""
        with _output():
            self._stream.flush()


@contextmanager
def _output() -> Iterator[None]:
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        raise OutputFailed(reason(error)) from error


@contextmanager
def checked_stdout() -> Iterator[None]:
    """Within, and at the end, a failure to write to stdout is `OutputFailed`."""
    stream = sys.stdout
    if stream is None:  # the process was started without
        yield
        return
    sys.stdout = checked = _Stdout(stream)
    try:
        yield
    finally:
        sys.stdout = stream
        checked.flush()


def drop_output() -> None:
    """Drop what is buffered for stdout, which would fail again when the process ends."""
    with suppress(OSError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
