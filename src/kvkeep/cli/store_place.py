"""Shared by the actions of ``kvkeep store``: an open tier, its records, and columns of text."""

from __future__ import annotations

import os
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from kvkeep.cli.progress import bytes_progress
from kvkeep.core.errors import InvalidValue
from kvkeep.core.keys import SPACE_BYTES
from kvkeep.store.backends import TierURL
from kvkeep.store.backends.disk import DiskBackend
from kvkeep.store.tiers import TIER_OPTIONS, open_backend

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from kvkeep.store.backends import Backend, Listed
    from kvkeep.store.backends.disk import LastBudget

__all__ = [
    "CommandResult",
    "NamespaceRecords",
    "OpenTier",
    "age",
    "columns",
    "opened",
    "remove",
    "spaces_of",
]

_BATCH = 64  # records per call that deletes


class CommandResult(NamedTuple):
    """The result of an action: as JSON, as lines of text, and as an exit code."""

    json: dict[str, object]
    lines: list[str]
    code: int = 0


class OpenTier(NamedTuple):
    """An open tier, and its URL without secrets."""

    url: str
    backend: Backend

    def records(self) -> list[Listed]:
        """List all records."""
        with bytes_progress(f"listing {self.url}") as advance:
            found = []
            for listed in self.backend.list():
                found.append(listed)
                advance(1)
            return found

    @property
    def quarantined(self) -> int | None:
        """Number of records in quarantine; None for a backend that deletes bad records."""
        url = TierURL(self.url)
        return len(os.listdir(Path(url.path, "quarantine"))) if url.scheme == "file" else None

    @property
    def odd(self) -> int:
        """Number of files that are no records, as of the last listing."""
        return getattr(self.backend, "odd", 0)  # only the backend of directories has this attribute

    @property
    def last_budget(self) -> LastBudget | None:
        """The budget that a store last opened the tier with; None: it is not known."""
        return self.backend.last_budget() if isinstance(self.backend, DiskBackend) else None

    @property
    def is_raw(self) -> bool:
        """Whether records have no headers: shared memory that stores have in front."""
        return getattr(self.backend, "is_raw", False)  # only that of shared memory has it


class NamespaceRecords(NamedTuple):
    """The records of one namespace; times in Unix seconds."""

    name: str
    records: list[Listed]

    @property
    def bytes(self) -> int:
        """Size of all its records."""
        return sum(record.size for record in self.records)

    @property
    def newest(self) -> float:
        """Latest use of any record."""
        return max(record.used for record in self.records)

    @property
    def oldest(self) -> float:
        """Last use of the least recently used record."""
        return min(record.used for record in self.records)


@contextmanager
def opened(text: str) -> Iterator[OpenTier]:
    """Open an existing tier. Raises `InvalidValue` if there is none at the URL."""
    url = TierURL(text)
    if url.scheme == "memory":
        raise InvalidValue(
            f"{url.safe} is memory of the process that uses it; ask that server (GET /kv/stats)"
        )
    if url.scheme == "file" and not url.place:
        if not Path(url.path).is_dir():
            raise InvalidValue(f"{url.path} is no directory: no tier is there")
        if not any(Path(url.path).iterdir()):  # opening it would create a tier there
            raise InvalidValue(f"{url.path} is an empty directory: no tier is there")
    timeout = url.seconds("timeout")
    if url.scheme == "shm":  # its size is not needed, and must not make an arena
        url = _existing(url, text)
    for option in TIER_OPTIONS:
        url.text(option)  # read and ignored, so that the URL of a store can be used as it is
    with open_backend(url) as backend:
        url.finish()
        backend.timeout = timeout or backend.timeout
        if isinstance(backend, DiskBackend):
            backend.inspecting = True  # only `verify --repair` moves a record
        yield OpenTier(url.safe, backend)


def _existing(url: TierURL, text: str) -> TierURL:
    """Return the URL of a shared arena without its size, so that it is only opened."""
    _, question, options = text.partition("?")
    kept = [part for part in options.split("&") if part and not part.startswith("size=")]
    without = TierURL(f"shm://{question * bool(kept)}{'&'.join(kept)}")
    without.safe = url.safe
    without.seconds("timeout")
    return without


def spaces_of(records: Iterable[Listed]) -> list[NamespaceRecords]:
    """Group records by namespace, the most recently used namespace first."""
    by_name: dict[bytes, list[Listed]] = {}
    for record in records:
        by_name.setdefault(record.block[:SPACE_BYTES], []).append(record)
    spaces = [NamespaceRecords(name.hex(), inside) for name, inside in by_name.items()]
    return sorted(spaces, key=lambda space: space.newest, reverse=True)


def remove(place: OpenTier, records: Sequence[Listed]) -> int:
    """Delete records, with a progress bar; return the bytes that were freed."""
    freed = 0
    with bytes_progress("removing", of=sum(record.size for record in records)) as advance:
        for start in range(0, len(records), _BATCH):
            some = records[start : start + _BATCH]
            freed += place.backend.delete([record.block for record in some])
            advance(sum(record.size for record in some))
    return freed


def age(used: float, now: float | None = None) -> str:
    """Return the time since ``used`` in its largest unit: ``"12 s"``, ``"5 min"``, ``"3 h"``."""
    seconds = max(0, int((time.time() if now is None else now) - used))
    for unit, length in (("d", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds // length:,} {unit}"
    return f"{seconds} s"


def columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Align rows: the first column left, all others right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if at else cell.ljust(width)
            for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
