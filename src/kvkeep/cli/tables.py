"""Output of commands: aligned facts, tables, and lines of `rich`."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from kvkeep.core.errors import MissingExtra, require

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from rich.console import Console
    from rich.text import Text

__all__ = ["console", "print_facts", "print_lines", "print_table"]


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
