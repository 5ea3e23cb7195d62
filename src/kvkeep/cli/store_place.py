"""What the actions of ``kvkeep store`` share: a tier that is open, its records, and bars."""

from __future__ import annotations

import os
import sys
import time
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from kvkeep.core.errors import InvalidValue, MissingExtra, require
from kvkeep.core.keys import SPACE_BYTES
from kvkeep.store.backends import TierURL
from kvkeep.store.tiers import TIER_OPTIONS, open_backend

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from kvkeep.store.backends import Backend, Listed

__all__ = [
    "CommandResult",
    "NamespaceRecords",
    "OpenTier",
    "age",
    "bar",
    "columns",
    "opened",
    "remove",
    "spaces_of",
]

_AT_ONCE = 64


class CommandResult(NamedTuple):
    """What an action found: for programs, for people, and as an exit code."""

    json: dict[str, object]
    lines: list[str]
    code: int = 0


class OpenTier(NamedTuple):
    """A tier that is open, and its URL without secrets."""

    url: str
    backend: Backend

    def records(self) -> list[Listed]:
        """All that is there now."""
        with bar(f"listing {self.url}") as advance:
            found = []
            for listed in self.backend.list():
                found.append(listed)
                advance(1)
            return found

    @property
    def quarantined(self) -> int | None:
        """Records that were found bad and lie aside; None where they are simply deleted."""
        url = TierURL(self.url)
        return len(os.listdir(Path(url.path, "quarantine"))) if url.scheme == "file" else None

    @property
    def odd(self) -> int:
        """What lay among the records when they were last listed, and is none."""
        return getattr(self.backend, "odd", 0)  # a directory may have such


class NamespaceRecords(NamedTuple):
    """The records of one namespace; times in Unix seconds."""

    name: str
    records: list[Listed]

    @property
    def bytes(self) -> int:
        """Of all its records."""
        return sum(record.size for record in self.records)

    @property
    def newest(self) -> float:
        """When one of them was used last."""
        return max(record.used for record in self.records)

    @property
    def oldest(self) -> float:
        """When the one that nobody used for longest was used last."""
        return min(record.used for record in self.records)


@contextmanager
def opened(text: str) -> Iterator[OpenTier]:
    """Open a tier that exists. Raises `InvalidValue` where there is none to look at."""
    url = TierURL(text)
    if url.scheme == "memory":
        raise InvalidValue(
            f"{url.safe} is memory of the process that uses it; ask that one (GET /kv/stats)"
        )
    if url.scheme == "file" and not url.place:
        if not Path(url.path).is_dir():
            raise InvalidValue(f"{url.path} is no directory: nothing was stored there")
        if not any(Path(url.path).iterdir()):  # opening it would make it a store's, and ours alone
            raise InvalidValue(f"{url.path} is an empty directory: nothing was stored there")
    timeout = url.seconds("timeout")
    for option in TIER_OPTIONS:
        url.text(option)  # of no matter here: a URL can be given as the store has it
    with open_backend(url) as backend:
        url.finish()
        backend.timeout = timeout or backend.timeout
        yield OpenTier(url.safe, backend)


def spaces_of(records: Iterable[Listed]) -> list[NamespaceRecords]:
    """Records by namespace, what was used last first."""
    by_name: dict[bytes, list[Listed]] = {}
    for record in records:
        by_name.setdefault(record.block[:SPACE_BYTES], []).append(record)
    spaces = [NamespaceRecords(name.hex(), inside) for name, inside in by_name.items()]
    return sorted(spaces, key=lambda space: space.newest, reverse=True)


def remove(place: OpenTier, records: Sequence[Listed]) -> int:
    """Delete them, with a bar; the bytes that were freed."""
    freed = 0
    with bar("removing", of=sum(record.size for record in records)) as advance:
        for start in range(0, len(records), _AT_ONCE):
            some = records[start : start + _AT_ONCE]
            freed += place.backend.delete([record.block for record in some])
            advance(sum(record.size for record in some))
    return freed


@contextmanager
def bar(doing: str, *, of: int | None = None) -> Iterator[Callable[[int], object]]:
    """Show on stderr, where that is a terminal, how many of the ``of`` bytes are done.

    Call what it gives with each more bytes; without a number to come to, with each more records.
    """
    try:
        rich = require("rich.progress", "cli") if sys.stderr.isatty() else None
    except MissingExtra:
        rich = None  # the work can be done without being watched
    if rich is None:
        yield lambda _: None
        return
    console = require("rich.console", "cli").Console(stderr=True)
    shown = [rich.TextColumn("{task.description}", markup=False)]
    if of is None:
        shown += [rich.SpinnerColumn(), rich.TextColumn("{task.completed:,} records")]
    else:
        shown += [
            rich.BarColumn(),
            rich.DownloadColumn(binary_units=True),
            rich.TransferSpeedColumn(),
            rich.TimeRemainingColumn(),
        ]
    with rich.Progress(*shown, console=console, transient=True) as progress:
        yield partial(progress.advance, progress.add_task(doing, total=of))


def age(used: float, now: float | None = None) -> str:
    """How long ago that was, in its largest unit: ``"12 s"``, ``"5 min"``, ``"3 h"``, ``"7 d"``."""
    seconds = max(0, int((time.time() if now is None else now) - used))
    for unit, length in (("d", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds // length:,} {unit}"
    return f"{seconds} s"


def columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines in which the columns stand below each other: the first one left, all others right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if at else cell.ljust(width)
            for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
