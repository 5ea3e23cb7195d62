"""`ShmBackend`: records in memory that all processes of a user on a node share."""

from __future__ import annotations

import os
import threading
import time
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from kvkeep.core.errors import BackendFailed, IllegalStep, InvalidValue, OutOfRoom
from kvkeep.core.geometry.units import format_bytes, parse_bytes
from kvkeep.core.keys import BLOCK_ID_BYTES, SPACE_BYTES
from kvkeep.store.backends.base import ALIGNMENT, Listed, OverQuota
from kvkeep.store.backends.memory import InPlaceBackend, Lease
from kvkeep.store.backends.shm import segment as at
from kvkeep.store.backends.shm.lock import SLOTS
from kvkeep.store.backends.shm.rows import AT_ONCE, ArenaRows, extent, from_unix, now, to_unix
from kvkeep.store.backends.shm.segment import Layout, Warming, check_name, open_arena, path_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from kvkeep.store.backends.shm.rows import Hold
    from kvkeep.store.backends.urls import TierURL

__all__ = ["ShmBackend"]

_LOCK_TIMEOUT: Final = 2.0
_FRUITLESS: Final = 16  # choices of victims in a row that others used or took meanwhile
_LEAST_CHOSEN: Final = 64
_SHARE_CHOSEN: Final = 16  # of the records are chosen at once
_MOST_CHOICES: Final = 64  # namespaces whose choices are kept
_FRESH: Final = 1.0  # seconds after which a choice is made anew


class Victim(NamedTuple):
    """A record as it was when it was chosen."""

    row: int
    generation: int
    used: int


