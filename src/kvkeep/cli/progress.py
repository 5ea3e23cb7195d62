"""Progress bars on stderr: shown where stderr is a terminal and rich is installed."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from kvkeep.core.errors import MissingExtra, require

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["bytes_progress", "progress"]


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
