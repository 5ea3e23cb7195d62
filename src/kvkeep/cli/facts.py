"""A short table of facts: a name and a value a line."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvkeep.core.errors import MissingExtra, require

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["print_facts"]


def print_facts(title: str, rows: Sequence[tuple[str, str]]) -> None:
    """Print them with rich where it is installed, and the same lines as plain text where not."""
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
        table.add_row(*map(Text, row))  # what names a row may be a file's own word: no markup
    console = Console(highlight=False)
    console.print(title, markup=False, soft_wrap=True)
    console.print(table)
