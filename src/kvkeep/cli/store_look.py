"""``kvkeep store ls`` and ``stat``, which only read a tier."""

from __future__ import annotations

import random
import time
from bisect import bisect_right
from collections import Counter
from typing import TYPE_CHECKING, Any, NamedTuple

from kvkeep.cli.progress import bytes_progress
from kvkeep.cli.store_place import CommandResult, age, columns, spaces_of
from kvkeep.core.errors import BackendFailed, whole
from kvkeep.core.geometry.units import format_bytes
from kvkeep.core.keys import SPACE_BYTES
from kvkeep.store.backends.buffers import aligned
from kvkeep.store.codecs import codec_name
from kvkeep.store.tiers.record import BadRecord, OtherVersion, RecordHeader, read_header

if TYPE_CHECKING:
    import argparse

    from kvkeep.cli.store_place import NamespaceRecords, OpenTier
    from kvkeep.store.backends import Listed

__all__ = ["ls", "stat"]

_AGES: tuple[tuple[str, int | None], ...] = (
    ("under 1 minute", 60), ("1 minute … 1 hour", 3600), ("1 hour … 1 day", 86_400),
    ("1 … 7 days", 7 * 86_400), ("7 … 30 days", 30 * 86_400), ("over 30 days", None),
)  # fmt: skip
_BAR = 30


# --- ls --------------------------------------------------------------------------------------


def ls(place: OpenTier, args: argparse.Namespace) -> CommandResult:
    """List namespaces, and with ``--blocks`` their blocks."""
    spaces = spaces_of(place.records())
    found = [_as_json(space, blocks=args.blocks) for space in spaces]
    return CommandResult(
        {"url": place.url, "spaces": found}, _table(place.url, spaces, args.blocks)
    )


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


def _table(url: str, spaces: list[NamespaceRecords], blocks: bool) -> list[str]:
    if not spaces:
        return [f"{url} is empty"]
    now = time.time()
    rows = [("namespace", "blocks", "bytes", "newest use", "oldest use")]
    for space in spaces:
        count, size = f"{len(space.records):,}", format_bytes(space.bytes)
        rows.append((space.name, count, size, age(space.newest, now), age(space.oldest, now)))
    lines = [url, *columns(rows)]
    for space in spaces if blocks else ():
        rows = [("block of " + space.name, "", "bytes", "last use", "")]
        for record in _latest_first(space):
            key = record.block[SPACE_BYTES:].hex()
            rows.append((key, "", format_bytes(record.size), age(record.used, now), ""))
        lines += ["", *columns(rows)]
    return lines


def _latest_first(space: NamespaceRecords) -> list[Listed]:
    return sorted(space.records, key=lambda record: record.used, reverse=True)


# --- stat ------------------------------------------------------------------------------------


class _Sample(NamedTuple):
    """The headers of some records; how many more were bad, or of another format version."""

    headers: list[RecordHeader]
    bad: int
    other_version: int

    @property
    def codecs(self) -> dict[str, int]:
        return dict(Counter(codec_name(header.codec) for header in self.headers).most_common())

    @property
    def raw_bytes(self) -> int:
        return sum(header.raw_bytes for header in self.headers)

    @property
    def record_bytes(self) -> int:
        return sum(header.record_bytes for header in self.headers)


def stat(place: OpenTier, args: argparse.Namespace) -> CommandResult:
    """Show totals, codecs, and a histogram of ages since the last use."""
    picked = whole("--sample", args.sample, 0)
    records = place.records()
    sample = _sampled(place, records, picked)
    ages = _by_age(records)
    backend = place.backend
    answer: dict[str, object] = {
        "url": place.url,
        "namespaces": len(spaces_of(records)),
        "blocks": len(records),
        "bytes": sum(record.size for record in records),
        "used": backend.used(),
        "capacity": backend.capacity,
        "last_budget": _last_budget(place),
        "quarantined": place.quarantined,
        "odd": place.odd,
        "sample": {
            "records": len(sample.headers),
            "bad": sample.bad,
            "other_version": sample.other_version,
            "codecs": sample.codecs,
            "raw_bytes": sample.raw_bytes,
            "record_bytes": sample.record_bytes,
        },
        "ages": [
            {"within_s": limit, "blocks": len(inside), "bytes": sum(r.size for r in inside)}
            for (_, limit), inside in zip(_AGES, ages, strict=True)
        ],
    }
    return CommandResult(answer, [place.url, *_totals(answer, sample), *_histogram(ages)])