class ShmBackend(InPlaceBackend):
    """Records in one arena in shared memory, a file that every process of a node maps.

    Beyond the contract it avoids copies, as `MemoryBackend` does: `reserve` returns memory to write
    a record into, `lease` access to a record in place. A record takes its size, rounded up to
    4 KiB, of ``capacity``.

    What is published survives `kill -9` of any process: see `kvkeep.store.backends.shm.rows`. A
    lease keeps its memory from reuse, in all processes, until its release or the death of its
    process. All processes share budget, recency, eviction, pins and quotas.

    Thread safety: all methods. Cost: about 10 µs for a lease with its release, or a draft with its
    commit, while no other process holds the lock; about 2 and 4 µs for each of many at once
    (`lease_all`, `reserve_all`). A forked process cannot use it: open it again.
    """

    scheme = "shm"
    shared = True
    unit = ALIGNMENT

    def __init__(
        self,
        size: int | None,
        *,
        name: str = "kvkeep",
        directory: str = "/dev/shm",  # noqa: S108 - checked for owner, mode and kind
        records: int | None = None,
        touch: bool = False,
        timeout: float = _LOCK_TIMEOUT,
    ) -> None:
        """Open the arena ``name`` of this user, or create it with ``size`` bytes.

        Arguments:
            size: bytes for records, 4096 at least; None: open an arena that exists. One that exists
                keeps its size, and a warning has both.
            directory: where its file is; memory in a file system, such as ``/dev/shm``.
            records: most records that it can have; by default one per 64 KiB of ``size``.
            touch: wait until this process has mapped all memory, instead of doing so meanwhile.
            timeout: seconds to wait for the lock of the node.

        Raises:
            InvalidValue: see `open_arena`.
            BackendFailed: the system failed.
        """
        self.path = path_of(directory, name)
        self.timeout = timeout
        self._closed = False
        wanted = None if size is None else Layout.of(size, records)
        self._choosing = threading.Lock()  # of `_choices`
        self._choices: dict[bytes | None, tuple[float, Iterator[Victim]]] = {}
        opened = open_arena(self.path, wanted, timeout)
        try:
            try:
                self._rows = ArenaRows(opened, self.path)
                if opened.new:
                    os.pwrite(opened.fd, opened.layout.header(), 0)
            finally:
                os.close(opened.fd)
                opened.lock.release()
        except BaseException:
            opened.lock.close()
            raise
        self.capacity: int = opened.layout.data_bytes
        self._warming = Warming(self._rows.memory)
        if touch:
            self._warming.wait()

    @classmethod
    def from_url(cls, url: TierURL) -> ShmBackend:
        """``shm://64GiB``; takes ``name`` and ``dir``."""
        return cls(**cls._options(url))

    @classmethod
    def check_url(cls, url: TierURL) -> bool:
        """Check ``url`` without opening or creating the arena."""
        asked = cls._options(url)
        check_name(asked["name"])
        if asked["size"] is not None:
            Layout.of(asked["size"], None)
        return True

    @staticmethod
    def _options(url: TierURL) -> dict[str, Any]:
        """Return the arguments of the constructor."""
        size = url.size("size")
        if url.path.strip("/") or (url.place and size is not None):
            raise InvalidValue(f"{url.safe} must give its size once, as in shm://64GiB")
        if url.place:
            size = parse_bytes(url.place)
        return {
            "size": size,
            "name": url.text("name", "kvkeep"),
            "directory": url.text("dir", "/dev/shm"),  # noqa: S108 - see `__init__`
        }

    # -- access in place --------------------------------------------------------------------------

    def reserve_all(self, blocks: Sequence[bytes], sizes: Sequence[int]) -> list[Lease]:
        """64 at most, of one namespace, under one lock.

        A draft counts as free again if this process dies. There is no room either if the arena has
        as many records as it can.

        Raises:
            OverQuota: so many bytes would exceed the quota of the namespace.
        """
        self._check_open()
        for block in blocks:
            if len(block) != BLOCK_ID_BYTES:
                raise InvalidValue(f"a block id has {BLOCK_ID_BYTES} bytes, got {len(block)}")
        blocks, sizes, rows = blocks[:AT_ONCE], sizes[:AT_ONCE], self._rows
        space = blocks[0][:SPACE_BYTES]
        holds: list[Hold] = []
        try:
            with rows:
                if over := rows.over_quota(space, sum(sizes)):
                    raise OverQuota(over, self.describe())
                enough = len(blocks) <= rows.unused()
                offset = rows.allocate(sum(map(extent, sizes))) if enough else -1
                if offset >= 0:
                    holds += rows.draft(blocks, sizes, offset)
                else:
                    for block, size in zip(blocks, sizes, strict=True):
                        offset = self._room(extent(size), must=not holds)
                        if offset < 0:
                            break
                        holds += rows.draft([block], [size], offset)
        except BackendFailed:
            rows.release(holds)
            raise
        return [
            Lease(self, block, rows.view(hold[0]), hold, pending=True)
            for block, hold in zip(blocks, holds, strict=False)
        ]

    def _room(self, length: int, *, must: bool) -> int:
        """Allocate ``length`` bytes for a row, under the lock; -1 if that fails and need not be."""
        rows = self._rows
        for attempt in range(2):
            offset = rows.allocate(length) if rows.unused() else -1
            if offset >= 0 or not must or attempt or not rows.reap():
                break
        if offset < 0 and must:
            free = rows.words[at.FREE_BYTES]
            short = free < length <= self.capacity
            raise OutOfRoom(length - free if short else length, self.describe())
        return offset

    def lease_all(self, blocks: Sequence[bytes]) -> list[Lease]:
        """`lease` leading ``blocks``, up to the first that is missing. Cost: a lock for 64."""
        there = self.find_all(blocks)
        holds = self.hold_all(blocks[: there.index(None) if None in there else len(there)])
        if None in holds:  # it was deleted meanwhile
            end = holds.index(None)
            self.release_holds([hold for hold in holds[end:] if hold is not None])
            holds = holds[:end]
        return [
            Lease(self, block, self._rows.view(hold[0]), hold)
            for block, hold in zip(blocks, holds, strict=False)
            if hold is not None
        ]

    def contains(self, block: bytes) -> bool:
        """Whether ``block`` has a record."""
        return self.find_all([block])[0] is not None

    def commit_all(self, drafts: Sequence[Lease], *, release: bool = False) -> None:
        """Cost: a lock for 64."""
        if not all(draft.pending and draft.hold is not None for draft in drafts):
            raise IllegalStep("this draft was committed or released before")
        rows = self._rows
        try:
            self._check_open()
            for start in range(0, len(drafts), AT_ONCE):
                with rows:
                    for draft in drafts[start : start + AT_ONCE]:
                        rows.name(draft.hold)
                        draft.pending = False
                        if release:
                            rows.end_hold(draft.hold)
                            draft.hold = None
        except BackendFailed:
            self.release_all(drafts)
            raise

    def release_all(self, leases: Sequence[Lease]) -> None:
        """Cost: a lock for 64."""
        holds = [lease.hold for lease in leases if lease.hold is not None]
        for lease in leases:
            lease.hold = None
        if holds:
            self._rows.release(holds)

    # -- the contract -----------------------------------------------------------------------------

    def sizes(self, blocks: Sequence[bytes]) -> list[int | None]:
        """Return the sizes in bytes, as they were put."""
        size = self._rows.size
        return [None if there is None else size[there[0]] for there in self.find_all(blocks)]

    def delete(self, blocks: Sequence[bytes]) -> int:
        """Delete records; return their sizes in bytes, also of those that stay leased.

        Raises:
            BackendFailed: the lock cannot be had. The records are hidden from this process, and
                deleted as soon as it works: their owner may write others in their place.
        """
        self._check_open()
        deleted, rows = 0, self._rows
        for start in range(0, len(blocks), AT_ONCE):
            try:
                with rows:
                    for block in blocks[start : start + AT_ONCE]:
                        there = rows.find(block)
                        if there is not None:
                            deleted += rows.size[there[0]]
                            rows.unname(there[0])
            except BackendFailed:
                rows.hide(blocks[start:])
                raise
        return deleted

    def touch(self, blocks: Sequence[bytes], used: Sequence[float] | None = None) -> None:
        """Record the times of use, for all processes. Takes no lock.

        A row that was reused meanwhile gets the time of another record, which does no harm.
        """
        stamps: Iterable[int] = range(now(), now() + len(blocks))
        if used is not None:
            stamps = map(from_unix, used)
        times = self._rows.used
        for there, stamp in zip(self.find_all(blocks), stamps, strict=False):
            if there is not None and times[there[0]] < stamp:
                times[there[0]] = stamp

    def used(self) -> int:
        """Return the bytes of records, of drafts, and of deleted records that are still leased."""
        return self.capacity - self._rows.words[at.FREE_BYTES]

    def close(self) -> None:
        """Leave the arena; its records stay. Leases keep their memory until their release."""
        if not self._closed:
            self._closed = True
            self._warming.stop()
            self._rows.close()

    def describe(self) -> str:
        """Return a URL of the same arena."""
        size = format_bytes(self.capacity).replace(" ", "")
        name = os.path.basename(self.path).partition("-")[2].partition("-")[2]
        return f"shm://{size}?name={name}"

    def __len__(self) -> int:
        return self._rows.words[at.RECORDS]

    # -- for the tier above: holds and eviction ---------------------------------------------------

    def find_all(self, blocks: Sequence[bytes]) -> list[Hold | None]:
        """Return row and generation of the record of each block, None if there is none.

        Takes no lock. Cost: about 0.2 µs a block.
        """
        self._check_open()
        return self._rows.find_all(blocks)

    def hold_all(self, blocks: Sequence[bytes]) -> list[Hold | None]:
        """Keep the records of ``blocks`` from eviction; None for a block that has none.

        Raises:
            BackendFailed: the lock cannot be had; nothing is held.
        """
        self._check_open()
        return self._rows.hold_all(blocks)

    def release_holds(self, holds: Sequence[Hold]) -> None:
        """End ``holds``, each of them once; later, if the lock cannot be had now."""
        self._rows.release(holds)

    def evict(
        self, needed: int, space: bytes | None = None, *, leave: bool = False
    ) -> list[tuple[bytes, Hold]]:
        """Delete the least recently used records of ``needed`` bytes; return their blocks.

        Fewer if no more may go: others are held or pinned. With ``leave`` they stay, held and
        counted as leaving, until `end_leaving`. If ``space`` is given, records of that namespace
        alone.

        Raises:
            BackendFailed: the lock cannot be had, and no record went before.
        """
        gone: list[tuple[bytes, Hold]] = []
        fruitless, rows = 0, self._rows
        try:
            while needed > 0 and fruitless < _FRUITLESS:
                before = len(gone)
                with self._choosing:  # the pass over the rows is made without the lock of the node
                    chosen = self._victims(needed, space)
                with rows:
                    if not chosen:
                        if rows.reap():
                            continue
                        break
                    time_now = now()
                    for victim in chosen:
                        if needed > 0 and self._may_go(victim, time_now):
                            needed -= rows.length[victim.row]
                            gone.append((rows.id_of(victim.row), victim[:2]))
                            if leave:
                                rows.hold(victim[:2])
                                rows.words[rows.leaving_at] += rows.length[victim.row]
                            else:
                                rows.unname(victim.row)
                fruitless = 0 if len(gone) > before else fruitless + 1
        except BackendFailed:
            if not gone:
                raise
        return gone

    def end_leaving(self, hold: Hold) -> bool:
        """Delete a record that `evict` let leave, unless it was replaced; return whether it is.

        If the lock cannot be had now, that is done as soon as it can.
        """
        there: bool = self._rows.named[hold[0]] == hold[1]
        self._rows.release([hold], leaving=True)
        return there

    @property
    def leaving_bytes(self) -> int:
        """Bytes of the records that any process is demoting."""
        return int(np.sum(self._rows.words[at.LEAVING_AT : at.LEAVING_AT + SLOTS]))

    def _victims(self, needed: int, space: bytes | None) -> list[Victim]:
        """Return the next victims of a namespace, or of all, in the order of their last use.

        A pass over the rows chooses the oldest sixteenth of the records, so a victim costs about
        sixteen rows' share of a pass, whatever the arena holds. Uses after that are noticed: the
        record has another time of use then and is no longer a victim, and all others are younger
        than those chosen. So the order is that of one list, without a list that each use would have
        to change under the lock.
        """
        victims: list[Victim] = []
        for _ in range(2):
            made, choice = self._choices.pop(space, (float("-inf"), iter(())))
            if time.monotonic() - made > _FRESH:
                made, choice = time.monotonic(), self._choose(space)
            for victim in choice:
                victims.append(victim)
                needed -= self._rows.length[victim.row]
                if needed <= 0 or len(victims) == AT_ONCE:
                    break
            if victims:
                self._choices[space] = made, choice
                while len(self._choices) > _MOST_CHOICES:
                    del self._choices[next(iter(self._choices))]
                break
        return victims

    def _choose(self, space: bytes | None) -> Iterator[Victim]:
        rows, high = self._rows, self._rows.words[at.HIGH]
        named, used, pinned = (np.array(one[:high]) for one in (rows.named, rows.used, rows.pinned))
        fit = (named != 0) & (pinned <= now()) & ~rows.held(high)
        if space is not None:
            fit &= rows.in_space(space, high)
        chosen = np.flatnonzero(fit)
        many = max(_LEAST_CHOSEN, len(chosen) // _SHARE_CHOSEN)
        if many < len(chosen):
            chosen = chosen[np.argpartition(used[chosen], many)[:many]]
        chosen = chosen[np.argsort(used[chosen], kind="stable")]
        columns = (chosen.tolist(), named[chosen].tolist(), used[chosen].tolist())
        return map(Victim, *columns)

    def _may_go(self, victim: Victim, time_now: int) -> bool:
        """Whether a record is as it was when it was chosen, under the lock."""
        rows, row = self._rows, victim.row
        same = rows.named[row] == victim.generation and rows.used[row] == victim.used
        return same and rows.pinned[row] <= time_now and not rows.is_held(row)

    # -- for the tier above: uses, pins and quotas of all processes -------------------------------

    def used_at(self, record: Hold) -> float:
        """Return when the record was used last, in Unix seconds."""
        return to_unix(self._rows.used[record[0]])

    def pinned_until(self, record: Hold) -> float:
        """Return when the pin of the record ends or ended, in Unix seconds."""
        return to_unix(self._rows.pinned[record[0]])

    def pin(self, blocks: Sequence[bytes], until: float, most: int) -> list[bytes]:
        """Pin ``blocks`` in order until then, while pins cover ``most`` bytes at most.

        ``until`` is in Unix seconds. Pins outlive the process. Returns the blocks that are pinned.
        Cost: a pass over the rows, besides the blocks.
        """
        self._check_open()
        pinned: list[bytes] = []
        rows, end = self._rows, from_unix(until)
        with rows:
            time_now, covered = now(), self.pinned_bytes
            for block in blocks:
                there = rows.find(block)
                if there is None:
                    continue
                row = there[0]
                if rows.pinned[row] <= time_now:
                    if covered + rows.size[row] > most:
                        break
                    covered += rows.size[row]
                rows.pinned[row] = max(rows.pinned[row], end)
                pinned.append(block)
        return pinned

    def end_pins(self, ends: Mapping[bytes, float]) -> list[bytes]:
        """Let pins end at these Unix times, 0: now; return the blocks that were pinned."""
        self._check_open()
        were: list[bytes] = []
        rows = self._rows
        with rows:
            time_now = now()
            for block, end in ends.items():
                there = rows.find(block)
                if there is not None and rows.pinned[there[0]] > time_now:
                    rows.pinned[there[0]] = from_unix(end) if end else 0
                    were.append(block)
        return were

    @property
    def pinned_bytes(self) -> int:
        """Bytes that are pinned now. Cost: a pass over the rows."""
        rows, high = self._rows, self._rows.words[at.HIGH]
        pinned = np.asarray(rows.pinned)[:high] > now()
        pinned &= np.asarray(rows.named)[:high] != 0
        return int(np.asarray(rows.size)[:high][pinned].sum())

    def set_quota(self, space: bytes, limit: int) -> None:
        """Limit a namespace to ``limit`` bytes, for all processes."""
        with self._rows:
            self._rows.set_quota(space, limit)

    def over_quota(self, space: bytes, more: int) -> int:
        """Return the bytes to evict from a namespace before ``more`` are added; -1: never fits."""
        return self._rows.over_quota(space, more)

    def claim(self, *, raw: bool) -> None:
        """State what this store puts here: raw KV (it is in front), or records with headers.

        An arena has one kind, for one would be read wrongly as the other; an empty one takes any.

        Raises:
            InvalidValue: it has records of the other kind.
            BackendFailed: the lock cannot be had.
        """
        kind, words = at.RAW if raw else at.SEALED, self._rows.words
        with self._rows:
            if words[at.KIND] not in (kind, at.UNDECIDED) and words[at.FREE_BYTES] < self.capacity:
                there, here = (
                    ("in front", "a lower tier") if not raw else ("a lower tier", "in front")
                )
                raise InvalidValue(
                    f"{self.path} is {there} of other stores, so it cannot be {here} of this one, "
                    "which would take its records for others: use another name="
                )
            words[at.KIND] = kind

    @property
    def is_raw(self) -> bool:
        """Whether the records are raw KV without headers and checksums."""
        return self._rows.words[at.KIND] == at.RAW

    @property
    def region(self) -> memoryview:
        """The memory of all records, for callers that pin it."""
        return self._rows.data

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    @property
    def repairs(self) -> int:
        """How often any process counted anew: at each first opening, and after a crash."""
        return self._rows.words[at.REPAIRS]

    @property
    def lost(self) -> int:
        """How many published records were dropped, because they were damaged."""
        return self._rows.words[at.LOST]

    def warmed(self, timeout: float | None = None) -> bool:
        """Wait until this process has mapped all memory; return whether it has."""
        return self._warming.wait(timeout)

    def check(self) -> None:
        """Assert that the rows agree with each other; all processes wait meanwhile."""
        with self._rows:
            self._rows.check()

    def _check_open(self) -> None:
        if self._closed:
            raise BackendFailed(f"{self.describe()} is closed")
        if self._rows.lock.inherited:  # its parent's leases protect nothing here
            raise BackendFailed(
                f"{self.describe()} is opened by the parent of this process; open it here"
            )

    # The last, for the name hides the type.

    def list(self) -> Iterator[Listed]:
        """Yield the records that exist now and still exist at their turn."""
        self._check_open()
        rows = self._rows
        named = np.array(rows.named[: rows.words[at.HIGH]])  # a copy: others change the column
        for row in np.flatnonzero(named).tolist():
            item = Listed(rows.id_of(row), rows.size[row], to_unix(rows.used[row]))
            if rows.named[row] == named[row]:  # else it changed meanwhile
                yield item
