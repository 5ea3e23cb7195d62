"""Output of commands: aligned facts, tables, lines of `rich`, progress, a checked stdout."""

from __future__ import annotations

import os
import sys
from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from kvkeep.core.errors import MissingExtra, reason, require

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from rich.console import Console
    from rich.text import Text

__all__ = [
    "OutputFailed",
    "bytes_progress",
    "checked_stdout",
    "console",
    "drop_output",
    "print_facts",
    "print_lines",
    "print_table",
    "progress",
]


def print_facts(title: str, rows: Sequence[tuple[str, str]]) -> None:
    """Print a title and rows of name and value; as plain text where rich is not installed."""
    try:
        require("rich.table", "cli")
    except MissingExtra:
        names, values = zip(*rows, strict=True)
        print(title)
        for name, value in rows:
            print(f"  {name:<{max(map(len, names))}}  {value:>{max(map(len, values))}}")
        return
    from rich.console import Console  # noqa: PLC0415 - optional
    from rich.table import Table  # noqa: PLC0415
    from rich.text import Text  # noqa: PLC0415

    table = Table(show_header=False)
    table.add_column()
    table.add_column(justify="right")
    for row in rows:
        table.add_row(*map(Text, row))  # a name may come from a file: no markup
    console = Console(highlight=False)
    console.print(title, markup=False, soft_wrap=True)
    console.print(table)


def print_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table with names in its first column; as plain text where rich is not installed."""
    try:
        rich = require("rich.table", "cli")
        screen = require("rich.console", "cli").Console()
        box = require("rich.box", "cli").SIMPLE_HEAD
        text = require("rich.text", "cli").Text  # a cell may come from a file: no markup
    except MissingExtra:
        widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
        for name, *cells in (head, *rows):
            numbers = (f"{cell:>{width}}" for cell, width in zip(cells, widths[1:], strict=True))
            print(f"{name:<{widths[0]}}  {'  '.join(numbers)}".rstrip())
        return
    table = rich.Table(box=box, pad_edge=False, padding=(0, 1, 0, 0))
    for place, name in enumerate(head):
        table.add_column(name, justify="right" if place else "left")
    for row in rows:
        table.add_row(*map(text, row))
    screen.print(table)


def console(*, live: bool = False) -> Console:
    """Return a console for stdout that does not interpret markup."""
    stream = sys.stdout
    if (stream.encoding or "").lower().replace("-", "") not in {"utf8", "utf8sig"}:
        # Where the encoding lacks block characters, print question marks instead of a traceback.
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="replace")
    made: Console = require("rich.console", "cli").Console(
        highlight=False, markup=False, emoji=False, soft_wrap=not live
    )
    return made


def print_lines(screen: Console, lines: Iterable[Text]) -> None:
    """Print lines without trailing spaces; none is wrapped."""
    for line in lines:
        line.rstrip()
        screen.print(line, soft_wrap=True)


@contextmanager
def progress(
    doing: str, *, of: int | None = None, remaining: bool = False
) -> Iterator[Callable[..., object]]:
    """Show the activity ``doing`` and how many of its ``of`` steps are done.

    Yields a function to call after each step, or with a number of steps. Without ``of`` the bar
    only moves. With ``remaining`` it also shows the share done and the time left.
    """
    rich = _rich()
    if rich is None:
        yield lambda _steps=1: None
        return
    columns = [rich.TextColumn("{task.description}"), rich.BarColumn(), rich.TimeElapsedColumn()]
    if remaining:
        columns[2:] = [rich.TaskProgressColumn(), columns[2], rich.TimeRemainingColumn()]
    with _shown(rich, columns, doing, of) as advance:
        yield advance


@contextmanager
def bytes_progress(doing: str, *, of: int | None = None) -> Iterator[Callable[[int], object]]:
    """Show how many of ``of`` bytes are done.

    Yields a function to call with each further number of bytes; without ``of``, of records.
    """
    rich = _rich()
    if rich is None:
        yield lambda _: None
        return
    columns = [rich.TextColumn("{task.description}", markup=False)]
    if of is None:
        columns += [rich.SpinnerColumn(), rich.TextColumn("{task.completed:,} records")]
    else:
        columns += [
            rich.BarColumn(),
            rich.DownloadColumn(binary_units=True),
            rich.TransferSpeedColumn(),
            rich.TimeRemainingColumn(),
        ]
    with _shown(rich, columns, doing, of) as advance:
        yield advance


def _rich() -> Any:
    try:
        return require("rich.progress", "cli") if sys.stderr.isatty() else None
    except MissingExtra:
        return None  # progress is optional


@contextmanager
def _shown(
    rich: Any, columns: list[Any], doing: str, of: int | None
) -> Iterator[Callable[..., object]]:
    console = require("rich.console", "cli").Console(stderr=True)
    with rich.Progress(*columns, console=console, transient=True) as bars:
        yield partial(bars.advance, bars.add_task(doing, total=of))


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
