"""``kvkeep store verify``, ``gc`` and ``rm``, which can change a tier."""

from __future__ import annotations

import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import TYPE_CHECKING, Literal, NamedTuple

from kvkeep.cli.progress import bytes_progress
from kvkeep.cli.store_place import CommandResult, remove, spaces_of
from kvkeep.core.errors import InvalidValue, reason
from kvkeep.core.geometry.units import format_bytes
from kvkeep.store.backends.buffers import aligned
from kvkeep.store.tiers.record import BadRecord, OtherVersion
from kvkeep.store.tiers.record import verify as verify_record

if TYPE_CHECKING:
    import argparse
    from collections.abc import Generator, Sequence

    from kvkeep.cli.store_place import OpenTier
    from kvkeep.store.backends import Backend, Listed

__all__ = ["gc", "rm", "verify"]

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
