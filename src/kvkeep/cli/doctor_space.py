"""Checks of ``kvkeep doctor`` on space: budgets, against what disks and servers have."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Final

from kvkeep.cli.doctor_results import fail, ok, warn
from kvkeep.core.geometry.units import format_bytes
from kvkeep.store.backends.valkey import ValkeyBackend

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from kvkeep.cli.doctor_places import OpenPlace
    from kvkeep.cli.doctor_results import CheckResult

__all__ = ["space_results"]

_SPARE: Final = 256 << 20  # bytes of shared memory that an arena leaves to others
_SHARE: Final = 0.8  # of the free space that a directory takes without size=
_KEPT: Final = 0.95  # of a disk that a budget may take: a full one is slow


def space_results(
    place: OpenPlace, record_bytes: int, claimed: dict[int, int]
) -> Iterator[CheckResult]:
    """Yield results on the space of a tier with records of ``record_bytes``.

    ``claimed`` has by filesystem the bytes that tiers before may still write there; those of this
    tier are added.
    """
    if place.capacity is not None and record_bytes > place.capacity:
        said = (
            f"a record of {format_bytes(record_bytes)}, and {format_bytes(place.capacity)} in all"
        )
        yield fail("space", place.name, said, "give a larger size: no block fits")
    if isinstance(place.backend, ValkeyBackend):
        yield from _server(place, place.backend)
    elif place.path is not None:
        yield from _filesystem(place, place.path, record_bytes, claimed)
    elif place.capacity is None:
        yield warn("space", place.name, "there is no size=, so kvkeep evicts nothing there",
                   "give size=, or let the bucket delete old objects")  # fmt: skip


def _filesystem(
    place: OpenPlace, path: Path, record_bytes: int, claimed: dict[int, int]
) -> Iterator[CheckResult]:
    found = os.statvfs(path)
    device = os.stat(path).st_dev
    free = found.f_bavail * found.f_frsize - claimed.get(device, 0)
    said = f"{format_bytes(max(0, free))} are free on its filesystem"
    if device in claimed:
        said += ", besides what tiers above may take"
    if place.capacity is None:
        said = f"there is no size=: it will keep to {_SHARE:.0%} of what is free then; {said}"
        yield warn("space", place.name, said, "give size=, such as the share of this disk that is "
                   "for KV")  # fmt: skip
        return
    more = max(0, place.capacity - place.used)
    claimed[device] = claimed.get(device, 0) + more
    if place.scheme == "shm":
        more += _SPARE
    said = (
        f"a budget of {format_bytes(place.capacity)}, of which {format_bytes(place.used)} are "
        f"used; {said}"
    )
    if more > free:
        proposed = _proposed(max(0, free) + place.used)
        yield fail("space", place.name, said, f"make room, or give size={proposed}")
    else:
        yield ok("space", place.name, said)
    if place.scheme == "file" and found.f_files:  # some filesystems have no fixed number
        yield _files(place.name, more // record_bytes, found.f_favail)


def _files(name: str, records: int, free: int) -> CheckResult:
    said = f"{records:,} more records fit into the budget, a file each; {free:,} inodes are free"
    if records > free:
        return fail("space", name, said, "make the filesystem with more inodes (mkfs -i), or store "
                    "larger blocks")  # fmt: skip
    return ok("space", name, said)


def _proposed(free: int) -> str:
    """Return a size for ``size=``, with some of the disk left free."""
    for unit, scale in (("GiB", 1 << 30), ("MiB", 1 << 20)):
        if free * _KEPT >= scale:
            return f"{int(free * _KEPT) // scale}{unit}"
    return "1MiB"


def _server(place: OpenPlace, backend: ValkeyBackend) -> Iterator[CheckResult]:
    for memory in backend.memory():
        about = f"{place.name}, {memory.node}"
        said = f"{format_bytes(memory.used)} used, maxmemory-policy {memory.policy}"
        if not memory.limit:
            yield warn("space", about, f"{said}, and no maxmemory", "set maxmemory, and "
                       "maxmemory-policy allkeys-lru: without it the server grows until its "
                       "machine has no memory left")  # fmt: skip
            continue
        said = f"{format_bytes(memory.limit)} maxmemory, {said}"
        if memory.policy == "noeviction":
            yield warn("space", about, said, "set maxmemory-policy allkeys-lru: with noeviction a "
                       "full server takes no more blocks")  # fmt: skip
        elif memory.policy.startswith("volatile-") and not place.expires:
            yield warn("space", about, said, "set maxmemory-policy allkeys-lru, or give expire=: "
                       "with volatile-* only keys with an expiry are evicted")  # fmt: skip
        else:
            yield ok("space", about, said)
