"""The actions of ``kvkeep store``: ``ls``, which only reads; ``verify``, ``gc`` and ``rm``."""

from __future__ import annotations

import os
import random
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

from kvkeep.cli.tables import bytes_progress
from kvkeep.core.errors import BackendFailed, InvalidValue, reason
from kvkeep.core.geometry.units import format_bytes
from kvkeep.core.keys import SPACE_BYTES
from kvkeep.store.backends import TierURL
from kvkeep.store.backends.buffers import aligned
from kvkeep.store.backends.disk import DiskBackend
from kvkeep.store.codecs import codec_name
from kvkeep.store.tiers import TIER_OPTIONS, open_backend
from kvkeep.store.tiers.record import BadRecord, OtherVersion, read_header
from kvkeep.store.tiers.record import verify as verify_record

if TYPE_CHECKING:
    import argparse
    from collections.abc import Generator, Iterable, Iterator, Sequence

    from kvkeep.store.backends import Backend, Listed
    from kvkeep.store.backends.disk import LastBudget

__all__ = [
    "CommandResult",
    "NamespaceRecords",
    "OpenTier",
    "age",
    "columns",
    "gc",
    "ls",
    "opened",
    "remove",
    "rm",
    "spaces_of",
    "verify",
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


_BAD = 1
_DECLINED = 1
_THREADS = 4
_FEWEST_DIGITS = 4


# --- verify ----------------------------------------------------------------------------------


class _Verdict(NamedTuple):
    """The state of one record; ``why`` if it is not sound."""

    state: Literal["sound", "gone", "other version", "bad"]
    why: str = ""


class _Verifier:
    """Reads and checks records. Thread-safe: each thread has its own buffer."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._own = threading.local()

    def __call__(self, listed: Listed) -> _Verdict:
        try:
            record = self._backend.get(listed.block, self._room)
        except (OSError, MemoryError) as error:
            self._backend.sizes([listed.block])  # raises if the whole backend fails
            return _Verdict("bad", f"it cannot be read: {reason(error)}")
        if record is None:
            return _Verdict("gone")
        try:
            verify_record(record, listed.block)
        except OtherVersion as error:
            return _Verdict("other version", str(error))
        except BadRecord as error:
            return _Verdict("bad", str(error))
        return _Verdict("sound")

    def _room(self, size: int) -> memoryview:
        buffer: memoryview | None = getattr(self._own, "buffer", None)
        if buffer is None or buffer.nbytes < size:
            buffer = self._own.buffer = aligned(size)
        return buffer[:size]


def verify(place: OpenTier, args: argparse.Namespace) -> CommandResult:
    """Read and check every record; with ``--repair``, quarantine damaged ones."""
    if place.is_raw:
        raise InvalidValue(
            f"{place.url} is memory in front of tiers: its records have no checksums to verify"
        )
    records = place.records()
    counts = dict.fromkeys(("sound", "gone", "other version", "bad"), 0)
    bad: list[dict[str, object]] = []
    check = _Verifier(place.backend)
    with closing(_verdicts(check, records)) as verdicts:
        for listed, verdict in verdicts:
            counts[verdict.state] += 1
            if verdict.state != "bad":
                continue
            # Check again: a writer may have replaced the record since.
            repaired = args.repair and check(listed).state == "bad"
            if repaired:
                place.backend.quarantine(listed.block, verdict.why)
            bad.append({"block": listed.block.hex(), "why": verdict.why, "quarantined": repaired})
    answer: dict[str, object] = {
        "url": place.url,
        "blocks": len(records),
        "bytes": sum(record.size for record in records),
        **{state.replace(" ", "_"): count for state, count in counts.items()},
        "odd": place.odd,
        "found": bad,
    }
    lines = _findings(place.url, records, counts, bad)
    if place.odd:
        lines.append(f"  other files among the records: {place.odd:,}")
    return CommandResult(answer, lines, _BAD if bad else 0)


def _verdicts(
    check: _Verifier, records: Sequence[Listed]
) -> Generator[tuple[Listed, _Verdict], None, None]:
    """Yield each record with its verdict, in order, behind a progress bar."""
    pool = ThreadPoolExecutor(_THREADS, "kvkeep verify")
    try:
        with bytes_progress("verifying", of=sum(record.size for record in records)) as advance:
            for listed, verdict in zip(records, pool.map(check, records), strict=True):
                advance(listed.size)
                yield listed, verdict
    finally:
        pool.shutdown(cancel_futures=True)  # if interrupted, read no more records


def _findings(
    url: str, records: Sequence[Listed], counts: dict[str, int], bad: list[dict[str, object]]
) -> list[str]:
    size = format_bytes(sum(record.size for record in records))
    lines = [f"{url}: {len(records):,} blocks, {size}: {counts['sound']:,} sound"]
    if counts["gone"]:
        lines[0] += f", {counts['gone']:,} removed meanwhile"
    if counts["other version"]:
        lines[0] += f", {counts['other version']:,} of another format version"
    lines[0] += f", {len(bad):,} bad"
    lines += [
        f"  {one['block']}: {one['why']}" + " (quarantined)" * bool(one["quarantined"])
        for one in bad
    ]
    if not all(one["quarantined"] for one in bad):
        lines.append("  --repair quarantines bad records; reading one is a miss in any case")
    return lines


# --- gc --------------------------------------------------------------------------------------


def gc(place: OpenTier, args: argparse.Namespace) -> CommandResult:
    """Remove blocks that are too old, then the least recently used ones above the budget.

    Files that killed writers left behind are removed when the tier is opened.
    """
    older: float | None = args.older
    budget = place.backend.capacity if args.size is None else args.size
    records = sorted(place.records(), key=lambda record: record.used)
    victims = _victims(records, older, budget)
    size = sum(record.size for record in victims)
    freed = 0 if args.dry_run else remove(place, victims)
    kept = sum(record.size for record in records) - size
    answer: dict[str, object] = {
        "url": place.url,
        "blocks": len(victims),
        "bytes": size,
        "freed": freed,
        "kept_blocks": len(records) - len(victims),
        "kept_bytes": kept,
        "dry_run": args.dry_run,
    }
    done = "would remove" if args.dry_run else "removed"
    left = f"{len(records) - len(victims):,} blocks, {format_bytes(kept)}, are kept"
    return CommandResult(
        answer, [f"{place.url}: {done} {len(victims):,} blocks, {format_bytes(size)}; {left}"]
    )


def _victims(records: list[Listed], older: float | None, budget: int | None) -> list[Listed]:
    """Return the records to remove of ``records``, which are sorted by their last use."""
    before = float("-inf") if older is None else time.time() - older
    excess = 0 if budget is None else sum(record.size for record in records) - budget
    victims = []
    for record in records:
        if record.used >= before and excess <= 0:
            break
        victims.append(record)
        excess -= record.size
    return victims


# --- rm --------------------------------------------------------------------------------------


def rm(place: OpenTier, args: argparse.Namespace) -> CommandResult:
    """Remove a namespace or all blocks, after confirmation."""
    if not args.yes and (args.json or not sys.stdin.isatty()):
        raise InvalidValue(
            "stdin is no terminal to confirm on; add --yes to remove without confirmation"
        )
    records = place.records()
    name, victims = (
        ("everything", records) if args.all else _namespace(place.url, records, args.space)
    )
    size = sum(record.size for record in victims)
    what = f"{name} of {place.url}: {len(victims):,} blocks, {format_bytes(size)}"
    answer: dict[str, object] = {"url": place.url, "space": None if args.all else name}
    if victims and not args.yes and not _agreed(f"Remove {what}?"):
        return CommandResult(
            {**answer, "blocks": 0, "bytes": 0}, ["nothing was removed"], _DECLINED
        )
    freed = remove(place, victims)
    return CommandResult({**answer, "blocks": len(victims), "bytes": freed}, [f"removed {what}"])


def _namespace(url: str, records: list[Listed], text: str) -> tuple[str, list[Listed]]:
    """Return the namespace whose name begins with ``text``, and its records."""
    if len(text) < _FEWEST_DIGITS or set(text) - set("0123456789abcdefABCDEF"):
        raise InvalidValue(
            f"--space is {text!r}; at least {_FEWEST_DIGITS} hexadecimal digits are needed"
        )
    found = [space for space in spaces_of(records) if space.name.startswith(text.lower())]
    if len(found) != 1:
        there = f"{len(found)} namespaces that begin" if found else "no namespace that begins"
        raise InvalidValue(f"{url} has {there} with {text}; see kvkeep store ls")
    return found[0].name, found[0].records


def _agreed(question: str) -> bool:
    print(f"{question} [y/N] ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in {"y", "yes"}


_SAMPLE = 32  # records to read for their codecs


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
        "quarantined": place.quarantined,
        "odd": place.odd,
        "codecs": codecs,
        "spaces": [_as_json(space, blocks=args.blocks) for space in spaces],
    }
    return CommandResult(answer, [*_table(place, spaces, args.blocks), *_facts(place, codecs)])


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
