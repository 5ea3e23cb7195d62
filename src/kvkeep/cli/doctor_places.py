"""The places of tiers, as ``kvkeep doctor`` opens them: nothing is left of that."""

from __future__ import annotations

import os
import tempfile
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final, cast

from kvkeep.core.errors import BackendFailed, reason
from kvkeep.core.geometry.units import parse_bytes
from kvkeep.store.backends import TierURL
from kvkeep.store.backends.disk import DiskBackend
from kvkeep.store.backends.shm import ShmBackend
from kvkeep.store.backends.valkey import ValkeyBackend
from kvkeep.store.tiers import TIER_OPTIONS, open_backend

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvkeep.store.backends import Backend
    from kvkeep.store.backends.disk import Io, Sync

__all__ = ["OpenPlace", "opened_place"]

_PREFIX: Final = ".kvkeep-doctor-"
_EXPIRES_S: Final = 120.0  # records on servers, if the doctor is killed


@dataclass(frozen=True)
class OpenPlace:
    """The open place of a tier.

    Attributes:
        name: its URL, without secrets.
        scheme: of the URL.
        backend: to write to; None where a probe would take memory that is not there yet.
        capacity: bytes that the tier may hold; None: no budget.
        used: bytes that are there.
        path: a directory on its filesystem; None if it has none here.
        note: what was noticed when it was opened, to be put behind other words.
        own: whether the directory is a store already.
        expires: whether the server is told when records expire.
    """

    name: str
    scheme: str
    backend: Backend | None
    capacity: int | None
    used: int = 0
    path: Path | None = None
    note: str = ""
    own: bool = False
    expires: bool = False

    def forget(self, space: bytes) -> None:
        """Remove what a backend leaves of a namespace whose records were deleted."""
        if self.own and self.path is not None:
            with suppress(OSError):  # it was not made, or the backend removed it
                (self.path / space.hex()).rmdir()


@contextmanager
def opened_place(text: str) -> Iterator[OpenPlace]:
    """Open the place of the tier ``text``, whose URL was checked.

    Raises:
        InvalidValue: it cannot be a tier, as it is.
        BackendFailed: it failed.
        OSError: so did the system.
    """
    url = TierURL(text)
    timeout = url.seconds("timeout")
    for option in TIER_OPTIONS:
        url.text(option)
    kinds = {"file": _directory, "memory": _memory, "shm": _arena}
    kind = kinds.get(url.scheme, _server)
    with kind(url) as place:
        if place.backend is not None and timeout is not None:
            place.backend.timeout = timeout
        yield place


@contextmanager
def _directory(url: TierURL) -> Iterator[OpenPlace]:
    """Open a directory of records; one that is not there yet is tried at its place."""
    capacity = url.size("size")
    sync, io = cast("Sync", url.text("sync", "flush")), cast("Io", url.text("io", "auto"))
    root = Path(os.path.realpath(url.path))
    if root.is_dir() and any(root.iterdir()):
        with DiskBackend(root, None, sync, io) as backend:  # the probe is small: see `TierProbe`
            last = backend.last_budget() if capacity is None else None
            size = capacity if last is None else last.bytes
            yield OpenPlace(url.safe, url.scheme, backend, size, backend.used(), root, own=True)
        return
    above = next(one for one in (root, *root.parents) if one.exists())
    if not above.is_dir():
        raise BackendFailed(f"{root} cannot hold records: {above} is no directory")
    note = "" if root.is_dir() else f" in {above}; the directory is not there yet"
    try:
        own = tempfile.TemporaryDirectory(prefix=_PREFIX, dir=above)
    except OSError as error:
        raise BackendFailed(f"{above} cannot be written to: {reason(error)}") from error
    with own as place, DiskBackend(place, None, sync, io) as backend:
        yield OpenPlace(url.safe, url.scheme, backend, capacity, 0, above, note)


@contextmanager
def _memory(url: TierURL) -> Iterator[OpenPlace]:
    """Open nothing: the machine's memory is checked for all tiers together."""
    size = url.size("size") or parse_bytes(url.place)
    yield OpenPlace(url.safe, url.scheme, None, size, note="memory of the engine's process")


@contextmanager
def _arena(url: TierURL) -> Iterator[OpenPlace]:
    """Open a shared arena that exists; one that does not would take all of its memory."""
    size = parse_bytes(url.place) if url.place else url.size("size")
    directory, name = url.text("dir", "/dev/shm"), url.text("name", "kvkeep")  # noqa: S108
    assert directory is not None
    assert name is not None
    path = Path(directory, f"kvkeep-{os.geteuid()}-{name}")
    if path.exists():
        with ShmBackend(None, name=name, directory=directory) as backend:
            note = f"the arena is there, with {backend.used() or 0:,} bytes in use"
            yield OpenPlace(
                url.safe, url.scheme, None, backend.capacity, backend.capacity, note=note
            )
        return
    if not os.access(directory, os.W_OK | os.X_OK):
        raise BackendFailed(f"{directory} cannot hold the arena: Permission denied")
    note = "the arena is not there yet"
    yield OpenPlace(url.safe, url.scheme, None, size, 0, Path(directory), note)


@contextmanager
def _server(url: TierURL) -> Iterator[OpenPlace]:
    name, scheme = url.safe, url.scheme
    capacity = url.size("size") if scheme in {"s3", "gs", "az"} else None
    backend, expires = open_backend(url), False
    if isinstance(backend, ValkeyBackend):
        expires = backend.options.expire is not None
        backend.close()
        backend = ValkeyBackend(replace(backend.options, expire=_EXPIRES_S))
    with backend:
        yield OpenPlace(name, scheme, backend, capacity or backend.capacity, expires=expires)