def _last_budget(place: OpenTier) -> dict[str, object] | None:
    """Return the budget of a directory in the store that opened it last; None: it is not known."""
    last = place.last_budget
    if last is None:
        return None
    return {"bytes": last.bytes, "given": last.given, "opened": last.opened}


def _last_budget_row(found: dict[str, Any]) -> tuple[str, str]:
    how = "given as size=" if found["given"] else "by default, without size="
    when = age(found["opened"])
    return "budget when last opened", f"{format_bytes(found['bytes'])} ({how}, {when} ago)"


def _sampled(place: OpenTier, records: list[Listed], count: int) -> _Sample:
    """Read ``count`` random records for their headers; a backend reads only whole records."""
    some = random.sample(records, 0 if place.is_raw else min(count, len(records)))
    headers, bad, other_version = [], 0, 0
    with bytes_progress("reading some records", of=sum(record.size for record in some)) as advance:
        for listed in some:
            try:
                record = place.backend.get(listed.block, aligned)
                headers += [] if record is None else [read_header(record)]
            except OtherVersion:
                other_version += 1
            except BadRecord:
                bad += 1
            except BackendFailed:
                place.backend.sizes([listed.block])  # raises if the whole backend fails
                bad += 1
            advance(listed.size)
    return _Sample(headers, bad, other_version)


def _by_age(records: list[Listed]) -> list[list[Listed]]:
    """Group records by the intervals of `_AGES`."""
    now = time.time()
    ages: list[list[Listed]] = [[] for _ in _AGES]
    limits = [limit for _, limit in _AGES if limit is not None]
    for record in records:
        ages[bisect_right(limits, now - record.used)].append(record)
    return ages


def _totals(answer: dict[str, object], sample: _Sample) -> list[str]:
    def amount(name: str) -> str:
        value = answer[name]
        return "unknown" if value is None else format_bytes(value)  # type: ignore[arg-type]

    rows = [
        ("namespaces", f"{answer['namespaces']:,}"),
        ("blocks", f"{answer['blocks']:,}"),
        ("bytes", amount("bytes")),
    ]
    if answer["used"] is not None:
        rows.append(("space used", amount("used")))
    rows.append(("budget", "none" if answer["capacity"] is None else amount("capacity")))
    if answer["last_budget"] is not None:
        rows.append(_last_budget_row(answer["last_budget"]))  # type: ignore[arg-type]
    if answer["quarantined"] is not None:
        rows.append(("quarantined", f"{answer['quarantined']:,}"))
    if answer["odd"]:
        rows.append(("files that are no records", f"{answer['odd']:,}"))
    lines = columns([(f"  {name}", value) for name, value in rows])
    if sample.headers:
        codecs = ", ".join(f"{name} {count}" for name, count in sample.codecs.items())
        ratio = sample.raw_bytes / sample.record_bytes
        smaller = f"; {ratio:.2f}× smaller than the KV" if ratio > 1.005 else ""
        lines.append(f"  codecs of {len(sample.headers)} records read: {codecs}{smaller}")
    if sample.other_version:
        lines.append(f"  {sample.other_version} of the records read are of another format version")
    if sample.bad:
        lines.append(f"  {sample.bad} of the records read are bad: see kvkeep store verify")
    return lines


def _histogram(ages: list[list[Listed]]) -> list[str]:
    """Return a bar for each age, as long as its share of the bytes."""
    sizes = [sum(record.size for record in inside) for inside in ages]
    if not any(sizes):
        return []
    rows = [("  since last use", "blocks", "bytes")]
    for (name, _), inside, size in zip(_AGES, ages, sizes, strict=True):
        rows.append((f"    {name}", f"{len(inside):,}", format_bytes(size)))
    bars = ["", *("█" * -(-_BAR * size // max(sizes)) for size in sizes)]
    return [f"{line}  {bar}".rstrip() for line, bar in zip(columns(rows), bars, strict=True)]
