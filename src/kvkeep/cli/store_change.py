"""``kvkeep store verify``, ``gc`` and ``rm``: what changes a tier, or may."""

from __future__ import annotations

import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import TYPE_CHECKING, Literal, NamedTuple

from kvkeep.cli.store_place import CommandResult, bar, remove, spaces_of
from kvkeep.core.errors import InvalidValue, whole
from kvkeep.core.geometry.units import format_bytes, parse_bytes, parse_seconds
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
_MOST_THREADS = 64
_FEWEST_DIGITS = 4


# --- verify ----------------------------------------------------------------------------------


class _Verdict(NamedTuple):
    """What became of one record; ``why`` where it is not sound."""

    state: Literal["sound", "gone", "other version", "bad"]
    why: str = ""


class _Verifier:
    """Reads and checks records; each thread into a buffer of its own."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._own = threading.local()

    def __call__(self, listed: Listed) -> _Verdict:
        try:
            record = self._backend.get(listed.block, self._room)
        except (OSError, MemoryError) as error:
            self._backend.sizes([listed.block])  # raises where it is not the record that fails
            return _Verdict("bad", f"it cannot be read: {error}")
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
    """Read everything and check it."""
    threads = whole("--threads", args.threads, 1, _MOST_THREADS)
    records = place.records()
    counts = dict.fromkeys(("sound", "gone", "other version", "bad"), 0)
    bad: list[dict[str, object]] = []
    check = _Verifier(place.backend)
    with closing(_verdicts(check, records, threads)) as verdicts:
        for listed, verdict in verdicts:
            counts[verdict.state] += 1
            if verdict.state != "bad":
                continue
            # Again: somebody may have put a sound one in its place since.
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
        lines.append(f"  files that lie among the records and are none: {place.odd:,}")
    return CommandResult(answer, lines, _BAD if bad else 0)


def _verdicts(
    check: _Verifier, records: Sequence[Listed], threads: int
) -> Generator[tuple[Listed, _Verdict], None, None]:
    """Each record with its verdict, in order, while a bar shows how far that is."""
    pool = ThreadPoolExecutor(threads, "kvkeep verify")
    try:
        with bar("verifying", of=sum(record.size for record in records)) as advance:
            for listed, verdict in zip(records, pool.map(check, records), strict=True):
                advance(listed.size)
                yield listed, verdict
    finally:
        pool.shutdown(cancel_futures=True)  # interrupted, it does not read what nobody waits for


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
        lines.append("  --repair quarantines what is bad; whoever reads it finds it bad anyway")
    return lines


# --- gc --------------------------------------------------------------------------------------


def gc(place: OpenTier, args: argparse.Namespace) -> CommandResult:
    """Remove what is too old, then the least recently used of what is too much.

    What killed writers left behind went when the place was opened, as it does each time.
    """
    older = None if args.older is None else parse_seconds(args.older)
    budget = place.backend.capacity if args.size is None else parse_bytes(args.size)
    records = sorted(place.records(), key=lambda record: record.used)
    going = _going(records, older, budget)
    size = sum(record.size for record in going)
    freed = 0 if args.dry_run else remove(place, going)
    kept = sum(record.size for record in records) - size
    answer: dict[str, object] = {
        "url": place.url,
        "blocks": len(going),
        "bytes": size,
        "freed": freed,
        "kept_blocks": len(records) - len(going),
        "kept_bytes": kept,
        "dry_run": args.dry_run,
    }
    done = "would remove" if args.dry_run else "removed"
    left = f"{len(records) - len(going):,} blocks, {format_bytes(kept)}, stay"
    return CommandResult(
        answer, [f"{place.url}: {done} {len(going):,} blocks, {format_bytes(size)}; {left}"]
    )


def _going(records: list[Listed], older: float | None, budget: int | None) -> list[Listed]:
    """What has to go of ``records``, which are in order of their last use."""
    before = float("-inf") if older is None else time.time() - older
    excess = 0 if budget is None else sum(record.size for record in records) - budget
    going = []
    for record in records:
        if record.used >= before and excess <= 0:
            break
        going.append(record)
        excess -= record.size
    return going


# --- rm --------------------------------------------------------------------------------------


def rm(place: OpenTier, args: argparse.Namespace) -> CommandResult:
    """Remove a namespace, or everything, after asking."""
    if not args.yes and (args.json or not sys.stdin.isatty()):
        raise InvalidValue("nobody can be asked here; add --yes to remove without asking")
    records = place.records()
    name, going = (
        ("everything", records) if args.all else _namespace(place.url, records, args.space)
    )
    size = sum(record.size for record in going)
    what = f"{name} of {place.url}: {len(going):,} blocks, {format_bytes(size)}"
    answer: dict[str, object] = {"url": place.url, "space": None if args.all else name}
    if going and not args.yes and not _agreed(f"Remove {what}?"):
        return CommandResult(
            {**answer, "blocks": 0, "bytes": 0}, ["nothing was removed"], _DECLINED
        )
    freed = remove(place, going)
    return CommandResult({**answer, "blocks": len(going), "bytes": freed}, [f"removed {what}"])


def _namespace(url: str, records: list[Listed], text: str) -> tuple[str, list[Listed]]:
    """The namespace that begins with the digits ``text``, and its records."""
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
