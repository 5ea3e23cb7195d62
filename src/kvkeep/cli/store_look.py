"""``kvkeep store ls``, which only reads a tier."""

from __future__ import annotations

import random
import time
from collections import Counter
from typing import TYPE_CHECKING

from kvkeep.cli.progress import bytes_progress
from kvkeep.cli.store_place import CommandResult, age, columns, spaces_of
from kvkeep.core.errors import BackendFailed
from kvkeep.core.geometry.units import format_bytes
from kvkeep.core.keys import SPACE_BYTES
from kvkeep.store.backends.budget import FileBucket
from kvkeep.store.backends.buffers import aligned
from kvkeep.store.codecs import codec_name
from kvkeep.store.tiers.record import BadRecord, OtherVersion, read_header

if TYPE_CHECKING:
    import argparse

    from kvkeep.cli.store_place import NamespaceRecords, OpenTier
    from kvkeep.store.backends import Listed
    from kvkeep.store.backends.budget import WriteBucket

__all__ = ["ls"]

_SAMPLE = 8  # records to read for their codecs


def ls(place: OpenTier, args: argparse.Namespace) -> CommandResult:
    """List namespaces, with ``--blocks`` their blocks; then budget, codecs and odd files."""
    records = place.records()
    spaces = spaces_of(records)
    codecs = _codecs(place, records)
    last = place.last_budget
    answer: dict[str, object] = {
        "url": place.url,
        "blocks": len(records),
        "bytes": sum(record.size for record in records),
        "used": place.backend.used(),
        "capacity": place.backend.capacity,
        "last_budget": None
        if last is None
        else {"bytes": last.bytes, "given": last.given, "opened": last.opened},
        "write_budget": _write_budget(place.backend.budget),
        "quarantined": place.quarantined,
        "odd": place.odd,
        "codecs": codecs,
        "spaces": [_as_json(space, blocks=args.blocks) for space in spaces],
    }
    return CommandResult(answer, [*_table(place, spaces, args.blocks), *_facts(place, codecs)])


def _write_budget(bucket: WriteBucket | None) -> dict[str, int] | None:
    """Return what the option ``writes=`` of the URL allows; None where processes share nothing."""
    if not isinstance(bucket, FileBucket):
        return None
    bucket.refresh()
    return bucket.state()


def _as_json(space: NamespaceRecords, *, blocks: bool) -> dict[str, object]:
    answer: dict[str, object] = {
        "space": space.name,
        "blocks": len(space.records),
        "bytes": space.bytes,
        "newest": space.newest,
        "oldest": space.oldest,
    }
    if blocks:
        answer["keys"] = [
            {"key": record.block[SPACE_BYTES:].hex(), "bytes": record.size, "used": record.used}
            for record in _latest_first(space)
        ]
    return answer


def _table(place: OpenTier, spaces: list[NamespaceRecords], blocks: bool) -> list[str]:
    if not spaces:
        return [f"{place.url} is empty"]
    now = time.time()
    rows = [("namespace", "blocks", "bytes", "newest use", "oldest use")]
    for space in spaces:
        count, size = f"{len(space.records):,}", format_bytes(space.bytes)
        rows.append((space.name, count, size, age(space.newest, now), age(space.oldest, now)))
    lines = [place.url, *columns(rows)]
    for space in spaces if blocks else ():
        rows = [("block of " + space.name, "", "bytes", "last use", "")]
        for record in _latest_first(space):
            key = record.block[SPACE_BYTES:].hex()
            rows.append((key, "", format_bytes(record.size), age(record.used, now), ""))
        lines += ["", *columns(rows)]
    return lines


def _latest_first(space: NamespaceRecords) -> list[Listed]:
    return sorted(space.records, key=lambda record: record.used, reverse=True)


def _codecs(place: OpenTier, records: list[Listed]) -> dict[str, int]:
    """Return the codecs of some random records that were read, and how many were bad."""
    some = random.sample(records, 0 if place.is_raw else min(_SAMPLE, len(records)))
    counts: Counter[str] = Counter()
    with bytes_progress("reading some records", of=sum(record.size for record in some)) as advance:
        for listed in some:
            try:
                record = place.backend.get(listed.block, aligned)
                if record is not None:
                    counts[codec_name(read_header(record).codec)] += 1
            except OtherVersion:
                counts["of another format version"] += 1
            except BadRecord:
                counts["bad"] += 1
            except BackendFailed:
                place.backend.sizes([listed.block])  # raises if the whole backend fails
                counts["bad"] += 1
            advance(listed.size)
    return dict(counts.most_common())


def _facts(place: OpenTier, codecs: dict[str, int]) -> list[str]:
    lines = []
    if (last := place.last_budget) is not None:
        how = "given as size=" if last.given else "by default, without size="
        lines.append(
            f"budget when last opened: {format_bytes(last.bytes)} ({how}, {age(last.opened)} ago)"
        )
    elif place.backend.capacity is not None:
        lines.append(f"budget: {format_bytes(place.backend.capacity)}")
    if codecs:
        read = ", ".join(f"{count} {name}" for name, count in codecs.items())
        lines.append(f"of {sum(codecs.values())} records read: {read}")
    if place.quarantined:
        lines.append(f"quarantined: {place.quarantined:,}")
    if place.odd:
        lines.append(f"files that are no records: {place.odd:,}")
    return lines
